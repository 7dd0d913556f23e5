"""The command line of evaluation.py: frozen, documented, and read."""

from __future__ import annotations

import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mindspeed_llm.errors import UserError
from mindspeed_llm.flag import Flag
from mindspeed_llm.tasks.evaluation.arguments import COMMAND, EVALUATION, evaluation_arguments
from mindspeed_llm.tasks.evaluation.reference import reference_page
from mindspeed_llm.tasks.inference.arguments.command import surface_of
from tests.training.arguments.test_used import is_read

SURFACE = Path(__file__).with_name("surface.txt")
FLAGS: dict[str, Flag] = {flag.name: flag for flag in EVALUATION.flags}
# Of the mirrored interface.
MIRRORED = (
    "task task-data-path evaluation-batch-size greedy instruction-template no-chat-template eval-language "
    "max-eval-samples broadcast alternative-prompt origin-postprocess chain-of-thought max-new-tokens load prompt-type "
    "hf-chat-template tokenizer-type tokenizer-name-or-path seed bf16 fp16 num-layers tensor-model-parallel-size"
)


def surface() -> list[str]:
    """One line for each flag of the command's own; written anew by running this module."""
    rows = [
        f"{flag.name} {flag.parsing.get('metavar', '')}".strip() + f" | {flag.dest} = {flag.default!r}"
        for flag in FLAGS.values()
    ]
    silent = (*COMMAND.no_effect, *COMMAND.no_effect_values)
    return [*rows, *(f"{name} | no effect" for name in silent)]


def test_flags_values_and_defaults_are_frozen() -> None:
    assert surface() == SURFACE.read_text(encoding="utf-8").splitlines()


@pytest.mark.parametrize("name", FLAGS)
def test_every_flag_is_documented_and_read(name: str) -> None:
    flag = FLAGS[name]
    assert len(flag.doc) > 5 and flag.doc.endswith(".")
    assert [room for room in flag.used_by if not is_read(flag, room)] == []


def test_flags_of_the_mirrored_interface_are_taken() -> None:
    known = {flag.name for group in surface_of(COMMAND).groups for flag in group.flags}
    known |= surface_of(COMMAND).no_effect.keys()
    assert [name for name in MIRRORED.split() if f"--{name}" not in known] == []


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--prompt hello", "--prompt is not available: inference.py takes it"),
        ("--max-eval-sample 3", "unknown flag --max-eval-sample; did you mean --max-eval-samples"),
        ("--max-eval-samples 0", "expected a whole number of 1 or more"),
        ("--num-fewshot -1", "expected a whole number of 0 or more"),
        ("--eval-language fr", "expected one of en, zh; found 'fr'"),
        ("--prompt-type qwen3 --hf-chat-template", "both say in what form"),
    ],
)
def test_contradictions_and_typos(flags: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        evaluation_arguments(shlex.split(flags))


@pytest.mark.parametrize("flag", ["--greedy", "--broadcast", "--use-kv-cache", "--top-k 3", "--history-turns 2"])
def test_flags_without_effect_are_named(flag: str) -> None:
    [found] = evaluation_arguments(flag.split()).notices
    assert found.startswith(f"{flag.split()[0]} has no effect: ")


@pytest.mark.parametrize("language", ["en", "zh"])
def test_the_reference_is_up_to_date(repository: Path, language: str) -> None:
    page = repository / "docs" / language / "evaluation_arguments.md"
    assert page.read_text(encoding="utf-8") == reference_page(language), (
        f"{page} is stale; run python -m mindspeed_llm.tasks.evaluation.reference"
    )


def test_a_typo_is_answered_without_torch(repository: Path) -> None:
    script = "import sys; sys.argv = ['evaluation.py', '--task', 'mmul', '--task-data-path', 'x']\n"
    script += "import runpy\ntry:\n    runpy.run_path('evaluation.py', run_name='__main__')\n"
    script += "finally:\n    print('torch' in sys.modules)"
    start = time.process_time()
    done = subprocess.run([sys.executable, "-c", script], cwd=repository, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "there is no benchmark 'mmul'" in done.stderr and "Did you mean mmlu" in done.stderr
    assert done.stdout.strip() == "False"
    assert time.process_time() - start < 2


if __name__ == "__main__":
    SURFACE.write_text("\n".join(surface()) + "\n", encoding="utf-8")
