"""Rows that run on the rank pool: models of the Megatron backend that generate."""

from __future__ import annotations

import contextlib
import gc
import hashlib
import warnings
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from mindspeed_llm.tasks.inference.adapters.megatron import MegatronBackend
from mindspeed_llm.tasks.inference.backend import Batch
from mindspeed_llm.tasks.inference.causal_lm import CausalLM
from mindspeed_llm.tasks.inference.engine import Engine
from mindspeed_llm.tasks.inference.generation import Request
from tests.support.megatron_args import megatron_args

WIDTHS, MORE = (5, 9, 3, 12), (4, 1, 6, 2)
"""Tokens of the four texts of `reference.pt` that are computed first, and those that come next."""
LENGTH = 34
"""Of slots: two more than the texts have."""


@contextlib.contextmanager
def positions_of_columns() -> Iterator[None]:
    """Rotary positions are those of the columns of a batch."""
    from mindspeed_llm.core.key_value_cache import Rows

    original = Rows.__init__

    def shifted(self: Any, **options: Any) -> None:
        original(self, **options)
        self.positions = self.positions - self.positions[:, :1]

    with mock.patch.object(Rows, "__init__", shifted):
        yield


@contextlib.contextmanager
def stale_places() -> Iterator[None]:
    """Of texts of different lengths, keys and values stand where those of the first would."""
    from mindspeed_llm.core.key_value_cache import Rows

    original = Rows.__init__

    def shifted(self: Any, **options: Any) -> None:
        original(self, **options)
        self._places = self._places[:1].expand_as(self._places)

    with mock.patch.object(Rows, "__init__", shifted):
        yield


@contextlib.contextmanager
def one_more_seen() -> Iterator[None]:
    """Sliding windows are one position wider."""
    from mindspeed_llm.core.key_value_cache import Rows

    original = Rows.visible
    with mock.patch.object(
        Rows, "visible", lambda self, window: original(self, None if window is None else window + 1)
    ):
        yield


MUTANTS: dict[str | None, Callable[[], contextlib.AbstractContextManager[None]]] = {
    None: contextlib.nullcontext,
    **{mutant.__name__: mutant for mutant in (positions_of_columns, stale_places, one_more_seen)},
}


@contextlib.contextmanager
def loaded(args: Namespace) -> Iterator[MegatronBackend]:
    """The backend for arguments; gone afterwards."""
    from mindspeed_llm.tasks.inference.adapters.megatron_load import load_megatron

    with warnings.catch_warnings():
        # torch.distributed names collectives anew, which megatron-core calls by their old names.
        warnings.filterwarnings("ignore", category=FutureWarning)
        backend = load_megatron(args)
        try:
            yield backend
        finally:
            backend.close()
            gc.collect()


def ask(
    *,
    folder: str,
    load: str | None = None,
    prompts: Sequence[Sequence[int]] = (),
    max_new_tokens: int = 0,
    beams: int = 0,
    mutant: str | None = None,
    **values: Any,
) -> dict[str, Any]:
    """Logits and answers of the model in `folder`, which has `reference.pt` beside it.

    Args:
        load: where weights come from; None: from `folder`.
        prompts: to continue greedily, three at once; copies of the model share them.
        beams: of a beam search over the last prompt; 0: none.
        mutant: a deliberate fault.

    Returns:
        `errors`, of each kind of step the greatest difference to the reference in standard deviations of its logits;
        `bits`, a hash of all logits; `copy` (number, count, whether first); `answers` by place in `prompts`; `best`,
        the answer of the beam search.
    """
    path = Path(folder)
    args = megatron_args(path, world_size=dist.get_world_size(), **values)
    args.load = load or folder
    with loaded(args) as backend, MUTANTS[mutant]():
        found = _logits(backend, torch.load(path / "reference.pt"))
        mine = range(backend.replica, len(prompts), backend.replicas)
        return {
            **found,
            "copy": (backend.replica, backend.replicas, backend.is_first_of_replica),
            "answers": dict(zip(mine, _answers(backend, [prompts[n] for n in mine], max_new_tokens), strict=True)),
            "best": _best(backend, prompts[-1], max_new_tokens, beams) if beams else None,
        }


def ask_checkpoint(*, flags: Sequence[str], reference: str | None) -> dict[str, Any]:
    """Logits of the model that a command line names, whose shape its checkpoint says, see `ask`.

    Args:
        reference: the folder with `reference.pt`; None: nothing is asked.
    """
    from mindspeed_llm.errors import UserError
    from mindspeed_llm.tasks.inference.arguments.inference import inference_arguments
    from mindspeed_llm.tasks.inference.megatron_model import complete
    from mindspeed_llm.tasks.inference.source import find_source
    from tests.training.checkpointing.rows import logged

    try:
        args = inference_arguments([*flags, "--backend", "megatron", "--prompt", "none"])
        with logged() as lines:
            complete(args, find_source(args, dist.get_world_size()))
        text = "\n".join(lines)
        with loaded(args) as backend:
            found = {} if reference is None else _logits(backend, torch.load(Path(reference) / "reference.pt"))
            return {**found, "error": None, "text": text, "vocab_size": backend.vocab_size, "dtype": backend.dtype}
    except UserError as error:
        return {"error": str(error)}


