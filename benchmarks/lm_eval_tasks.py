"""lm-eval's own tasks over files in the benchmarks' original layout: task files that include lm-eval's and name data.

lm-eval reads data sets from a hub; nothing of that is needed here. Prompts, filters and metrics stay lm-eval's, except
that examples are always the first of their file instead of drawn at random.
"""

from __future__ import annotations

import csv
import importlib.util
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

LETTERS = "ABCD"


def lm_eval_folder() -> Path:
    """Where the installed lm-eval has its task files. Raises ImportError where it is not installed."""
    spec = importlib.util.find_spec("lm_eval")
    if spec is None or not spec.submodule_search_locations:
        raise ImportError("lm-eval is not installed (extra: eval)")
    return Path(spec.submodule_search_locations[0]) / "tasks"


def write_mmlu(data: Path, folder: Path) -> list[str]:
    """Tasks over `test/*_test.csv` and `dev/*_dev.csv` of a folder, one for each subject.

    Returns:
        Their names, local_mmlu_<subject>, in the order of the files.
    """
    names = []
    for file in sorted((data / "test").glob("*_test.csv")):
        subject = file.name.removesuffix("_test.csv")
        files = {
            split: _write_rows(folder / f"mmlu_{subject}_{split}.jsonl", _mmlu_rows(path))
            for split, path in (("test", file), ("dev", data / "dev" / f"{subject}_dev.csv"))
        }
        names.append(_write_task(folder, f"local_mmlu_{subject}", f"mmlu/default/mmlu_{subject}.yaml", files))
    return names


def _mmlu_rows(file: Path) -> Iterable[dict[str, Any]]:
    with file.open(encoding="utf-8", newline="") as stream:
        for question, *choices, answer in csv.reader(stream):
            yield {"question": question, "choices": choices, "answer": LETTERS.index(answer)}


def write_gsm8k(test: Path, train: Path, folder: Path) -> list[str]:
    """The task local_gsm8k over two files of questions with worked answers. Returns its name, in a list."""
    files = {"test": str(test.resolve()), "train": str(train.resolve())}
    return [_write_task(folder, "local_gsm8k", "gsm8k/gsm8k.yaml", files, fewshot_config={"sampler": "first_n"})]


def write_bbh(data: Path, folder: Path) -> list[str]:
    """Tasks over `<subtask>.json` of a folder, one for each; examples are those of lm-eval's task files. Returns their
    names, local_bbh_<subtask>.
    """
    names = []
    for file in sorted(data.glob("*.json")):
        rows = json.loads(file.read_text(encoding="utf-8"))["examples"]
        files = {"test": _write_rows(folder / f"bbh_{file.stem}.jsonl", rows)}
        names.append(_write_task(folder, f"local_bbh_{file.stem}", f"bbh/fewshot/{file.stem}.yaml", files))
    return names


def write_bbh_prompts(folder: Path, subtask: str) -> Path:
    """`<subtask>.txt` as the benchmark's own folder of prompts has it: description and examples of lm-eval's task."""
    task = yaml.safe_load((lm_eval_folder() / f"bbh/fewshot/{subtask}.yaml").read_text(encoding="utf-8"))
    worked = "\n\n".join(
        f"Q: {sample['input']}\nA: Let's think step by step.\nSo the answer is {sample['target']}."
        for sample in task["fewshot_config"]["samples"]
    )
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{subtask}.txt"
    path.write_text(f"Task description\n-----\n{task['description']}{worked}", encoding="utf-8")
    return path


def _write_rows(path: Path, rows: Iterable[dict[str, Any]]) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path.resolve())


def _write_task(folder: Path, name: str, included: str, files: dict[str, str], **changes: Any) -> str:
    content = {
        "include": str(lm_eval_folder() / included),
        "task": name,
        "dataset_path": "json",
        "dataset_name": None,
        "dataset_kwargs": {"data_files": files, "cache_dir": str((folder / "cache").resolve())},
        "tag": None,
        **changes,
    }
    (folder / f"{name}.yaml").write_text(yaml.safe_dump(content), encoding="utf-8")
    return name
