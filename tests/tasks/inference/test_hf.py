"""Logits of ragged batches over a cache equal a plain forward pass of transformers over each whole text."""

from __future__ import annotations

import copy
import logging
import random
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.inference.adapters import hf
from mindspeed_llm.tasks.inference.adapters.hf import HFBackend
from mindspeed_llm.tasks.inference.adapters.hf_cache import KeyValueCache, Plan
from mindspeed_llm.tasks.inference.backend import Batch, Cache
from tests.support.toys import TOYS

CPU = torch.device("cpu")
VOCABULARY, WINDOW, LENGTH = 509, 5, 20
BAR = 1e-5
_COMMON = {**TOYS["llama"], "num_hidden_layers": 2, "max_position_embeddings": 32, "sliding_window": WINDOW}
_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 40}
_FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"layer_types": ["sliding_attention", "full_attention"]},  # whose models read neither this nor a window
    "qwen2": {},
    "qwen3": {"use_sliding_window": True, "max_window_layers": 1},
    "qwen3_moe": _MOE,
    "mistral": {},
    "gemma2": {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0, "query_pre_attn_scalar": 16},
    "gemma3_text": {"layer_types": ["sliding_attention", "full_attention"], "query_pre_attn_scalar": 16},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "deepseek_v3": {
        "num_key_value_heads": 6,
        "head_dim": 8,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "moe_intermediate_size": 32,
        "q_lora_rank": 24,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16,
        "v_head_dim": 12,
        "first_k_dense_replace": 1,
        "rope_scaling": None,
    },
    "gpt2": {"n_embd": 48, "n_head": 6, "n_layer": 2, "n_positions": 32},
    "mamba": {"state_size": 8, "hidden_size": 32},
    "bloom": {"hidden_size": 48, "n_head": 6, "n_layer": 2},
}
_WITHOUT_CACHE = {"mamba", "bloom"}


