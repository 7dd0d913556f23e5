"""What the first records of the training and evaluation data become, without preparing all of it."""

from __future__ import annotations

import itertools
import logging
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from mindspeed_llm.errors import UserError
from mindspeed_llm.fsdp2.config.config import Config
from mindspeed_llm.fsdp2.config.data_config import DatasetChoice
from mindspeed_llm.fsdp2.data.entries import record_entries
from mindspeed_llm.fsdp2.data.lf_manager import LFDataManager
from mindspeed_llm.fsdp2.data.naming import naming
from mindspeed_llm.fsdp2.data.tokenized_path import check_settings, tokenized_exists
from mindspeed_llm.tasks.preprocess.chunks import Summary, Work
from mindspeed_llm.tasks.preprocess.dataset_info import DatasetEntry
from mindspeed_llm.tasks.preprocess.indexed_format import IndexedReader
from mindspeed_llm.tasks.preprocess.pretrain_inputs import resolve_inputs
from mindspeed_llm.tasks.preprocess.readers import read_file
from mindspeed_llm.tasks.preprocess.text_work import TextColumn, TextWork

RECORDS_LOOKED_AT = 200
_LOG = logging.getLogger("mindspeed_llm")


@dataclass(frozen=True, kw_only=True)
class DataSample:
    """The first `records` records of a data set: how many `samples` they gave, with how many `tokens` together, and why
    others were skipped. For an indexed data set the figures are of all its documents.
    """

    name: str
    records: int
    samples: int
    tokens: int
    skipped: list[str]


def sample_data(config: Config, tokenizer: PreTrainedTokenizerBase) -> list[DataSample]:
    """Tokenize the first records of every training and evaluation data set as the run will; data that
    `data.tokenized_path` holds is checked to be made with the settings of the run instead.

    Raises:
        UserError: a malformed record, no usable record among those looked at, or other settings.
    """
    data = config.data
    if data.data_manager_type == "mg":
        look = partial(_pretraining_samples, config, tokenizer)
    else:
        manager = LFDataManager(config, tokenizer, Path(config.training.output_dir))
        if data.tokenized_path is not None and tokenized_exists(Path(data.tokenized_path)):
            check_settings(Path(data.tokenized_path), manager.settings())
            return []
        look = partial(_record_samples, config, manager)
    samples = []
    with naming("data.dataset"):
        samples += look(data.dataset, "data.dataset")
    if data.eval_dataset is not None:
        with naming("data.eval_dataset"):
            samples += [
                replace(sample, name=f"{sample.name} (evaluation)")
                for sample in look(data.eval_dataset, "data.eval_dataset")
            ]
    return samples


def _pretraining_samples(
    config: Config, tokenizer: PreTrainedTokenizerBase, dataset: DatasetChoice | None, field: str
) -> list[DataSample]:
    data = config.data
    inputs = resolve_inputs(dataset, data.dataset_dir, field=field)
    samples = [_indexed(prefix) for prefix in inputs.prefixes]
    for entry in inputs.texts:
        work = TextWork(tokenizer, text_of=TextColumn(entry.columns["text"] or "text"), append_eod=data.append_eod)
        samples.append(_first_records(entry, work, data.max_samples))
    return samples


def _record_samples(
    config: Config, manager: LFDataManager, dataset: DatasetChoice | None, field: str
) -> list[DataSample]:
    data = config.data
    entries = record_entries(config, dataset, field)
    return [_first_records(entry, manager.work(entry), data.max_samples) for entry in entries]


def _indexed(prefix: Path) -> DataSample:
    reader = IndexedReader(prefix)
    tokens = sum(len(reader[i]) for i in range(len(reader)))
    return DataSample(name=str(prefix), records=len(reader), samples=len(reader), tokens=tokens, skipped=[])


def _first_records(entry: DatasetEntry, work: Work, limit: int | None) -> DataSample:
    records = itertools.chain.from_iterable(read_file(file) for file in entry.files)
    summary = Summary()
    summary.add(work(list(itertools.islice(records, min(RECORDS_LOOKED_AT, limit or RECORDS_LOOKED_AT)))))
    if not summary.num_samples:
        raise UserError(
            f"none of the first {summary.num_records} records of {entry.name} gives a sample: "
            + "; ".join(summary.skip_lines())
        )
    for note in summary.notes():
        _LOG.warning("%s: %s", entry.name, note)
    return DataSample(
        name=entry.name,
        records=summary.num_records,
        samples=summary.num_samples,
        tokens=summary.num_tokens,
        skipped=summary.skip_lines(),
    )
