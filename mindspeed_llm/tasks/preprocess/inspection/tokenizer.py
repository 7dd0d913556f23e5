"""The tokenizer that decodes a data set: the given one, or the one that its summary names."""

from collections.abc import Mapping
from typing import Any

from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.preprocess.inspection.locating import Location

_HINT = "name the tokenizer with --tokenizer-name-or-path"


def find_tokenizer(location: Location, given: Any | None) -> tuple[Any, str | None]:
    """(tokenizer, a warning or None). Raises UserError where the summary names none, or one that cannot be read."""
    entry: Mapping[str, Any] = (location.summary or {}).get("tokenizer") or {}
    tokenizer = given
    if tokenizer is None:
        tokenizer = _load(location, entry)
    identity = getattr(tokenizer, "identity", None)
    if entry.get("identity") and identity is not None and identity() != entry["identity"]:
        which = "is not the one that" if given is not None else "has changed since it"
        return tokenizer, f"the tokenizer {which} made the data; what is shown may be wrong"
    return tokenizer, None


def _load(location: Location, entry: Mapping[str, Any]) -> Any:
    from mindspeed_llm.tasks.preprocess.tokenizers import TokenizerOptions, load_tokenizer

    if not entry:
        lack = "has no summary that names" if location.summary is None else "has a summary that does not name"
        raise UserError(f"--inspect {location.prefix}: the data set {lack} its tokenizer; {_HINT}")
    options = TokenizerOptions(
        kind=entry.get("type", "PretrainedFromHF"),
        name_or_path=entry.get("path"),
        model=entry.get("model"),
        vocab_file=entry.get("vocab_file"),
        merge_file=entry.get("merge_file"),
        use_fast=entry.get("use_fast", True),
    )
    try:
        return load_tokenizer(options)
    except UserError as error:
        raise UserError(f"--inspect {location.prefix}: the tokenizer of its summary: {error}; {_HINT}") from error
