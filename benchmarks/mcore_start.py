"""One start in a fresh process; prints the seconds from the start of the process to the first step.

Started by `benchmarks.mcore_step`. Side `ours` is the command `pretrain_gpt.py` with the flags that follow. Side
`floor` imports torch and megatron-core and builds a dense model of the same sizes with optimizer, from megatron-core
alone and with weights that are drawn.
"""

from __future__ import annotations

import json
import sys
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

import psutil


def main() -> None:
    """Start the side that the first word names, with the words behind it."""
    side, *words = sys.argv[1:]
    if side == "ours":
        from benchmarks.mcore_sides import around_training, before_each_step
        from mindspeed_llm.training.main import main as pretrain

        def training(args: Namespace, original: Any) -> int:
            with before_each_step(_started, []):
                return original(args)

        with around_training(training):
            pretrain(words)
    else:
        floor(json.loads((Path(words[0]) / "config.json").read_text(encoding="utf-8")), sequence=int(words[1]))


def floor(config: dict[str, Any], *, sequence: int) -> None:
    """Build a dense Llama of a Hugging Face directory's sizes, on one rank."""
    from mindspeed_llm.platform import cuda_names, distributed

    cuda_names.install()
    distributed.init_process_group()
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer import TransformerConfig

    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(1)
    sizes = TransformerConfig(
        num_layers=config["num_hidden_layers"],
        hidden_size=config["hidden_size"],
        ffn_hidden_size=config["intermediate_size"],
        num_attention_heads=config["num_attention_heads"],
        num_query_groups=config["num_key_value_heads"],
        normalization="RMSNorm",
        gated_linear_unit=True,
        add_bias_linear=False,
    )
    model = GPTModel(
        sizes,
        get_gpt_layer_local_spec(normalization="RMSNorm"),
        vocab_size=config["vocab_size"],
        max_sequence_length=sequence,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=config["tie_word_embeddings"],
    )
    wrapped = DistributedDataParallel(sizes, DistributedDataParallelConfig(), model)
    get_megatron_optimizer(OptimizerConfig(lr=1e-5), [wrapped])
    _started()


def _started() -> None:
    print(json.dumps({"seconds": time.time() - psutil.Process().create_time()}), flush=True)
    sys.exit()


if __name__ == "__main__":
    main()
