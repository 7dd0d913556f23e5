"""Start of a run on the Megatron backend: device, process groups, random numbers; and its undoing."""

from __future__ import annotations

import logging
import warnings
from argparse import Namespace

from mindspeed_llm.platform import cuda_names, distributed, random
from mindspeed_llm.platform.device import current_device, device_type

_REPEATED_WARNING = "CPU RNG state changed within GPU RNG context"
_RERUN_LOGGER = "megatron.core.rerun_state_machine"
_RNG_LOGGER = "megatron.core.tensor_parallel.random"
# megatron-core says these at every start. Neither package is needed here; what takes their place is torch's. The last
# one is about a default of its own.
_EXPECTED_WARNINGS = (
    "Transformer Engine and Apex are not installed",
    "Apex is not installed",
    "full scope is deprecated",
)


def initialize(args: Namespace) -> None:
    """Make this process a rank of the run: everything that megatron-core expects before a model is built.

    Args:
        args: validated arguments.
    """
    for message in _EXPECTED_WARNINGS:
        warnings.filterwarnings("ignore", message=message, category=UserWarning)
    # The loop looks for losses that are no number by itself; megatron-core's machine for it is not used.
    logging.getLogger(_RERUN_LOGGER).setLevel(logging.ERROR)
    random.seed_everything(args.seed, deterministic=args.deterministic_mode)
    current_device()
    cuda_names.install()
    distributed.init_process_group(timeout_s=60 * args.distributed_timeout_minutes)
    if device_type() == "cpu":
        # There the two generators are one, and drawing from it is what a context of the device's is for.
        logging.getLogger(_RNG_LOGGER).addFilter(_is_no_repeated_warning)
    from megatron.core import parallel_state
    from megatron.core.num_microbatches_calculator import init_num_microbatches_calculator
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=args.tensor_model_parallel_size,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=args.virtual_pipeline_model_parallel_size,
        context_parallel_size=args.context_parallel_size,
        expert_model_parallel_size=args.expert_model_parallel_size,
        expert_tensor_parallel_size=args.expert_tensor_parallel_size,
        distributed_timeout_minutes=args.distributed_timeout_minutes,
    )
    init_num_microbatches_calculator(
        distributed.rank(), None, args.global_batch_size, args.micro_batch_size, args.data_parallel_size
    )
    # Stages have different layers and so need different random numbers for their initial weights.
    stage = parallel_state.get_pipeline_model_parallel_rank()
    random.seed_everything(args.seed + 100 * stage, deterministic=args.deterministic_mode)
    model_parallel_cuda_manual_seed(args.seed + 100 * stage)


def shutdown() -> None:
    """Undo `initialize`, so that another run may start in this process."""
    from megatron.core import parallel_state
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
    from megatron.core.num_microbatches_calculator import destroy_num_microbatches_calculator
    from megatron.core.tensor_parallel import random as megatron_random
    from megatron.core.transformer.moe.moe_utils import get_moe_layer_wise_logging_tracker

    destroy_num_microbatches_calculator()
    # It remembers results by module, and a module refers to its process groups.
    RotaryEmbedding.forward.cache_clear()
    # What routers have noted and no line of the log has taken, and the groups that it was to be summed over.
    get_moe_layer_wise_logging_tracker().clear()
    parallel_state.destroy_model_parallel()
    megatron_random.initialize_rng_tracker(force_reset=True)
    logging.getLogger(_RNG_LOGGER).removeFilter(_is_no_repeated_warning)
    cuda_names.uninstall()


def _is_no_repeated_warning(record: logging.LogRecord) -> bool:
    return _REPEATED_WARNING not in record.getMessage()
