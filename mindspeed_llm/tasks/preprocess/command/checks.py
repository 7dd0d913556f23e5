"""Checks of the flags among each other: which belong to which handler, which need another one, which have no effect."""

from __future__ import annotations

from collections.abc import Mapping

from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.preprocess.command.arguments import FLAGS, Arguments, flag_of
from mindspeed_llm.tasks.preprocess.command.refused import INERT
from mindspeed_llm.tasks.preprocess.handler_flags import USED_BY, check_flag
from mindspeed_llm.tasks.preprocess.handlers import Handler

# Flag that needs the other one (with a value that counts as yes).
_NEEDS_OF_RECORDS = {"neat_pack": "pack", "pack": "seq_length", "keep_newlines": "split_sentences"}
_NEEDS_OF_MODE = {
    "num": "inspect",
    "html": "inspect",
    "whole": "inspect",
}
_IN_MERGE = {"input", "output_prefix", "merge_group_keys", "check", "debug"}
_IN_INSPECT = {
    "inspect", "num", "html", "whole", "debug", "tokenizer_type", "tokenizer_name_or_path", "tokenizer_not_use_fast",
    "tokenizer_model", "vocab_file", "merge_file",
}  # fmt: skip


_TOKENIZER_FILES = {"tokenizer_name_or_path", "tokenizer_not_use_fast", "tokenizer_model", "vocab_file", "merge_file"}
_USED_FILES = {
    "PretrainedFromHF": {"tokenizer_name_or_path", "tokenizer_not_use_fast"},
    "GPTSentencePieceTokenizer": {"tokenizer_model", "tokenizer_name_or_path"},
    "GPT2BPETokenizer": {"vocab_file", "merge_file"},
    "MagistralTokenizer": {"tokenizer_model", "tokenizer_name_or_path"},
}


def notices(arguments: Arguments) -> list[str]:
    """A line for each given flag that has no effect, with the reason."""
    lines = [f"no effect from {flag}: {INERT[flag]}" for flag in FLAGS if flag in INERT and _given(arguments, flag)]
    if not arguments.merge_group_keys and (idle := _TOKENIZER_FILES - _USED_FILES[arguments.tokenizer_type]):
        used = {*Arguments.__dataclass_fields__} - idle
        lines += _idle(arguments, used, f"with --tokenizer-type {arguments.tokenizer_type}: other files are read")
    if arguments.merge_group_keys:
        lines += _idle(arguments, _IN_MERGE, "with --merge-group-keys: parts are joined as they are")
    elif arguments.inspect is not None:
        lines += _idle(arguments, _IN_INSPECT, "with --inspect: it only reads")
    return lines


def _given(arguments: Arguments, flag: str) -> bool:
    return FLAGS[flag].name in arguments.given


def _idle(arguments: Arguments, used: set[str], reason: str) -> list[str]:
    idle = [flag for flag, spec in FLAGS.items() if spec.name in arguments.given - used and flag not in INERT]
    return [f"no effect from {', '.join(idle)} {reason}"] if idle else []


def check_mode(arguments: Arguments) -> None:
    """Raise UserError where flags are missing or contradict each other, whatever the handler."""
    if arguments.inspect is not None and arguments.merge_group_keys:
        raise UserError("--inspect and --merge-group-keys are two different things; give one of them")
    _check_needs(arguments, _NEEDS_OF_MODE)
    if arguments.inspect is not None:
        return
    for name in ("input", "output_prefix"):
        if not getattr(arguments, name):
            raise UserError(f"{flag_of(name)} is missing. --help shows all flags")
    prefix = arguments.output_prefix
    if prefix is not None and (prefix.endswith("/") or prefix.rpartition("/")[2] in (".", "..")):
        raise UserError(
            f"--output-prefix {prefix} is a folder; add the beginning of the file names, e.g. {prefix.rstrip('/')}/data"
        )
    if arguments.streaming and arguments.n_subs > 1:
        raise UserError(
            f"--n-subs {arguments.n_subs} needs the number of records, which --streaming does not count; leave one out"
        )


def _check_needs(arguments: Arguments, needs: Mapping[str, str]) -> None:
    for name, other in needs.items():
        if name in arguments.given and not getattr(arguments, other):
            raise UserError(f"{flag_of(name)} needs {flag_of(other)}")


def check_handler(arguments: Arguments, handler: Handler) -> None:
    """Raise UserError for a flag that the handler has no use for, or that needs another one."""
    for name in USED_BY:
        if name in arguments.given and _has_effect(arguments, name):
            check_flag(name, handler)
    # Only now: to another handler the flag that is missing would be of no use either.
    _check_needs(arguments, _NEEDS_OF_RECORDS)
    if not handler.formatting and arguments.dataset_dir is None:
        raise UserError(f"{handler.name} needs --dataset-dir, the folder of dataset_info.json")
    if arguments.interleave_probs is not None and arguments.mix_strategy == "concat":
        raise UserError("--interleave-probs needs --mix-strategy interleave_under or interleave_over, found concat")
    for key in arguments.json_keys:
        if "/" in key or not key:
            raise UserError(f"--json-keys {key!r}: the column is a part of the name of a file, and cannot hold '/'")
    for key in arguments.dataset_additional_keys:
        if "/" in key or not key or key in handler.keys:
            raise UserError(
                f"--dataset-additional-keys {key!r}: the key is a part of the name of a file; it cannot hold '/', nor "
                f"be one of {', '.join(handler.keys)}"
            )


def _has_effect(arguments: Arguments, name: str) -> bool:
    """Whether a given flag says anything else than its default."""
    return getattr(arguments, name) != FLAGS[flag_of(name)].default


def probabilities(arguments: Arguments) -> list[float] | None:
    """The numbers of --interleave-probs. Raises UserError where they are none."""
    if arguments.interleave_probs is None:
        return None
    try:
        return [float(part) for part in arguments.interleave_probs.split(",")]
    except ValueError as error:
        raise UserError(
            f"--interleave-probs {arguments.interleave_probs}: expected numbers separated by commas, e.g. 0.7,0.3"
        ) from error
