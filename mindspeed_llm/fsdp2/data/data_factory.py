"""From the configuration to sources of micro batches."""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindspeed_llm.errors import UserError
from mindspeed_llm.fsdp2.config.config import Config
from mindspeed_llm.fsdp2.data.lf_manager import LFDataManager
from mindspeed_llm.fsdp2.data.mg_manager import MegatronDataManager
from mindspeed_llm.fsdp2.data.order import BatchSplit, DataPosition
from mindspeed_llm.fsdp2.data.sources import EvalSource, LoaderOptions, TrainSource
from mindspeed_llm.platform.device import supports_pin_memory

_LOG = logging.getLogger("mindspeed_llm")


@dataclass(frozen=True)
class DataBundle:
    """`train` and `eval` (None without evaluation data; a dict name -> source with data.eval_on_each_dataset)."""

    train: TrainSource
    eval: EvalSource | dict[str, EvalSource] | None

    @property
    def num_samples(self) -> int:
        """Training samples of one epoch."""
        return self.train.num_samples


class DataFactory:
    """Builds the data of a run from its configuration and tokenizer.

    Prepared data is kept in `<training.output_dir>/dataset_cache`, under names that change with the input files, the
    options and the tokenizer. The sample index of indexed files lies beside these, in `cache`, where that can be
    written.
    """

    def __init__(self, config: Config, tokenizer: Any) -> None:
        self._config, self._tokenizer = config, tokenizer

    def build(
        self, *, rank: int, world_size: int, global_batch_size: int, start: DataPosition | None = None
    ) -> DataBundle:
        """Build the sources of one data-parallel rank; every rank must call this (one prepares, the others wait).

        `rank` and `world_size` count data-parallel ranks, `global_batch_size` the samples of one optimizer step over
        all of them; `start` is where a resumed run stood. Raises UserError for whatever is wrong with the data.
        """
        training = self._config.training
        split = BatchSplit(
            rank=rank,
            num_ranks=world_size,
            micro_batch_size=training.per_device_train_batch_size,
            accumulation=training.gradient_accumulation_steps,
        )
        if split.global_batch_size != global_batch_size:
            raise UserError(
                f"global batch size {global_batch_size} is not {world_size} ranks x per_device_train_batch_size "
                f"{split.micro_batch_size} x gradient_accumulation_steps {split.accumulation}"
            )
        loader = LoaderOptions(
            num_workers=training.dataloader_num_workers,
            prefetch_factor=training.dataloader_prefetch_factor,
            pin_memory=training.dataloader_pin_memory and supports_pin_memory(),
            persistent_workers=training.dataloader_persistent_workers,
        )
        manager = self._manager()
        train, evaluation = manager.build(split, loader, start or DataPosition())
        _LOG.info("training samples per epoch: %d", train.num_samples)
        if isinstance(evaluation, EvalSource):
            _LOG.info("evaluation samples: %d", evaluation.num_samples)
        elif evaluation is not None:
            for name, source in evaluation.items():
                _LOG.info("evaluation samples of %s: %d", name, source.num_samples)
        return DataBundle(train, evaluation)

    def _manager(self) -> LFDataManager | MegatronDataManager:
        cache_dir = Path(self._config.training.output_dir) / "dataset_cache"
        if self._config.data.data_manager_type == "lf":
            return LFDataManager(self._config, self._tokenizer, cache_dir)
        if self._config.training.stage != "pt":
            raise UserError("data.data_manager_type mg serves stage pt only: it joins texts and knows no prompts")
        if self._config.data.tokenized_path is not None:
            raise UserError("data.tokenized_path keeps samples of data_manager_type lf; mg keeps its own in output_dir")
        return MegatronDataManager(self._config, self._tokenizer, cache_dir)
