"""The run itself: look for earlier output, work in parts, put them together, publish."""

from __future__ import annotations

import contextlib
import itertools
import logging
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.preprocess.chunks import Chunk, Summary
from mindspeed_llm.tasks.preprocess.command import signals
from mindspeed_llm.tasks.preprocess.command.identity import InputFile, hash_of, identify, inputs_hash
from mindspeed_llm.tasks.preprocess.command.job import FORMAT, Job
from mindspeed_llm.tasks.preprocess.command.output_files import written
from mindspeed_llm.tasks.preprocess.command.packs import write_packs
from mindspeed_llm.tasks.preprocess.command.parts import finished_parts, join, part_folder, write_part
from mindspeed_llm.tasks.preprocess.command.progress import Progress
from mindspeed_llm.tasks.preprocess.command.publish import naming_the_folder, publish
from mindspeed_llm.tasks.preprocess.command.report import result_lines
from mindspeed_llm.tasks.preprocess.command.reuse import read_content, why_anew
from mindspeed_llm.tasks.preprocess.command.workspace import Workspace, write_json
from mindspeed_llm.tasks.preprocess.engine import BATCH_RECORDS, in_batches, run_work
from mindspeed_llm.tasks.preprocess.indexed_format import bin_file, idx_file, indexed_exists

_LOG = logging.getLogger("mindspeed_llm")


def run(job: Job) -> None:
    """Make the output of a job, unless it is there already."""
    start = time.monotonic()
    workspace = Workspace(job.prefix)
    earlier = read_content(job.prefix)
    known = [*earlier.get("inputs", []), *workspace.note().get("inputs", [])]
    files = identify(job.inputs.files(), known, read=not job.inputs.is_stream)
    if _is_there(job, earlier, files):
        workspace.clear_leftovers()
        return
    for file in files:
        if not file.size:
            _LOG.warning("data file %s is empty", file.path)
    with naming_the_folder(job.prefix), workspace:
        # Another run may have written it while this one waited for its turn.
        earlier = read_content(job.prefix)
        if _is_there(job, earlier, files, says_why=True):
            return
        parts = _work(job, workspace, files)
        summary = Summary()
        for part in parts:
            summary.add_summary(part)
        _check_result(job, summary, files)
        folders = [part_folder(workspace.folder, number) for number in range(len(parts))]
        content: dict[str, Any] = {"num_packs": None}
        made = {job.target(key): workspace.folder / f"whole_{key}" for key in job.work.keys}
        if job.arguments.pack:
            assert job.arguments.seq_length is not None
            content["num_packs"] = write_packs(
                folders,
                workspace.folder / "whole",
                capacity=job.arguments.seq_length,
                pad_id=job.pad_id,
                neat=job.arguments.neat_pack,
            )
        else:
            for key in job.work.keys:
                join([folder / key for folder in folders], workspace.folder / f"whole_{key}")
        content = _content(job, files, made) | content | asdict(summary) | {"seconds": time.monotonic() - start}
        write_json(workspace.folder / "summary.json", content)
        signals.raise_received()
        publish(job.prefix, made, workspace.folder / "summary.json", stale=_stale(job, earlier))
        workspace.keep = False
    _LOG.info("%s: done in %.1f s", job.prefix, content["seconds"])
    print("\n".join(result_lines(content, content["files"], job.prefix.parent)), flush=True)


def _is_there(job: Job, earlier: Mapping[str, Any], files: Sequence[InputFile], *, says_why: bool = False) -> bool:
    """Whether the output stands there already; says so, or on demand why it is made anew."""
    reason = None
    if not earlier:
        if any(indexed_exists(job.target(key)) for key in job.work.keys):
            reason = "nothing says what it was made from"
    else:
        reason = why_anew(job.prefix, earlier, options=job.options, files=files)
        if reason is None and job.arguments.overwrite_cache:
            reason = "--overwrite-cache"
        if reason is None:
            _LOG.info(
                "%s: up to date, made from the same inputs with the same options; --overwrite-cache makes it anew",
                job.prefix,
            )
            print("\n".join(result_lines(earlier, earlier["files"], job.prefix.parent)), flush=True)
            return True
    if reason is not None and says_why:
        _LOG.info("%s: making the output anew, the earlier one stays until then: %s", job.prefix, reason)
    return False


