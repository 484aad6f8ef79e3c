"""Axis of the grid: one rank's process group and the collectives over it. All communication of triax goes through it.

At size 1 nothing is communicated. Warnings about the two collectives that torch 2.13 renamed are silenced here.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..json_values import dumps, loads
from .pending import Done, Pending, started
from .shared_memory import SharedMemory
from .simulated import is_simulated
from .traffic import Traffic

# Reductions: torch's name, and the function of two tensors.
_OPS: dict[str, tuple[Any, Callable[..., Tensor]]] = {
    "sum": (dist.ReduceOp.SUM, torch.add),
    "max": (dist.ReduceOp.MAX, torch.maximum),
    "min": (dist.ReduceOp.MIN, torch.minimum),
    "product": (dist.ReduceOp.PRODUCT, torch.mul),
}
_SMALL, _MEDIUM = 2**10, 2**24  # bytes
# Bytes of a message through shared memory at most (the copy of a larger one would take too much of it), and ranks of
# an axis whose all-reduces go through it.
_SHARED, _ALL_REDUCED = 2**24, 8
_SIZE, _HEAD = 8, 512  # of a JSON text: bytes of its length, bytes of its first message
# Tags of the messages of these collectives. Messages between stages have tags from 2 on.
_GATHER, _EXCHANGE, _SCATTER, _ALL = 0, 1, 2**20, 2**20 + 1


class Axis:
    """Process group of this rank along one axis, or along several joined axes.

    Attributes:
        name: ``pipe``, ``data``, ``tensor``, or the joined names of several axes.
        ranks: the global ranks of the group's processes, in the axis's order.
        rank: this process's position in ``ranks``.
        size: the number of processes in the group.
        traffic: counts the bytes sent.
        group: torch's process group. None at size 1, and once the grid is closed.
        shared: messages through shared memory, if all ranks are on one host; else None.
    """

    shared: SharedMemory | None = None

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
        # On gloo, messages between the ranks are faster than its collectives. A dry run has collectives alone.
        self._messages = not is_simulated(group)

    @property
    def is_first(self) -> bool:
        """True if this rank is the first of the axis."""
        return self.rank == 0

    @property
    def is_last(self) -> bool:
        """True if this rank is the last of the axis."""
        return self.rank == self.size - 1

    def all_reduce(self, tensor: Tensor, op: str = "sum", async_op: bool = False) -> Pending:
        """Reduce a contiguous tensor over the axis, in place. Collective.

        Args:
            tensor: contiguous, of the same shape and dtype on every rank.
            op: name of the reduction, e.g. ``sum`` or ``max``.
            async_op: return at once; the result is there after ``wait`` of the returned handle.
        """
        self._count("all_reduce", 2 * nbytes(tensor) / self.size * (self.size - 1))
        on_gloo = self._messages and tensor.device.type == "cpu"
        shared = self.shared is not None and self.size <= _ALL_REDUCED and nbytes(tensor) <= _SHARED
        if on_gloo and (shared or (self.size == 2 and _SMALL < nbytes(tensor) <= _MEDIUM)):
            return started(self._exchange_whole(tensor, op), async_op)
        if on_gloo and nbytes(tensor) <= _SMALL and self.size.bit_count() == 1 and not async_op and self.size > 1:
            return self._exchange(tensor, op)
        return self._start(dist.all_reduce, async_op, tensor, op=_OPS[op][0])

    def _exchange_whole(self, tensor: Tensor, op: str) -> Pending:
        """All-reduce in which each rank sends its complete tensor to all others, and reduces them in rank order.

        Through shared memory it is written once. Between two ranks without it the number of bytes is that of a ring,
        and gloo's own all-reduce takes a third longer (for 4 MB on 2 ranks of 2 cores gloo takes 2.6 ms, this method
        1.9 ms).
        """
        tensor = tensor.detach()

        def reduce(parts: list[Tensor]) -> None:
            _reduce(parts, self.rank, tensor, _OPS[op][1])

        return self._swap([tensor] * self.size, None, _EXCHANGE, reduce)

    def _exchange(self, tensor: Tensor, op: str) -> Pending:
        """All-reduce of a small tensor by recursive doubling: in round k ranks at distance 2^k exchange their sums.

        The result is bitwise equal on all ranks. Gloo's own all-reduce takes twice as long (on 2 cores gloo takes
        200 us with 2 ranks and 400 us with 4 ranks, this method 100 us and 230 us).
        """
        group = self._open()
        for k in range(self.size.bit_length() - 1):
            peer, theirs = self.rank ^ (1 << k), torch.empty_like(tensor)
            arriving = group.recv([theirs], peer, _EXCHANGE)
            leaving = group.send([tensor], peer, _EXCHANGE)
            arriving.wait()
            leaving.wait()
            _OPS[op][1](tensor, theirs, out=tensor)
        return Done()

    def all_gather(self, output: Tensor, tensor: Tensor, async_op: bool = False) -> Pending:
        """Concatenate every rank's tensor along dim 0 of ``output``: (size * n, ...) from (n, ...).

        On a CPU each rank receives messages directly in ``output``. Gloo's own all-gather would first fill a buffer of
        that size and then copy it.
        """
        if self.size == 1:
            return _copy(output, tensor)
        self._count("all_gather", nbytes(tensor) * (self.size - 1))
        if tensor.is_cuda or not self._messages:
            return self._start_renamed(dist.all_gather_into_tensor, async_op, output, tensor)
        parts = output.view(self.size, *tensor.shape)
        _copy(parts[self.rank], tensor)
        return started(self._swap([parts[self.rank]] * self.size, list(parts), _GATHER), async_op)

    def reduce_scatter(self, output: Tensor, tensor: Tensor, async_op: bool = False) -> Pending:
        """Sum a flat tensor over the ranks, and keep this rank's part of the sum: (n,) from (size * n,).

        On a CPU the ranks exchange messages, and each rank sums them in rank order. This is 2 to 4 times as fast as
        gloo's own reduce-scatter (measured at 2 and 4 ranks), which does an all-reduce with twice the bytes and keeps a
        slice.
        """
        if self.size == 1:
            return _copy(output, tensor)
        self._count("reduce_scatter", nbytes(tensor) / self.size * (self.size - 1))
        if tensor.is_cuda or not self._messages:
            return self._start_renamed(dist.reduce_scatter_tensor, async_op, output, tensor)

        def add(parts: list[Tensor]) -> None:
            _reduce(parts, self.rank, output, torch.add)

        return started(self._swap(list(tensor.view(self.size, -1)), None, _SCATTER, add), async_op)

    def all_to_all(
        self,
        output: Tensor,
        tensor: Tensor,
        async_op: bool = False,
        *,
        receive: Sequence[int] | None = None,
        send: Sequence[int] | None = None,
    ) -> Pending:
        """Send a part of a contiguous tensor to each rank, and receive a part of the contiguous output from each.

        By default row r of the tensor goes to rank r, and row s of the output comes from rank s; both (size, ...).

        Args:
            output, tensor: (rows, ...), the parts one after the other in rank order.
            async_op: return at once; the result is there after ``wait`` of the returned handle.
            receive: rows of the output that come from each rank.
            send: rows of the tensor that go to each rank. Give both or none. A part may be empty.
        """
        if self.size == 1:
            return _copy(output, tensor)
        receive, send = receive or [1] * self.size, send or [1] * self.size
        kept = send[self.rank] * math.prod(tensor.shape[1:]) * tensor.element_size()
        self._count("all_to_all", nbytes(tensor) - kept)
        if tensor.is_cuda or not self._messages:
            return self._start(dist.all_to_all_single, async_op, output, tensor, list(receive), list(send))
        incoming, outgoing = output.split(receive), tensor.split(send)
        incoming[self.rank].copy_(outgoing[self.rank])
        return started(self._swap(outgoing, incoming, _ALL), async_op)

    def _swap(
        self,
        outgoing: Sequence[Tensor],
        incoming: Sequence[Tensor] | None,
        tag: int,
        use: Callable[[list[Tensor]], object] | None = None,
    ) -> Pending:
        """Start sending ``outgoing[r]`` to each rank r, and receiving ``incoming[s]`` from each rank s.

        Args:
            outgoing: this rank's own entry is not used. An empty part is not sent: both ranks know that it is empty.
            incoming: contiguous; None: parts of the shapes of ``outgoing``, which only ``use`` reads.
            tag: distinguishes these messages from others between the same two ranks.
            use: called with all parts once they are there. It must not change those of other ranks.
        """
        group = self._open()
        works: list[Pending] = []
        arrivals: dict[int, _Arrival] = {}
        parts = list(incoming or outgoing)
        receivers: dict[int, list[int]] = {}  # by tensor: often it is the same for all
        for step in range(1, self.size):
            to, source = (self.rank + step) % self.size, (self.rank - step) % self.size
            if self._shares(parts[source]):
                assert self.shared is not None
                arrivals[source] = _Arrival(self.shared, source, tag, parts[source])
            elif parts[source].numel():
                if incoming is None:
                    parts[source] = torch.empty_like(parts[source])
                works.append(group.recv([_real(parts[source])], source, tag))
            if self._shares(outgoing[to]):
                receivers.setdefault(id(outgoing[to]), []).append(to)
            elif outgoing[to].numel():
                works.append(group.send([_real(outgoing[to])], to, tag))
        for ranks in receivers.values():
            assert self.shared is not None
            self.shared.put(outgoing[ranks[0]], ranks, tag)
        return _Swap(works, arrivals, parts, use)

    def broadcast(self, tensor: Tensor, source: int = 0, async_op: bool = False) -> Pending:
        """Overwrite a contiguous tensor with the tensor of the axis's rank ``source``."""
        self._count("broadcast", nbytes(tensor) if self.rank == source else 0)
        return self._start(dist.broadcast, async_op, tensor, src=self.ranks[source])

    def all_gather_json(self, value: Any) -> list[Any]:
        """Return the values of all ranks, in rank order. They are sent as JSON: no rank unpickles what another sends.

        None, numbers, text, dtypes, and tuples, lists, sets and dicts of these arrive as they are; a named tuple
        arrives as a tuple. It is slow: use it for reports and errors only.

        Raises:
            TypeError: the value is or contains another object.
        """
        if self.size == 1:
            return [value]
        text = dumps(value, "a value for the other ranks")
        if not self._messages:
            group: Any = self._open()
            return [loads(each) for each in group.gather_texts(text)]
        room = _HEAD - _SIZE
        heads = self._gather_bytes(len(text).to_bytes(_SIZE, "big") + text[:room], _HEAD)
        sizes = [int.from_bytes(head[:_SIZE], "big") for head in heads]
        rests = [b""] * self.size
        if max(sizes) > room:  # otherwise one message is enough
            rests = self._gather_bytes(text[room:], max(sizes) - room)
        return [loads((head[_SIZE:] + rest)[:size]) for head, rest, size in zip(heads, rests, sizes, strict=True)]

    def _gather_bytes(self, mine: bytes, size: int) -> list[bytes]:
        """Return the bytes of all ranks, of which each is filled up with zeros to ``size``."""
        devices = {device.type for device in self._open()._device_types}
        padded = torch.frombuffer(bytearray(mine.ljust(size, b"\0")), dtype=torch.uint8)
        padded = padded if "cpu" in devices else padded.to(devices.pop())
        everyone = padded.repeat(self.size)
        with self.traffic.uncounted():
            Axis.all_gather(self, everyone, padded).wait()  # not an observed operation of its own
        return [row.numpy().tobytes() for row in everyone.cpu().view(self.size, size)]

    def send(self, tensor: Tensor, to: int, tag: int) -> Pending:
        """Start sending a contiguous tensor to the axis's rank ``to``. It must stay unchanged until ``wait``.

        ``tag`` must be that of the matching ``receive``. It distinguishes messages between the same two ranks.
        """
        self._count("send", nbytes(tensor))
        group = self._open()
        if self._shares(tensor):
            assert self.shared is not None
            self.shared.put(tensor, [to], tag)
            return Done()
        # The group's own method: ``isend`` takes twice as long, because it checks its arguments.
        return group.send([_real(tensor)], to, tag)

    def receive(self, tensor: Tensor, source: int, tag: int) -> Pending:
        """Start receiving into a contiguous tensor from the axis's rank ``source``; it has the values after ``wait``.

        The shape, the dtype and ``tag`` must be those of the matching ``send``.
        """
        group = self._open()
        if self._shares(tensor):
            assert self.shared is not None
            return _Arrival(self.shared, source, tag, tensor)
        return group.recv([_real(tensor)], source, tag)

    def _shares(self, tensor: Tensor) -> bool:
        """Return True if messages with this tensor go through shared memory. Both ranks know."""
        return self.shared is not None and tensor.device.type == "cpu" and 0 < nbytes(tensor) <= _SHARED

    def barrier(self) -> None:
        """Wait until every rank of the axis has called this."""
        if self.size > 1:
            dist.barrier(group=self._open())

    def _count(self, collective: str, size: float) -> None:
        if self.size > 1:
            self.traffic.add(self.name, collective, size)

    def _open(self) -> dist.ProcessGroup:
        # Without this check torch would take None as the default group, perhaps another grid's.
        if self.group is None:
            raise RuntimeError(
                f"the {self.name} axis's process group is closed, because a step failed or grid.close() was "
                "called: make a new Grid, or start the script again"
            )
        return self.group

    def _start(self, collective: Callable[..., Any], async_op: bool, *args: Any, **kwargs: Any) -> Pending:
        if self.size == 1:
            return Done()
        work: Pending | None = collective(*args, group=self._open(), async_op=async_op, **kwargs)
        return work if work is not None else Done()

    def _start_renamed(self, collective: Callable[..., Any], async_op: bool, *args: Any) -> Pending:
        """Start a collective that torch 2.13 has renamed, without the warning about its old name."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            return self._start(collective, async_op, *args)

    def __repr__(self) -> str:
        return f"Axis({self.name}: rank {self.rank} of {self.size}, ranks {list(self.ranks)})"


class _Arrival:
    """Handle of a message through shared memory. ``wait`` copies it to a tensor; ``read`` shows it where it lies."""

    def __init__(self, shared: SharedMemory, source: int, tag: int, tensor: Tensor) -> None:
        self._shared, self._tensor = shared, tensor
        self._key = source, tag, shared.expect(source, tag)

    def wait(self) -> None:
        self._tensor.detach().copy_(self.read())
        self.done()

    def read(self) -> Tensor:
        """Wait for the message, and return it until ``done``."""
        return self._shared.take(*self._key, self._tensor)

    def done(self) -> None:
        self._shared.done(*self._key)


class _Swap:
    """Handle of messages between this rank and all others of an axis.

    Args:
        works: messages of gloo, which arrive in ``parts``.
        arrivals: messages through shared memory, by their sources.
        parts: for each rank the tensor that arrives, or one of its shape and dtype.
        use: called with all parts. None: they are wanted in ``parts``.
    """

    def __init__(
        self,
        works: Sequence[Pending],
        arrivals: Mapping[int, _Arrival],
        parts: list[Tensor],
        use: Callable[[list[Tensor]], object] | None,
    ) -> None:
        self._works, self._arrivals, self._parts, self._use = works, arrivals, parts, use

    def wait(self) -> None:
        for work in self._works:
            work.wait()
        if self._use is None:
            for arrival in self._arrivals.values():
                arrival.wait()
            return
        for source, arrival in self._arrivals.items():
            self._parts[source] = arrival.read()
        self._use(self._parts)
        for arrival in self._arrivals.values():
            arrival.done()


def _reduce(parts: Sequence[Tensor], mine: int, output: Tensor, function: Callable[..., Tensor]) -> None:
    """Reduce the parts of all ranks, in rank order. The output may be this rank's part; no other is written."""
    shares = output.data_ptr() == parts[mine].data_ptr()
    into = torch.empty_like(output) if shares and mine > 1 else output
    total = parts[0]
    for part in parts[1:-1]:
        total = function(total, part, out=into)
    function(total, parts[-1], out=output)


def nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _copy(output: Tensor, tensor: Tensor) -> Pending:
    """Copy a tensor to the output, unless they share their memory."""
    if output.data_ptr() != tensor.data_ptr():
        output.copy_(tensor)
    return Done()


def _real(tensor: Tensor) -> Tensor:
    """Return a view of a tensor that can be sent: a complex tensor is viewed as pairs of real numbers."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor
