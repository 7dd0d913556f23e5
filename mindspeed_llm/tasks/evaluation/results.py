"""results.json and samples.jsonl: what an evaluation has found, the same bytes wherever it ran."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mindspeed_llm.errors import UserError
from mindspeed_llm.files import TEMPORARY_SUFFIX, write_durably
from mindspeed_llm.tasks.evaluation.judge import BenchmarkResult, SampleResult
from mindspeed_llm.tasks.evaluation.scores import Score

RESULTS, SAMPLES, REPORT = "results.json", "samples.jsonl", "report.html"
FORMAT = 1
_COMPARED = {"tasks": "other questions", "model": "another model"}


def results_of(
    results: Sequence[BenchmarkResult],
    *,
    tasks: Mapping[str, Mapping[str, Any]],
    model: Mapping[str, Any],
    flags: Mapping[str, Any],
    versions: Mapping[str, str],
) -> dict[str, Any]:
    """The content of results.json.

    Args:
        tasks: what decides the questions of each.
        model: what was evaluated.
        flags: those that were given.
    """
    return {
        "format": FORMAT,
        "results": {result.name: _result(result) for result in results},
        "tasks": dict(tasks),
        "model": dict(model),
        "flags": dict(flags),
        "versions": dict(versions),
    }


def _result(result: BenchmarkResult) -> dict[str, Any]:
    return {
        **_numbers(result.total[result.headline]),
        "metric": result.headline,
        "metrics": {metric: _numbers(score) for metric, score in result.total.items()},
        "subjects": {
            subject: {
                **_numbers(scores[result.headline]),
                "metrics": {metric: _numbers(score) for metric, score in scores.items()},
            }
            for subject, scores in result.subjects.items()
        },
        "warnings": list(result.warnings),
    }


def _numbers(score: Score) -> dict[str, Any]:
    return {"correct": score.correct, "total": score.total, "accuracy": score.accuracy, "stderr": score.stderr}


def sample_rows(results: Sequence[BenchmarkResult]) -> Iterator[dict[str, Any]]:
    """The lines of samples.jsonl."""
    for result in results:
        for sample in result.samples:
            yield _row(result.name, sample)


def _row(task: str, sample: SampleResult) -> dict[str, Any]:
    about: dict[str, Any] = {
        "task": task,
        "subject": sample.subject,
        "index": sample.index,
        "prompt": sample.prompt,
        "raw": sample.raw,
    }
    if isinstance(sample.raw, tuple):
        # JSON has no infinities: an option that is impossible to the model has the lowest number there is.
        about["raw"] = [max(value, -sys.float_info.max) for value in sample.raw]
        about["choices"] = list(sample.choices)
    about |= {"extracted": sample.extracted, "gold": sample.gold, "correct": sample.correct}
    if sample.is_tie:
        about["is_tie"] = True
    if sample.cut_tokens:
        about["cut_tokens"] = sample.cut_tokens
    if sample.thought_has_no_end:
        about["thought_has_no_end"] = True
    return about


def publish(folder: Path, content: Mapping[str, Any], rows: Iterator[Mapping[str, Any]]) -> None:
    """Write both files, each so that a crash leaves the old content or the new one; results.json comes last. What one
    that was killed while it wrote has left half is removed; two never write to a folder at a time.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name in (SAMPLES, RESULTS, REPORT):
        for half in folder.glob(f".{name}.*{TEMPORARY_SUFFIX}"):
            half.unlink(missing_ok=True)
    write_durably(folder / SAMPLES, (json.dumps(row, ensure_ascii=False) + "\n" for row in rows), through_links=True)
    write_durably(folder / RESULTS, json.dumps(content, ensure_ascii=False, indent=2) + "\n", through_links=True)


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Within it, a folder that cannot be written to, or a disk that is full, is a `UserError` about --output-dir."""
    try:
        yield
    except OSError as error:
        if isinstance(error, ConnectionError | TimeoutError):  # of ranks that talk to each other
            raise
        where = f" ({error.filename})" if error.filename else ""
        raise UserError(f"--output-dir {folder} cannot be written: {error.strerror or error}{where}") from error


def read_results(path: Path) -> dict[str, Any]:
    """A results.json of an earlier evaluation.

    Raises:
        UserError: it is not there, or is something else.
    """
    path = path / RESULTS if path.is_dir() else path
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}), expected the {RESULTS} of an evaluation") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: no JSON ({error}), expected the {RESULTS} of an evaluation") from None
    if not isinstance(content, dict) or content.get("format") != FORMAT or not _is_complete(content):
        raise UserError(f"{path}: expected the {RESULTS} of an evaluation, with field 'format' {FORMAT}")
    return content


def _is_complete(content: Mapping[str, Any]) -> bool:
    results = content.get("results")
    parts = (results, content.get("tasks"), content.get("model"))
    return all(isinstance(part, dict) for part in parts) and all(
        isinstance(result, dict) and {"correct", "total", "accuracy", "stderr", "metric", "subjects"} <= set(result)
        for result in content["results"].values()
    )


def check_same(folder: Path, **now: Mapping[str, Any]) -> None:
    """Let results of the same evaluation be replaced, and no others.

    Args:
        now: `tasks`, `model` or both, as results.json will have them.

    Raises:
        UserError: the folder has results of other questions or of another model.
    """
    path = folder / RESULTS
    if not path.exists():
        return
    earlier = read_results(path)
    plain = json.loads(json.dumps(now))
    different = [_COMPARED[part] for part in now if decisive(earlier[part]) != decisive(plain[part])]
    if different:
        raise UserError(
            f"--output-dir {folder} holds the results of {' and '.join(different)}; name another folder, or remove "
            f"{RESULTS} there"
        )


def decisive(part: Mapping[str, Any]) -> dict[str, Any]:
    """What tells questions or models apart: not where they lie. Only of weights without a hash the place has to do."""
    idle = ("data_path", *(("description",) if part.get("fingerprint") is not None else ()))
    return {
        name: decisive(value) if isinstance(value, dict) else value for name, value in part.items() if name not in idle
    }