def _logits(backend: MegatronBackend, reference: dict[str, Tensor]) -> dict[str, Any]:
    ids, expected = reference["ids"], reference["logits"]
    errors: dict[str, float] = {}
    bits = hashlib.sha256()
    cache = backend.new_cache(6, LENGTH)
    slots = [3, 0, 5, 1]
    filled = [0] * len(ids)

    def compute(kind: str, widths: Sequence[int], *, wanted: str, rows: Sequence[int] = range(4)) -> None:
        """The next tokens of some rows, filled up with token 7, and the logits after all of them or the last ones."""
        tokens = torch.full((len(rows), max(widths)), 7)
        for place, (row, width) in enumerate(zip(rows, widths, strict=True)):
            tokens[place, :width] = ids[row, filled[row] : filled[row] + width]
        places = [
            (place, column)
            for place, width in enumerate(widths)
            for column in range(width)
            if wanted == "all" or column == width - 1
        ]
        batch = Batch(
            tokens=tokens,
            widths=widths,
            slots=[slots[row] for row in rows],
            starts=[filled[row] for row in rows],
            wanted=places,
        )
        logits = backend.forward(batch, cache)
        assert (logits.dtype, logits.device) == (torch.float32, backend.device)
        right = torch.stack([expected[rows[place], filled[rows[place]] + column] for place, column in places])
        bits.update(logits.contiguous().numpy().tobytes())
        error = float((logits - right).abs().max() / expected.std())
        errors[kind] = max(errors.get(kind, 0.0), error)
        for row, width in zip(rows, widths, strict=True):
            filled[row] += width

    assert backend.forward(_nothing_wanted(), backend.new_cache(1, 4)).shape == (0, backend.vocab_size)
    compute("first tokens", WIDTHS, wanted="all")
    compute("more tokens", MORE, wanted="all")
    # Rows change places, texts too: the second and the third; the first is in a slot that was free.
    cache.copy([slots[1], slots[2], slots[0]], [slots[2], slots[1], 2], LENGTH)
    slots[0], slots[1], slots[2] = 2, slots[2], slots[1]
    for _ in range(3):
        compute("next token", (1, 1, 1), wanted="last", rows=(2, 0, 1))
    compute("one text alone", (1,), wanted="last", rows=(3,))
    # A text begins anew behind a prefix of its own, up to the end of its slot; and texts of one length in neighbouring
    # slots, which need no mask.
    filled[3] = 4
    compute("prefix again", (28,), wanted="all", rows=(3,))
    slots[:] = [1, 2, 3, 4]
    filled[:] = [0] * 4
    compute("alike: first tokens", (8, 8, 8, 7), wanted="all")
    filled[:] = [7] * 4
    compute("alike: more tokens", (12, 12, 12, 12), wanted="all")
    for _ in range(3):
        compute("alike: next token", (1, 1, 1, 1), wanted="last")
    return {"errors": errors, "bits": bits.hexdigest()}


def _nothing_wanted() -> Batch:
    return Batch(tokens=torch.zeros(1, 2, dtype=torch.int64), widths=[2], slots=[0], starts=[0], wanted=[])


def _answers(backend: MegatronBackend, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> list[tuple[int, ...]]:
    if not prompts:
        return []
    engine = Engine(backend, lambda ids: " ".join(map(str, ids)), slots=3, length=80)
    for prompt in prompts:
        engine.add(Request(prompt=tuple(prompt), max_new_tokens=max_new_tokens, stop_ids=frozenset({2})))
    answers: dict[int, tuple[int, ...]] = {}
    while engine.busy:
        answers.update({number: completion.token_ids for number, completion, _ in engine.step()})
    return [answers[number] for number in sorted(answers)]


def _best(backend: MegatronBackend, prompt: Sequence[int], max_new_tokens: int, beams: int) -> tuple[int, ...]:
    tokenizer: Any = SimpleNamespace(decode=lambda ids, **_: " ".join(map(str, ids)))
    lm = CausalLM(backend, tokenizer, stop_ids=frozenset({2}))
    request = Request(prompt=tuple(prompt), max_new_tokens=max_new_tokens, stop_ids=lm.stop_ids)
    return lm.beam_search(request, beams).token_ids
