"""Which flags belong to which handlers: one table for the command, for `make_work` and for the reference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.preprocess.handlers import HANDLERS, Handler


@dataclass(frozen=True)
class _UsedBy:
    """The handlers that a flag is for, and how messages call them."""

    whom: str
    uses: Callable[[Handler], bool]


_PRETRAIN = _UsedBy("pretraining handlers", lambda handler: handler.kind == "pretrain")
_WITH_TEMPLATE = _UsedBy("handlers that take a template", lambda handler: handler.takes_prompt_type)
_INSTRUCTION = _UsedBy("instruction handlers", lambda handler: handler.kind == "instruction")
_DATASET_INFO = _UsedBy("handlers that read dataset_info.json", lambda handler: not handler.formatting)

USED_BY: dict[str, _UsedBy] = {
    "json_keys": _UsedBy("handlers that tokenize plain columns", lambda handler: handler.takes_json_keys),
    "map_keys": _UsedBy("handlers whose records have columns of fixed roles", lambda handler: bool(handler.columns)),
    "dataset_dir": _DATASET_INFO,
    "mix_strategy": _DATASET_INFO,
    "interleave_probs": _DATASET_INFO,
    "prompt_type": _WITH_TEMPLATE,
    "prompt_type_path": _WITH_TEMPLATE,
    "enable_thinking": _WITH_TEMPLATE,
    "drop_thinking": _WITH_TEMPLATE,
    "reasoning_effort": _WITH_TEMPLATE,
    "mask_history": _INSTRUCTION,
    "pack": _INSTRUCTION,
    "neat_pack": _INSTRUCTION,
    "append_eod": _UsedBy("all but the prompt handlers", lambda handler: handler.kind != "prompt"),
    "pad_to_multiple_of": _PRETRAIN,
    "split_sentences": _PRETRAIN,
    "keep_newlines": _PRETRAIN,
    "dataset_additional_keys": _UsedBy(
        "the R1 handlers", lambda handler: handler.kind == "prompt" and handler.name.startswith("R1")
    ),
}
"""Field -> the handlers that it is for; with any other it is refused when given."""


def check_flag(name: str, handler: Handler) -> None:
    """Raise UserError where the handler has no use for the flag of the field `name`."""
    used_by = USED_BY[name]
    if not used_by.uses(handler):
        others = [other.name for other in HANDLERS.values() if used_by.uses(other)]
        raise UserError(
            f"--{name.replace('_', '-')} is for {used_by.whom}, not for {handler.name}; leave it out, or choose one of "
            f"{', '.join(others)}"
        )
