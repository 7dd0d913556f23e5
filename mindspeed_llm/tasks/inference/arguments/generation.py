"""What inference.py is asked to do, and how answers are found."""

import argparse

from mindspeed_llm.flag import Group, count, number, one_of, positive, several, switch, value
from mindspeed_llm.tasks.inference.bounds import BATCH_SIZE, LENGTH_PENALTY, REPETITION_PENALTY, TEMPERATURE

TASKS = ("greedy", "do_sample", "beam_search", "beam_search_with_sampling", "chat")

_MAIN = "tasks.inference.main"
_ROWS = "tasks.inference.prompt_rows"
_FILE = "tasks.inference.prompt_file"
_CHAT = "tasks.inference.chat"
_SETTINGS = "tasks.inference.settings"
_ANSWERING = "tasks.inference.answering"
_SERVE = "tasks.inference.serve"


def _share(text: str) -> float:
    """A number above 0, up to 1: 0 would leave no token to draw."""
    found = number(text)
    if not 0 < found <= 1:
        raise argparse.ArgumentTypeError(f"expected a number above 0, up to 1, found {text!r}")
    return found


WHAT = Group(
    title="What to do",
    flags=(
        several(
            "--task",
            one_of(TASKS),
            None,
            f"how to answer, one after the other: {', '.join(TASKS)}; by default all but chat, with --prompt-file "
            "greedy.",
            f"{_MAIN} tasks.inference.arguments.checks",
            metavar="TASK",
        ),
        several("--prompt", str, None, "texts to continue or to answer; by default 'how are you?'.", _MAIN),
        value(
            "--prompt-file",
            str,
            None,
            "a jsonl file of prompts: each line an object with the field prompt (text) or messages (a conversation).",
            _ROWS,
            metavar="FILE",
        ),
        value(
            "--output-file",
            str,
            None,
            "with --prompt-file: the answers in its order, a line for each: prompt, text, token_ids, logprobs, "
            "finish_reason.",
            _FILE,
            metavar="FILE",
        ),
        value("--history-turns", count, 3, "chat: turns that the model is shown besides the question.", _CHAT),
    ),
)

GENERATION = Group(
    title="Answers",
    flags=(
        value("--max-new-tokens", positive, 128, "tokens of an answer, at most.", _SETTINGS),
        value(
            "--max-length",
            positive,
            None,
            "tokens of a prompt and its answer together, at most; without --max-new-tokens it alone limits answers.",
            _SETTINGS,
        ),
        several("--stop", str, (), "texts that end an answer, besides the stop words of the template.", _SETTINGS),
        value(
            "--repetition-penalty",
            REPETITION_PENALTY.read,
            1.0,
            f"above 1: tokens that the text has become less likely; {REPETITION_PENALTY}.",
            _SETTINGS,
        ),
        value(
            "--temperature",
            TEMPERATURE.read,
            0.7,
            f"sampling: logits are divided by it; {TEMPERATURE} ({TEMPERATURE.hint}).",
            _SETTINGS,
        ),
        value("--top-k", count, 50, "sampling: draw one of so many most likely tokens; 0: of all.", _SETTINGS),
        value(
            "--top-p",
            _share,
            0.95,
            "sampling: draw one of the most likely tokens whose probabilities reach this sum; above 0, up to 1.",
            _SETTINGS,
        ),
        value("--num-beams", positive, 2, "beam search: answers that are followed at once.", _ANSWERING),
        value(
            "--length-penalty",
            LENGTH_PENALTY.read,
            1.0,
            "beam search: the sum of an answer's log-probabilities is divided by its length to this power; "
            f"{LENGTH_PENALTY}.",
            _ANSWERING,
        ),
        value(
            "--batch-size",
            BATCH_SIZE.read,
            8,
            f"texts that are worked on at once (--prompt-file, --serve); {BATCH_SIZE}.",
            "tasks.inference.load",
            metavar="N",
        ),
    ),
)

SERVING = Group(
    title="Serving",
    flags=(
        switch(
            "--serve",
            "answer requests of OpenAI's interface: /v1/models, /v1/completions, /v1/chat/completions.",
            _MAIN,
        ),
        value("--host", str, "127.0.0.1", "address to listen on; others than loopback need --api-key.", _SERVE),
        value("--port", count, 8000, "port to listen on; 0: one that is free.", _SERVE),
        value("--api-key", str, None, "key that clients must send.", _SERVE, metavar="KEY"),
    ),
)
