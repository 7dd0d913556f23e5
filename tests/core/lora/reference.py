"""The authority for adapters: peft on transformers' model; and, for what peft cannot put them on (stacked experts, an A
that several layers share), a few lines that add scale * B A to its weights.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.support.reference import RECIPE as FULL_RECIPE
from tests.support.reference import Trace, collate
from tests.training.rows import GLOBAL_BATCH, Sample

RANK, ALPHA = 4, 6.0
# Gradients of a single matrix of adapters are about 1e-5: Adam would blow up the rounding of those near its epsilon.
RECIPE = {**FULL_RECIPE, "eps": 1e-4}
MODULES = {
    "linear_q": ("self_attn.q_proj",),
    "linear_k": ("self_attn.k_proj",),
    "linear_v": ("self_attn.v_proj",),
    "linear_qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "linear_proj": ("self_attn.o_proj",),
    "linear_fc1_gate": ("gate_proj",),
    "linear_fc1_up": ("up_proj",),
    "linear_fc1": ("gate_proj", "up_proj"),
    "linear_fc2": ("down_proj",),
}
"""Target -> the Hugging Face modules that it means, the first of which has the A that they share."""


def load(folder: Path) -> PreTrainedModel:
    """The model in fp32."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, experts_implementation="eager")
    model.config.use_cache = False
    return model


def make_adapter(folder: Path, to: Path, targets: Iterable[str], *, seed: int = 5) -> Path:
    """Write an adapter of random numbers in PEFT's files, also for experts."""
    model, generator = load(folder), torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    for target in targets:
        for shared in _places(model, target):
            a = torch.randn(RANK, _shape(model, shared[0])[1], generator=generator) * 0.1
            for module in shared:
                rows = _shape(model, module)[0]
                tensors[f"base_model.model.{module}.lora_A.weight"] = a.clone()
                tensors[f"base_model.model.{module}.lora_B.weight"] = torch.randn(rows, RANK, generator=generator) * 0.1
    to.mkdir(parents=True)
    save_file(tensors, to / "adapter_model.safetensors")
    names = sorted({name.split(".lora_")[0].rpartition(".")[2] for name in tensors})
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": ALPHA, "target_modules": names}
    (to / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": str(folder)}))
    return to


def with_peft(folder: Path, adapter: Path) -> Any:
    """Transformers' model with the adapter as peft loads it."""
    from peft import PeftModel

    return PeftModel.from_pretrained(load(folder), adapter, is_trainable=True)


class Added(nn.Module):
    """Transformers' model whose weights are W + alpha / r * B A."""

    def __init__(self, folder: Path, adapter: Mapping[str, Tensor], targets: Iterable[str]) -> None:
        super().__init__()
        self.model = load(folder).requires_grad_(False)
        self.halves: dict[str, tuple[nn.Parameter, nn.Parameter]] = {}
        for target in targets:
            for shared in _places(self.model, target):
                a = nn.Parameter(adapter[f"{shared[0]}.lora_A.weight"].clone())
                for module in shared:
                    self.halves[module] = (a, nn.Parameter(adapter[f"{module}.lora_B.weight"].clone()))
        self.kept = nn.ParameterList(self.trained().values())

    def trained(self) -> dict[str, nn.Parameter]:
        """By the names of PEFT; an A that is shared by the first that has it."""
        found: dict[int, tuple[str, nn.Parameter]] = {}
        for module, (a, b) in self.halves.items():
            found.setdefault(id(a), (f"{module}.lora_A.weight", a))
            found[id(b)] = (f"{module}.lora_B.weight", b)
        return dict(found.values())

    def forward(self, input_ids: Tensor, **inputs: Any) -> Any:
        """As the model."""
        weights: dict[str, Tensor] = dict(self.model.named_parameters())
        stacks: dict[str, list[Tensor]] = {}
        for module, (a, b) in self.halves.items():
            added = ALPHA / RANK * b @ a
            if ".experts." not in module:
                weights[f"{module}.weight"] = weights[f"{module}.weight"] + added
                continue
            front, number, leaf = module.rsplit(".", 2)
            name = f"{front}.{'down_proj' if leaf == 'down_proj' else 'gate_up_proj'}"
            stack = stacks.setdefault(name, list(weights[name].unbind()))
            own, half = stack[int(number)], weights[name].shape[1] // 2
            whole = added if leaf == "down_proj" else torch.zeros_like(own)
            if leaf != "down_proj":
                top = slice(0, half) if leaf == "gate_proj" else slice(half, None)
                whole = torch.cat([added, whole[half:]]) if top.start == 0 else torch.cat([whole[:half], added])
            stack[int(number)] = own + whole
        weights |= {name: torch.stack(stack) for name, stack in stacks.items()}
        return torch.func.functional_call(self.model, weights, (input_ids,), inputs)


def train(model: Any, trained: Mapping[str, nn.Parameter], samples: Sequence[Sample], *, steps: int) -> Trace:
    """`tests.support.reference.train_reference` for some parameters of a model."""
    parameters = list(trained.values())
    optimizer = torch.optim.AdamW(
        parameters, lr=RECIPE["lr"], betas=RECIPE["betas"], eps=RECIPE["eps"], weight_decay=RECIPE["weight_decay"]
    )
    trace = Trace()
    for step in range(steps):
        batch = collate(list(samples[step * GLOBAL_BATCH : (step + 1) * GLOBAL_BATCH]))
        logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())
        loss.backward()
        if step == 0:
            trace.gradients = {name: parameter.grad.clone() for name, parameter in trained.items()}  # type: ignore
        trace.grad_norms.append(float(nn.utils.clip_grad_norm_(parameters, RECIPE["clip"])))
        trace.losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    trace.weights = {name: parameter.detach().clone() for name, parameter in trained.items()}
    return trace


def of_peft(model: Any) -> dict[str, nn.Parameter]:
    """What peft trains, by the names of its files without the prefix."""
    return {
        name.removeprefix("base_model.model.").replace(".default", ""): parameter
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }


def _places(model: PreTrainedModel, target: str) -> list[list[str]]:
    """Groups of modules that share an A; experts by their number."""
    config = model.config
    found = []
    for layer in range(config.num_hidden_layers):
        front = f"model.layers.{layer}"
        blocks = [f"{front}.mlp"]
        if hasattr(model.get_submodule(f"{front}.mlp"), "experts"):
            blocks = [f"{front}.mlp.experts.{number}" for number in range(config.num_experts)]
            if hasattr(model.get_submodule(f"{front}.mlp"), "shared_expert"):
                blocks.append(f"{front}.mlp.shared_expert")
        if MODULES[target][0].startswith("self_attn"):
            blocks = [front]
        found += [[f"{block}.{leaf}" for leaf in MODULES[target]] for block in blocks]
    return found


def _shape(model: PreTrainedModel, module: str) -> tuple[int, int]:
    if ".experts." not in module:
        rows, columns = model.get_submodule(module).weight.shape  # type: ignore[union-attr]
        return int(rows), int(columns)
    width, hidden = model.config.moe_intermediate_size, model.config.hidden_size
    return (hidden, width) if module.endswith("down_proj") else (width, hidden)
