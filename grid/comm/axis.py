"""Axis of the grid: one rank's process group and the collectives over it. All communication of triax goes through it.

At size 1 nothing is communicated. Warnings about the two collectives that torch 2.13 renamed are silenced here.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...base.json_values import dumps, loads
from ...base.uncompiled import uncompiled
from .pending import All, Done, Pending, Then, started
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
_MESSAGE = 2**14  # bytes of the largest part that ranks exchange by a message of its own
_SIZE, _HEAD = 8, 512  # of a JSON text: bytes of its length, bytes of its first message
# Tags of the messages of these collectives. Messages between stages have tags from 2 on.
_GATHER, _EXCHANGE, _SCATTER = 0, 1, 2**20


class Axis:
    """Process group of this rank along one axis, or along several joined axes.

    Attributes:
        name: ``pipe``, ``data``, ``tensor``, or the joined names of several axes.
        ranks: the global ranks of the group's processes, in the axis's order.
        rank: this process's position in ``ranks``.
        size: the number of processes in the group.
        traffic: counts the bytes sent.
        group: torch's process group. None at size 1, and once the grid is closed.
        tag: tag of the messages in which all-gathers send their parts, so that no other all-gather receives them. None:
            they are received in the order in which they are sent. (NCCL has no tags.)
    """

    tag: int | None = None

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
        # Gloo's all-gather and reduce-scatter send or copy more than they must. A dry run has collectives alone.
        self._exchanges = not is_simulated(group)

    @property
    def is_first(self) -> bool:
        """True if this rank is the first of the axis."""
        return self.rank == 0

    @property
    def is_last(self) -> bool:
        """True if this rank is the last of the axis."""
        return self.rank == self.size - 1

    @uncompiled
    def all_reduce(self, tensor: Tensor, op: str = "sum", async_op: bool = False) -> Pending:
        """Reduce a contiguous tensor over the axis, in place. Collective.

        Args:
            tensor: contiguous, of the same shape and dtype on every rank.
            op: name of the reduction, e.g. ``sum`` or ``max``.
            async_op: return at once; the result is there after ``wait`` of the returned handle. The same on every rank.
        """
        self._count("all_reduce", 2 * nbytes(tensor) / self.size * (self.size - 1))
        if not async_op and self._exchanges and tensor.device.type == "cpu":
            if self.size > 1 and nbytes(tensor) <= _SMALL and self.size.bit_count() == 1:
                return self._exchange(tensor, op)
            if self.size == 2 and nbytes(tensor) <= _MEDIUM:
                return self._exchange_whole(tensor, op)
        # Gloo sums in its own thread, beside this one: what is best for a tensor that nobody waits for yet.
        return self._start(dist.all_reduce, async_op, tensor, op=_OPS[op][0])

    def _exchange_whole(self, tensor: Tensor, op: str) -> Pending:
        """All-reduce of a medium-sized tensor between two ranks: each sends its complete tensor to the other.

        The number of bytes is that of a ring. Gloo's own all-reduce takes longer (for 1 MB on 2 ranks of 2 cores,
        with nothing else to do, gloo takes 1.6 ms, this method 0.7 ms).
        """
        tensor = tensor.detach()
        theirs = torch.empty_like(tensor)
        works = self._swap([tensor] * 2, [theirs] * 2, _EXCHANGE)
        All(works).wait()
        _OPS[op][1](tensor, theirs, out=tensor)
        return Done()

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

    @uncompiled
    def all_gather(self, output: Tensor, tensor: Tensor, async_op: bool = False) -> Pending:
        """Concatenate every rank's tensor along dim 0 of ``output``: (size * n, ...) from (n, ...).

        On a CPU each rank receives the parts directly in ``output``. Gloo's own all-gather would first fill a buffer of
        that size and then copy it.
        """
        if self.size == 1:
            return _copy(output, tensor)
        self._count("all_gather", nbytes(tensor) * (self.size - 1))
        if tensor.is_cuda or not self._exchanges:
            return self._start_renamed(dist.all_gather_into_tensor, async_op, output, tensor)
        parts = output.view(self.size, *tensor.shape)
        _copy(parts[self.rank], tensor)
        return started(All(self._swap([parts[self.rank]] * self.size, list(parts), _GATHER)), async_op)

    @uncompiled
    def reduce_scatter(self, output: Tensor, tensor: Tensor, async_op: bool = False) -> Pending:
        """Sum a flat tensor over the ranks, and keep this rank's part of the sum: (n,) from (size * n,).

        On a CPU the ranks exchange their parts, and each rank sums them in rank order. Gloo's own reduce-scatter does
        an all-reduce with twice the bytes and keeps a slice.
        """
        if self.size == 1:
            return _copy(output, tensor)
        self._count("reduce_scatter", nbytes(tensor) / self.size * (self.size - 1))
        if tensor.is_cuda or not self._exchanges:
            return self._start_renamed(dist.reduce_scatter_tensor, async_op, output, tensor)
        parts = tensor.view(self.size, -1)
        mine = parts[self.rank]
        received = [mine if rank == self.rank else torch.empty_like(mine) for rank in range(self.size)]

        def add() -> None:
            # In rank order. The output may be this rank's own part, which is therefore read before it is written.
            total, into = received[0], output if self.rank == 0 else received[0]
            for part in received[1:-1]:
                total = torch.add(total, part, out=into)
            torch.add(total, received[-1], out=output)

        return started(Then(All(self._swap(list(parts), received, _SCATTER)), add), async_op)

    @uncompiled
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
        row = math.prod(tensor.shape[1:]) * tensor.element_size()
        self._count("all_to_all", nbytes(tensor) - send[self.rank] * row)
        if not self._exchanges:
            return self._start(dist.all_to_all_single, async_op, output, tensor, receive, send)
        parts = [rows * row for rows in receive], [rows * row for rows in send]
        return self._start(dist.all_to_all_single, async_op, _bytes(output), _bytes(tensor), *parts)

    def _swap(self, outgoing: Sequence[Tensor], incoming: Sequence[Tensor], tag: int) -> list[Pending]:
        """Start sending ``outgoing[r]`` to each rank r, and receiving ``incoming[s]`` from each rank s.

        The parts are contiguous and have one size, on all ranks. ``tag`` distinguishes these messages from others
        between the same two ranks. This rank's own entries are not used.

        Small parts are messages, which take 110 us between two ranks, two thirds of what an all-to-all takes. To send
        a message takes the lock of the connection, which gloo's thread holds while it reads what has arrived: for large
        parts that keeps this thread, which has a step to compute, waiting for milliseconds. So each pair of large parts
        is an all-to-all in which all other parts are empty; one of gloo's own threads does all of it. Six
        reduce-scatters of 4 MB between 2 ranks add 13 ms to the products that they run beside, with messages 35 ms.
        """
        group = self._open()
        size = nbytes(outgoing[0])
        works: list[Pending] = []
        own = False
        if tag == _GATHER and self.tag is not None:
            own, tag = True, self.tag
        for step in range(1, self.size if size else 1):
            to, source = (self.rank + step) % self.size, (self.rank - step) % self.size
            leaving, arriving = outgoing[to], incoming[source]
            if size > _MESSAGE and not own:
                send, receive = [0] * self.size, [0] * self.size
                send[to] = receive[source] = size
                works.append(group.alltoall_base(_bytes(arriving), _bytes(leaving), receive, send))
            else:
                works.append(group.recv([_real(arriving)], source, tag))
                works.append(group.send([_real(leaving)], to, tag))
        return works

    @uncompiled
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
        if not self._exchanges:
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
        # The group's own method: ``isend`` takes twice as long, because it checks its arguments.
        return self._open().send([_real(tensor)], to, tag)

    def receive(self, tensor: Tensor, source: int, tag: int) -> Pending:
        """Start receiving into a contiguous tensor from the axis's rank ``source``; it has the values after ``wait``.

        The shape, the dtype and ``tag`` must be those of the matching ``send``.
        """
        return self._open().recv([_real(tensor)], source, tag)

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


def nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _copy(output: Tensor, tensor: Tensor) -> Pending:
    """Copy a tensor to the output, unless they share their memory."""
    if output.data_ptr() != tensor.data_ptr():
        output.copy_(tensor)
    return Done()


def _bytes(tensor: Tensor) -> Tensor:
    """Return a flat view of a contiguous tensor's bytes, which every collective can send whatever their dtype."""
    return tensor.detach().view(-1).view(torch.uint8)


def _real(tensor: Tensor) -> Tensor:
    """Return a view of a tensor that can be sent: a complex tensor is viewed as pairs of real numbers."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor
