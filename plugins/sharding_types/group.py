"""Process group of a typed rank: it sends nothing, and tells the types of what each collective gives.

A dry run's group, alone: of the values that other ranks send it takes those of this rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import Tensor

from ...grid import Grid
from ..dry_run.exchange import NOT_RUN
from ..dry_run.group import RecordedWork, Recorder, RecordingGroup, reduction

BACKEND = "triax_types"
# Told of each collective: its name, the group, the input, the output, and the reduction.
Listener = Callable[[str, "TypedGroup", Tensor, Tensor, str], None]


class _OwnValues:
    """Link to ranks that do not run: what this rank gives is what it gets."""

    def __init__(self) -> None:
        self._given: Any = None

    def send(self, message: dict[str, Any]) -> None:
        """Keep what this rank gives."""
        self._given = message.get("value")

    def ask(self, request: dict[str, Any]) -> Any:
        """Return what this rank has given."""
        return NOT_RUN if "members" not in request else [[rank, self._given] for rank in request["members"]]


class TypedGroup(RecordingGroup):
    """Process group that tells a listener of its collectives."""

    def __init__(self, rank: int, ranks: Sequence[int]) -> None:
        super().__init__(Recorder(rank, len(ranks), _OwnValues()), ranks)  # type: ignore[arg-type]
        self.axis, self.tell = "", _silent

    def getBackendName(self) -> str:
        """Return the name of the backend."""
        return BACKEND

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> RecordedWork:
        """Reduce in place."""
        for tensor in tensors:
            self.tell("all_reduce", self, tensor, tensor, reduction(opts))
        return super().allreduce(tensors, opts)

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> RecordedWork:
        """Overwrite with one rank's."""
        for tensor in tensors:
            self.tell("broadcast", self, tensor, tensor, "")
        return super().broadcast(tensors, opts)

    def all_gather_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> RecordedWork:
        """Concatenate."""
        self.tell("all_gather", self, tensor, output, "")
        return super().all_gather_single(output, tensor, opts)

    _allgather_base = all_gather_single

    def reduce_scatter_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> RecordedWork:
        """Reduce, and keep a slice."""
        self.tell("reduce_scatter", self, tensor, output, reduction(opts))
        return super().reduce_scatter_single(output, tensor, opts)

    _reduce_scatter_base = reduce_scatter_single

    def all_to_all_single(
        self, output: Tensor, tensor: Tensor, receive: list[int] | None, send: list[int] | None, opts: Any = None
    ) -> RecordedWork:
        """Exchange rows."""
        self.tell("all_to_all", self, tensor, output, "")
        return super().all_to_all_single(output, tensor, receive, send, opts)

    alltoall_base = all_to_all_single

    def recv(self, tensors: list[Tensor], source: int, tag: int = 0) -> RecordedWork:
        """Receive another rank's tensor."""
        for tensor in tensors:
            self.tell("receive", self, tensor, tensor, "")
        return super().recv(tensors, source, tag)


@contextmanager
def typed_grid(rank: int, size: int, axes: dict[str, int]) -> Iterator[Grid]:
    """Context with the grid of one rank of ``size``, of which no other runs.

    Raises:
        RuntimeError: this process has a process group already.
    """
    if dist.is_initialized():
        raise RuntimeError("types are checked in a process without a process group: start it without a launcher")
    if BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(BACKEND, _make, extended_api=True, devices=["cpu", "cuda", "meta"])
    dist.init_process_group(BACKEND, store=dist.HashStore(), rank=rank, world_size=size)
    try:
        sizes: dict[str, Any] = axes
        yield Grid(**sizes)
    finally:
        dist.destroy_process_group()


def listen(grid: Grid, listener: Listener) -> None:
    """Tell a listener of the collectives of all axes of a grid."""
    for axis in grid.axes():
        if isinstance(axis.group, TypedGroup):
            axis.group.axis, axis.group.tell = axis.name, listener


def _make(options: Any, _: Any) -> TypedGroup:
    ranks = options.global_ranks_in_group or range(options.group_size)
    return TypedGroup(ranks[options.group_rank], ranks)


def _silent(*_: Any) -> None:
    """Listen to nothing."""
