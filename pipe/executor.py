"""One loop over a program: ``handlers[op.kind](op)``.

Nothing here depends on which schedule the program came from. ZeRO is reached through ``DataAxis``, which the
engine hands in; the loss is divided by nobody here (the engine divides once, by the whole batch's weight).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from ..grid import Axis
from ..grid.clock import Clock, Mark
from ..grid.nest import map_tensors
from .backward import Deferred, SplitBackward
from .boundary import Boundary
from .module import PipelineModule
from .nest import Flat, flatten, unflatten
from .ops import COMPUTE, Op
from .p2p import Channel, Receive, receive_gradients, receive_value
from .passes import Program

# Gradients on their way from one channel before its next send waits for the oldest. The stage before posts its
# receives early, so this bounds memory and is not met in step.
_UNDER_WAY = 8


class DataAxis(Protocol):
    """What a program needs of the data axis: ZeRO's ops, as the engine's ``zero/`` implements them."""

    def backward(self, stage: int, last: bool) -> AbstractContextManager[None]:
        """Within it a backward of the stage runs, its last one or not: gradients may be reduced as they are made."""

    def target(self, parameter: Tensor) -> Tensor | None:
        """Where to add a deferred gradient of this parameter; None: to its ``.grad``."""

    def accumulated(self, parameter: Tensor) -> None:
        """A deferred weight gradient is whole (of its microbatch), where autograd's own hooks do not see it."""

    def reduce(self, stage: int, microbatch: int) -> None:
        """REDUCE: the stage's gradients are final (of this microbatch, or, at -1, of all)."""

    def tied(self, tie: int) -> None:
        """TIED: sum the gradients of a tie over the stages that hold it."""

    def gather(self, stage: int) -> None:
        """GATHER: make the stage's parameters whole."""

    def release(self, stage: int) -> None:
        """RELEASE: keep only this rank's shard of them."""


class Microbatch:
    """One microbatch as this rank sees it.

    Attributes:
        inputs: for the first stage; None elsewhere.
        labels: for the last stage; None elsewhere.
        kind: alike for microbatches whose inputs look alike.
        samples: their numbers in the global batch, which key dropout; None if unknown.
    """

    def __init__(self, inputs: Any, labels: Any, kind: Hashable, samples: range | None = None) -> None:
        self.inputs, self.labels, self.kind, self.samples = inputs, labels, kind, samples


class Result:
    """What a run leaves on this rank: nothing but zeros where the last stage is not."""

    def __init__(self) -> None:
        self.losses: dict[int, tuple[Tensor, Tensor | float]] = {}  # microbatch -> its loss, and its weight
        self.outputs: dict[int, Any] = {}  # microbatch -> the last layer's output, if asked for

    def sums(self) -> tuple[Tensor | float, Tensor | float]:
        """The loss of all microbatches, not divided, and what to divide it by; in float64, tensors on a GPU."""
        loss: Tensor | float = 0.0
        weight: Tensor | float = 0.0
        for value, its in self.losses.values():  # a number, where nothing is to be waited for
            loss = loss + (float(value) if value.device.type == "cpu" else value.double())
            there = isinstance(its, Tensor) and its.device.type != "cpu"
            weight = weight + (its.double() if there else float(its))  # type: ignore[union-attr]
        return loss, weight


class _Held(NamedTuple):
    """What one stage keeps of one microbatch between its forward and its backward."""

    boundary: Boundary | None  # where its inputs entered; None at the first stage
    edges: list[GradientEdge]  # where the backward pass starts; the outputs themselves may be gone
    deferred: Deferred | None  # where its weight gradients wait, if the schedule splits the backward


class Marked(NamedTuple):
    """When an op ran: until ``began`` it waited for a message."""

    op: Op
    entered: Mark
    began: Mark
    end: Mark


