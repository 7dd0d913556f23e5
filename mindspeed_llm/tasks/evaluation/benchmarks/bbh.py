"""BIG-Bench Hard: 27 subtasks with short written answers (suzgunmirac/BIG-Bench-Hard)."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.evaluation.benchmark import Benchmark, Document, Fields, Reading, Subject, Write
from mindspeed_llm.tasks.evaluation.files import files_by_subject
from mindspeed_llm.tasks.evaluation.filters import FIRST_LINE, as_it_is, exact_match, regex
from mindspeed_llm.tasks.evaluation.rows import read_json_list, read_text

_PROMPTS_FOLDER = "cot-prompts"
_RULE = re.compile(r"^-{3,}\s*$", re.MULTILINE)  # parts a notice from the prompt
_QUESTION = re.compile(r"^Q: ", re.MULTILINE)
_CUE = "Let's think step by step."
_WORKED = re.compile(
    rf"(?P<input>.*?)\n\s*A:\s*(?:{re.escape(_CUE)}\s*)?(?P<worked>.*\banswer is (?P<target>.*?)\.?)\s*", re.DOTALL
)


def _documents(file: Path, subject: str) -> tuple[Document, ...]:
    found: list[Document] = []
    for row in read_json_list(file, "examples"):
        fields = {"input": row.text("input"), "target": row.text("target")}
        found.append(Document(subject=subject, index=len(found), place=row.place, fields=fields))
    if not found:
        raise UserError(
            f"{file}: field 'examples' is empty. Take the file from the benchmark's own distribution again."
        )
    return tuple(found)


def _shots(file: Path, subject: str) -> tuple[str, tuple[Document, ...]]:
    """The description and the examples of a prompt file: `input`, the `worked` answer and its result as `target`."""
    content = _RULE.split(read_text(file), maxsplit=1)[-1]
    description, *questions = _QUESTION.split(content)
    shots = []
    for number, question in enumerate(questions):
        place = f"{file}, question {number}"
        match = _WORKED.fullmatch(question)
        if match is None:
            raise UserError(
                f'{place}: no line "A: ... the answer is <answer>." follows it. '
                "Mend the file, or take it from the benchmark's own distribution again."
            )
        shots.append(Document(subject=subject, index=number, place=place, fields=match.groupdict()))
    return f"{description.strip()}\n\n", tuple(shots)


def _prompt_file(file: Path, subject: str) -> Path | None:
    folder = file.absolute().parent
    places = (folder / _PROMPTS_FOLDER, folder.parent / _PROMPTS_FOLDER)
    return next((place / f"{subject}.txt" for place in places if (place / f"{subject}.txt").is_file()), None)


def load(path: Path) -> tuple[Subject, ...]:
    """The subtasks `<subtask>.json` of a folder.

    Description and examples come from `cot-prompts/<subtask>.txt` in the folder or beside it. Without that, the
    prompt has no description and its examples are the first of the subtask itself, without the one that is asked.

    Raises:
        UserError: there are no such files, or one is malformed.
    """
    subjects = []
    for name, file in files_by_subject(path, ".json").items():
        documents = _documents(file, name)
        prompt_file = _prompt_file(file, name)
        description, shots = _shots(prompt_file, name) if prompt_file else ("", documents)
        subjects.append(
            Subject(
                name=name,
                documents=documents,
                shots=shots,
                shots_are_documents=prompt_file is None,
                description=description,
            )
        )
    return tuple(subjects)


def load_worked(path: Path) -> tuple[Subject, ...]:
    """As `load`, with the worked examples of the prompt files, which have to be there.

    Raises:
        UserError: a file is missing or malformed.
    """
    subjects = load(path)
    for subject in subjects:
        if subject.shots_are_documents:
            raise UserError(
                f"--chain-of-thought: there is no {_PROMPTS_FOLDER}/{subject.name}.txt in {path} or beside it, which "
                "holds the worked examples. Put the folder of the benchmark's own distribution there."
            )
    return subjects


def _prompt(fields: Fields) -> str:
    return f"Q: {fields['input']}\nA:"


def _target(fields: Fields) -> str:
    return str(fields["target"])


_STOP = ("</s>", "Q", "\n\n")
_PLAIN = Benchmark(
    name="bbh",
    version="1",
    load=load,
    prompt=_prompt,
    target=_target,
    answer=Write(
        stop=_STOP,
        max_new_tokens=256,
        readings=(
            # Ours: a blank before the answer is how most tokenizers begin a word, not a mistake.
            Reading(name="first-line", extract=FIRST_LINE, matches=exact_match(ignore_case=True)),
            # lm-eval's: the whole text, blanks included.
            Reading(name="none", extract=as_it_is, matches=exact_match()),
        ),
    ),
    headline="first-line",
    original_metric="none",
    num_fewshot=3,
    language="en",
)
_CHAIN_OF_THOUGHT = replace(
    _PLAIN,
    load=load_worked,
    prompt=lambda fields: f"{_prompt(fields)} {_CUE}\n",
    shown=lambda fields: str(fields["worked"]),
    delimiter="",
    answer=Write(
        stop=_STOP,
        max_new_tokens=1024,
        readings=(
            # Ours: with or without a full stop at its end, the last one where several are given.
            Reading(
                name="answer",
                extract=regex(r".*\banswer is:? *(.*?)[.\s]*(?:\n|$)", take=-1),
                matches=exact_match(ignore_case=True),
            ),
            # lm-eval's: the first, without its last character.
            Reading(name="get-answer", extract=regex(r"(?<=the answer is )(.*)(?=.)"), matches=exact_match()),
        ),
    ),
    headline="answer",
    original_metric="get-answer",
)
BENCHMARK = replace(_PLAIN, variants={"chain-of-thought": _CHAIN_OF_THOUGHT})
