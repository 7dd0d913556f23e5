"""What the ranks of the pool run for the tests of this package."""

import collections
from pathlib import Path

import torch.distributed as dist

from mindspeed_llm.errors import UserError
from tests.fsdp2.data.helpers import build, make_config, rows_of
from tests.support.tokenizers import byte_tokenizer


def build_and_read(folder: str, data: dict, training: dict) -> dict:
    """Build the data on every rank; returns how often this rank tokenized and built an index of samples, and its rows
    of the first step."""
    from mindspeed_llm.fsdp2.data import lf_manager, mg_manager
    from mindspeed_llm.tasks.preprocess.pretrain_samples import SampleIndex

    calls: collections.Counter = collections.Counter()
    watched = [(lf_manager, "tokenize_files"), (mg_manager, "tokenize_files"), (SampleIndex, "build")]
    originals = {place: getattr(*place) for place in watched}

    def counting(place):
        def call(*args, **kwargs):
            calls[place[1]] += 1
            return originals[place](*args, **kwargs)

        return call

    for place in watched:
        setattr(*place, counting(place))
    try:
        bundle = build(
            make_config(Path(folder), data, **training),
            byte_tokenizer(),
            rank=dist.get_rank(),
            world_size=dist.get_world_size(),
        )
    except UserError as error:
        return {"error": str(error)}
    finally:
        for place, original in originals.items():
            setattr(*place, original)
    # The store that ranks wait on lives with rank 0, which must not leave first.
    dist.barrier()
    rows = [ids for batch in next(bundle.train.micro_batches()) for ids, _ in rows_of(batch)]
    return {
        "tokenized": calls["tokenize_files"],
        "indexed": calls["build"],
        "rows": rows,
        "num_samples": bundle.num_samples,
    }
