"""Checks of the data files that need no tokenizer and no torch: names, files, columns, templates."""

import itertools
from collections.abc import Sequence
from pathlib import Path

from mindspeed_llm.errors import UserError
from mindspeed_llm.fsdp2.config.config import Config
from mindspeed_llm.fsdp2.data.entries import record_entries
from mindspeed_llm.fsdp2.data.naming import naming
from mindspeed_llm.tasks.preprocess.dataset_info import DatasetEntry
from mindspeed_llm.tasks.preprocess.engine import empty_files
from mindspeed_llm.tasks.preprocess.indexed_format import IndexedReader
from mindspeed_llm.tasks.preprocess.pretrain_inputs import resolve_inputs
from mindspeed_llm.tasks.preprocess.readers import Record, read_file
from mindspeed_llm.tasks.preprocess.records import (
    FORMATS,
    UnusableRecord,
    missing_column,
    to_conversation,
    to_preference,
)
from mindspeed_llm.tasks.preprocess.templates import load_template
from mindspeed_llm.tasks.preprocess.text_work import column_text

_TOKENIZED_INFO = "tokenized_info.json"


def validate_data(config: Config) -> None:
    """Check that the data can be used as configured, by looking at the first record of every file.

    Raises UserError: a name that dataset_info.json does not have, a missing or empty file, files of several types in a
    folder, a missing column, a damaged indexed file, a template or tool format that does not exist.
    """
    data = config.data
    if config.training.stage != "pt":
        template = load_template(data.template or "empty")
        template.with_options(tool_format=data.tool_format)
    kept = data.tokenized_path is not None and (Path(data.tokenized_path) / _TOKENIZED_INFO).is_file()
    for field, dataset in (("data.dataset", data.dataset), ("data.eval_dataset", data.eval_dataset)):
        if dataset is None or kept:
            continue
        with naming(field):
            if data.data_manager_type == "mg":
                inputs = resolve_inputs(dataset, data.dataset_dir, field=field)
                for prefix in inputs.prefixes:
                    if not len(IndexedReader(prefix)):
                        raise UserError(f"indexed data set {prefix} holds no documents")
                entries = inputs.texts
            else:
                entries = record_entries(config, dataset, field)
            _check_entries(entries, is_chat=config.training.stage != "pt")


def _check_entries(entries: Sequence[DatasetEntry], *, is_chat: bool) -> None:
    for entry in entries:
        firsts = [record for file in entry.files for record in itertools.islice(read_file(file), 1)]
        if not firsts:
            raise empty_files(entry.files)
        for first in firsts:
            if is_chat:
                _check_conversation(entry, first)
            else:
                column_text(first, entry.columns["text"] or "text")


def _check_conversation(entry: DatasetEntry, record: Record) -> None:
    required = FORMATS[entry.formatting].required
    if entry.ranking:
        required = (*(name for name in required if name != "response"), "chosen", "rejected")
    for name in dict.fromkeys((*required, *entry.given_columns)):
        column = entry.columns.get(name)
        if column is not None and column not in record.data:
            raise missing_column(record, name, column)
    try:
        read = to_preference if entry.ranking else to_conversation
        read(record, entry.formatting, entry.columns, entry.tags)
    except UnusableRecord:
        # Counted and reported when the data is prepared; the layout is right.
        return
