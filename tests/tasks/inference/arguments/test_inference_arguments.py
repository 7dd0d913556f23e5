"""The command lines that ask a model: what they become, what is refused, what is said of flags without effect."""

from __future__ import annotations

import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mindspeed_llm.errors import UserError
from mindspeed_llm.flag import Flag
from mindspeed_llm.tasks.inference.arguments.command import surface_of
from mindspeed_llm.tasks.inference.arguments.inference import INFERENCE, inference_arguments
from tests.training.arguments.test_used import is_read

SURFACE = Path(__file__).with_name("surface.txt")
FLAGS: dict[str, Flag] = {flag.name: flag for group in INFERENCE.own for flag in group.flags}


def surface() -> list[str]:
    """One line for each flag of the command's own; written anew by running this module."""
    rows = [
        f"{flag.name} {flag.parsing.get('metavar', '')}".strip() + f" | {flag.dest} = {flag.default!r}"
        for flag in FLAGS.values()
    ]
    return [*rows, *(f"{name} | no effect" for name in INFERENCE.no_effect)]


def test_flags_values_and_defaults_are_frozen() -> None:
    assert surface() == SURFACE.read_text(encoding="utf-8").splitlines()


@pytest.mark.parametrize("name", FLAGS)
def test_every_flag_is_documented_and_read(name: str) -> None:
    flag = FLAGS[name]
    assert len(flag.doc) > 5 and flag.doc.endswith(".")
    assert [room for room in flag.used_by if not is_read(flag, room)] == []


# Of the mirrored interface, in `facts` of which every one has a place here or in evaluation.py.
MIRRORED = (
    "task top-p top-k temperature max-length max-new-tokens hf-chat-template add-eos-token use-kv-cache history-turns "
    "prompt-type load tokenizer-type tokenizer-name-or-path seed bf16 fp16 num-layers tensor-model-parallel-size"
)


def test_flags_of_the_mirrored_interface_are_taken() -> None:
    surface = surface_of(INFERENCE)
    known = {flag.name for group in surface.groups for flag in group.flags} | surface.no_effect.keys()
    assert [name for name in MIRRORED.split() if f"--{name}" not in known] == []


def test_tasks_in_their_order_chat_last() -> None:
    assert inference_arguments([]).task == ("greedy", "do_sample", "beam_search", "beam_search_with_sampling")
    assert inference_arguments(["--task", "chat", "greedy", "chat"]).task == ("greedy", "chat")
    assert inference_arguments(shlex.split("--prompt-file a.jsonl --output-file b.jsonl")).task == ("greedy",)


