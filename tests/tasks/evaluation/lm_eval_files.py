"""The task files of an installed lm-eval: the authority on prompts, filters and targets. Nothing of it is imported."""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Callable
from pathlib import Path

import jinja2
import pytest
import yaml


class _Loader(yaml.SafeLoader):
    """Reads `!function module.name` as that text."""


_Loader.add_constructor("!function", lambda loader, node: str(node.value))


def _folder() -> Path:
    spec = importlib.util.find_spec("lm_eval")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("lm-eval is not installed (extra: eval)")
    return Path(spec.submodule_search_locations[0]) / "tasks"


def tasks(pattern: str) -> list[dict]:
    """The task files that fit a pattern below lm-eval's folder of tasks, in order of names."""
    return [task(str(file.relative_to(_folder()))) for file in sorted(_folder().glob(pattern))]


def task(name: str) -> dict:
    """A task file with what it includes; skips the test where lm-eval is not installed.

    Args:
        name: path below lm-eval's folder of tasks.
    """
    file = _folder() / name
    content = yaml.load(file.read_text(encoding="utf-8"), _Loader)
    included = content.pop("include", None)
    return {**(task(f"{Path(name).parent}/{included}") if included else {}), **content}


def render(template: str, fields: dict) -> str:
    """A template of a task file, rendered as lm-eval does."""
    environment = jinja2.Environment(undefined=jinja2.StrictUndefined, keep_trailing_newline=True)
    return environment.from_string(template).render(**fields)


def function(file: str, name: str) -> Callable:
    """A function of a task's own module that needs but `re` and its siblings, run without importing the module."""
    tree = ast.parse((_folder() / file).read_text(encoding="utf-8"))
    functions = ast.Module(body=[node for node in tree.body if isinstance(node, ast.FunctionDef)], type_ignores=[])
    scope: dict = {"re": re}
    # Their annotations name what is not there.
    exec(compile(functions, file, "exec", flags=annotations.compiler_flag), scope)
    return scope[name]
