"""Devices of this machine: the one that a rank takes, GPUs as text; functions of ``torch.cuda`` for the CPU."""

from __future__ import annotations

import os
from contextlib import nullcontext, suppress
from typing import Any

import torch
import torch.distributed as dist

from ..base.accelerators import functions_of, is_accelerator
from ..base.errors import ArgumentError
from .environment import local_place, resident_memory, resident_peak


def default_accelerator() -> torch.device | None:
    """Return the kind of accelerator on which ranks train unless told otherwise; None: they train on the CPU.

    It must be present, and have a backend of its own: a Mac's MPS has none but gloo, which sends from host memory.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    own = accelerator is not None and dist.Backend.default_device_backend_map.get(accelerator.type, "gloo") != "gloo"
    return accelerator if own else None


def accelerators() -> int:
    """Return the number of accelerators that this process sees."""
    return torch.accelerator.device_count() if default_accelerator() is not None else 0


def backends_of(device: torch.device) -> str:
    """Return the backends of a process group that sends tensors of a device, and of the host, as torch names them."""
    backend = dist.Backend.default_device_backend_map.get(device.type, "gloo")
    return "gloo" if backend == "gloo" else f"cpu:gloo,{device.type}:{backend}"


def take_device(device: torch.device | str | None, number: int) -> torch.device:
    """Return the device of a rank, and make it the present one of this process.

    Args:
        device: the device that was asked for; without an index: one for each rank of the host. None: an accelerator if
            there is one, else the CPU.
        number: number of the rank among the ranks of its host.

    Raises:
        ArgumentError: there is no such device.
    """
    try:
        chosen = torch.device("cpu") if device is None else torch.device(device)
    except (RuntimeError, TypeError, ValueError):
        raise ArgumentError(f"Grid was given device={device!r:.60}: give one as 'cpu' or 'cuda:0'") from None
    if device is None:
        chosen = default_accelerator() or chosen
    if not is_accelerator(chosen):
        return chosen
    if chosen.type == "mps":
        raise ArgumentError(
            "Grid was given device='mps', which has no float64: triax sums losses and norms and draws dropout in it. "
            "Give device='cpu'"
        )
    count = 0
    with suppress(RuntimeError):  # this torch has no functions for it
        functions = functions_of(chosen)
        count = functions.device_count() if functions.is_available() else 0
    if (chosen.index or 0) >= count:
        raise ArgumentError(
            f"Grid was given device={str(device)!r}, and this process sees {count} devices of the kind {chosen.type}: "
            "give device='cpu' or a device that triax env lists, or leave it out"
        )
    if chosen.index is None:
        chosen = torch.device(chosen.type, number % count)
    functions.set_device(chosen)
    return chosen


def gpu_descriptions() -> list[tuple[str, str]]:
    """Return a name and a description of each accelerator; without any, one entry with the reason."""
    descriptions = []
    for index in range(accelerators()):
        kind = default_accelerator()
        assert kind is not None
        functions = functions_of(kind)
        properties = functions.get_device_properties(index)
        half = "bfloat16" if functions.is_bf16_supported() else "no bfloat16: use fp16"
        name = f"GPU {index}" if kind.type == "cuda" else f"{kind.type}:{index}"
        descriptions.append((name, f"{properties.name}, {properties.total_memory / 2**30:.1f} GiB, {half}"))
    if not descriptions:
        built = torch.version.cuda or torch.version.hip
        why = f"torch is built for {built}, but finds no GPU or driver" if built else "this torch is built without CUDA"
        descriptions.append(("GPU", f"none: {why}. Ranks run on the CPU"))
    return descriptions


def gpu_sizes(device: torch.device) -> tuple[str, int, int]:
    """Return a GPU's name, its bytes of memory and its number of multiprocessors."""
    properties = functions_of(device).get_device_properties(device)
    return properties.name, properties.total_memory, properties.multi_processor_count


def wait_for(device: torch.device) -> None:
    """Wait until a device has computed what was launched on it."""
    if is_accelerator(device):
        functions_of(device).synchronize(device)


def usable_memory(device: torch.device) -> float:
    """Return the bytes that the tensors of a process may take.

    On an accelerator: 95 % of its memory without 1 GiB for its context, as the allocator loses some to fragments. On a
    CPU: 90 % of the host's memory, shared equally by the ranks of the host.
    """
    if is_accelerator(device):
        return 0.95 * float(functions_of(device).get_device_properties(device).total_memory - 2**30)
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
