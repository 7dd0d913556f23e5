"""The data sets of records that a field of section `data` names, of the kind that the stage needs."""

from mindspeed_llm.errors import UserError
from mindspeed_llm.fsdp2.config.config import Config
from mindspeed_llm.fsdp2.config.data_config import DatasetChoice
from mindspeed_llm.tasks.preprocess.dataset_info import DatasetEntry, resolve_datasets


def record_entries(config: Config, dataset: DatasetChoice | None, field: str) -> list[DatasetEntry]:
    """Resolve what `field` names.

    Raises:
        UserError: a name or a file does not exist, or the records are pairs where the stage wants none, or no pairs
            where it wants them.
    """
    wants_pairs = config.training.stage == "dpo"
    entries = resolve_datasets(dataset, config.data.dataset_dir, field=field, preference=wants_pairs)
    for entry in entries:
        if wants_pairs and not entry.ranking:
            raise UserError(
                f"{field}: training.stage = dpo needs pairs of replies, but {entry.name} is not said to hold any; add "
                "ranking: true to the data set, with columns chosen and rejected where they have other names"
            )
    return entries
