"""The command line of evaluation.py."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence

from mindspeed_llm.flag import Group, count, positive, several, switch, value
from mindspeed_llm.tasks.inference.arguments.checks import check_prompts
from mindspeed_llm.tasks.inference.arguments.command import Command, parse

_MAIN = "tasks.evaluation.main"
_CHOOSING = "tasks.evaluation.choosing"

EVALUATION = Group(
    title="Benchmarks",
    flags=(
        several(
            "--task",
            str,
            None,
            "benchmarks to run: agieval, bbh, boolq, ceval, cmmlu, gsm8k, hellaswag, human_eval, mmlu, mmlu_ppl, "
            "needlebench.",
            _CHOOSING,
            metavar="NAME",
        ),
        several(
            "--task-data-path",
            str,
            None,
            "file or folder of each benchmark's data, in the order of --task: one path for each.",
            _CHOOSING,
            metavar="PATH",
        ),
        value(
            "--evaluation-batch-size",
            positive,
            8,
            "texts that are worked on at once; without the flag, likelihoods are computed of as many as are useful.",
            _MAIN,
        ),
        value(
            "--max-eval-samples",
            positive,
            None,
            "samples of each subject, at most, from its first; by default all.",
            _MAIN,
        ),
        value(
            "--num-fewshot",
            count,
            None,
            "solved examples in front of each question, from the benchmark's own files; by default as many as the "
            "benchmark is usually asked with.",
            _CHOOSING,
        ),
        switch(
            "--no-chat-template",
            "ask in plain text although --prompt-type or --hf-chat-template is given.",
            _MAIN,
        ),
        switch(
            "--chain-of-thought",
            "examples that reason step by step, and answers that do so too (bbh, gsm8k).",
            _CHOOSING,
        ),
        switch(
            "--alternative-prompt",
            "ask as one asks models that follow instructions, and read the answer out of what they write (agieval, "
            "boolq, ceval, cmmlu, human_eval, mmlu).",
            _CHOOSING,
        ),
        switch(
            "--origin-postprocess",
            "the headline is what the benchmark's first scorer counts (bbh, gsm8k, hellaswag, mmlu); all readings are "
            "reported in any case.",
            _CHOOSING,
        ),
        value(
            "--eval-language",
            str,
            None,
            "language of the words around the questions (ceval, cmmlu, mmlu, mmlu_ppl); by default the benchmark's "
            "own.",
            _CHOOSING,
            choices=("en", "zh"),
        ),
        value(
            "--instruction-template",
            str,
            None,
            "text around each problem, with {prompt} where it stands (human_eval).",
            _CHOOSING,
            metavar="TEXT",
        ),
        value(
            "--max-new-tokens", positive, None, "tokens of an answer, at most; by default each benchmark's.", _CHOOSING
        ),
        switch("--allow-code-execution", "run the programs that the model writes (human_eval).", _CHOOSING),
        value(
            "--output-dir",
            str,
            None,
            "folder for results.json, samples.jsonl and report.html; by default one below ./output/evaluation, named "
            "after the tasks and a hash of what decides the results.",
            _MAIN,
            metavar="DIR",
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
        "--add-eos-token": "the tokenizer's files say what stands around a prompt",
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
