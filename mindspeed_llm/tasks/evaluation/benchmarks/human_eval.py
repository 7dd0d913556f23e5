"""HumanEval: functions to be completed, judged by running their tests (openai/human-eval)."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.evaluation.benchmark import Benchmark, Fields, Reading, Subject, Write
from mindspeed_llm.tasks.evaluation.documents import documents_of
from mindspeed_llm.tasks.evaluation.execution.sandbox import Refused, run_program
from mindspeed_llm.tasks.evaluation.files import one_file
from mindspeed_llm.tasks.evaluation.filters import as_it_is
from mindspeed_llm.tasks.evaluation.rows import Row, read_jsonl

NAME = "human_eval"
PLACE = "{prompt}"
INSTRUCTION = (
    "Complete the following Python function. Answer with the whole function in one block of code.\n\n"
    f"```python\n{PLACE}```"
)
"""What a chat model is told where the user gives no text of his own."""

_BLOCK = re.compile(r"```[^\n`]*\n(.*?)(?:```|\Z)", re.DOTALL)


def _fields(row: Row) -> Fields:
    fields = {name: row.text(name) for name in ("task_id", "prompt", "entry_point", "canonical_solution", "test")}
    if f"def {fields['entry_point']}(" not in fields["prompt"]:
        raise row.wrong("entry_point", "the name of a function that field 'prompt' begins")
    if "def check(" not in fields["test"]:
        raise row.wrong("test", "a program with a function check(candidate)")
    return fields


def load(path: Path) -> tuple[Subject, ...]:
    """The problems of `HumanEval.jsonl`, packed with gzip or not.

    Raises:
        UserError: there is no such file, it is damaged, or a row of it is malformed.
    """
    file = one_file(path, ("HumanEval*.jsonl", "HumanEval*.jsonl.gz", "*.jsonl", "*.jsonl.gz"))
    return (Subject(name=NAME, documents=documents_of(read_jsonl(file), file, NAME, _fields)),)


def _target(fields: Fields) -> str:
    return str(fields["canonical_solution"])


def _passes(program: str, fields: Fields) -> bool:
    try:
        return run_program(f"{program}\n{fields['test']}\ncheck({fields['entry_point']})").passed
    except Refused as error:
        # `check_sandbox` has passed at the start.
        raise RuntimeError(f"the sandbox has stopped working: {error}") from error


def _completes(text: str, fields: Fields) -> bool:
    """Whether the text, put behind the prompt, passes the tests."""
    return _passes(f"{fields['prompt']}{text}", fields)


def block_of_code(text: str) -> str:
    """The first fenced block that defines a function, else the first block, else the text itself."""
    blocks = _BLOCK.findall(text)
    return next((block for block in blocks if "def " in block), blocks[0] if blocks else text)


def _answers(code: str, fields: Fields) -> bool:
    """Whether the code passes the tests: the whole function, with what stands above it in the prompt, or its body."""
    prompt = str(fields["prompt"])
    if not _defines(code, str(fields["entry_point"])):
        return _passes(f"{prompt}{code}", fields)
    # The prompt's own imports and helpers; its unfinished function is no part of them.
    above = prompt[: prompt.rindex(f"def {fields['entry_point']}(")]
    return _passes(f"{above}\n{code}", fields)


def _defines(code: str, name: str) -> bool:
    try:
        tree = ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return re.search(rf"^(?:async )?def {re.escape(name)}\(", code, re.MULTILINE) is not None
    return any(isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name for node in tree.body)


def _never(answer: str, target: str) -> bool:
    raise AssertionError("programs are judged by running them")


def _benchmark(prompt: Callable[[Fields], str], answer: Write, **ways: Any) -> Benchmark:
    return Benchmark(
        name=NAME,
        version="2",
        load=load,
        prompt=prompt,
        target=_target,
        answer=answer,
        headline="pass@1",
        has_examples=False,
        with_instruction=instructed,
        executes_code=True,
        **ways,
    )


def instructed(template: str = INSTRUCTION) -> Benchmark:
    """The benchmark for models that follow instructions: they answer with a block of code.

    Args:
        template: a text with `{prompt}` where the problem goes.

    Raises:
        UserError: the text has no such place.
    """
    if PLACE not in template:
        raise UserError(
            f"--instruction-template {template!r} has no {PLACE}, expected a text with {PLACE} where the problem goes"
        )
    return _benchmark(
        lambda fields: template.replace(PLACE, str(fields["prompt"])),
        Write(
            stop=(),
            max_new_tokens=1024,
            readings=(Reading(name="pass@1", extract=block_of_code, matches=_never, judge=_answers),),
        ),
    )


BENCHMARK = _benchmark(
    lambda fields: str(fields["prompt"]),
    Write(
        stop=("\nclass", "\ndef", "\n#", "\nif", "\nprint"),
        max_new_tokens=1024,
        readings=(Reading(name="pass@1", extract=as_it_is, matches=_never, judge=_completes),),
    ),
    variants={"alternative-prompt": instructed()},
    continues_text=True,
)