class Executor:
    """Runs programs over a ``PipelineModule``'s stages on this rank.

    Attributes:
        loss_scale: what losses are multiplied by before the backward pass (fp16); results are not.
        clock: set it, and the next runs mark when each of their ops began; ``marks`` has those of the last one.
        origin: when that run began, on all its pipe ranks at once.
        held: activations of (stage, microbatch) held now; ``peak`` the most of the last run.
    """

    def __init__(self, module: PipelineModule, data: DataAxis) -> None:
        self._module, self._data = module, data
        self._grid = module.grid
        self._last_stage = len(module.placement) - 1
        self._outgoing, self._incoming = channels(module, "F"), channels(module, "B")
        self._channels = [*self._outgoing.values(), *self._incoming.values()]
        self._handlers: dict[str, Callable[[Op], None]] = {
            "F": self._forward,
            "B": self._backward,
            "I": self._input_gradient,
            "W": self._weight_gradient,
            "SEND_F": self._send_forward,
            "RECV_F": self._receive_forward,
            "SEND_B": self._send_backward,
            "RECV_B": self._receive_backward,
            "REDUCE": lambda op: data.reduce(op.stage, op.microbatch),
            "TIED": lambda op: data.tied(op.microbatch),
            "GATHER": lambda op: data.gather(op.stage),
            "RELEASE": lambda op: data.release(op.stage),
        }
        self.clock: Clock | None = None
        self.loss_scale = 1.0
        self.marks: list[Marked] = []
        self.origin: Mark = 0.0
        self._ready = _nothing  # called where an op has what it needs
        self.held: dict[tuple[int, int], _Held] = {}
        self.peak = 0
        # Of (stage, microbatch): what is on its way here, and what was made here and not yet sent or read.
        self._arriving: dict[tuple[int, int], Receive] = {}  # its input
        self._returning: dict[tuple[int, int], Receive] = {}  # the gradients of its output
        self._outputs: dict[tuple[int, int], Flat] = {}  # its output
        self._gradients: dict[tuple[int, int], list[Tensor]] = {}  # the gradients of its input

    def wrap(self, kind: str, around: Callable[[Op], AbstractContextManager[Any]]) -> None:
        """From now on run every op of a kind within what ``around(op)`` returns: autocast, a measurement."""
        inner = self._handlers[kind]

        def handler(op: Op) -> None:
            with around(op):
                inner(op)

        self._handlers[kind] = handler

    def forget_schemas(self) -> None:
        """What stages exchange may look different from now on (layers were frozen, say): both ends must forget."""
        for channel in self._channels:
            channel.schemas.clear()

    def abandon(self) -> None:
        """After a failure: let go of every message, so that the connections to the other ranks can close."""
        for channel in self._channels:
            channel.abandon()
        for kept in (self._arriving, self._returning, self._outputs, self._gradients, self.held):
            kept.clear()

    def run(
        self, program: Program, microbatches: Sequence[Microbatch], outputs: bool = False, loss: bool = True
    ) -> Result:
        """Run this rank's part of a program.

        Args:
            program: verified; of this module's placement.
            microbatches: one for each of the program's.
            outputs: keep the last layer's outputs, on the ranks that hold the last stage.
            loss: compute it; False leaves the labels alone.

        Raises:
            RuntimeError: an op failed; the message names this rank, its coordinate and the op.
        """
        ops = program.ops[self._grid.pipe.rank]
        self._microbatches, self._keep_outputs, self._wants_loss = microbatches, outputs, loss
        self._training = any(op.kind != "F" for op in ops if op.kind in COMPUTE)
        self._splits = any(op.kind in "IW" for op in ops)
        self._last_backward = {op.stage: op for op in ops if op.kind in "BW"}
        self._result = Result()
        for kept in (self._arriving, self._returning, self._outputs, self._gradients, self.held):
            kept.clear()
        self.marks, self.peak = [], 0
        handlers, self._ready = self._handlers, _nothing
        if self.clock is not None:
            handlers, self._ready = dict.fromkeys(handlers, self._marked), self._mark
            self._grid.pipe.barrier()
            self.origin = self.clock.mark()
        place = self._grid.place
        for op in ops:
            try:
                place.at(op)
                handlers[op.kind](op)
            except Exception as error:
                raise self._failed(op, error) from error
        for channel in self._channels:
            channel.limit(0)
        place.at("the end of the step")
        return self._result

    def _marked(self, op: Op) -> None:
        """Run an op, and mark when."""
        assert self.clock is not None
        entered = self._began = self.clock.mark()
        self._handlers[op.kind](op)
        self.marks.append(Marked(op, entered, self._began, self.clock.mark()))

    def _mark(self) -> None:
        assert self.clock is not None
        self._began = self.clock.mark()

    def _forward(self, op: Op) -> None:
        """``outputs = stage(inputs)``; after the last stage, ``loss = loss_fn(outputs, labels)``."""
        _, stage, index = op
        microbatch = self._microbatches[index]
        boundary = None
        if stage == 0:
            value = microbatch.inputs
        else:
            tensors, schema = self._input(stage, index)
            if self._training:
                boundary = Boundary(tensors, schema)
                # Let go of: the graph's first node has the boundary, and would be held in a circle.
                tensors, boundary.tensors = boundary.tensors, []
            value = unflatten(schema, tensors)
        self._ready()
        self._module.dropout_state.samples = microbatch.samples
        deferred = Deferred() if self._splits else None
        with SplitBackward(deferred) if deferred is not None else nullcontext():
            value = self._module.run_stage(stage, value)
            if stage < self._last_stage:
                self._outputs[stage, index] = tensors, _ = flatten(value)
            else:
                tensors = self._loss(value, index)
        if self._training:
            edges = [get_gradient_edge(tensor) for tensor in tensors if tensor.requires_grad]
            self.held[stage, index] = _Held(boundary, edges, deferred)
            self.peak = max(self.peak, len(self.held))

    def _backward(self, op: Op) -> None:
        """``backward(outputs, gradients)``: the input gradient, and the weight gradient with it or right after."""
        if self._splits:
            self._input_gradient(op)
            self._weight_gradient(op)
        else:
            with self._reducing(op):
                self._differentiate(op)
            del self.held[op.stage, op.microbatch]

    def _input_gradient(self, op: Op) -> None:
        """``backward(outputs, gradients)``, which leaves the weight gradients of most layers queued."""
        self._differentiate(op)
        held = self.held[op.stage, op.microbatch]
        self.held[op.stage, op.microbatch] = _Held(None, [], held.deferred)

    def _weight_gradient(self, op: Op) -> None:
        """``weight.grad += ...``, for all that is queued."""
        deferred = self.held[op.stage, op.microbatch].deferred
        assert deferred is not None  # a program that splits the backward says so before its first forward
        with self._reducing(op):
            deferred.run(self._data.target, self._data.accumulated)
        del self.held[op.stage, op.microbatch]

    def _differentiate(self, op: Op) -> None:
        """One backward pass over all outputs, whatever their number."""
        _, stage, index = op
        gradients = self._gradients_of_outputs(stage, index)
        self._ready()
        boundary, edges, deferred = self.held[stage, index]
        if edges:
            with deferred.backward() if deferred is not None else nullcontext():
                torch.autograd.backward(edges, gradients)
        if boundary is not None:
            self._gradients[stage, index] = boundary.gradients

    def _reducing(self, op: Op) -> AbstractContextManager[None]:
        """What the data axis does while this op makes weight gradients."""
        return self._data.backward(op.stage, last=self._last_backward[op.stage] == op)

    def _send_forward(self, op: Op) -> None:
        """``isend(outputs)``, to the next stage."""
        _, stage, index = op
        channel = self._outgoing[stage + 1]
        channel.send(self._outputs.pop((stage, index)), self._kind(index), index)
        if not self._training:
            channel.limit(_UNDER_WAY)

    def _receive_forward(self, op: Op) -> None:
        """``inputs = irecv()``, from the stage before."""
        _, stage, index = op
        self._arriving[stage, index] = receive_value(self._outgoing[stage], self._kind(index))

    def _send_backward(self, op: Op) -> None:
        """``isend(gradients of the inputs)``, to the stage before."""
        _, stage, index = op
        channel = self._incoming[stage]
        channel.send_tensors(self._gradients.pop((stage, index)), index)
        channel.limit(_UNDER_WAY)

    def _receive_backward(self, op: Op) -> None:
        """``gradients of the outputs = irecv()``, from the next stage."""
        _, stage, index = op
        channel, outputs = self._incoming[stage + 1], self._outgoing[stage + 1]
        self._returning[stage, index] = receive_gradients(channel, outputs, self._kind(index))

    def _input(self, stage: int, index: int) -> Flat:
        """What the stage before made: received, or made on this rank."""
        receive = self._arriving.pop((stage, index), None)
        if receive is not None:
            tensors = receive.wait()
            return tensors, self._outgoing[stage].schemas[self._kind(index)]
        tensors, schema = self._outputs.pop((stage - 1, index))
        return [tensor.detach() for tensor in tensors], schema

    def _gradients_of_outputs(self, stage: int, index: int) -> Sequence[Tensor | None]:
        """What the next stage sends back; None for a loss, whose own gradient is 1."""
        if stage == self._last_stage:
            return [None]
        receive = self._returning.pop((stage, index), None)
        if receive is None:
            return self._gradients.pop((stage + 1, index))
        gradients = receive.wait()
        self._outgoing[stage + 1].settle(index)
        return gradients

    def _loss(self, outputs: Any, index: int) -> list[Tensor]:
        """Add one microbatch's loss to the result; returns what the backward pass starts from."""
        microbatch, module = self._microbatches[index], self._module
        if self._keep_outputs:
            kept = outputs if module.output_fn is None else module.output_fn(outputs)
            self._result.outputs[index] = map_tensors(torch.Tensor.detach, kept)
        if not self._wants_loss:
            return []
        value = outputs if module.loss_fn is None else module.loss_fn(outputs, microbatch.labels)
        loss, weight = value if isinstance(value, (tuple, list)) and len(value) == 2 else (value, 1.0)
        if not isinstance(loss, Tensor) or loss.dim() != 0:
            shape = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
            raise ValueError(f"the loss is {shape}; loss_fn returns a mean (0-dim) or a pair (sum, weight)")
        if isinstance(weight, Tensor) and weight.numel() != 1:
            raise ValueError(f"the loss's weight has shape {tuple(weight.shape)}; loss_fn returns (sum, weight), 0-dim")
        if self._training and not loss.requires_grad and float(weight):
            raise ValueError(
                "the loss depends on no parameter that requires a gradient: is there a detach() on its way?"
            )
        weight = weight.detach().view(()) if isinstance(weight, Tensor) else weight
        self._result.losses[index] = loss.detach(), weight
        return [loss] if self.loss_scale == 1.0 else [loss.float() * self.loss_scale]

    def _kind(self, index: int) -> Hashable:
        # Without gradients the same outputs look different: none of them wants one.
        return self._microbatches[index].kind, self._training

    def _failed(self, op: Op, error: Exception) -> RuntimeError:
        """This rank names itself, its coordinate and its op; or, if another failed first, says what that one said."""
        reported = self._grid.cause(error)
        message = f"{self._grid.describe()} failed at {op}: {type(error).__name__}: {error}"
        if reported is not None and reported != message:
            return RuntimeError(f"{self._grid.describe()} stopped at {op}, because {reported}")
        self._grid.report_failure(message)
        return RuntimeError(message)


def _nothing() -> None:
    pass


def channels(module: PipelineModule, direction: str) -> dict[int, Channel]:
    """This rank's channels in one direction, by the stage after the boundary.

    On gloo a tag tells the channels between two ranks apart. NCCL has no tags, and runs what a communicator is
    given in order: there each channel has a communicator of its own, so that one channel never waits for another.
    """
    grid, found = module.grid, {}
    for stage in range(1, len(module.placement)):
        ranks = module.placement[stage - 1], module.placement[stage]
        if ranks[0] == ranks[1]:
            continue
        axis: Axis | None = grid.pipe
        if grid.device.type == "cuda":
            axis = grid.subgroup("pipe", sorted(ranks), purpose=f"{direction}{stage}")
        if axis is not None and grid.pipe.rank in ranks:
            other = ranks[0] if grid.pipe.rank == ranks[1] else ranks[1]
            peer = axis.ranks.index(grid.pipe.ranks[other])
            found[stage] = Channel(axis, peer, 2 * stage + (direction == "B"), grid.device)
    return found
