"""From the command line to `Arguments`, and `--help`."""

from __future__ import annotations

import argparse
import difflib
import json
import re
import textwrap
from collections.abc import Sequence
from dataclasses import Field
from pathlib import Path
from typing import Any, NoReturn

from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.preprocess.command.arguments import FLAGS, GROUPS, Arguments, flag_of
from mindspeed_llm.tasks.preprocess.command.refused import INERT, REFUSED, REFUSED_VALUES

_USAGE = """\
usage: preprocess_data.py --input PATH --output-prefix PREFIX --tokenizer-name-or-path PATH [flags]
       preprocess_data.py --input FOLDER --output-prefix PREFIX --merge-group-keys KEY [KEY ...]
       preprocess_data.py --inspect PREFIX [--num N] [--html FILE] [--whole]

Turn files of records into token ids with a loss mask, in Megatron's indexed format: <prefix>_<column>_document.bin/.idx
for pretraining, <prefix>_packed_<key>_document.bin/.idx for all other handlers, and <prefix>_summary.json with what
became of the records. Both backends read these files.
"""
_WIDTH = 112


class _Parser(argparse.ArgumentParser):
    """Reports mistakes as `UserError` instead of ending the process."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}. --help shows all flags")


def parse(argv: Sequence[str]) -> Arguments:
    """The arguments of the command line. Raises UserError: an unknown, refused or wrong flag; SystemExit: `--help`."""
    if "--help" in argv or "-h" in argv:
        print(help_text())
        raise SystemExit(0)
    _check_words(argv)
    parser = _Parser(add_help=False, allow_abbrev=False, argument_default=argparse.SUPPRESS)
    for flag, spec in FLAGS.items():
        parser.add_argument(flag, dest=spec.name, **_parsing(spec))
    found, others = parser.parse_known_args(argv)
    if others:
        raise _stray(others[0], argv)
    values: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in vars(found).items()
    }
    for name, value in values.items():
        if isinstance(value, tuple) and len(set(value)) < len(value):
            raise UserError(f"{flag_of(name)} {' '.join(value)}: the same name stands there twice")
    return Arguments(**values, given=frozenset(values))


def _check_words(argv: Sequence[str]) -> None:
    """Refuse flags, and values of flags, that are not available, with what to do."""
    for number, word in enumerate(argv):
        if not re.match("--?[a-zA-Z]", word):
            continue
        flag, has_value, value = word.partition("=")
        if flag in REFUSED:
            raise UserError(f"{flag} is not available: {REFUSED[flag]}")
        if flag not in FLAGS:
            raise UserError(f"unknown flag {flag}; {_nearest(flag)} --help shows all flags")
        if not has_value:
            value = argv[number + 1] if number + 1 < len(argv) else ""
        if (flag, value) in REFUSED_VALUES:
            raise UserError(f"{flag} {value} is not available: {REFUSED_VALUES[flag, value]}")


def _stray(word: str, argv: Sequence[str]) -> UserError:
    """The error for a word that is neither a flag nor a value of one."""
    before = argv[argv.index(word) - 1]
    if before in FLAGS and isinstance(FLAGS[before].default, bool):
        return UserError(f"{before} takes no value, found {word!r}: the flag alone switches it on")
    if Path(word).exists():
        return UserError(f"{word!r} belongs to no flag; to read several files name their folder with --input")
    return UserError(f"{word!r} belongs to no flag; a value with spaces must stand in quotes. --help shows all flags")


def _nearest(flag: str) -> str:
    wanted = flag.replace("_", "-").lower()
    close = difflib.get_close_matches(wanted, FLAGS, n=1, cutoff=0.6)
    # Of a long name often only a part is remembered.
    close = close or [name for name in FLAGS if wanted.strip("-") in name][:1]
    nearest = close[0] if close else max(FLAGS, key=lambda name: difflib.SequenceMatcher(None, wanted, name).ratio())
    return f"did you mean {nearest}?"


def _parsing(spec: Field[Any]) -> dict[str, Any]:
    if isinstance(spec.default, bool):
        return {"action": "store_true"}
    if isinstance(spec.default, tuple):
        return {"nargs": "+"}
    if "at_least" in spec.metadata:
        return {"type": _number(spec.metadata["at_least"])}
    if "values" in spec.metadata:
        return {"type": _one_of(spec.metadata["values"])}
    return {}


def _number(at_least: int) -> Any:
    def convert(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = at_least - 1
        if number < at_least:
            raise argparse.ArgumentTypeError(f"expected a whole number of {at_least} or more, found {text!r}")
        return number

    return convert


def _one_of(values: Sequence[str]) -> Any:
    def convert(text: str) -> str:
        # As the flags of boolean meaning are often written.
        wanted = text.lower() if text.lower() in values else text
        if wanted not in values:
            close = difflib.get_close_matches(text, values, n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise argparse.ArgumentTypeError(f"expected one of {', '.join(values)}, found {text!r}{hint}")
        return wanted

    return convert


def parse_json_object(flag: str, text: str) -> dict[str, Any]:
    """The JSON object that a flag holds. Raises UserError saying where the text is not one."""
    try:
        value = json.loads(text)
    except RecursionError as error:
        raise UserError(f"{flag}: JSON that is nested too deeply") from error
    except json.JSONDecodeError as error:
        raise UserError(
            f"{flag}: not valid JSON ({error.msg} at character {error.pos + 1}): {text}. Put it in single quotes, and "
            "names and values inside in double ones"
        ) from error
    if not isinstance(value, dict):
        raise UserError(f"{flag}: expected a JSON object, found {type(value).__name__}: {text}")
    return value


def help_text() -> str:
    """The text of `--help`."""
    # Only here: the lists of names come from tables that the common path does not need.
    from mindspeed_llm.tasks.preprocess.handlers import HANDLERS
    from mindspeed_llm.tasks.preprocess.templates import template_names

    lines = [_USAGE]
    for group, title in GROUPS.items():
        lines.append(title)
        for flag, spec in FLAGS.items():
            if spec.metadata["group"] == group:
                lines += _flag_lines(flag, spec)
        lines.append("")
    lines.append("Handlers (--handler-name):")
    for handler in HANDLERS.values():
        lines += [f"  {handler.name} ({handler.kind})", *_wrapped(handler.doc, indent=6)]
    lines += ["", "Templates (--prompt-type):"]
    lines += textwrap.wrap(
        ", ".join(template_names()), _WIDTH, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False
    )
    lines.append("")
    lines.append("Known from elsewhere, and refused:")
    for flag, reason in REFUSED.items():
        lines += _wrapped(f"{flag}: {reason}")
    for (flag, value), reason in REFUSED_VALUES.items():
        lines += _wrapped(f"{flag} {value}: {reason}")
    return "\n".join(lines)


def _flag_lines(flag: str, spec: Field[Any]) -> list[str]:
    default, metadata = spec.default, spec.metadata
    value = "|".join(metadata["values"]) if "values" in metadata else metadata.get("metavar", "")
    several = f" [{value} ...]" if isinstance(default, tuple) else ""
    doc = metadata["doc"]
    if default not in (None, False, ()):
        shown = " ".join(default) if isinstance(default, tuple) else default
        doc = f"{doc.removesuffix('.')} (default {shown})."
    if flag in INERT:
        doc += f" No effect here: {INERT[flag]}."
    return [f"  {flag} {value}{several}".rstrip(), *_wrapped(doc, indent=6)]


def _wrapped(text: str, indent: int = 2) -> list[str]:
    return textwrap.wrap(text, _WIDTH, initial_indent=" " * indent, subsequent_indent=" " * max(indent, 6))
