"""Adapters of PEFT that are no plain LoRA: which of them can be merged into a model's weights, and merging them so that
nothing else comes out than PEFT computes beside the weights.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from transformers import PreTrainedModel

from mindspeed_llm.errors import UserError, in_one_line
from mindspeed_llm.files import read_json_object

_NOT_OF_WEIGHTS = {
    "layer_replication": "copies of layers share their weights, and merging would add to these once for each copy",
    "alora_invocation_tokens": "the adapter (aLoRA) acts behind certain tokens only, which weights cannot do",
    "arrow_config": "the adapter (Arrow) is chosen anew for each token, which weights cannot do",
}
"""Settings of kinds that PEFT merges otherwise: why not with them."""
_INSTEAD = (
    "Adapters are merged into the weights here; to ask this one, generate with PEFT itself (PeftModel), or train one "
    "that can be merged"
)
_TOKENS = 16
_EXACT, _ROUNDED = 1e-3, 0.3
"""How far logits may be off by merging, in standard deviations: in fp32, and in half precision, where the weights are
rounded once more and a mixture's choice of experts can turn."""


def check_mergeable(config_file: Path) -> None:
    """Refuse adapters whose effect is no change of weights, as far as their adapter_config.json says it.

    Raises:
        UserError: it is damaged, of a kind that PEFT does not know, or such an adapter.
    """
    from peft.mapping import PEFT_TYPE_TO_TUNER_MAPPING
    from peft.tuners.tuners_utils import BaseTuner

    config = read_json_object(config_file)
    kind = config.get("peft_type")
    kinds = {each.value: tuner for each, tuner in PEFT_TYPE_TO_TUNER_MAPPING.items()}
    mergeable = sorted(name for name, tuner in kinds.items() if issubclass(tuner, BaseTuner))
    if kind not in kinds:
        raise UserError(
            f"{config_file}: peft_type {kind!r}; expected one of {', '.join(mergeable)}. Save the adapter with PEFT's "
            "save_pretrained, or install a PEFT that knows it"
        )
    if kind not in mergeable:
        raise UserError(
            f"{config_file}: peft_type {kind!r}; such an adapter adds to the texts or to the states of the model, and "
            f"has no weights to merge: it is not supported for inference. {_INSTEAD}"
        )
    for name, reason in _NOT_OF_WEIGHTS.items():
        if config.get(name):
            raise UserError(f"{config_file}: {name} {json.dumps(config[name])}; {reason}. {_INSTEAD}")


def embedding_adapter(file: Path) -> str | None:
    """The name of a tensor of LoRA for an embedding in an adapter's weights; None where it has none.

    Raises:
        UserError: the file is damaged.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="pt") as tensors:
            return next((name for name in tensors.keys() if ".lora_embedding_" in name), None)  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise UserError(f"{file} cannot be read ({in_one_line(error)}); copy it again") from error


def merged_by_peft(model: PreTrainedModel, folder: Path) -> PreTrainedModel:
    """`model` with the adapter in `folder` merged into its weights.

    Raises:
        UserError: the adapter does not fit the model, PEFT cannot merge it, or the merged model computes something
            else than PEFT does with the adapter.
    """
    from peft import PeftModel

    name = type(model).__name__
    with _refusing(
        lambda text: (
            f"--load {folder} cannot be added to {name} ({text}); name the model that it was made for with --base-model"
        )
    ):
        adapted = PeftModel.from_pretrained(model, str(folder)).eval()
    with _refusing(lambda text: f"--load {folder} cannot be merged into {name} ({text}). {_INSTEAD}"):
        wanted = _logits(adapted, model)
        merged = adapted.merge_and_unload()
        found = _logits(merged, merged)
    distance = ((found - wanted).std() / wanted.std()).item()
    if distance > (_EXACT if model.dtype == torch.float32 else _ROUNDED):
        raise UserError(
            f"--load {folder}: merged into {name}, it computes something else than PEFT does with the adapter beside "
            f"the weights (logits differ by {distance:.1g} standard deviations). {_INSTEAD}"
        )
    return merged


@torch.no_grad()
def _logits(asked: torch.nn.Module, model: PreTrainedModel) -> torch.Tensor:
    """[1, tokens, vocabulary] of a text from all over the vocabulary, fp32."""
    config = model.config.get_text_config()
    tokens = min(_TOKENS, config.vocab_size, getattr(config, "max_position_embeddings", None) or _TOKENS)
    text = torch.arange(tokens, device=model.device)[None] * (config.vocab_size // tokens)
    return asked(input_ids=text, attention_mask=torch.ones_like(text), use_cache=False).logits.float()


@contextmanager
def _refusing(message: Callable[[str], str]) -> Iterator[None]:
    """Errors of PEFT become UserErrors with `message` around their text."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="Found missing adapter keys")
        try:
            yield
        except (UserWarning, ValueError, RuntimeError, KeyError, TypeError, AttributeError) as error:
            raise UserError(message(in_one_line(error))) from error
