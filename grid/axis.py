"""An axis of the grid as one rank sees it, and the collectives over it: every byte triax sends goes through here.

At size 1 nothing is communicated. The two collectives that torch 2.13 renamed have their one shim here.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from .traffic import Traffic

if TYPE_CHECKING:
    from .grid import Grid


class Pending(Protocol):
    """Something under way; ``wait`` returns when it is done, and must be called exactly once."""

    def wait(self) -> object: ...


class _Done:
    """What an axis of size 1 returns: there was nothing to do."""

    def wait(self) -> None:
        return None


class _Then:
    """A collective with a local step after it."""

    def __init__(self, work: Pending, then: Callable[[], object]) -> None:
        self._work, self._then = work, then

    def wait(self) -> None:
        self._work.wait()
        self._then()


_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
_COMBINE: dict[str, Callable[..., Tensor]] = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}
_SMALL = 1024  # bytes
_EXCHANGE = 1  # the tag of a small all-reduce's messages: stages use 2 and above


class Axis:
    """The ranks along one axis (or several joined) that this rank talks to.

    Attributes:
        name: ``pipe``, ``data``, ``tensor``, or the names of a joint group.
        ranks: their global ranks, in the axis's order.
        rank: this process's position among them.
        size: their number.
        traffic: where its bytes are counted.
        group: torch's process group; None at size 1, and after the grid is closed.
        grid: whose axis it is; None where one made it by hand.
    """

    grid: Grid | None = None

    def __init__(
        self,
        name: str,
        ranks: Sequence[int],
        me: int,
        group: dist.ProcessGroup | None,
        traffic: Traffic | None = None,
    ) -> None:
        self.name = name
        self.traffic = traffic if traffic is not None else Traffic()
        self.ranks = tuple(ranks)
        self.rank = self.ranks.index(me)
        self.size = len(self.ranks)
        self.group = group if self.size > 1 else None

    @property
    def is_first(self) -> bool:
        """Whether this rank is the first of the axis."""
        return self.rank == 0

    @property
    def is_last(self) -> bool:
        """Whether this rank is the last of the axis."""
        return self.rank == self.size - 1

    def all_reduce(self, tensor: Tensor, op: str = "sum", async_op: bool = False) -> Pending:
        """Reduce a contiguous tensor over the axis, in place."""
        self._count("all_reduce", 2 * _bytes(tensor) / self.size * (self.size - 1))
        small = tensor.device.type == "cpu" and _bytes(tensor) <= _SMALL and self.size.bit_count() == 1
        if small and not async_op and self.size > 1:
            return self._exchange(tensor, op)
        return self._start(dist.all_reduce, async_op, tensor, op=_OPS[op])

    def _exchange(self, tensor: Tensor, op: str) -> Pending:
        """A small all-reduce, by pairs: in round k a rank sends what it has to the one 2^k away, which sends back both.

        A training step agrees on a few numbers this way, bitwise the same on every rank. In gloo's own all-reduce
        both ends send at once. Then its thread often wants the connection while the caller holds it, and spins on
        the caller's core for a slice of the scheduler's time: with 2 ranks on 2 cores that computed until then it
        takes 0.9 ms, 3 to 4 ms one time in ten; this takes 0.2 ms.
        """
        group = self._open()
        for k in range(self.size.bit_length() - 1):
            peer = self.rank ^ (1 << k)
            if self.rank < peer:
                group.send([tensor], peer, _EXCHANGE).wait()
                group.recv([tensor], peer, _EXCHANGE).wait()
            else:
                theirs = torch.empty_like(tensor)
                group.recv([theirs], peer, _EXCHANGE).wait()
                _COMBINE[op](tensor, theirs, out=tensor)
                group.send([tensor], peer, _EXCHANGE).wait()
        return _Done()

    def all_gather(self, output: Tensor, tensor: Tensor, async_op: bool = False) -> Pending:
        """Every rank's tensor, one behind the other on dim 0 of ``output``: (size * n, ...) from (n, ...)."""
        if self.size == 1:
            if output.data_ptr() != tensor.data_ptr():
                output.copy_(tensor)
            return _Done()
        self._count("all_gather", _bytes(tensor) * (self.size - 1))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            return self._start(dist.all_gather_into_tensor, async_op, output, tensor)

    def reduce_scatter(self, output: Tensor, tensor: Tensor, async_op: bool = False) -> Pending:
        """The sum over the ranks of each one's n-th of a flat tensor: (n,) from (size * n,).

        gloo's own is an all-reduce and a slice, twice the bytes; there, an all-to-all and a local sum is 2 to 4
        times as fast (measured at 2 and 4 ranks), and sums in rank order.
        """
        if self.size == 1:
            if output.data_ptr() != tensor.data_ptr():
                output.copy_(tensor)
            return _Done()
        self._count("reduce_scatter", _bytes(tensor) / self.size * (self.size - 1))
        if tensor.is_cuda:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)
                return self._start(dist.reduce_scatter_tensor, async_op, output, tensor)
        received = torch.empty_like(tensor)
        work = self._start(dist.all_to_all_single, True, received, tensor)
        pending = _Then(work, lambda: torch.sum(received.view(self.size, -1), dim=0, out=output))
        if async_op:
            return pending
        pending.wait()
        return _Done()

    def broadcast(self, tensor: Tensor, source: int = 0, async_op: bool = False) -> Pending:
        """Overwrite a contiguous tensor with that of the axis's rank ``source``."""
        self._count("broadcast", _bytes(tensor) if self.rank == source else 0)
        return self._start(dist.broadcast, async_op, tensor, src=self.ranks[source])

    def all_gather_object(self, value: Any) -> list[Any]:
        """Every rank's picklable value, in order: for reports and errors, never on a hot path."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self._open())
        return values

    def send(self, tensor: Tensor, to: int, tag: int) -> Pending:
        """Start sending a contiguous tensor to the axis's rank ``to``; keep it unchanged until ``wait``."""
        self._count("send", _bytes(tensor))
        # The group's own method, and not ``isend``, which checks its arguments for as long as this takes.
        return self._open().send([_real(tensor)], to, tag)

    def receive(self, tensor: Tensor, source: int, tag: int) -> Pending:
        """Start receiving into a contiguous tensor from the axis's rank ``source``."""
        return self._open().recv([_real(tensor)], source, tag)

    def barrier(self) -> None:
        """Wait until every rank of the axis is here."""
        if self.size > 1:
            dist.barrier(group=self._open())

    def _count(self, collective: str, size: float) -> None:
        if self.size > 1:
            self.traffic.add(self.name, collective, size)

    def _open(self) -> dist.ProcessGroup:
        # Without this check torch would take None for the default group: another grid's, perhaps.
        if self.group is None:
            raise RuntimeError(
                f"the {self.name} axis's process group is closed: a step failed, or grid.close() was called"
            )
        return self.group

    def _start(self, collective: Callable[..., Any], async_op: bool, *args: Any, **kwargs: Any) -> Pending:
        if self.size == 1:
            return _Done()
        work: Pending | None = collective(*args, group=self._open(), async_op=async_op, **kwargs)
        return work if work is not None else _Done()

    def __repr__(self) -> str:
        return f"Axis({self.name}: rank {self.rank} of {self.size}, ranks {list(self.ranks)})"


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _real(tensor: Tensor) -> Tensor:
    """What a message holds: a complex number travels as two real ones."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor
