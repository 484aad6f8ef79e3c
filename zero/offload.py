"""Offload of shards, master weights, gradients and optimizer state to host memory or to disk (CPU or NVMe).

A tensor on disk is a part of a file mapped into memory. Computing with it reads and writes pages of the file, and
``evict`` gives the used pages back to the kernel, which writes the changed ones. Only tensors in use are resident.
Rajbhandari et al. 2021 (ZeRO-Infinity), section 5; for host memory, Ren et al. 2021 (ZeRO-Offload).
"""

from __future__ import annotations

import mmap
import os
import shutil
import tempfile
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from ..base.accelerators import functions_of, is_accelerator
from ..base.torch_private import storage_id
from ..grid import Grid
from ..grid.agreement.agreement import agreed

_LARGEST = 2**30  # bytes of one mapping at most; each mapping holds a file descriptor


class OffloadError(RuntimeError):
    """Offloaded tensors cannot be allocated. Every rank raises it, with the same message."""


@dataclass(frozen=True)
class OffloadTarget:
    """A place to offload tensors to.

    Attributes:
        kind: ``none`` (the model's device), ``cpu`` (host memory) or ``nvme`` (a file).
        path: the folder of the file.
        pin: pin the host memory if the model is on a GPU.
    """

    kind: Literal["none", "cpu", "nvme"] = "none"
    path: str | None = None
    pin: bool = False


@dataclass(frozen=True)
class OffloadPlan:
    """Options of offload: the place of each kind of tensor, and the sub-groups of the optimizer's step.

    Attributes:
        states: the optimizer's state, masters, and gradients that are accumulated in shards.
        parameters: the shards of stage 3.
        sub_group_size: elements that are updated together, if something is offloaded or ``always`` is set.
        pipeline_read: read the next sub-group while one is updated.
        pipeline_write: let the kernel write a sub-group while the next is updated; False waits until it is written.
        always: step in sub-groups even if nothing is offloaded.
    """

    states: OffloadTarget = OffloadTarget()
    parameters: OffloadTarget = OffloadTarget()
    sub_group_size: int = 2**24
    pipeline_read: bool = True
    pipeline_write: bool = True
    always: bool = False

    @property
    def portions(self) -> bool:
        """True if the optimizer steps one sub-group after the other."""
        return self.always or {self.states.kind, self.parameters.kind} != {"none"}


