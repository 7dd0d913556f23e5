"""Objects beside the weights that nothing needs: read as data, never made, and the weights are those of the file."""

from __future__ import annotations

import datetime
import enum
import io
import sys
import types
from pathlib import Path

import pytest
import torch

from tests.tasks.checkpoint import toys
from tests.tasks.checkpoint.test_mg_contradictions import State, expect_same


class Mode(enum.Enum):
    """A member of it is saved under a module of Megatron's."""

    FAST = 1


OBJECTS = {
    "a time": datetime.timedelta(minutes=30),
    "a date": datetime.datetime(2024, 1, 2, tzinfo=datetime.timezone.utc),
    "a class of enumerations": enum.Enum,
    "a member of an enumeration": Mode.FAST,
}


@pytest.mark.parametrize("protocol", [2, 4])
@pytest.mark.parametrize("name", OBJECTS)
def test_objects_beside_weights(name: str, protocol: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = toys.toy(tmp_path / "hf", "qwen3")
    toys.run(source, tmp_path / "mg")
    module = types.ModuleType("megatron.core.some_enums")
    module.Mode = Mode
    with monkeypatch.context() as patch:
        for part in ("megatron", "megatron.core"):
            patch.setitem(sys.modules, part, sys.modules.get(part) or types.ModuleType(part))
        patch.setitem(sys.modules, module.__name__, module)
        patch.setattr(Mode, "__module__", module.__name__)

        def do(content: State) -> None:
            content["args"].kind = OBJECTS[name]
            content["model"]["decoder.layers.0.mlp.linear_fc1._extra_state"] = io.BytesIO(b"scales")

        for path in (tmp_path / "mg").glob("*/*/*.pt"):
            content = torch.load(path, weights_only=False)
            do(content)
            torch.save(content, path, pickle_protocol=protocol)
    assert "megatron.core.some_enums" not in sys.modules
    toys.run(tmp_path / "mg", tmp_path / "back", of="mg", to="hf")
    expect_same(source, tmp_path / "back")
