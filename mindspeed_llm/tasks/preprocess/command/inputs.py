"""--input: files, folders, names in dataset_info.json, or a data set on the hub, as one stream of records."""

from __future__ import annotations

import difflib
import functools
import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.preprocess.command.arguments import Arguments
from mindspeed_llm.tasks.preprocess.command.checks import probabilities
from mindspeed_llm.tasks.preprocess.command.hub import HubData, read_params
from mindspeed_llm.tasks.preprocess.command.identity import InputFile
from mindspeed_llm.tasks.preprocess.compressed import COMPRESSIONS
from mindspeed_llm.tasks.preprocess.dataset_info import DatasetEntry, resolve_datasets
from mindspeed_llm.tasks.preprocess.handlers import Handler
from mindspeed_llm.tasks.preprocess.mixing import mixed_records
from mindspeed_llm.tasks.preprocess.readers import READERS, Record, data_files, file_type, read_file

_SAMPLED_RECORDS = 100
_LOOKED_INTO_FILES = 20
# Compressed text is about so many times as long.
_COMPRESSION_RATIO = 3
_LINE_FORMATS = (".jsonl", ".txt", ".csv")
# What becomes of mistakes is the matter of the work.
_read = functools.partial(read_file, keep_mistakes=True)


@dataclass(frozen=True)
class Inputs:
    """What is read, and in which order: the data sets `entries`, or `hub`."""

    entries: tuple[DatasetEntry, ...]
    hub: HubData | None
    is_stream: bool
    mix_strategy: str
    probabilities: tuple[float, ...] | None
    seed: int
    max_samples: int | None

    def files(self) -> list[Path]:
        """The files whose content decides the result; none where they cannot be known (pipes, rows from the net)."""
        if self.hub is not None:
            return self.hub.files()
        files = [file for entry in self.entries for file in entry.files]
        return files if all(file.is_file() for file in files) else []

    def records(self) -> Iterator[Record]:
        """All records in order."""
        if self.hub is not None:
            return itertools.islice(self.hub.records(), self.max_samples)
        return mixed_records(
            self.entries, self.mix_strategy, self.probabilities, self.seed, self.max_samples, read=_read
        )

    def first_records(self, count: int) -> list[Record]:
        """The first `count` records of the first files of each data set (of the data set, from a hub)."""
        if self.hub is not None:
            return list(itertools.islice(self.hub.records(), count))
        return [
            record._replace(source=source)
            for source, entry in enumerate(self.entries)
            for file in entry.files[:_LOOKED_INTO_FILES]
            for record in itertools.islice(_read(file), count)
        ]

    def estimate(self, files: Sequence[InputFile]) -> int | None:
        """About how many records there are; None where that cannot be said. `files` are those of `files()`."""
        if self.is_stream:
            return None
        if self.hub is not None:
            sizes = [self.hub.num_records()]
        else:
            counts = iter(files)
            sizes = [_estimate(list(itertools.islice(counts, len(entry.files)))) for entry in self.entries]
        limited = [min(size, self.max_samples) if self.max_samples else size for size in sizes if size is not None]
        for number, entry in enumerate(self.entries):
            if entry.num_samples is not None:
                limited[number] = entry.num_samples
        if self.mix_strategy == "interleave_under":
            return min(limited) * len(limited)
        if self.mix_strategy == "interleave_over":
            return max(limited) * len(limited)
        return sum(limited)


def resolve_inputs(arguments: Arguments, handler: Handler) -> Inputs:
    """Find what --input names. Raises UserError when it does not exist or cannot be read."""
    assert arguments.input is not None
    entries, hub = [], None
    if not handler.formatting:
        assert arguments.dataset_dir is not None
        if not all(name.strip() for name in arguments.input.split(",")):
            raise UserError(f"--input {arguments.input}: a name is empty; write names with one comma between two")
        entries = resolve_datasets(
            arguments.input, arguments.dataset_dir, field="--input", dir_field="--dataset-dir", preference=True
        )
    elif arguments.hf_datasets_params is None and (path := Path(arguments.input)).exists():
        entries = [DatasetEntry(path.name, _files(path, arguments.streaming))]
    else:
        params = read_params(arguments.hf_datasets_params, arguments.input)
        if arguments.hf_datasets_params is None:
            _check_hub_name(arguments.input)
        hub = HubData(params, cache_dir=arguments.cache_dir, streaming=arguments.streaming)
    if hub is None and arguments.cache_dir is not None:
        raise UserError("--cache-dir is for data sets of the hub; local files are read where they are")
    shares = probabilities(arguments)
    return Inputs(
        tuple(entries),
        hub,
        arguments.streaming,
        arguments.mix_strategy,
        None if shares is None else tuple(shares),
        arguments.seed,
        arguments.max_samples,
    )


def _files(path: Path, streaming: bool) -> list[Path]:
    if path.suffix == ".py" or (path / f"{path.name}.py").exists():
        raise UserError(
            f"--input {path}: loading scripts are programs, and are not run; save the data as jsonl or parquet"
        )
    if path.is_file() or path.is_dir():
        return data_files(path)
    if not streaming:
        raise UserError(f"--input {path} is a pipe, which can be read only once; add --streaming")
    return [path]


def _check_hub_name(name: str) -> None:
    """Raise UserError for a name that looks like a path: then a file is missing, and no data set of the hub meant."""
    path = Path(name)
    if not (
        name.startswith((".", "/", "~")) or name.count("/") > 1 or path.suffix.lower() in (*READERS, ".gz", ".zst")
    ):
        return
    hint = ""
    if path.parent.is_dir():
        near = difflib.get_close_matches(path.name, [entry.name for entry in path.parent.iterdir()], n=1)
        hint = f"; did you mean {path.parent / near[0]}?" if near else ""
    elif name.startswith("~"):
        hint = "; inside of quotes ~ is not the home folder, write $HOME"
    raise UserError(f"--input {name} does not exist{hint}")


def _estimate(files: Sequence[InputFile]) -> int:
    """About how many records the files of a data set have."""
    total = 0
    bytes_per_record: float | None = None
    for file in files:
        path = Path(file.path)
        is_compressed = path.suffix.lower() in COMPRESSIONS
        if file_type(path) == ".parquet":
            import pyarrow.parquet

            total += int(pyarrow.parquet.read_metadata(path).num_rows)
        elif file_type(path) in _LINE_FORMATS and file.num_lines is not None and not is_compressed:
            total += file.num_lines
        elif bytes_per_record is None and len(lengths := _lengths(path)) < _SAMPLED_RECORDS:
            total += len(lengths)
        else:
            # Files of one data set are much alike: one that is long enough tells about all.
            bytes_per_record = bytes_per_record or sum(lengths) / len(lengths)
            size = file.size * _COMPRESSION_RATIO if is_compressed else file.size
            total += round(size / bytes_per_record)
    return total


def _lengths(file: Path) -> list[int]:
    """Lengths in bytes of the first records, as JSON."""
    return [
        len(json.dumps(record.data, default=str, ensure_ascii=False).encode("utf-8", "replace")) + 1
        for record in itertools.islice(_read(file), _SAMPLED_RECORDS)
    ]
