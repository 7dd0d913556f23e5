"""The names of `torch.cuda` on devices without CUDA, for libraries that spell every device so (megatron-core).

On npu this is torch_npu's own `transfer_to_npu`; on cpu its twin below; on cuda nothing is done. Nothing happens on
import: `install` is called once at start-up and `uninstall` undoes it (cpu only, where tests need it).

What the twin does, so that the same code runs on a CPU: devices and `.cuda()` are the CPU, memory is never pinned,
streams and events are there and order nothing (a CPU has finished a call when it returns), random states are those of
the CPU's generator.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from mindspeed_llm.platform.device import device_type

_CPU = torch.device("cpu")
_MISSING = object()
_installed: list[tuple[Any, str, Any]] = []


class Stream:
    """A stream in name only: what is called has been done when the call returns."""

    def __init__(self, device: Any = None, priority: int = 0, **_: Any) -> None:
        self.device, self.priority, self.cuda_stream = _CPU, priority, 0

    def wait_stream(self, stream: Stream) -> None:
        """There is nothing to wait for."""

    def wait_event(self, event: Event) -> None:
        """There is nothing to wait for."""

    def record_event(self, event: Event | None = None) -> Event:
        """An event that has happened."""
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        """There is nothing to wait for."""

    def query(self) -> bool:
        """All work is done."""
        return True

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        pass


class Event:
    """A point in time; `elapsed_time` between two is in milliseconds, as CUDA gives it."""

    def __init__(
        self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False, **_: Any
    ) -> None:
        self._time = 0.0

    def record(self, stream: Stream | None = None) -> None:
        """Note the time."""
        self._time = time.perf_counter()

    def wait(self, stream: Stream | None = None) -> None:
        """There is nothing to wait for."""

    def synchronize(self) -> None:
        """There is nothing to wait for."""

    def query(self) -> bool:
        """It has happened."""
        return True

    def elapsed_time(self, end: Event) -> float:
        """Milliseconds from this event to `end`."""
        return 1000 * (end._time - self._time)


_STREAM = Stream()


@contextlib.contextmanager
def _in_stream(stream: Any) -> Iterator[None]:
    yield


def _nothing() -> Callable[..., None]:
    """A function of its own for each name: torch's compiler tells functions apart by identity."""

    def do_nothing(*_: Any, **__: Any) -> None:
        pass

    return do_nothing


def _reading_state() -> Callable[..., torch.Tensor]:
    def get_rng_state(device: Any = None) -> torch.Tensor:
        return torch.get_rng_state()

    return get_rng_state


def _setting_state() -> Callable[..., None]:
    def set_rng_state(new_state: torch.Tensor, device: Any = None) -> None:
        torch.set_rng_state(new_state)

    return set_rng_state


def _seeding() -> Callable[[int], None]:
    def manual_seed(seed: int) -> None:
        torch.default_generator.manual_seed(seed)

    return manual_seed


def _compile(model: Any = None, **_: Any) -> Any:
    """`torch.compile`, as a call and as a decorator with and without arguments, that leaves functions as they are."""
    return (lambda function: function) if model is None else model


def _call(callback: Callable[[], None], **_: Any) -> None:
    callback()


class _Generators:
    """One generator for all devices, whatever they are indexed with."""

    def __getitem__(self, device: Any) -> torch.Generator:
        return torch.default_generator


class _OnDevice(contextlib.AbstractContextManager[None]):
    def __init__(self, device: Any) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass


def _itself(self: Any, *_: Any, **__: Any) -> Any:
    return self


def _type_name(self: torch.Tensor, dtype: Any = None, *arguments: Any, **options: Any) -> Any:
    """`Tensor.type`: asked for the name, the one that the tensor would have on a CUDA device."""
    if dtype is None:
        return _TENSOR_TYPE(self).replace("torch.", "torch.cuda.", 1)
    if isinstance(dtype, str):
        dtype = dtype.replace("torch.cuda.", "torch.", 1)
    return _TENSOR_TYPE(self, dtype, *arguments, **options)


