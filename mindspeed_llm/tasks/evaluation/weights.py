"""What tells the weights of a model from others."""

from __future__ import annotations

from argparse import Namespace

from mindspeed_llm.files import hash_file
from mindspeed_llm.observability.log import get_logger
from mindspeed_llm.tasks.evaluation.ranks import Ranks
from mindspeed_llm.tasks.inference.load import weight_files
from mindspeed_llm.tasks.inference.source import ModelSource

_LOG = get_logger("evaluation")
_WORTH_A_LINE = 8 << 30  # bytes


def weights_hash(args: Namespace, source: ModelSource, ranks: Ranks) -> str | None:
    """xxh3-128, as hex, of all bytes of the files of weights, adapters and their model taken together (a collective:
    ranks share the files among them); None where there are no files (a hub id).

    Every byte counts: samples of one model are not taken for those of another that differs in a few rows only.
    """
    import xxhash

    files = list(weight_files(args, source))
    if not files:
        return None
    size = sum(file.stat().st_size for file in files)
    if ranks.rank == 0 and size > _WORTH_A_LINE:
        _LOG.info("reading %.0f GiB of weights once more, to tell them from others", size / 2**30)
    own = {place: hash_file(files[place]) for place in range(ranks.rank, len(files), ranks.size)}
    found = {place: text for part in ranks.gather_everywhere(own) for place, text in part.items()}
    return xxhash.xxh3_128_hexdigest("".join(found[place] for place in range(len(files))).encode())
