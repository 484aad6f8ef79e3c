"""Devices of this machine: GPUs as text, or left alone in a dry run; functions of ``torch.cuda`` for the CPU."""

from __future__ import annotations

import os
from contextlib import nullcontext
from typing import Any

import torch

from .environment import local_place, resident_memory, resident_peak


def gpu_descriptions() -> list[tuple[str, str]]:
    """Return a name and a description of each GPU; without any, one entry with the reason."""
    found = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        half = "bfloat16" if torch.cuda.is_bf16_supported() else "no bfloat16: use fp16"
        found.append((f"GPU {index}", f"{properties.name}, {properties.total_memory / 2**30:.1f} GiB, {half}"))
    if not found:
        built = torch.version.cuda or torch.version.hip
        why = f"torch is built for {built}, but finds no GPU or driver" if built else "this torch is built without CUDA"
        found.append(("GPU", f"none: {why}. Ranks run on the CPU"))
    return found


def gpu_sizes(device: torch.device) -> tuple[str, int, int]:
    """Return a GPU's name, its bytes of memory and its number of multiprocessors."""
    properties = torch.cuda.get_device_properties(device)
    return properties.name, properties.total_memory, properties.multi_processor_count


def wait_for(device: torch.device) -> None:
    """Wait until a device has computed what was launched on it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def usable_memory(device: torch.device) -> float:
    """Return the bytes that the tensors of a process may take.

    On a GPU: 95 % of its memory without 1 GiB for CUDA's context, as the allocator loses some to fragments. On a CPU:
    90 % of the host's memory, shared equally by the ranks of the host.
    """
    if device.type == "cuda":
        return 0.95 * float(torch.cuda.get_device_properties(device).total_memory - 2**30)
    _, ranks = local_place() or (0, 1)
    return 0.9 * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / ranks


def has_room(device: torch.device, size: float) -> bool:
    """Return True if a device has this many bytes left. On a CPU memory is reserved by use, so that most sizes pass."""
    try:
        torch.empty(int(min(max(size, 0), 2**62)), dtype=torch.uint8, device=device)
    except RuntimeError:  # torch.OutOfMemoryError on a GPU is one
        return False
    return True


def ignore_device_choice() -> None:
    """Make ``torch.cuda.set_device`` do nothing in this process, which runs as a rank of another machine."""
    cuda: Any = torch.cuda
    cuda.set_device = lambda *_: None


class CPUFunctions:
    """Functions that ``torch.cuda`` has, for the CPU: its memory is this process's resident memory."""

    Stream = Event = None
    set_rng_state = staticmethod(lambda state, index=None: torch.set_rng_state(state))
    get_rng_state = staticmethod(lambda index=None: torch.get_rng_state())
    manual_seed = manual_seed_all = staticmethod(torch.manual_seed)
    initial_seed = staticmethod(torch.initial_seed)
    stream = device = staticmethod(lambda stream=None: nullcontext())
    empty_cache = reset_max_memory_allocated = reset_peak_memory_stats = staticmethod(lambda index=None: None)
    current_stream = default_stream = staticmethod(lambda index=None: None)
    current_device = staticmethod(lambda: "cpu")
    device_count = staticmethod(lambda: (local_place() or (0, 1))[1])
    is_available = staticmethod(lambda: True)
    max_memory_allocated = max_memory_reserved = staticmethod(lambda index=None: resident_peak())

    memory_allocated = memory_reserved = staticmethod(lambda index=None: resident_memory())

    def memory_stats(self, index: int | None = None) -> dict[str, int]:
        """Return the present and the largest resident bytes under the names of torch's statistics."""
        return {"allocated_bytes.all.current": resident_memory(), "allocated_bytes.all.peak": resident_peak()}
