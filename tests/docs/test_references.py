"""What the pages refer to exists: links, files, configuration fields, YAML excerpts."""

import re
from pathlib import Path

import pytest
import yaml

from mindspeed_llm.fsdp2.config.config import SECTIONS
from mindspeed_llm.fsdp2.config.fields import all_fields
from mindspeed_llm.tasks.checkpoint.reference import main as write_conversion_reference
from mindspeed_llm.tasks.preprocess.command.arguments import FLAGS
from mindspeed_llm.tasks.preprocess.command.refused import REFUSED, REFUSED_VALUES
from mindspeed_llm.tasks.preprocess.handlers import HANDLERS
from mindspeed_llm.tasks.preprocess.templates import template_names
from tests.docs.pages import EXAMPLES, PAGES, ROOT, blocks, header_block, record_files, split_commands

NAMES = [str(page.relative_to(ROOT)) for page in PAGES]
LINK = re.compile(r"\]\((?P<target>[^)\s]+)\)")
FIELD = re.compile(rf"(?<![\w./-])(?P<field>(?:{'|'.join(SECTIONS)})\.[a-z0-9_]+)(?![\w./])")
# What looks like a field in prose: modules of a model, and files.
NO_FIELDS = {"model.layers", "model.embed_tokens", "model.safetensors", "data.jsonl", "inference.py"}
GENERATED = {
    "fsdp2_arguments.md",
    "preprocess_arguments.md",
    "conversion_reference.md",
    "inference_arguments.md",
    "evaluation_arguments.md",
}
# Of the data guide, beside those of the command's tables.
OTHER_FLAGS = {"--help", "--data-path"}
DATA_GUIDES = [ROOT / "docs" / language / "data_guide.md" for language in ("en", "zh")]


def anchors(page: Path) -> set[str]:
    """The anchors that the headings of a page make."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_links(page: Path) -> None:
    for match in LINK.finditer(page.read_text(encoding="utf-8")):
        path, _, anchor = match["target"].partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{match['target']} does not exist"
        if anchor:
            assert anchor in anchors(target), f"no heading for {match['target']}"


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_fields(page: Path) -> None:
    for match in FIELD.finditer(page.read_text(encoding="utf-8")):
        if match["field"] not in NO_FIELDS:
            assert match["field"] in all_fields(), f"there is no field {match['field']}"


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_bare_field_names(page: Path) -> None:
    """`some_name` alone in backticks in the first column of a table about fields is a field of some section."""
    names = {key.partition(".")[2] for key in all_fields()}
    for table in re.findall(r"^\| field \|.*?(?=\n\n|\Z)", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL):
        for row in table.splitlines()[2:]:
            for name in re.findall(r"`([a-z0-9_]+_[a-z0-9_]+)`", row.split("|")[1]):
                assert name in names, f"there is no field {name}"


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_yaml_excerpts(page: Path) -> None:
    for body in blocks(page, "yaml"):
        for section, fields in yaml.safe_load(body).items():
            assert {f"{section}.{name}" for name in fields} <= set(all_fields())


def test_both_languages_show_the_same_commands() -> None:
    """A translated page must not fall behind."""
    for translated in sorted((ROOT / "docs/zh").glob("*.md")):
        original = ROOT / "docs/en" / translated.name
        for language in ("bash", "python", "json"):
            assert blocks(translated, language) == blocks(original, language), translated.name


def test_the_conversion_reference_is_up_to_date(tmp_path: Path) -> None:
    write_conversion_reference([str(tmp_path)])
    for written in sorted(tmp_path.glob("*/*.md")):
        name = written.relative_to(tmp_path)
        assert (ROOT / "docs" / name).read_text(encoding="utf-8") == written.read_text(encoding="utf-8"), (
            f"docs/{name} is stale; run python -m mindspeed_llm.tasks.checkpoint.reference"
        )


@pytest.mark.parametrize("language", ["en", "zh"])
def test_every_template_is_listed(language: str) -> None:
    page = (ROOT / "docs" / language / "chat_templates.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`.+?) \|", page.partition("\n## ")[0], re.MULTILINE)
    assert sorted(re.findall(r"`([\w-]+)`", ", ".join(rows))) == sorted(template_names())


@pytest.mark.parametrize("example", EXAMPLES, ids=[example.name for example in EXAMPLES])
def test_example_header_names_its_own_command(example: Path) -> None:
    commands = split_commands(example.name, header_block(example))
    assert any(str(example.relative_to(ROOT)) in command.words for command in commands)


def test_chinese_pages_are_chinese() -> None:
    for page in (ROOT / "docs/zh").glob("*.md"):
        if page.name in GENERATED:
            continue
        text = page.read_text(encoding="utf-8")
        assert len(re.findall(r"[\u4e00-\u9fff]", text)) > 300, page.name


@pytest.mark.parametrize("page", DATA_GUIDES, ids=["en", "zh"])
def test_records_are_those_of_the_files(page: Path) -> None:
    shown = record_files(page)
    assert len(shown) == len(blocks(page, "json")), "a json block has no file name in front"
    assert {str(file.relative_to(ROOT)) for file in (ROOT / "examples/data").iterdir()} == set(shown)
    for name, text in shown.items():
        assert (ROOT / name).read_text(encoding="utf-8") == text, name


@pytest.mark.parametrize("page", DATA_GUIDES, ids=["en", "zh"])
def test_every_handler_has_an_example(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    examples = dict(re.findall(r"^### (\w+Handler)\n(.*?)(?=^##)", text, re.MULTILINE | re.DOTALL))
    assert set(examples) == set(HANDLERS)
    for name, section in examples.items():
        commands = [body for body in re.findall(r"```bash\n(.*?)```", section, re.DOTALL)]
        named = "--input" if name == "GeneralPretrainHandler" else f"--handler-name {name}"
        assert any(named in body for body in commands), f"{name} has no command"


@pytest.mark.parametrize("page", DATA_GUIDES, ids=["en", "zh"])
def test_flags(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for flag in re.findall(r"`(--[a-z][a-z-]*)", text):
        assert flag in FLAGS or flag in REFUSED or flag in OTHER_FLAGS, f"there is no flag {flag}"
    refused = text.partition("`--datasets`")[2]
    for flag in [*REFUSED, *(flag for flag, _ in REFUSED_VALUES), *(value for _, value in REFUSED_VALUES)]:
        assert flag == "--datasets" or flag in refused, f"the page does not list {flag}"
