"""A stand-in for torch_npu on CPU: the documented meaning of the operators we call, in plain torch.

Written from the operators' documentation and not from our wrappers, and stricter than the library where the documents
state a limit, so that a wrapper that passes here passes for the right reason. The operators go through torch's
dispatcher under their real schemas: wrong argument names fail as they would on the device.
"""

from __future__ import annotations

import functools
import importlib.machinery
import types

import torch

SCHEMAS = {
    "npu_rms_norm": "(Tensor self, Tensor gamma, float epsilon=1e-06) -> (Tensor, Tensor)",
    "npu_rotary_mul": "(Tensor self, Tensor r1, Tensor r2, str rotary_mode='half', Tensor? rotate=None) -> Tensor",
    "npu_swiglu": "(Tensor self, int dim=-1) -> Tensor",
    "npu_fusion_attention": (
        "(Tensor query, Tensor key, Tensor value, int head_num, str input_layout, Tensor? pse=None, "
        "Tensor? padding_mask=None, Tensor? atten_mask=None, float scale=1., float keep_prob=1., "
        "int pre_tockens=2147483647, int next_tockens=2147483647, int inner_precise=0, int[]? prefix=None, "
        "int[]? actual_seq_qlen=None, int[]? actual_seq_kvlen=None, int sparse_mode=0, bool gen_mask_parallel=True, "
        'bool sync=False, str softmax_layout="", Tensor? sink=None, Tensor? dropout_mask=None, int seed=0, '
        "int offset=0) -> (Tensor, Tensor, Tensor, Tensor, int, int, int)"
    ),
}


def npu_rms_norm(self, gamma, epsilon=1e-6):
    assert self.dtype == gamma.dtype, "gamma must have the type of the input"
    assert gamma.shape == self.shape[-1:]
    rstd = (self.float().square().mean(-1, keepdim=True) + epsilon).sqrt().reciprocal()
    return (self.float() * rstd * gamma.float()).to(self.dtype), rstd


def npu_rotary_mul(self, r1, r2, rotary_mode="half", rotate=None):
    assert rotary_mode == "half" and rotate is None
    assert self.dim() == r1.dim() == r2.dim() == 4 and self.shape[-1] % 2 == 0 and self.shape[-1] < 896
    assert self.dtype == r1.dtype == r2.dtype
    half = self.shape[-1] // 2
    y = torch.empty_like(self)
    y[..., :half] = r1[..., :half] * self[..., :half] - r2[..., :half] * self[..., half:]
    y[..., half:] = r1[..., half:] * self[..., half:] + r2[..., half:] * self[..., :half]
    return y


def npu_swiglu(self, dim=-1):
    assert self.shape[dim] % 2 == 0
    first, second = self.split(self.shape[dim] // 2, dim)
    return first * torch.sigmoid(first) * second


def npu_fusion_attention(
    query,
    key,
    value,
    head_num,
    input_layout,
    pse=None,
    padding_mask=None,
    atten_mask=None,
    scale=1.0,
    keep_prob=1.0,
    pre_tockens=2147483647,
    next_tockens=2147483647,
    inner_precise=0,
    prefix=None,
    actual_seq_qlen=None,
    actual_seq_kvlen=None,
    sparse_mode=0,
    gen_mask_parallel=True,
    sync=False,
    softmax_layout="",
    sink=None,
    dropout_mask=None,
    seed=0,
    offset=0,
):
    assert input_layout == "BNSD" and query.dtype == key.dtype == value.dtype
    assert query.dtype in (torch.float16, torch.bfloat16, torch.float32)
    batch, heads, num_queries, _ = query.shape
    kv_heads, num_keys = key.shape[1:3]
    assert heads == head_num and heads % kv_heads == 0
    hidden = _hidden_keys(atten_mask, sparse_mode, batch, heads, num_queries, num_keys)
    group = heads // kv_heads
    out = torch.empty(*query.shape[:3], value.shape[-1], dtype=query.dtype)
    for head in range(heads):
        scores = query[:, head].float() @ key[:, head // group].float().mT * scale
        if hidden is not None:
            blocked = hidden[:, head if hidden.shape[1] > 1 else 0]
            # As a large negative number, not as minus infinity: a row without any visible key gives something finite
            # and wrong, which the wrapper has to deal with.
            scores = scores.masked_fill(blocked, -1e30)
        weights = torch.nn.functional.dropout(scores.softmax(-1), 1.0 - keep_prob)
        out[:, head] = (weights @ value[:, head // group].float()).to(query.dtype)
    statistics = torch.zeros(batch, heads, num_queries, 8)
    return out, statistics, statistics.clone(), torch.empty(0), 0, 0, 0


def _hidden_keys(atten_mask, sparse_mode, batch, heads, num_queries, num_keys):
    """bool broadcastable to [B, N, Sq, Sk]: which keys a query does not see; None = sees everything."""
    if atten_mask is None:
        return None  # whatever the sparse mode says
    assert atten_mask.dtype in (torch.bool, torch.uint8)
    atten_mask = atten_mask.bool()
    if sparse_mode in (2, 3):
        assert torch.equal(atten_mask, torch.ones(2048, 2048).triu(1).bool()), "the constant compressed mask"
        diagonal = num_keys - num_queries if sparse_mode == 3 else 0
        assert diagonal >= 0
        return torch.ones(num_queries, num_keys).triu(1 + diagonal).bool()[None, None]
    assert sparse_mode == 1, f"sparse mode {sparse_mode} is not described here"
    allowed = [(batch, heads), (batch, 1), (1, 1)]
    assert atten_mask.shape in [(*lead, num_queries, num_keys) for lead in allowed], tuple(atten_mask.shape)
    return atten_mask


@functools.cache
def _register() -> torch.library.Library:
    library = torch.library.Library("npu", "DEF")
    for name, schema in SCHEMAS.items():
        library.define(name + schema)
        library.impl(name, globals()[name], "CompositeImplicitAutograd")
    return library


def make_stub() -> types.ModuleType:
    """A module that can stand in sys.modules as torch_npu, with the four operators as attributes."""
    _register()
    stub = types.ModuleType("torch_npu")
    stub.__spec__ = importlib.machinery.ModuleSpec("torch_npu", None)
    for name in SCHEMAS:
        setattr(stub, name, getattr(torch.ops.npu, name))
    return stub