def _work(job: Job, workspace: Workspace, files: Sequence[InputFile]) -> list[Summary]:
    """Make the parts, those that an earlier run has finished left out; returns what became of the records of each."""
    arguments = job.arguments
    note = {"options": job.options, "inputs_hash": inputs_hash(files), "n_subs": arguments.n_subs}
    known = {"inputs": [asdict(file) for file in files]}
    keys = [key for key in job.work.keys if not (arguments.pack and key == "attention_mask")]
    parts: list[Summary] = []
    if arguments.n_subs > 1 and files and _what(workspace.note()) == note:
        parts = finished_parts(workspace.folder, keys)
        workspace.keep = bool(parts)
    if not parts:
        workspace.begin(note | known)
    total = job.inputs.estimate(files)
    size = None
    if arguments.n_subs > 1:
        assert total is not None
        size = max(1, -(-total // arguments.n_subs))
    done = Summary()
    for part in parts:
        done.add_summary(part)
    if parts:
        _LOG.info("going on after %d of %d parts (%d records)", len(parts), arguments.n_subs, done.num_records)
    progress = Progress(job.prefix.name, total=total, interval=arguments.log_interval, done=done)
    try:
        with contextlib.closing(_chunks(job, done.num_records, size)) as chunks:
            shown = _showing(chunks, done, progress)
            while len(parts) < arguments.n_subs:
                is_last = len(parts) + 1 == arguments.n_subs
                made = write_part(part_folder(workspace.folder, len(parts)), keys, shown, None if is_last else size)
                if made is None:
                    break
                parts.append(made)
                workspace.keep = arguments.n_subs > 1
    finally:
        progress.close()
    return parts


def _what(note: Mapping[str, Any]) -> dict[str, Any]:
    """What decides whether parts can be gone on with: of the inputs their content, not what else is known of them."""
    return {name: value for name, value in note.items() if name != "inputs"}


def _chunks(job: Job, skip: int, part_size: int | None) -> Generator[Chunk, None, None]:
    """The chunks of all records from number `skip` on."""
    records = itertools.islice(job.inputs.records(), skip, None)
    # Parts end where chunks end.
    batches = in_batches(records, min(BATCH_RECORDS, part_size or BATCH_RECORDS))
    yield from run_work(batches, job.work, job.arguments.workers, starting=signals.deferred)


def _showing(chunks: Iterator[Chunk], done: Summary, progress: Progress) -> Iterator[Chunk]:
    for chunk in chunks:
        signals.raise_received()
        done.add(chunk)
        progress.update(done)
        yield chunk


def _check_result(job: Job, summary: Summary, files: Sequence[InputFile]) -> None:
    """Raise UserError where nothing is left, or the input has changed under the work."""
    if not summary.num_tokens:
        reasons = "; ".join(summary.skip_lines()) or "there are no records"
        raise UserError(f"--input {job.arguments.input}: no sample is left of {summary.num_records} records: {reasons}")
    for file in files:
        if not file.is_unchanged():
            raise UserError(f"{file.path} has changed while it was read; run the command again when it is complete")


def _content(job: Job, files: Sequence[InputFile], made: Mapping[Path, Path]) -> dict[str, Any]:
    """What the summary says beside the counts."""
    arguments = job.arguments
    files_written = {
        final.name: written(finished)
        for target, source in made.items()
        for final, finished in ((bin_file(target), bin_file(source)), (idx_file(target), idx_file(source)))
    }
    return {
        "format": FORMAT,
        "handler": job.handler.name,
        "kind": job.handler.kind,
        "keys": list(job.work.keys),
        "level": job.level,
        "tokenizer": {
            "type": arguments.tokenizer_type,
            "path": _absolute(arguments.tokenizer_name_or_path),
            "model": _absolute(arguments.tokenizer_model),
            "vocab_file": _absolute(arguments.vocab_file),
            "merge_file": _absolute(arguments.merge_file),
            "use_fast": not arguments.tokenizer_not_use_fast,
            "identity": job.options["tokenizer"],
        },
        "prompt_type": arguments.prompt_type,
        "seq_length": arguments.seq_length,
        "pack": arguments.pack,
        "neat_pack": arguments.neat_pack,
        "options": job.options,
        "inputs": [asdict(file) for file in files],
        "inputs_hash": inputs_hash(files),
        "options_hash": hash_of(job.options),
        "files": {name: note["size"] for name, note in files_written.items()},
        "written": files_written,
    }


def _absolute(path: str | None) -> str | None:
    """The absolute path of a file or folder that exists; a name of the hub as it is."""
    return str(Path(path).absolute()) if path is not None and Path(path).exists() else path


def _stale(job: Job, earlier: Mapping[str, Any]) -> list[Path]:
    """Prefixes of earlier files that would be taken for a part of the new output: other keys of samples."""
    if job.handler.kind == "pretrain" or earlier.get("kind") in (None, "pretrain"):
        return []
    return [job.target(key) for key in earlier["keys"] if key not in job.work.keys]
