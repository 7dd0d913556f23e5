"""Model FLOPs per token, peak rates of devices, and the utilisation that follows from them."""

from __future__ import annotations

import re

# Dense peak of one device in TFLOP/s with 16-bit inputs (bf16, where the chip has it at the same rate fp16). A device
# is what the driver shows as one: for the Ascend 910C that is one of its two dies. The patterns are tried in order on
# the device's name in lower case.
_PEAK_16BIT_TFLOPS: tuple[tuple[str, float], ...] = (
    # "Zuo et al. 2025, Serving LLMs on Huawei CloudMatrix384" (arXiv 2506.12708): 752 per 910C package, 376 per die.
    # The driver calls the dies Ascend910_93xx.
    (r"910_93\d\d|910c", 376.0),
    # Product pages of the training cards: Atlas 300T A2 280 (grade B4), Atlas 800T A2 313 per device (grade B3).
    (r"910b4", 280.0),
    (r"910b3", 313.0),
    # Grades B1 and B2, or unknown: 24 matrix units x 8192 FLOP per cycle x 1.8 GHz, the figure that other open
    # training frameworks count with as well.
    (r"910b", 354.0),
    # First generation: 256 (Huawei, Hot Chips 2019).
    (r"\bascend\s*910(a|proa|prob|premiuma)?\b", 256.0),
    # NVIDIA data sheets, without sparsity. The PCIe and NVL boards are clocked lower than SXM.
    (r"\b(gb200|gb300)\b", 2500.0),
    (r"\b(b200|b300)\b", 2250.0),
    (r"\bh(100|200) nvl\b", 835.5),
    (r"\bh(100|800) pcie\b", 756.5),
    (r"\b(gh200|h200|h100|h800)\b", 989.4),
    (r"\bh20\b", 148.0),
    (r"\b(a100|a800)\b", 312.0),
    (r"\bl40s\b", 362.05),
    (r"\bl40\b", 181.05),
    (r"\bl20\b", 119.5),
    (r"\ba40\b", 149.7),
    (r"\ba30\b", 165.0),
    (r"\ba10\b", 125.0),
    (r"\brtx 4090\b", 165.2),
    (r"\brtx 3090\b", 71.0),
)
_16BIT_DTYPES = frozenset({"bf16", "bfloat16", "fp16", "float16"})


def flops_per_token(
    *, num_params_active: int, num_layers: int, hidden: int, num_heads: int, head_dim: int | None, seq_len: int
) -> float:
    """Floating point operations of forward and backward per token, as MFU counts them: 6 N + 12 L H Q T.

    Chowdhery et al. 2022 (PaLM), appendix B. 6 N: each weight that takes part in a matrix product costs a
    multiplication and an addition forward and twice that backward. 12 L H Q T: scores and weighted values of full
    attention over T positions; the causal half is not taken off, so that figures compare with other reports.
    Recomputation does not count: it is the implementation's cost, not the model's.

    Args:
        num_params_active: N, weights in matrix products per token. Leave out the input embedding (a lookup) unless it
            is tied to the output head; of a mixture of experts count the router, the shared and the top-k experts.
        num_layers: L.
        hidden: hidden size; gives the head dimension when head_dim is None.
        num_heads: H, query heads.
        head_dim: Q.
        seq_len: T.
    """
    width = num_heads * (hidden // num_heads if head_dim is None else head_dim)
    return 6.0 * num_params_active + 12.0 * num_layers * width * seq_len


def peak_tflops(device_name: str, dtype: str) -> float | None:
    """Dense peak of one device in TFLOP/s, or None where it is not known.

    Args:
        device_name: as the driver gives it, e.g. "NVIDIA H100 80GB HBM3" or "Ascend910B3".
        dtype: type of the matrix products' inputs: "bf16" or "fp16" (also torch's names). Others give None: an fp32
            peak depends on switches (tf32, hf32) that the name does not tell.
    """
    if dtype.removeprefix("torch.") not in _16BIT_DTYPES:
        return None
    name = device_name.lower()
    return next((peak for pattern, peak in _PEAK_16BIT_TFLOPS if re.search(pattern, name)), None)


def model_flops_utilization(
    *, tokens_per_second: float, flops_per_token: float, num_devices: int, peak_tflops_per_device: float | None
) -> float | None:
    """Achieved model FLOP/s as a fraction of all devices' peak; None when the peak is unknown."""
    if peak_tflops_per_device is None:
        return None
    return tokens_per_second * flops_per_token / (num_devices * peak_tflops_per_device * 1e12)
