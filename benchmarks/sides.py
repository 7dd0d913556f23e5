"""The contestants: one training step each, on the same weights, batches and optimizer settings.

Every side is AdamW (lr 1e-5, betas 0.9/0.95, decay 0.01) with clipping at 1.0 on one micro batch per step, fp32.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

LEARNING_RATE = 1e-5
Step = Callable[[torch.Tensor], float]
"""Trains on input ids [batch, sequence] and returns the loss."""


def random_batches(folder: str, *, sequence: int, seed: int) -> Iterator[torch.Tensor]:
    """Input ids [1, sequence] without end, drawn from the model's vocabulary."""
    vocabulary = AutoConfig.from_pretrained(folder).vocab_size
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield torch.randint(0, vocabulary, (1, sequence), generator=generator)


def load_model(folder: str) -> nn.Module:
    """The model in fp32 with weights, ready to train."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.config.use_cache = False
    return model.train()


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.01)


def _bare_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    def step(input_ids: torch.Tensor) -> float:
        loss = model(input_ids=input_ids, labels=input_ids).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def plain(folder: str) -> Step:
    """A bare PyTorch loop in one process."""
    model = load_model(folder)
    return _bare_step(model, _optimizer(model))


def ddp(folder: str) -> Step:
    """A bare loop with DistributedDataParallel."""
    model = nn.parallel.DistributedDataParallel(load_model(folder))
    return _bare_step(model, _optimizer(model))


def fully_shard(folder: str) -> Step:
    """A bare loop with torch's fully_shard: one group per decoder layer, the rest with the root."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard as shard

    model = load_model(folder)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.model.layers:
        shard(layer, mesh=mesh)
    shard(model, mesh=mesh)
    return _bare_step(model, _optimizer(model))


def ours(folder: str, *, sequence: int = 512) -> Step:
    """This package's model factory and optimizer step, with the configuration's defaults but fp32."""
    from mindspeed_llm.fsdp2.config import Config, DataConfig, ModelConfig, ParallelConfig, TrainingConfig
    from mindspeed_llm.fsdp2.distributed.mesh import build_mesh
    from mindspeed_llm.fsdp2.models.model_factory import ModelFactory
    from mindspeed_llm.fsdp2.optim.loss_scaler import LossScaler
    from mindspeed_llm.fsdp2.optim.optimizer_factory import OptimizerFactory
    from mindspeed_llm.fsdp2.train.step import OptimizerStep
    from mindspeed_llm.tasks.losses.cross_entropy import shift_labels

    config = Config(
        model=ModelConfig(model_name_or_path=folder, init_model_with_meta_device=True),
        data=DataConfig(cutoff_len=sequence),
        parallel=ParallelConfig(param_dtype="fp32"),
        training=TrainingConfig(output_dir="unused", lr=LEARNING_RATE, per_device_train_batch_size=1),
    )
    mesh = build_mesh(world_size=dist.get_world_size(), fsdp_size=dist.get_world_size())
    device = torch.device("cpu")
    built = ModelFactory.create(config, mesh=mesh, device=device)
    built.model.train()
    step = OptimizerStep(
        model=built.model,
        sharded=built.sharded,
        optimizer=OptimizerFactory.create(built.model, config.training),
        mesh=mesh,
        device=device,
        config=config.training,
        scaler=LossScaler(enabled=False),
    )

    def run(input_ids: torch.Tensor) -> float:
        batch = {
            "input_ids": input_ids,
            "labels": shift_labels(input_ids),
            "num_samples": input_ids.shape[0],
            "num_tokens": input_ids.numel(),
        }
        return step.run([batch], learning_rate=LEARNING_RATE).loss

    return run


def hf_trainer(folder: str, *, steps: int) -> Step:
    """Hugging Face's Trainer; it runs in a thread of its own that is let through one step at a time."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    inputs: list[torch.Tensor] = []
    losses: list[float] = []
    may_go, is_done = threading.Semaphore(0), threading.Semaphore(0)

    class Gate(TrainerCallback):
        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            may_go.acquire()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            is_done.release()

    class OneByOne(Trainer):
        def compute_loss(self, model: nn.Module, batch: Any, *args: Any, **kwargs: Any) -> Any:
            input_ids = inputs.pop()
            loss = model(input_ids=input_ids, labels=input_ids).loss
            losses.append(loss.item())
            return loss

    class Blank(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return steps

        def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
            return {"input_ids": torch.zeros(1, dtype=torch.int64)}

    arguments = TrainingArguments(
        output_dir="unused",
        max_steps=steps,
        per_device_train_batch_size=1,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        adam_beta2=0.95,
        weight_decay=0.01,
        max_grad_norm=1.0,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        logging_strategy="no",
        remove_unused_columns=False,
    )
    trainer = OneByOne(model=load_model(folder), args=arguments, train_dataset=Blank(), callbacks=[Gate()])
    threading.Thread(target=trainer.train, daemon=True).start()

    def step(input_ids: torch.Tensor) -> float:
        inputs.append(input_ids)
        may_go.release()
        is_done.acquire()
        return losses[-1]

    return step
