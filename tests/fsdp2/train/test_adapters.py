"""Adapters (LoRA) through FSDP equal PEFT in one process; nothing else changes; exports give the run's logits."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from peft import PeftModel
from torch.distributed.checkpoint import FileSystemReader
from transformers import AutoModelForCausalLM

from mindspeed_llm.errors import UserError
from mindspeed_llm.fsdp2.checkpoint.adapter_names import is_adapter, original_name
from mindspeed_llm.fsdp2.checkpoint.dcp_to_hf import convert
from mindspeed_llm.fsdp2.checkpoint.manifest import read_manifest
from mindspeed_llm.fsdp2.config.weight_layout import fingerprint
from tests.distributed.test_resume import ends
from tests.fsdp2.train.adapter_rows import PROBE, peft_adapter
from tests.support.pool import RankPool
from tests.support.reference import RECIPE, Trace, assert_parity, collate, make_samples
from tests.support.runs import exported, metrics, save_model, sft_data, write_config, write_conversations
from tests.support.toys import TOYS, save_toy

pytestmark = pytest.mark.distributed
STEPS = 5
GLOBAL_BATCH = 4
ATTENTION = ["q_proj", "v_proj", "o_proj"]
EVERY = [*ATTENTION, "k_proj", "gate_proj", "up_proj", "down_proj"]


def peft_reference(model: str, adapter: str, samples: list[Any]) -> Trace:
    """PEFT, AdamW and a plain loop; the weights are those of the adapter, by the names that PEFT has within a model."""
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, experts_implementation="eager")
    adapted = PeftModel.from_pretrained(base, adapter, is_trainable=True).train()
    trace = plain_loop(adapted, samples)
    trace.weights = {
        name.removeprefix("base_model.model."): p.detach().clone()
        for name, p in adapted.named_parameters()
        if p.requires_grad
    }
    return trace


def plain_loop(model: Any, samples: list[Any]) -> Trace:
    """AdamW on what needs a gradient, decay on matrices; without weights."""
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in trained if p.ndim > 1], "weight_decay": RECIPE["weight_decay"]},
            {"params": [p for p in trained if p.ndim <= 1], "weight_decay": 0.0},
        ],
        lr=RECIPE["lr"],
        betas=RECIPE["betas"],
        eps=RECIPE["eps"],
    )
    trace = Trace()
    for step in range(STEPS):
        batch = collate(samples[step * GLOBAL_BATCH : (step + 1) * GLOBAL_BATCH])
        logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(trained, RECIPE["clip"])
        optimizer.step()
        optimizer.zero_grad()
        trace.losses.append(loss.item())
        trace.grad_norms.append(norm.item())
    return trace


# toy, layers, ranks, fsdp_size, meta, recompute, accumulation
ROWS = [
    ("llama", EVERY, 1, None, False, True, 2),
    ("llama", EVERY, 2, None, True, True, 1),
    ("llama_tied", ATTENTION, 2, None, False, False, 2),
    ("llama_uneven", EVERY, 4, 2, True, False, 1),
    ("qwen3_moe", ATTENTION, 2, None, True, True, 1),
]


@pytest.mark.parametrize(("toy", "layers", "ranks", "fsdp_size", "meta", "recompute", "accumulation"), ROWS)
def test_training_adapters_equals_peft(
    rank_pool: RankPool,
    tmp_path: Path,
    toy: str,
    layers: list[str],
    ranks: int,
    fsdp_size: int | None,
    meta: bool,
    recompute: bool,
    accumulation: int,
) -> None:
    folder = save_toy(toy, tmp_path / "model")
    adapter = peft_adapter(folder, tmp_path / "adapter", targets=layers)
    samples = make_samples(count=STEPS * GLOBAL_BATCH, vocabulary=TOYS[toy]["vocab_size"])
    sections = {
        "model": {"adapter_name_or_path": adapter, "init_model_with_meta_device": meta},
        "parallel": {"fsdp_size": fsdp_size, "recompute": recompute},
        "training": {
            "per_device_train_batch_size": GLOBAL_BATCH // ranks // accumulation,
            "gradient_accumulation_steps": accumulation,
        },
    }
    rows = rank_pool.run(
        "tests.distributed.rows:train",
        ranks=ranks,
        folder=str(folder),
        samples=samples,
        steps=STEPS,
        sections=sections,
    )
    trace = rows[0]["trace"]
    # The model's own weights are those of the files, bit for bit.
    source = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
    own = {original_name(name): tensor for name, tensor in trace.weights.items() if not is_adapter(name)}
    assert own.keys() == source.keys()
    for name, tensor in own.items():
        assert torch.equal(tensor, source[name]), name
    trace.weights = {name: tensor for name, tensor in trace.weights.items() if is_adapter(name)}
    assert_parity(trace, peft_reference(str(folder), adapter, samples))


@pytest.mark.parametrize(("ranks", "recompute"), [(1, True), (2, True)])
def test_training_around_frozen_modules_equals_transformers(
    rank_pool: RankPool, tmp_path: Path, ranks: int, recompute: bool
) -> None:
    folder = save_toy("llama", tmp_path / "model")
    samples = make_samples(count=STEPS * GLOBAL_BATCH, vocabulary=509)
    frozen = ("model.embed_tokens.", "model.layers.0.", "model.layers.1.", "model.layers.3.mlp.")
    patterns = ["model.embed_tokens", "model.layers.{0-1}", "model.layers.3.mlp"]
    sections = {
        "model": {"freeze_modules": patterns, "init_model_with_meta_device": ranks > 1},
        "parallel": {"recompute": recompute},
        "training": {"per_device_train_batch_size": GLOBAL_BATCH // ranks},
    }
    rows = rank_pool.run(
        "tests.distributed.rows:train",
        ranks=ranks,
        folder=str(folder),
        samples=samples,
        steps=STEPS,
        sections=sections,
    )
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).train()
    source = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(frozen))
    expected = plain_loop(model, samples)
    expected.weights = dict(model.state_dict())
    trace = rows[0]["trace"]
    assert_parity(trace, expected)
    changed = {name for name, tensor in trace.weights.items() if not torch.equal(tensor, source[name])}
    assert changed == {name for name in source if not name.startswith(frozen)}


def lora_config(place: Path, name: str, model: dict[str, Any], **training: Any) -> str:
    """The YAML file of a run on conversations; the model lies in `place` and is made where it is not there yet."""
    if not (place / "model").exists():
        save_model(place / "model", "llama")
        write_conversations(place / "data.jsonl", 40)
    options = {"stage": "sft", "max_steps": 4, "lr": 1e-2, **training}
    path = Path(write_config(place / name, place / "model", sft_data(place / "data.jsonl"), **options))
    sections = yaml.safe_load(path.read_text())
    sections["model"] |= model
    path.write_text(yaml.safe_dump(sections))
    return str(path)


def run(pool: RankPool, argv: list[str], *, ranks: int = 2, **options: Any) -> list[dict[str, Any]]:
    rows = pool.run("tests.fsdp2.train.adapter_rows:train", ranks=ranks, argv=argv, **options)
    assert ends(rows) == [(0, None)] * ranks, rows[0]["error"]
    return rows


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=PROBE, use_cache=False).logits


def far(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest difference in standard deviations."""
    return ((found - expected).abs().max() / expected.std()).item()


