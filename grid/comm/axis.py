"""Axis of the grid: one rank's process group and the collectives over it. All communication of triax goes through it.

At size 1 nothing is communicated. Otherwise each method counts the bytes sent, writes a span, if there are readers, and
has its ``transport`` do the operation.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Self

import torch.distributed as dist
from torch import Tensor

from ...base.json_values import dumps, loads
from ...base.uncompiled import uncompiled
from .lanes import Lanes
from .pending import Done, Pending
from .spans import OpenSpan, Spans
from .traffic import Traffic
from .transport import Transport, copy


class Operation(NamedTuple):
    """Operation of an axis, as its span tells of it.

    Attributes:
        name: the name of the axis's method, e.g. ``all_gather``.
        axis: the axis over which it runs.
        bytes: bytes of an all-gather's output, of a reduce-scatter's input, or of the tensor in other operations; 0 if
            the size is not known.
        sent: bytes that this rank sends in it.
        async_op: True if its caller waits for it later.
    """

    name: str
    axis: Axis
    bytes: int
    sent: float
    async_op: bool

    def __str__(self) -> str:
        return f"{self.axis.name} {self.name}"


class Axis:
    """Process group of this rank along one axis, or along several joined axes.

    No gradients pass through its collectives: differentiable ones are in ``grid/comm/regions.py``.

    Attributes:
        name: ``pipe``, ``data``, ``tensor``, or the joined names of several axes.
        ranks: the global ranks of the group's processes, in the axis's order.
        rank: this process's position in ``ranks``.
        size: the number of processes in the group.
        traffic: counts the bytes sent.
        spans: stream of the operations.
        purpose: tells axes with one name and the same ranks apart; "" for an axis of the grid itself.
        label: (name of the communicated tensor, name of the operation's phase, e.g. ``NEGOTIATE_ALLREDUCE``) that the
            timeline writes beside each operation that begins now. ``labeled`` sets it.
        transport: does the operations, by the process group directly or by way of host memory.
        tag: tag of the messages in which all-gathers send their parts, so that no other all-gather receives them. None:
            they are received in the order in which they are sent. (NCCL has no tags.)
        lanes: two passes that take turns at the collectives; None: no passes do.
    """

    def __init__(
        self,
        name: str,
        ranks: Sequence[int],
        me: int,
        group: dist.ProcessGroup | None,
        traffic: Traffic | None = None,
        transport: type[Transport] = Transport,
        spans: Spans | None = None,
    ) -> None:
        self.name, self.ranks, self.size = name, tuple(ranks), len(ranks)
        self.rank = self.ranks.index(me)
        self.traffic = Traffic() if traffic is None else traffic
        self.spans = Spans() if spans is None else spans
        self.label, self.purpose = ("", ""), ""
        self.transport = transport(name, self.ranks, self.rank, group)
        self.tag: int | None = None
        self.lanes: Lanes | None = None

    @property
    def group(self) -> dist.ProcessGroup | None:
        """Torch's process group. None at size 1, and once the axis is closed."""
        return self.transport.group

    def close(self) -> None:
        """Drop the process group. A connection closes once nothing refers to its group any more."""
        self.transport.group = None

    @property
    def is_first(self) -> bool:
        """True if this rank is the first of the axis."""
        return self.rank == 0

    @property
    def is_last(self) -> bool:
        """True if this rank is the last of the axis."""
        return self.rank == self.size - 1

    @property
    def _in_turns(self) -> bool:
        """True while two passes take turns at the collectives of this axis."""
        return self.lanes is not None and self.lanes.active

    @contextmanager
    def labeled(self, name: str, phase: str = "") -> Iterator[None]:
        """Context in which the timeline writes the name of a tensor and a phase beside each operation that begins."""
        before, self.label = self.label, (name, phase)
        try:
            yield
        finally:
            self.label = before

    def _begin(self, name: str, size: int, sent: float | None = None, async_op: bool = False) -> OpenSpan | None:
        """Count the bytes that this rank sends in an operation, and begin its span. Return None if nothing reads it.

        Args:
            name, size, async_op: as in ``Operation``.
            sent: bytes that this rank sends; None: the operation is not counted.
        """
        if sent is not None:
            self.traffic.add(self.name, name, sent)
        if not self.spans.readers:
            return None
        return self.spans(name, Operation(name, self, size, sent or 0.0, async_op)).__enter__()

    def _started(self, pending: Pending, span: OpenSpan | None, async_op: bool) -> Pending:
        """Return the handle of an operation that has begun; if it is synchronous, at its end."""
        pending = pending if span is None else span.follow(pending)
        return pending if self.lanes is None or not self.lanes.active else self.lanes.ended(pending, async_op)

    @uncompiled
    def all_reduce(self, tensor: Tensor, op: str = "sum", async_op: bool = False) -> Pending:
        """Reduce a contiguous tensor over the axis, in place. Collective.

        Args:
            tensor: contiguous, of the same shape and dtype on every rank.
            op: name of the reduction, e.g. ``sum`` or ``max``.
            async_op: return at once; the result is there after ``wait`` of the returned handle. The same on every rank.
        """
        if self.size == 1:
            return Done()
        tensor, size = tensor.detach(), tensor.nbytes
        span = self._begin("all_reduce", size, 2 * size / self.size * (self.size - 1), async_op)
        pending = self.transport.all_reduce(tensor, op, async_op or self._in_turns)
        return self._started(pending, span, async_op)

    @uncompiled
    def all_gather(self, output: Tensor, tensor: Tensor, async_op: bool = False) -> Pending:
        """Concatenate every rank's tensor along dim 0 of ``output``: (size * n, ...) from (n, ...). Collective."""
        tensor = tensor.detach()
        if self.size == 1:
            return copy(output, tensor)
        span = self._begin("all_gather", output.nbytes, tensor.nbytes * (self.size - 1), async_op)
        pending = self.transport.all_gather(output, tensor, async_op or self._in_turns, self.tag)
        return self._started(pending, span, async_op)

    @uncompiled
    def reduce_scatter(self, output: Tensor, tensor: Tensor, async_op: bool = False) -> Pending:
        """Sum a flat tensor over the ranks, and keep this rank's part: (n,) from (size * n,). Collective."""
        tensor = tensor.detach()
        if self.size == 1:
            return copy(output, tensor)
        size = tensor.nbytes
        span = self._begin("reduce_scatter", size, size / self.size * (self.size - 1), async_op)
        pending = self.transport.reduce_scatter(output, tensor, async_op or self._in_turns)
        return self._started(pending, span, async_op)

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
        tensor = tensor.detach()
        if self.size == 1:
            return copy(output, tensor)
        receive, send = receive or [1] * self.size, send or [1] * self.size
        size, row = tensor.nbytes, math.prod(tensor.shape[1:]) * tensor.element_size()
        span = self._begin("all_to_all", size, size - send[self.rank] * row, async_op)
        pending = self.transport.all_to_all(output, tensor, async_op or self._in_turns, receive, send, row)
        return self._started(pending, span, async_op)

    @uncompiled
    def broadcast(self, tensor: Tensor, source: int = 0, async_op: bool = False) -> Pending:
        """Overwrite a contiguous tensor with the tensor of the axis's rank ``source``. Collective."""
        if self.size == 1:
            return Done()
        size = tensor.nbytes
        span = self._begin("broadcast", size, size if self.rank == source else 0, async_op)
        pending = self.transport.broadcast(tensor, source, async_op or self._in_turns)
        return self._started(pending, span, async_op)

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
        span = self._begin("all_gather_json", 0)  # of a size not known yet
        values = [loads(sent_text) for sent_text in self.transport.all_gather_texts(text)]
        if span is not None:
            span.follow(Done())
        return values

    def send(self, tensor: Tensor, to: int, tag: int) -> Pending:
        """Start sending a contiguous tensor to the axis's rank ``to``. It must stay unchanged until ``wait``.

        ``tag`` must be that of the matching ``receive``. It distinguishes messages between the same two ranks.
        """
        size = tensor.nbytes
        span = self._begin("send", size, size, async_op=True)
        pending = self.transport.send(tensor, to, tag)
        return pending if span is None else span.follow(pending)

    def receive(self, tensor: Tensor, source: int, tag: int) -> Pending:
        """Start receiving into a contiguous tensor from the axis's rank ``source``; it has the values after ``wait``.

        The shape, the dtype and ``tag`` must be those of the matching ``send``.
        """
        span = self._begin("receive", tensor.nbytes, async_op=True)
        pending = self.transport.receive(tensor, source, tag)
        return pending if span is None else span.follow(pending)

    def barrier(self) -> None:
        """Wait until every rank of the axis has called this."""
        if self.size > 1:
            span = self._begin("barrier", 0)
            self.transport.barrier()
            if span is not None:
                span.follow(Done())

    def __deepcopy__(self, memo: object) -> Self:
        """Return the axis itself, whose process group copies of a model share."""
        return self

    def __repr__(self) -> str:
        return f"Axis({self.name}: rank {self.rank} of {self.size}, ranks {list(self.ranks)})"
