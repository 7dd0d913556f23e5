"""What kind of data stands under a prefix, to tell a user who named data of another kind."""

import difflib
from pathlib import Path

from mindspeed_llm.tasks.preprocess.handlers import Kind
from mindspeed_llm.tasks.preprocess.indexed_format import idx_file, indexed_exists
from mindspeed_llm.tasks.preprocess.sample_store import key_prefix

_ENDINGS = ("_document", "_sentence")


def kinds_at(prefix: Path) -> list[Kind]:
    """The kinds of data whose files stand under the prefix."""

    def has(key: str) -> bool:
        return indexed_exists(key_prefix(prefix, key))

    kinds: list[Kind] = []
    if has("chosen_input_ids"):
        kinds.append("pairwise")
    if has("input_ids"):
        kinds.append("instruction" if has("labels") else "prompt")
    if indexed_exists(prefix) or text_prefixes(prefix):
        kinds.append("pretrain")
    return kinds


def text_prefixes(prefix: Path) -> list[Path]:
    """Prefixes of the pretraining text that was written under an output prefix."""
    return [path for ending in _ENDINGS if indexed_exists(path := Path(f"{prefix}_text{ending}"))]


def describe(prefix: Path) -> str:
    """What there is under the prefix, or near it, as the end of a message."""
    whole = output_prefix(prefix)
    if whole is not None:
        return f"this is one file of a data set; give its prefix, {whole}"
    found = kinds_at(prefix)
    if found:
        return f"there is data of kind {' and '.join(found)}"
    if prefix.is_file():
        return "this is a file of records; preprocess it first"
    names = [path.name.split("_packed_")[0] for path in prefix.parent.glob("*_packed_*_document.idx")]
    near = difflib.get_close_matches(prefix.name, sorted(set(names)), n=1)
    return f"did you mean {prefix.parent / near[0]}?" if near else f"{prefix.parent} has no data of this name"


def output_prefix(prefix: Path) -> Path | None:
    """The output prefix of samples, where `prefix` names one of the files below it."""
    name = prefix.name.removesuffix(".bin").removesuffix(".idx")
    if "_packed_" not in name or not idx_file(prefix.with_name(name)).is_file():
        return None
    return prefix.with_name(name.rpartition("_packed_")[0])
