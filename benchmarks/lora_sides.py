"""The contestants of LoRA training: both training commands of this package, and `peft` with Hugging Face's Trainer.

All train the same adapter on the same samples, with AdamW (betas 0.9/0.95, decay 0.01) at a constant learning rate and
clipping at 1.0, fp32, one sample a step.
"""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from benchmarks.mcore_sides import Training, around_training

LEARNING_RATE, BETAS, DECAY, CLIP = 5e-4, (0.9, 0.95), 0.01, 1.0
RANK, ALPHA, SEED = 8, 16, 7
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
MEGATRON_TARGETS = (
    *("linear_q", "linear_k", "linear_v", "linear_proj"),
    *("linear_fc1_gate", "linear_fc1_up", "linear_fc2"),
)
Turn = Callable[[float | None], None]
"""Called before each step with the loss of the one before; ends the process where no step is left."""


def make_inputs(model: str, folder: Path, *, sequence: int, steps: int) -> None:
    """Write what all sides start from: text of random tokens, its samples in the order of training, and an adapter
    whose B is zero.
    """
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    from mindspeed_llm.tasks.preprocess.indexed_format import IndexedReader, IndexedWriter
    from mindspeed_llm.tasks.preprocess.pretrain_samples import PretrainSamples, SampleIndex

    torch.manual_seed(SEED)
    base = AutoModelForCausalLM.from_pretrained(model)
    lora = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=list(TARGETS), task_type="CAUSAL_LM")
    get_peft_model(base, lora).save_pretrained(folder / "adapter")
    random = np.random.RandomState(SEED)
    with IndexedWriter(folder / "text") as writer:
        for _ in range(steps + 1):
            writer.add(random.randint(base.config.vocab_size, size=sequence))
    reader = IndexedReader(folder / "text")
    documents = range(len(reader.lengths))
    samples = PretrainSamples(reader, SampleIndex.build(reader.lengths, documents, steps, sequence, SEED))
    np.save(folder / "samples.npy", np.stack([samples[number] for number in range(steps)]))


def fsdp2(model: str, folder: Path, *, sequence: int, steps: int, turn: Turn) -> None:
    """`train_fsdp2.py`, with its log and files."""
    from mindspeed_llm.fsdp2.main import main
    from mindspeed_llm.fsdp2.train.step import OptimizerStep

    sections = {
        "model": {"model_name_or_path": model, "adapter_name_or_path": str(folder / "adapter")},
        "data": {"data_manager_type": "mg", "dataset": {"file_name": str(folder / "text")}, "cutoff_len": sequence},
        "parallel": {"param_dtype": "fp32"},
        "training": {
            "stage": "pt",
            "output_dir": str(folder / "fsdp2"),
            "seed": SEED,
            "max_steps": steps,
            "per_device_train_batch_size": 1,
            "lr": LEARNING_RATE,
            "lr_scheduler_type": "constant",
            "warmup_ratio": 0.0,
            "adam_beta1": BETAS[0],
            "adam_beta2": BETAS[1],
            "weight_decay": DECAY,
            "max_grad_norm": CLIP,
            "save_steps": 0,
            "save_epochs": 0,
            "save_hf_weights": False,
        },
    }
    config = folder / "fsdp2.yaml"
    config.write_text(json.dumps(sections), encoding="utf-8")  # which is YAML, too
    _in_turns(OptimizerStep, turn, lambda: main([str(config)]))


def mcore(model: str, folder: Path, *, sequence: int, steps: int, turn: Turn) -> None:
    """`pretrain_gpt.py`, with its log and files."""
    from mindspeed_llm.training.main import main

    words = [
        *("--model-from-hf", model, "--load", model, "--lora-load", str(folder / "adapter")),
        *("--lora-r", str(RANK), "--lora-alpha", str(ALPHA), "--lora-target-modules", *MEGATRON_TARGETS),
        *("--data-path", str(folder / "text"), "--split", "100,0,0", "--data-cache-path", str(folder / "cache")),
        *("--seq-length", str(sequence), "--micro-batch-size", "1", "--global-batch-size", "1"),
        *("--train-iters", str(steps), "--seed", str(SEED), "--lr", str(LEARNING_RATE), "--lr-decay-style", "constant"),
        *("--adam-beta1", str(BETAS[0]), "--adam-beta2", str(BETAS[1]), "--weight-decay", str(DECAY)),
        *("--clip-grad", str(CLIP), "--hidden-dropout", "0", "--attention-dropout", "0", "--use-flash-attn"),
        *("--eval-iters", "0", "--log-interval", "1", "--metrics-dir", str(folder / "mcore")),
    ]

    def training(args: Namespace, original: Training) -> int:
        # Not before: it imports megatron-core, which looks for a device when it is imported.
        from mindspeed_llm.training.train_step import TrainStep

        return _in_turns(TrainStep, turn, lambda: original(args))

    with around_training(training):
        main(words)


def peft(model: str, folder: Path, *, sequence: int, steps: int, turn: Turn) -> None:
    """A model of `peft` and the Trainer of `transformers`."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments

    samples = torch.from_numpy(np.load(folder / "samples.npy"))
    losses: list[torch.Tensor] = []

    class InTurns(TrainerCallback):
        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            turn(losses.pop().item() if losses else None)

    class Noting(Trainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            loss = super().compute_loss(*args, **kwargs)
            losses.append(loss.detach())
            return loss

    class Samples(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return steps

        def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
            ids, targets = samples[index][:-1], samples[index][1:]
            return {"input_ids": ids, "labels": ids, "shift_labels": targets}

        def __getitems__(self, indices: list[int]) -> list[dict[str, torch.Tensor]]:
            return [self[index] for index in indices]

    arguments = TrainingArguments(
        output_dir=str(folder / "peft"),
        max_steps=steps,
        per_device_train_batch_size=1,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        adam_beta1=BETAS[0],
        adam_beta2=BETAS[1],
        weight_decay=DECAY,
        max_grad_norm=CLIP,
        train_sampling_strategy="sequential",
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        logging_steps=1,
        remove_unused_columns=False,
    )
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    base.config.use_cache = False
    adapted = PeftModel.from_pretrained(base, folder / "adapter", is_trainable=True)
    Noting(model=adapted, args=arguments, train_dataset=Samples(), callbacks=[InTurns()]).train()


SIDES = {"peft": peft, "fsdp2": fsdp2, "mcore": mcore}


def _in_turns(step: Any, turn: Turn, train: Callable[[], int]) -> int:
    """Train with a class of steps whose `run` calls `turn` first."""
    original = step.run
    losses: list[float] = []

    def run(*args: Any, **kwargs: Any) -> Any:
        turn(losses.pop() if losses else None)
        result = original(*args, **kwargs)
        losses.append(result.loss)
        return result

    with mock.patch.object(step, "run", run):
        return train()
