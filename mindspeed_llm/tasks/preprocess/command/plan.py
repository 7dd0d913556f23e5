"""`--check`: what a run would do, without doing it."""

from __future__ import annotations

from pathlib import Path

from mindspeed_llm.errors import UserError
from mindspeed_llm.files import why_unwritable
from mindspeed_llm.tasks.preprocess.chunks import Summary
from mindspeed_llm.tasks.preprocess.command.identity import InputFile
from mindspeed_llm.tasks.preprocess.command.job import Job
from mindspeed_llm.tasks.preprocess.command.report import table
from mindspeed_llm.tasks.preprocess.indexed_format import bin_file, indexed_exists
from mindspeed_llm.tasks.preprocess.readers import Record


def plan_lines(job: Job, first: list[Record]) -> list[str]:
    """The plan of a job, with what became of its first records. Raises UserError where the output cannot be written."""
    arguments = job.arguments
    _check_writable(job.prefix)
    files = [InputFile.found(file) for file in job.inputs.files()]
    total = job.inputs.estimate(files)
    rows = [("handler", f"{job.handler.name} ({job.handler.kind})")]
    size = sum(file.size for file in files)
    about = "" if total is None else f", about {total:,} records"
    rows.append(("input", f"{arguments.input}: {_counted(len(files), 'file')}, {size:,} bytes{about}"))
    rows.append(("tokenizer", f"{_tokenizer_name(job)}: {len(job.tokenizer):,} tokens"))
    if job.handler.kind != "pretrain":
        rows.append(("chat template", job.template or "the tokenizer's own"))
    rows.append(("longest sample", "not limited" if arguments.seq_length is None else f"{arguments.seq_length} tokens"))
    if arguments.pack:
        how = "kept apart (neat)" if arguments.neat_pack else "one text"
        rows.append(("packs", f"of {arguments.seq_length} tokens, samples {how}, pad id {job.pad_id}"))
    chunk = job.work(first)
    summary = Summary()
    summary.add(chunk)
    tried = f"{summary.num_samples} samples, {summary.num_tokens:,} tokens"
    rows.append(("first records", f"{summary.num_records} tried: {tried}" if first else "not tried: a stream"))
    rows += [("", line) for line in summary.skip_lines()]
    rows.append(("work", f"{_counted(arguments.workers, 'worker')}, {_counted(arguments.n_subs, 'part')}"))
    targets = [job.target(key) for key in job.work.keys]
    for number, target in enumerate(targets):
        exists = " (exists)" if indexed_exists(target) else ""
        rows.append(("" if number else "output", f"{bin_file(target)}/.idx{exists}"))
    return table(rows)


def _counted(count: int, what: str) -> str:
    return f"{count} {what}" + "s" * (count != 1)


def _tokenizer_name(job: Job) -> str:
    arguments = job.arguments
    name = arguments.tokenizer_name_or_path or arguments.tokenizer_model or arguments.vocab_file
    return f"{name} ({arguments.tokenizer_type})"


def _check_writable(prefix: Path) -> None:
    if reason := why_unwritable(prefix.parent):
        raise UserError(f"--output-prefix {prefix} cannot be written: {reason}; choose another prefix")
