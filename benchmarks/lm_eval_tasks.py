"""lm-eval's own tasks over files in the benchmarks' original layout: task files that include lm-eval's and name data.

lm-eval reads data sets from a hub; nothing of that is needed here. Prompts, filters and metrics stay lm-eval's, except
that examples are always the first of their file instead of drawn at random, and that prompts of AGIEval, which lm-eval
has in its copies of the data, are put together from the original files.
"""

from __future__ import annotations

import csv
import gzip
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


def write_mmlu(data: Path, folder: Path, *, kind: str = "default") -> list[str]:
    """Tasks over `test/*_test.csv` and `dev/*_dev.csv` of a folder, one for each subject.

    Args:
        data: the folder with both.
        folder: where the task files go.
        kind: "default", the most likely letter, or "generative", the written one.

    Returns:
        Their names, local_mmlu_<subject>, in the order of the files.
    """
    names = []
    for file in sorted((data / "test").glob("*_test.csv")):
        subject = file.name.removesuffix("_test.csv")
        files = {
            split: write_rows(folder / f"mmlu_{subject}_{split}.jsonl", _mmlu_rows(path))
            for split, path in (("test", file), ("dev", data / "dev" / f"{subject}_dev.csv"))
        }
        names.append(write_task(folder, f"local_mmlu_{subject}", f"mmlu/{kind}/mmlu_{subject}.yaml", files))
    return names


def _mmlu_rows(file: Path) -> Iterable[dict[str, Any]]:
    with file.open(encoding="utf-8", newline="") as stream:
        for question, *choices, answer in csv.reader(stream):
            yield {"question": question, "choices": choices, "answer": LETTERS.index(answer)}


def write_gsm8k(test: Path, train: Path, folder: Path) -> list[str]:
    """The task local_gsm8k over two files of questions with worked answers. Returns its name, in a list."""
    files = {"test": str(test.resolve()), "train": str(train.resolve())}
    return [write_task(folder, "local_gsm8k", "gsm8k/gsm8k.yaml", files, fewshot_config={"sampler": "first_n"})]


def write_bbh(data: Path, folder: Path) -> list[str]:
    """Tasks over `<subtask>.json` of a folder, one for each; examples are those of lm-eval's task files. Returns their
    names, local_bbh_<subtask>.
    """
    names = []
    for file in sorted(data.glob("*.json")):
        rows = json.loads(file.read_text(encoding="utf-8"))["examples"]
        files = {"test": write_rows(folder / f"bbh_{file.stem}.jsonl", rows)}
        names.append(write_task(folder, f"local_bbh_{file.stem}", f"bbh/fewshot/{file.stem}.yaml", files))
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


def write_choices(benchmark: str, test: Path, folder: Path) -> list[str]:
    """Tasks of C-Eval or CMMLU over the CSV files of a folder and those of `../dev`, one for each subject.

    Args:
        benchmark: "ceval" or "cmmlu".
        test: the folder with the questions: `<subject>_val.csv` or `<subject>.csv`.
        folder: where the task files go.

    Returns:
        Their names, local_<benchmark>_<subject>, in the order of the files.
    """
    suffix, dev_suffix, name = {
        "ceval": ("_val", "_dev", "ceval/ceval-valid_{}.yaml"),
        "cmmlu": ("", "", "cmmlu/cmmlu_{}.yaml"),
    }[benchmark]
    names = []
    for file in sorted(test.glob(f"*{suffix}.csv")):
        subject = file.stem.removesuffix(suffix)
        files = {
            split: write_rows(folder / f"{benchmark}_{subject}_{split}.jsonl", _rows_with_header(path))
            for split, path in (
                ("val" if benchmark == "ceval" else "test", file),
                ("dev", test.parent / "dev" / f"{subject}{dev_suffix}.csv"),
            )
        }
        names.append(write_task(folder, f"local_{benchmark}_{subject}", name.format(subject), files))
    return names


def _rows_with_header(file: Path) -> Iterable[dict[str, Any]]:
    with file.open(encoding="utf-8", newline="") as stream:
        for row in csv.DictReader(stream):
            # The number of a row stands under a name of its own, or under none.
            yield {name: value for name, value in row.items() if name}


def write_hellaswag(file: Path, folder: Path) -> list[str]:
    """The task local_hellaswag over `hellaswag_val.jsonl`. Returns its name, in a list."""
    # Copies of the data have the label as a number or as a text, and a column has one type.
    rows = ({**row, "label": int(row["label"])} for row in json_rows(file))
    files = {"validation": write_rows(folder / "hellaswag_val.jsonl", rows)}
    return [write_task(folder, "local_hellaswag", "hellaswag/hellaswag.yaml", files, training_split=None)]


def write_boolq(file: Path, folder: Path) -> list[str]:
    """The task local_boolq over `dev.jsonl`, whose answers are true or false. Returns its name, in a list."""
    rows = (
        {"passage": row["passage"], "question": row["question"], "label": int(row["answer"])} for row in json_rows(file)
    )
    files = {"validation": write_rows(folder / "boolq_dev.jsonl", rows)}
    return [write_task(folder, "local_boolq", "super_glue/boolq/default.yaml", files, training_split=None)]


_AGIEVAL_WRITTEN = {
    "math": "{{passage or ''}}Q: {{question}}\nA: The answer is",
    "gaokao-mathcloze": "{{passage or ''}}问题：{{question}}\n答案：",
}
_AGIEVAL_ENGLISH = (
    "{{passage or ''}}Q: {{question}} Answer Choices: {{choices | join(' ')}}\n"
    "A: Among A through {{'ABCDEFG'[choices | length - 1]}}, the answer is"
)
_AGIEVAL_CHINESE = (
    "{{passage or ''}}问题：{{question}} 选项：{{choices | join(' ')}}\n"
    "答案：从A到{{'ABCDEFG'[choices | length - 1]}}, 我们应选择"
)
_AGIEVAL_IN_CHINESE = ("gaokao", "jec", "logiqa-zh")


def write_agieval(data: Path, folder: Path) -> list[str]:
    """Tasks over `<subject>.jsonl` of a folder, one for each.

    lm-eval's copies of the data hold whole prompts; the original files hold their parts, which are put together here by
    templates, in the wording of the benchmark's own zero-shot setting. How a question is answered and what counts as
    right stay lm-eval's.

    Returns:
        Their names, local_agieval_<subject>, in the order of the files.
    """
    names = []
    for file in sorted(data.glob("*.jsonl")):
        subject = file.stem
        is_written = subject in _AGIEVAL_WRITTEN
        prompt = _AGIEVAL_WRITTEN.get(
            subject,
            _AGIEVAL_ENGLISH
            if subject == "gaokao-english" or not subject.startswith(_AGIEVAL_IN_CHINESE)
            else _AGIEVAL_CHINESE,
        )
        rows = (
            {
                "passage": row["passage"],
                "question": row["question"],
                **(
                    {"answer": row["answer"]}
                    if is_written
                    else {"choices": row["options"], "gold": ["ABCDEFG".index(letter) for letter in row["label"]]}
                ),
            }
            for row in json_rows(file)
        )
        files = {"test": write_rows(folder / f"agieval_{subject}.jsonl", rows)}
        names.append(
            write_task(folder, f"local_agieval_{subject}", f"agieval/{subject}.yaml", files, doc_to_text=prompt)
        )
    return names


def json_rows(file: Path) -> Iterable[dict[str, Any]]:
    """The objects of a file with one a line, packed with gzip or not."""
    content = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
    return (json.loads(line) for line in content.decode().split("\n") if line.strip())


def describe_in_questions(folder: Path, names: Iterable[str]) -> None:
    """Put what the prompts of these tasks begin with into the question itself, where they show no examples.

    With a chat template lm-eval makes a message of the system of it otherwise.
    """
    from lm_eval.tasks._yaml_loader import load_yaml

    for name in names:
        path = folder / f"{name}.yaml"
        whole = load_yaml(path, resolve_func=False)
        changed = {"description": "", "doc_to_text": whole.get("description", "") + whole["doc_to_text"]}
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
        path.write_text(yaml.safe_dump({**content, **changed}), encoding="utf-8")


def write_rows(path: Path, rows: Iterable[dict[str, Any]]) -> str:
    """A file of rows for lm-eval; its whole path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path.resolve())


def write_task(folder: Path, name: str, included: str, files: dict[str, str], **changes: Any) -> str:
    """A task file for lm-eval in `folder`.

    Args:
        name: of the task.
        included: the task file that it changes, as seen from lm-eval's folder of tasks, or a whole path.
        files: split -> file of rows.
        changes: fields of the task that become others.

    Returns:
        The name.
    """
    content = {
        "include": str(lm_eval_folder() / included),
        "task": name,
        "dataset_path": "json",
        "dataset_name": None,
        "dataset_kwargs": {"data_files": files, "cache_dir": str((folder / "cache").resolve())},
        "tag": None,
        **changes,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.yaml").write_text(yaml.safe_dump(content), encoding="utf-8")
    return name
