"""What a conversion is asked to do: the flags of `convert_ckpt_v2.py` as one object."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True)
class ConversionRequest:
    """One conversion. Fields without a value are taken from the source."""

    load_model_type: str
    """hf or mg."""
    save_model_type: str
    """hf or mg."""
    load_dir: Path
    save_dir: Path
    model_type_hf: str | None = None
    """Family id; read off config.json when absent."""
    hf_cfg_dir: Path | None = None
    """Folder of the Hugging Face model that the weights belong to: config.json, tokenizer and the like."""
    target: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `Topology` for a Megatron output."""
    loaded: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `Topology` that override what a Megatron input says about itself."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings for a Megatron input that carries no arguments; must agree with those that it carries."""
    num_layers: int | None = None
    """Make the output of the first so many layers."""
    first_k_dense_replace: int | None = None
    """Make the output of so many dense layers, followed by layers with experts."""
    lora_load: Path | None = None
    """Folder of an adapter: a Megatron checkpoint, or PEFT's files. None: it stands in `load_dir`, if there is any."""
    lora_r: int | None = None
    """The adapter's rank; must agree with its tensors."""
    lora_alpha: int | None = None
    """The adapter's alpha, for a checkpoint that does not say it."""
    lora_target_modules: tuple[str, ...] = ()
    """Megatron's layers that the adapter is on; must agree with its tensors. For an output that is an adapter, which
    form it has."""
    save_lora_to_hf: bool = False
    """Write the adapter alone, in PEFT's files."""
    make_vocab_size_divisible_by: int = 1
    """The padded vocabulary is a multiple of this times the tensor parallel size."""
    params_dtype: str | None = None
    """fp32, fp16 or bf16; None keeps each tensor's dtype."""
    max_shard_size: int = 5 * 10**9
    """Bytes per Hugging Face weight file."""
    workers: int = 2
    """Threads."""
    verify: str = "sample"
    """full, sample or none: how much of the output is compared with the source before it is published."""
    overwrite: bool = False
    """Replace an earlier conversion in `save_dir`."""
    dry_run: bool = False
    """Only say what would be written."""

    @property
    def wants_lora(self) -> bool:
        """Whether any flag is about an adapter."""
        return bool(
            self.lora_load or self.lora_r or self.lora_alpha or self.lora_target_modules or self.save_lora_to_hf
        )
