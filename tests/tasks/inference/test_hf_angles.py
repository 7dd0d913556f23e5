"""Rotary angles that depend on the length of a text: each row has those of its own length, as transformers computes
them for one text alone, whatever its neighbours are.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Phi3Config, PreTrainedModel

from mindspeed_llm.tasks.inference.adapters.hf import HFBackend
from mindspeed_llm.tasks.inference.adapters.hf_angles import AnglesCache, angle_borders
from mindspeed_llm.tasks.inference.adapters.hf_cache import KeyValueCache
from mindspeed_llm.tasks.inference.backend import Batch, Cache
from mindspeed_llm.tasks.inference.causal_lm import CausalLM
from mindspeed_llm.tasks.preprocess.tokenizers import as_tokenizer
from tests.support.tokenizers import byte_tokenizer

VOCABULARY, BORDER, POSITIONS = 97, 8, 32
SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": POSITIONS, "pad_token_id": 0,
}  # fmt: skip
LONG = {"type": "longrope", "short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [2.0, 4.0, 9.0, 20.0]}


def build(config: LlamaConfig | Phi3Config) -> PreTrainedModel:
    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0.0, 0.3)
    return model.double().eval()


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return build(Phi3Config(**SIZES, rope_scaling=LONG, original_max_position_embeddings=BORDER))


class Check:
    """Feeds rows of (slot, text, first position, width), and compares with each text so far, alone."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model, self.backend = model, HFBackend(copy.deepcopy(model), device=torch.device("cpu"))
        self.texts = torch.randint(1, VOCABULARY, (3, POSITIONS), generator=torch.Generator().manual_seed(2)).tolist()

    @torch.no_grad()
    def feed(
        self, cache: Cache, *rows: tuple[int, int, int, int], wanted: Sequence[tuple[int, int]] | None = None
    ) -> None:
        slots, _, starts, widths = zip(*rows, strict=True)
        tokens = torch.zeros(len(rows), max(widths), dtype=torch.long)
        for row, (_, text, start, width) in enumerate(rows):
            tokens[row, :width] = torch.tensor(self.texts[text][start : start + width])
        wanted = wanted or [(row, width - 1) for row, width in enumerate(widths)]
        found = self.backend.forward(
            Batch(tokens=tokens, widths=widths, slots=slots, starts=starts, wanted=wanted), cache
        )
        alone = [
            self.model(torch.tensor([self.texts[text][: start + width]]), use_cache=False).logits[0, start:]
            for _, text, start, width in rows
        ]
        expected = torch.stack([alone[row][column] for row, column in wanted]).float()
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5 * float(expected.std()))


def test_the_angles_differ(model: PreTrainedModel) -> None:
    """Else the tests below could not fail."""
    text = torch.arange(1, BORDER + 2)[None]
    with torch.no_grad():
        difference = model(text).logits[0, BORDER - 1] - model(text[:, :-1]).logits[0, -1]
    assert difference.std() > 0.05


def test_each_row_has_the_angles_of_its_own_length(model: PreTrainedModel) -> None:
    check = Check(model)
    cache = check.backend.new_cache(4, 24)
    assert isinstance(cache, AnglesCache)
    check.feed(cache, (1, 0, 0, 5), (0, 1, 0, 12), (3, 2, 0, 7))  # short ones beside a long one
    for step in range(4):  # two of them grow beyond the border, one after the other
        check.feed(cache, (1, 0, 5 + step, 1), (0, 1, 12 + step, 1), (3, 2, 7 + step, 1))
    # Logits of one half of the rows alone, and of tokens within rows.
    check.feed(cache, (2, 0, 0, 6), (0, 1, 16, 2), wanted=[(1, 1), (1, 0)])
    check.feed(cache, (2, 0, 6, 4), (0, 1, 18, 1), wanted=[(0, 3), (1, 0), (0, 1)])
    # A beginning of a long text, continued as a short one, and a short text as a long one.
    check.feed(cache, (0, 1, 4, 3), (1, 0, 9, 1))
    check.feed(cache, (3, 2, 2, 20))


def test_copies_have_the_angles_of_their_source(model: PreTrainedModel) -> None:
    check = Check(model)
    cache = check.backend.new_cache(3, 24)
    check.feed(cache, (0, 0, 0, 12), (1, 1, 0, 5))
    cache.copy([0, 1], [1, 2], 5)
    check.feed(cache, (1, 0, 5, 2), (2, 1, 5, 2), (0, 0, 12, 1))
    cache.copy([0, 2], [2, 0], 5)
    check.feed(cache, (2, 0, 5, 6), (0, 1, 5, 1))


def test_texts_that_stay_below_the_border_need_no_care(model: PreTrainedModel) -> None:
    assert isinstance(Check(model).backend.new_cache(1, BORDER), KeyValueCache)


def test_models_without_such_angles() -> None:
    """Those of "dynamic" change where the positions of a model end."""
    plain = LlamaConfig(**SIZES)
    dynamic = LlamaConfig(**SIZES, rope_scaling={"rope_type": "dynamic", "factor": 4.0})
    assert angle_borders(plain) == angle_borders(dynamic) == ()
    check = Check(build(dynamic))
    cache = check.backend.new_cache(3, POSITIONS)
    check.feed(cache, (0, 0, 0, 5), (1, 1, 0, POSITIONS))
    check.feed(cache, (0, 0, 5, 1), (2, 2, 0, 20))


def test_an_interruption_leaves_no_wrong_angles(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """A chat goes on after Ctrl-C, which came before the keys had the angles of the longer text."""
    check = Check(model)
    cache = check.backend.new_cache(2, 24)
    check.feed(cache, (0, 0, 0, 6), (1, 1, 0, 5))

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(check.backend, "_forward", interrupted)
        check.feed(cache, (0, 0, 6, 4))
    check.feed(cache, (0, 0, 6, 4), (1, 1, 5, 1))


def test_answers_are_those_of_generate_where_it_keeps_no_keys_of_other_angles(model: PreTrainedModel) -> None:
    """Phi-3 computes them anew itself; Llama does not, and only without a cache answers as one text alone."""
    llama = build(LlamaConfig(**SIZES, rope_scaling=LONG | {"original_max_position_embeddings": BORDER, "factor": 4.0}))
    random = torch.Generator().manual_seed(4)
    prompts = [torch.randint(1, VOCABULARY, (length,), generator=random).tolist() for length in (4, 5, 6, 7, 8, 12)]
    for whole, options in ((model, {}), (llama, {"use_cache": False})):
        lm = CausalLM(
            HFBackend(copy.deepcopy(whole), device=torch.device("cpu")),
            as_tokenizer(byte_tokenizer()),
            stop_ids=frozenset(),
        )
        answers = lm.generate([lm.request(prompt, max_new_tokens=10) for prompt in prompts], batch_size=3)
        assert [list(answer.token_ids) for answer in answers] == [continued(whole, text, **options) for text in prompts]
    cached, uncached = ([continued(llama, text, use_cache=keeps) for text in prompts] for keeps in (True, False))
    assert cached != uncached and cached[-1] == uncached[-1], "what the guide says of it"


def continued(model: PreTrainedModel, text: list[int], **options: bool) -> list[int]:
    """What `generate` of transformers answers to a text alone."""
    found = model.generate(
        torch.tensor([text]), max_new_tokens=10, do_sample=False, eos_token_id=None, pad_token_id=0, **options
    )
    return found[0, len(text) :].tolist()