def test_the_exported_adapter_and_the_merged_model_compute_what_the_run_did(
    rank_pool: RankPool, tmp_path: Path
) -> None:
    model = {"lora_rank": 3, "lora_alpha": 8.0, "lora_dropout": 0.1}
    # Small steps: large adapters would make the rounding of the sum W + scale B A visible in this toy.
    first = run(rank_pool, [lora_config(tmp_path, "first", model, merge_adapter=True, lr=3e-3)])
    # Rank 3 on hidden 48, 6 heads and 2 KV heads of 16, ffn 88, 4 layers, counted by hand.
    adapters = 4 * 3 * ((48 + 96) + 2 * (48 + 32) + (96 + 48) + 2 * (48 + 88) + (88 + 48))
    assert held(first) == (adapters, 2 * adapters)  # gradients, and two moments
    # Each rank its part: half of them, but for rows of uneven numbers.
    assert all(0.4 * adapters < row["gradients"] < 0.6 * adapters for row in first)
    folder = tmp_path / "first"
    assert not (folder / "config.json").exists()
    config = json.loads((folder / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["peft_type"]) == (3, 8, "LORA")
    assert sorted(config["target_modules"]) == sorted(EVERY)
    assert config["base_model_name_or_path"] == str(tmp_path / "model")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    before = logits(plain)
    loaded = logits(PeftModel.from_pretrained(plain, str(folder)))
    merged = logits(AutoModelForCausalLM.from_pretrained(folder / "merged", dtype=torch.float32))
    assert far(loaded, first[0]["logits"]) < 1e-5
    assert far(merged, first[0]["logits"]) < 1e-5
    assert far(before, first[0]["logits"]) > 1e-2  # it has learnt something
    # What merging does not touch is written as it was read.
    names = ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight")
    state = AutoModelForCausalLM.from_pretrained(folder / "merged", dtype=torch.float32).state_dict()
    source = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32).state_dict()
    assert all(torch.equal(state[name], source[name]) for name in names)
    # A run that goes on from the adapter starts with what the first one ended with.
    second = run(
        rank_pool,
        [lora_config(tmp_path, "second", {"adapter_name_or_path": str(folder)}, lr=0.0, min_lr=0.0)],
        ranks=1,
    )
    assert far(second[0]["logits"], first[0]["logits"]) < 1e-5
    assert held(second) == (adapters, 2 * adapters)


def held(rows: list[dict[str, Any]]) -> tuple[int, int]:
    """How many numbers of gradients and of optimizer state all ranks hold together."""
    return sum(row["gradients"] for row in rows), sum(row["state"] for row in rows)


