"""adapter_config.json, which says what the numbers of an adapter in PEFT's files mean. Needs no torch."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from mindspeed_llm.errors import UserError

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
# Settings of LoraConfig under which an adapter is more than a product of two matrices: the values without effect.
PLAIN: dict[str, tuple[Any, ...]] = {
    "use_dora": (None, False),
    "use_qalora": (None, False),
    "lora_bias": (None, False),
    "bias": (None, "none"),
    "fan_in_fan_out": (None, False),
    "modules_to_save": (None, []),
    "layer_replication": (None, []),
    "target_parameters": (None, []),
    "trainable_token_indices": (None, [], {}),
    "alora_invocation_tokens": (None, []),
    "use_bdlora": (None,),
    "arrow_config": (None,),
    "kasa_config": (None,),
    "velora_config": (None,),
    "monteclora_config": (None,),
}
NOT_OF_WEIGHTS = ("layer_replication", "alora_invocation_tokens", "arrow_config")
"""Those of them that PEFT cannot merge, or merges wrongly."""
# Settings under which the product counts other than alpha / r times, or differently from layer to layer.
ALIKE: dict[str, tuple[Any, ...]] = {
    "use_rslora": (None, False),
    "rank_pattern": (None, {}),
    "alpha_pattern": (None, {}),
    "layers_to_transform": (None, []),
}
# Ways to begin that change the weights of the model, too.
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")


def read_peft_config(path: Path, *, may_vary: bool = False) -> dict[str, Any]:
    """The content of an adapter_config.json, of an adapter that is a product of two matrices beside linear layers.

    Args:
        may_vary: whether the product may count other than alpha / r times, and layers may differ: see `ALIKE`.

    Raises:
        UserError: the file is missing or damaged, or the adapter is of another kind; says which.
    """
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path} is missing; expected the folder of an adapter, with it and {WEIGHTS}") from None
    except ValueError as error:
        raise UserError(
            f"{path}: not the configuration of an adapter: no valid JSON ({error}); copy it again"
        ) from None
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}); expected the configuration of an adapter") from None
    if not isinstance(config, dict):
        raise UserError(
            f"{path}: not the configuration of an adapter: it holds a {type(config).__name__}, expected a JSON object; "
            "copy it again"
        )
    if missing := [name for name in ("peft_type", "r", "lora_alpha") if name not in config]:
        raise UserError(
            f"{path}: not the configuration of a LoRA adapter: it has no {', '.join(missing)}; copy it again, or save "
            "the adapter with PEFT's save_pretrained"
        )
    kind, rank, alpha = config["peft_type"], config["r"], config["lora_alpha"]
    if kind != "LORA":
        raise UserError(f"{path}: peft_type {kind!r}; expected LORA")
    if not _is_rank(rank) or not _is_alpha(alpha):
        raise UserError(
            f"{path}: r {rank!r}, lora_alpha {alpha!r}; expected a whole number above 0, and a number other than 0"
        )
    for name, harmless in (PLAIN if may_vary else PLAIN | ALIKE).items():
        if config.get(name) not in harmless:
            kept = "alpha / r * B A" if may_vary else "alpha / r * B A, alike on all layers,"
            advice = (
                "No weights do the same, so that it cannot be merged into the model either: ask it with PEFT itself"
                if name in NOT_OF_WEIGHTS
                else "Merge it into the model with PEFT's merge_and_unload instead"
            )
            raise UserError(f"{path}: {name} {config[name]!r}; only {kept} can be taken over. {advice}")
    for name, fits in (("rank_pattern", _is_rank), ("alpha_pattern", _is_alpha)):
        pattern = config.get(name) or {}
        if not isinstance(pattern, dict) or not all(map(fits, pattern.values())):
            raise UserError(
                f"{path}: {name} {pattern!r}; expected names of layers with such numbers as r and lora_alpha"
            )
    begun = config.get("init_lora_weights")
    if isinstance(begun, str) and begun.lower().startswith(_CHANGES_BASE):
        raise UserError(
            f"{path}: init_lora_weights {begun!r} changed the weights of the model, too; save the adapter with PEFT's "
            "path_initial_model_for_weight_conversion, or merge it with merge_and_unload"
        )
    return config


def _is_rank(value: object) -> bool:
    return type(value) is int and value >= 1


def _is_alpha(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value != 0
