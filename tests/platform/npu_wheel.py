"""The torch_npu wheel as a folder to read from.

It is never installed: beside torch it breaks `import torch` where CANN is missing.
"""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import torch

FOLDER = "MINDSPEED_TORCH_NPU_FOLDER"
_NEEDED = ("torch_npu/csrc/aten/", "torch_npu/op_plugin/meta/", "torch_npu/profiler/")
_LONGEST_S = 120


def unpacked_wheel(scratch: Path) -> tuple[Path | None, str]:
    """The folder `torch_npu` of the wheel that goes with this torch, and why there is none.

    It is the one below the folder that the environment variable names, or else downloaded with pip to `scratch`.
    """
    if folder := os.environ.get(FOLDER):
        return Path(folder) / "torch_npu", ""
    version = torch.__version__.partition("+")[0]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", scratch]
    command.append(f"torch_npu=={version}")
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_LONGEST_S)
    except subprocess.TimeoutExpired:
        return None, f"torch_npu {version} was not downloaded in {_LONGEST_S} s; {FOLDER} can name an unpacked wheel"
    if done.returncode:
        return None, f"torch_npu {version} cannot be downloaded; {FOLDER} can name an unpacked wheel"
    [wheel] = scratch.glob("torch_npu-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(scratch, [name for name in archive.namelist() if name.startswith(_NEEDED)])
    wheel.unlink()
    return scratch / "torch_npu", ""
