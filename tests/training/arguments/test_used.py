"""A flag that is in no table of what does nothing has an effect: the module that its row names reads its argument."""

from __future__ import annotations

import ast
from functools import cache

import pytest

from mindspeed_llm.features_manager.features import FEATURES
from mindspeed_llm.features_manager.manager import FeaturesManager
from mindspeed_llm.flag import Flag, switch
from mindspeed_llm.training.arguments.parser import all_flags
from tests.architecture.source import PACKAGE, is_inside, modules
from tests.training.arguments.lines import arguments


@cache
def read_by(room: str) -> frozenset[str]:
    """Names that the modules of a room read of anything, as attributes or by a text; `*_x` stands for a text with a
    part to fill in before `_x`.
    """
    found: set[str] = set()
    for module in modules():
        if is_inside(module.name, f"{PACKAGE}.{room}") and ".arguments.tables" not in module.name:
            for node in ast.walk(module.tree):
                if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                    found.add(node.attr)
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    found.add(node.value)
                elif isinstance(node, ast.JoinedStr) and isinstance(node.values[-1], ast.Constant):
                    found.add(f"*{node.values[-1].value}")
    return frozenset(found)


def is_read(flag: Flag, room: str) -> bool:
    """Whether a room reads the argument of a flag (or looks for the flag itself among the words)."""
    names = read_by(room)
    _, bar, rest = flag.dest.partition("_")
    return flag.dest in names or flag.name in names or (bool(bar) and f"*_{rest}" in names)


@pytest.mark.parametrize("name", all_flags())
def test_flag_is_read(name: str) -> None:
    flag = all_flags()[name]
    unread = [room for room in flag.used_by if not is_read(flag, room)]
    assert unread == [], f"{name}: {unread} do not read {flag.dest}"


# What `validate` works out of flags, and who reads it.
WORKED_OUT = {
    "data_parallel_size": "training.initialize",
    "virtual_pipeline_model_parallel_size": "training.initialize",
    "moe_layer_pattern": "training.flops",
    "lr_warmup_steps": "training.setup",
    "lr_decay_steps": "training.setup",
    "wd_incr_steps": "training.setup",
    "wsd_decay_steps": "training.setup",
}


@pytest.mark.parametrize("name", WORKED_OUT)
def test_what_is_worked_out_of_flags_is_read(name: str) -> None:
    assert name in read_by(WORKED_OUT[name])


def test_flags_of_features_are_read() -> None:
    """By the feature itself, or wherever it puts its patches and settings."""
    everywhere = read_by("features_manager") | read_by("core") | read_by("tasks.models") | read_by("training")
    flags = [name for row in FeaturesManager(FEATURES).listing(arguments()) for name in row.flags]
    assert [name for name in flags if name.lstrip("-").replace("-", "_") not in everywhere] == []


def test_what_nobody_reads_is_found() -> None:
    assert not is_read(switch("--no-such-flag", "", ""), "training")
    assert is_read(switch("--valid-data-path", "", ""), "training.data")
