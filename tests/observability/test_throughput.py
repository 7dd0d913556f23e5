"""FLOPs per token against hand arithmetic and torch's own counter; peaks by the names that drivers give."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig, LlamaForCausalLM

from mindspeed_llm.observability import throughput


def test_flops_by_hand() -> None:
    # 6 * 1000 + 12 * 2 layers * (3 heads * 5) * 7 positions
    arguments = {"num_params_active": 1000, "num_layers": 2, "hidden": 15, "num_heads": 3, "seq_len": 7}
    assert throughput.flops_per_token(**arguments, head_dim=5) == 6000 + 2520
    assert throughput.flops_per_token(**arguments, head_dim=None) == 6000 + 2520


def test_flops_equal_what_torch_counts() -> None:
    """A Llama with eager attention, which computes the full square: forward and backward, every matrix product."""
    config = LlamaConfig(
        vocab_size=509,
        hidden_size=48,
        intermediate_size=88,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=16,
        attn_implementation="eager",
    )
    model = LlamaForCausalLM(config)
    tokens = torch.zeros(2, 32, dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        model(tokens).logits.sum().backward()
    in_products = sum(
        parameter.numel()
        for name, parameter in model.named_parameters()
        if parameter.dim() == 2 and "embed" not in name
    )
    ours = throughput.flops_per_token(
        num_params_active=in_products, num_layers=2, hidden=48, num_heads=6, head_dim=16, seq_len=32
    )
    # The rotary angles are a matrix product too, in the eyes of the counter: 2 * 8 operations per token.
    assert counter.get_total_flops() / tokens.numel() == pytest.approx(ours, rel=1e-4)


@pytest.mark.parametrize(
    ("device_name", "tflops"),
    [
        ("Ascend910B3", 313.0),
        ("Ascend910B2", 354.0),
        ("Ascend910_9392", 376.0),
        ("Ascend910C", 376.0),
        ("Ascend910ProA", 256.0),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA A800-SXM4-80GB", 312.0),
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756.5),
        ("NVIDIA H200", 989.4),
        ("NVIDIA H20", 148.0),
        ("NVIDIA GB200", 2500.0),
        ("NVIDIA L40S", 362.05),
        ("NVIDIA L40", 181.05),
        ("Intel(R) Xeon(R) Processor @ 2.80GHz", None),
        ("NVIDIA H2000", None),
        ("NVIDIA RTX A1000", None),
        ("Ascend910D1", None),
        ("Ascend950DT", None),
    ],
)
def test_peaks(device_name: str, tflops: float | None) -> None:
    assert throughput.peak_tflops(device_name, "bf16") == tflops
    assert throughput.peak_tflops(device_name, str(torch.float16)) == tflops
    assert throughput.peak_tflops(device_name, "fp32") is None


def test_utilisation() -> None:
    arguments = {"tokens_per_second": 1000.0, "flops_per_token": 6e9, "num_devices": 2}
    assert throughput.model_flops_utilization(**arguments, peak_tflops_per_device=10.0) == pytest.approx(0.3)
    assert throughput.model_flops_utilization(**arguments, peak_tflops_per_device=None) is None
