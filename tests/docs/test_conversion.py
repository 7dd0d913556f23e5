"""What the page about weight conversion says: its drawings, its report, and the family that it adds."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from mindspeed_llm.tasks.checkpoint.command_line import make_parser, parse
from mindspeed_llm.tasks.checkpoint.families import FAMILIES
from mindspeed_llm.tasks.checkpoint.layout import Topology, expert_range, place, ranks
from mindspeed_llm.tasks.checkpoint.reference import reference_page
from tests.commands.adapters import save_adapter
from tests.docs.pages import ROOT, blocks
from tests.tasks.checkpoint import toys

LANGUAGES = ("en", "zh")
PAGES = {language: ROOT / "docs" / language / "weight_conversion.md" for language in LANGUAGES}
# What a new family touches, and what its tests need.
COPIED = ("mindspeed_llm", "tests/tasks/checkpoint", "tests/support")


def page(language: str) -> str:
    return PAGES[language].read_text(encoding="utf-8")


@pytest.mark.parametrize("language", LANGUAGES)
def test_layers_are_drawn_where_they_go(language: str) -> None:
    [drawing] = [body for body in blocks(PAGES[language], "text") if "dualpipev" in body]
    for line in drawing.splitlines():
        what, *stages = re.split(r" {2,}stage \d ", line)
        flags = re.findall(r"--\S+ \S+", what)
        request = parse(["--load-dir", "a", "--save-dir", "b", *shlex.split(" ".join(flags))])
        topology = Topology(pp=len(stages), **request.target)
        drawn = [re.findall(r"\[([^]]*)\]", stage) for stage in stages]
        layers = [int(number) for number in re.findall(r"\d+", " ".join(map(str, drawn)))]
        assert sorted(layers) == list(range(len(layers)))
        if found := re.match(r"(\d+) layers", what):
            assert int(found[1]) == len(layers)
        placed: list[list[str]] = [[] for _ in stages]
        for chunk in place(topology, range(len(layers))):
            at = dict(chunk.layers)
            slots = len(drawn[chunk.stage][len(placed[chunk.stage])].split())
            placed[chunk.stage].append(" ".join(str(at.get(local, "-")) for local in range(slots)))
        assert placed == drawn, line


@pytest.mark.parametrize("language", LANGUAGES)
def test_experts_are_drawn_where_they_go(language: str) -> None:
    [drawing] = [body for body in blocks(PAGES[language], "text") if "--moe-tp-extend-ep" in body]
    header, *lines = drawing.splitlines()
    pairs = [(int(tp), int(ep)) for tp, ep in re.findall(r"tp (\d) ep (\d)", header)]
    assert len(lines) == 3
    for line in lines:
        what, *cells = re.split(r" {2,}", line.strip())
        flags = shlex.split(what) if what.startswith("--") else []
        target = parse(["--load-dir", "a", "--save-dir", "b", *flags]).target
        topology = Topology(tp=2, ep=2, **target)
        files = {(rank.tp, rank.ep): rank for rank in ranks(topology)}
        for pair, cell in zip(pairs, cells, strict=True):
            assert (pair in files) == bool(re.match(r"\d", cell)), cell
            if pair in files:
                experts = expert_range(topology, files[pair], 8)
                half = topology.expert_tp == 2
                assert re.findall(r"\d", cell) == [str(experts[0]), str(experts[-1])]
                assert half == (not re.fullmatch(r"\d-\d", cell))


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Any]:
    """The reports of conversions in which much happens."""
    folder = tmp_path_factory.mktemp("report")
    source = toys.toy(folder / "hf", "deepseek3", vocab_size=511)
    toys.run(source, folder / "mg", "--target-tensor-parallel-size", "2", "--verify", "full")
    toys.run(folder / "mg", folder / "moved", "--target-pipeline-parallel-size", "2", of="mg")
    weights = toys.read_hf(source)
    adapter = save_adapter(folder / "adapter", weights, without=r"experts\.\d|layers\.4\.")
    toys.run(source, folder / "merged", "--lora-load", str(adapter))
    small = {name: value.to(torch.float8_e4m3fn) for name, value in weights.items() if "_proj" in name}
    scales = {f"{name}_scale_inv": torch.ones(-(-len(value) // 128), 1) for name, value in small.items()}
    save_file(weights | small | scales, source / "model.safetensors")
    toys.run(source, folder / "plain")
    names = ("mg", "moved", "merged", "plain")
    return {name: json.loads((folder / name / "conversion_report.json").read_text(encoding="utf-8")) for name in names}


@pytest.mark.parametrize("language", LANGUAGES)
def test_every_field_of_the_report_is_explained(language: str, reports: Mapping[str, Any]) -> None:
    section = page(language).partition("`conversion_report.json`")[2].partition("\n## ")[0]
    explained = set(re.findall(r"`(\w+)`", section))
    for content in reports.values():
        found = set(_keys(content))
        assert found - explained == set()
        assert set(content["topology"]) <= explained
    assert "adapter" in reports["merged"] and "dequantised" in reports["plain"]["source"]


# What is in these has names of something else: of tensors, files, flags, packages, ways, fields of a topology.
_NAMES = {"topology", "taken_how", "dropped", "scale_tensors", "dtypes", "weights", "flags", "versions"}


def _keys(content: Mapping[str, Any]) -> Iterator[str]:
    for key, value in content.items():
        yield key
        if key == "files":
            for file in value.values():
                yield from file
        elif isinstance(value, Mapping) and key not in _NAMES:
            yield from _keys(value)


@pytest.mark.parametrize("language", LANGUAGES)
def test_flags_of_the_page_exist(language: str) -> None:
    known = {option for action in make_parser()._actions for option in action.option_strings}
    prose = re.sub(r"```.*?```", "", page(language), flags=re.DOTALL)
    named = set(re.findall(r"`(--[a-z][\w-]*)", prose)) - {"--ckpt-format"}
    assert named - known == set()


@pytest.mark.parametrize("language", LANGUAGES)
def test_the_reference_has_a_row_for_everything(language: str) -> None:
    lines = reference_page(language).splitlines()
    headers = {number - 1 for number, line in enumerate(lines) if line.startswith("|---")}
    rows = [line.split(" | ") for number, line in enumerate(lines) if line.startswith("| `") and number not in headers]
    first = [row[0].strip("| ") for row in rows]
    flags = [action.option_strings[0] for action in make_parser()._actions if action.dest != "help"]
    for cell in [f"`{flag}`" for flag in flags] + [", ".join(f"`{i}`" for i in family.ids) for family in FAMILIES]:
        assert first.count(cell) == 1, cell
    assert [row for row in rows if not row[-1].strip("| ") and row[0].startswith("| `--")] == []


def test_the_readme_counts_the_families() -> None:
    assert f"[{len(FAMILIES)} families](docs/en/conversion_reference.md#models)" in (ROOT / "README.md").read_text(
        "utf-8"
    )


def edits(language: str) -> dict[str, tuple[str, str]]:
    """What the page says to write: path -> (python or diff, text)."""
    found = re.findall(r"^`([\w./-]+)`[:：]\n\n```(python|diff)\n(.*?)^```$", page(language), re.MULTILINE | re.DOTALL)
    return {path: (kind, body) for path, kind, body in found}


def patched(text: str, diff: str) -> str:
    """`text` with the lines of a diff added behind or before the lines that it shows around them."""
    for hunk in diff.split("@@\n"):
        lines = hunk.splitlines(keepends=True)
        assert all(line[0] in " +" for line in lines), hunk
        before = "".join(line[1:] for line in lines if line[0] == " ")
        assert text.count(before) == 1, f"{before!r} stands there {text.count(before)} times"
        text = text.replace(before, "".join(line[1:] for line in lines))
    return text


def test_the_family_that_the_page_adds(tmp_path: Path) -> None:
    """Done to a copy as the page says, and tested by the command that it gives."""
    assert edits("en") == edits("zh")
    for folder in COPIED:
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "tests/__init__.py", "tests/conftest.py", "tests/tasks/__init__.py"):
        shutil.copy(ROOT / name, tmp_path / name)
    for name, (kind, body) in edits("en").items():
        path = tmp_path / name
        path.write_text(body if kind == "python" else patched(path.read_text(encoding="utf-8"), body), encoding="utf-8")
    [command] = [body for body in blocks(PAGES["en"], "bash") if "pytest" in body]
    program, *words = shlex.split(command)
    assert program == "python" and "arcee" in words
    environment = {**os.environ, "PYTHONPATH": "", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *words, "-vv", "-p", "no:cacheprovider"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    passed = set(re.findall(r"(\w+)\[arcee\] PASSED", done.stdout))
    assert passed >= {"test_round_trip", "test_default_configuration", "test_keys_shapes_and_values"}
