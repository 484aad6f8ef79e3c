"""Process group of a typed rank: it sends nothing, and tells the types of what each collective gives.

A dry run's group, alone: of the values that other ranks send it takes those of this rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch.distributed as dist
from torch import Tensor

from ...grid import Grid
from ..dry_run.exchange import NOT_RUN
from ..dry_run.group import RecordedWork, Recorder, RecordingGroup

BACKEND = "triax_types"
Listener = Callable[[str, "TypedGroup", Tensor, Tensor], None]  # told of a collective's name, group, input and output


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


def _told(name: str) -> Any:
    """Return a method of ``RecordingGroup`` that tells the listener first."""
    plain = getattr(RecordingGroup, name)

    @wraps(plain)
    def call(self: TypedGroup, *args: Any, **kwargs: Any) -> RecordedWork:
        for output, tensor in [args[:2]] if isinstance(args[0], Tensor) else zip(args[0], args[0], strict=True):
            self.tell(name, self, tensor, output)
        work: RecordedWork = plain(self, *args, **kwargs)
        return work

    return call


class TypedGroup(RecordingGroup):
    """Process group that tells a listener of its collectives."""

    def __init__(self, rank: int, ranks: Sequence[int]) -> None:
        super().__init__(Recorder(rank, len(ranks), _OwnValues()), ranks)  # type: ignore[arg-type]
        self.axis, self.tell = "", _silent

    def getBackendName(self) -> str:
        """Return the name of the backend."""
        return BACKEND

    allreduce = _told("allreduce")
    broadcast = _told("broadcast")
    recv = _told("recv")
    _allgather_base = all_gather_single = _told("all_gather_single")
    _reduce_scatter_base = reduce_scatter_single = _told("reduce_scatter_single")
    alltoall_base = all_to_all_single = _told("all_to_all_single")


@contextmanager
def typed_grid(rank: int, size: int, axes: dict[str, int]) -> Iterator[Grid]:
    """Context with the grid of one rank of ``size``. The other ranks do not run.

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
