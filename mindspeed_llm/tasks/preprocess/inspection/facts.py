"""What is known of a data set as a whole, for the head of the output."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mindspeed_llm.tasks.preprocess.chunks import histogram
from mindspeed_llm.tasks.preprocess.inspection.data_set import DataSet
from mindspeed_llm.tasks.preprocess.inspection.streams import Sample, Stream

_MADE_ELSEWHERE = "no summary: the run that made these files has not finished, or another tool made them"

FIRST_TOKEN = "a document's first token is predicted only where another document stands before it"


@dataclass
class Facts:
    """`rows` of (name, value); `skipped` of (reason, count, first places); `lengths` of (range, number of sequences);
    `warnings` are what the user should know before trusting the rest."""

    title: str
    kind: str
    rows: list[tuple[str, str]] = field(default_factory=list)
    skipped: list[tuple[str, int, str]] = field(default_factory=list)
    lengths: list[tuple[str, int]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def gather_facts(data_set: DataSet, warning: str | None) -> Facts:
    """Facts from the summary, else from the files; `warning` is one about the tokenizer."""
    location = data_set.location
    facts = Facts(str(location.prefix), data_set.kind, warnings=[warning] if warning else [])
    summary = location.summary
    if summary is None:
        facts.warnings.append(_MADE_ELSEWHERE)
        facts.rows.append(("columns" if location.is_text else "files", ", ".join(location.files)))
        facts.rows.append(("samples", f"{len(data_set):,} with {int(data_set.lengths.sum(dtype='int64')):,} tokens"))
        facts.lengths = list(histogram(data_set.lengths).items())
        return facts
    facts.rows += _settings(summary)
    facts.rows += _counts(summary, len(data_set), data_set.kind)
    facts.warnings += _contradiction(summary, data_set)
    places: Mapping[str, list[str]] = summary.get("first_skipped") or {}
    facts.skipped = [
        (reason, count, ", ".join(places.get(reason, []))) for reason, count in (summary.get("skipped") or {}).items()
    ]
    facts.lengths = list((summary.get("length_histogram") or histogram(data_set.lengths)).items())
    return facts


def _settings(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    tokenizer: Mapping[str, Any] = summary.get("tokenizer") or {}
    place = tokenizer.get("path") or tokenizer.get("model") or tokenizer.get("vocab_file") or ""
    packed = " (neat: samples do not see one another)" if summary.get("neat_pack") else " (samples see one another)"
    rows = [
        ("handler", summary.get("handler")),
        ("template", summary.get("prompt_type")),
        ("tokenizer", f"{place} ({tokenizer['type']})" if tokenizer.get("type") else place),
        ("sequence length", f"{summary['seq_length']:,}" if summary.get("seq_length") else None),
        ("packed", f"yes{packed}" if summary.get("pack") else None),
    ]
    return [(name, str(value)) for name, value in rows if value]


def _counts(summary: Mapping[str, Any], num_samples: int, kind: str) -> list[tuple[str, str]]:
    skipped = sum((summary.get("skipped") or {}).values())
    samples = f"{num_samples:,}"
    if summary.get("num_packs") is not None:
        samples = f"{summary['num_samples']:,} in {counted(num_samples, 'pack')}"
    tokens, targets = summary.get("num_tokens"), summary.get("num_targets")
    carrying = f", of which {share(targets, tokens)} carry loss" if tokens and targets and kind != "prompt" else ""
    rows = [
        ("records", f"{summary['num_records']:,} read, {skipped:,} skipped" if "num_records" in summary else None),
        ("samples", samples),
        ("tokens", f"{tokens:,}{carrying}" if tokens is not None else None),
        ("empty replies", counted(summary["empty_replies"], "record") if summary.get("empty_replies") else None),
    ]
    return [(name, value) for name, value in rows if value is not None]


def _contradiction(summary: Mapping[str, Any], data_set: DataSet) -> list[str]:
    expected = summary.get("num_packs")
    expected = summary.get("num_samples") if expected is None else expected
    found = len(data_set.lengths)
    if expected is None or expected == found:
        return []
    return [
        f"the summary speaks of {counted(expected, 'sequence')}, but the files hold {found:,}: they do not belong "
        "together"
    ]


def share(part: int, whole: int) -> str:
    """`1,234 (56.7 %)`."""
    return f"{part:,} ({100 * part / whole:.1f} %)" if whole else f"{part:,}"


def stream_facts(stream: Stream) -> list[str]:
    """The figures of a sequence."""
    facts = [counted(stream.num_tokens, "token")]
    if stream.trained:
        percent = f" ({100 * stream.share:.1f} %)" if stream.num_tokens else ""
        facts.append(counted(stream.num_targets, "target") + percent)
    if stream.num_padding:
        facts.append(f"{stream.num_padding:,} padding")
    return facts


def sample_note(sample: Sample) -> str | None:
    """What the streams of a sample have in common."""
    return None if sample.common is None else f"both begin with the same {counted(sample.common, 'token')}"


def stream_warning(stream: Stream) -> str | None:
    """What is wrong with a sequence that is meant to be trained on."""
    learns = stream.num_targets > 0 or not stream.trained
    return None if learns else "no token carries loss: there is nothing to learn here"


def counted(number: int, noun: str) -> str:
    """`1 token`, `2,000 tokens`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def left_out(num_tokens: int, num_targets: int) -> str:
    """What a gap leaves out."""
    if num_targets == num_tokens:
        return f"{counted(num_tokens, 'token')} with loss left out"
    loss = f", {num_targets:,} of them with loss" if num_targets else ""
    return f"{counted(num_tokens, 'token')} left out{loss}"
