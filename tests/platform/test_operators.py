"""Every implementation of every operator against transformers' own modules and torch, at toy size on CPU.

The CUDA implementations are plain torch calls and run on CPU tensors as they are; the Ascend ones run against a
stand-in with the documented meaning of their operators (npu_stub).
"""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch
from torch.autograd import gradcheck
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb
from transformers.models.qwen3_next.modeling_qwen3_next import apply_rotary_pos_emb as partial_rotary_pos_emb

from mindspeed_llm.platform import operators
from mindspeed_llm.platform.operators import cuda, npu, reference
from tests.platform import npu_stub

SCALE = 0.37


@pytest.fixture(params=["reference", "cuda", "npu"])
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """One of the three modules of implementations."""
    if request.param == "npu":
        monkeypatch.setitem(sys.modules, "torch_npu", npu_stub.make_stub())
        return npu
    return {"reference": reference, "cuda": cuda}[request.param]


def _random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _same_with_gradients(ours, theirs, inputs: list[torch.Tensor], *, tolerance: float = 1e-5) -> None:
    """Compare values and gradients of all inputs of two functions of `inputs`."""
    results = []
    for function in (ours, theirs):
        leaves = [tensor.detach().clone().requires_grad_() for tensor in inputs]
        outputs = function(*leaves)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        # A weighted sum: a plain sum has the same gradient for permuted outputs.
        total = sum((out.float() * _random(*out.shape, seed=9)).sum() for out in outputs)
        results.append((*outputs, *torch.autograd.grad(total, leaves)))
    for mine, reference_value in zip(*results, strict=True):
        assert mine.dtype == reference_value.dtype
        torch.testing.assert_close(mine, reference_value, rtol=tolerance, atol=tolerance)


# --- RMS norm ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("eps", [1e-6, 0.5])
@pytest.mark.parametrize(("theirs", "unit_offset"), [(LlamaRMSNorm, False), (GemmaRMSNorm, True)])
def test_rms_norm_equals_transformers(implementation: ModuleType, theirs: type, unit_offset: bool, eps: float) -> None:
    norm = theirs(16, eps)

    def call_theirs(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(norm, {"weight": weight}, (x,))

    _same_with_gradients(
        lambda x, weight: implementation.rms_norm(x, weight, eps, unit_offset=unit_offset),
        call_theirs,
        [_random(2, 5, 16), _random(16, seed=1)],
    )


@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("theirs", "unit_offset"), [(LlamaRMSNorm, False), (GemmaRMSNorm, True)])
def test_rms_norm_of_bf16_has_transformers_type_and_precision(
    implementation: ModuleType, theirs: type, unit_offset: bool, weight_dtype: torch.dtype
) -> None:
    norm = theirs(64, 1e-6).to(weight_dtype)
    # Gemma's weights are near 0: 1 + 0.003 in bf16 is 1, so a wrapper that adds in bf16 loses them.
    weight = (0.003 * _random(64, seed=1) if unit_offset else _random(64, seed=1)).to(weight_dtype)
    norm.weight.data = weight
    x = _random(8, 64, dtype=torch.bfloat16)
    y = implementation.rms_norm(x, weight, 1e-6, unit_offset=unit_offset)
    expected = norm(x)
    assert y.dtype == expected.dtype
    exact = theirs(64, 1e-6).double()
    exact.weight.data = weight.double()
    exact_y = exact(x.double()).double()
    error, expected_error = (y.double() - exact_y).norm(), (expected.double() - exact_y).norm()
    assert error <= 1.05 * expected_error


# --- rotary -----------------------------------------------------------------------------------------------------------


def _angles(batch: int, length: int, dims: int) -> tuple[torch.Tensor, torch.Tensor]:
    frequencies = 1.0 / 100 ** (torch.arange(0, dims, 2) / dims)
    positions = torch.stack([torch.arange(length) + 3 * row for row in range(batch)]).float()
    angles = (positions[..., None] * frequencies).repeat(1, 1, 2)
    return angles.cos(), angles.sin()


@pytest.mark.parametrize("unsqueeze_dim", [1, 2])
@pytest.mark.parametrize("rows_of_angles", [1, 2])
def test_rotary_equals_transformers(implementation: ModuleType, unsqueeze_dim: int, rows_of_angles: int) -> None:
    cos, sin = _angles(rows_of_angles, 7, 8)
    shapes = [(2, 4, 7, 8), (2, 2, 7, 8)] if unsqueeze_dim == 1 else [(2, 7, 4, 8), (2, 7, 2, 8)]
    _same_with_gradients(
        lambda q, k: implementation.rotary(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim),
        lambda q, k: apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim),
        [_random(*shape, seed=seed) for seed, shape in enumerate(shapes)],
    )


def test_rotary_of_the_first_dimensions_equals_transformers(implementation: ModuleType) -> None:
    cos, sin = _angles(2, 7, 4)
    _same_with_gradients(
        lambda q, k: implementation.rotary(q, k, cos, sin),
        lambda q, k: partial_rotary_pos_emb(q, k, cos, sin),
        [_random(2, 4, 7, 8), _random(2, 2, 7, 8, seed=1)],
    )