class Memory:
    """Allocates tensors on the model's device or in host memory.

    Args:
        kind: as in ``OffloadTarget``.
        device: of the tensors.
        pin: pin the tensors.
        dry: allocate them on the meta device instead, for a dry run.

    Attributes:
        kind, device: as given.
    """

    def __init__(self, kind: str, device: torch.device, pin: bool = False, dry: bool = False) -> None:
        self.kind, self.device = kind, device
        self._pin, self._dry = pin, dry
        self._made: set[int] = set()  # storages
        self._copied: Any = None  # event after the last copy of ``accumulate``

    def zeros(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return a flat tensor of zeros.

        Raises:
            OffloadError: the disk is full.
        """
        tensor = torch.zeros(numel, dtype=dtype, device="meta" if self._dry else self.device, pin_memory=self._pin)
        self._made.add(storage_id(tensor.untyped_storage()))
        return tensor

    def holds(self, tensor: Tensor) -> bool:
        """Return True if a tensor was allocated here."""
        return storage_id(tensor.untyped_storage()) in self._made

    def accumulate(self, total: Tensor, value: Tensor, first: bool) -> None:
        """Add a value to a total that was allocated here, or replace it by the ``first`` one.

        Pinned memory gets the sum later: the host must ``settle`` before it reads or writes the total.
        """
        if not (self._pin and is_accelerator(value.device)):
            value = value.to(total.device)
            total.copy_(value) if first else total.add_(value)
            return
        # Added on the device, so that the host need not wait for each value.
        value = value if first else total.to(value.device, non_blocking=True).add_(value)
        total.copy_(value, non_blocking=True)
        self._copied = functions_of(value.device).Event()
        self._copied.record()

    def settle(self) -> None:
        """Wait until pinned memory has all sums of ``accumulate``."""
        if self._copied is not None:
            self._copied.synchronize()
            self._copied = None

    def prefetch(self, tensor: Tensor) -> None:
        """Prefetch a tensor that is needed soon. No effect in RAM."""

    def evict(self, tensor: Tensor) -> None:
        """Evict a tensor that is not needed for a while. No effect in RAM."""


class DiskMemory(Memory):
    """Allocates tensors in an unnamed file, which is deleted when the process ends, however it ends.

    Args:
        path: the folder of the file.
        wait: ``evict`` returns when changes are written to the disk.

    Raises:
        OffloadError: there is no such folder, or no file can be made in it.
    """

    def __init__(self, path: str, wait: bool) -> None:
        super().__init__("nvme", torch.device("cpu"))
        self._path, self._wait = path, wait
        self._maps: list[tuple[int, mmap.mmap]] = []  # the address of each, and itself
        self._size = 0  # of the file
        self._free = 0  # bytes at the end of the last mapping
        try:
            self._file = tempfile.TemporaryFile(prefix="triax-", dir=path)  # noqa: SIM115
        except OSError as error:
            raise OffloadError(
                f"nothing can be offloaded to {path}: {error.strerror}; set nvme_path to a folder that exists and in "
                "which you may write"
            ) from error

    def zeros(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return a flat tensor of zeros. Disk space is reserved at once, so that no later write finds the disk full."""
        if numel == 0:
            return torch.zeros(0, dtype=dtype)
        pages = -(-numel * dtype.itemsize // mmap.ALLOCATIONGRANULARITY)
        needed = pages * mmap.ALLOCATIONGRANULARITY
        if needed > self._free:
            # Mappings double in size: there are few of them, and at most half of the file is unused.
            self._map(needed, max(needed, min(self._size, _LARGEST)))
        _, mapped = self._maps[-1]
        start = len(mapped) - self._free
        self._free -= needed
        return torch.frombuffer(mapped, dtype=dtype, count=numel, offset=start)

    def holds(self, tensor: Tensor) -> bool:
        """Return True if a tensor was allocated here."""
        return self._find(tensor) is not None

    def prefetch(self, tensor: Tensor) -> None:
        """Let the kernel start reading a tensor."""
        pages = self._find(tensor)
        if pages is not None:
            mapped, start, length = pages
            mapped.madvise(mmap.MADV_WILLNEED, start, length)

    def evict(self, tensor: Tensor) -> None:
        """Release the resident pages of a tensor; changes are written to the file."""
        pages = self._find(tensor)
        if pages is not None:
            mapped, start, length = pages
            if self._wait:
                mapped.flush(start, length)
            mapped.madvise(mmap.MADV_DONTNEED, start, length)

    def _map(self, needed: int, wanted: int) -> None:
        for size in dict.fromkeys((wanted, needed)):
            try:
                # A hole in the file would be a bus error at some later write.
                os.posix_fallocate(self._file.fileno(), self._size, size)
            except OSError as error:
                problem = error
                os.ftruncate(self._file.fileno(), self._size)
                continue
            mapped = mmap.mmap(self._file.fileno(), size, offset=self._size)
            self._maps.append((torch.frombuffer(mapped, dtype=torch.uint8).data_ptr(), mapped))
            self._size, self._free = self._size + size, size
            return
        raise OffloadError(
            f"{self._path} has no room for the offloaded tensors: this rank has {self._size / 1e9:.3g} GB there and "
            f"needs {needed / 1e9:.3g} GB more, but {shutil.disk_usage(self._path).free / 1e9:.3g} GB are free "
            f"({problem.strerror}). Make room, set nvme_path to a larger disk, or use more replicas"
        ) from problem

    def _find(self, tensor: Tensor) -> tuple[mmap.mmap, int, int] | None:
        """Return the mapping of a contiguous tensor, and the first byte and the length of its pages."""
        address, length = tensor.data_ptr(), tensor.numel() * tensor.element_size()
        for base, mapped in self._maps:
            if length and base <= address < base + len(mapped):
                start = (address - base) // mmap.PAGESIZE * mmap.PAGESIZE
                return mapped, start, address - base + length - start
        return None


class OffloadMemory:
    """Allocators of one rank.

    Attributes:
        offload: the options.
        states, parameters: allocators for the tensors that ``OffloadPlan`` names so.
    """

    def __init__(self, offload: OffloadPlan, device: torch.device) -> None:
        self.offload = offload
        self._made: dict[OffloadTarget, Memory] = {}
        self.states, self.parameters = self._at(offload.states, device), self._at(offload.parameters, device)

    def place(self, tensor: Tensor) -> str:
        """Return the place of a tensor: ``cpu`` or ``nvme``, or ``none`` if it is not offloaded."""
        kinds = (memory.kind for memory in self._made.values() if tensor.numel() and memory.holds(tensor))
        return next(kinds, "none")

    def prefetch(self, *tensors: Tensor) -> None:
        """Prefetch tensors that are needed soon, if ``pipeline_read`` is set."""
        if self.offload.pipeline_read:
            for memory in self._made.values():
                for tensor in tensors:
                    memory.prefetch(tensor)

    def evict(self, *tensors: Tensor) -> None:
        """Evict tensors that are not needed for a while."""
        for memory in self._made.values():
            for tensor in tensors:
                memory.evict(tensor)

    def _at(self, place: OffloadTarget, device: torch.device) -> Memory:
        if place not in self._made:
            self._made[place] = memory_at(place, device, wait=not self.offload.pipeline_write)
        return self._made[place]


def memory_at(place: OffloadTarget, device: torch.device, wait: bool) -> Memory:
    """Return the allocator of a place, for a model on a device. On the meta device, in a dry run, nothing is allocated.

    Args:
        place: the place.
        device: device of the model.
        wait: as in ``DiskMemory``.
    """
    if place.kind == "none":
        return Memory(place.kind, device)
    if place.kind == "nvme" and device.type != "meta":
        assert place.path is not None
        return DiskMemory(place.path, wait)
    return Memory(place.kind, torch.device("cpu"), place.pin and is_accelerator(device), dry=device.type == "meta")


def placed_on_all_ranks(grid: Grid, offload: OffloadPlan) -> AbstractContextManager[None]:
    """Raise on every rank the ``OffloadError`` of any. Collective, if something is offloaded to files."""
    if "nvme" not in (offload.states.kind, offload.parameters.kind):
        return nullcontext()
    return agreed(grid, OffloadError, catch=(OffloadError,), name_rank=True)
