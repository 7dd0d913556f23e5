"""The model families that can be converted: one table each.

A new family is one file with a `Family`, and its name in `FAMILIES` below.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.checkpoint.families.bailing import BAILING
from mindspeed_llm.tasks.checkpoint.families.deepseek import DEEPSEEK2_LITE, DEEPSEEK3, DEEPSEEK32
from mindspeed_llm.tasks.checkpoint.families.gemma import GEMMA2, GEMMA3
from mindspeed_llm.tasks.checkpoint.families.glm import GLM4, GLM5, GLM45
from mindspeed_llm.tasks.checkpoint.families.gpt_oss import GPT_OSS
from mindspeed_llm.tasks.checkpoint.families.hunyuan import HUNYUAN3
from mindspeed_llm.tasks.checkpoint.families.llama import INTERNLM3, LLAMA, SEED_OSS
from mindspeed_llm.tasks.checkpoint.families.longcat import LONGCAT
from mindspeed_llm.tasks.checkpoint.families.mamba import MAMBA2
from mindspeed_llm.tasks.checkpoint.families.minimax import MINIMAX_M2
from mindspeed_llm.tasks.checkpoint.families.mistral import MISTRAL, MIXTRAL
from mindspeed_llm.tasks.checkpoint.families.phi import PHI35, PHI35_MOE
from mindspeed_llm.tasks.checkpoint.families.plm import PLM
from mindspeed_llm.tasks.checkpoint.families.qwen import QWEN2_MOE, QWEN3, QWEN3_MOE, QWEN25
from mindspeed_llm.tasks.checkpoint.families.qwen3_next import QWEN3_NEXT
from mindspeed_llm.tasks.checkpoint.tables import Family

FAMILIES: tuple[Family, ...] = (
    LLAMA,
    MISTRAL,
    MIXTRAL,
    QWEN25,
    QWEN3,
    QWEN2_MOE,
    QWEN3_MOE,
    QWEN3_NEXT,
    DEEPSEEK2_LITE,
    DEEPSEEK3,
    DEEPSEEK32,
    GLM4,
    GLM45,
    GLM5,
    GEMMA2,
    GEMMA3,
    PHI35,
    PHI35_MOE,
    GPT_OSS,
    SEED_OSS,
    INTERNLM3,
    MINIMAX_M2,
    BAILING,
    HUNYUAN3,
    LONGCAT,
    PLM,
    MAMBA2,
)
_NO_V4 = "the compressed attention and the hyper-connections of DeepSeek-V4 have no table here"
WITHOUT_TABLE = {"deepseek4": _NO_V4, "deepseek4_base": _NO_V4}
"""Ids of upstream's converter that are refused -> why."""


def family_ids() -> list[str]:
    """All values of `--model-type-hf`."""
    return [name for family in FAMILIES for name in family.ids]


def by_id(name: str) -> Family:
    """The family of a `--model-type-hf`.

    Raises:
        UserError: there is none; lists those there are.
    """
    for family in FAMILIES:
        if name in family.ids:
            return family
    if name in WITHOUT_TABLE:
        raise UserError(f"--model-type-hf {name} cannot be converted: {WITHOUT_TABLE[name]}")
    raise UserError(f"--model-type-hf {name}: expected one of {', '.join(family_ids())}")


def of_config(config: Mapping[str, Any], where: str, *, requested: str | None = None) -> Family:
    """The family that a config.json belongs to; `requested` is `--model-type-hf`, if given.

    Raises:
        UserError: it belongs to none, or to another one than was requested.
    """
    architectures = config.get("architectures") or []
    by_class = [f for f in FAMILIES if set(f.architectures) & set(architectures)]
    by_type = [f for f in FAMILIES if f.model_type == config.get("model_type")]
    # Some model types run on the class of another family; and code that models bring may use any type.
    found = [f for f in by_class if f in by_type] or by_type or by_class
    if requested is not None:
        family = by_id(requested)
        if (architectures or config.get("model_type")) and family not in found:
            meant = ", ".join(f.ids[0] for f in found) or "no family that is known here"
            raise UserError(
                f"--model-type-hf {requested} contradicts {where}: its architectures {architectures} and model_type "
                f"{config.get('model_type')!r} say {meant}; leave the flag out or correct it"
            )
        return family
    if not found:
        raise UserError(
            f"{where}: architectures {architectures}, model_type {config.get('model_type')!r} belong to no family that "
            f"is known here; expected one of {', '.join(a for f in FAMILIES for a in f.architectures)}"
        )
    return found[0]
