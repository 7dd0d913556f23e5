"""The twin of `torch.cuda`'s names on a CPU: what megatron-core calls works, and nothing is left behind."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from mindspeed_llm.platform import cuda_names, device

pytestmark = pytest.mark.skipif(device.device_type() != "cpu", reason="the twin is for CPUs")

OWNERS: tuple[Any, ...] = (torch, torch.cuda, torch.cuda.random, torch.cuda.nvtx, torch.Tensor, torch.nn.Module)


@pytest.fixture
def installed() -> Iterator[None]:
    cuda_names.install()
    yield
    cuda_names.uninstall()


def names() -> list[dict[str, Any]]:
    return [dict(vars(owner)) for owner in OWNERS]


def same(first: list[dict[str, Any]], second: list[dict[str, Any]]) -> bool:
    return all(
        one.keys() == other.keys() and all(one[name] is other[name] for name in one)
        for one, other in zip(first, second, strict=True)
    )


def test_everything_is_put_back() -> None:
    before = names()
    cuda_names.install()
    changed = names()
    assert not same(before, changed)
    cuda_names.install()  # a second time nothing happens: what `uninstall` puts back is the original
    assert same(changed, names())
    cuda_names.uninstall()
    assert same(before, names())
    cuda_names.uninstall()
    assert same(before, names())


@pytest.mark.parametrize("where", ["cuda", "cuda:1", torch.device("cuda"), torch.device("cuda", 3), 0])
def test_every_spelling_of_the_device_is_the_cpu(installed: None, where: Any) -> None:
    made = [
        torch.empty(2, device=where),
        torch.zeros((2, 1), device=where, dtype=torch.int),
        torch.full((2,), 3.0, device=where),
        torch.tensor([1, 2], device=where),
        torch.as_tensor([1, 2], dtype=torch.float, device=where),
        torch.arange(3, device=where),
        torch.randn(2, device=where),
        torch.ones_like(torch.ones(2), device=where),
        torch.ones(2).to(where),
        torch.ones(2).to(where, torch.float64),
        torch.ones(2).to(device=where, dtype=torch.float64),
        torch.ones(2).cuda(where),
        torch.nn.Linear(2, 2).to(where).weight,
        torch.nn.Linear(2, 2).cuda(where).weight,
    ]
    assert {tensor.device.type for tensor in made} == {"cpu"}
    assert made[9].dtype == made[10].dtype == torch.float64


def test_the_current_device_goes_everywhere_a_device_goes(installed: None) -> None:
    current = torch.cuda.current_device()
    torch.cuda.set_device(current)
    with torch.cuda.device(current):
        assert torch.ones(1).new_empty(size=[3], dtype=torch.int, device=current).shape == (3,)
        assert torch.ones(1).to(current, non_blocking=True).device.type == "cpu"
    assert isinstance(torch.cuda.default_generators[current], torch.Generator)


def test_memory_is_not_pinned(installed: None) -> None:
    assert not torch.empty(2, pin_memory=True).is_pinned()
    assert not torch.tensor([1, 2], device="cpu", pin_memory=True).cuda(non_blocking=True).is_pinned()
    assert torch.ones(2).cpu().pin_memory().tolist() == [1, 1]


def test_tensors_say_the_type_that_they_have_on_a_device(installed: None) -> None:
    # megatron-core sorts gradients by these names when it clips them.
    assert torch.ones(1).type() == "torch.cuda.FloatTensor"
    assert torch.ones(1, dtype=torch.bfloat16).type() == "torch.cuda.BFloat16Tensor"
    assert torch.ones(1).type("torch.cuda.DoubleTensor").dtype == torch.float64
    assert torch.ones(1).type(torch.int32).dtype == torch.int32


def test_streams_and_events_order_nothing(installed: None) -> None:
    stream, current = torch.cuda.Stream(device="cuda"), torch.cuda.current_stream()
    stream.wait_stream(current)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    with torch.cuda.stream(stream):
        start.record()
        x = torch.ones(1000).sum()
        x.record_stream(stream)
        end.record(stream)
    event = stream.record_event()
    current.wait_event(event)
    event.wait()
    event.synchronize()
    assert event.query() and stream.query() and start.elapsed_time(end) > 0
    torch.cuda.synchronize()
    torch.cuda.set_stream(torch.cuda.default_stream())
    torch.cuda.empty_cache()
    with torch.cuda.nvtx.range("region"):
        torch.cuda.nvtx.range_push("inner")
        torch.cuda.nvtx.range_pop()


def test_random_states_are_those_of_the_cpu(installed: None) -> None:
    torch.cuda.manual_seed(5)
    state = torch.cuda.get_rng_state()
    first = torch.rand(3, device="cuda")
    torch.cuda.set_rng_state(state)
    assert torch.equal(torch.rand(3), first)
    torch.cuda.random.set_rng_state(state, device="cuda")
    with torch.random.fork_rng():
        torch.rand(7)
    assert torch.equal(torch.rand(3), first)
    torch.manual_seed(5)
    assert torch.equal(torch.rand(3), first)


def test_autocast_of_the_device_is_that_of_the_cpu(installed: None) -> None:
    with torch.autocast("cuda", dtype=torch.bfloat16):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.bfloat16


def test_functions_are_not_compiled(installed: None) -> None:
    def double(x: int) -> int:
        return 2 * x

    assert torch.compile(double) is double
    assert torch.compile(mode="max-autotune")(double) is double


# What needs a fresh process: whether a library is imported before or after.


def run_fresh(program: str) -> str:
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(program)],
        env={**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


FORKS = """
    import torch.distributed as dist
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker, model_parallel_cuda_manual_seed
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(3)
    torch.manual_seed(1)
    expected = torch.rand(4)
    torch.manual_seed(1)
    with get_cuda_rng_tracker().fork():
        inner = torch.rand(4)
    assert torch.equal(torch.rand(4), expected), "a fork must leave the outer random state alone"
    with get_cuda_rng_tracker().fork():
        assert not torch.equal(torch.rand(4), inner), "a fork must go on where the last one ended"
    from megatron.core.fusions.fused_bias_swiglu import swiglu
    x = torch.randn(3, 8)
    gate, up = x.chunk(2, dim=-1)
    torch.testing.assert_close(swiglu(x), torch.nn.functional.silu(gate) * up)
