"""What the ranks of the pool run for the tests of this package."""

import collections
import contextlib
import os
from pathlib import Path

import torch.distributed as dist

from mindspeed_llm.errors import UserError
from tests.training.data.helpers import arguments


def build_and_read(words: list, *, ranks_per_node: int | None = None) -> dict:
    """Build the data on every rank, as on nodes of so many ranks; returns how often this rank tokenized and laid
    samples out, and the first training sample of each micro batch of its first step."""
    from mindspeed_llm.tasks.preprocess.pretrain_samples import SampleIndex
    from mindspeed_llm.training.data import raw_text
    from mindspeed_llm.training.data.datasets import build_datasets
    from mindspeed_llm.training.data.iterator import train_batches

    if ranks_per_node:
        os.environ["LOCAL_RANK"] = str(dist.get_rank() % ranks_per_node)
        os.environ["LOCAL_WORLD_SIZE"] = str(ranks_per_node)
    calls: collections.Counter = collections.Counter()
    with contextlib.ExitStack() as stack:
        for owner, name in ((raw_text, "tokenize_files"), (SampleIndex, "build")):
            original = getattr(owner, name)

            def counting(*args, _original=original, _name=name, **kwargs):
                calls[_name] += 1
                return _original(*args, **kwargs)

            stack.callback(setattr, owner, name, original)
            setattr(owner, name, counting)
        args = arguments(*words)
        try:
            found = build_datasets(args)
        except UserError as error:
            return {"error": str(error)}
    # The store that ranks wait on lives with rank 0, which must not leave first.
    dist.barrier()
    batches = train_batches(found.train, args, rank=dist.get_rank(), size=dist.get_world_size(), consumed=0)
    count = args.global_batch_size // args.micro_batch_size // dist.get_world_size()
    tokens = [next(batches)["tokens"].tolist() for _ in range(count)]
    return {"tokenized": calls["tokenize_files"], "laid out": calls["build"], "tokens": tokens}


def files_below(folder: str) -> list[str]:
    """Names of all files below a folder."""
    return sorted(str(file.relative_to(folder)) for file in Path(folder).rglob("*") if file.is_file())
