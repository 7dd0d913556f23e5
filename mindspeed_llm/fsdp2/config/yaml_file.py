"""Reads a YAML configuration strictly (unique keys, sections that are mappings, the line of every key) and writes one.

Plain scalars follow YAML 1.2: only `true` and `false` are booleans, `1e-5` is a number, `1:30` and dates are texts.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from mindspeed_llm.errors import UserError
from mindspeed_llm.fsdp2.config.suggestions import near_files


@dataclass(frozen=True)
class YamlSections:
    """A YAML file as `values[section][key]`, with `lines[section, key]` and `lines[section, None]` counted from 1."""

    path: Path
    values: dict[str, dict[str, Any]]
    lines: dict[tuple[str, str | None], int]

    def where(self, section: str, key: str | None = None) -> str:
        """File and line of a key or a section, for an error message."""
        line = self.lines.get((section, key))
        return f"{self.path}, line {line}" if line else str(self.path)


class _Loader(yaml.SafeLoader):
    """SafeLoader with the scalars of YAML 1.2."""

    # An own table; the inherited one is shared with everybody who uses yaml.
    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}


class _Dumper(yaml.SafeDumper):
    """SafeDumper that quotes a text which `_Loader`, or any reader of YAML 1.1, would take for something else."""

    yaml_implicit_resolvers = {first: list(rows) for first, rows in yaml.SafeDumper.yaml_implicit_resolvers.items()}


for _tag, _pattern, _first in (
    ("tag:yaml.org,2002:null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("tag:yaml.org,2002:bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("tag:yaml.org,2002:int", r"[-+]?(?:0|[1-9][0-9_]*)|0x[0-9a-fA-F]+", list("-+0123456789")),
    (
        "tag:yaml.org,2002:float",
        r"[-+]?(?:[0-9][0-9_]*\.[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?|[-+]?[0-9][0-9_]*[eE][-+]?[0-9]+"
        r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
        list("-+0123456789."),
    ),
    ("tag:yaml.org,2002:merge", r"<<", ["<"]),
):
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(_tag, re.compile(f"^(?:{_pattern})$"), _first)


def dump_yaml(values: dict[str, Any]) -> str:
    """`values` as YAML that `read_yaml` reads back equal."""
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def read_yaml(path: Path) -> YamlSections:
    """The sections of the YAML file `path`.

    Raises `UserError` naming the file, and the line where there is one: a missing or unreadable file, bytes that are no
    UTF-8, a syntax error, a key that stands twice, an empty file, a root or a section that is no mapping. A section
    without content is an empty one.
    """
    text = _read_text(path)
    try:
        loader = _Loader(text)
        root = loader.get_single_node()
        _refuse_duplicates(root, set())
        content = None if root is None else loader.construct_document(root)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f"{path}, line {mark.line + 1}, column {mark.column + 1}" if mark else f"{path}"
        raise UserError(f"{where}: {error.problem}. This is not valid YAML.") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UserError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from None
    if content is None:
        raise UserError(f"{path} is empty; a configuration has at least the sections model and training")
    if not isinstance(content, dict):
        raise UserError(
            f"{path}, line {root.start_mark.line + 1}: the file holds a {_kind(content)}; expected sections such as "
            "'model:' with indented fields under them"
        )
    return _with_lines(path, root, content)


def _read_text(path: Path) -> str:
    if path.is_dir():
        raise UserError(f"{path} is a folder; expected a YAML file")
    if not path.exists():
        raise UserError(f"{path} does not exist" + _near(path))
    try:
        # utf-8-sig: editors on Windows put a byte order mark in front.
        return path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is no UTF-8 text (byte {error.start + 1}); save it as UTF-8") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None


def _near(path: Path) -> str:
    if not path.parent.is_dir():
        return f"; the folder {path.parent} does not exist either"
    names = near_files(path)
    return f"; its folder holds {', '.join(names)}" if names else f"; its folder {path.parent} holds no YAML file"


def _refuse_duplicates(node: yaml.Node | None, seen: set[int]) -> None:
    """Raise where a mapping below `node` has a key twice; YAML readers usually keep the last in silence."""
    if id(node) in seen or not isinstance(node, yaml.CollectionNode):
        return
    seen.add(id(node))
    first_lines: dict[str, int] = {}
    for child in node.value:
        if isinstance(node, yaml.SequenceNode):
            _refuse_duplicates(child, seen)
            continue
        key, value = child
        if isinstance(key, yaml.ScalarNode):
            if key.value in first_lines:
                problem = f"the key {key.value!r} stands twice, first in line {first_lines[key.value]}"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
            first_lines[key.value] = key.start_mark.line + 1
        _refuse_duplicates(value, seen)


def _with_lines(path: Path, root: yaml.MappingNode, content: dict[Any, Any]) -> YamlSections:
    lines: dict[tuple[str, str | None], int] = {}
    for section_node, fields_node in root.value:
        lines[section_node.value, None] = section_node.start_mark.line + 1
        if isinstance(fields_node, yaml.MappingNode):
            for field_node, _ in fields_node.value:
                lines[section_node.value, field_node.value] = field_node.start_mark.line + 1
    found = YamlSections(path, {}, lines)
    for section, fields in content.items():
        if fields is not None and not isinstance(fields, dict):
            raise UserError(
                f"{found.where(str(section))}: section '{section}' holds a {_kind(fields)}; expected indented fields "
                "such as 'key: value'"
            )
        found.values[str(section)] = {str(key): value for key, value in (fields or {}).items()}
    return found


def _kind(value: Any) -> str:
    names = {list: "list", str: "text", bool: "boolean", int: "number", float: "number"}
    return names.get(type(value), type(value).__name__)
