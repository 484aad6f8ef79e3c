"""The exchanges between stages: nests of tensors over one channel a boundary and direction.

The first message of a kind brings its schema; from then on both ends know it, and only tensors travel. Messages
of a kind are those of microbatches whose inputs look alike (shapes, dtypes, nest): the engine numbers the kinds
at the start of each batch, so a receive can be posted before its message is sent.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable

import torch
from torch import Tensor

from ..grid import Axis, Pending
from .nest import Flat, Schema, TensorSpec


class Channel:
    """One end of a boundary in one direction; both ends see its messages in the same order.

    Args:
        axis: the pipe axis, or a group of its own.
        peer: the other end's rank on it.
        tag: tells this channel from others between the same two ranks.
        device: where tensors are received.
    """

    def __init__(self, axis: Axis, peer: int, tag: int, device: torch.device) -> None:
        self.axis, self.peer, self.tag, self.device = axis, peer, tag, device
        self.schemas: dict[Hashable, Schema] = {}
        self.unposted: deque[Receive] = deque()  # receives whose buffers wait for a schema, in order
        self._sending: deque[tuple[int, Pending, Tensor]] = deque()

    def send(self, value: Flat, kind: Hashable, microbatch: int) -> None:
        """Start sending a nest of tensors, as ``flatten`` gives it.

        Raises:
            RuntimeError: the message does not look like the last one of its kind.
        """
        tensors, schema = value
        known = self.schemas.get(kind)
        if known is None:
            data = torch.frombuffer(bytearray(schema.encode()), dtype=torch.uint8)
            self._start(torch.tensor([data.numel()]), microbatch)
            self._start(data, microbatch)
            self.schemas[kind] = schema
        elif known != schema:
            change = f"changed from ({known}) to ({schema})"
            if str(known) == str(schema):
                change = f"({schema}) changed in which tensors want a gradient"
            raise RuntimeError(
                f"what this stage sends on {change} while the inputs kept their shape. "
                "The next stage has its buffers ready by then: return shapes that follow from the inputs' shapes, "
                "or pad"
            )
        self.send_tensors(tensors, microbatch)

    def send_tensors(self, tensors: list[Tensor], microbatch: int) -> None:
        """Start sending tensors whose shapes the other end knows."""
        for tensor in tensors:
            if tensor.numel():
                self._start(tensor.detach().resolve_conj().resolve_neg().contiguous(), microbatch)

    def settle(self, microbatch: int) -> None:
        """Let go of all that was sent up to a microbatch, once it has left.

        A work of gloo's does not tell that it is done before it is waited for. So wait where the other end is
        known to have received: its answer is here.
        """
        while any(sent == microbatch for sent, _, _ in self._sending):
            self._sending.popleft()[1].wait()

    def limit(self, messages: int) -> None:
        """Wait until at most so many of the sends are under way."""
        while len(self._sending) > messages:
            self._sending.popleft()[1].wait()

    def abandon(self) -> None:
        """Let go of everything under way: the other end is gone, or this rank failed."""
        self._sending.clear()
        self.unposted.clear()

    def _start(self, tensor: Tensor, microbatch: int) -> None:
        # The tensor is kept with its work: it must live, unchanged, until it has left.
        self._sending.append((microbatch, self.axis.send(tensor, self.peer, self.tag), tensor))


class Receive:
    """A message on its way: posted early where its shapes are known, waited for by the op that reads it.

    Args:
        channel: where it comes from.
        lookup: what its tensors look like; None while this end cannot know.
        learn: reads that from the channel, where the message brings it along.
    """

    def __init__(
        self,
        channel: Channel,
        lookup: Callable[[], tuple[TensorSpec, ...] | None],
        learn: Callable[[], object] | None = None,
    ) -> None:
        self._channel, self._lookup, self._learn = channel, lookup, learn
        self._posted: list[tuple[Pending | None, Tensor]] | None = None
        channel.unposted.append(self)
        while channel.unposted and (specs := channel.unposted[0]._lookup()) is not None:
            channel.unposted.popleft()._post(specs)

    def wait(self) -> list[Tensor]:
        """The tensors, once they are here."""
        while self._posted is None:
            # The messages of a channel come in order: those before this one must find their buffers first.
            first = self._channel.unposted.popleft()
            specs = first._lookup()
            if specs is None:
                assert first._learn is not None  # shapes of gradients are known once the outputs were sent
                first._learn()
                specs = first._lookup()
                assert specs is not None
            first._post(specs)
        try:
            for work, _ in self._posted:
                if work is not None:
                    work.wait()
            return [tensor for _, tensor in self._posted]
        finally:
            # A work keeps its connection open. If this wait failed, no frame of the traceback may keep the work:
            # the ranks that wait for this one learn from the closed connection.
            self._posted = work = None

    def _post(self, specs: tuple[TensorSpec, ...]) -> None:
        channel, self._posted = self._channel, []
        for spec in specs:
            tensor = torch.empty(spec.shape, dtype=spec.dtype, device=channel.device)
            work = channel.axis.receive(tensor, channel.peer, channel.tag) if tensor.numel() else None
            self._posted.append((work, tensor))


def receive_value(channel: Channel, kind: Hashable) -> Receive:
    """Receive what ``Channel.send`` sends."""

    def lookup() -> tuple[TensorSpec, ...] | None:
        schema = channel.schemas.get(kind)
        return None if schema is None else schema.tensors

    def learn() -> None:
        length = torch.empty(1, dtype=torch.int64)
        channel.axis.receive(length, channel.peer, channel.tag).wait()
        data = torch.empty(int(length), dtype=torch.uint8)
        channel.axis.receive(data, channel.peer, channel.tag).wait()
        channel.schemas[kind] = Schema.decode(bytes(data.tolist()))

    return Receive(channel, lookup, learn)


def receive_gradients(channel: Channel, outputs: Channel, kind: Hashable) -> Receive:
    """Receive the gradients of what was sent on ``outputs``: one for each tensor that wants one."""

    def lookup() -> tuple[TensorSpec, ...] | None:
        schema = outputs.schemas.get(kind)
        return None if schema is None else tuple(spec for spec in schema.tensors if spec.grad)

    return Receive(channel, lookup)
