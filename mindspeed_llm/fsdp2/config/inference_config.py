"""Section `inference`: how text is generated."""

from dataclasses import dataclass
from typing import Literal

from mindspeed_llm.fsdp2.config.types import PositiveInt


@dataclass(frozen=True, kw_only=True)
class InferenceConfig:
    """Settings of text generation."""

    infer_backend: Literal["huggingface"] = "huggingface"
    """Engine that generates."""

    max_new_tokens: PositiveInt = 512
    """Tokens to generate at most."""

    do_sample: bool = False
    """Sample instead of taking the most probable token."""
