"""inference.py: what it answers on the terminal and into files, with transformers as the authority."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.inference.main import main
from mindspeed_llm.tasks.inference.progress import Progress
from mindspeed_llm.tasks.inference.prompt_file import _telling_of_an_early_end
from mindspeed_llm.tasks.preprocess.templates import _entries
from tests.support.pool import RankPool
from tests.support.tokenizers import chatml_tokenizer
from tests.support.toys import build_toy

PROMPTS = ["The capital", "a", "One, two, three, four, five, six, seven and so on", "b c", "The end"]
MESSAGES = [{"role": "user", "content": "Hello?"}, {"role": "assistant", "content": "Yes"}]
NEW = 6

pytestmark = pytest.mark.usefixtures("logging_as_before")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("toy")
    tokenizer = chatml_tokenizer(eos_token="<|im_end|>")
    build_toy("qwen3", num_hidden_layers=2, vocab_size=len(tokenizer)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def rows(tmp_path: Path) -> Callable[[Sequence[Any]], list[str]]:
    """Writes a file of prompts; returns the flags that name it."""

    def write(found: Sequence[Any]) -> list[str]:
        lines = [row if isinstance(row, str) else json.dumps(row) for row in found]
        (tmp_path / "in.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
        return ["--prompt-file", str(tmp_path / "in.jsonl"), "--output-file", str(tmp_path / "new/out.jsonl")]

    return write


def read(flags: Sequence[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(flags[-1]).read_text(encoding="utf-8").splitlines()]


@cache
def loaded(folder: Path) -> tuple[Any, Any]:
    """(model, tokenizer) as transformers loads them."""
    return AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)


def expected(folder: Path, ids: Sequence[int], count: int = NEW, **options: Any) -> list[int]:
    """The new tokens of transformers, without the one that ends."""
    model, end = loaded(folder)[0], loaded(folder)[1].eos_token_id
    tokens = torch.tensor([ids])
    given = {"max_new_tokens": count, "do_sample": False, "eos_token_id": end, "pad_token_id": end, **options}
    found = model.generate(tokens, attention_mask=torch.ones_like(tokens), **given)[0, len(ids) :].tolist()
    return found[: found.index(end)] if end in found else found


def logprobs(folder: Path, ids: Sequence[int], answer: Sequence[int]) -> list[float]:
    with torch.no_grad():
        logits = loaded(folder)[0](torch.tensor([[*ids, *answer]])).logits[0]
    found = logits.log_softmax(-1)[len(ids) - 1 : -1]
    return found.gather(-1, torch.tensor(answer)[:, None])[:, 0].tolist()


def test_a_file_is_answered_in_its_order(model: Path, rows: Callable[[Sequence[Any]], list[str]]) -> None:
    flags = rows([{"prompt": text} for text in PROMPTS])
    assert main(["--load", str(model), "--max-new-tokens", str(NEW), "--batch-size", "2", *flags]) == 0
    found, tokenizer = read(flags), loaded(model)[1]
    assert [row["prompt"] for row in found] == PROMPTS
    for row in found:
        assert list(row) == ["prompt", "text", "token_ids", "logprobs", "finish_reason"]
        ids = tokenizer(row["prompt"])["input_ids"]
        assert row["token_ids"] == expected(model, ids)
        assert row["finish_reason"] == ("length" if len(row["token_ids"]) == NEW else "stop")
        assert row["text"] == tokenizer.decode(row["token_ids"], skip_special_tokens=True)
        assert row["logprobs"] == pytest.approx(logprobs(model, ids, row["token_ids"]), abs=1e-4)


@pytest.mark.parametrize("form", [["--hf-chat-template"], ["--prompt-type", "chatml"]], ids=["own", "named"])
def test_conversations_are_asked_in_the_template(
    model: Path, rows: Callable[[Sequence[Any]], list[str]], form: list[str]
) -> None:
    flags = rows([{"messages": MESSAGES[:1]}, {"messages": MESSAGES}, {"prompt": "Hello?"}])
    assert main(["--load", str(model), "--max-new-tokens", str(NEW), *form, *flags]) == 0
    tokenizer = loaded(model)[1]
    text = tokenizer.apply_chat_template(MESSAGES[:1], tokenize=False, add_generation_prompt=True)
    answer = expected(model, tokenizer(text)["input_ids"])
    # A reply at the end is what the data answer.
    assert [(row["prompt"], row["token_ids"]) for row in read(flags)] == [
        (text, answer),
        (text, answer),
        ("Hello?", answer),
    ]


@pytest.mark.parametrize(
    ("found", "message"),
    [
        ([{"prompt": "a"}, {"text": "b"}], r"in.jsonl:2: expected one of the fields prompt and messages, found text"),
        (
            [{"prompt": "a", "messages": MESSAGES}],
            r":1: expected one of the fields .* found prompt, messages",
        ),
        ([{"prompt": "  "}], r":1: prompt is \"  \"; expected a text that is not empty"),
        ([{"prompt": 3}], r":1: prompt is 3; expected a text"),
        ([{"messages": MESSAGES}], r":1: messages are written in a chat template, and none is named"),
        (['{"prompt": "a"}', "{"], r"in.jsonl:2"),
        (['{"prompt": "a"}', '{"prompt": "b\\ud800"}'], r"in.jsonl:2: prompt holds \\ud800 at character 1, one half"),
        ([""], r"has no prompts"),
    ],
)
def test_a_bad_row_is_found_before_the_model_is_loaded(
    rows: Callable[[Sequence[Any]], list[str]], tmp_path: Path, found: Sequence[Any], message: str
) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text("{}")
    with pytest.raises(UserError, match=message):
        main(["--load", str(tmp_path / "model"), *rows(found)])
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("prompts", "output", "message"),
    [
        (
            "in.jsonl",
            "/proc/x/y.jsonl",
            r"--output-file /proc/x/y.jsonl cannot be written: no file can be made in /proc",
        ),
        ("in.jsonl", "/dev/null", r"--output-file /dev/null is no regular file"),
        ("in.jsonl", "n" * 250, r"cannot be written: no file can be made in .*File name too long"),
        ("in.jsonl", ".", r"--output-file .* is a folder; expected the name of a file"),
        ("in.jsonl", "in.jsonl", r"--output-file .* is --prompt-file, which would be lost"),
        (".", "out", r"--prompt-file .* is a folder; expected a file"),
        ("no", "out", r"--prompt-file .* does not exist"),
        ("p" * 300, "out", r"--prompt-file .* cannot be read: File name too long"),
    ],
)
def test_files_are_tried_before_anything_else(tmp_path: Path, prompts: str, output: str, message: str) -> None:
    (tmp_path / "in.jsonl").write_text('{"prompt": "a"}\n')
    flags = ["--prompt-file", str(tmp_path / prompts), "--output-file", str(tmp_path / output)]
    with pytest.raises(UserError, match=message):
        main(["--load", str(tmp_path), *flags])
    assert [file.name for file in tmp_path.iterdir()] == ["in.jsonl"]


def test_answers_that_cannot_be_written_are_kept(
    model: Path, rows: Callable[[Sequence[Any]], list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The place of the file turns into a folder while the model works."""
    flags = rows([{"prompt": "a"}])

    def spoil(*args: Any) -> None:
        Path(flags[-1]).mkdir(parents=True)

    monkeypatch.setattr("mindspeed_llm.tasks.inference.prompt_file.tell_of_positions", spoil)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(UserError, match=r"out.jsonl cannot be written: Is a directory. All answers are there") as error:
        main(["--load", str(model), "--max-new-tokens", "2", *flags])
    [kept] = tmp_path.glob("answers-*/out.jsonl")
    assert f"they are in {kept};" in str(error.value)
    [row] = map(json.loads, kept.read_text(encoding="utf-8").splitlines())
    assert row["token_ids"] == expected(model, loaded(model)[1]("a")["input_ids"], 2)


