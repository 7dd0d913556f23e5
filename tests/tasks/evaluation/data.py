"""A few questions of our own for every benchmark, in its original layout of files."""

from __future__ import annotations

import csv
import json
import random
from collections.abc import Iterable, Sequence
from pathlib import Path

LETTERS = "ABCD"


def _jsonl(path: Path, rows: Iterable[dict]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


def _csv(path: Path, rows: Iterable[Sequence[object]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as stream:
        csv.writer(stream).writerows(rows)


def _sum(number: int) -> list[str]:
    """Question, four options, letter of the right one, which moves through the letters."""
    options = [str(number + step) for step in (3, 1, 4, 2)]
    options[number % 4] = str(2 * number)
    return [f"What is {number} + {number}?", *options, LETTERS[number % 4]]


def write_mmlu(folder: Path, *, subjects: Sequence[str] = ("anatomy", "virology"), count: int = 8) -> Path:
    """The folder to name: `count` questions (a multiple of four) of each subject, five examples beside them."""
    for subject in subjects:
        _csv(folder / "test" / f"{subject}_test.csv", map(_sum, range(8, 8 + count)))
        _csv(folder / "dev" / f"{subject}_dev.csv", map(_sum, range(1, 6)))
    return folder / "test"


def _write_chinese(folder: Path, suffixes: tuple[str, str], names: tuple[str, str], header: Sequence[str]) -> Path:
    for name, suffix, numbers in (
        ("test", suffixes[0], range(8, 16)),
        ("dev", suffixes[1], range(1, 6)),
    ):
        rows = [[place, *_sum(number)] for place, number in enumerate(numbers)]
        for subject in names:
            _csv(folder / name / f"{subject}{suffix}", [header, *rows])
    return folder / "test"


def write_all(folder: Path) -> dict[str, Path]:
    """Task -> the path to name. Of questions with options the right one is each of them equally often."""
    paths = {"mmlu": write_mmlu(folder / "mmlu")}
    paths["mmlu_ppl"] = paths["mmlu"]
    paths["ceval"] = _write_chinese(
        folder / "ceval",
        ("_val.csv", "_dev.csv"),
        ("accountant", "art_studies"),
        ["id", "question", *LETTERS, "answer"],
    )
    paths["cmmlu"] = _write_chinese(
        folder / "cmmlu", (".csv", ".csv"), ("agronomy", "anatomy"), ["", "Question", *LETTERS, "Answer"]
    )
    problems = [
        {
            "question": f"A basket holds {number} pears. How many do two hold?",
            "answer": f"Two hold 2 * {number} = <<2*{number}={2 * number}>>{2 * number}.\n#### {2 * number}",
        }
        for number in range(3, 19)
    ]
    _jsonl(folder / "gsm8k" / "test.jsonl", problems[:8])
    paths["gsm8k"] = _jsonl(folder / "gsm8k" / "train.jsonl", problems[8:]).parent
    paths["boolq"] = _jsonl(
        folder / "boolq" / "dev.jsonl",
        (
            {"passage": f"{n} follows {n - 1}.", "question": f"is {n} even", "title": "N", "answer": n % 2 == 0}
            for n in range(1, 9)
        ),
    ).parent
    endings = ["eats it.", "mixes flour and water.", "sings.", "leaves."]
    paths["hellaswag"] = _jsonl(
        folder / "hellaswag" / "hellaswag_val.jsonl",
        (
            {
                "activity_label": "Baking bread",
                "ctx_a": f"Take {n} loaves.",
                "ctx_b": "the baker",
                "endings": endings,
                "label": n % 4,
            }
            for n in range(8)
        ),
    ).parent
    paths["bbh"] = folder / "bbh" / "bbh"
    paths["bbh"].mkdir(parents=True)
    (folder / "bbh" / "cot-prompts").mkdir()
    examples = [{"input": "not " * n + "True is", "target": str(n % 2 == 0)} for n in range(9)]
    worked = [
        f"Q: {one['input']}\nA: Let's think step by step.\nEach not turns it.\nSo the answer is {one['target']}."
        for one in examples[6:]
    ]
    (paths["bbh"] / "boolean_expressions.json").write_text(json.dumps({"examples": examples[:6]}))
    (folder / "bbh" / "cot-prompts" / "boolean_expressions.txt").write_text(
        "Notice.\n-----\nFind what is true.\n\n" + "\n\n".join(worked)
    )
    questions = [
        {
            "passage": None,
            "question": f"{n} + {n} = ?",
            "options": [f"({letter}){n * (place + 1)}" for place, letter in enumerate(LETTERS)],
            "label": LETTERS[n % 4],
            "answer": None,
        }
        for n in range(4, 12)
    ]
    _jsonl(folder / "agieval" / "sat-math.jsonl", questions)
    cloze = {"passage": None, "question": "$7-10=$", "options": None, "label": None, "answer": "-3"}
    paths["agieval"] = _jsonl(folder / "agieval" / "gaokao-mathcloze.jsonl", [cloze]).parent
    program = {
        "task_id": "Own/0",
        "prompt": 'def double(x: float) -> float:\n    """Twice x."""\n',
        "entry_point": "double",
        "canonical_solution": "    return x + x\n",
        "test": "def check(candidate):\n    assert candidate(2) == 4\n",
    }
    paths["human_eval"] = _jsonl(folder / "human_eval" / "HumanEval.jsonl", [program]).parent
    paths["needlebench"] = folder / "needlebench"
    needles = [
        {
            "language": language,
            "needle": "The red key lies in Room 17.",
            "retrieval_question": "Where does the red key lie? Please answer in the format 'It lies in ____'.",
            "gold_standard_answer": "It lies in Room 17.",
            "arg1": "red",
            "arg2": "Room 17",
        }
        for language in ("English", "Chinese")
    ]
    words = [f"word{number}" for number in range(97)]
    texts = [{"text": " ".join(random.Random(seed).choices(words, k=150))} for seed in range(4)]
    for name, rows in (("needles", needles), ("PaulGrahamEssays", texts), ("zh_finance", texts)):
        _jsonl(paths["needlebench"] / f"{name}.jsonl", rows)
    return paths