"""


def test_megatron_works_when_it_is_imported_afterwards() -> None:
    run_fresh(
        """
        import torch
        from mindspeed_llm.platform import cuda_names
        cuda_names.install()
        """
        + textwrap.indent(textwrap.dedent(FORKS), " " * 8)
    )


def test_megatron_works_when_it_was_imported_before() -> None:
    # Without a C++ compiler nothing can be compiled: functions that were handed to torch's compiler must run as they
    # are.
    run_fresh(
        """
        import os, torch
        import megatron.core.tensor_parallel.random as held
        import megatron.core.fusions.fused_bias_swiglu, megatron.core.jit
        os.environ["CXX"] = "/no/such/compiler"
        from mindspeed_llm.platform import cuda_names
        original = held._lazy_call, held.device_ctx_manager, megatron.core.jit.jit_fuser
        cuda_names.install()
        """
        + textwrap.indent(textwrap.dedent(FORKS), " " * 8)
        + """
        cuda_names.uninstall()
        assert (held._lazy_call, held.device_ctx_manager, megatron.core.jit.jit_fuser) == original
        """
    )


@pytest.mark.parametrize("when", ["before", "installed"])
def test_torchs_compiler_can_be_imported_whenever(when: str) -> None:
    said = run_fresh(
        f"""
        import torch
        from mindspeed_llm.platform import cuda_names
        if {when!r} == "before":
            import torch._dynamo
        cuda_names.install()
        if {when!r} == "installed":
            import torch._dynamo
        cuda_names.uninstall()
        import torch._dynamo
        graphs = []
        def backend(module, inputs):
            graphs.append(module)
            return module.forward
        compiled = torch.compile(lambda x: x * 2 + 1, backend=backend)
        assert torch.equal(compiled(torch.ones(3)), torch.full((3,), 3.0))
        print(len(graphs))
        """
    )
    assert said.strip() == "1"
