"""Where a sample of evaluation.py and the same sample of lm-eval differ."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from mindspeed_llm.tasks.evaluation.filters import INVALID
from tests.tasks.evaluation import lm_eval_files

TOLERANCE = 1e-4
Sample = Mapping[str, Any]

_READINGS = {"none": "lm-eval", "create_test": "pass@1"}
"""lm-eval's filter -> our reading, where their names differ."""
_METRICS = {"agieval": "acc", "human_eval": "pass@1"}
"""Benchmark -> lm-eval's metric of written answers, where it is not exact_match."""


def differences(
    task: str,
    names: Mapping[str, str],
    mine: Sequence[Sample],
    other: Mapping[str, Sequence[Sample]],
    *,
    is_chat: bool = False,
) -> Iterator[str]:
    """A line for each sample that differs: in what was asked, its numbers or text, what was read, or the verdict.

    Args:
        task: the benchmark, as --task has it.
        names: subject -> lm-eval's task.
        mine: the lines of samples.jsonl.
        other: lm-eval's task -> its samples, one for each question and filter.
        is_chat: both asked under a chat template. lm-eval then counts the line end, with which a template begins a
            reply, to each choice: its log-likelihoods are ours with a number of the sample's own in addition, which
            decides nothing for `acc`, and which `acc_norm` divides by lengths.
    """
    asked = {
        (subject, sample["doc_id"], sample["filter"]): sample
        for subject, name in names.items()
        for sample in other[name]
    }
    places = {(subject, index) for subject, index, _ in asked}
    if places != {(sample["subject"], sample["index"]) for sample in mine}:
        yield f"{task}: other samples were asked"
        return
    filters = sorted({name for _, _, name in asked})
    for sample in mine:
        for name in filters:
            found = asked[sample["subject"], sample["index"], name]
            compare = _compare_written if isinstance(sample["raw"], str) else partial(_compare_chosen, is_chat=is_chat)
            if wrong := [what for what, is_same in compare(task, sample, found, name) if not is_same]:
                yield (
                    f"{task}, {sample['subject']} {sample['index']}, {name}: other {', '.join(wrong)}: "
                    f"{sample['raw']!r} and {found['resps']!r}"
                )


def _compare_written(task: str, mine: Sample, other: Sample, name: str) -> Iterator[tuple[str, bool]]:
    reading = name if name in mine["extracted"] else _READINGS[name]
    read, text = mine["extracted"][reading], other["resps"][0][0]
    filtered = other["filtered_resps"]
    filtered = filtered if isinstance(filtered, str) else filtered[0]
    yield "prompt", all(arguments[0] == mine["prompt"] for arguments in other["arguments"])
    yield "text", mine["raw"] == text
    if task == "human_eval":
        # Its filter makes the whole program; the target is the tests.
        yield "reading", filtered == [mine["prompt"] + read]
    elif task == "agieval":
        # lm-eval reads and compares in one step: the reading is its function's.
        theirs = lm_eval_files.function("agieval/utils.py", "parse_math_answer")(text)
        yield "reading", read == (INVALID if theirs is None else theirs)
        yield "gold", mine["gold"] == other["doc"]["answer"]
    else:
        yield "reading", read == filtered
        yield "gold", mine["gold"] == other["target"]
    yield "verdict", mine["correct"][reading] == bool(other[_METRICS.get(task, "exact_match")])


def _compare_chosen(task: str, mine: Sample, other: Sample, name: str, *, is_chat: bool) -> Iterator[tuple[str, bool]]:
    yield "prompt", all(arguments[0] == mine["prompt"] for arguments in other["arguments"])
    choices = mine["choices"]
    # A blank parts them from the question, but no reply of a conversation begins with one.
    written = [arguments[1] for arguments in other["arguments"]]
    yield "choices", written in (choices, [f" {choice}" for choice in choices])
    target = other["target"]
    right = target if isinstance(target, list) else [target]
    yield "gold", mine["gold"] == " | ".join(choices[int(place)] for place in right)
    values = [float(response[0][0]) for response in other["resps"]]
    shift = values[0] - mine["raw"][0] if is_chat else 0.0
    same = [abs(a + shift - b) < TOLERANCE for a, b in zip(mine["raw"], values, strict=False)]
    yield "numbers", len(values) == len(mine["raw"]) and all(same)
    for metric, verdict in mine["correct"].items():
        if not (is_chat and metric == "acc_norm"):
            yield f"verdict ({metric})", verdict == bool(other[metric])