def test_an_export_takes_the_place_of_every_earlier_one(rank_pool: RankPool, tmp_path: Path) -> None:
    """Guards against an adapter that transformers adds to the weights of a later run in the same folder."""
    folder = tmp_path / "run"

    def train(model: dict[str, Any], **training: Any) -> torch.Tensor:
        return run(rank_pool, [lora_config(tmp_path, "run", model, max_steps=1, **training)], ranks=1)[0]["logits"]

    train({"lora_rank": 2}, merge_adapter=True)
    assert (folder / "merged" / "config.json").exists()
    expected = train({"lora_rank": 3, "lora_target": "q_proj"})
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    assert far(logits(PeftModel.from_pretrained(plain, str(folder))), expected) < 1e-5
    assert not (folder / "merged").exists()
    expected = train({})
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    stored = exported(folder)
    assert loaded.state_dict().keys() == stored.keys()
    assert all(torch.equal(tensor, stored[name]) for name, tensor in loaded.state_dict().items())
    assert far(logits(loaded), expected) < 1e-5
    train({"lora_rank": 2})
    assert not exported(folder).keys() & stored.keys()


@pytest.mark.parametrize("mutant", ["merged_without_scale", "merged_upside_down"])
def test_a_wrong_merge_is_found(rank_pool: RankPool, tmp_path: Path, mutant: str) -> None:
    model = {"lora_rank": 3, "lora_alpha": 8.0}
    rows = run(rank_pool, [lora_config(tmp_path, "run", model, merge_adapter=True)], ranks=1, mutant=mutant)
    merged = logits(AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "merged", dtype=torch.float32))
    assert far(merged, rows[0]["logits"]) > 1e-4


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / "adapter_model.safetensors")


def test_a_resumed_run_is_the_run_without_interruption(rank_pool: RankPool, tmp_path: Path) -> None:
    model = {"lora_rank": 4, "lora_dropout": 0.3}
    common = {"max_steps": 6, "resume_from_checkpoint": "latest"}
    run(rank_pool, [lora_config(tmp_path, "whole", model, **common)])
    config = lora_config(tmp_path, "parts", model, save_steps=1000, **common)
    stopped = rank_pool.run("tests.distributed.runs:train", ranks=2, argv=[config], stop_at={1: 2})
    assert ends(stopped) == [(143, None)] * 2
    (checkpoint,) = (tmp_path / "parts" / "checkpoints").glob("global_step_*")
    assert checkpoint.name == "global_step_3"
    run(rank_pool, [config])
    assert metrics(tmp_path / "parts") == metrics(tmp_path / "whole")
    found, expected = tensors(tmp_path / "parts"), tensors(tmp_path / "whole")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    # Nothing of the model's own weights stands in a checkpoint.
    stored = FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    kept = {f"model.{name}" for name in stored_names(expected)}
    assert {name for name in stored if name.startswith("model.")} == kept
    assert len(stored) == 4 * len(kept)  # the weight, two moments, a step count


def test_a_checkpoint_becomes_a_model_by_the_command_that_the_converter_names(
    rank_pool: RankPool, tmp_path: Path
) -> None:
    model = {"lora_rank": 2}
    first = run(rank_pool, [lora_config(tmp_path, "run", model, save_steps=2)], ranks=1)
    checkpoint = tmp_path / "run" / "checkpoints" / "global_step_4"
    with pytest.raises(UserError, match="holds adapters and no model") as error:
        convert(
            checkpoint,
            read_manifest(checkpoint),
            tmp_path / "converted",
            model_configs=None,
            shard_size=10**9,
            dtype=None,
            trust_remote_code=False,
        )
    assert read_manifest(checkpoint).adapter == {
        "r": 2,
        "lora_alpha": 4,
        "use_rslora": False,
        "rank_pattern": {},
        "alpha_pattern": {},
        "base": fingerprint([tmp_path / "model" / "model.safetensors"]),
    }
    options = re.findall(r"--training\.\w+ [^ ,:]+(?=[ :])", str(error.value))
    assert len(options) == 3
    words = [word for option in options for word in option.split()]
    argv = [str(tmp_path / "run.yaml"), *words, "--training.output_dir", str(tmp_path / "merged_later")]
    refused = rank_pool.run("tests.distributed.runs:train", ranks=1, argv=[*argv, "--model.lora_alpha", "32"])
    assert "gives adapters of lora_alpha 32, but those in the checkpoint of step 4" in refused[0]["error"]
    rows = run(rank_pool, argv, ranks=1)
    assert any("Nothing left to train" in line for line in rows[0]["log"])
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged_later" / "merged", dtype=torch.float32)
    assert far(logits(merged), first[0]["logits"]) < 1e-5


def stored_names(adapter: dict[str, torch.Tensor]) -> list[str]:
    """The names in the run's model of what PEFT's file holds."""
    return [name.removeprefix("base_model.model.").replace(".weight", ".default.weight") for name in adapter]
