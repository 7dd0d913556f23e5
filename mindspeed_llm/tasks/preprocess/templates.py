"""Chat templates as data: the entries of `configs/finetune/templates.json`, parsed and checked.

A slot is a list of pieces. A piece is text with the placeholders {{content}}, {{idx}}, {{name}}, {{arguments}}, or a
token: {"token": X} is the id of X by look-up, ["bos_token"] and ["eos_token"] are the tokenizer's own. Placeholders are
filled in one pass, so what stands in the content is never taken for a placeholder.
"""

import difflib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.preprocess.tool_formats import TOOL_FORMATS

TEMPLATES_FILE = Path(__file__).resolve().parents[3] / "configs" / "finetune" / "templates.json"

_PLACEHOLDER = re.compile(r"\{\{(content|idx|name|arguments)\}\}")
_DEFAULT_THOUGHT_WORDS = ("<think>\n", "\n</think>\n\n")
_ACTION_LINES = "Action: {{name}}\nAction Input: {{arguments}}"
_REASONING = {None: False, "Template": False, "ReasoningTemplate": True}


@dataclass(frozen=True)
class SpecialToken:
    """A piece that stands for one token id: a named token, or `bos_token` / `eos_token` of the tokenizer."""

    name: str


Piece = str | SpecialToken


@dataclass(frozen=True)
class Slot:
    """A format with placeholders: `pieces` in order, `join` between contents when several fill one turn."""

    pieces: tuple[Piece, ...] = ()
    join: str = "\n"

    def fill(self, **values: str) -> list[Piece]:
        """Return the pieces with the placeholders replaced; empty text pieces are left out."""
        filled = [
            piece if isinstance(piece, SpecialToken) else _PLACEHOLDER.sub(lambda m: values.get(m[1], m[0]), piece)
            for piece in self.pieces
        ]
        return [piece for piece in filled if piece != ""]

    def has(self, placeholder: str) -> bool:
        """Whether a text piece holds the placeholder."""
        return any(isinstance(piece, str) and f"{{{{{placeholder}}}}}" in piece for piece in self.pieces)


@dataclass(frozen=True)
class Template:
    """One chat template. `efficient_eos`: the reply is closed by the label of the next turn's first token."""

    name: str
    prefix: Slot
    system: Slot
    user: Slot
    assistant: Slot
    observation: Slot
    function: Slot
    separator: Slot
    default_system: str
    stop_words: tuple[str, ...]
    thought_words: tuple[str, str]
    reasoning: bool
    efficient_eos: bool
    replace_eos: bool
    tool_format: str

    def with_options(self, *, default_system: str | None = None, tool_format: str | None = None) -> "Template":
        """Return the template with the user's system text and tool format in place of its own."""
        changes: dict[str, Any] = {}
        if default_system is not None:
            changes["default_system"] = default_system
        if tool_format is not None:
            changes["tool_format"] = _checked_tool_format(tool_format)
            eos = [] if self.efficient_eos else [SpecialToken("eos_token")]
            if tool_format == "default":
                changes["function"] = Slot((_ACTION_LINES, *eos))
            elif not self.function.has("content"):
                # Tool formats that write whole calls stand where a reply stands.
                changes["function"] = self.assistant
        return replace(self, **changes)


def template_names(file: Path = TEMPLATES_FILE) -> list[str]:
    """Names of the templates in the file."""
    return list(_entries(file))


def load_template(name: str, file: Path = TEMPLATES_FILE) -> Template:
    """Load a template by name; raises UserError with the nearest name when there is none."""
    entries = _entries(file)
    if name not in entries:
        near = difflib.get_close_matches(name, entries, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise UserError(
            f"data.template: {name!r} is not a template; {hint}expected one of {', '.join(sorted(entries))}, or null "
            "for the tokenizer's own chat template"
        )
    return _parse(entries[name])


def _checked_tool_format(name: str) -> str:
    if name not in TOOL_FORMATS:
        raise UserError(f"data.tool_format: {name!r}; expected one of {', '.join(TOOL_FORMATS)}")
    return name


@cache
def _entries(file: Path) -> dict[str, Mapping[str, Any]]:
    return {entry["name"]: entry for entry in json.loads(file.read_text(encoding="utf-8"))}


def _parse(entry: Mapping[str, Any]) -> Template:
    efficient_eos = entry.get("efficient_eos", False)
    eos: list[Any] = [] if efficient_eos else [["eos_token"]]

    def slot(key: str, default: list[Any]) -> Slot:
        given = entry.get(key) or {}
        return Slot(tuple(map(_piece, given.get("slots", default))), given.get("join", "\n"))

    user = slot("format_user", ["{{content}}"])
    template_class = entry.get("template_class")
    if template_class not in _REASONING:
        raise UserError(f"template {entry['name']!r}: template_class {template_class!r} is not available")
    tools = entry.get("format_tools") or {}
    return Template(
        name=entry["name"],
        prefix=slot("format_prefix", []),
        system=slot("format_system", ["{{content}}"]),
        user=user,
        assistant=slot("format_assistant", ["{{content}}", *eos]),
        observation=slot("format_observation", list(user.pieces)),
        function=slot("format_function", [_ACTION_LINES, *eos]),
        separator=slot("format_separator", []),
        default_system=entry.get("default_system", ""),
        stop_words=tuple(entry.get("stop_words", ())),
        thought_words=tuple(entry.get("thought_words", _DEFAULT_THOUGHT_WORDS)),
        reasoning=_REASONING[template_class],
        efficient_eos=efficient_eos,
        replace_eos=entry.get("replace_eos", False),
        tool_format=_checked_tool_format(tools.get("tool_format", "default")),
    )


def _piece(raw: Any) -> Piece:
    if isinstance(raw, str | SpecialToken):
        return raw
    if isinstance(raw, Mapping):
        return SpecialToken(raw["token"])
    (name,) = raw
    return SpecialToken(name)
