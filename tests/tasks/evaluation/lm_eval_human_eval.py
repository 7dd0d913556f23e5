"""HumanEval under lm-eval without what it fetches from a hub to run programs.

lm-eval's task file is taken as it is, with its own filter; in place of the judge that it downloads, programs are run
plainly by Python here, without the sandbox of evaluation.py.
"""

from __future__ import annotations

import ast
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.lm_eval_tasks import json_rows, lm_eval_folder, write_rows, write_task

_SECONDS = 60
# Programs come from a model: no file of theirs gets any content, and their memory has an end.
_START = (
    "import resource, runpy, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0)); "
    "resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30)); runpy.run_path(sys.argv[1], run_name='__main__')"
)


def pass_at_k(references: Sequence[str], predictions: Sequence[Sequence[str]], k: Sequence[int]) -> dict[str, float]:
    """What lm-eval asks of its judge, for one program of each problem.

    Args:
        references: for each problem the tests, and the call that runs them.
        predictions: for each problem its programs.
        k: [1].
    """
    assert list(k) == [1]
    assert all(len(programs) == 1 for programs in predictions)
    passed = [runs(f"{programs[0]}\n{tests}") for programs, tests in zip(predictions, references, strict=True)]
    return {"pass@1": sum(passed) / len(passed)}


def runs(program: str) -> bool:
    """Whether Python runs a program to its end without an error."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "program.py"
        file.write_text(program, encoding="utf-8")
        try:
            ended = subprocess.run(
                [sys.executable, "-I", "-c", _START, file.name],
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                timeout=_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return False
    return ended.returncode == 0


def write(file: Path, folder: Path) -> list[str]:
    """The task local_human_eval over `HumanEval.jsonl`, packed with gzip or not. Returns its name, in a list."""
    files = {"test": write_rows(folder / "human_eval.jsonl", json_rows(file))}
    theirs = lm_eval_folder() / "humaneval"
    base = folder / "human_eval_template"
    base.write_bytes((theirs / "humaneval.yaml").read_bytes())
    # The module of the task file downloads the judge as soon as it is imported: only the filter is taken from it.
    module = (theirs / "utils.py").read_text(encoding="utf-8")
    (chosen,) = (
        ast.get_source_segment(module, node)
        for node in ast.parse(module).body
        if isinstance(node, ast.FunctionDef) and node.name == "build_predictions"
    )
    (folder / "utils.py").write_text(f"from {__name__} import pass_at_k\n\n\n{chosen}\n", encoding="utf-8")
    return [write_task(folder, "local_human_eval", str(base.resolve()), files)]
