"""The switches `use_flash_attn`, `use_fused_rmsnorm` and `use_fused_rotary_pos_emb` on any transformers model.

A switch replaces a piece of the model by the operator of `platform` for the device at hand. Whether the operator
computes the same as the piece is not guessed from a class name but tried out on a few numbers; a piece that computes
something else keeps its own code, and the line at the start says so.
"""

from __future__ import annotations

import copy
import functools
import sys
import types
from collections.abc import Callable

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, PretrainedConfig, PreTrainedModel
from transformers.masking_utils import sdpa_mask

from mindspeed_llm.fsdp2.config.optimization_config import OptimizationConfig
from mindspeed_llm.platform import operators

ATTENTION_NAME = "mindspeed_attention"
_ROTARY = "apply_rotary_pos_emb"


def choose_attention(
    config: PretrainedConfig, model_class: type[PreTrainedModel], *, use_flash_attn: bool
) -> str | None:
    """The attention implementation to build the model with; None leaves the choice to transformers.

    Models whose attention needs more than a mask (a soft cap, sinks, a position bias) declare no support for `sdpa`;
    they keep the implementation that transformers chooses.
    """
    if not use_flash_attn or not getattr(model_class, "_supports_sdpa", False):
        return None
    # Under a name of its own: which operator runs is then visible in the model's configuration.
    AttentionInterface.register(ATTENTION_NAME, attention_forward)
    AttentionMaskInterface.register(ATTENTION_NAME, sdpa_mask)
    return ATTENTION_NAME


def attention_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: object,
) -> tuple[torch.Tensor, None]:
    """transformers' attention interface on top of `operators.attention`.

    Args:
        query: [batch, heads, sequence, head_dim]; key and value have the KV heads.
        attention_mask: boolean [batch or 1, 1, sequence, sequence], True = visible; None with a purely causal mask.

    Returns:
        [batch, sequence, heads, head_dim] and None (no attention weights).

    Raises:
        NotImplementedError: the model asks for something that a fused operator does not compute; a fault of ours, since
            `choose_attention` keeps such models away from here.
    """
    for extra in ("softcap", "s_aux", "position_bias"):
        if kwargs.get(extra) is not None:
            raise NotImplementedError(
                f"{ATTENTION_NAME} does not compute {extra}; set optimization.use_flash_attn: false"
            )
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    output = operators.attention(
        query,
        key,
        value,
        mask=attention_mask,
        is_causal=bool(is_causal and attention_mask is None and query.shape[2] > 1),
        scale=scaling if scaling is not None else query.shape[-1] ** -0.5,
        dropout=dropout,
    )
    return output.transpose(1, 2).contiguous(), None


def apply_fused_operators(model: PreTrainedModel, config: OptimizationConfig) -> list[str]:
    """Switch on what `config` asks for; returns one line per switch that says what each model part runs on now."""
    lines = [_describe_attention(model, config)]
    has_experts = type(model)._can_set_experts_implementation()
    if has_experts:
        lines.append(f"experts: {model.config._experts_implementation} (moe_grouped_gemm: {config.moe_grouped_gemm})")
    elif config.moe_grouped_gemm:
        lines.append(f"no effect from optimization.moe_grouped_gemm: {type(model).__name__} has no experts")
    if config.use_fused_rmsnorm:
        lines.append(_fuse_rms_norms(model))
    if config.use_fused_rotary_pos_emb:
        lines.append(_fuse_rotary(model))
    return lines


def _describe_attention(model: PreTrainedModel, config: OptimizationConfig) -> str:
    chosen = model.config._attn_implementation
    if chosen == ATTENTION_NAME:
        return f"attention: {operators.implementation('attention')} (use_flash_attn)"
    why = f", since {type(model).__name__} declares no support for it" if config.use_flash_attn else ""
    return f"attention: transformers' {chosen}{' instead of use_flash_attn' + why if why else ''}"


# --- RMSNorm


def _fuse_rms_norms(model: PreTrainedModel) -> str:
    verdicts: dict[type, bool | None] = {}
    fused, kept = 0, []
    for name, module in model.named_modules():
        if not _looks_like_rms_norm(module):
            continue
        kind = type(module)
        if kind not in verdicts:
            verdicts[kind] = _rms_norm_offset(module)
        unit_offset = verdicts[kind]
        if unit_offset is None:
            kept.append(name)
            continue
        module.forward = functools.partial(_rms_norm_forward, module, unit_offset)
        fused += 1
    line = f"RMSNorm: {operators.implementation('rms_norm')} on {fused} modules (use_fused_rmsnorm)"
    return line + (f"; {len(kept)} keep their own code, which computes something else: {kept[0]}, ..." if kept else "")


