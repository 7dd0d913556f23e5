"""What decides a model's answers besides the bytes of its weights: the same on any number of ranks, in any folder."""

from __future__ import annotations

import hashlib
import json
from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mindspeed_llm.tasks.inference.source import ModelSource

if TYPE_CHECKING:
    from mindspeed_llm.tasks.inference.causal_lm import CausalLM

_PLACES = frozenset(("_name_or_path", "name_or_path", "base_model_name_or_path", "auto_map"))
"""Fields of configurations that say where something lies."""
_IDLE = frozenset(("transformers_version", "use_cache"))
_OF_RANKS = frozenset(
    ("model_from_hf", "seed", "init_method_std", "vocab_size", "padded_vocab_size", "make_vocab_size_divisible_by")
) | frozenset(("num_layers", "moe_layer_freq", "window_attn_skip_freq", "moe_grouped_gemm"))
"""Arguments of a model that name a place, have no part in answers, or are others where it is cut for other ranks (their
part in the model's shapes is in its weights).
"""
_OF_ADAPTERS = ("lora_r", "lora_alpha", "lora_target_modules")


def computation(args: Namespace, source: ModelSource, lm: CausalLM) -> dict[str, Any]:
    """The backend, the dtype that it computes in, and hashes of the structure of the model, its adapters included, and
    of the tokenizer.

    Args:
        args: that `lm` was loaded with, completed from the files beside the weights.
    """
    if source.backend == "hf":
        model = lm.backend.model
        dtype, structure = next(iter(model.parameters())).dtype, {"config": model.config.to_dict()}
        structure["adapter"] = _adapter(source)
    else:
        dtype, structure = lm.backend.dtype, _arguments(args)
        if args.lora_load is not None:
            structure["adapter"] = _peft(Path(args.lora_load))
    return {
        "backend": source.backend,
        "dtype": str(dtype).removeprefix("torch."),
        "structure": _hash(_portable(structure)),
        "tokenizer": _hash([lm.tokenizer.identity(), sorted(lm.stop_ids)]),
    }


def _adapter(source: ModelSource) -> object:
    """What an adapter says of itself, merged into the weights as it may be; None for a whole model."""
    if source.kind == "fsdp2":
        from mindspeed_llm.fsdp2.checkpoint.manifest import read_manifest

        return read_manifest(source.path).adapter
    return _peft(source.path) if source.kind == "peft" else None


def _peft(folder: Path) -> object:
    from mindspeed_llm.tasks.checkpoint.peft_config import CONFIG

    file = folder / CONFIG
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None


def _arguments(args: Namespace) -> dict[str, Any]:
    from mindspeed_llm.tasks.inference.adapters.megatron_arguments import model_arguments

    names = [name for name in (*model_arguments(), *_OF_ADAPTERS) if name not in _OF_RANKS]
    return {name: getattr(args, name, None) for name in names}


def _portable(content: Any) -> Any:
    if isinstance(content, dict):
        return {str(key): _portable(value) for key, value in content.items() if str(key) not in _PLACES | _IDLE}
    return [_portable(value) for value in content] if isinstance(content, list | tuple) else content


def _hash(content: Any) -> str:
    text = json.dumps(content, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]
