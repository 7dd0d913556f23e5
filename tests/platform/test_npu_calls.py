"""Calls into torch_npu bind to the library's signatures, read from the syntax tree: nothing here needs an NPU.

EXPECTED is our own list of what we rely on. The list itself is checked against the torch_npu wheel that goes with this
torch (only read, never installed), and our wrappers run on the wheel's meta kernels.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

import mindspeed_llm.platform
from tests.platform import npu_stub
from tests.platform.npu_wheel import unpacked_wheel

PLATFORM = Path(mindspeed_llm.platform.__file__).parent

# Dotted name below torch_npu -> its arguments in order; those after "*" can only be given by name.
_SIGNATURES = {
    "npu_rms_norm": "self gamma epsilon",
    "npu_rotary_mul": "self r1 r2 rotary_mode rotate",
    "npu_swiglu": "self dim",
    "npu_fusion_attention": """query key value head_num input_layout pse padding_mask atten_mask scale keep_prob
        pre_tockens next_tockens inner_precise prefix actual_seq_qlen actual_seq_kvlen sparse_mode gen_mask_parallel
        sync softmax_layout sink dropout_mask seed offset""",
    "profiler.profile": """* activities schedule on_trace_ready record_shapes profile_memory with_stack with_flops
        with_modules experimental_config execution_trace_observer custom_trace_id_callback use_cuda""",
    "profiler.schedule": "wait active warmup repeat skip_first skip_first_wait",
    "profiler.tensorboard_trace_handler": "dir_name worker_name analyse_flag async_mode",
    "profiler._ExperimentalConfig": """profiler_level aic_metrics l2_cache msprof_tx mstx data_simplification
        record_op_args op_attr gc_detect_threshold export_type host_sys mstx_domain_include mstx_domain_exclude sys_io
        sys_interconnection""",
}
EXPECTED = {name: arguments.split() for name, arguments in _SIGNATURES.items()}
# Plain attributes that we read.
EXPECTED_ATTRIBUTES = {
    "profiler.ProfilerActivity": {"CPU", "NPU"},
    "profiler.ProfilerLevel": {"Level_none", "Level0", "Level1", "Level2"},
    "profiler.ExportType": {"Text", "Db"},
}


def _dotted(node: ast.expr, aliases: dict[str, str]) -> str | None:
    """The name of an attribute chain, with local names such as `profiler = torch_npu.profiler` written out."""
    if isinstance(node, ast.Name):
        return aliases.get(node.id, node.id)
    if isinstance(node, ast.Attribute):
        base = _dotted(node.value, aliases)
        return None if base is None else f"{base}.{node.attr}"
    return None


def _uses(tree: ast.AST) -> tuple[list[tuple[str, ast.Call]], set[str]]:
    """(calls, all dotted names) below torch_npu in a syntax tree, without the leading "torch_npu."."""
    calls, names = [], set()
    for function in [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]:
        aliases: dict[str, str] = {}
        for node in ast.walk(function):
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                target = _dotted(node.value, {})
                if target is not None and target.startswith("torch_npu."):
                    aliases[node.targets[0].id] = target
        for node in ast.walk(function):
            if isinstance(node, ast.Call):
                name = _dotted(node.func, aliases)
                if name is not None and name.startswith("torch_npu."):
                    calls.append((name.removeprefix("torch_npu."), node))
            elif isinstance(node, ast.Attribute):
                name = _dotted(node, aliases)
                if name is not None and name.startswith("torch_npu."):
                    names.add(name.removeprefix("torch_npu."))
    return calls, names


def _binding_error(name: str, call: ast.Call) -> str | None:
    """Why the call does not bind to EXPECTED, or None."""
    if name not in EXPECTED:
        return f"{name} is not in the list of expected operators"
    arguments = EXPECTED[name]
    positional = arguments[: arguments.index("*")] if "*" in arguments else arguments
    if len(call.args) > len(positional):
        return f"{name} takes {len(positional)} positional arguments, the call gives {len(call.args)}"
    for keyword in call.keywords:
        if keyword.arg is not None and keyword.arg not in arguments[len(call.args) :]:
            return f"{name} has no free argument {keyword.arg!r}"
    return None


def _trees() -> list[ast.AST]:
    return [ast.parse(path.read_text(encoding="utf-8")) for path in sorted(PLATFORM.rglob("*.py"))]


def test_all_calls_bind() -> None:
    calls = [call for tree in _trees() for call in _uses(tree)[0]]
    assert {name for name, _ in calls} == set(EXPECTED), "the scan must see every operator, the list hold no others"
    errors = [error for name, call in calls if (error := _binding_error(name, call))]
    assert not errors


def test_all_attributes_are_expected() -> None:
    names = {name for tree in _trees() for name in _uses(tree)[1]}
    used = {
        (owner, name.removeprefix(owner + "."))
        for name in names
        for owner in EXPECTED_ATTRIBUTES
        if owner + "." in name
    }
    assert used == {(owner, name) for owner, members in EXPECTED_ATTRIBUTES.items() for name in members}


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("torch_npu.npu_rms_norm(x, w, eps=1)", "no free argument 'eps'"),
        ("torch_npu.npu_fusion_attention(q, k, v, 4, 'BNSD', pre_tokens=1)", "no free argument 'pre_tokens'"),
        ("torch_npu.npu_swiglu(x, 1, dim=1)", "no free argument 'dim'"),
        ("torch_npu.npu_swiglu(x, 1, 2)", "takes 2 positional"),
        ("torch_npu.npu_gmm(x)", "not in the list"),
    ],
)
def test_a_wrong_call_is_found(code: str, reason: str) -> None:
    [(name, call)] = _uses(ast.parse(f"def f():\n    {code}"))[0]
    error = _binding_error(name, call)
    assert error is not None and reason in error


# --- against the library's own files ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, reason = unpacked_wheel(tmp_path_factory.mktemp("torch_npu"))
    if folder is None:
        pytest.skip(reason)
    return folder


def _library_schemas(wheel: Path) -> dict[str, list[torch._C.FunctionSchema]]:
    schemas: dict[str, list[torch._C.FunctionSchema]] = {}
    for file in ("npu_native_functions_by_codegen.yaml", "npu_native_functions.yaml"):
        entries = yaml.safe_load((wheel / "csrc" / "aten" / file).read_text(encoding="utf-8"))
        for entry in entries["custom"]:
            text = "npu::" + entry["func"]
            name = entry["func"].split("(")[0].split(".")[0]
            if name in EXPECTED:
                schemas.setdefault(name, []).append(torch._C.parse_schema(text))
    return schemas


def test_expected_operators_are_the_librarys(wheel: Path) -> None:
    schemas = _library_schemas(wheel)
    for name in npu_stub.SCHEMAS:
        expected = EXPECTED[name]
        assert expected in [[argument.name for argument in schema.arguments] for schema in schemas[name]], name


def test_the_stand_in_has_the_librarys_schemas(wheel: Path) -> None:
    """Names, order, types, defaults and results of the stand-in's operators."""
    schemas = _library_schemas(wheel)
    for name, text in npu_stub.SCHEMAS.items():
        assert str(torch._C.parse_schema(f"npu::{name}{text}")) in [str(schema) for schema in schemas[name]]


def _python_arguments(path: Path, class_or_function: str) -> list[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ClassDef) and node.name == class_or_function:
            node = next(item for item in node.body if isinstance(item, ast.FunctionDef) and item.name == "__init__")
        elif not (isinstance(node, ast.FunctionDef) and node.name == class_or_function):
            continue
        names = [argument.arg for argument in node.args.args if argument.arg != "self"]
        keyword_only = [argument.arg for argument in node.args.kwonlyargs]
        return names + (["*", *keyword_only] if keyword_only else [])
    raise AssertionError(f"{class_or_function} is not in {path}")


def test_expected_profiler_is_the_librarys(wheel: Path) -> None:
    folder = wheel / "profiler"
    for name, file, definition in (
        ("profiler.profile", "profiler.py", "profile"),
        ("profiler.schedule", "scheduler.py", "Schedule"),
        ("profiler.tensorboard_trace_handler", "profiler.py", "tensorboard_trace_handler"),
        ("profiler._ExperimentalConfig", "experimental_config.py", "_ExperimentalConfig"),
    ):
        assert _python_arguments(folder / file, definition) == EXPECTED[name], name
    tree = ast.parse((folder / "experimental_config.py").read_text(encoding="utf-8"))
    for name in ("ProfilerLevel", "ExportType"):
        [definition] = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name]
        members = {target.id for item in definition.body if isinstance(item, ast.Assign) for target in item.targets}
        assert EXPECTED_ATTRIBUTES[f"profiler.{name}"] <= members


def test_our_wrappers_pass_the_librarys_meta_kernels(wheel: Path, repository: Path) -> None:
    """Shapes and dtypes of all operators, and faults that must not pass."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.platform.npu_meta", wheel],
        cwd=repository,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout)
    bf16, fp32 = "torch.bfloat16", "torch.float32"
    expected = {
        "rms_norm": [[2, 5, 48], bf16],
        "rms_norm of two types": [[2, 5, 48], fp32],
        "rms_norm with an offset": [[2, 5, 48], bf16],
        "rotate": [[2, 6, 9, 16], bf16],
        "rotate a part": [[2, 6, 9, 16], bf16],
        "swiglu": [[7, 88], bf16],
        "attention": [[2, 6, 9, 16], bf16],
        "causal attention": [[2, 6, 9, 16], bf16],
        "attention with a mask": [[2, 6, 9, 16], bf16],
    }
    assert {name: results.get(name) for name in expected} == expected
    faults = {name: text for name, text in results.items() if name not in expected}
    assert len(faults) == 3
    assert "Unknown keyword argument 'eps'" in faults["wrong keyword"]
    assert "missing value for argument 'r2'" in faults["too few arguments"]
    assert "Expected a value of type 'int' for argument 'dim'" in faults["wrong type of an argument"]
