"""Speed of generation against `transformers.generate` and a bare loop with a cache.

    python scripts/demo_model.py --out output/smollm2
    python -m benchmarks.generate --model output/smollm2

Part single: one prompt, greedy, so many new tokens. Part file: a file of ragged prompts, by continuous batching as
`inference.py --prompt-file` does it, and by `transformers.generate` in batches of the same size, in the order of the
file, filled up on the left; an answer ends where the model ends it, or at the limit. All sides begin with texts, end
with texts, and compute with the same weights in one process, in turns (A B C B C A ...). They must give the same
tokens; filling up moves a model's numbers a little, so that of a file a few answers may differ. Beside the time of each
turn it is counted how much the process computed in it, which depends less on what else the machine does.

The prompts are questions about topics of Python's manual with a quotation of any length from it, or those of --prompts
(jsonl with a key `prompt`).
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.ratios import Ratio, speed_ratio
from mindspeed_llm.tasks.inference.causal_lm import CausalLM
from mindspeed_llm.tasks.preprocess.readers import read_file

PARTS = ("single", "file")
OURS, TRANSFORMERS, BARE = "ours", "transformers.generate", "bare loop"
BARS = {("single", TRANSFORMERS): 1.0, ("single", BARE): 0.95, ("file", TRANSFORMERS): 1.5}
WARM_UP_TOKENS = 4
SAME_ANSWERS = 0.8

Answers = list[list[int]]


@dataclass(frozen=True, kw_only=True)
class Side:
    """A contestant and its figures, one for each round."""

    run: Callable[[Sequence[str], int], Answers]
    """Answers prompts with so many new tokens at most."""
    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)
    """Of all threads."""

    def turn(self, prompts: Sequence[str], new_tokens: int) -> Answers:
        """One round."""
        cpu, started = time.process_time(), time.perf_counter()
        answers = self.run(prompts, new_tokens)
        self.seconds.append(time.perf_counter() - started)
        self.cpu_seconds.append(time.process_time() - cpu)
        return answers


def main() -> None:
    """Measure, and print all times and ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="Hugging Face directory")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--pairs", type=int, default=5, help="measured rounds (default 5)")
    parser.add_argument("--new-tokens", type=int, default=128, help="of an answer, at most (default 128)")
    parser.add_argument("--batch-size", type=int, default=8, help="of part file (default 8)")
    parser.add_argument("--num-prompts", type=int, default=64, help="of part file (default 64)")
    parser.add_argument("--characters", type=int, default=1200, help="of a quotation, at most (default 1200)")
    parser.add_argument("--prompts", type=Path, help="jsonl with a key prompt")
    arguments = parser.parse_args()
    peer, lm = Peer(arguments.model, arguments.batch_size), load(arguments.model, arguments.batch_size)
    prompts = read_prompts(arguments.prompts) if arguments.prompts else manual_prompts(arguments.characters)
    prompts = [peer.as_chat(prompt) for prompt in prompts[: arguments.num_prompts]]
    if "single" in arguments.parts:
        middle = sorted(prompts, key=len)[len(prompts) // 2]
        endless = CausalLM(lm.backend, lm.tokenizer, stop_ids=frozenset())
        sides = {OURS: Side(run=ours(endless)), TRANSFORMERS: Side(run=peer.endless), BARE: Side(run=peer.bare)}
        measure("single", sides, [middle], arguments.new_tokens, arguments.pairs)
    if "file" in arguments.parts:
        sides = {OURS: Side(run=ours(lm)), TRANSFORMERS: Side(run=peer.batches)}
        measure("file", sides, prompts, arguments.new_tokens, arguments.pairs)


def measure(part: str, sides: dict[str, Side], prompts: Sequence[str], new_tokens: int, pairs: int) -> None:
    """All rounds of a part, and what came of them."""
    for side in sides.values():
        side.run(prompts[:2], WARM_UP_TOKENS)
    names = list(sides)
    for number in range(pairs):
        # Each is first in turn: one that always followed the same other would find its caches as that one leaves them.
        first = number % len(names)
        answers = {name: sides[name].turn(prompts, new_tokens) for name in names[first:] + names[:first]}
        same = min(agreement(answers[OURS], answers[name]) for name in names)
        tokens = sum(map(len, answers[OURS]))
        times = ", ".join(f"{name} {sides[name].seconds[-1]:.2f} s" for name in names)
        print(f"{part}, round {number}: {len(prompts)} prompts, {tokens} tokens, {times}", flush=True)
        if same < (1.0 if part == "single" else SAME_ANSWERS):
            sys.exit(f"the sides do not compute the same: only {same:.0%} of their answers are alike")
    for name, side in sides.items():
        speed = tokens * pairs / sum(side.seconds)
        print(f"{part}: {name} {speed:.1f} tokens/s")
    for name in names[1:]:
        what = f"{part}: speed of ours / {name}"
        print(speed_ratio(what, ours=sides[OURS].seconds, peer=sides[name].seconds).line(BARS[part, name]))
        computed = zip(sides[OURS].cpu_seconds, sides[name].cpu_seconds, strict=True)
        print(Ratio(name=f"{part}: CPU time of {name} / ours", values=tuple(b / a for a, b in computed)).line())


def agreement(ours: Answers, theirs: Answers) -> float:
    """The share of answers that are alike."""
    return sum(a == b for a, b in zip(ours, theirs, strict=True)) / len(ours)


def load(folder: Path, batch_size: int) -> CausalLM:
    """Our side."""
    from mindspeed_llm.tasks.inference import stopping
    from mindspeed_llm.tasks.inference.adapters.hf_load import load_hf
    from mindspeed_llm.tasks.preprocess.tokenizers import TokenizerOptions, load_tokenizer

    backend, _ = load_hf(folder, "hf", dtype="fp32")
    tokenizer = load_tokenizer(TokenizerOptions(name_or_path=str(folder)))
    ends = stopping.stop_ids(tokenizer, others=stopping.of_generation_config(folder))
    return CausalLM(backend, tokenizer, stop_ids=ends, batch_size=batch_size)


def ours(lm: CausalLM) -> Callable[[Sequence[str], int], Answers]:
    """What is done with the prompts of a file."""

    def run(prompts: Sequence[str], new_tokens: int) -> Answers:
        answers = lm.generate([lm.request(lm.tokenizer.encode(p), max_new_tokens=new_tokens) for p in prompts])
        return [list(answer.token_ids) for answer in answers]

    return run


class Peer:
    """transformers alone."""

    def __init__(self, folder: Path, batch_size: int) -> None:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self._torch = torch
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self._tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
        if self._tokenizer.pad_token is None:
            self._tokenizer.pad_token = self._tokenizer.eos_token
        found = self._model.generation_config.eos_token_id
        self._ends = {self._tokenizer.eos_token_id, *(found if isinstance(found, list) else [found])} - {None}
        self._batch_size = batch_size

    def as_chat(self, prompt: str) -> str:
        """The prompt in the model's chat template, where it has one."""
        if self._tokenizer.chat_template is None:
            return prompt
        messages = [{"role": "user", "content": prompt}]
        return self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)

    def batches(self, prompts: Sequence[str], new_tokens: int) -> Answers:
        """Batches in the order of the prompts, filled up on the left; answers end where the model ends them."""
        answers: Answers = []
        for start in range(0, len(prompts), self._batch_size):
            part = prompts[start : start + self._batch_size]
            given = self._tokenizer(list(part), return_tensors="pt", padding=True, add_special_tokens=False)
            found = self._generate(given, new_tokens, sorted(self._ends))
            self._tokenizer.batch_decode(found, skip_special_tokens=True)
            answers += [self._until_end(row) for row in found]
        return answers

    def endless(self, prompts: Sequence[str], new_tokens: int) -> Answers:
        """One after the other, as many tokens as are allowed."""
        answers: Answers = []
        for prompt in prompts:
            given = self._tokenizer(prompt, return_tensors="pt", add_special_tokens=False)
            answers += self._generate(given, new_tokens, None)
            self._tokenizer.decode(answers[-1], skip_special_tokens=True)
        return answers

    def bare(self, prompts: Sequence[str], new_tokens: int) -> Answers:
        """The model's forward in a loop, with the cache that it makes."""
        torch = self._torch
        answers: Answers = []
        for prompt in prompts:
            tokens = self._tokenizer(prompt, return_tensors="pt", add_special_tokens=False)["input_ids"]
            answer: list[int] = []
            cache = None
            with torch.no_grad():
                while len(answer) < new_tokens:
                    found = self._model(tokens, cache=cache, use_cache=True, logits_to_keep=1)
                    cache = found.past_key_values
                    tokens = found.logits[:, -1].argmax(dim=-1, keepdim=True)
                    answer.append(tokens.item())
            answers.append(answer)
        return answers

    def _generate(self, given: dict, new_tokens: int, ends: list[int] | None) -> Answers:
        found = self._model.generate(
            **given,
            max_new_tokens=new_tokens,
            do_sample=False,
            eos_token_id=ends,
            pad_token_id=self._tokenizer.pad_token_id,
        )
        return found[:, given["input_ids"].shape[1] :].tolist()

    def _until_end(self, answer: list[int]) -> list[int]:
        return answer[: next((place for place, token in enumerate(answer) if token in self._ends), len(answer))]


def read_prompts(file: Path) -> list[str]:
    """The prompts of a jsonl file."""
    return [record.data["prompt"] for record in read_file(file)]


def manual_prompts(characters: int) -> list[str]:
    """A question about each topic of Python's manual, in an order of no meaning, with a quotation of 50 characters or
    more.
    """
    from pydoc_data.topics import topics

    choose = random.Random(0)
    names = sorted(topics)
    choose.shuffle(names)
    prompts = []
    for name in names:
        quotation = " ".join(topics[name].split())[: choose.randint(50, characters)]
        prompts.append(f"What is this text about? Answer in one short sentence.\n\n{quotation}")
    return prompts


if __name__ == "__main__":
    main()
