"""What the first records of the training data become, without preparing all of it."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from mindspeed_llm.errors import UserError
from mindspeed_llm.fsdp2.config.config import Config
from mindspeed_llm.fsdp2.data.lf_manager import LFDataManager
from mindspeed_llm.tasks.preprocess.dataset_info import DatasetEntry, resolve_datasets
from mindspeed_llm.tasks.preprocess.indexed_format import IndexedReader
from mindspeed_llm.tasks.preprocess.pretrain_inputs import resolve_inputs
from mindspeed_llm.tasks.preprocess.readers import read_file
from mindspeed_llm.tasks.preprocess.tokenize import Summary, TextWork, Work

RECORDS_LOOKED_AT = 200


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
    """Tokenize the first records of every training data set as the run will.

    Raises:
        UserError: a malformed record, or no usable record among those looked at.
    """
    data = config.data
    if data.data_manager_type == "mg":
        inputs = resolve_inputs(data.dataset, data.dataset_dir)
        samples = [_indexed(prefix) for prefix in inputs.prefixes]
        for entry in inputs.texts:
            work = TextWork(tokenizer, column=entry.columns["text"] or "text", append_eod=data.append_eod)
            samples.append(_first_records(entry, work))
        return samples
    manager = LFDataManager(config, tokenizer, Path(config.training.output_dir))
    entries = resolve_datasets(data.dataset, data.dataset_dir)
    return [_first_records(entry, manager.work(entry)) for entry in entries]


def _indexed(prefix: Path) -> DataSample:
    reader = IndexedReader(prefix)
    tokens = sum(len(reader[i]) for i in range(len(reader)))
    return DataSample(name=str(prefix), records=len(reader), samples=len(reader), tokens=tokens, skipped=[])


def _first_records(entry: DatasetEntry, work: Work) -> DataSample:
    records = itertools.chain.from_iterable(read_file(file) for file in entry.files)
    summary = Summary()
    summary.add(work(list(itertools.islice(records, RECORDS_LOOKED_AT))))
    if not summary.num_samples:
        raise UserError(
            f"data.dataset: none of the first {summary.num_records} records of {entry.name} gives a sample: "
            + "; ".join(summary.skip_lines())
        )
    return DataSample(
        name=entry.name,
        records=summary.num_records,
        samples=summary.num_samples,
        tokens=summary.num_tokens,
        skipped=summary.skip_lines(),
    )
