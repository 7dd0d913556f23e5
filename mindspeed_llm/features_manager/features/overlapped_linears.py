"""`--use-ascend-coc`: linear layers of tensor parallelism in chunks, whose sending overlaps with computing."""

from __future__ import annotations

import argparse

from mindspeed_llm.features_manager.feature import ArgumentTarget, Feature
from mindspeed_llm.flag import integer, one_of, positive

# As it is, rewritten without overlap (the same as it is), in chunks; -1: what --coc-parallel-num says.
MODES = (-1, 0, 1, 2)
IN_CHUNKS = (-1, 2)


class OverlappedLinears(Feature):
    """Layer specs do it, see `core.overlapped_linears`; on any device."""

    name = "overlapped_linears"
    description = "linear layers of TP in chunks, each sent while the next is computed"

    def register_arguments(self, group: ArgumentTarget) -> None:
        """Add `--use-ascend-coc` and its details."""
        group.add_argument(
            "--use-ascend-coc",
            action="store_true",
            help="compute linear layers of TP in chunks, each sent while the next is computed (any device).",
        )
        group.add_argument(
            "--coc-parallel-num",
            type=positive,
            default=1,
            metavar="N",
            help="number of those chunks; 1: nothing to overlap (default 1).",
        )
        group.add_argument(
            "--coc-mode",
            type=one_of(MODES, integer),
            default=-1,
            metavar="|".join(map(str, MODES)),
            help="2: chunks; 0 or 1: layers as they are; -1: what --coc-parallel-num says (default -1).",
        )

    def is_on(self, args: argparse.Namespace) -> bool:
        """Whether there are chunks, and ranks that they are sent between."""
        return (
            args.use_ascend_coc
            and args.coc_mode in IN_CHUNKS
            and args.coc_parallel_num > 1
            and args.tensor_model_parallel_size > 1
        )
