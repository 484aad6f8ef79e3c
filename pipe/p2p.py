"""Point-to-point messages between stages: nests of tensors, over one channel for each boundary and direction.

The first message of a kind carries its schema; later ones only tensors. A kind is a set of microbatches whose inputs
have the same structure, shapes and dtypes. The engine numbers the kinds at the start of each batch, so that a
receive can be posted before its message is sent.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Sequence

import torch
from torch import Tensor

from ..base.accelerators import is_accelerator
from ..grid import Axis, Grid, Pending
from .module import PipelineModule
from .schema import Flat, Schema, TensorSpec


class Channel:
    """One end of the connection between two stages in one direction. Messages arrive in the order of their sends.

    Args:
        axis: the pipe axis, or a group of the two ranks.
        peer: rank of the other end on ``axis``.
        tag: number that distinguishes the channels between the same two ranks.
        device: device of received tensors.
    """

    def __init__(self, axis: Axis, peer: int, tag: int, device: torch.device) -> None:
        self.axis, self.peer, self.tag, self.device = axis, peer, tag, device
        self.schemas: dict[Hashable, Schema] = {}
        self.unposted: deque[Receive] = deque()  # receives that wait for a schema to allocate buffers, in order
        self._sending: deque[tuple[int, Pending, Tensor]] = deque()

    def send(self, value: Flat, kind: Hashable, microbatch: int) -> None:
        """Start sending a nest of tensors, as ``flatten`` gives it.

        Raises:
            RuntimeError: the message differs from the last one of its kind in structure, shapes or dtypes.
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
                change = f"({schema}) changed in which tensors require a gradient"
            raise RuntimeError(
                f"the output of this stage {change} while the inputs kept their shape. The next stage has allocated "
                "its buffers for the first shapes already: return shapes that depend on the inputs' shapes only, or pad"
            )
        self.send_tensors(tensors, microbatch)

    def send_tensors(self, tensors: list[Tensor], microbatch: int) -> None:
        """Start sending tensors; the other end has their shapes."""
        for tensor in tensors:
            if tensor.numel():
                self._start(tensor.detach().resolve_conj().resolve_neg().contiguous(), microbatch)

    def wait_sent(self, microbatch: int) -> None:
        """Wait for the sends of all microbatches up to ``microbatch``, and free their tensors.

        It is called when the other end's answer to that microbatch has arrived, so the sends are done and the wait is
        short. (gloo reports a send as done only when it is waited for.)
        """
        while any(sent == microbatch for sent, _, _ in self._sending):
            self._sending.popleft()[1].wait()

    def limit(self, messages: int) -> None:
        """Wait until at most ``messages`` sends are pending."""
        while len(self._sending) > messages:
            self._sending.popleft()[1].wait()

    def abandon(self) -> None:
        """Drop all pending messages: the other end is gone, or this rank failed."""
        self._sending.clear()
        self.unposted.clear()

    def _start(self, tensor: Tensor, microbatch: int) -> None:
        # The tensor is kept with its work: it must exist, unchanged, until it is sent.
        self._sending.append((microbatch, self.axis.send(tensor, self.peer, self.tag), tensor))


class Receive:
    """Receive of one message. It is posted early if the shapes are known; the op that reads the message waits for it.

    Args:
        channel: the channel of the message.
        known_specs: function that returns the ``TensorSpec`` of each tensor of the message, or None while they are not
            known.
        receive_schema: function that receives the schema in front of the tensors and returns their specs; used if the
            message carries its schema.
        marked: a last tensor of flags follows several tensors, as ``send_gradients`` sends it.
    """

    def __init__(
        self,
        channel: Channel,
        known_specs: Callable[[], tuple[TensorSpec, ...] | None],
        receive_schema: Callable[[], object] | None = None,
        marked: bool = False,
    ) -> None:
        self._channel, self._known_specs, self._receive_schema = channel, known_specs, receive_schema
        self._marked = marked
        self._posted: list[tuple[Pending | None, Tensor]] | None = None
        self._received: list[Tensor] | None = None
        channel.unposted.append(self)
        while channel.unposted and (specs := channel.unposted[0]._known_specs()) is not None:
            channel.unposted.popleft()._post(specs)

    def wait(self) -> list[Tensor]:
        """Wait for the tensors and return them; a second call returns the same."""
        if self._received is None:
            self._received = self._wait()
        return self._received

    def _wait(self) -> list[Tensor]:
        while self._posted is None:
            # The messages of a channel arrive in order: post the receives before this one first.
            first = self._channel.unposted.popleft()
            specs = first._known_specs()
            if specs is None:
                assert first._receive_schema is not None  # (shapes of gradients are known when the outputs were sent)
                first._receive_schema()
                specs = first._known_specs()
                assert specs is not None
            first._post(specs)
        try:
            for work, _ in self._posted:
                if work is not None:
                    work.wait()
            return [tensor for _, tensor in self._posted]
        finally:
            # A work keeps its connection open. If this wait failed, no frame of the traceback may keep the work:
            # the closed connection tells the ranks that wait for this one.
            self._posted = work = None

    def _post(self, specs: tuple[TensorSpec, ...]) -> None:
        channel, self._posted = self._channel, []
        tensors = [torch.empty(spec.shape, dtype=spec.dtype, device=channel.device) for spec in specs]
        if self._marked and len(specs) > 1:
            tensors.append(torch.empty(len(specs), dtype=torch.uint8))
        for tensor in tensors:
            work = channel.axis.receive(tensor, channel.peer, channel.tag) if tensor.numel() else None
            self._posted.append((work, tensor))


