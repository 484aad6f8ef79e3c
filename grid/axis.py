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


class _Messages:
    """Messages under way, with a local step after them."""

    def __init__(self, works: Sequence[Pending], then: Callable[[], object] | None = None) -> None:
        self._works, self._then = works, then

    def wait(self) -> None:
        for work in self._works:
            work.wait()
        if self._then is not None:
            self._then()


_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
_COMBINE: dict[str, Callable[..., Tensor]] = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}
_SMALL, _MEDIUM = 2**10, 2**24  # bytes
# Tags of these collectives' messages: stages use 2 and above.
_GATHER, _EXCHANGE, _SCATTER, _ALL = 0, 1, 2**20, 2**20 + 1


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
        if tensor.device.type == "cpu" and self.size == 2 and _SMALL < _bytes(tensor) <= _MEDIUM:
            pending = self._exchange_whole(tensor, op)
            return pending if async_op else _waited(pending)
        small = tensor.device.type == "cpu" and _bytes(tensor) <= _SMALL and self.size.bit_count() == 1
        if small and not async_op and self.size > 1:
            return self._exchange(tensor, op)
        return self._start(dist.all_reduce, async_op, tensor, op=_OPS[op])

    def _exchange_whole(self, tensor: Tensor, op: str) -> Pending:
        """An all-reduce of two ranks: each sends the other all of it, as many bytes as in a ring, in one step.

        Gloo's own takes a third longer (2.6 ms for 4 MB on 2 ranks of 2 cores; this 1.9).
        """
        tensor = tensor.detach()
        theirs = torch.empty_like(tensor)
        works = self._swap([tensor] * 2, [theirs] * 2, _EXCHANGE)
        return _Messages(works, lambda: _COMBINE[op](tensor, theirs, out=tensor))

    def _exchange(self, tensor: Tensor, op: str) -> Pending:
        """A small all-reduce by recursive doubling: in round k with the rank 2^k away, which adds up the same.

        A training step agrees on a few numbers this way, bitwise the same on every rank. Gloo's own all-reduce
        takes twice as long (200 us on 2 ranks of 2 cores, 400 on 4; this 100 and 230).
        """
        group = self._open()
        for k in range(self.size.bit_length() - 1):
            peer, theirs = self.rank ^ (1 << k), torch.empty_like(tensor)
            arriving = group.recv([theirs], peer, _EXCHANGE)
            leaving = group.send([tensor], peer, _EXCHANGE)
            arriving.wait()
            leaving.wait()
            _COMBINE[op](tensor, theirs, out=tensor)
        return _Done()

    def all_gather(self, output: Tensor, tensor: Tensor, async_op: bool = False) -> Pending:
        """Every rank's tensor, one behind the other on dim 0 of ``output``: (size * n, ...) from (n, ...).

        gloo's own fills a buffer as large as the output first, and copies it; messages arrive in their place.
        """
        if self.size == 1:
            if output.data_ptr() != tensor.data_ptr():
                output.copy_(tensor)
            return _Done()
        self._count("all_gather", _bytes(tensor) * (self.size - 1))
        if tensor.is_cuda:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)
                return self._start(dist.all_gather_into_tensor, async_op, output, tensor)
        parts = output.view(self.size, *tensor.shape)
        if parts[self.rank].data_ptr() != tensor.data_ptr():
            parts[self.rank].copy_(tensor)
        pending = _Messages(self._swap([parts[self.rank]] * self.size, list(parts), _GATHER))
        return pending if async_op else _waited(pending)

    def reduce_scatter(self, output: Tensor, tensor: Tensor, async_op: bool = False) -> Pending:
        """The sum over the ranks of each one's n-th of a flat tensor: (n,) from (size * n,).

        gloo's own is an all-reduce and a slice, twice the bytes; there, messages and a local sum are 2 to 4
        times as fast (measured at 2 and 4 ranks), and sum in rank order.
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
        parts = tensor.view(self.size, -1)
        mine = parts[self.rank]
        received = [mine if rank == self.rank else torch.empty_like(mine) for rank in range(self.size)]

        def add() -> None:
            # In rank order. The output may be this rank's own part, so that is read before it is written.
            total, into = received[0], output if self.rank == 0 else received[0]
            for part in received[1:-1]:
                total = torch.add(total, part, out=into)
            torch.add(total, received[-1], out=output)

        pending = _Messages(self._swap(list(parts), received, _SCATTER), add)
        return pending if async_op else _waited(pending)

    def all_to_all(self, output: Tensor, tensor: Tensor, async_op: bool = False) -> Pending:
        """Send each rank its one of a tensor, and receive its one for this rank: both (size, ...), contiguous."""
        if self.size == 1:
            output.copy_(tensor)
            return _Done()
        self._count("all_to_all", _bytes(tensor) / self.size * (self.size - 1))
        if tensor.is_cuda:
            return self._start(dist.all_to_all_single, async_op, output, tensor)
        output[self.rank].copy_(tensor[self.rank])
        pending = _Messages(self._swap(list(tensor), list(output), _ALL))
        return pending if async_op else _waited(pending)

    def _swap(self, outgoing: Sequence[Tensor], incoming: Sequence[Tensor], tag: int) -> list[Pending]:
        """Start sending each rank its one of ``outgoing`` and receiving its own, each with its neighbours first."""
        group = self._open()
        works: list[Pending] = []
        for step in range(1, self.size):
            to, source = (self.rank + step) % self.size, (self.rank - step) % self.size
            works.append(group.recv([_real(incoming[source])], source, tag))
            works.append(group.send([_real(outgoing[to])], to, tag))
        return works

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


def done(pending: Pending) -> bool:
    """Whether there was nothing to wait for: it was not started asynchronously, or had nobody to go to."""
    return isinstance(pending, _Done)


def _waited(pending: Pending) -> Pending:
    pending.wait()
    return _Done()


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _real(tensor: Tensor) -> Tensor:
    """What a message holds: a complex number travels as two real ones."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor
