"""Our Ascend wrappers on the library's own meta kernels: `python -m tests.platform.npu_meta FOLDER`.

In a process of its own, since operators stay registered. Writes one JSON object: case -> [shape, dtype] or the error.
"""

from __future__ import annotations

import importlib.machinery
import json
import sys
import types
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import yaml

# Codes of types that torch has no name for.
_TYPES = {
    "int4": 285,
    "hifloat8": 290,
    "float8_e5m2": 291,
    "float8_e4m3fn": 292,
    "float8_e8m0fnu": 293,
    "float4_e2m1fn_x2": 296,
    "float4_e1m2fn_x2": 297,
}


def register(wheel: Path) -> types.ModuleType:
    """Define the operators as the wheel does, run its meta kernels' registration, and stand in for torch_npu."""
    library = torch.library.Library("npu", "DEF")
    names = set()
    for file in ("npu_native_functions_by_codegen.yaml", "npu_native_functions.yaml"):
        for entry in yaml.safe_load((wheel / "csrc" / "aten" / file).read_text(encoding="utf-8"))["custom"]:
            try:
                library.define(entry["func"])
            except RuntimeError:  # a type that only the library knows
                continue
            names.add(entry["func"].partition("(")[0].partition(".")[0])
    stub = _module("torch_npu", uint8=torch.uint8, **_TYPES)
    _module("torch_npu.utils")
    _module("torch_npu.utils._error_code", ErrCode=types.SimpleNamespace(), ops_error=lambda code: str(code))
    _module("torch_npu.npu")
    _module("torch_npu.npu.utils", get_cann_version=lambda *_: "9.0", _is_gte_cann_version=lambda *_: True)
    _module("torch_npu.npu._backends", get_soc_version=lambda: 0)
    for name in names:
        setattr(stub, name, getattr(torch.ops.npu, name))
    for file in ("_meta_registrations.py", "_fake_registrations.py"):
        path = wheel / "op_plugin" / "meta" / file
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            exec(compile(path.read_text(encoding="utf-8"), str(path), "exec"), {"__name__": f"torch_npu.{path.stem}"})
    # Registrations end with the library.
    stub.library = library
    return stub


def _module(name: str, **content: Any) -> types.ModuleType:
    module = types.ModuleType(name)
    module.__dict__.update(content)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None)
    sys.modules[name] = module
    owner, _, last = name.rpartition(".")
    if owner:
        setattr(sys.modules[owner], last, module)
    return module


def _cases(stub: types.ModuleType) -> dict[str, Callable[[], torch.Tensor]]:
    from mindspeed_llm.platform.operators import npu

    def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype, device="meta")

    q, kv = meta(2, 6, 9, 16), meta(2, 2, 9, 16)
    everything = {"scale": 0.25, "dropout": 0.0}
    return {
        "rms_norm": lambda: npu.rms_norm(meta(2, 5, 48), meta(48), 1e-6),
        "rms_norm of two types": lambda: npu.rms_norm(meta(2, 5, 48), meta(48, dtype=torch.float32), 1e-6),
        "rms_norm with an offset": lambda: npu.rms_norm(meta(2, 5, 48), meta(48), 1e-6, unit_offset=True),
        "rotate": lambda: npu.rotate(q, meta(2, 1, 9, 16), meta(2, 1, 9, 16)),
        "rotate a part": lambda: npu.rotate(q, meta(2, 1, 9, 8), meta(2, 1, 9, 8)),
        "swiglu": lambda: npu.swiglu(meta(7, 88), meta(7, 88)),
        "attention": lambda: npu.attention(q, kv, kv, mask=None, is_causal=False, **everything),
        "causal attention": lambda: npu.attention(q, kv, kv, mask=None, is_causal=True, **everything),
        "attention with a mask": lambda: npu.attention(
            q, kv, kv, mask=meta(2, 1, 9, 9, dtype=torch.bool), is_causal=True, **everything
        ),
        # Faults, which must come out as errors.
        "wrong keyword": lambda: stub.npu_rms_norm(meta(2, 48), meta(48), eps=1e-6)[0],
        "too few arguments": lambda: stub.npu_rotary_mul(q, meta(2, 1, 9, 16)),
        "wrong type of an argument": lambda: stub.npu_swiglu(meta(7, 88), dim="last"),
    }


def main() -> None:
    """Run all cases and print what came out."""
    results: dict[str, Any] = {}
    for name, case in _cases(register(Path(sys.argv[1]))).items():
        try:
            result = case()
            results[name] = [list(result.shape), str(result.dtype)]
        except Exception as error:
            results[name] = f"{type(error).__name__}: {error}"
    print(json.dumps(results))


if __name__ == "__main__":
    main()
