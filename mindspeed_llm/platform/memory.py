"""Memory figures in GiB: the device allocator's, or on cpu the resident memory of this process."""

from __future__ import annotations

import ctypes
import sys
from dataclasses import dataclass

from mindspeed_llm.platform.device import device_module, device_type

_GIB = 1024**3
_M_MMAP_THRESHOLD = -3  # malloc.h
_STATUS_FILE = "/proc/self/status"
_CLEAR_REFS_FILE = "/proc/self/clear_refs"


@dataclass(frozen=True, kw_only=True)
class HostMemory:
    """Memory of the whole machine: used and available in GiB, and the used share in percent."""

    used_gb: float
    available_gb: float
    usage_percent: float


def memory_allocated_gb() -> float:
    """GiB that tensors occupy now (cpu: resident memory of the process, all of its libraries included)."""
    if device_type() != "cpu":
        return device_module().memory_allocated() / _GIB
    return _process_memory_bytes("VmRSS") / _GIB


def max_memory_allocated_gb() -> float:
    """Largest `memory_allocated_gb` since the start or the last `reset_peak`, in GiB."""
    if device_type() != "cpu":
        return device_module().max_memory_allocated() / _GIB
    return _process_memory_bytes("VmHWM") / _GIB


def max_memory_reserved_gb() -> float:
    """Largest amount that the allocator held, its free blocks included, in GiB (cpu: as `max_memory_allocated_gb`)."""
    if device_type() != "cpu":
        return device_module().max_memory_reserved() / _GIB
    return max_memory_allocated_gb()


def reset_peak() -> bool:
    """Start the peak figures anew.

    Returns:
        False where the system cannot do it (cpu outside Linux, or a kernel that refuses): the peak then counts from
        the start of the process.
    """
    if device_type() != "cpu":
        device_module().reset_peak_memory_stats()
        return True
    try:
        # "5" resets the high-water mark of the resident set (proc(5)).
        with open(_CLEAR_REFS_FILE, "w", encoding="ascii") as file:
            file.write("5")
    except OSError:
        return False
    return True


def return_freed_blocks(threshold: int) -> bool:
    """On cpu: give blocks of at least `threshold` bytes back to the system when they are freed.

    glibc keeps freed blocks of up to 32 MiB in its heap and lets the limit grow with the blocks that a program frees,
    so that a training process soon keeps the peak of every phase. With a fixed limit (mallopt's M_MMAP_THRESHOLD)
    large blocks are mapped and unmapped one by one: less resident memory, more page faults.

    Returns:
        False where it has no effect: on an accelerator, whose allocator is another one, or without glibc.
    """
    if device_type() != "cpu":
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and mallopt(_M_MMAP_THRESHOLD, threshold) == 1


def host_memory() -> HostMemory:
    """Memory of the machine this process runs on (not limited to a container's share)."""
    import psutil

    figures = psutil.virtual_memory()
    used = figures.total - figures.available
    return HostMemory(
        used_gb=used / _GIB, available_gb=figures.available / _GIB, usage_percent=100.0 * used / figures.total
    )


def _process_memory_bytes(field: str) -> int:
    """VmRSS (resident now) or VmHWM (its peak) of this process, in bytes."""
    try:
        with open(_STATUS_FILE, encoding="ascii") as lines:
            for line in lines:
                if line.startswith(field + ":"):
                    return int(line.split()[1]) * 1024
    except FileNotFoundError:
        pass  # no procfs: the resource module below knows the peak only, the best figure there is
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
