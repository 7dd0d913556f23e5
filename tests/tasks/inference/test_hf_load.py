"""Models from Hugging Face directories, adapters and checkpoints of training compute what transformers and PEFT make of
them, whole or spread over ranks.
"""

from __future__ import annotations

import argparse
import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from peft import IA3Config, LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.inference.adapters.hf_load import load_hf
from mindspeed_llm.tasks.inference.kinds import detect
from mindspeed_llm.tasks.inference.load import weights_fingerprint
from mindspeed_llm.tasks.inference.source import ModelSource
from tests.distributed.test_resume import ends
from tests.support.pool import RankPool
from tests.support.runs import save_model, sft_data, write_config, write_conversations
from tests.tasks.inference.hf_rows import ask, expected, load

pytestmark = pytest.mark.distributed
BAR = 1e-5


@dataclass(frozen=True)
class Trained:
    """A model, a run that trained it, a run that trained adapters for it; both have checkpoints of steps 1 and 2."""

    model: Path
    full: Path
    lora: Path

    def reference(self, case: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
        """The model of `case` as transformers and PEFT load it."""
        folder = self.full / "hf" / "global_step_2" if case == "full" else self.model
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
        if case in ("peft", "lora"):
            return PeftModel.from_pretrained(model, str(self.lora / "hf" / "global_step_2"))
        return model

    def case(self, case: str, **options: Any) -> dict[str, Any]:
        """Arguments of `load_hf`."""
        path = {
            "hf": self.model,
            "peft": self.lora / "hf" / "global_step_2",
            "full": self.full / "checkpoints" / "global_step_2",
            "lora": self.lora / "checkpoints" / "global_step_2",
        }[case]
        return {"path": str(path), "kind": detect(path).kind, **options}


CASES = ["hf", "peft", "full", "lora"]


@pytest.fixture(scope="module")
def trained(rank_pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    place = tmp_path_factory.mktemp("trained")
    save_model(place / "model", "llama")
    write_conversations(place / "data.jsonl", 20)
    for name, model in (("full", {}), ("lora", {"lora_rank": 3, "lora_alpha": 8.0, "lora_target": "q_proj,down_proj"})):
        options = {"stage": "sft", "max_steps": 2, "lr": 1e-2, "save_steps": 1, "save_hf_at_checkpoints": True}
        path = write_config(place / name, place / "model", sft_data(place / "data.jsonl"), **options)
        sections = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
        sections["model"] |= model
        Path(path).write_text(yaml.safe_dump(sections), encoding="utf-8")
        rows = rank_pool.run("tests.distributed.runs:train", ranks=2, argv=[path])
        assert ends(rows) == [(0, None)] * 2, rows[0]["error"]
    return Trained(place / "model", place / "full", place / "lora")


def far(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Largest difference in standard deviations."""
    return ((found - wanted).abs().max() / wanted.std()).item()


def test_the_cases_differ(trained: Trained) -> None:
    """Else what is loaded could be another than what was asked for."""
    logits = {case: expected(trained.reference(case)) for case in ("hf", "full", "lora")}
    assert far(logits["full"], logits["hf"]) > 0.01
    assert far(logits["lora"], logits["hf"]) > 0.01


@pytest.mark.parametrize("case", CASES)
def test_whole_on_one_device(trained: Trained, case: str) -> None:
    [found] = load(cases=[trained.case(case)])
    assert far(found["logits"], expected(trained.reference(case))) < BAR
    assert found["replica"] == (0, 1, True)
    assert found["types"] == {torch.float32}
    has_tokenizer = trained.lora / "hf" / "global_step_2" if case == "peft" else trained.model
    assert found["tokenizer"] == has_tokenizer


def test_shared_by_two_ranks(rank_pool: RankPool, trained: Trained) -> None:
    cases = [trained.case(case, shard=True) for case in CASES]
    cases += [trained.case("full", shard=True, dtype="bf16"), trained.case("full")]
    first, second = rank_pool.run("tests.tasks.inference.hf_rows:load", ranks=2, cases=cases)
    for case, mine, other in zip(CASES, first, second, strict=False):
        assert far(mine["logits"], expected(trained.reference(case))) < BAR, case
        assert torch.equal(mine["logits"], other["logits"]), case
        assert (mine["replica"], other["replica"]) == ((0, 1, True), (0, 1, False))
        assert mine["held"] < 0.7 * mine["whole"], "each rank has its part only"
        head = 509 * 48  # stays with each rank once it has run
        assert mine["held"] + other["held"] == mine["whole"] + head
    low, whole = first[4], first[5]
    assert low["types"] == {torch.bfloat16}
    assert _rounds_as_transformers(low["logits"], trained, "full")
    assert (whole["replica"], second[5]["replica"]) == ((0, 2, True), (1, 2, True))
    assert whole["held"] == whole["whole"]


@pytest.mark.parametrize("case", CASES)
def test_half_precision(trained: Trained, case: str) -> None:
    [found] = load(cases=[trained.case(case, dtype="bf16")])
    assert found["types"] == {torch.bfloat16}
    assert _rounds_as_transformers(found["logits"], trained, case)


def _rounds_as_transformers(logits: torch.Tensor, trained: Trained, case: str) -> bool:
    """Whether bf16 costs no more precision than it does there."""
    exact = expected(trained.reference(case))
    theirs = expected(trained.reference(case, torch.bfloat16))
    return bool(0 < (logits - exact).std() < 1.3 * (theirs - exact).std())


@pytest.mark.parametrize("name", ["pytorch_model.bin", "weights.safetensors", "weights.pt"])
def test_weights_in_other_files(trained: Trained, tmp_path: Path, name: str) -> None:
    folder = shutil.copytree(trained.model, tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    (save_file if name.endswith(".safetensors") else torch.save)(tensors, folder / name)
    [found] = load(cases=[{"path": str(folder), "kind": "hf"}])
    assert far(found["logits"], expected(trained.reference("hf"))) < BAR


def test_adapters_are_told_apart_by_their_model(trained: Trained, tmp_path: Path) -> None:
    """A finished half of an evaluation is not taken up with another model below the same adapter."""
    args = argparse.Namespace(base_model=None, lora_load=None)
    adapter = shutil.copytree(trained.lora / "hf" / "global_step_2", tmp_path / "adapter")
    found = []
    for number in range(2):
        base = shutil.copytree(trained.model, tmp_path / f"base{number}")
        if number:
            weights = load_file(base / "model.safetensors")
            save_file({name: tensor * 2 for name, tensor in weights.items()}, base / "model.safetensors")
        config = json.loads((adapter / "adapter_config.json").read_text(encoding="utf-8"))
        config["base_model_name_or_path"] = str(base)
        (adapter / "adapter_config.json").write_text(json.dumps(config))
        found.append(weights_fingerprint(args, ModelSource(path=adapter, kind="peft", backend="hf", description="")))
    assert None not in found and found[0] != found[1]


def test_an_adapter_of_another_kind(trained: Trained, tmp_path: Path) -> None:
    for name, config in {
        "dora": LoraConfig(r=2, target_modules=["q_proj"], use_dora=True, task_type="CAUSAL_LM"),
        "ia3": IA3Config(target_modules=["v_proj"], feedforward_modules=[], task_type="CAUSAL_LM"),
    }.items():
        adapted = get_peft_model(trained.reference("hf"), config)
        with torch.no_grad():
            for parameter_name, parameter in adapted.named_parameters():
                if "lora_B" in parameter_name or "ia3" in parameter_name:
                    parameter.add_(0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
        adapted.save_pretrained(tmp_path / name)
        [found] = load(cases=[{"path": str(tmp_path / name), "kind": "peft", "base_model": trained.model}])
        assert far(found["logits"], expected(adapted)) < BAR
        assert far(found["logits"], expected(trained.reference("hf"))) > 0.01


def test_the_base_is_named_by_hand(trained: Trained, tmp_path: Path) -> None:
    """The model has moved since the adapter was trained."""
    base = shutil.copytree(trained.model, tmp_path / "moved")
    adapter = shutil.copytree(trained.lora / "hf" / "global_step_2", tmp_path / "adapter")
    config = json.loads((adapter / "adapter_config.json").read_text(encoding="utf-8"))
    (adapter / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": "/nowhere"}))
    with pytest.raises(UserError, match=r"names /nowhere as its model, which is not here.*--base-model"):
        load_hf(adapter, "peft")
    backend, _ = load_hf(adapter, "peft", base_model=base)
    assert far(ask(backend), expected(trained.reference("peft"))) < BAR
    checkpoint = trained.lora / "checkpoints" / "global_step_1"
    backend, tokenizer = load_hf(checkpoint, "fsdp2", base_model=base)
    assert tokenizer == base
    reference = PeftModel.from_pretrained(trained.reference("hf"), str(trained.lora / "hf" / "global_step_1"))
    assert far(ask(backend), expected(reference)) < BAR


def refused(path: Path, **options: Any) -> str:
    with pytest.raises(UserError) as error:
        load_hf(path, detect(path).kind, **options)
    return str(error.value)


def test_what_is_refused(trained: Trained, tmp_path: Path) -> None:
    damaged = shutil.copytree(trained.full, tmp_path / "damaged")
    piece = next((damaged / "checkpoints" / "global_step_2").glob("*.distcp"))
    content = bytearray(piece.read_bytes())
    content[len(content) // 2] ^= 1
    piece.write_bytes(content)
    assert "is damaged" in refused(damaged / "checkpoints" / "global_step_2")

    other = shutil.copytree(trained.model, tmp_path / "other")
    model = AutoModelForCausalLM.from_pretrained(other, dtype=torch.float32)
    with torch.no_grad():
        model.lm_head.weight.mul_(2)
    model.save_pretrained(other)
    assert "has other weights than the model that they were trained for" in refused(
        trained.lora / "checkpoints" / "global_step_2", base_model=other
    )
    config = json.loads((other / "config.json").read_text(encoding="utf-8"))
    (other / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}), encoding="utf-8")
    for path, options in ((other, {}), (trained.full / "checkpoints" / "global_step_1", {"base_model": other})):
        text = refused(path, **options)
        assert "layers.3" in text
        assert "model.model_name_or_path" not in text
    (other / "model.safetensors").unlink()
    assert refused(other).startswith("--load")
    assert "no adapter_model.safetensors" in _without_weights(trained, tmp_path)
    assert "--base-model" in refused(trained.lora / "hf" / "global_step_2", base_model=tmp_path / "missing")


def _without_weights(trained: Trained, tmp_path: Path) -> str:
    adapter = shutil.copytree(trained.lora / "hf" / "global_step_2", tmp_path / "empty")
    (adapter / "adapter_model.safetensors").unlink()
    return refused(adapter)


def test_a_hub_id_that_cannot_be_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    source = detect("nobody/has-this-model")
    assert source.kind == "hf"
    with pytest.raises(UserError, match=r"nobody/has-this-model is no folder here, and as a hub id"):
        load_hf(source.folder, source.kind)