def _on_cpu(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that makes tensors, with `device="cuda"` read as the CPU and `pin_memory` left out; torch takes both
    by name only.
    """

    @functools.wraps(function)
    def made(*arguments: Any, **options: Any) -> Any:
        if _is_cuda(options.get("device")):
            options["device"] = _CPU
        options.pop("pin_memory", None)
        return function(*arguments, **options)

    return made


def _moving(method: Callable[..., Any]) -> Callable[..., Any]:
    """`to` of a tensor or a module, with CUDA devices read as the CPU."""

    @functools.wraps(method)
    def to(self: Any, *arguments: Any, **options: Any) -> Any:
        if arguments and _is_cuda(arguments[0]):
            arguments = (_CPU, *arguments[1:])
        if _is_cuda(options.get("device")):
            options["device"] = _CPU
        return method(self, *arguments, **options)

    return to


def _is_cuda(device: Any) -> bool:
    """Whether an argument names a CUDA device: a number does, as torch reads it."""
    if isinstance(device, torch.device):
        return device.type == "cuda"
    if isinstance(device, str):
        return device.startswith("cuda")
    return isinstance(device, int) and not isinstance(device, bool)


class _Autocast(torch.autocast):
    def __init__(self, device_type: str, *arguments: Any, **options: Any) -> None:
        super().__init__("cpu" if device_type == "cuda" else device_type, *arguments, **options)


_TENSOR_TYPE = torch.Tensor.type
_FACTORIES = (
    "arange", "as_tensor", "asarray", "empty", "empty_like", "empty_strided", "eye", "full", "full_like", "linspace",
    "logspace", "ones", "ones_like", "rand", "rand_like", "randint", "randint_like", "randn", "randn_like", "randperm",
    "scalar_tensor", "tensor", "tril_indices", "triu_indices", "zeros", "zeros_like",
)  # fmt: skip
# The library that spells its device so.
_LIBRARY = "megatron"


def _replacements() -> list[tuple[Any, str, Any]]:
    cuda: dict[str, Any] = {
        "current_device": lambda: _CPU,
        "set_device": _nothing(),
        "device": _OnDevice,
        "device_count": lambda: 1,
        "current_stream": lambda device=None: _STREAM,
        "default_stream": lambda device=None: _STREAM,
        "Stream": Stream,
        "Event": Event,
        "stream": _in_stream,
        "set_stream": _nothing(),
        "synchronize": _nothing(),
        "empty_cache": _nothing(),
        "get_rng_state": _reading_state(),
        "set_rng_state": _setting_state(),
        "manual_seed": _seeding(),
        "manual_seed_all": _seeding(),
        "default_generators": _Generators(),
        "_lazy_call": _call,
        "_lazy_init": _nothing(),
    }
    return [
        *((torch.cuda, name, value) for name, value in cuda.items()),
        (torch.cuda.random, "get_rng_state", _reading_state()),
        (torch.cuda.random, "set_rng_state", _setting_state()),
        *((torch.cuda.nvtx, name, _nothing()) for name in ("range_push", "range_pop", "mark")),
        *((torch, name, _on_cpu(getattr(torch, name))) for name in _FACTORIES),
        (torch, "autocast", _Autocast),
        # megatron-core compiles small functions: on a CPU that takes a C++ compiler and minutes, to save microseconds.
        (torch, "compile", _compile),
        (torch.Tensor, "cuda", _itself),
        (torch.Tensor, "pin_memory", _itself),
        (torch.Tensor, "record_stream", _nothing()),
        (torch.Tensor, "type", _type_name),
        (torch.Tensor, "to", _moving(torch.Tensor.to)),
        (torch.nn.Module, "cuda", _itself),
        (torch.nn.Module, "to", _moving(torch.nn.Module.to)),
    ]


def install() -> None:
    """Make the names of `torch.cuda` work on this process's device. Does nothing when it is done already.

    Best called before megatron-core is imported. What that took from torch by name, or compiled, before is put right.
    """
    kind = device_type()
    if kind == "npu":
        from torch_npu.contrib import transfer_to_npu  # noqa: F401 (its import does it)
    elif kind == "cpu" and not _installed:
        if _has_compiled():
            torch.compiler.set_stance("force_eager")
        replacements = _replacements()
        for owner, name, value in (*replacements, *_taken_by_name(replacements)):
            _installed.append((owner, name, vars(owner).get(name, _MISSING)))
            setattr(owner, name, value)


def uninstall() -> None:
    """Put everything back (cpu only)."""
    was_installed = bool(_installed)
    while _installed:
        owner, name, original = _installed.pop()
        if original is _MISSING:
            delattr(owner, name)
        else:
            setattr(owner, name, original)
    if was_installed and _has_compiled():
        torch.compiler.set_stance("default")


def _taken_by_name(replacements: list[tuple[Any, str, Any]]) -> list[tuple[Any, str, Any]]:
    """What modules of megatron-core hold of the functions that are replaced: `from torch.cuda import device`."""
    old = [(vars(owner).get(name), value) for owner, name, value in replacements]
    new = {id(held): value for held, value in old if callable(held)}
    modules = [module for name, module in sys.modules.items() if name.partition(".")[0] == _LIBRARY]
    return [
        (module, attribute, new[id(held)])
        for module in modules
        for attribute, held in list(vars(module).items())
        if id(held) in new
    ]


def _has_compiled() -> bool:
    """Whether megatron-core was imported before the names were installed, and has functions of torch's compiler."""
    jit = sys.modules.get(f"{_LIBRARY}.core.jit")
    return jit is not None and jit.jit_fuser is not _compile
