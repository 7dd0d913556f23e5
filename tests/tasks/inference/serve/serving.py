"""Services over toys in this process, and models whose next words are known."""

from __future__ import annotations

import contextlib
import threading
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence

import openai
import pytest
import torch
from torch import Tensor

from mindspeed_llm.tasks.inference.adapters.hf import HFBackend
from mindspeed_llm.tasks.inference.backend import Batch, Cache
from mindspeed_llm.tasks.inference.causal_lm import CausalLM
from mindspeed_llm.tasks.inference.prompt_format import PromptFormat
from mindspeed_llm.tasks.inference.serve.check import Address
from mindspeed_llm.tasks.inference.serve.main import make_runner
from mindspeed_llm.tasks.inference.serve.ranks import OneRank
from mindspeed_llm.tasks.inference.serve.service import Service
from mindspeed_llm.tasks.preprocess.chat_template import ChatTemplateRenderer
from mindspeed_llm.tasks.preprocess.tokenizers import as_tokenizer
from tests.support.tokenizers import chatml_tokenizer
from tests.support.toys import build_toy
from tests.tasks.inference.plain_backend import PlainCache

MODEL = "toy"
SLOTS = 3


class Counting:
    """A backend that remembers what it was asked."""

    def __init__(self, backend: HFBackend) -> None:
        self._backend = backend
        self.batches: list[Batch] = []

    def __getattr__(self, name: str) -> object:
        return getattr(self._backend, name)

    def forward(self, batch: Batch, cache: Cache) -> Tensor:
        self.batches.append(batch)
        return self._backend.forward(batch, cache)


class Reciter:
    """A backend that goes on with `text` from the letter behind the last `|` of what it is given, and then ends.

    It takes `seconds` for a step, and stands still while `gate` is closed.
    """

    def __init__(self, text: str, *, vocab_size: int, end: int, encode: Callable[[str], list[int]]) -> None:
        self._next = [*encode(text), end]
        self._mark = encode("|")[0]
        self.vocab_size, self.max_length = vocab_size, 512
        self.device = torch.device("cpu")
        self.replica, self.replicas, self.is_first_of_replica = 0, 1, True
        self.gate = threading.Event()
        self.gate.set()
        self.batches: list[Batch] = []
        self.seconds = 0.0
        self.error: Exception | None = None

    def new_cache(self, slots: int, length: int) -> PlainCache:
        return PlainCache(slots, length)

    def forward(self, batch: Batch, cache: PlainCache) -> Tensor:
        self.gate.wait(20)
        time.sleep(self.seconds)
        if self.error is not None:
            raise self.error
        self.batches.append(batch)
        for row, width, slot, start in zip(batch.tokens, batch.widths, batch.slots, batch.starts, strict=True):
            cache.tokens[slot, start : start + width] = row[:width]
        logits = torch.zeros(len(batch.wanted), self.vocab_size)
        for place, (row, column) in enumerate(batch.wanted):
            text = cache.tokens[batch.slots[row], : batch.starts[row] + column + 1].tolist()
            said = text[::-1].index(self._mark) if self._mark in text else 0
            logits[place, self._next[said % len(self._next)]] = 20.0
        return logits


def toy_lm() -> CausalLM:
    """A toy Llama over bytes, its stop token the end mark of its chats."""
    tokenizer = chatml_tokenizer()
    model = build_toy("llama", vocab_size=len(tokenizer), max_position_embeddings=192)
    return _lm(Counting(HFBackend(model, device=torch.device("cpu"))), tokenizer)


def reciting_lm(text: str) -> CausalLM:
    """See `Reciter`."""
    tokenizer = chatml_tokenizer()
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    return _lm(Reciter(text, vocab_size=len(tokenizer), end=end, encode=tokenizer.encode), tokenizer)


def _lm(backend, tokenizer) -> CausalLM:
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    return CausalLM(backend, as_tokenizer(tokenizer), stop_ids=frozenset({end}), batch_size=SLOTS, fingerprint="0123")


@contextlib.contextmanager
def serving(
    lm: CausalLM, *, length: int | None = None, api_key: str | None = None, with_chat: bool = True, waiting: int = 64
) -> Iterator[Service]:
    """A service on a free port, whose model's thread is not this one."""
    length = length or lm.max_length
    template = None
    if with_chat:
        renderer = ChatTemplateRenderer(lm.tokenizer)
        template = PromptFormat(name="own", prompt_ids=renderer.prompt_ids, stop_words=("<|im_end|>",))
    service = Service(
        lm,
        make_runner(lm, length),
        OneRank(),
        address=Address(host="127.0.0.1", port=0, api_key=api_key),
        template=template,
        model=MODEL,
        length=length,
        waiting=waiting,
    )
    failed: list[Exception] = []

    def run() -> None:
        try:
            service.run()
        except Exception as error:
            failed.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield service
    finally:
        service.end(at_once=True)
        thread.join(20)
    assert not thread.is_alive()
    if failed:
        raise failed[0]


def serving_args(**changes: object) -> Namespace:
    """What inference.py makes of --serve, as far as the endpoint looks at it; the port is any."""
    values = {"host": "127.0.0.1", "port": 0, "api_key": None, "load": "runs/toy", "max_length": None}
    values |= {"prompt_type": None, "prompt_type_path": None, "hf_chat_template": False}
    values |= {"enable_thinking": "none", "drop_thinking": "true", "reasoning_effort": None}
    return Namespace(**{**values, **changes})


def url_in(log: str) -> str:
    """The base address that the log names."""
    return log.split("serving at ")[1].split(",")[0]


def client_of(service: Service, *, api_key: str = "none", **options: object) -> openai.OpenAI:
    """OpenAI's own client; it does not try again."""
    return openai.OpenAI(base_url=service.url, api_key=api_key, max_retries=0, timeout=30, **options)


def wait_for(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    """Wait until the condition holds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "did not come true in time"
        time.sleep(0.005)


def generated(lm: CausalLM, prompt: Sequence[int], count: int) -> list[int]:
    """What transformers makes of a prompt: the most probable tokens, without the one that ends them."""
    ids = torch.tensor([list(prompt)])
    end = next(iter(lm.stop_ids))
    found = lm.backend.model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=count,
        do_sample=False,
        eos_token_id=end,
        pad_token_id=0,
    )
    answer = found[0, ids.shape[1] :].tolist()
    return answer[:-1] if answer[-1] == end else answer


def assert_alike(found: object, expected: object) -> None:
    """Equal, but for the last digits of numbers: what is computed anew need not be bit for bit what was kept."""
    if isinstance(expected, float):
        assert found == pytest.approx(expected, abs=1e-4)
    elif isinstance(expected, dict):
        assert list(found) == list(expected)
        assert_alike(list(found.values()), list(expected.values()))
    elif isinstance(expected, list):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_alike(one, other)
    else:
        assert found == expected
