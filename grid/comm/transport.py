"""Transport of an axis: its collectives and messages by a process group directly. Host memory: ``HostTransport``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...base.torch_versions import all_gather_single, reduce_scatter_single
from .pending import All, Done, Pending, Then, started
from .simulated import is_simulated

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


class Transport:
    """Collectives and messages of one process group. Arguments and results are those of the methods of ``Axis``.

    Attributes:
        name: the axis's name, for messages.
        ranks: the global ranks of the group's processes, in the axis's order.
        rank: this process's position in ``ranks``.
        size: the number of processes in the group.
        group: torch's process group. None at size 1, and once the axis is closed.
    """

    def __init__(self, name: str, ranks: Sequence[int], rank: int, group: dist.ProcessGroup | None) -> None:
        self.name, self.ranks, self.rank, self.size = name, ranks, rank, len(ranks)
        self.group = group if self.size > 1 else None
        # Gloo's all-gather and reduce-scatter send or copy more than they must. A dry run has collectives alone.
        self._exchanges = not is_simulated(group)
        self._is_power_of_2 = self.size.bit_count() == 1

    def all_reduce(self, tensor: Tensor, op: str, async_op: bool) -> Pending:
        """Reduce a tensor over the ranks, in place."""
        if not async_op and self._exchanges and tensor.is_cpu:
            size = tensor.nbytes
            if size <= _SMALL and self._is_power_of_2:
                return self._exchange(tensor, op)
            if self.size == 2 and size <= _MEDIUM:
                return self._exchange_whole(tensor, op)
        # Gloo sums in its own thread, beside this one: what is best for a tensor that nobody waits for yet.
        return self._start(dist.all_reduce, async_op, tensor, op=_OPS[op][0])

    def _exchange_whole(self, tensor: Tensor, op: str) -> Pending:
        """All-reduce of a medium-sized tensor between two ranks: each sends its complete tensor to the other.

        The number of bytes is that of a ring. Gloo's own all-reduce takes longer (for 1 MB on 2 ranks of 2 cores,
        with nothing else to do, gloo takes 1.6 ms, this method 0.7 ms).
        """
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

    def all_gather(self, output: Tensor, tensor: Tensor, async_op: bool, tag: int | None = None) -> Pending:
        """Concatenate every rank's tensor along dim 0 of ``output``.

        On a CPU each rank receives the parts directly in ``output``. Gloo's own all-gather would first fill a buffer of
        that size and then copy it.
        """
        if not tensor.is_cpu or not self._exchanges:
            return self._start(all_gather_single, async_op, output, tensor)
        parts = output.view(self.size, *tensor.shape)
        piece = parts[self.rank]
        copy(piece, tensor)
        works = self._swap([piece] * self.size, list(parts), _GATHER if tag is None else tag, own_tag=tag is not None)
        return started(All(works), async_op)

    def reduce_scatter(self, output: Tensor, tensor: Tensor, async_op: bool) -> Pending:
        """Sum a flat tensor over the ranks, and keep this rank's part of the sum.

        On a CPU the ranks exchange their parts, and each rank sums them in rank order. Gloo's own reduce-scatter does
        an all-reduce with twice the bytes and keeps a slice.
        """
        if not tensor.is_cpu or not self._exchanges:
            return self._start(reduce_scatter_single, async_op, output, tensor)
        parts = list(tensor.view(self.size, -1))
        piece = parts[self.rank]
        received = [piece if rank == self.rank else torch.empty_like(piece) for rank in range(self.size)]

        def add() -> None:
            # In rank order. The output may be this rank's own part, which is therefore read before it is written.
            total, into = received[0], output if self.rank == 0 else received[0]
            for addend in received[1:-1]:
                total = torch.add(total, addend, out=into)
            torch.add(total, received[-1], out=output)

        return started(Then(All(self._swap(parts, received, _SCATTER)), add), async_op)

    def all_to_all(
        self, output: Tensor, tensor: Tensor, async_op: bool, receive: Sequence[int], send: Sequence[int], row: int
    ) -> Pending:
        """Send ``send[r]`` rows of ``row`` bytes to each rank r, and receive ``receive[s]`` rows from each rank s."""
        if not self._exchanges:
            return self._start(dist.all_to_all_single, async_op, output, tensor, receive, send)
        parts = [rows * row for rows in receive], [rows * row for rows in send]
        return self._start(dist.all_to_all_single, async_op, _bytes(output), _bytes(tensor), *parts)

    def _swap(
        self, outgoing: Sequence[Tensor], incoming: Sequence[Tensor], tag: int, own_tag: bool = False
    ) -> list[Pending]:
        """Start sending ``outgoing[r]`` to each rank r, and receiving ``incoming[s]`` from each rank s.

        The parts are contiguous and have one size, on all ranks. ``tag`` distinguishes these messages from others
        between the same two ranks; with ``own_tag`` no other collective uses it, and each part is a message. The
        entries of this rank itself are not used.

        Small parts are messages, which take 110 us between two ranks, two thirds of what an all-to-all takes. To send
        a message takes the lock of the connection, which gloo's thread holds while it reads what has arrived: for large
        parts that keeps this thread, which has a step to compute, waiting for milliseconds. So each pair of large parts
        is an all-to-all in which all other parts are empty; one of gloo's own threads does all of it. Six
        reduce-scatters of 4 MB between 2 ranks add 13 ms to the products that they run beside, with messages 35 ms.
        """
        group = self._open()
        size = outgoing[0].nbytes
        works: list[Pending] = []
        for step in range(1, self.size if size else 1):
            to, source = (self.rank + step) % self.size, (self.rank - step) % self.size
            leaving, arriving = outgoing[to], incoming[source]
            if size > _MESSAGE and not own_tag:
                send, receive = [0] * self.size, [0] * self.size
                send[to] = receive[source] = size
                works.append(group.alltoall_base(_bytes(arriving), _bytes(leaving), receive, send))
            else:
                works.append(group.recv([_real(arriving)], source, tag))
                works.append(group.send([_real(leaving)], to, tag))
        return works

    def broadcast(self, tensor: Tensor, source: int, async_op: bool) -> Pending:
        """Overwrite a tensor with the tensor of rank ``source``."""
        return self._start(dist.broadcast, async_op, tensor, src=self.ranks[source])

    def all_gather_texts(self, text: bytes) -> list[bytes]:
        """Return the texts of all ranks, in rank order."""
        if not self._exchanges:
            group: Any = self._open()
            texts: list[bytes] = group.gather_texts(text)
            return texts
        room = _HEAD - _SIZE
        heads = self._gather_bytes(len(text).to_bytes(_SIZE, "big") + text[:room], _HEAD)
        sizes = [int.from_bytes(head[:_SIZE], "big") for head in heads]
        rests = [b""] * self.size
        if max(sizes) > room:  # otherwise one message is enough
            rests = self._gather_bytes(text[room:], max(sizes) - room)
        return [(head[_SIZE:] + rest)[:size] for head, rest, size in zip(heads, rests, sizes, strict=True)]

    def _gather_bytes(self, mine: bytes, size: int) -> list[bytes]:
        """Return the bytes of all ranks, of which each is filled up with zeros to ``size``."""
        devices = {device.type for device in self._open()._device_types}
        padded = torch.frombuffer(bytearray(mine.ljust(size, b"\0")), dtype=torch.uint8)
        padded = padded if "cpu" in devices else padded.to(devices.pop())
        everyone = padded.repeat(self.size)
        self.all_gather(everyone, padded, False).wait()
        return [row.numpy().tobytes() for row in everyone.cpu().view(self.size, size)]

    def send(self, tensor: Tensor, to: int, tag: int) -> Pending:
        """Start sending a tensor to rank ``to``."""
        # The group's own method: ``isend`` takes twice as long, because it checks its arguments.
        return (self.group or self._open()).send([_real(tensor)], to, tag)

    def receive(self, tensor: Tensor, source: int, tag: int) -> Pending:
        """Start receiving into a tensor from rank ``source``."""
        return (self.group or self._open()).recv([_real(tensor)], source, tag)

    def barrier(self) -> None:
        """Wait until every rank has called this."""
        dist.barrier(group=self._open())

    def _open(self) -> dist.ProcessGroup:
        # Without this check torch would take None as the default group, perhaps another grid's.
        if self.group is None:
            raise RuntimeError(
                f"the {self.name} axis's process group is closed, because a step failed or grid.close() was "
                "called: make a new Grid, or start the script again"
            )
        return self.group

    def _start(self, collective: Callable[..., Any], async_op: bool, *args: Any, **kwargs: Any) -> Pending:
        work: Pending | None = collective(*args, group=self._open(), async_op=async_op, **kwargs)
        return work if work is not None else Done()


def copy(output: Tensor, tensor: Tensor) -> Pending:
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
