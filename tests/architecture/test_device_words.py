"""No code outside `platform` names a device or its backend.

Read from the syntax tree, so comments do not count. Exempt are docstrings and the strings that document fields, names
imported from megatron (its interface says cuda in places), the module of `platform` that installs names of devices,
and values of command-line choices and help texts.
"""

from __future__ import annotations

import ast
import re

import pytest

from tests.architecture.source import PACKAGE, is_inside, modules

WORDS = frozenset({"cuda", "npu", "nccl", "hccl", "gloo"})
# Assignments to names like these hold choices of a command line.
_CHOICES_NAME = re.compile(r"(^|_)CHOICES$")
_CHOICES_ARGUMENTS = {"choices", "help"}
# Tables of names and texts for the user: flags and fields without effect, that are not there yet, that were renamed.
_HELP_TABLES = {
    f"{PACKAGE}.fsdp2.config.inert",
    f"{PACKAGE}.fsdp2.config.not_available",
    f"{PACKAGE}.training.arguments.no_effect",
    f"{PACKAGE}.training.arguments.not_yet",
    f"{PACKAGE}.training.arguments.renamed",
}

# What start-up calls, so that a library may name a device where there is none.
_INSTALLER = "cuda_names"


def _has_word(text: str) -> bool:
    return text != _INSTALLER and not WORDS.isdisjoint(re.split(r"[^a-z]+", text.lower()))


def _megatron_names(tree: ast.AST) -> set[str]:
    """Local names that an import from megatron binds."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "megatron":
            names |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            names |= {
                alias.asname or alias.name.split(".")[0]
                for alias in node.names
                if alias.name.split(".")[0] == "megatron"
            }
    return names


def _exempt(tree: ast.AST, *, is_help_table: bool) -> set[int]:
    """Identities of the nodes that do not count."""
    megatron = _megatron_names(tree)
    exempt: set[int] = set()

    def leave_out(node: ast.AST) -> None:
        exempt.update(id(child) for child in ast.walk(node))

    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            leave_out(node)  # docstrings, and the strings under fields
        elif isinstance(node, ast.ImportFrom | ast.Import):
            bound = {alias.asname or alias.name.split(".")[0] for alias in node.names}
            if bound <= megatron:
                leave_out(node)
        elif isinstance(node, ast.Name | ast.Attribute) and _root_name(node) in megatron:
            leave_out(node)
        elif isinstance(node, ast.keyword) and node.arg in _CHOICES_ARGUMENTS:
            leave_out(node.value)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if any(isinstance(target, ast.Name) and _CHOICES_NAME.search(target.id) for target in targets):
                leave_out(node)
            elif is_help_table and isinstance(node.value, ast.Dict | ast.Call):
                leave_out(node.value)
        elif isinstance(node, ast.Subscript) and _root_name(node.value) == "Literal":
            leave_out(node)
    return exempt


def _root_name(node: ast.AST) -> str | None:
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else None


def _texts(node: ast.AST) -> list[str]:
    """Names and strings that a node itself carries."""
    if isinstance(node, ast.Name):
        return [node.id]
    if isinstance(node, ast.Attribute):
        return [node.attr]
    if isinstance(node, ast.arg):
        return [node.arg]
    if isinstance(node, ast.keyword):
        return [node.arg or ""]
    if isinstance(node, ast.alias):
        return [node.name, node.asname or ""]
    if isinstance(node, ast.ImportFrom):
        return [node.module or ""]
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return [node.name]
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return [node.value]
    return []


# Names that megatron-core's objects and its checkpoints have.
_FOREIGN = frozenset({"data_parallel_group_gloo", "cuda_rng_state"})


def device_words(tree: ast.AST, *, is_help_table: bool = False) -> list[str]:
    """The offending places of a module as "line: text"."""
    exempt = _exempt(tree, is_help_table=is_help_table)
    found = []
    for node in ast.walk(tree):
        if id(node) in exempt:
            continue
        found += [
            f"{getattr(node, 'lineno', '?')}: {text[:60]}"
            for text in _texts(node)
            if _has_word(text) and text not in _FOREIGN
        ]
    return found


def test_only_platform_names_a_device() -> None:
    found = [
        f"{module.path.name}:{place} ({module.name})"
        for module in modules()
        if not is_inside(module.name, f"{PACKAGE}.platform")
        for place in device_words(module.tree, is_help_table=module.name in _HELP_TABLES)
    ]
    assert not found


@pytest.mark.parametrize(
    "code",
    [
        "x.cuda()",
        "import torch_npu",
        "from torch.cuda import Stream",
        "torch.device('cuda:0')",
        "init(backend='nccl')",
        "f(f'{kind}:hccl')",
        "def is_npu(): ...",
        "f(use_cuda=True)",
        "TABLE = {'cuda': 1}",
        "dist.new_group(backend='cpu:gloo')",
    ],
)
def test_each_way_of_naming_one_is_found(code: str) -> None:
    assert device_words(ast.parse(code))


@pytest.mark.parametrize(
    "code",
    [
        '"""Runs on cuda."""',
        'class A:\n    backend: str = "auto"\n    """One of cuda, npu."""',
        "x = 1  # cuda",
        "from megatron.core.tensor_parallel import get_cuda_rng_tracker\nget_cuda_rng_tracker().fork()",
        "from megatron.core import tensor_parallel\ntensor_parallel.model_parallel_cuda_manual_seed(1)",
        "parser.add_argument('--distributed-backend', choices=['nccl', 'gloo'], help='nccl or gloo')",
        "BACKEND_CHOICES = ('nccl', 'gloo')",
        "backend: Literal['nccl', 'gloo'] = 'x'",
        "barracuda = 'inputs'",
        "from mindspeed_llm.platform import cuda_names\ncuda_names.install()",
    ],
)
def test_what_is_exempt_is_not_found(code: str) -> None:
    assert not device_words(ast.parse(code))
