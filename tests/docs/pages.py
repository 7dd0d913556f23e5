"""Reads the documentation: fenced blocks, and the commands in them."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))]
# Their headers state the commands that run them.
EXAMPLES = sorted(ROOT.glob("examples/fsdp2/smollm2/*.yaml"))
_FENCE = re.compile(r"^(?P<indent> *)```(?P<language>\w*)\n(?P<body>.*?)^(?P=indent)```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Command:
    """One command line of a page: `VARIABLE=value` words, then `words`."""

    page: str
    text: str
    environment: tuple[str, ...]
    words: tuple[str, ...]


def blocks(page: Path, language: str) -> list[str]:
    """The bodies of all fenced blocks of `language`, without the indent of a surrounding list."""
    found = []
    for match in _FENCE.finditer(page.read_text(encoding="utf-8")):
        if match["language"] == language:
            indent = match["indent"]
            found.append("".join(line.removeprefix(indent) for line in match["body"].splitlines(keepends=True)))
    return found


def yaml_files() -> dict[str, str]:
    """The YAML files that the pages show as a whole: name in the comment of the first line -> text."""
    bodies = [body for page in PAGES for body in blocks(page, "yaml")]
    named = [(re.match(r"# (\S+\.yaml)\n", body), body) for body in bodies]
    return {match[1]: body for match, body in named if match}


def record_files(page: Path) -> dict[str, str]:
    """The files of records that a page shows: the name in front of a json block, with a colon -> text."""
    text = page.read_text(encoding="utf-8")
    return dict(re.findall(r"^`([\w./-]+)`[:：]\n\n```json\n(.*?)^```$", text, re.MULTILINE | re.DOTALL))


def split_commands(page: str, body: str) -> list[Command]:
    """The commands of one shell block: continued lines joined, comments and empty lines left out."""
    commands = []
    for line in body.replace("\\\n", " ").splitlines():
        text = " ".join(line.split())
        if not text or text.startswith("#"):
            continue
        words = shlex.split(text)
        count = next(i for i, word in enumerate([*words, "end"]) if not re.fullmatch(r"[A-Z_]+=.*", word))
        commands.append(Command(page, text, tuple(words[:count]), tuple(words[count:])))
    return commands


def header_block(example: Path) -> str:
    """The indented command lines of the comment at the top of a YAML file."""
    lines = []
    for line in example.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            break
        if line.startswith("#   "):
            lines.append(line[4:])
    return "\n".join(lines)


def all_commands() -> list[Command]:
    """Every distinct command of the pages and of the examples' headers, in reading order."""
    found: dict[str, Command] = {}
    for page in PAGES:
        for body in blocks(page, "bash"):
            for command in split_commands(str(page.relative_to(ROOT)), body):
                found.setdefault(command.text, command)
    for example in EXAMPLES:
        for command in split_commands(str(example.relative_to(ROOT)), header_block(example)):
            found.setdefault(command.text, command)
    return list(found.values())