@pytest.mark.parametrize(
    ("flags", "dtype"),
    [("", "auto"), ("--bf16", "bf16"), ("--dtype fp16", "fp16"), ("--dtype bf16 --bf16", "bf16")],
)
def test_switches_of_megatron_and_dtype_say_the_same(flags: str, dtype: str) -> None:
    args = inference_arguments(shlex.split(flags))
    assert (args.dtype, args.bf16, args.fp16) == (dtype, dtype == "bf16", dtype == "fp16")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--bf16 --fp16", "--bf16 and --fp16 contradict each other"),
        ("--bf16 --dtype fp32", "--bf16 and --dtype fp32 contradict each other"),
        ("--prompt-type qwen3 --hf-chat-template", "both say in what form"),
        ("--prompt-type qwem3", "--prompt-type: 'qwem3' is not a template; did you mean 'qwen3'"),
        ("--prompt-type qwen3 --prompt-type-path nowhere.json", "templates file nowhere.json: No such file"),
        ("--enable-thinking true", "--enable-thinking true is for a chat template"),
        ("--reasoning-effort high --hf-chat-template", "--reasoning-effort goes with --prompt-type"),
        ("--task greedy_serch", "expected one of greedy, .*; found 'greedy_serch'; did you mean greedy"),
        ("--prompt a --prompt-file b --output-file c", "--prompt and --prompt-file both say"),
        ("--prompt-file b", "--output-file, where answers are written to, is missing"),
        ("--output-file b", "--prompt-file, which is missing"),
        ("--prompt-file a --output-file b --task greedy do_sample", "answered in one way"),
        ("--task chat --prompt hello", "questions are typed"),
        ("--port 80", "--port goes with --serve"),
        ("--serve --prompt a", "--prompt does not go with --serve"),
        ("--serve --prompt-file a", "--prompt-file does not go with --serve"),
        ("--temperature 0", "--temperature: expected a number from 1e-05 to 100000, found '0' .--task greedy takes"),
        ("--temperature -1e-3", "expected a number from 1e-05 to 100000, found '-1e-3' .--task greedy takes"),
        ("--temperature 1e-38", "expected a number from 1e-05 to 100000, found '1e-38' .--task greedy takes"),
        ("--temperature nan", "expected a number from 1e-05 to 100000, found 'nan'"),
        ("--top-p 0", "expected a number above 0, up to 1, found '0'"),
        ("--top-p 1.5", "expected a number above 0, up to 1, found '1.5'"),
        ("--repetition-penalty 1e-39", "expected a number from 0.001 to 1000, found '1e-39'"),
        ("--repetition-penalty -1", "expected a number from 0.001 to 1000, found '-1'"),
        ("--length-penalty -1e7", "expected a number from -1000000 to 1000000, found '-1e7'"),
        ("--seed 99999999999999999999", "--seed: expected a whole number from -9223372036854775808 to 92"),
        (f"--batch-size {10**30}", "--batch-size: expected a whole number from 1 to 65536, found"),
        ("--max-new-tokens -1e3", "expected a whole number of 1 or more, found '-1e3'"),
        ("--bf16 -1e3", "--bf16 takes no value, found '-1e3'"),
        ("--max-new-tokens 0", "expected a whole number of 1 or more"),
        ("--max-eval-samples 3", "--max-eval-samples is not available: evaluation.py takes it"),
        ("--max-tokens 3", "unknown flag --max-tokens; did you mean --max-new-tokens"),
        ("--model-name-or-path x", "did you mean --load"),
        ("--context-parallel-algo ring --mtp-num-layers 1", "--mtp-num-layers is not available"),
    ],
)
def test_contradictions_and_typos(flags: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        inference_arguments(shlex.split(flags))


@pytest.mark.parametrize(
    ("flags", "notice"),
    [
        ("--use-kv-cache", "--use-kv-cache has no effect: keys and values are always kept"),
        ("--task greedy --top-k 3", "--top-k has no effect without --task do_sample"),
        ("--task chat --num-beams 3", "--num-beams has no effect without --task beam_search"),
        ("--history-turns 1", "--history-turns has no effect without --task chat"),
        (
            "--serve --task chat --top-k 3 --batch-size 2",
            "no effect with --serve, where each request says it: --task --top-k",
        ),
        ("--batch-size 2", "--batch-size has no effect without --prompt-file"),
        ("--lr 1e-3 --overlap-grad-reduce", "no effect, as nothing is trained: --overlap-grad-reduce --lr"),
    ],
)
def test_flags_without_effect_are_named(flags: str, notice: str) -> None:
    [found] = inference_arguments(shlex.split(flags)).notices
    assert found.startswith(notice)


@pytest.mark.parametrize("text", ["-1e3", "-1.5E-2", "-2.", "-.5", "-3"])
def test_negative_numbers_in_any_notation_are_values(text: str) -> None:
    args = inference_arguments(["--length-penalty", text, "--num-beams", "3"])
    assert (args.length_penalty, args.num_beams) == (float(text), 3)


def test_flags_of_training_are_at_their_defaults() -> None:
    args = inference_arguments(shlex.split("--use-ascend-coc --reuse-fp32-param --lora-r 4 --num-layers 3"))
    assert (args.use_ascend_coc, args.reuse_fp32_param, args.lora_r, args.num_layers) == (False, False, 4, 3)
    assert args.given == ("lora_r", "num_layers")


def test_a_typo_is_answered_at_once_without_torch(repository: Path) -> None:
    code = (
        "import sys, runpy\nsys.argv = ['inference.py', '--lode', 'x']\n"
        "try: runpy.run_path('inference.py', run_name='__main__')\n"
        "finally: print([name for name in ('torch', 'numpy', 'transformers') if name in sys.modules])"
    )
    start = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], cwd=repository, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr == "error: unknown flag --lode; did you mean --load? --help shows all flags\n"
    assert done.stdout.strip() == "[]"
    assert time.monotonic() - start < 2


if __name__ == "__main__":
    SURFACE.write_text("\n".join(surface()) + "\n", encoding="utf-8")
