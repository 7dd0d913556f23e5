"""Which software and device a run used."""

from __future__ import annotations

import functools
import json
import platform
import sys
from importlib.metadata import PackageNotFoundError, entry_points, version
from pathlib import Path

import mindspeed_llm

FILE_NAME = "versions.json"
_PACKAGES = ("torch", "transformers", "megatron-core", "safetensors", "datasets", "tokenizers", "numpy")
_DEVICE_BACKENDS = "torch.backends"  # entry points by which packages add a device to torch


def versions(*, device_name: str | None = None) -> dict[str, str]:
    """Versions of this package, Python and the libraries that decide numbers; packages that are absent are left out.

    Read from the installed metadata, so nothing is imported for it.
    """
    found = {"mindspeed_llm": mindspeed_llm.__version__, "python": platform.python_version()}
    found |= _installed(tuple(sys.path))
    found["system"] = platform.platform()
    if device_name is not None:
        found["device"] = device_name
    return found


@functools.cache
def _installed(path: tuple[str, ...]) -> dict[str, str]:
    """The packages that are found in `path`, which is `sys.path`. To look through them takes a tenth of a second."""
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    for backend in entry_points(group=_DEVICE_BACKENDS):
        if backend.dist is not None:
            found[backend.dist.name] = backend.dist.version
    return found


def write_versions(folder: Path, *, device_name: str | None = None) -> Path:
    """Write `versions` to versions.json in `folder` and return its path."""
    path = folder / FILE_NAME
    path.write_text(json.dumps(versions(device_name=device_name), indent=2) + "\n", encoding="utf-8")
    return path
