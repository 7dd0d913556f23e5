"""Pretraining samples of one or several indexed files, by the rules of megatron-core's dataset builder.

- One file without a weight: its own samples, as many as are asked for or one epoch.
- With weights w: file i gives ceil(N * w_i) samples, of which half a percent more are laid out; the blend is as long as
  these together, so that it may pass N by a few.
- Several files without weights: every sample of an epoch once, in proportion to the files' numbers of samples. Where
  more than an epoch is asked for (megatron-core stops there), the files go on in these proportions, each through epochs
  of its own.

Where megatron-core fails, this does not: files of weight 0 are left out, a blend never asks a file for more samples
than are laid out, and files without a sample are left out of a blend without weights.
"""

import functools
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.preprocess.blending import Blend, Rows, blend_order, normalized
from mindspeed_llm.tasks.preprocess.index_cache import Arrays, IndexCache, IndexRequest, index_identity
from mindspeed_llm.tasks.preprocess.indexed_format import IndexedReader
from mindspeed_llm.tasks.preprocess.pretrain_samples import (
    PretrainSamples,
    SampleIndex,
    count_tokens,
    samples_per_epoch,
)

_LOG = logging.getLogger("mindspeed_llm")
# What megatron-core lays out beyond the requested share of a blended file.
_SURPLUS = 0.005


@dataclass(frozen=True)
class PretrainSource:
    """The documents of an indexed file that one of train, valid and test uses."""

    reader: IndexedReader
    documents: range

    def num_tokens(self) -> int:
        """Number of tokens of an epoch."""
        return count_tokens(self.reader.lengths, self.documents)


@dataclass(frozen=True, kw_only=True)
class PretrainLayout:
    """`sequence_length`: tokens of a sample, plus one with `extra_token`; `seed` of every shuffle."""

    sequence_length: int
    seed: int
    extra_token: bool = True


def pretrain_samples(
    sources: Sequence[PretrainSource],
    weights: Sequence[float] | None,
    num_samples: int | None,
    layout: PretrainLayout,
    cache: IndexCache,
) -> Rows:
    """Rows of S + 1 token ids in the order of training; at least `num_samples`, or one epoch where that is None.

    Every process of a job must call this. Raises UserError when a source that has a weight holds no tokens, when there
    are no tokens at all, or when weights come without `num_samples`.
    """
    if weights is None and len(sources) == 1:
        return _rows(sources, [num_samples], layout, cache)[0]
    if weights is None:
        which, sample, wanted = _by_size(sources, num_samples, layout, cache)
    elif num_samples is None:
        raise UserError("data sets with weights need a number of samples: weights alone do not say when to stop")
    else:
        which, sample, wanted = _by_weight(sources, weights, num_samples, cache)
    parts: list[Rows] = [()] * len(sources)
    rows = _rows([sources[number] for number in wanted], list(wanted.values()), layout, cache)
    for number, row in zip(wanted, rows, strict=True):
        parts[number] = row
    return Blend(parts, which, sample)


_Plan = tuple[np.ndarray, np.ndarray, dict[int, int | None]]
"""Source and sample at each place of the blend, and the samples wanted of each source that is used (None: an epoch)."""


def _by_weight(
    sources: Sequence[PretrainSource], weights: Sequence[float], num_samples: int, cache: IndexCache
) -> _Plan:
    for source, weight in zip(sources, weights, strict=True):
        if weight and not source.num_tokens():
            raise UserError(
                f"data set {source.reader.prefix} has weight {weight:g}, but its {len(source.documents)} documents of "
                "this split hold no tokens"
            )
    shares = normalized(weights).tolist()
    targets = [math.ceil(num_samples * share) for share in shares]
    which, sample = _order(sources, shares, sum(targets), cache)
    drawn = np.bincount(which, minlength=len(sources)).tolist()
    return (
        which,
        sample,
        {
            number: max(math.ceil(target * (1 + _SURPLUS)), drawn[number])
            for number, target in enumerate(targets)
            if weights[number]
        },
    )


def _by_size(
    sources: Sequence[PretrainSource], num_samples: int | None, layout: PretrainLayout, cache: IndexCache
) -> _Plan:
    counts = [source.num_tokens() for source in sources]
    sizes = [samples_per_epoch(count, layout.sequence_length, extra_token=layout.extra_token) for count in counts]
    if not any(sizes):
        raise UserError(
            f"{', '.join(str(source.reader.prefix) for source in sources)}: {sum(counts)} tokens are no sample of "
            f"{layout.sequence_length} tokens; use more text or shorter sequences"
        )
    for source, size in zip(sources, sizes, strict=True):
        if not size:
            _LOG.info("%s is shorter than a sample and left out of the blend", source.reader.prefix)
    which, sample = _order(sources, sizes, sum(sizes) if num_samples is None else num_samples, cache)
    drawn = np.bincount(which, minlength=len(sources)).tolist()
    is_one_epoch = len(which) <= sum(sizes)
    return which, sample, {i: None if is_one_epoch else drawn[i] for i, size in enumerate(sizes) if size}


def _order(
    sources: Sequence[PretrainSource], weights: Sequence[float], num_samples: int, cache: IndexCache
) -> tuple[np.ndarray, np.ndarray]:
    """`blend_order` through the cache, beside the first source."""

    def build() -> Arrays:
        which, sample = blend_order(weights, num_samples)
        return {"which": which, "sample": sample}

    key = {"weights": [float(weight).hex() for weight in weights], "num_samples": num_samples}
    arrays = cache.arrays([IndexRequest("blend", sources[0].reader.prefix, key, build)])[0]
    return arrays["which"], arrays["sample"]


def _rows(
    sources: Sequence[PretrainSource], wanted: Sequence[int | None], layout: PretrainLayout, cache: IndexCache
) -> list[PretrainSamples]:
    """The rows of each source, at least as many as wanted; their indices come from the cache, all at once."""
    identities = {source.reader.prefix: index_identity(source.reader) for source in sources}
    requests = [
        IndexRequest(
            source.reader.prefix.name,
            source.reader.prefix,
            {
                **identities[source.reader.prefix],
                "documents": [source.documents.start, source.documents.stop],
                "num_samples": number,
                "sequence_length": layout.sequence_length,
                "extra_token": layout.extra_token,
                "seed": layout.seed,
            },
            functools.partial(_build, source, number, layout),
        )
        for source, number in zip(sources, wanted, strict=True)
    ]
    return [
        PretrainSamples(source.reader, SampleIndex(**arrays), extra_token=layout.extra_token)
        for source, arrays in zip(sources, cache.arrays(requests), strict=True)
    ]


def _build(source: PretrainSource, num_samples: int | None, layout: PretrainLayout) -> Arrays:
    source.reader.check()
    index = SampleIndex.build(
        source.reader.lengths,
        source.documents,
        num_samples,
        layout.sequence_length,
        layout.seed,
        extra_token=layout.extra_token,
    )
    return {"documents": index.documents, "starts": index.starts, "shuffle": index.shuffle}
