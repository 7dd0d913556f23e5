"""What the ranks of the pool run for the tests of this package."""

import collections
from pathlib import Path

import torch.distributed as dist

from mindspeed_llm.errors import UserError
from tests.fsdp2.data.helpers import build, make_config, rows_of
from tests.support.tokenizers import byte_tokenizer


def build_and_read(folder: str, data: dict, training: dict) -> dict:
    """Build the data on every rank; returns how often this rank tokenized, and its rows of the first step."""
    from mindspeed_llm.fsdp2.data import lf_manager, mg_manager

    calls: collections.Counter = collections.Counter()
    originals = {module: module.tokenize_files for module in (lf_manager, mg_manager)}

    def counting(module):
        def tokenize_files(*args, **kwargs):
            calls["tokenized"] += 1
            return originals[module](*args, **kwargs)

        return tokenize_files

    for module in originals:
        module.tokenize_files = counting(module)
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
        for module, original in originals.items():
            module.tokenize_files = original
    # The store that ranks wait on lives with rank 0, which must not leave first.
    dist.barrier()
    rows = [ids for batch in next(bundle.train.micro_batches()) for ids, _ in rows_of(batch)]
    return {"tokenized": calls["tokenized"], "rows": rows, "num_samples": bundle.num_samples}