def test_answers_go_through_links(model: Path, rows: Callable[[Sequence[Any]], list[str]], tmp_path: Path) -> None:
    flags = rows([{"prompt": "a"}])
    link, target = Path(flags[-1]), tmp_path / "target"
    link.parent.mkdir()
    link.symlink_to(target)
    assert main(["--load", str(model), "--max-new-tokens", "2", *flags]) == 0
    assert link.is_symlink() and len(target.read_text(encoding="utf-8").splitlines()) == 1
    link.unlink()
    link.symlink_to(tmp_path / "no/target")
    with pytest.raises(UserError, match=r"--output-file .* cannot be written: it is a symbolic link to .*no/target"):
        main(["--load", "no", *flags])
    link.unlink()
    link.symlink_to(link)
    with pytest.raises(UserError, match=r"--output-file .* cannot be written: Too many levels"):
        main(["--load", "no", *flags])


@pytest.mark.parametrize("own", [["--check"], []])
def test_a_tokenizer_is_tried_before_the_model_is_loaded(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: list[str]
) -> None:
    (tmp_path / "there").mkdir()
    monkeypatch.setattr("mindspeed_llm.tasks.inference.adapters.hf_load.load_hf", None)
    argv = ["--load", str(model), "--prompt", "a", "--tokenizer-name-or-path", str(tmp_path / "there"), *own]
    with pytest.raises(UserError, match=r"--tokenizer-name-or-path .*/there holds no tokenizer"):
        main(argv)
    # One of its own that is damaged.
    for file in model.iterdir():
        (tmp_path / "there" / file.name).symlink_to(file)
    (tmp_path / "there/tokenizer.json").unlink()
    (tmp_path / "there/tokenizer.json").write_text("{")
    with pytest.raises(UserError, match=r"there/tokenizer.json"):
        main(["--load", str(tmp_path / "there"), "--prompt", "a", *own])


