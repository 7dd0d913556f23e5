"""Section `model`: which model is trained, where its files come from, and how it is built."""

from dataclasses import dataclass, field
from typing import Literal

from mindspeed_llm.fsdp2.config.types import Decay, PositiveFloat, PositiveInt

ModelId = Literal[
    "gpt_oss",
    "qwen3",
    "qwen3_moe",
    "qwen3_next",
    "step35",
    "mamba3",
    "minimax_m27",
    "longcat_flash_ngram",
    "glm52",
    "deepseek_v4",
]


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Settings of the model and its tokenizer."""

    model_name_or_path: str
    """Hugging Face directory (config, weights, tokenizer), or a hub id such as `Qwen/Qwen3-8B`."""

    model_id: ModelId | None = None
    """Model family that is expected; config.json must name the same one. null takes whatever
    `AutoModelForCausalLM` finds."""

    init_model_with_meta_device: bool = False
    """Build the model without memory, shard it, then let each rank read only the weights that it keeps. Needed for
    models that do not fit the memory of one host per rank."""

    trust_remote_code: bool = False
    """Run the Python code that comes with the model directory or hub repository. Only for sources that you trust."""

    train_from_scratch: bool = False
    """Start from random weights; only config.json and the tokenizer are read from the model directory."""

    tokenizer_name_or_path: str | None = None
    """Directory or hub id of the tokenizer. null takes the one of `model_name_or_path`."""

    cache_dir: str | None = None
    """Folder for files fetched from the hub. null takes the default of huggingface_hub."""

    use_fast_tokenizer: bool = True
    """Take the fast (Rust) tokenizer."""

    lora_rank: PositiveInt | None = None
    """Train adapters (LoRA) of this rank and leave the model's own weights as they are. null: train the weights, unless
    `adapter_name_or_path` is set."""

    lora_alpha: PositiveFloat | None = None
    """An adapter's output counts `lora_alpha / lora_rank` times. null: twice the rank."""

    lora_dropout: Decay = 0.0
    """Part of the inputs that adapters do not see in training."""

    lora_target: str = "all"
    """Comma separated names of the linear layers that get adapters: last words of module names such as `q_proj,v_proj`,
    or more of them with dots. `all`: every linear layer but the output head."""

    adapter_name_or_path: str | None = None
    """Folder of an adapter in PEFT's format to go on training from; rank, alpha and targets are those of the
    adapter."""

    freeze_modules: list[str] = field(default_factory=list)
    """Patterns of modules whose weights stay as they are, as in `parallel.fsdp_modules`."""

    resize_vocab: bool = False
    """Grow the embeddings when added tokens need more rows than the model has."""

    split_special_tokens: bool = False
    """Split special tokens that stand in the text like ordinary text."""

    add_tokens: str | None = None
    """Comma separated ordinary tokens that the tokenizer gets in addition."""

    add_special_tokens: str | None = None
    """Comma separated special tokens that the tokenizer gets in addition; they are skipped when decoding."""

    new_special_tokens_config: str | None = None
    """YAML file of new special tokens with a description each."""

    init_special_tokens: Literal["noise_init", "desc_init", "desc_init_w_noise"] = "noise_init"
    """How the embedding rows of new special tokens start: from noise, from their description, or from both."""

    model_revision: str = "main"
    """Branch, tag or commit of a hub model."""

    hf_hub_token: str | None = field(default=None, repr=False)
    """Access token for the Hugging Face hub. Never written to run_config.yaml."""

    ms_hub_token: str | None = field(default=None, repr=False)
    """Access token for ModelScope."""

    om_hub_token: str | None = field(default=None, repr=False)
    """Access token for Modelers."""

    quant_recipe_name: Literal["mxfp8"] | None = None
    """Recipe of quantised training; null trains without quantisation."""

    quant_apply_modules: list[str] = field(default_factory=lambda: ["model.layers.{*}"])
    """Patterns of the modules to quantise."""

    quant_ignored_modules: list[str] = field(default_factory=lambda: ["*lm_head", "*gate"])
    """Patterns of the modules that stay as they are, even inside `quant_apply_modules`."""

    quant_converters: list[str] = field(default_factory=lambda: ["quantize.linear.mx"])
    """Converters to apply: `quantize.linear.mx` for linear layers, `quantize.moe.mx` for experts."""

    enable_fsdp_low_precision_all_gather: bool = True
    """Gather weights in the quantised format."""

    fsdp_low_precision_all_gather_mode: Literal["on-demand", "all"] = "on-demand"
    """Gather the layout that the coming pass needs, or both layouts at once."""

    @property
    def has_adapters(self) -> bool:
        """Whether adapters are trained instead of the model's own weights."""
        return self.lora_rank is not None or self.adapter_name_or_path is not None

    @property
    def chosen_alpha(self) -> float:
        """The alpha of adapters that `lora_rank` switches on; whole numbers as integers, as PEFT's files have them."""
        assert self.lora_rank is not None
        alpha = 2 * self.lora_rank if self.lora_alpha is None else self.lora_alpha
        return int(alpha) if alpha == int(alpha) else alpha
