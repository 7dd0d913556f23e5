"""Train for two steps in a process of its own and write the measured and the planned peak memory, in bytes.

    python -m tests.fsdp2.plan.measure FOLDER '{"family": "llama", "sections": {...}}'

Also under torchrun. Every rank writes FOLDER/measured_<rank>.json. The process must be started with
MALLOC_MMAP_THRESHOLD_ set, so that freed blocks go back to the system and resident memory follows the tensors.
"""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from mindspeed_llm.fsdp2.config import Config
from mindspeed_llm.fsdp2.distributed.mesh import build_mesh
from mindspeed_llm.fsdp2.models.model_factory import ModelFactory, build_on_meta, load_model_config
from mindspeed_llm.fsdp2.optim.loss_scaler import LossScaler
from mindspeed_llm.fsdp2.optim.optimizer_factory import OptimizerFactory
from mindspeed_llm.fsdp2.plan.activations import BALANCED_EXPERTS, register_balanced_experts
from mindspeed_llm.fsdp2.plan.memory import plan_memory
from mindspeed_llm.fsdp2.train.step import OptimizerStep
from mindspeed_llm.platform import distributed, memory
from tests.distributed.rows import toy_config

SEQUENCE = 512
# Large enough that the allocator's gaps and the libraries' own memory are small beside it.
FIELDS: dict[str, Any] = {
    "vocab_size": 4096,
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 512}
SMALL = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "moe_intermediate_size": 64}


def write_config(folder: Path, family: str, **changes: Any) -> None:
    """The configuration of a model of `family`; its weights will be random."""
    fields = {**FIELDS, **(EXPERTS if family == "qwen3_moe" else {}), **changes}
    CONFIG_MAPPING[family](**fields).save_pretrained(folder)


def train(config: Config, sequence: int) -> None:
    """Two steps on random tokens: the second one has the optimizer's state from the start."""
    world, device, training = distributed.world_size(), torch.device("cpu"), config.training
    mesh = build_mesh(world_size=world, fsdp_size=config.parallel.resolved_fsdp_size(world))
    built = ModelFactory.create(config, mesh=mesh, device=device)
    built.model.train()
    step = OptimizerStep(
        model=built.model,
        sharded=built.sharded,
        optimizer=OptimizerFactory.create(built.model, training),
        mesh=mesh,
        device=device,
        config=training,
        scaler=LossScaler(enabled=False),
    )
    rows = training.per_device_train_batch_size
    for _ in range(2):
        batches = []
        for _ in range(training.gradient_accumulation_steps):
            ids = torch.randint(0, 500, (rows, sequence))
            batches.append(
                {"input_ids": ids, "labels": ids, "num_samples": rows, "num_tokens": rows * sequence}
                | {"attention_mask": None, "position_ids": None}
            )
        step.run(batches, learning_rate=1e-4)


def plan(config: Config) -> dict[str, Any]:
    """The plan, as `--check` makes it."""
    register_balanced_experts()
    model = build_on_meta(config, load_model_config(config.model), experts=BALANCED_EXPERTS)
    world = distributed.world_size()
    found, reason = plan_memory(model, config, shards=config.parallel.resolved_fsdp_size(world))
    return {
        "planned": found.peak,
        "reason": reason,
        "parts": {k: v for k, v in vars(found).items() if k != "activations"},
    }


def main(folder: Path, family: str, sections: dict[str, dict[str, Any]]) -> None:
    """Measure one row of the test."""
    torch.set_num_threads(1)
    distributed.init_process_group()
    if distributed.is_rank_zero():
        write_config(folder / "small", family, **SMALL)
        write_config(folder / "big", family)
    dist.barrier()
    common = {
        "model": {"train_from_scratch": True, "init_model_with_meta_device": True},
        "data": {"cutoff_len": SEQUENCE},
        "optimization": {"moe_grouped_gemm": True},
        **sections,
    }
    # The libraries take memory of their own on first use: a small model uses them before the measurement.
    train(toy_config(str(folder / "small"), **common), 64)
    gc.collect()
    before = memory.memory_allocated_gb()
    assert memory.reset_peak()
    config = toy_config(str(folder / "big"), **common)
    train(config, config.data.cutoff_len)
    measured = round((memory.max_memory_allocated_gb() - before) * 1024**3)
    result = {"measured": measured, **plan(config)}
    (folder / f"measured_{distributed.rank()}.json").write_text(json.dumps(result))
    dist.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), **json.loads(sys.argv[2]))