@pytest.mark.parametrize(
    ("task", "beams", "message"),
    [("beam_search", 2**19, "a search looks at 1048576"), ("beam_search_with_sampling", 33, "Take 32 beams or fewer")],
)
def test_too_many_beams_are_refused_before_the_model_is_loaded(
    model: Path, tmp_path: Path, task: str, beams: int, message: str
) -> None:
    folder = Path(shutil.copytree(model, tmp_path / "model"))
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": 2**19}), encoding="utf-8")
    with pytest.raises(UserError, match=f"--num-beams is {beams}: .*{message}"):
        main(["--load", str(folder), "--check", "--task", task, "--num-beams", str(beams)])


def test_a_plan_without_a_tokenizer_is_refused(model: Path) -> None:
    """Flags that describe all sizes, so that no file names one."""
    sizes = ["--num-layers", "2", "--hidden-size", "64", "--num-attention-heads", "4"]
    argv = ["--load", str(model), "--use-mcore-models", "--check", *sizes, "--max-position-embeddings", "256"]
    with pytest.raises(UserError, match=r"--load .* brings no tokenizer; name it with --tokenizer-name-or-path"):
        main(argv)


def test_notices_before_the_work(
    model: Path, rows: Callable[[Sequence[Any]], list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a file that is replaced, and of answers for which the model has no positions."""
    flags = rows([{"prompt": "a" * 250}, {"prompt": "a"}])
    Path(flags[-1]).parent.mkdir()
    Path(flags[-1]).write_text("old")
    argv = ["--load", str(model), "--max-new-tokens", "9", *flags]
    assert main([*argv, "--check"]) == 0
    exists = f"--output-file {flags[-1]} exists, and is replaced when all answers are there"
    assert exists in capsys.readouterr().out and Path(flags[-1]).read_text() == "old"
    assert main(argv) == 0
    out = capsys.readouterr().out
    assert exists in out
    notice = "the model has 256 positions for a prompt with its answer: 1 of 2 answers end where these are used up"
    assert notice in out
    first, second = read(flags)
    assert (len(first["token_ids"]), first["finish_reason"]) == (6, "length") and len(second["token_ids"]) == 9
    assert (
        main(["--load", str(model), "--prompt", "a", "--task", "greedy", "do_sample", "--max-new-tokens", "900"]) == 0
    )
    assert capsys.readouterr().out.count("the model has 256 positions") == 1


def test_bad_conversations_are_named(rows: Callable[[Sequence[Any]], list[str]], model: Path) -> None:
    flags = rows([{"messages": MESSAGES[:1]}, {"messages": [MESSAGES[0], MESSAGES[0]]}])
    with pytest.raises(UserError, match=r"in.jsonl:2: messages: roles out of order"):
        main(["--load", str(model), "--hf-chat-template", *flags])
    flags = rows([{"messages": MESSAGES[:1], "system": "\udc00"}])
    with pytest.raises(UserError, match=r"in.jsonl:1: system holds \\udc00 at character 0"):
        main(["--load", str(model), "--hf-chat-template", *flags])
    flags = rows([{"messages": [{"role": "user", "content": [{"type": "text", "text": "a\ud800"}]}]}])
    with pytest.raises(UserError, match=r"in.jsonl:1: messages\[0\].content\[0\].text holds \\ud800 at character 1"):
        main(["--load", str(model), "--hf-chat-template", *flags])


def test_words_and_templates_that_are_no_text(tmp_path: Path) -> None:
    """Before anything is looked for: --load names nothing."""
    word = b"h\xffi".decode("utf-8", "surrogateescape")
    for flag in ("--prompt", "--stop"):
        with pytest.raises(UserError, match=f"^{flag}: .* holds the byte 0xff at character 1"):
            main(["--load", "no", flag, "a", word])
    templates = tmp_path / "templates.json"
    for content, said in (
        (b'[{"name": "own", "default_system": "\\ud800"}]', r"template\[0\].default_system holds \\ud800"),
        (b'[{"name": "\xff"}]', "can't decode byte 0xff"),
    ):
        templates.write_bytes(content)
        with pytest.raises(UserError, match=f"templates.json: .*{said}"):
            main(["--load", "no", "--prompt-type", "own", "--prompt-type-path", str(templates)])
        _entries.cache_clear()


@pytest.mark.parametrize(
    ("own", "size", "message"),
    [
        ([], 300, r"in.jsonl:2: the prompt has 300 tokens, and the model has 256 positions"),
        (["--max-length", "20"], 30, r"in.jsonl:2: --max-length 20: the prompt alone has 30 tokens"),
        (["--check"], 300, r"in.jsonl:2: the prompt has 300 tokens"),
    ],
)
def test_a_prompt_without_room_is_named_before_the_model_is_loaded(
    model: Path,
    rows: Callable[[Sequence[Any]], list[str]],
    monkeypatch: pytest.MonkeyPatch,
    own: list[str],
    size: int,
    message: str,
) -> None:
    flags = rows([{"prompt": "a"}, {"prompt": "b" * size}])
    monkeypatch.setattr("mindspeed_llm.tasks.inference.load.load_causal_lm", None)
    with pytest.raises(UserError, match=message):
        main(["--load", str(model), *own, *flags])
    assert not Path(flags[-1]).exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_run_that_is_ended_says_what_is_lost(
    number: signal.Signals, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process itself is not ended here: what would do it is noted."""
    killed: list[tuple[int, Any]] = []
    monkeypatch.setattr(os, "kill", lambda pid, number: killed.append((number, signal.getsignal(number))))
    progress = Progress("answers", 5, show=False)
    ends = pytest.raises(KeyboardInterrupt) if number == signal.SIGINT else contextlib.nullcontext()
    with ends, _telling_of_an_early_end(progress, "out.jsonl"):
        progress.add(7, 2)
        signal.raise_signal(number)
    assert capfd.readouterr().err == "ended early: 2 of 5 answers were ready; out.jsonl was not written\n"
    assert killed == ([(signal.SIGTERM, signal.SIG_DFL)] if number == signal.SIGTERM else [])
    with _telling_of_an_early_end(progress, "out.jsonl"):
        pass
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL and not capfd.readouterr().err


def test_tasks_stand_under_their_headlines(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--load", str(model), "--task", "beam_search", "greedy", "--prompt", "The capital", "--max-new-tokens", "6"]
    assert main(argv) == 0
    out, tokenizer = capsys.readouterr().out, loaded(model)[1]
    ids = tokenizer("The capital")["input_ids"]
    for title, options in (("Beam Search", {"num_beams": 2}), ("Greedy Search", {})):
        text = tokenizer.decode(expected(model, ids, **options), skip_special_tokens=True)
        assert f" {title} =" in out
        assert f"You:\nThe capital\n\nMindSpeed-LLM:\n{text}\n=====" in out.partition(f" {title} ")[2]
    assert out.index("Beam Search") < out.index("Greedy Search") and "Elapsed: " in out


def test_sampling_follows_the_seed_of_each_prompt(model: Path, rows: Callable[[Sequence[Any]], list[str]]) -> None:
    def sampled(seed: int, batch: int) -> list[list[int]]:
        flags = rows([{"prompt": "a"}, {"prompt": "a"}])
        own = ["--task", "do_sample", "--temperature", "2", "--seed", str(seed), "--batch-size", str(batch)]
        assert main(["--load", str(model), *own, *flags]) == 0
        return [row["token_ids"] for row in read(flags)]

    first, second = sampled(5, 1), sampled(6, 2)
    assert first[0] != first[1]
    # The second prompt of the one has the seed of the first one of the other.
    assert first[1] == second[0] and sampled(5, 2) == first


@pytest.mark.parametrize(("limits", "count"), [("--max-length 9", 8), ("--max-new-tokens 5 --max-length 90", 5)])
def test_limits_of_answers(model: Path, rows: Callable[[Sequence[Any]], list[str]], limits: str, count: int) -> None:
    flags = rows([{"prompt": "a"}])
    assert main(["--load", str(model), *limits.split(), *flags]) == 0
    [row] = read(flags)
    ids = loaded(model)[1]("a")["input_ids"]
    assert row["token_ids"] == expected(model, ids, count)


@pytest.mark.distributed
def test_copies_and_stages_answer_alike(
    model: Path, rows: Callable[[Sequence[Any]], list[str]], rank_pool: RankPool, tmp_path: Path
) -> None:
    """Two copies of transformers' model share the file; two stages on megatron-core do it together."""
    flags = rows([{"prompt": text} for text in PROMPTS])
    answers = []
    for own in ([], ["--use-mcore-models", "--pipeline-model-parallel-size", "2"]):
        argv = ["--load", str(model), "--max-new-tokens", str(NEW), *own, *flags]
        assert rank_pool.run("tests.examples.rows:infer_in", ranks=2, folder=str(tmp_path), argv=argv) == [0, 0]
        answers.append([(row["prompt"], row["token_ids"]) for row in read(flags)])
        Path(flags[-1]).unlink()
    tokenizer = loaded(model)[1]
    assert answers[0] == [(text, expected(model, tokenizer(text)["input_ids"])) for text in PROMPTS] == answers[1]


def test_the_command_itself(model: Path, repository: Path) -> None:
    done = subprocess.run(
        [sys.executable, "inference.py", "--load", str(model), "--task", "chat", "--max-new-tokens", "3"],
        cwd=repository,
        input="hello\n/exit\n",
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "You >> MindSpeed-LLM: " in done.stdout and "loaded " in done.stdout
