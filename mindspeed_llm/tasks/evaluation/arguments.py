"""The command line of evaluation.py."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence

from mindspeed_llm.flag import Group, count, positive, several, switch, value
from mindspeed_llm.tasks.inference.arguments.checks import check_prompts
from mindspeed_llm.tasks.inference.arguments.command import Command, parse

_MAIN = "tasks.evaluation"

EVALUATION = Group(
    title="Benchmarks",
    flags=(
        several("--task", str, None, "benchmarks to run.", _MAIN, metavar="NAME"),
        several(
            "--task-data-path",
            str,
            None,
            "file or folder of each benchmark's data, in the order of --task.",
            _MAIN,
            metavar="PATH",
        ),
        value("--evaluation-batch-size", positive, 1, "samples that are worked on at once.", _MAIN),
        value("--max-eval-samples", positive, None, "samples of each subject, at most; by default all.", _MAIN),
        value("--num-fewshot", count, None, "solved examples in front of each question.", _MAIN),
        switch("--no-chat-template", "ask in plain text, whatever template the tokenizer brings.", _MAIN),
        switch("--chain-of-thought", "let the model reason before it answers.", _MAIN),
        switch("--alternative-prompt", "the benchmark's other prompt.", _MAIN),
        switch("--origin-postprocess", "read answers as the benchmark's first scorer did.", _MAIN),
        value("--eval-language", str, "en", "needlebench: language.", _MAIN, choices=("en", "zh")),
        value(
            "--instruction-template",
            str,
            None,
            "human_eval: text around each problem, with {prompt} where it stands.",
            _MAIN,
            metavar="TEXT",
        ),
        value("--max-new-tokens", positive, None, "tokens of an answer, at most; by default each benchmark's.", _MAIN),
        switch("--allow-code-execution", "human_eval: run the code that the model writes.", _MAIN),
        value(
            "--output-dir", str, None, "folder for results.json, samples.jsonl and report.html.", _MAIN, metavar="DIR"
        ),
        value("--compare", str, None, "results.json of an earlier run to compare with.", _MAIN, metavar="FILE"),
    ),
)

_INFERENCE = (
    "prompt prompt-file output-file serve host port api-key stop num-beams length-penalty batch-size "
    "repetition-penalty max-length"
)
_GREEDY = "the most probable tokens are taken"

COMMAND = Command(
    program="evaluation.py",
    description="Score a model on benchmarks.",
    groups=(EVALUATION,),
    refused={f"--{name}": "inference.py takes it" for name in _INFERENCE.split()},
    no_effect={
        "--use-kv-cache": "keys and values are always kept",
        "--add-eos-token": "prompts end where the model goes on",
        "--greedy": f"{_GREEDY} in any case",
        "--broadcast": "ranks that share a copy of the model work on the same samples in any case",
    },
    no_effect_values={
        "--top-k": _GREEDY,
        "--top-p": _GREEDY,
        "--temperature": _GREEDY,
        "--history-turns": "each sample is a conversation of its own",
    },
)


def evaluation_arguments(argv: Sequence[str]) -> Namespace:
    """The arguments of evaluation.py, checked as far as they are about each other.

    Raises:
        UserError: see `tasks.inference.arguments.command.parse`; flags that contradict each other.
        SystemExit: `--help`.
    """
    args = parse(argv, COMMAND)
    check_prompts(args)
    return args