def _looks_like_rms_norm(module: nn.Module) -> bool:
    parameters = list(module.named_parameters(recurse=False))
    return "RMSNorm" in type(module).__name__ and [name for name, _ in parameters] == ["weight"]


def _epsilon(module: nn.Module) -> float:
    epsilon = getattr(module, "variance_epsilon", None)
    return float(module.eps if epsilon is None else epsilon)


def _rms_norm_forward(module: nn.Module, unit_offset: bool, hidden_states: torch.Tensor) -> torch.Tensor:
    return operators.rms_norm(hidden_states, module.weight, _epsilon(module), unit_offset=unit_offset)


def _rms_norm_offset(module: nn.Module) -> bool | None:
    """Whether the class multiplies by `weight` (False) or `1 + weight` (True); None if it computes neither.

    Tried on a copy with random weights and a large epsilon, by torch's own arithmetic on the CPU.
    """
    if not (hasattr(module, "variance_epsilon") or hasattr(module, "eps")):
        return None
    size = module.weight.shape[0]
    generator = torch.Generator().manual_seed(0)
    probe = copy.copy(module)
    probe._parameters = {"weight": nn.Parameter(torch.randn(size, generator=generator), requires_grad=False)}
    hidden = torch.randn(2, 3, size, generator=generator)
    epsilon = _epsilon(module)
    normed = hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + epsilon)
    try:
        found = probe(hidden)
    except TypeError:  # a gated norm, for one, takes a second tensor
        return None
    for unit_offset in (False, True):
        expected = normed * (probe.weight + 1.0 if unit_offset else probe.weight)
        if found.shape == expected.shape and torch.allclose(found, expected, rtol=1e-5, atol=1e-6):
            return unit_offset
    return None


# --- Rotary position embedding


def _fuse_rotary(model: PreTrainedModel) -> str:
    """Replace `apply_rotary_pos_emb` in the modules that the model's classes were defined in.

    It is a function of the modelling file, not of an instance, so the replacement holds for the whole process;
    `restore_rotary` takes it back.
    """
    done, kept = [], []
    for module in _modelling_files(model):
        original = getattr(module, _ROTARY)
        if getattr(original, "replaces", None) is not None:
            done.append(module.__name__)
        elif _is_half_rotation(original):
            setattr(module, _ROTARY, _rotary_like(original))
            done.append(module.__name__)
        else:
            kept.append(module.__name__)
    if not done:
        why = f"{kept[0]} rotates differently" if kept else f"{type(model).__name__} has no {_ROTARY}"
        return f"rotary embedding: the model's own code instead of use_fused_rotary_pos_emb, since {why}"
    return f"rotary embedding: {operators.implementation('rotary')} (use_fused_rotary_pos_emb)"


def restore_rotary(model: PreTrainedModel) -> None:
    """Undo the replacement in the files of the model's classes."""
    for module in _modelling_files(model):
        original = getattr(getattr(module, _ROTARY), "replaces", None)
        if original is not None:
            setattr(module, _ROTARY, original)


def _modelling_files(model: PreTrainedModel) -> list[types.ModuleType]:
    names = {type(module).__module__ for module in model.modules()} | {type(model).__module__}
    files = [sys.modules[name] for name in sorted(names) if name in sys.modules]
    return [file for file in files if callable(getattr(file, _ROTARY, None))]


def _rotary_like(original: Callable) -> Callable:
    @functools.wraps(original)
    def apply_rotary_pos_emb(
        q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, unsqueeze_dim: int = 1
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return operators.rotary(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim)

    apply_rotary_pos_emb.replaces = original
    return apply_rotary_pos_emb


def _is_half_rotation(function: Callable) -> bool:
    """Whether `function` rotates the two halves of the head dimension against each other, as the operator does."""
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 3, 4, 8, generator=generator), torch.randn(2, 1, 4, 8, generator=generator)
    angles = torch.randn(2, 4, 4, generator=generator)
    cos, sin = (torch.cat([f(angles)] * 2, dim=-1) for f in (torch.cos, torch.sin))

    def rotate(x: torch.Tensor) -> torch.Tensor:
        half = torch.cat([-x[..., 4:], x[..., :4]], dim=-1)
        return x * cos.unsqueeze(1) + half * sin.unsqueeze(1)

    try:
        found_q, found_k = function(q, k, cos, sin)
    except (TypeError, RuntimeError, ValueError):  # another signature or another layout
        return False
    return all(
        found.shape == x.shape and torch.allclose(found, rotate(x), rtol=1e-5, atol=1e-6)
        for found, x in ((found_q, q), (found_k, k))
    )