def test_rotary_takes_angles_of_a_wider_type(implementation: ModuleType) -> None:
    cos, sin = _angles(1, 7, 8)
    q, k = _random(2, 4, 7, 8, dtype=torch.bfloat16), _random(2, 2, 7, 8, dtype=torch.bfloat16, seed=1)
    for mine, theirs in zip(implementation.rotary(q, k, cos, sin), apply_rotary_pos_emb(q, k, cos, sin), strict=True):
        assert mine.dtype == theirs.dtype
        torch.testing.assert_close(mine, theirs)


# --- SwiGLU -----------------------------------------------------------------------------------------------------------


def test_swiglu_equals_its_formula(implementation: ModuleType) -> None:
    _same_with_gradients(
        implementation.swiglu,
        lambda gate, up: gate / (1 + torch.exp(-gate)) * up,
        [_random(2, 5, 6), _random(2, 5, 6, seed=1)],
    )


# --- attention --------------------------------------------------------------------------------------------------------


def _eager_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
    """Attention written out, with `visible` [B, N, Sq, Sk]; rows that see nothing give zeros."""
    groups = q.shape[1] // k.shape[1]
    k, v = (tensor.repeat_interleave(groups, dim=1) for tensor in (k, v))
    scores = torch.einsum("bnqd,bnkd->bnqk", q, k) * SCALE
    weights = torch.exp(scores - scores.amax(-1, keepdim=True).detach()) * visible
    total = weights.sum(-1, keepdim=True)
    return torch.einsum("bnqk,bnkd->bnqd", weights / torch.where(total > 0, total, 1.0), v)


def _padding(batch: int, num_keys: int) -> torch.Tensor:
    mask = torch.ones(batch, 1, 1, num_keys, dtype=torch.bool)
    mask[-1, ..., :3] = False
    return mask


_MASKS = {
    "none": lambda: None,
    "padding": lambda: _padding(2, 7),
    "per batch": lambda: torch.rand(2, 1, 7, 7, generator=torch.Generator().manual_seed(5)) > 0.4,
    "per head": lambda: torch.rand(1, 4, 7, 7, generator=torch.Generator().manual_seed(6)) > 0.4,
    "per batch and head": lambda: torch.rand(2, 4, 7, 7, generator=torch.Generator().manual_seed(7)) > 0.4,
    "shared": lambda: torch.rand(1, 1, 7, 7, generator=torch.Generator().manual_seed(8)) > 0.4,
}


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("mask_name", list(_MASKS))
def test_attention_equals_the_formula(
    implementation: ModuleType, mask_name: str, is_causal: bool, kv_heads: int
) -> None:
    mask = _MASKS[mask_name]()
    visible = torch.ones(2, 4, 7, 7, dtype=torch.bool) if mask is None else mask.expand(2, 4, 7, 7)
    if is_causal:
        visible = visible & torch.ones(7, 7, dtype=torch.bool).tril()
    _same_with_gradients(
        lambda q, k, v: implementation.attention(q, k, v, mask=mask, is_causal=is_causal, scale=SCALE),
        lambda q, k, v: _eager_attention(q, k, v, visible),
        [_random(2, 4, 7, 8), _random(2, kv_heads, 7, 8, seed=1), _random(2, kv_heads, 7, 6, seed=2)],
    )


@pytest.mark.parametrize("num_queries", [1, 3])
@pytest.mark.parametrize("with_mask", [False, True])
def test_causal_queries_are_the_last_positions(implementation: ModuleType, num_queries: int, with_mask: bool) -> None:
    """What a decoder with a key/value cache needs: the last rows of the square computation."""
    q, k, v = _random(2, 4, 7, 8), _random(2, 2, 7, 8, seed=1), _random(2, 2, 7, 8, seed=2)
    mask = _padding(2, 7) if with_mask else None
    whole = implementation.attention(q, k, v, mask=mask, is_causal=True, scale=SCALE)
    last = implementation.attention(q[:, :, -num_queries:], k, v, mask=mask, is_causal=True, scale=SCALE)
    torch.testing.assert_close(last, whole[:, :, -num_queries:])


def test_a_query_that_sees_nothing_gives_zeros_and_no_gradient(implementation: ModuleType) -> None:
    mask = torch.ones(2, 1, 7, 7, dtype=torch.bool)
    mask[1, :, 2] = False
    inputs = [_random(2, 4, 7, 8), _random(2, 2, 7, 8, seed=1), _random(2, 2, 7, 8, seed=2)]
    inputs = [tensor.requires_grad_() for tensor in inputs]
    out = implementation.attention(*inputs, mask=mask, is_causal=False, scale=SCALE)
    assert torch.equal(out[1, :, 2], torch.zeros(4, 8))
    assert out[0].abs().min() > 0
    blind = torch.autograd.grad(out[1, :, 2].sum(), inputs, retain_graph=True)
    assert all(torch.equal(gradient, torch.zeros_like(gradient)) for gradient in blind)
    whole = torch.autograd.grad(out.sum(), inputs)
    assert all(torch.isfinite(gradient).all() for gradient in whole)


