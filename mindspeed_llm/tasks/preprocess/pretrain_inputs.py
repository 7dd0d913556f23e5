"""The inputs of pretraining: raw text files, and prefixes of indexed files with or without weights."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.preprocess.blending import parse_blend
from mindspeed_llm.tasks.preprocess.dataset_info import DatasetChoice, DatasetEntry, resolve_datasets
from mindspeed_llm.tasks.preprocess.indexed_format import bin_file, idx_file, indexed_exists
from mindspeed_llm.tasks.preprocess.prefix_kinds import kinds_at, output_prefix, text_prefixes


@dataclass(frozen=True)
class PretrainInputs:
    """`texts` are tokenized together to one indexed file; `prefixes` exist already. `weights` (one per prefix) is None
    where none were given: then every input counts by its number of tokens."""

    texts: list[DatasetEntry]
    prefixes: list[Path]
    weights: list[float] | None = None


def resolve_inputs(
    dataset: DatasetChoice | None, dataset_dir: str | Path, *, field: str = "data.dataset"
) -> PretrainInputs:
    """Resolve `data.dataset`, or `data.eval_dataset` where `field` says so, for pretraining.

    Its forms are names, or an inline mapping whose file_name is a file, a folder, a prefix, or a list of these, where
    prefixes may alternate with weights: [0.3, prefix, 0.7, prefix].
    """
    if not isinstance(dataset, Mapping):
        return PretrainInputs(resolve_datasets(dataset, dataset_dir, field=field), [])
    file_name = dataset.get("file_name")
    if isinstance(file_name, str):
        names: list[Any] = [file_name]
        if "," in file_name and not Path(file_name).exists():
            names = [part.strip() for part in file_name.split(",")]
    else:
        names = list(file_name or [])
    names, weights = parse_blend(names, field=f"{field}.file_name")
    texts: list[DatasetEntry] = []
    prefixes: list[Path] = []
    for name in names:
        prefix = find_prefix(str(name), (Path(dataset_dir), Path()), where=f"{field}.file_name")
        if prefix is not None:
            prefixes.append(prefix)
        elif weights is not None:
            raise UserError(f"{field}.file_name: {name!r} has a weight, but no {name}.bin and {name}.idx exist")
        else:
            texts += resolve_datasets({**dataset, "file_name": name}, dataset_dir, field=field)
    if not names:
        texts = resolve_datasets(dataset, dataset_dir, field=field)
    return PretrainInputs(texts, prefixes, weights)


def find_prefix(name: str, folders: Sequence[Path], *, where: str) -> Path | None:
    """The prefix of an indexed file of text that `name` is, below one of the folders; it may end in .bin or .idx.

    None where it is no prefix. Raises UserError that begins with `where`: one of the two files is missing, or there is
    data of another kind.
    """
    stem = name.removesuffix(".bin").removesuffix(".idx")
    for prefix in (folder / stem for folder in folders):
        if indexed_exists(prefix):
            if (whole := output_prefix(prefix)) is not None and (kinds := kinds_at(whole)):
                raise UserError(f"{where}: {prefix} is one file of {kinds[0]} data, not pretraining text")
            return prefix
        for there, missing in ((bin_file, idx_file), (idx_file, bin_file)):
            if there(prefix).is_file():
                raise UserError(f"{where}: {there(prefix)} exists, but {missing(prefix)} does not")
        if not prefix.exists() and (kinds := kinds_at(prefix)):
            texts = " or ".join(str(path) for path in text_prefixes(prefix))
            raise UserError(
                f"{where}: {prefix} is an output prefix; "
                + (
                    f"give the text below it, {texts}"
                    if texts
                    else f"below it is {kinds[0]} data, not pretraining text"
                )
            )
    return None