def receive_value(channel: Channel, kind: Hashable) -> Receive:
    """Post the receive of a message that ``Channel.send`` sends, with a microbatch of this kind."""

    def known_specs() -> tuple[TensorSpec, ...] | None:
        schema = channel.schemas.get(kind)
        return None if schema is None else schema.tensors

    def receive_schema() -> None:
        length = torch.empty(1, dtype=torch.int64)
        channel.axis.receive(length, channel.peer, channel.tag).wait()
        data = torch.empty(int(length), dtype=torch.uint8)
        channel.axis.receive(data, channel.peer, channel.tag).wait()
        channel.schemas[kind] = Schema.decode(bytes(data.tolist()))

    return Receive(channel, known_specs, receive_schema)


def send_gradients(
    channel: Channel, gradients: Sequence[Tensor | None], specs: Sequence[TensorSpec], microbatch: int
) -> None:
    """Start sending gradients, with zeros in place of None.

    If there are several gradients, a last tensor marks which of them are None. The difference matters: the optimizer
    leaves out a parameter without a gradient, and applies weight decay to a parameter whose gradient is zero. That
    tensor goes from host to host: the receiving host reads it, and must not wait for its device.
    """
    tensors = [
        torch.zeros(spec.shape, dtype=spec.dtype, device=channel.device) if gradient is None else gradient
        for spec, gradient in zip(specs, gradients, strict=True)
    ]
    if len(tensors) > 1:
        there = [gradient is not None for gradient in gradients]
        tensors.append(torch.tensor(there, dtype=torch.uint8))
    channel.send_tensors(tensors, microbatch)


def received_gradients(receive: Receive) -> list[Tensor | None]:
    """Wait for the gradients of ``send_gradients``, and return them."""
    tensors = receive.wait()
    if len(tensors) < 2:
        return list(tensors)
    *gradients, there = tensors
    return [gradient if flag else None for gradient, flag in zip(gradients, there.tolist(), strict=True)]


def receive_gradients(channel: Channel, outputs: Channel, kind: Hashable) -> Receive:
    """Post the receive of the gradients of the tensors that were sent on ``outputs`` and require a gradient.

    Args:
        channel: the channel of the gradients, in the backward direction.
        outputs: the channel on which this rank sent the stage's outputs; it knows their shapes.
        kind: number of the microbatch's kind (see the module's docstring).
    """

    def known_specs() -> tuple[TensorSpec, ...] | None:
        schema = outputs.schemas.get(kind)
        return None if schema is None else schema.gradients

    return Receive(channel, known_specs, marked=True)


def channels(module: PipelineModule, direction: str) -> dict[int, Channel]:
    """Return this rank's channels in one direction ('F' or 'B'), keyed by the stage after the boundary. Collective."""
    by_stage = {}
    for stage in range(1, len(module.placement)):
        ranks = module.placement[stage - 1], module.placement[stage]
        if ranks[0] != ranks[1]:
            made = channel_between(module.grid, ranks, f"{direction}{stage}", 2 * stage + (direction == "B"))
            if made is not None:
                by_stage[stage] = made
    return by_stage


def channel_between(grid: Grid, ranks: tuple[int, int], purpose: str, tag: int) -> Channel | None:
    """Return the channel between two ranks of the pipe axis, None on the other ranks. Collective over the pipe axis.

    On gloo a tag distinguishes the channels between two ranks. NCCL has no tags, and runs the operations of a
    communicator in order: there each channel has its own communicator, so that no channel waits for another.
    """
    axis: Axis | None = grid.pipe
    if is_accelerator(grid.device):
        axis = grid.subgroup("pipe", sorted(ranks), purpose=purpose)
    if axis is None or grid.pipe.rank not in ranks:
        return None
    other = ranks[0] if grid.pipe.rank == ranks[1] else ranks[1]
    return Channel(axis, axis.ranks.index(grid.pipe.ranks[other]), tag, grid.device)
