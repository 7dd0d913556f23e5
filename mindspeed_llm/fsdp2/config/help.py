"""`--help` and the argument reference, both generated from the dataclasses."""

import textwrap
from typing import Any

from mindspeed_llm.fsdp2.config.config import SECTIONS
from mindspeed_llm.fsdp2.config.fields import REQUIRED, FieldSpec, all_fields
from mindspeed_llm.fsdp2.config.inert import INERT
from mindspeed_llm.fsdp2.config.not_available import NOT_AVAILABLE

_INTRODUCTION = """\
usage: train_fsdp2.py [CONFIG.yaml] [--section.field value ...] [--check] [--debug] [--help]
       train_fsdp2.py --list-checkpoints OUTPUT_DIR

Train a model as CONFIG.yaml says; options win over the file. A list takes several values, separated by spaces; a
mapping is written as JSON; a boolean option without a value is true; null stands for no value.

  --check   validate everything and print the plan, without training
  --debug   show tracebacks (as MINDSPEED_DEBUG=1)
  --help    show this text
  --list-checkpoints OUTPUT_DIR   check the checkpoints of a run and show a table of them; nothing else happens
"""


def help_text() -> str:
    """The text of `--help`: usage, then every field with its values, default and doc."""
    lines = [_INTRODUCTION]
    for section, section_class in SECTIONS.items():
        lines.append(f"{section}: {section_class.__doc__}")
        for spec in section_fields(section):
            default = "required" if spec.default is REQUIRED else f"default {shown(spec.default)}"
            lines.append(f"  --{spec.key}  ({spec.expected}; {default})")
            lines.append(textwrap.fill(full_doc(spec), width=112, initial_indent=" " * 6, subsequent_indent=" " * 6))
        lines.append("")
    return "\n".join(lines)


def section_fields(section: str) -> list[FieldSpec]:
    """The fields of a section in the order of its dataclass."""
    return [spec for spec in all_fields().values() if spec.section == section]


def full_doc(spec: FieldSpec) -> str:
    """The doc of a field, with what the tables of missing and idle features say about it."""
    doc = spec.doc
    if spec.key in NOT_AVAILABLE:
        row = NOT_AVAILABLE[spec.key]
        other = "Some values are not" if row.refused else "Other values than the default are not"
        doc += f" {other} available yet: {row.reason}."
    if spec.key in INERT:
        doc += f" No effect here: {INERT[spec.key]}."
    return doc


def shown(value: Any) -> str:
    """A value as YAML has it."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list):
        return "[" + ", ".join(shown(item) for item in value) + "]"
    return str(value)
