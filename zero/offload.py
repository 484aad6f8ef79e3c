"""Offload: shards, masters, gradients and the optimizer's state in the host's memory or on disk.

On disk, a tensor is a part of a file mapped into memory: whoever computes with it reads and writes pages of the file,
and ``behind`` hands the pages of what was used back to the kernel, which writes what changed. So what is resident is
what is being used. Rajbhandari et al. 2021 (ZeRO-Infinity), section 5; in the host's memory, Ren et al. 2021
(ZeRO-Offload).
"""

from __future__ import annotations

import mmap
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ..grid import Grid

_LARGEST = 2**30  # bytes of a file that are mapped at once: each mapping holds a file descriptor


class OffloadError(RuntimeError):
    """There is no place for what is to be offloaded; every rank raises it alike."""


@dataclass(frozen=True)
class Place:
    """Where something is kept.

    Attributes:
        kind: ``none`` (where the model is), ``cpu`` (the host's memory) or ``nvme`` (a file).
        path: the folder of the file.
        pin: pin the host's memory, where the model is on a GPU.
    """

    kind: Literal["none", "cpu", "nvme"] = "none"
    path: str | None = None
    pin: bool = False


@dataclass(frozen=True)
class Offload:
    """What is kept where, and in which portions it is updated.

    Attributes:
        states: the optimizer's state, masters, and gradients that are accumulated in shards.
        parameters: the shards of stage 3.
        sub_group: elements that are updated together, where something is kept elsewhere, or ``always``.
        ahead: read the next sub-group while one is updated.
        behind: let the kernel write a sub-group while the next is updated; False waits until it is written.
    """

    states: Place = Place()
    parameters: Place = Place()
    sub_group: int = 2**24
    ahead: bool = True
    behind: bool = True
    always: bool = False

    @property
    def portions(self) -> bool:
        """Whether the optimizer steps one sub-group after the other."""
        return self.always or {self.states.kind, self.parameters.kind} != {"none"}


class Memory:
    """Makes tensors where the model is, or in the host's memory.

    Attributes:
        kind: as in ``Place``.
        device: of the tensors.
    """

    def __init__(self, kind: str, device: torch.device, pin: bool = False) -> None:
        self.kind, self.device = kind, device
        self._pin = pin
        self._made: set[int] = set()  # addresses

    def zeros(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A flat tensor of zeros.

        Raises:
            OffloadError: there is no room for it.
        """
        tensor = torch.zeros(numel, dtype=dtype, device=self.device, pin_memory=self._pin)
        self._made.add(tensor.data_ptr())
        return tensor

    def holds(self, tensor: Tensor) -> bool:
        """Whether it was made here."""
        return tensor.data_ptr() in self._made

    def ahead(self, tensor: Tensor) -> None:
        """It is needed soon."""

    def behind(self, tensor: Tensor) -> None:
        """It is not needed for a while."""


class Disk(Memory):
    """Makes tensors in a file that has no name: it is gone with the process, whatever ends that.

    Args:
        path: the folder of the file.
        wait: ``behind`` returns when what changed is on the disk.

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
                f"nothing can be offloaded to {path}: {error.strerror}; set nvme_path to a folder that exists and can "
                "be written"
            ) from error

    def zeros(self, numel: int, dtype: torch.dtype) -> Tensor:
        """See ``Memory.zeros``. The room is taken at once: no write finds the disk full later."""
        if numel == 0:
            return torch.zeros(0, dtype=dtype)
        needed = _pages(numel * dtype.itemsize)
        if needed > self._free:
            # Larger and larger mappings: few of them, and at the most half of the file stays unused.
            self._map(needed, max(needed, min(self._size, _LARGEST)))
        _, mapped = self._maps[-1]
        start = len(mapped) - self._free
        self._free -= needed
        return torch.frombuffer(mapped, dtype=dtype, count=numel, offset=start)

    def holds(self, tensor: Tensor) -> bool:
        """See ``Memory.holds``."""
        return self._find(tensor) is not None

    def ahead(self, tensor: Tensor) -> None:
        """The kernel starts reading it."""
        found = self._find(tensor)
        if found is not None:
            mapped, start, length = found
            mapped.madvise(mmap.MADV_WILLNEED, start, length)

    def behind(self, tensor: Tensor) -> None:
        """Its pages leave this process; what changed is written to the file."""
        found = self._find(tensor)
        if found is not None:
            mapped, start, length = found
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
            f"{self._path} has no room for what is to be offloaded: this rank has {self._size / 1e9:.3g} GB there and "
            f"needs {needed / 1e9:.3g} GB more, of which {shutil.disk_usage(self._path).free / 1e9:.3g} GB are free "
            f"({problem.strerror}): make room, set nvme_path to a larger disk, or use more replicas"
        ) from problem

    def _find(self, tensor: Tensor) -> tuple[mmap.mmap, int, int] | None:
        """The mapping of a contiguous tensor, and the pages of it: their first byte, and their length."""
        address, length = tensor.data_ptr(), tensor.numel() * tensor.element_size()
        for base, mapped in self._maps:
            if length and base <= address < base + len(mapped):
                start = (address - base) // mmap.PAGESIZE * mmap.PAGESIZE
                return mapped, start, address - base + length - start
        return None


class Memories:
    """The places of one rank.

    Attributes:
        states, parameters: where to make what ``Offload`` names so.
    """

    def __init__(self, offload: Offload, device: torch.device) -> None:
        self.offload = offload
        self._made: dict[Place, Memory] = {}
        self.states, self.parameters = self._at(offload.states, device), self._at(offload.parameters, device)

    def place(self, tensor: Tensor) -> str:
        """Where it is kept: ``cpu`` or ``nvme``, or ``none`` where it was not offloaded."""
        kinds = (memory.kind for memory in self._made.values() if tensor.numel() and memory.holds(tensor))
        return next(kinds, "none")

    def ahead(self, *tensors: Tensor) -> None:
        """They are needed soon."""
        if self.offload.ahead:
            for memory in self._made.values():
                for tensor in tensors:
                    memory.ahead(tensor)

    def behind(self, *tensors: Tensor) -> None:
        """They are not needed for a while."""
        for memory in self._made.values():
            for tensor in tensors:
                memory.behind(tensor)

    def _at(self, place: Place, device: torch.device) -> Memory:
        if place not in self._made:
            if place.kind == "nvme":
                assert place.path is not None
                self._made[place] = Disk(place.path, wait=not self.offload.behind)
            else:
                pin = place.kind == "cpu" and place.pin and device.type == "cuda"
                self._made[place] = Memory(place.kind, device if place.kind == "none" else torch.device("cpu"), pin)
        return self._made[place]


@contextmanager
def agreed(grid: Grid, offload: Offload) -> Iterator[None]:
    """Where one rank finds no place within, every rank raises what it said. Collective, if there is a file.

    Raises:
        OffloadError: see there.
    """
    problem: str | None = None
    try:
        yield
    except OffloadError as error:
        problem = f"{grid.describe()}: {error}"
    if "nvme" in (offload.states.kind, offload.parameters.kind):
        problems = [said for said in grid.world.all_gather_object(problem) if said]
        if problems:
            raise OffloadError(problems[0])


def _pages(size: int) -> int:
    return -(-size // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
