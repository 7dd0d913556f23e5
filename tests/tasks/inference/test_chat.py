"""A conversation on the terminal, typed through a pipe."""

from __future__ import annotations

import io
import json
from argparse import Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from mindspeed_llm.tasks.inference.adapters.hf import HFBackend
from mindspeed_llm.tasks.inference.arguments.inference import inference_arguments
from mindspeed_llm.tasks.inference.causal_lm import CausalLM
from mindspeed_llm.tasks.inference.chat import chat, without_tags
from mindspeed_llm.tasks.inference.generation import Completion, Request
from mindspeed_llm.tasks.preprocess.tokenizers import as_tokenizer
from tests.support.pool import RankPool
from tests.support.tokenizers import byte_tokenizer, chatml_tokenizer
from tests.support.toys import build_toy

TOKENIZER = chatml_tokenizer(eos_token="<|im_end|>")


class Parrot(CausalLM):
    """Answers with scripted texts, and notes what it is asked."""

    def __init__(self, replies: Sequence[str], tokenizer: Any = TOKENIZER, max_length: int = 256) -> None:
        model = build_toy("llama", num_hidden_layers=1, vocab_size=300, max_position_embeddings=max_length)
        super().__init__(
            HFBackend(model, device=torch.device("cpu")), as_tokenizer(tokenizer), stop_ids=frozenset(), batch_size=1
        )
        self.replies, self.asked, self.requests = list(replies), [], []

    def stream(self, request: Request) -> Iterator[Completion]:
        self.asked.append(self.tokenizer.decode(request.prompt))
        self.requests.append(request)
        text = self.replies.pop(0)
        for end in range(1, len(text) + 1):
            reason = "stop" if end == len(text) else None
            yield Completion(token_ids=(1,) * end, text=text[:end], logprobs=(0.0,) * end, finish_reason=reason)


def talk(lm: CausalLM, typed: str, monkeypatch: pytest.MonkeyPatch, flags: str = "") -> Namespace:
    args = inference_arguments(["--task", "chat", *flags.split()])
    monkeypatch.setattr("sys.stdin", io.StringIO(typed))
    assert chat(args, lm) == 0
    return args


def rendered(*contents: str) -> str:
    messages = [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(contents)]
    return TOKENIZER.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)


def test_turns_are_remembered_as_many_as_asked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lm = Parrot(["A", "B", "C", "D"])
    talk(lm, "a\nb\nc\n/clear\nd\nq\nnot read\n", monkeypatch, "--history-turns 1 --prompt-type chatml")
    assert lm.asked == [rendered("a"), rendered("a", "A", "b"), rendered("b", "B", "c"), rendered("d")]
    out = capsys.readouterr().out
    assert "You >> MindSpeed-LLM: A\n\nYou >> MindSpeed-LLM: B\n" in out and "(a new conversation)" in out
    assert len({request.sampling.seed for request in lm.requests}) == 4
    assert all(request.sampling.do_sample for request in lm.requests)


def test_without_a_template_texts_stand_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    lm = Parrot(["A", "B"], byte_tokenizer())
    talk(lm, "a\nb\n", monkeypatch)
    assert lm.asked == ["a", "a\nA\nb"]


def test_the_tokenizers_template_is_taken_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    lm = Parrot(["A"])
    talk(lm, "a\n", monkeypatch)
    assert lm.asked == [rendered("a")]


def test_saved_conversations_can_be_asked_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "saved talk.jsonl"
    talk(Parrot(["<think>hm</think>\n\nA"]), f"a\n/save {file}\n/save\n/save {tmp_path}/no/x\n/svae\n", monkeypatch)
    [row] = map(json.loads, file.read_text(encoding="utf-8").splitlines())
    assert row["messages"] == [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "<think>hm</think>\n\nA"},
    ]
    out = capsys.readouterr().out
    assert "MindSpeed-LLM: hm\n\nA\n" in out and "/svae is no command" in out
    assert "/save needs the name of a file" in out and "cannot be written: No such file" in out


def test_an_empty_conversation_is_not_saved(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    old = tmp_path / "old"
    old.write_text("kept")
    talk(Parrot(["A"]), f"/save {old}\na\n/clear\n/save {old}\n/save {tmp_path}/new\n", monkeypatch)
    assert old.read_text() == "kept" and not (tmp_path / "new").exists()
    assert capsys.readouterr().out.count("(nothing to save") == 3


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])
def test_what_is_no_text_is_told_and_the_talk_goes_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], errors: str
) -> None:
    lm = Parrot(["A"])
    # A reader that meets them as a terminal does: line by line.
    lines = iter([b"\xff\xfe", b"a"])

    def read(prompt: str) -> str:
        try:
            return next(lines).decode("utf-8", errors)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr("builtins.input", read)
    assert chat(inference_arguments(["--task", "chat"]), lm) == 0
    assert lm.asked == [rendered("a")]
    [line] = [line for line in capsys.readouterr().out.splitlines() if "what was typed" in line]
    assert "UTF-8; type it again)" in line


def test_replies_without_positions_are_told_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for limit, told in (("255", False), ("256", True)):
        caplog.clear()
        talk(Parrot([]), "", monkeypatch, f"--max-new-tokens {limit}")
        assert ("the model has 256 positions for a prompt with its answer: answers end where" in caplog.text) == told


def test_old_turns_make_room(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    lm = Parrot(["A" * 150, "B", "C"])
    talk(lm, f"a\n{'b' * 100}\n{'c' * 300}\nd\n", monkeypatch)
    assert lm.asked == [rendered("a"), rendered("b" * 100), rendered("b" * 100, "B", "d")]
    assert "the model has 256 positions" in capsys.readouterr().out


def test_the_end_of_the_input_and_interrupts_end_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Interrupted(Parrot):
        def stream(self, request: Request) -> Iterator[Completion]:
            yield from list(super().stream(request))[:2]
            raise KeyboardInterrupt

    talk(Interrupted(["hello", "there"]), "a\nb\n", monkeypatch)
    out = capsys.readouterr().out
    # A reply that is broken off is no end.
    assert "MindSpeed-LLM: he\n\nYou >> MindSpeed-LLM: th\n" in out and out.endswith("You >> \n")

    def interrupt(prompt: str) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr("builtins.input", interrupt)
    assert chat(inference_arguments(["--task", "chat"]), Parrot([])) == 0


@pytest.mark.distributed
def test_other_ranks_wait_for_what_is_typed(rank_pool: RankPool, tmp_path: Path) -> None:
    build_toy("llama", num_hidden_layers=1, vocab_size=300).save_pretrained(tmp_path)
    TOKENIZER.save_pretrained(tmp_path)
    row = "tests.tasks.inference.chat_rows:talk"
    (code, speaks), (other, silent) = rank_pool.run(
        row, ranks=2, folder=str(tmp_path), typed=["a", "/svae", "b", "/exit"], seconds=0.5
    )
    assert (code, other) == (0, 0)
    assert speaks.count("MindSpeed-LLM: ") == 2 and speaks.count("/svae is no command") == 1
    assert "MindSpeed-LLM: " not in silent and "/svae" not in silent


def test_tags_of_thoughts_are_left_out_whatever_is_there_of_them() -> None:
    text = "<think>\nI think <b> so.\n</think>\n\nYes < no"
    shown = [without_tags(text[:end], is_whole=end == len(text)) for end in range(len(text) + 1)]
    assert shown[-1] == "I think <b> so.\n\n\nYes < no"
    assert all(shown[-1].startswith(part) for part in shown)
