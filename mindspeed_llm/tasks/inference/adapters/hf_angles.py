"""Models whose rotary angles depend on the length of the text (longrope): where they change, and a cache that keeps to
them.

transformers takes one set of angles for all rows of a batch, by its longest one, and cached keys keep the angles that
they were computed with. Here each row has those of its own length.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from transformers import PretrainedConfig

from mindspeed_llm.tasks.inference.adapters.hf_cache import KeyValueCache
from mindspeed_llm.tasks.inference.backend import Batch

_ORIGINAL = "original_max_position_embeddings"


def angle_borders(config: PretrainedConfig) -> tuple[int, ...]:
    """The lengths beyond which the angles of all tokens of a text are others; none for most models.

    The type "dynamic" has one at the number of positions of the model, which no text exceeds here.
    """
    found = getattr(config, "rope_parameters", None) or {}
    # One set of parameters, or one for each kind of layers.
    sets = [found, *(value for value in found.values() if isinstance(value, dict))]
    borders = {each.get(_ORIGINAL, getattr(config, _ORIGINAL, None)) for each in sets if _rope_type(each) == "longrope"}
    return tuple(sorted(border for border in borders if border is not None))


def _rope_type(parameters: dict[str, object]) -> object:
    return parameters.get("rope_type", parameters.get("type"))


class AnglesCache:
    """`backend.Cache` for such models. A text that grows beyond a border is computed anew once, with all its tokens;
    the tokens that it had before stay as they are. So does `generate` for Phi-3, and with `use_cache=False` for every
    model; else it keeps the keys with the angles of the shorter text.
    """

    def __init__(self, keys: KeyValueCache, borders: Sequence[int]) -> None:
        self.slots, self.length = keys.slots, keys.length
        self.keys = keys
        """Keys and values, of each slot with the angles of one length."""
        self._borders = borders
        self._texts: list[list[int]] = [[] for _ in range(keys.slots)]
        self._angles = [0] * keys.slots
        """Which of its lengths' angles the keys of a slot have; -1 where that is not known."""

    def copy(self, sources: Sequence[int], targets: Sequence[int], length: int) -> None:
        """See `backend.Cache`."""
        self.keys.copy(sources, targets, length)
        copied = [(self._texts[source][:length], self._angles[source]) for source in sources]
        for target, (text, angles) in zip(targets, copied, strict=True):
            self._texts[target], self._angles[target] = text, angles

    def parts(self, batch: Batch) -> Iterator[tuple[Batch, list[int]]]:
        """The batch in parts whose rows have the same angles, each with the places of its logits in `batch.wanted`; a
        row whose cached keys have others begins at 0. A part is to be computed before the next one is asked for, and
        all parts are to be asked for.
        """
        ends = [start + width for start, width in zip(batch.starts, batch.widths, strict=True)]
        angles_of = [sum(end > border for border in self._borders) for end in ends]
        tokens = batch.tokens.tolist()
        for angles in sorted(set(angles_of)):
            rows = [row for row, mine in enumerate(angles_of) if mine == angles]
            begins, new = [], []
            for row in rows:
                slot, start = batch.slots[row], batch.starts[row]
                text = self._texts[slot]
                del text[start:]
                text += tokens[row][: batch.widths[row]]
                begins.append(start if self._angles[slot] == angles else 0)
                new.append(torch.tensor(text[begins[-1] :]))
                # Until the keys are computed: an interruption leaves some of the old ones.
                self._angles[slot] = -1
            places = [place for place, (row, _) in enumerate(batch.wanted) if angles_of[row] == angles]
            number = {row: n for n, row in enumerate(rows)}
            wanted = [
                (number[row], column + batch.starts[row] - begins[number[row]])
                for row, column in (batch.wanted[place] for place in places)
            ]
            yield (
                Batch(
                    tokens=torch.nn.utils.rnn.pad_sequence(new, batch_first=True),
                    widths=[len(part) for part in new],
                    slots=[batch.slots[row] for row in rows],
                    starts=begins,
                    # The head needs something to do.
                    wanted=wanted or [(0, 0)],
                ),
                places,
            )
            for row in rows:
                self._angles[batch.slots[row]] = angles
