"""Chat templates as data: the entries of `configs/finetune/templates.json`, parsed and checked.

A slot is a list of pieces. A piece is text with the placeholders {{content}}, {{idx}}, {{name}}, {{arguments}}, or a
token: {"token": X} is the id of X by look-up, ["bos_token"] and ["eos_token"] are the tokenizer's own. Placeholders are
filled in one pass, so what stands in the content is never taken for a placeholder.

A plain name renders the format that the model was trained with, as its published chat template writes it: `qwen3`,
`glm4`, `glm4_moe`, `gpt_oss`, `gemma`, `llama2`, `mistral`, `mixtral`, `deepseek2`, `chatglm2`, `chatglm3`,
`minicpm3`, `bailing_mini`, `hunyuan`, `deepseek4`. The name with `_legacy` is the layout that Ascend's MindSpeed-LLM
gives the same name where it differs from that format, for data and models made with it. Both are entries of the file;
`layouts/` turns them into text.
"""

import difflib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.preprocess.tool_formats import TOOL_FORMATS
from mindspeed_llm.valid_text import invalid_part

TEMPLATES_FILE = Path(__file__).resolve().parents[3] / "configs" / "finetune" / "templates.json"

_PLACEHOLDER = re.compile(r"\{\{(\w+)\}\}")
_DEFAULT_THOUGHT_WORDS = ["<think>\n", "\n</think>\n\n"]


@dataclass(frozen=True)
class SpecialToken:
    """A piece that stands for one token id: a named token, or `bos_token` / `eos_token` of the tokenizer."""

    name: str


Piece = str | SpecialToken


@dataclass(frozen=True)
class Slot:
    """A format with placeholders: `pieces` in order, `join` between contents or calls when several fill one turn."""

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
class Thinking:
    """How a template writes the thoughts of replies, between the words `opening` and `closing`.

    `parsed` False: thoughts are part of a reply's text, known by the exact words, and stand in every turn. `parsed`
    True: a thought is taken out of the reply (<think>..</think>, or the record's own field), trimmed of `strip` (None:
    white space) and written anew, but only in replies after the last question. `empty` says which replies without a
    thought get an empty one; `no_thinking_mark` closes every question when thinking is off.
    """

    opening: str
    closing: str
    parsed: bool = False
    empty: Literal["every", "last", "none"] = "every"
    strip: str | None = "\n"
    no_thinking_mark: str = ""


@dataclass(frozen=True)
class Template:
    """One chat template; the fields are those of the file, see `_KEYS` for their meaning."""

    name: str
    layout: Literal["slots", "harmony", "deepseek4"]
    prefix: Slot
    system: Slot
    tools: Slot | None
    user: Slot
    assistant: Slot
    observation: Slot
    function: Slot
    preface: Slot
    separator: Slot
    default_system: str
    system_end: str
    system_in_user: bool
    strip: tuple[str, ...]
    first_index: int
    role_marks: tuple[str, str] | None
    stop_words: tuple[str, ...]
    thinking: Thinking
    reasoning: bool
    efforts: dict[str, str] = field(hash=False)
    default_effort: str
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
            if self.layout != "slots":
                raise UserError(
                    f"data.tool_format: {tool_format!r}, but template {self.name!r} writes tools in its model's own "
                    "way only; leave tool_format out"
                )
            eos = [] if self.efficient_eos else [SpecialToken("eos_token")]
            if self.function.pieces == ("{{content}}", *eos) or not self.function.has("content"):
                # The template says nothing of its own about where whole calls stand: where a reply does.
                changes["function"] = self.assistant
        return replace(self, **changes)


def template_names(file: Path = TEMPLATES_FILE) -> list[str]:
    """Names of the templates in the file."""
    return list(_entries(file))


