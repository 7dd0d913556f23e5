"""What the dataclasses say about their fields: name, type, range, default, and the doc string under the field."""

import ast
import dataclasses
import inspect
import textwrap
import types
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from mindspeed_llm.fsdp2.config.config import SECTIONS
from mindspeed_llm.fsdp2.config.types import Range

REQUIRED = dataclasses.MISSING


@dataclass(frozen=True, kw_only=True)
class FieldSpec:
    """One field of one section.

    `kind` is the Python type of a value (`str`, `int`, `float`, `bool`), `list` with `item` the type of its items, or
    `dict` for a choice of data sets (mapping, name or list of names). `choices` is empty unless the field is a choice.
    """

    section: str
    name: str
    kind: type
    item: type | None
    optional: bool
    choices: tuple[str, ...]
    range: Range | None
    default: Any
    doc: str

    @property
    def key(self) -> str:
        """`section.name`, as on the command line."""
        return f"{self.section}.{self.name}"

    @property
    def expected(self) -> str:
        """The values that the field takes, in words for an error message or a help text."""
        words = {str: "a text", int: "an integer", float: "a number", bool: "true or false"}
        if self.choices:
            text = "one of " + ", ".join(self.choices)
        elif self.kind is list:
            text = "a list of integers" if self.item is int else "a list of texts"
        elif self.kind is dict:
            text = "a mapping (JSON on the command line), a name or a list of names"
        else:
            text = words[self.kind]
        if self.range is not None:
            text += f" {self.range.describe()}"
        return text + (", or null" if self.optional else "")


@cache
def all_fields() -> dict[str, FieldSpec]:
    """Every field by its key `section.name`, in the order of the dataclasses."""
    specs = {}
    for section, section_class in SECTIONS.items():
        docs = field_docs(section_class)
        for field in dataclasses.fields(section_class):
            spec = _spec(section, field, docs.get(field.name, ""))
            specs[spec.key] = spec
    return specs


def field_docs(section_class: type) -> dict[str, str]:
    """The doc string under each field of a dataclass, in one line each, read from its source."""
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(section_class))).body
    assert isinstance(definition, ast.ClassDef)
    docs = {}
    for statement, following in zip(definition.body, definition.body[1:], strict=False):
        if (
            isinstance(statement, ast.AnnAssign)
            and isinstance(statement.target, ast.Name)
            and isinstance(following, ast.Expr)
            and isinstance(following.value, ast.Constant)
            and isinstance(following.value.value, str)
        ):
            docs[statement.target.id] = " ".join(following.value.value.split())
    return docs


def _spec(section: str, field: dataclasses.Field, doc: str) -> FieldSpec:
    default = field.default
    if field.default_factory is not dataclasses.MISSING:
        default = field.default_factory()
    members: list[Any] = [field.type]
    if get_origin(field.type) in (Union, types.UnionType):
        members = list(get_args(field.type))
    optional = type(None) in members
    members = [member for member in members if member is not type(None)]
    kind: Any = members[0]
    item, choices, bounds = None, (), None
    if get_origin(kind) is Annotated:
        kind, bounds = get_args(kind)
    if get_origin(kind) is Literal:
        choices = get_args(kind)
        kind = str
    elif any(get_origin(member) is dict for member in members):
        kind = dict
    elif get_origin(kind) is list:
        (item,) = get_args(kind)
        kind = list
    return FieldSpec(
        section=section,
        name=field.name,
        kind=kind,
        item=item,
        optional=optional,
        choices=choices,
        range=bounds,
        default=default,
        doc=doc,
    )