def build(family: str) -> PreTrainedModel:
    """A toy in fp64, so that nothing but a fault makes a difference."""
    fields = {**_COMMON, **_FAMILIES[family]}
    if family in ("gpt2", "mamba", "bloom"):
        fields = {**_FAMILIES[family], "vocab_size": VOCABULARY, "num_hidden_layers": 2, "bos_token_id": 1}
        fields |= {"eos_token_id": 2, "pad_token_id": 0}
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(
        CONFIG_MAPPING[family](**fields), dtype=torch.float32, experts_implementation="eager"
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1 and name.rpartition(".")[2] != "A_log":
                parameter.normal_(0.0, 0.2)
            elif name.endswith(("norm.weight", "bias", "sinks")):
                parameter.add_(0.2 * torch.randn(parameter.shape))
    return model.double().eval()


class Check:
    """Feeds parts of texts to a backend and notes the largest difference to the plain forward pass."""

    def __init__(self, model: PreTrainedModel, backend: HFBackend) -> None:
        self.model, self.backend = model, backend
        self.worst = 0.0

    @torch.no_grad()
    def use(self, *texts: Sequence[int]) -> None:
        self.texts = [list(text) for text in texts]
        self.logits = [self.model(torch.tensor([text]), use_cache=False).logits[0] for text in self.texts]

    def feed(
        self,
        cache: Cache,
        rows: Sequence[tuple[int, int, int, int]],
        wanted: Sequence[tuple[int, int]] | None = None,
    ) -> None:
        """`rows`: (slot, text, first position, width) each; `wanted`: last tokens if None."""
        slots, texts, starts, widths = (list(column) for column in zip(*rows, strict=True))
        tokens = torch.full((len(rows), max(widths) + 1), 7)  # a column more than is used, which changes nothing
        for number, (_, text, start, width) in enumerate(rows):
            tokens[number, :width] = torch.tensor(self.texts[text][start : start + width])
        wanted = wanted or [(number, width - 1) for number, width in enumerate(widths)]
        found = self.backend.forward(
            Batch(tokens=tokens, widths=widths, slots=slots, starts=starts, wanted=wanted), cache
        )
        assert found.dtype == torch.float32
        assert found.shape == (len(wanted), VOCABULARY)
        expected = torch.stack([self.logits[texts[row]][starts[row] + column] for row, column in wanted])
        self.worst = max(self.worst, float((found - expected).abs().max() / expected.std()))


def run(model: PreTrainedModel, backend: HFBackend) -> float:
    """All kinds of calls; returns the largest difference over the standard deviation of the logits."""
    source = random.Random(1)
    texts = [[source.randrange(3, VOCABULARY) for _ in range(length)] for length in (LENGTH, 13, 17)]
    check = Check(model, backend)
    check.use(*texts)
    for a, b, c in ((0, 1, 2), (1, 2, 3), (3, 0, 2)):  # neighbours are read as views, others are gathered
        cache = backend.new_cache(4, LENGTH)
        check.feed(cache, [(a, 0, 0, 7), (b, 1, 0, 3), (c, 2, 0, 10)])
        for step in range(2):
            check.feed(cache, [(a, 0, 7 + step, 1), (b, 1, 3 + step, 1), (c, 2, 10 + step, 1)])
        wanted = [(1, 2), (0, 3), (1, 7), (1, 0), (2, 0)]
        check.feed(cache, [(a, 0, 9, 5), (b, 1, 5, 8), (c, 2, 12, 1)], wanted)
        check.feed(cache, [(b, 1, 7, 6), (c, 2, 13, 4)])  # goes back to an earlier position
    cache = backend.new_cache(2, LENGTH)
    check.feed(cache, [(1, 0, 0, 12)], [(0, column) for column in range(12)])
    for position in range(12, LENGTH):
        check.feed(cache, [(1, 0, position, 1)])
    cache = backend.new_cache(3, LENGTH)
    check.feed(cache, [(0, 0, 0, 4), (1, 1, 0, 4), (2, 2, 0, 4)])
    for position in range(4, 8):
        check.feed(cache, [(slot, slot, position, 1) for slot in range(3)])
    check.feed(cache, [(0, 0, 8, 6), (1, 1, 8, 2), (2, 2, 8, 5)], [(row, 1) for row in range(3)])
    # Texts that share a beginning, and texts that change places.
    check.use(texts[0], texts[0][:9] + texts[1][:4], texts[0][:6] + texts[2][:11])
    cache = backend.new_cache(3, LENGTH)
    check.feed(cache, [(0, 0, 0, 12)])
    cache.copy([0, 0], [1, 2], 9)
    check.feed(cache, [(0, 0, 12, 8), (1, 1, 9, 4), (2, 2, 6, 11)], [(1, 0), (1, 3), (2, 0), (2, 10), (0, 7)])
    cache.copy([1, 0, 2], [0, 1, 2], 13)
    check.feed(cache, [(0, 1, 12, 1), (1, 0, 13, 7)])
    return check.worst


@pytest.mark.parametrize("family", _FAMILIES)
def test_equals_a_plain_forward_pass(family: str, caplog: pytest.LogCaptureFixture) -> None:
    model = build(family)
    with caplog.at_level(logging.INFO, logger="mindspeed_llm"):
        backend = HFBackend(copy.deepcopy(model), device=CPU)
    has_cache = isinstance(backend.new_cache(1, 4), KeyValueCache)
    assert has_cache == (family not in _WITHOUT_CACHE)
    assert ("whole text" in caplog.text) != has_cache
    assert run(model, backend) < BAR


def _ignores_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Plan.__init__

    def init(self: Plan, batch: Batch, device: torch.device) -> None:
        made(self, batch, device)
        self.positions = torch.arange(self.lowest, self.lowest + self.width).unsqueeze(0)

    monkeypatch.setattr(Plan, "__init__", init)


def _ignores_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    mask = Plan.mask
    monkeypatch.setattr(Plan, "mask", lambda self, window, dtype, *, always: mask(self, None, dtype, always=True))
    monkeypatch.setattr(Plan, "first_seen", lambda self, window: 0)


def _sees_what_follows(monkeypatch: pytest.MonkeyPatch) -> None:
    mask = Plan.mask

    def open_mask(self: Plan, window: int | None, dtype: torch.dtype, *, always: bool) -> torch.Tensor | None:
        made = mask(self, window, dtype, always=always)
        return made if made is None or self.is_level else torch.zeros_like(made)

    monkeypatch.setattr(Plan, "mask", open_mask)


@pytest.mark.parametrize(
    "fault", [_ignores_positions, _ignores_windows, _sees_what_follows], ids=lambda fault: fault.__name__
)
def test_a_fault_is_seen(fault: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("mistral")
    fault(monkeypatch)
    assert run(model, HFBackend(copy.deepcopy(model), device=CPU)) > 10 * BAR


def test_a_window_of_another_size_is_seen() -> None:
    model = build("mistral")
    other = copy.deepcopy(model)
    other.config.sliding_window = WINDOW - 1
    assert run(model, HFBackend(other, device=CPU)) > 10 * BAR


def test_experts_are_computed_another_way_for_single_tokens() -> None:
    """As on accelerators, where `generate` does so too."""
    model = build("qwen3_moe").float()
    other = copy.deepcopy(model)
    other.set_experts_implementation("grouped_mm")
    backend = HFBackend(other, device=CPU)
    assert not backend._switches_experts
    backend._switches_experts = True
    seen = []
    other.register_forward_pre_hook(
        lambda _, inputs, named: seen.append((*named["input_ids"].shape, other.config._experts_implementation)),
        with_kwargs=True,
    )
    assert run(model, backend) < 5 * BAR  # fp32: grouped products know no fp64
    few = model.config.num_experts // model.config.num_experts_per_tok
    assert {way for rows, width, way in seen if width == 1 and rows <= few} == {"batched_mm"}
    # More rows would copy more weights than there are.
    assert {way for rows, width, way in seen if width == 1 and rows > few} == {"grouped_mm"}
    assert {way for rows, width, way in seen if width > 1} == {"grouped_mm"}


@pytest.fixture(scope="module")
def backend() -> Iterator[HFBackend]:
    yield HFBackend(build("llama").float(), device=CPU)


def test_the_head_sees_wanted_tokens_only(backend: HFBackend) -> None:
    seen: list[torch.Size] = []
    hook = backend.model.lm_head.register_forward_hook(lambda module, inputs, output: seen.append(inputs[0].shape))
    try:
        tokens = torch.arange(10).reshape(2, 5)
        wanted = [(0, 4), (1, 1), (1, 2)]
        batch = Batch(tokens=tokens, widths=[5, 3], slots=[0, 1], starts=[0, 0], wanted=wanted)
        backend.forward(batch, backend.new_cache(2, 8))
    finally:
        hook.remove()
    assert seen == [torch.Size([1, 3, 48])]


def test_half_precision(backend: HFBackend) -> None:
    """The cache and the masks have the model's own type; logits are fp32."""
    low = HFBackend(build("llama").bfloat16(), device=CPU)
    cache = low.new_cache(2, 8)
    tokens = torch.arange(10).reshape(2, 5)
    last = [(0, 4), (1, 4)]
    logits = low.forward(Batch(tokens=tokens, widths=[5, 5], slots=[0, 1], starts=[0, 0], wanted=last), cache)
    again = Batch(tokens=tokens[:, 3:], widths=[2, 1], slots=[0, 1], starts=[3, 4], wanted=[(0, 1)])
    exact = backend.forward(
        Batch(tokens=tokens, widths=[5, 5], slots=[0, 1], starts=[0, 0], wanted=last), backend.new_cache(2, 8)
    )
    assert logits.dtype == torch.float32
    assert (logits - exact).abs().max() < 0.15 * exact.std()
    assert (low.forward(again, cache)[0] - exact[0]).abs().max() < 0.15 * exact.std()


def test_one_step_reads_no_copy_of_the_cache(backend: HFBackend) -> None:
    cache = backend.new_cache(4, 16)
    tokens = torch.arange(12).reshape(3, 4)
    wanted = [(0, 3), (1, 3), (2, 3)]
    backend.forward(Batch(tokens=tokens, widths=[4] * 3, slots=[0, 1, 2], starts=[0] * 3, wanted=wanted), cache)
    step = Batch(tokens=tokens[:, :1], widths=[1] * 3, slots=[0, 1, 2], starts=[4, 3, 2], wanted=[(0, 0)])
    cache.begin(Plan(step, CPU))
    new = torch.zeros(3, 2, 1, 16)
    keys, values = cache.update(new, new, 0)
    assert keys.shape == (3, 2, 5, 16)
    assert keys.untyped_storage().data_ptr() == cache._keys[0].untyped_storage().data_ptr()
    assert values.untyped_storage().data_ptr() == cache._values[0].untyped_storage().data_ptr()


def test_what_cannot_be_held(backend: HFBackend) -> None:
    with pytest.raises(UserError, match=r"33 tokens.*32 positions"):
        backend.new_cache(1, 33)
    with pytest.raises(UserError, match=r"no memory.*texts of 32 tokens \(.* GiB\)"):
        backend.new_cache(1 << 40, 32)


def test_the_limit_of_a_model_without_positions() -> None:
    assert HFBackend(build("mamba").float(), device=CPU).max_length == hf._UNBOUNDED
