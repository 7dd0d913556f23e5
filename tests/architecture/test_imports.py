"""Which room may import which, on the real import graph; and that importing has no side effect.

The graph has every import statement, those inside functions included. What a fresh process really loads is checked as
well: a library could pull in what our own statements do not name.
"""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.architecture.source import PACKAGE, ROOT, imports, is_inside, modules

_BACKEND_MEGATRON = ("core", "features_manager", "training", "tasks.models", "tasks.posttrain")
_BOTH_BACKENDS = ("fsdp2", *_BACKEND_MEGATRON)
_ALL_ROOMS = ("platform", "observability", "tasks", *_BOTH_BACKENDS)

# Room -> what none of its modules may import: rooms of ours by their name, other packages with a leading colon.
FORBIDDEN: dict[str, tuple[str, ...]] = {
    "platform": tuple(room for room in _ALL_ROOMS if room != "platform"),
    "observability": tuple(room for room in _ALL_ROOMS if room != "observability"),
    "checkpoints": ("observability", "tasks", *_BOTH_BACKENDS, ":megatron"),
    "fsdp2": (*_BACKEND_MEGATRON, ":megatron"),
    "core": ("fsdp2",),
    "features_manager": ("fsdp2",),
    "training": ("fsdp2",),
    "tasks.models": ("fsdp2",),
    "tasks.posttrain": ("fsdp2",),
    "tasks.preprocess": _BOTH_BACKENDS,
    "tasks.checkpoint": (*_BOTH_BACKENDS, ":megatron", ":transformers"),
    "tasks.losses": _BOTH_BACKENDS,
}
# Rooms that are adapters for both backends: they may name one, but only inside a function.
LAZY_ONLY: dict[str, tuple[str, ...]] = {"tasks.inference": _BOTH_BACKENDS, "tasks.evaluation": _BOTH_BACKENDS}


def _full(name: str) -> str:
    return name[1:] if name.startswith(":") else f"{PACKAGE}.{name}"


def _violations(rules: dict[str, tuple[str, ...]], *, top_level_only: bool) -> list[str]:
    found = []
    for module in modules():
        for room, forbidden in rules.items():
            if not is_inside(module.name, _full(room)):
                continue
            names = imports(
                module.tree,
                module.name,
                is_package=module.path.name == "__init__.py",
                top_level_only=top_level_only,
            )
            found += [
                f"{module.name} imports {name}"
                for name in sorted(names)
                if any(is_inside(name, _full(other)) for other in forbidden)
            ]
    return found


def test_no_room_imports_what_it_must_not() -> None:
    assert not _violations(FORBIDDEN, top_level_only=False)


def test_adapters_import_their_backend_when_used() -> None:
    assert not _violations(LAZY_ONLY, top_level_only=True)


def test_the_graph_sees_imports_wherever_they_stand() -> None:
    tree = ast.parse(
        "import a.b\nfrom c import d\nfrom . import e\nfrom ..f import g\n"
        "def later():\n    import h\n"
        "if TYPE_CHECKING:\n    import i\n"
    )
    names = imports(tree, "pkg.sub.module", is_package=False)
    assert {"a.b", "c", "c.d", "pkg.sub", "pkg.sub.e", "pkg.f", "pkg.f.g", "h", "i"} == names
    assert {"h", "i"}.isdisjoint(imports(tree, "pkg.sub.module", is_package=False, top_level_only=True))
    assert "pkg.sub.module.e" in imports(tree, "pkg.sub.module", is_package=True)


# Runs in a fresh interpreter: loads what the modules of some rooms may rely on; then, for each room in a process of its
# own that is forked there, takes a picture of that, imports all modules of the room and reports what has changed. The
# rooms come in the order of what they rely on, so that none is forked from more than that.
_PROBE = """
import importlib, json, os, sys, threading
import torch, torch.nn.functional, torch.distributed, torch.distributed.fsdp
def attributes():
    picture = {}
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] in ("torch", "transformers", "megatron") and module is not None:
            for key, value in list(vars(module).items()):
                picture[name, key] = value
                if isinstance(value, type) and value.__module__.split(".")[0] == "megatron":
                    picture.update({(f"{name}.{key}", inner): held for inner, held in list(vars(value).items())})
    for owner in (torch.Tensor, torch.nn.Module):
        for key, value in list(vars(owner).items()):
            picture[owner.__qualname__, key] = value
    return picture
def probe(modules):
    environment, before, loaded = dict(os.environ), attributes(), set(sys.modules)
    for module in modules:
        importlib.import_module(module)
    after = attributes()
    return {
        "environment": sorted(k for k in set(environment) ^ set(os.environ) | {k for k in environment
                              if environment[k] != os.environ.get(k)}),
        "patched": sorted(f"{name}.{key}" for (name, key), value in before.items()
                          if after.get((name, key)) is not value and callable(value)),
        "process_group": torch.distributed.is_initialized(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "threads_started": [t.name for t in threading.enumerate()][1:],
        "loaded": sorted(set(sys.modules) - loaded),
    }
for room in json.loads(sys.argv[1]):
    for name in room["relies_on"]:
        importlib.import_module(name)
    sys.stdout.flush()
    child = os.fork()
    if not child:
        print("ROOM", room["name"])
        try:
            print(json.dumps(probe(room["modules"])))
        except BaseException as error:
            print(repr(error))
        sys.stdout.flush()
        os._exit(0)
    os.waitpid(child, 0)
"""
_TRANSFORMERS = ["transformers", "transformers.modeling_utils"]
_ROOMS_HERE = sorted(
    str(path.relative_to(ROOT)).replace("/", ".")
    for path in (*ROOT.iterdir(), *(ROOT / "tasks").iterdir())
    if (path / "__init__.py").exists() and path.name != "tasks"
)


