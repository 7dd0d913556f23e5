"""The evaluation that --compare names: read and matched with this one before a model is loaded."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.evaluation.results import RESULTS, SAMPLES, read_results

_SETTINGS = {
    "version": "version of the task",
    "variant": "way of asking",
    "language": "language of prompts",
    "num_fewshot": "--num-fewshot",
    "max_eval_samples": "--max-eval-samples",
    "max_new_tokens": "--max-new-tokens",
    "instruction_template": "--instruction-template",
}
_SHOWN = 40


def read_earlier(compare: str, tasks: Sequence[str]) -> dict[str, Any]:
    """What the results.json holds, and under `samples_path` where its samples are, if there are any.

    Args:
        compare: the value of --compare, a results.json or its folder.
        tasks: the benchmarks that are asked now.

    Raises:
        UserError: it is not there, is something else, has none of `tasks`, or a field of it is not what it should be.
    """
    from mindspeed_llm.tasks.evaluation.report.comparison import read_samples

    path = Path(compare)
    try:
        content = read_results(path)
        _check_fields(content, path / RESULTS if path.is_dir() else path)
    except UserError as error:
        raise UserError(f"--compare: {error}") from None
    if not set(tasks) & set(content["results"]):
        raise UserError(
            f"--compare {path} has no task in common with this evaluation: it holds "
            f"{', '.join(content['results']) or 'none'}, --task names {', '.join(tasks)}; "
            f"name the {RESULTS} of an evaluation of the same tasks"
        )
    samples = (path if path.is_dir() else path.parent) / SAMPLES
    if not samples.is_file():
        return content
    # Once through, so that damaged samples are not met after hours of evaluation.
    for _ in read_samples(samples):
        continue
    return {**content, "samples_path": str(samples)}


def differences(earlier: Mapping[str, Any], now: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """A line for each task that was not asked the same in both.

    Args:
        earlier: of `read_earlier`.
        now: what results.json will say of each task; a `prompts_hash` that is empty is not known yet.
    """
    for task, facts in now.items():
        then = earlier["tasks"].get(task)
        if task not in earlier["results"] or not isinstance(then, dict):
            continue
        found = [
            f"{said} {_short(then.get(name))} there, {_short(facts.get(name))} here"
            for name, said in _SETTINGS.items()
            if then.get(name) != facts.get(name)
        ]
        if then.get("data_hash") != facts.get("data_hash"):
            found.append("other data")
        if not found and facts["prompts_hash"] and then.get("prompts_hash") != facts["prompts_hash"]:
            found.append("other prompts")
        if found:
            yield f"--compare: {task} was not asked the same: {'; '.join(found)}"


def _check_fields(content: Mapping[str, Any], file: Path) -> None:
    """Check all that a comparison uses, so that nothing of it is met after hours of evaluation."""
    for task, result in content["results"].items():
        found = [(f"results.{task}", result)]
        for part in ("metrics", "subjects"):
            scores = result.get(part, {})
            if not isinstance(scores, dict):
                raise _wrong(file, f"results.{task}.{part}", scores, "an object")
            found += [(f"results.{task}.{part}.{name}", score) for name, score in scores.items()]
        if not isinstance(result["metric"], str):
            raise _wrong(file, f"results.{task}.metric", result["metric"], "the name of a metric")
        for name, score in found:
            _check_score(file, name, score)
    for task, facts in content["tasks"].items():
        if not isinstance(facts, dict):
            raise _wrong(file, f"tasks.{task}", facts, "an object")


def _check_score(file: Path, name: str, score: Any) -> None:
    if not isinstance(score, dict):
        raise _wrong(file, name, score, "an object")
    total, correct, accuracy, stderr = (score.get(field) for field in ("total", "correct", "accuracy", "stderr"))
    # A bool is an int to Python.
    if type(total) is not int or total < 1:
        raise _wrong(file, f"{name}.total", total, "a whole number above 0")
    if type(correct) is not int or not 0 <= correct <= total:
        raise _wrong(file, f"{name}.correct", correct, f"a whole number from 0 to {total}")
    if type(accuracy) not in (int, float) or not 0 <= accuracy <= 1:
        raise _wrong(file, f"{name}.accuracy", accuracy, "a number from 0 to 1")
    if stderr is not None and (type(stderr) not in (int, float) or not 0 <= stderr < math.inf):
        raise _wrong(file, f"{name}.stderr", stderr, "a number that is not below 0, or null")


def _wrong(file: Path, field: str, value: Any, expected: str) -> UserError:
    return UserError(
        f"{file}: {field} is {_short(json.dumps(value))}, expected {expected}; name a {RESULTS} as evaluation.py has "
        "written it"
    )


def _short(value: Any) -> str:
    text = "unset" if value is None else str(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
