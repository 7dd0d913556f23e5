"""The command line of inference.py."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence

from mindspeed_llm.tasks.inference.arguments.checks import check_inference
from mindspeed_llm.tasks.inference.arguments.command import Command, parse
from mindspeed_llm.tasks.inference.arguments.generation import GENERATION, SERVING, WHAT

_EVALUATION = (
    "task-data-path evaluation-batch-size max-eval-samples no-chat-template chain-of-thought alternative-prompt "
    "eval-language instruction-template origin-postprocess greedy broadcast compare allow-code-execution num-fewshot"
)

INFERENCE = Command(
    program="inference.py",
    description="Ask a model: texts on the command line, a file of prompts, a conversation, or requests of clients.",
    groups=(WHAT, GENERATION, SERVING),
    refused={f"--{name}": "evaluation.py takes it" for name in _EVALUATION.split()},
    no_effect={
        "--use-kv-cache": "keys and values are always kept",
        "--add-eos-token": "the tokenizer's files say what stands around a prompt",
    },
)


def inference_arguments(argv: Sequence[str]) -> Namespace:
    """The arguments of inference.py, checked as far as they are about each other.

    Raises:
        UserError: see `arguments.command.parse`; flags that contradict each other.
        SystemExit: `--help`.
    """
    args = parse(argv, INFERENCE)
    check_inference(args)
    return args