def _megatron_modules() -> list[str]:
    """The modules of megatron-core that any module of ours imports from."""
    nodes = [node for module in modules() for node in ast.walk(module.tree) if isinstance(node, ast.ImportFrom)]
    return sorted({str(node.module) for node in nodes if is_inside(str(node.module), "megatron")})


def _probed(rooms: list[dict[str, Any]], **environment: str) -> dict[str, list[str]]:
    """What is printed for each room; its report is the last line."""
    done = subprocess.run(
        [sys.executable, "-c", _PROBE, json.dumps(rooms)],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, **environment},
    )
    assert done.returncode == 0, done.stderr
    parts = done.stdout.split("ROOM ")
    assert not parts[0], parts[0]
    return {lines[0]: lines[1:] for lines in (part.splitlines() for part in parts[1:])}


@pytest.fixture(scope="module")
def probed() -> dict[str, list[str]]:
    """All rooms."""
    rooms = []
    for room in _ROOMS_HERE:
        members = [module for module in modules() if is_inside(module.name, f"{PACKAGE}.{room}")]
        imported = set().union(*(imports(module.tree, module.name, is_package=False) for module in members))
        relies_on = _TRANSFORMERS if any(is_inside(name, "transformers") for name in imported) else []
        if any(is_inside(room, other) for other in _BACKEND_MEGATRON):
            # Importing megatron-core has effects of its own, on torch and on the environment.
            relies_on = [*_TRANSFORMERS, *_megatron_modules()]
        rooms.append({"name": room, "relies_on": relies_on, "modules": [module.name for module in members]})
    return _probed(sorted(rooms, key=lambda room: len(room["relies_on"])))


@pytest.mark.parametrize("room", _ROOMS_HERE)
def test_importing_a_room_has_no_side_effect(probed: dict[str, list[str]], room: str) -> None:
    *printed, report = probed[room]
    assert report.startswith("{"), report
    assert not printed, "an import must not print"
    found = json.loads(report)
    loaded = found.pop("loaded")
    assert found == {
        "environment": [],
        "patched": [],
        "process_group": False,
        "deterministic": False,
        "threads_started": [],
    }
    forbidden = [_full(name) for name in FORBIDDEN.get(room, LAZY_ONLY.get(room, ()))]
    assert not [name for name in loaded if any(is_inside(name, other) for other in forbidden)]


def test_the_probe_sees_a_patch_of_megatron(tmp_path: Path) -> None:
    (tmp_path / "patching.py").write_text(
        "import megatron.core.utils as utils\nfrom megatron.core.transformer.mlp import MLP\n"
        "utils.divide = lambda a, b: a // b\nMLP.forward = lambda self, x: x\n"
    )
    room = {"name": "patching", "relies_on": ["megatron.core.transformer.mlp"], "modules": ["patching"]}
    patched = json.loads(_probed([room], PYTHONPATH=str(tmp_path))["patching"][-1])["patched"]
    assert {"megatron.core.utils.divide", "megatron.core.transformer.mlp.MLP.forward"} <= set(patched)


@pytest.mark.parametrize("package", [PACKAGE, *(f"{PACKAGE}.{room}" for room in _ROOMS_HERE)])
def test_package_files_are_light(package: str) -> None:
    """Importing a package (not its modules) loads neither torch nor transformers: `--help` must answer at once."""
    [module] = [module for module in modules() if module.name == package]
    names = imports(module.tree, module.name, is_package=True, top_level_only=True)
    heavy = {name for name in names if name.split(".")[0] not in {"__future__", "importlib", "typing", PACKAGE}}
    assert not heavy


def test_configuration_is_read_without_torch() -> None:
    """The modules that parse and check a configuration load neither torch nor transformers, however deep."""
    names = [module.name for module in modules() if is_inside(module.name, f"{PACKAGE}.fsdp2.config")]
    code = (
        f"import importlib, sys\nfor name in {names!r}: importlib.import_module(name)\n"
        "print([name for name in ('torch', 'transformers', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