def test_attention_dropout_keeps_the_mean(implementation: ModuleType) -> None:
    """Equal scores over 2048 keys whose values are 1: kept weights are scaled up, so the output stays near 1."""
    torch.manual_seed(0)
    q, k, v = torch.zeros(1, 4, 8, 8), torch.zeros(1, 4, 2048, 8), torch.ones(1, 4, 2048, 8)
    out = implementation.attention(q, k, v, mask=None, is_causal=False, scale=SCALE, dropout=0.25)
    assert not torch.allclose(out, torch.ones_like(out), atol=1e-3)
    assert out.mean().item() == pytest.approx(1.0, abs=0.02)


# --- the public functions ---------------------------------------------------------------------------------------------


def test_gradients_are_those_of_the_functions_in_float64() -> None:
    def leaf(*shape: int, seed: int) -> torch.Tensor:
        return _random(*shape, dtype=torch.float64, seed=seed).requires_grad_()

    x, weight = leaf(2, 3, 6, seed=0), leaf(6, seed=1)
    for unit_offset in (False, True):
        assert gradcheck(lambda x, w, u=unit_offset: operators.rms_norm(x, w, 1e-3, unit_offset=u), (x, weight))
    cos, sin = (angle.double() for angle in _angles(1, 3, 4))
    q, k, v = leaf(1, 4, 3, 6, seed=2), leaf(1, 2, 3, 6, seed=3), leaf(1, 2, 3, 4, seed=4)
    assert gradcheck(lambda q, k: operators.rotary(q, k, cos, sin), (q, k))
    assert gradcheck(operators.swiglu, (leaf(2, 5, seed=5), leaf(2, 5, seed=6)))
    mask = torch.tensor([[True, False, False], [False, False, False], [True, True, False]])[None, None]
    for chosen, is_causal in ((None, True), (mask, False), (mask, True)):
        assert gradcheck(
            lambda q, k, v, m=chosen, c=is_causal: operators.attention(q, k, v, mask=m, is_causal=c, scale=SCALE),
            (q, k, v),
        )


def test_wrong_attention_arguments_are_refused() -> None:
    q, k = torch.zeros(1, 4, 3, 8), torch.zeros(1, 3, 3, 8)
    with pytest.raises(ValueError, match="4 query heads cannot be shared out to 3"):
        operators.attention(q, k, k, mask=None, is_causal=True, scale=1.0)
    with pytest.raises(ValueError, match="mask must be bool"):
        operators.attention(q, q, q, mask=torch.zeros(1, 1, 3, 3), is_causal=True, scale=1.0)
    with pytest.raises(ValueError, match="mask must be bool"):
        operators.attention(q, q, q, mask=torch.ones(3, 3, dtype=torch.bool), is_causal=True, scale=1.0)
    with pytest.raises(ValueError, match="3 queries to only 2 keys"):
        operators.attention(q, q[:, :, :2], q[:, :, :2], mask=None, is_causal=True, scale=1.0)


@pytest.mark.parametrize("name", ["rms_norm", "rotary", "swiglu", "attention"])
def test_implementation_names_what_runs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINDSPEED_DEVICE", "cpu")
    assert operators.implementation(name).startswith("torch ")


# --- the tests themselves ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["inverted mask", "scale left at 1", "gate and up swapped", "interleaved rotary"])
def test_a_fault_in_an_ascend_wrapper_is_noticed(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each classic mistake in calling the operators, made on purpose, must fail the comparisons above."""
    stub = npu_stub.make_stub()
    monkeypatch.setitem(sys.modules, "torch_npu", stub)
    attention, swiglu, rotary = stub.npu_fusion_attention, stub.npu_swiglu, stub.npu_rotary_mul
    if fault == "inverted mask":
        stub.npu_fusion_attention = lambda *a, atten_mask, **kw: attention(*a, atten_mask=~atten_mask, **kw)
        failing = lambda: test_attention_equals_the_formula(npu, "per batch", False, 2)  # noqa: E731
    elif fault == "scale left at 1":
        stub.npu_fusion_attention = lambda *a, scale, **kw: attention(*a, **kw)
        failing = lambda: test_attention_equals_the_formula(npu, "none", True, 2)  # noqa: E731
    elif fault == "gate and up swapped":
        stub.npu_swiglu = lambda x, dim: swiglu(torch.cat(x.chunk(2, dim)[::-1], dim), dim=dim)
        failing = lambda: test_swiglu_equals_its_formula(npu)  # noqa: E731
    else:
        order = torch.arange(8).view(2, 4).t().flatten()
        stub.npu_rotary_mul = lambda x, r1, r2, rotary_mode: rotary(x[..., order], r1, r2)
        failing = lambda: test_rotary_equals_transformers(npu, 1, 2)  # noqa: E731
    with pytest.raises(AssertionError):
        failing()
