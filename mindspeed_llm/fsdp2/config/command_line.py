"""From the command line to a `Config`: defaults, then the YAML file, then options, each overriding the one before."""

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindspeed_llm.errors import UserError
from mindspeed_llm.fsdp2.config.config import SECRETS, SECTIONS, Config
from mindspeed_llm.fsdp2.config.fields import REQUIRED, FieldSpec, all_fields
from mindspeed_llm.fsdp2.config.help import help_text
from mindspeed_llm.fsdp2.config.suggestions import known_elsewhere, nearest, nearest_field, not_here
from mindspeed_llm.fsdp2.config.values import from_tokens, from_yaml
from mindspeed_llm.fsdp2.config.yaml_file import YamlSections, read_yaml

USAGE = "usage: train_fsdp2.py [CONFIG.yaml] [--section.field value ...] [--check] [--debug] [--help]"
LIST_CHECKPOINTS = "--list-checkpoints"
_LIST_USAGE = f"usage: train_fsdp2.py {LIST_CHECKPOINTS} OUTPUT_DIR"
_SWITCHES = ("--check", "--debug", "--help", "-h")


@dataclass(frozen=True)
class Invocation:
    """What a command line asks for. `config_file` is None where everything is given by options."""

    config: Config
    config_file: Path | None
    check_only: bool
    debug: bool


def parse_command_line(argv: list[str]) -> Invocation:
    """Parse `[CONFIG.yaml] [--section.field value ...] [--check] [--debug] [--help]`.

    The YAML file comes first. Options are `--section.field value` or `--section.field=value`; a list takes several
    values, a bare boolean option is true, and the last of equal options counts. `--help` prints all fields and exits
    with code 0 (`SystemExit`). Raises `UserError` for anything unknown, misplaced or of the wrong type.
    """
    switches = {token for token in argv if token in _SWITCHES}
    rest = [token for token in argv if token not in _SWITCHES]
    if switches & {"--help", "-h"}:
        if os.environ.get("RANK", "0") == "0":
            print(help_text(), file=sys.stdout)
        raise SystemExit(0)
    if not rest:
        raise UserError(f"no configuration is given\n{USAGE}")

    config_file = None
    values: dict[str, Any] = {}
    if not rest[0].startswith("-"):
        config_file = Path(rest.pop(0))
        if config_file.suffix not in (".yaml", ".yml"):
            raise UserError(
                f"the first argument {str(config_file)!r} is neither a YAML file (.yaml or .yml) nor an option\n{USAGE}"
            )
        values.update(_yaml_values(read_yaml(config_file)))
    values.update(_option_values(rest))
    return Invocation(
        config=_build(values, config_file),
        config_file=config_file,
        check_only="--check" in switches,
        debug="--debug" in switches,
    )


def folder_to_list(argv: list[str]) -> Path | None:
    """The folder of `--list-checkpoints OUTPUT_DIR`, which needs no configuration; None where that is not asked for.

    Raises:
        UserError: the folder is missing, or other arguments stand beside it.
    """
    tokens = [part for token in argv for part in _split_listing(token) if part != "--debug"]
    if LIST_CHECKPOINTS not in tokens or {"--help", "-h"} & set(tokens):
        return None
    position = tokens.index(LIST_CHECKPOINTS)
    if not [value for value in tokens[position + 1 : position + 2] if value and not value.startswith("--")]:
        raise UserError(f"command line: {LIST_CHECKPOINTS} needs the output folder of a run\n{_LIST_USAGE}")
    if others := [*tokens[:position], *tokens[position + 2 :]]:
        raise UserError(f"command line: {LIST_CHECKPOINTS} stands alone, without {' '.join(others)}\n{_LIST_USAGE}")
    return Path(tokens[position + 1])


def _split_listing(token: str) -> list[str]:
    option, equals, value = token.partition("=")
    return [option, value] if option == LIST_CHECKPOINTS and equals else [token]


def _yaml_values(found: YamlSections) -> dict[str, Any]:
    values = {}
    for section, fields in found.values.items():
        if section not in SECTIONS:
            if reason := not_here(section):
                raise UserError(f"{found.where(section)}: unknown section '{section}'; {reason}")
            raise UserError(
                f"{found.where(section)}: unknown section '{section}'; the sections are {', '.join(SECTIONS)}"
                f" (nearest: {nearest(section, SECTIONS)})"
            )
        for name, value in fields.items():
            spec = all_fields().get(f"{section}.{name}")
            if spec is None:
                hint = not_here(section, name) or f"did you mean {nearest_field(section, name)}?"
                raise UserError(f"{found.where(section, name)}: unknown field {section}.{name}; {hint}")
            try:
                values[spec.key] = from_yaml(spec, value)
            except ValueError as error:
                raise UserError(f"{found.where(section, name)}: {spec.key}: {_mismatch(spec, error)}") from None
    return values


def _option_values(tokens: list[str]) -> dict[str, Any]:
    values = {}
    position = 0
    while position < len(tokens):
        option, equals, attached = tokens[position].partition("=")
        position += 1
        spec = _option_spec(option)
        following = [attached] if equals else []
        if not equals:
            while position < len(tokens) and not tokens[position].startswith("--"):
                following.append(tokens[position])
                position += 1
        try:
            values[spec.key] = from_tokens(spec, following)
        except ValueError as error:
            raise UserError(f"command line: --{spec.key}: {_mismatch(spec, error)}") from None
    return values


def _option_spec(option: str) -> FieldSpec:
    key = option.removeprefix("--")
    spec = all_fields().get(key)
    if option.startswith("--") and spec is not None:
        return spec
    if not option.startswith("--"):
        if option.endswith((".yaml", ".yml")):
            raise UserError(f"command line: the YAML file {option!r} must be the first argument\n{USAGE}")
        raise UserError(f"command line: {option!r} is no option (--section.field value)\n{USAGE}")
    section, dot, name = key.partition(".")
    if not dot:
        # A field without its section, or a misspelt switch.
        if reason := not_here("", key):
            raise UserError(f"command line: unknown option {option}; {reason}")
        owners = [field_key for field_key, field in all_fields().items() if field.name == key.replace("-", "_")]
        switches = ("check", "debug", "help", "list-checkpoints")
        near = owners[0] if owners else known_elsewhere(key) or nearest(key, (*switches, *all_fields()))
        raise UserError(f"command line: unknown option {option}; did you mean --{near}?")
    hint = not_here(section, name) or f"did you mean --{nearest_field(section, name)}?"
    raise UserError(f"command line: unknown option {option}; {hint}")


def _mismatch(spec: FieldSpec, error: ValueError) -> str:
    found = "the value is not accepted" if spec.key in SECRETS else str(error)
    return f"{found}. Expected {spec.expected}."


def _build(values: dict[str, Any], config_file: Path | None) -> Config:
    missing = [key for key, spec in all_fields().items() if spec.default is REQUIRED and key not in values]
    if missing:
        source = f"{config_file} and the command line do not give" if config_file else "the command line does not give"
        raise UserError(
            f"{source} {' and '.join(missing)}, which a run needs: set it in the YAML file or by --{missing[0]}"
        )
    sections = {
        name: section_class(
            **{key.partition(".")[2]: value for key, value in values.items() if key.partition(".")[0] == name}
        )
        for name, section_class in SECTIONS.items()
    }
    return Config(**sections)