def load_template(name: str, file: Path = TEMPLATES_FILE) -> Template:
    """Load a template by name; raises UserError with the nearest name when there is none, and where the file has no
    valid one.
    """
    entries = _entries(file)
    if name not in entries:
        near = difflib.get_close_matches(name, entries, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise UserError(
            f"data.template: {name!r} is not a template; {hint}expected one of {', '.join(sorted(entries))}, or null "
            "for the tokenizer's own chat template"
        )
    return _parse(entries[name], entries, file)


def _checked_tool_format(name: str) -> str:
    if name not in TOOL_FORMATS:
        raise UserError(f"data.tool_format: {name!r}; expected one of {', '.join(TOOL_FORMATS)}")
    return name


@cache
def _entries(file: Path) -> dict[str, Mapping[str, Any]]:
    try:
        entries = json.loads(file.read_text(encoding="utf-8"))
        if reason := invalid_part(entries, "template"):
            raise UserError(f"templates file {file}: {reason}; expected valid text")
        return {entry["name"]: entry for entry in entries}
    except OSError as error:
        raise UserError(f"templates file {file}: {error.strerror}") from error
    except (json.JSONDecodeError, UnicodeDecodeError, TypeError, KeyError) as error:
        raise UserError(f"templates file {file}: expected a JSON list of objects with a name ({error})") from error


_CLASSES: dict[str | None, dict[str, Any]] = {
    None: {},
    "Template": {},
    "LFDefaultTemplate": {"format_separator": {"slots": []}},
    "Llama2Template": {"system_in_user": True},
    "ReasoningTemplate": {},
    "HarmonyTemplate": {},
    "DeepSeek4Template": {},
}
"""`template_class` of an entry -> what it sets; the reasoning and own-layout classes are read in `_parse`."""

_LAYOUTS: dict[str | None, Literal["harmony", "deepseek4"]] = {
    "HarmonyTemplate": "harmony",
    "DeepSeek4Template": "deepseek4",
}

_KEYS = {
    "name",
    "same_as",  # another template's name: this entry is a second name for it
    "template_class",
    "format_prefix",  # begins every conversation
    "format_system",  # `end`: text that closes every system block
    "format_tools",  # with slots: a block of its own before the system block; without: in the system block
    "format_user",
    "format_assistant",
    "format_observation",  # `join` stands between the results of parallel calls
    "format_function",  # {{content}}: calls as the tool format writes them; or {{name}} and {{arguments}}
    "format_preface",  # text in front of calls
    "format_separator",  # between a reply and the next question
    "default_system",
    "system_in_user",  # the system block stands inside the first question
    "strip",  # roles whose text is trimmed of white space
    "first_index",  # {{idx}} of the first turn
    "role_marks",  # marks of user and observation turns; the one that follows a reply is the reply's end mark
    "stop_words",
    "thought_words",
    "thinking",  # the fields of `Thinking`; makes the template a reasoning template
    "efforts",  # reasoning effort -> its text
    "default_effort",
    "efficient_eos",  # a reply is closed by the label of the next turn's first token
    "replace_eos",  # the first stop word is the eos token
    "force_system",  # of Ascend's file; has no effect there either
}


def _parse(entry: Mapping[str, Any], entries: Mapping[str, Mapping[str, Any]], file: Path) -> Template:
    if "same_as" in entry:
        return replace(_parse(entries[entry["same_as"]], entries, file), name=entry["name"])
    where = f"templates file {file}: template {entry['name']!r}"
    unknown = sorted(set(entry) - _KEYS)
    if unknown:
        raise UserError(f"{where}: unknown keys {', '.join(unknown)}; expected some of {', '.join(sorted(_KEYS))}")
    template_class = entry.get("template_class")
    if template_class not in _CLASSES:
        raise UserError(
            f"{where}: template_class {template_class!r}; expected one of {', '.join(filter(None, _CLASSES))}"
        )
    entry = {**entry, **_CLASSES[template_class]}
    efficient_eos = entry.get("efficient_eos", False)
    eos: list[Any] = [] if efficient_eos else [["eos_token"]]

    def slot(key: str, default: list[Any]) -> Slot:
        given = entry.get(key) or {}
        return Slot(tuple(map(_piece, given.get("slots", default))), given.get("join", "\n"))

    user = slot("format_user", ["{{content}}"])
    tools = entry.get("format_tools") or {}
    marks = entry.get("role_marks")
    words = dict(zip(("opening", "closing"), entry.get("thought_words", _DEFAULT_THOUGHT_WORDS), strict=True))
    return Template(
        name=entry["name"],
        layout=_LAYOUTS.get(template_class, "slots"),
        prefix=slot("format_prefix", []),
        system=slot("format_system", ["{{content}}"]),
        tools=slot("format_tools", []) if "slots" in tools else None,
        user=user,
        assistant=slot("format_assistant", ["{{content}}", *eos]),
        observation=slot("format_observation", list(user.pieces)),
        function=slot("format_function", ["{{content}}", *eos]),
        preface=slot("format_preface", ["{{content}}\n"]),
        separator=slot("format_separator", []),
        default_system=entry.get("default_system", ""),
        system_end=(entry.get("format_system") or {}).get("end", ""),
        system_in_user=entry.get("system_in_user", False),
        strip=tuple(entry.get("strip", ())),
        first_index=entry.get("first_index", 0),
        role_marks=(marks["user"], marks["observation"]) if marks else None,
        stop_words=tuple(entry.get("stop_words", ())),
        thinking=Thinking(**{**words, **entry.get("thinking", {})}),
        reasoning=template_class in ("ReasoningTemplate", "HarmonyTemplate", "DeepSeek4Template"),
        efforts=dict(entry.get("efforts", {})),
        default_effort=entry.get("default_effort", ""),
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
