"""Greedy answers of SmolLM2 equal those of `transformers.generate`, token for token: for `scripts/soak.sh`.

    python -m tests.tasks.inference.smollm2 --model FOLDER [--prompts 32] [--tokens 64] [--wanted FILE]
    torchrun --nproc_per_node 2 -m tests.tasks.inference.smollm2 --model FOLDER --megatron [--wanted FILE]

The model is loaded from its directory, and from a checkpoint of the FSDP2 backend that is made of it; with --megatron
by the Megatron backend, a pipeline stage on each rank. Each answers the prompts one by one and with eight in work.
"""

from __future__ import annotations

import argparse
import json
import os
import pydoc_data.topics
import random
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from mindspeed_llm.tasks.inference.adapters.hf_load import load_hf
from mindspeed_llm.tasks.inference.arguments.inference import inference_arguments
from mindspeed_llm.tasks.inference.causal_lm import CausalLM
from mindspeed_llm.tasks.inference.kinds import detect
from mindspeed_llm.tasks.inference.load import load_causal_lm
from tests.fsdp2.checkpoint.test_merge_dcp_to_hf import describe

BATCHES = (1, 8)


def prompts(tokenizer: PreTrainedTokenizerBase, count: int) -> list[list[int]]:
    """Beginnings of Python's manual, of 4 to 120 tokens."""
    source = random.Random(0)
    topics = sorted(pydoc_data.topics.topics)
    texts = (pydoc_data.topics.topics[topic].strip() for topic in source.sample(topics, count))
    return [tokenizer(text)["input_ids"][: source.randint(4, 120)] for text in texts]


@torch.no_grad()
def reference(model: Path, rows: list[list[int]], tokens: int) -> list[list[int]]:
    """What `generate` answers to each prompt alone, without the token that ends it."""
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    answers = []
    for row in rows:
        ids = torch.tensor([row])
        found = loaded.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False)
        answers.append(found[0, len(row) :].tolist())
    end = loaded.generation_config.eos_token_id
    ends = set(end if isinstance(end, list) else [end])
    return [answer[:-1] if answer[-1] in ends else answer for answer in answers]


def write_checkpoint(model: Path, output: Path) -> Path:
    """A checkpoint as a run would leave it that was started from `model` and has changed nothing."""
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    folder = output / "checkpoints" / "global_step_1"
    folder.mkdir(parents=True)
    tied = set(loaded.all_tied_weights_keys or {})
    tensors = {f"model.{name}": tensor for name, tensor in loaded.state_dict().items() if name not in tied}
    dcp.save(tensors, storage_writer=dcp.FileSystemWriter(folder), no_dist=True)
    describe(folder, model)
    return folder


def of_transformers(folder: Path) -> Iterator[tuple[str, CausalLM]]:
    """The model of the directory, and of a checkpoint of the FSDP2 backend."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    with tempfile.TemporaryDirectory() as scratch:
        for path in (folder, write_checkpoint(folder, Path(scratch))):
            source = detect(path)
            backend, _ = load_hf(source.folder, source.kind)
            yield source.kind, CausalLM(backend, tokenizer, stop_ids=frozenset([tokenizer.eos_token_id]))


def of_megatron(folder: Path) -> Iterator[tuple[str, CausalLM]]:
    """The model of the Megatron backend, a stage on each rank."""
    stages = os.environ.get("WORLD_SIZE", "1")
    words = ["--load", str(folder), "--backend", "megatron", "--pipeline-model-parallel-size", stages]
    yield f"Megatron, PP {stages}", load_causal_lm(inference_arguments([*words, "--task", "greedy"]))


def main() -> None:
    """Compare; raises AssertionError where an answer differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--megatron", action="store_true")
    parser.add_argument("--wanted", type=Path, help="what transformers answers: read where it exists, else written")
    options = parser.parse_args()
    rows = prompts(AutoTokenizer.from_pretrained(options.model), options.prompts)
    asked = [options.prompts, options.tokens]
    if options.wanted is not None and options.wanted.exists():
        of, wanted = json.loads(options.wanted.read_text())
        assert of == asked, f"{options.wanted} is of (prompts, tokens) {of}, not of {asked}"
    else:
        started = time.monotonic()
        wanted = reference(options.model, rows, options.tokens)
        print(
            f"transformers.generate: {sum(map(len, wanted))} tokens in {time.monotonic() - started:.0f} s", flush=True
        )
        if options.wanted is not None:
            options.wanted.write_text(json.dumps([asked, wanted]))
    for name, model in of_megatron(options.model) if options.megatron else of_transformers(options.model):
        requests = [model.request(row, max_new_tokens=options.tokens) for row in rows]
        for batch in BATCHES:
            started = time.monotonic()
            found = [list(answer.token_ids) for answer in model.generate(requests, batch_size=batch)]
            differ = [number for number, pair in enumerate(zip(found, wanted, strict=True)) if pair[0] != pair[1]]
            assert not differ, f"{name}, batch {batch}: other answers to prompts {differ}"
            seconds = time.monotonic() - started
            if os.environ.get("RANK", "0") == "0":
                print(f"{name}, {batch} in work: all {len(rows)} answers equal ({seconds:.0f} s)", flush=True)


if __name__ == "__main__":
    main()
