"""Executor of pipeline programs: one loop over a program's ops that calls ``handlers[op.kind](op)``.

The executor does not depend on the schedule from which the program was made. ZeRO's ops are methods of a ``DataAxis``
object, which the engine passes in. Losses are not divided here, because the engine divides once, by the weight of the
whole batch.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial, reduce
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from ..base.deferred import Deferred
from ..base.errors import AgreedError
from ..base.nest import map_tensors
from ..base.parts import Parts
from ..grid.comm.clock import Clock, Mark
from ..grid.comm.lanes import Lanes
from ..grid.loss_pair import is_pair, sum_and_weight
from ..grid.loss_terms import NamedLosses, Term, combined, described_form, is_named, named_losses
from .activation_offload import HostMemory, KeptActivations, OffloadLane
from .backward import SplitBackward, deferring
from .module import PipelineModule
from .p2p import Receive, channels, receive_gradients, receive_value, received_gradients, send_gradients
from .program.ops import COMPUTE, Op
from .program.program import Program
from .program.slices import slice_bounds
from .program.timeline import OpMarks
from .recompute.early import run_to_recompute
from .recompute.recompute import stateful
from .schema import Flat, flatten, unflatten
from .spec import require_arguments
from .stage_boundary import Boundary, joined

# Sends of one channel that may be pending before the next one waits for the oldest. It bounds memory. The other
# stage posts its receives early, so in normal operation the limit is not reached.
_MAX_SENDS = 8
_MIXED_FORMS = (
    "loss_fn returned a mean for one microbatch of the batch, which weighs 1, and a pair (sum, weight) for another: "
    "return the same form for every microbatch"
)
UNNAMED = (
    "layers of the model return terms (triax.WithLoss), but loss_fn returned a loss without a name, whose weight the "
    "other stages do not know: let loss_fn return a dict of terms, as {'main': loss}"
)
_LOSS = "It gets the model's outputs and the labels: write loss_fn(outputs, labels)"


class DataAxis(Protocol):
    """Operations of the data axis that a program uses: ZeRO's, as ``zero/`` implements them."""

    def backward(self, stage: int, last: bool) -> AbstractContextManager[None]:
        """Return the context of a stage's backward, in which gradients may be reduced as soon as they are computed.

        ``last`` is True for the stage's last backward of the step.
        """

    def target(self, parameter: Tensor) -> Tensor | None:
        """Return the tensor to which a parameter's deferred gradient is added, or None if that is ``.grad``."""

    def accumulated(self, parameter: Tensor) -> None:
        """Signal that a deferred weight gradient of a microbatch is complete, because autograd calls no hook then."""

    def take_first_gradients(self, stage: int) -> None:
        """Take the gradients that are not deferred, after an input gradient of the stage."""

    def reduce_gradients(self, stage: int, microbatch: int) -> None:
        """REDUCE: reduce the stage's gradients after one microbatch or, if ``microbatch`` is -1, after the last."""

    def reduce_tied_gradients(self, tie: int) -> None:
        """TIED: sum the gradients of a tie over the stages that hold it."""

    def gather_parameters(self, stage: int) -> None:
        """GATHER: gather the stage's parameters."""

    def release_parameters(self, stage: int) -> None:
        """RELEASE: free the gathered parameters; this rank keeps its shard."""

    @property
    def gathers(self) -> int:
        """Number of gathers so far: each gives some parameters another storage."""


class SliceStates(Protocol):
    """States that a slice of a sequence leaves for the next one: ``context.slices.Slices``."""

    def running(
        self, sequence: Hashable, number: int, start: int, stop: int, length: int
    ) -> AbstractContextManager[None]:
        """Return the context of a slice's forward or backward."""

    def finish(self, sequence: Hashable) -> None:
        """Free the states of a sequence."""

    def clear(self) -> None:
        """Free all states."""


class Microbatch:
    """One microbatch on this rank.

    Attributes:
        inputs: inputs of the first stage; None on ranks without it.
        labels: labels for the last stage; None on ranks without it.
        kind: equal for microbatches whose inputs have the same structure, shapes and dtypes.
        samples: indices of its samples in the global batch, which key dropout; None if unknown.
        fields: name -> value of each field that layers of this rank take.
        tokens: length of dim 1 of its inputs, on every rank; 0 without such a dim.
    """

    def __init__(
        self,
        inputs: Any,
        labels: Any,
        kind: Hashable,
        samples: range | None = None,
        fields: Mapping[str, Any] | None = None,
        tokens: int = 0,
    ) -> None:
        self.inputs, self.labels, self.kind, self.samples = inputs, labels, kind, samples
        self.fields, self.tokens = fields or {}, tokens


class Result:
    """Result of a run. The ranks that hold the last stage have losses and outputs; on the others both are empty.

    Attributes:
        losses: microbatch -> (loss, weight). For named losses: (their share of the batch's loss, 1).
        named: microbatch -> its named losses, if ``loss_fn`` or layers of this rank returned such.
        outputs: microbatch -> the last layer's output, if asked for.
        pairs: True if ``loss_fn`` returned pairs (sum, weight), False if it returned means; None without a loss.
        reached: stage of this rank -> True if a backward pass gave its inputs a gradient, in any microbatch.
        contributing: stages of this rank, except the last one, whose layers returned losses with a gradient.
    """

    def __init__(self) -> None:
        self.losses: dict[int, tuple[Tensor, Tensor | float]] = {}
        self.named: dict[int, NamedLosses] = {}
        self.outputs: dict[int, Any] = {}
        self.pairs: bool | None = None
        self.reached: dict[int, bool] = {}
        self.contributing: set[int] = set()

    def require_one_form(self, weight: float, microbatches: int) -> None:
        """Check that no other replica returned pairs where this rank returned means.

        Args:
            weight: weight of the whole batch.
            microbatches: microbatches of the whole batch, each of which has the weight 1 if all are means.

        Raises:
            ValueError: on a rank that returned means.
        """
        if self.pairs is False and weight != microbatches:
            raise ValueError(_MIXED_FORMS)

    def sums(self) -> tuple[Tensor | float, Tensor | float]:
        """Return (sum of losses, sum of weights) of all microbatches, in float64; tensors if they are on a GPU."""
        loss: Tensor | float = 0.0
        weight: Tensor | float = 0.0
        for value, its in self.losses.values():  # on a CPU as numbers, on a GPU without a wait
            loss = loss + (float(value) if value.device.type == "cpu" else value.double())
            if isinstance(its, Tensor) and its.device.type != "cpu":
                weight = weight + torch.where(its >= 0, its.double(), torch.nan)  # no batch may have a negative weight
            else:
                weight = weight + float(its)
        return loss, weight


class _SavedForBackward(NamedTuple):
    """Tensors that are kept for one stage and microbatch between its forward and its backward."""

    boundary: Boundary | None  # its inputs in the autograd graph; None at the first stage
    edges: list[GradientEdge]  # of the outputs, which get gradients from the next stage and may be freed themselves
    losses: list[GradientEdge]  # of losses, whose gradient is 1
    deferred: Deferred | None  # queue of its weight gradients, if the schedule splits this backward
    kept: KeptActivations | None = None  # what autograd saved, if it is offloaded
    again: Callable[[], None] | None = None  # runs the forward again, if it kept its input only


class Executor:
    """Executor of pipeline programs over this rank's stages of a ``PipelineModule``.

    Args:
        module: the model.
        data: runs the program's REDUCE, TIED, GATHER and RELEASE ops.
        parts: contexts of the part ``stage``, the layers of one stage in a forward pass.
        memory: makes the allocator of offloaded activations, for programs with O and R.
        slices: states of the layers, for programs over slices of sequences.

    Attributes:
        loss_scale: factor of the losses before the backward pass (fp16). Reported losses are not scaled.
        term_weights: weights of named losses over the whole batch, known before it runs; means have none.
        count: microbatches of the whole batch.
        forms: (in training, stage) -> form of the losses of earlier batches, which each microbatch must have.
        clock: if set, each run records the times of its ops; ``marks`` has the times of the last run.
        origin: time at which that run started, after a barrier over the ranks of this pipeline.
        interleaves: run the two passes of a pair interleaved. If False, or if no axis of the model has collectives,
            they run one after the other, as two ops.
        held: state of each (stage, microbatch) between forward and backward.
        peak: the largest number of entries that ``held`` had in the last run.
    """

    def __init__(
        self,
        module: PipelineModule,
        data: DataAxis,
        parts: Parts,
        memory: Callable[[], HostMemory] | None = None,
        slices: SliceStates | None = None,
    ) -> None:
        self._module, self._data, self._parts = module, data, parts
        self._grid = module.grid
        self._last_stage = len(module.placement) - 1
        self._outgoing, self._incoming = channels(module, "F"), channels(module, "B")
        self._channels = [*self._outgoing.values(), *self._incoming.values()]
        module.stage_part = partial(parts, "stage")
        self._handlers: dict[str, Callable[[Op], None]] = {
            "F": self._forward,
            "B": self._backward,
            "I": self._input_gradient,
            "W": self._weight_gradient,
            "C": self._recompute,
            "O": self._offload,
            "R": self._reload,
            "SEND_F": self._send_forward,
            "RECV_F": self._receive_forward,
            "SEND_B": self._send_backward,
            "RECV_B": self._receive_backward,
            "REDUCE": lambda op: data.reduce_gradients(op.stage, op.microbatch),
            "TIED": lambda op: data.reduce_tied_gradients(op.microbatch),
            "GATHER": lambda op: data.gather_parameters(op.stage),
            "RELEASE": lambda op: data.release_parameters(op.stage),
        }
        # of the passes of a pair
        self._lanes = Lanes(module.grid.device, partial(_pass_state, module), partial(_restore, module))
        self._model_axes = (module.grid.tensor, module.grid.context, module.grid.expert)
        self.interleaves = True
        self._program: Program | None = None  # of the last run
        self._memory, self._slices = memory, slices
        self._sliced = 1  # slices of each microbatch
        self._bounds: list[list[tuple[int, int]]] = []  # microbatch -> first token and end of each of its slices
        self._lane: OffloadLane | None = None
        self._offloaded: set[tuple[int, int]] = set()  # (stage, microbatch) with an O
        self._recomputed: set[tuple[int, int]] = set()  # (stage, microbatch) with a C
        self._computed = 0  # compute ops of the run so far
        self.clock: Clock | None = None
        self.loss_scale = 1.0
        self.term_weights: Mapping[str, float] = {}
        self.count = 1
        self.forms: dict[tuple[bool, int], Any] = {}
        self.marks: list[OpMarks] = []
        self.origin: Mark = 0.0
        self._checked: set[tuple[int, Hashable]] = set()  # stages and kinds of microbatches that have run
        self._ready = _do_nothing  # called when an op has its inputs
        self.held: dict[tuple[int, int], _SavedForBackward] = {}
        self.peak = 0
        # By (stage, microbatch): posted receives, and results that are not sent or read yet.
        self._input_receives: dict[tuple[int, int], Receive] = {}
        self._gradient_receives: dict[tuple[int, int], Receive] = {}  # of the output's gradients
        self._outputs: dict[tuple[int, int], Flat] = {}
        self._gradients: dict[tuple[int, int], list[Tensor | None]] = {}  # of the input

    def wrap(self, kind: str, around: Callable[[Op], AbstractContextManager[Any]]) -> None:
        """Run every later op of a kind in the context ``around(op)``, for example autocast or a measurement."""
        inner = self._handlers[kind]

        def handler(op: Op) -> None:
            with around(op):
                inner(op)

        self._handlers[kind] = handler

    def forget_schemas(self) -> None:
        """Drop the cached schemas of messages on both ends, because they may change, e.g. if layers were frozen."""
        for channel in self._channels:
            channel.schemas.clear()
        self._checked.clear()

    def abandon(self) -> None:
        """After a failure: drop every message, so that the connections to the other ranks can close."""
        for channel in self._channels:
            channel.abandon()
        for kept in (self._input_receives, self._gradient_receives, self._outputs, self._gradients, self.held):
            kept.clear()
        if self._lane is not None:
            self._lane.clear()
        if self._slices is not None:
            self._slices.clear()

    def run(
        self, program: Program, microbatches: Sequence[Microbatch], outputs: bool = False, loss: bool = True
    ) -> Result:
        """Run this rank's part of a program.

        Args:
            program: a verified program of this module's placement.
            microbatches: the program's microbatches.
            outputs: keep the last layer's outputs, on the ranks that hold the last stage.
            loss: compute the loss; False does not use the labels.

        Raises:
            AgreedError: on every rank, if the sequences of a microbatch are too short for the program's slices.
            RuntimeError: an op failed; the message names the rank, its coordinate and the op.
        """
        ops = program.ops[self._grid.pipe.rank]
        self._sliced = len(program.schedule.slices)
        if self._sliced > 1:
            microbatches = self._cut(microbatches, program.schedule.slices)
        self._microbatches, self._keep_outputs, self._wants_loss = microbatches, outputs, loss
        if program is not self._program:
            self._program = program
            self._training = any(op.kind != "F" for op in ops if op.kind in COMPUTE)
            self._split = {(op.stage, op.microbatch) for op in ops if op.kind == "I"}
            self._offloaded = {(op.stage, op.microbatch) for op in ops if op.kind == "O"}
            self._recomputed = {(op.stage, op.microbatch) for op in ops if op.kind == "C"}
            if self._offloaded and self._lane is None:
                if self._memory is None:
                    raise ValueError(
                        "the schedule offloads activations, but this executor has no host memory: give Executor memory="
                    )
                self._lane = OffloadLane(self._grid.device, self._memory())
            self._last_backward = {op.stage: op for op in ops if op.kind in "BW"}
        self._result = Result()
        for kept in (self._input_receives, self._gradient_receives, self._outputs, self._gradients, self.held):
            kept.clear()
        self.marks, self.peak, self._computed = [], 0, 0
        if self._lane is not None:
            self._lane.clear()
        if self._slices is not None:
            self._slices.clear()
        handlers, self._ready = self._handlers, _do_nothing
        if self.clock is not None:
            handlers, self._ready = dict.fromkeys(handlers, self._marked), self._mark
            self._grid.pipe.barrier()
            self.origin = self.clock.mark()
        activity = self._grid.activity
        for together in self._together(ops):
            try:
                if len(together) == 1:
                    (op,) = together
                    activity.start(op)
                    handlers[op.kind](op)
                    self._computed += op.kind in COMPUTE
                else:
                    activity.start("{}&{}".format(*together))
                    self._pair(*together)
                    self._computed += 2
            except Exception as error:
                raise self._failed("&".join(map(str, together)), error) from error
        for channel in self._channels:
            channel.limit(0)
        self._add_named()
        self._join_slices()
        activity.start("the end of the step")
        return self._result

    def _together(self, ops: Sequence[Op]) -> Iterator[tuple[Op, ...]]:
        """Yield the ops one by one, but the two ops of a pair together if they are to run interleaved."""
        assert self._program is not None
        pairs = self._program.schedule.pairs
        if not pairs or not self.interleaves or all(axis.size == 1 for axis in self._model_axes):
            yield from ((op,) for op in ops)
            return
        after = iter(ops)
        for op in after:
            yield (op, next(after)) if op in pairs else (op,)

    def _pair(self, first: Op, second: Op) -> None:
        """Run two passes interleaved, from when the inputs of both have arrived."""
        entered = None if self.clock is None else self.clock.mark()
        for op in (first, second):
            receives = self._input_receives if op.kind == "F" else self._gradient_receives
            if op.kind != "W" and (receive := receives.get(op[1:])) is not None:
                receive.wait()
        began = None if self.clock is None else self.clock.mark()
        ready, self._ready = self._ready, _do_nothing
        for axis in self._model_axes:
            axis.lanes = self._lanes
        try:
            self._lanes.run(
                partial(self._handlers[first.kind], first),
                partial(self._handlers[second.kind], second),
            )
        finally:
            self._ready = ready
            for axis in self._model_axes:
                axis.lanes = None
        if self.clock is not None:
            end = self.clock.mark()
            self.marks += [OpMarks(op, entered, began, end) for op in (first, second)]

    def _cut(self, microbatches: Sequence[Microbatch], slices: Sequence[float]) -> list[Microbatch]:
        """Return the slices of the microbatches, along dim 1 of inputs and labels.

        Of inputs ``(x, documents)`` the second stays whole, as layers with attention need it.
        """
        if self._slices is None:
            raise ValueError("the schedule runs slices of sequences, but this executor has no states: give slices=")
        try:
            self._bounds = [slice_bounds(each.tokens, slices, self._grid.tensor.size) for each in microbatches]
        except ValueError as error:
            raise AgreedError(str(error)) from None
        cut = []
        for each, bounds in zip(microbatches, self._bounds, strict=True):
            for number, (start, stop) in enumerate(bounds):
                inputs, labels, kind = each.inputs, each.labels, (each.kind, number)
                if isinstance(inputs, tuple | list):
                    inputs = (_narrow(inputs[:1], start, stop, each.tokens, "inputs")[0], *inputs[1:])
                elif inputs is not None:
                    inputs = _narrow(inputs, start, stop, each.tokens, "inputs")
                labels = _narrow(labels, start, stop, each.tokens, "labels")
                cut.append(Microbatch(inputs, labels, kind, each.samples, each.fields, stop - start))
        return cut

    def _running(self, op: Op) -> AbstractContextManager[None]:
        """Return the context of a slice's forward or backward."""
        if self._sliced == 1:
            self._module.dropout_state.first_token = 0
            return nullcontext()
        assert self._slices is not None  # _cut has checked
        microbatch, number = divmod(op.microbatch, self._sliced)
        bounds = self._bounds[microbatch]
        self._module.dropout_state.first_token = bounds[number][0]
        return self._slices.running((op.stage, microbatch), number, *bounds[number], bounds[-1][1])

    def _marked(self, op: Op) -> None:
        """Run an op and append three times to ``marks``: the call, the arrival of its inputs, and its end."""
        assert self.clock is not None
        entered = self._began = self.clock.mark()
        self._handlers[op.kind](op)
        self.marks.append(OpMarks(op, entered, self._began, self.clock.mark()))

    def _mark(self) -> None:
        assert self.clock is not None
        self._began = self.clock.mark()

    def _forward(self, op: Op) -> None:
        """Run ``outputs = stage(inputs)`` and, after the last stage, ``loss = loss_fn(outputs, labels)``."""
        _, stage, index = op
        microbatch = self._microbatches[index]
        boundary = None
        if stage == 0:
            value = microbatch.inputs
        else:
            tensors, schema = self._input(stage, index)
            if self._training:
                boundary = Boundary(tensors, schema)
                # The boundary drops them: the graph's first node holds it, which would be a reference cycle.
                tensors, boundary.tensors = boundary.tensors, []
            value = unflatten(schema, tensors)
        if self._lane is not None:
            self._lane.wait(self._computed)
        self._ready()
        self._module.dropout_state.samples = microbatch.samples
        deferred = Deferred() if (stage, index) in self._split else None
        last = stage == self._last_stage
        with_head = last and self._wants_loss and not self._keep_outputs and self._module.loss_takes_head
        named: list[NamedLosses] = []  # of layers
        kept = self._keeping(stage, index)
        with (
            self._running(op),
            SplitBackward(deferred) if deferred is not None else nullcontext(),
            kept.recording() if kept is not None else nullcontext(),
        ):
            # Values between layers of one stage are checked too, for grids that cut the list there.
            checked = stage, self._kind(index)
            self._module.check_hook = None if checked in self._checked else flatten
            run = partial(self._module.run_stage, stage, fields=microbatch.fields, without_head=with_head)
            with self._parts("stage"):
                if (stage, index) in self._recomputed:
                    value, again = self._run_to_recompute(stage, run, value, named)
                else:
                    value, again = run(value, losses=named), None
            self._module.check_hook = None
            self._checked.add(checked)
            if not last:
                if self._training:
                    value = joined(value)
                self._outputs[stage, index] = tensors, _ = flatten(value)
                losses = self._named(named, [], stage, index) if self._wants_loss else []
            else:
                tensors, losses = [], self._loss(value, named, index, with_head)
        if self._training:
            edges, roots = ([get_gradient_edge(t) for t in each if t.requires_grad] for each in (tensors, losses))
            self.held[stage, index] = _SavedForBackward(boundary, edges, roots, deferred, kept, again)
            self.peak = max(self.peak, len(self.held))

    def _backward(self, op: Op) -> None:
        """Run the whole backward: input gradient and weight gradient together."""
        with self._reducing(op):
            self._differentiate(op)
        del self.held[op.stage, op.microbatch]

    def _input_gradient(self, op: Op) -> None:
        """Run the backward for the input gradient, and queue the weight gradients of the layers that can defer them."""
        self._differentiate(op)
        self._data.take_first_gradients(op.stage)
        held = self.held[op.stage, op.microbatch]
        self.held[op.stage, op.microbatch] = _SavedForBackward(None, [], [], held.deferred)

    def _weight_gradient(self, op: Op) -> None:
        """Compute all queued weight gradients of a stage and microbatch, and add them to the accumulated gradients."""
        deferred = self.held[op.stage, op.microbatch].deferred
        assert deferred is not None  # forward queued them, since the program splits the backward
        with self._reducing(op):
            deferred.run(self._data.target, self._data.accumulated)
        del self.held[op.stage, op.microbatch]

    def _differentiate(self, op: Op) -> None:
        """Run one backward pass from all outputs."""
        _, stage, index = op
        gradients = self._gradients_of_outputs(stage, index)
        boundary, edges, losses, deferred, kept, _ = self.held[stage, index]
        if kept is not None and kept.back is not None:
            kept.back()
            kept.back = None
        self._ready()
        edges = [edge for edge, gradient in zip(edges, gradients, strict=True) if gradient is not None]
        gradients = [gradient for gradient in gradients if gradient is not None]
        if edges or losses:
            with self._running(op), deferring(deferred) if deferred is not None else nullcontext():
                torch.autograd.backward([*edges, *losses], [*gradients, *[None] * len(losses)])
        if self._sliced > 1 and not index % self._sliced:
            assert self._slices is not None
            self._slices.finish((stage, index // self._sliced))
        if boundary is not None:
            self._gradients[stage, index] = boundary.gradients
            self._result.reached[stage] = boundary.reached or self._result.reached.get(stage, False)

    def _run_to_recompute(
        self, stage: int, run: Callable[..., Any], value: Any, named: list[NamedLosses]
    ) -> tuple[Any, Callable[[], None]]:
        """Run a stage so that it keeps its input only; return its output, and the function that C calls."""
        lists = [named]  # of the first run; the second one's losses are known already

        def pass_(value: Any) -> Any:
            return run(value, losses=lists.pop() if lists else [])

        parts = stateful(module for _, module in self._module.modules_of(stage))
        first = not any(at == stage for at, _ in self._checked)
        return run_to_recompute(self._grid, self._module.dropout_state, f"stage {stage}", parts, pass_, value, first)

    def _recompute(self, op: Op) -> None:
        """Run a forward pass again, which kept its input only."""
        if self._lane is not None:
            self._lane.wait(self._computed)
        again = self.held[op.stage, op.microbatch].again
        assert again is not None  # the forward pass of a program with C
        again()

    def _keeping(self, stage: int, index: int) -> KeptActivations | None:
        """Return the record of what autograd saves, if the program offloads it."""
        if (stage, index) not in self._offloaded:
            return None
        held = [*self._module.parameters(), *self._module.buffers()]
        gathers, storages = -1, set[int]()

        def weights() -> set[int]:
            nonlocal gathers, storages
            if gathers != self._data.gathers:
                gathers = self._data.gathers
                storages = {tensor.untyped_storage()._cdata for tensor in held}
            return storages

        return KeptActivations(weights)

    def _offload(self, op: Op) -> None:
        """Start to copy the activations of a stage and microbatch to the host."""
        kept = self.held[op.stage, op.microbatch].kept
        assert kept is not None and self._lane is not None  # run has made both
        self._lane.offload(kept, self._computed)

    def _reload(self, op: Op) -> None:
        """Start to copy the activations of a stage and microbatch back to the device."""
        kept = self.held[op.stage, op.microbatch].kept
        assert kept is not None and self._lane is not None
        self._lane.reload(kept)

    def _reducing(self, op: Op) -> AbstractContextManager[None]:
        """Return the data axis's context for an op that computes weight gradients."""
        return self._data.backward(op.stage, last=self._last_backward[op.stage] == op)

    def _send_forward(self, op: Op) -> None:
        """Start sending a stage's outputs to the next stage."""
        _, stage, index = op
        channel = self._outgoing[stage + 1]
        channel.send(self._outputs.pop((stage, index)), self._kind(index), index)
        if not self._training:
            channel.limit(_MAX_SENDS)

    def _receive_forward(self, op: Op) -> None:
        """Post the receive of a stage's inputs from the stage before."""
        _, stage, index = op
        self._input_receives[stage, index] = receive_value(self._outgoing[stage], self._kind(index))

    def _send_backward(self, op: Op) -> None:
        """Start sending the gradients of a stage's inputs to the stage before."""
        _, stage, index = op
        channel = self._incoming[stage]
        specs = self._outgoing[stage].schemas[self._kind(index)].gradients
        send_gradients(channel, self._gradients.pop((stage, index)), specs, index)
        channel.limit(_MAX_SENDS)

    def _receive_backward(self, op: Op) -> None:
        """Post the receive of the gradients of a stage's outputs from the next stage."""
        _, stage, index = op
        channel, outputs = self._incoming[stage + 1], self._outgoing[stage + 1]
        self._gradient_receives[stage, index] = receive_gradients(channel, outputs, self._kind(index))

    def _input(self, stage: int, index: int) -> Flat:
        """Return a stage's input: the output of the stage before, received or computed on this rank."""
        receive = self._input_receives.pop((stage, index), None)
        if receive is not None:
            tensors = receive.wait()
            return tensors, self._outgoing[stage].schemas[self._kind(index)]
        tensors, schema = self._outputs.pop((stage - 1, index))
        return [tensor.detach() for tensor in tensors], schema

    def _gradients_of_outputs(self, stage: int, index: int) -> Sequence[Tensor | None]:
        """Return the gradients from the next stage; none for the last one."""
        if stage == self._last_stage:
            return []
        receive = self._gradient_receives.pop((stage, index), None)
        if receive is None:
            return self._gradients.pop((stage + 1, index))
        gradients = received_gradients(receive)
        self._outgoing[stage + 1].wait_sent(index)
        return gradients

    def _loss(self, outputs: Any, layers: list[NamedLosses], index: int, with_head: bool) -> list[Tensor]:
        """Add one microbatch's loss to the result; return the roots of the backward pass.

        Args:
            outputs: output of the last layer; ``with_head``: its input.
            layers: losses that layers of the last stage returned.
            index: the microbatch.
            with_head: let the loss function run the last layer. The loss may be unknown until the backward pass.
        """
        microbatch, module = self._microbatches[index], self._module
        if self._keep_outputs:
            kept = outputs if module.output_fn is None else module.output_fn(outputs)
            self._result.outputs[index] = map_tensors(torch.Tensor.detach, kept)
        if not self._wants_loss:
            return []
        try:
            value = module.loss(outputs, microbatch.labels, with_head)
        except TypeError:
            require_arguments(module.loss_fn or _do_nothing, (outputs, microbatch.labels), "loss_fn", _LOSS)
            raise
        if is_named(value):
            named = [named_losses(value, "loss_fn returned", "return")]
            return self._named(layers, named, self._last_stage, index)
        if layers or index in self._result.named:
            raise ValueError(UNNAMED)
        self._require_form(None, self._last_stage)
        pair = is_pair(value)
        if not pair:
            self._refuse_mean("", "loss_fn")
        loss, weight = sum_and_weight(value, "loss_fn returned", "return")
        if self._result.pairs not in (None, pair):
            raise ValueError(_MIXED_FORMS)
        self._result.pairs = pair
        if self._training and not loss.requires_grad and float(weight):
            raise ValueError(
                "the loss depends on no parameter that requires a gradient: remove a detach() or no_grad() before the "
                "loss, or train at least one parameter"
            )
        self._result.losses[index] = loss.detach(), weight
        return [loss] if self.loss_scale == 1.0 else [loss.float() * self.loss_scale]

    def _named(self, layers: list[NamedLosses], by_loss_fn: list[NamedLosses], stage: int, index: int) -> list[Tensor]:
        """Add the named losses of one stage and microbatch to the result; return the roots of the backward pass.

        Args:
            layers: losses that layers of the stage returned.
            by_loss_fn: losses that ``loss_fn`` returned, after the last stage.
            stage, index: the stage, and the microbatch.
        """
        losses = [*layers, *by_loss_fn]
        if not losses:
            self._require_form(None, stage)
            return []
        named = reduce(combined, losses)
        self._require_form(named.form(), stage)
        before = self._result.named.get(index)
        roots = [*(self._root(each, "the layer", "loss_weight(...)") for each in layers)]
        roots += [self._root(each, "loss_fn", "weight(labels)") for each in by_loss_fn]
        root = sum(roots[1:], roots[0])
        if not by_loss_fn and root.requires_grad:
            self._result.contributing.add(stage)
        # Another stage of this rank may have had losses before.
        self._result.named[index] = named.detached() if before is None else combined(before, named.detached())
        return [root] if self.loss_scale == 1.0 else [root.float() * self.loss_scale]

    def _root(self, named: NamedLosses, whose: str, method: str) -> Tensor:
        """Return the root of the backward pass of named losses: the sum of the terms, times the number of microbatches.

        A batch of N microbatches has the weight N. So that the sum of all roots, divided by N, is the sum of the terms,
        a term of the weight W over the batch enters a root as ``factor * sum * N / W``. The W of a mean is N. With a
        context axis each rank has its part of the sum.

        Args:
            named: losses of one microbatch.
            whose, method: for error messages: what returned the losses, and its method that returns their weights.
        """
        root: Tensor | None = None
        for name, term in named.terms.items():
            if term.is_mean:
                self._refuse_mean(f" of {name!r}", whose)
            if self._training and (share := self._share(name, term, whose, method)):
                part = term.total * share
                root = part if root is None else root + part
        if root is None:
            root = torch.zeros((), device=self._grid.device)
        elif not root.requires_grad and any(float(term.weight) for term in named.terms.values()):
            raise ValueError(
                f"none of the terms {', '.join(named.terms)} depends on a parameter that requires a gradient: remove a "
                "detach() or no_grad() before the loss, or train at least one parameter"
            )
        return root

    def _share(self, name: str, term: Term, whose: str, method: str) -> float:
        """Return the factor with which a term's sum of one microbatch enters its root."""
        whole = self.count if term.is_mean else self.term_weights.get(name)
        if whole is None:
            raise ValueError(
                f"{whose} returned the pair (sum, weight) for {name!r}, one of several terms. Its gradients are "
                "divided by its weight over the whole batch, which must be known before the first backward pass: "
                f"give {whose} a method {method} that returns {{{name!r}: weight}} for a microbatch, or return a "
                "mean, which has the weight 1 in each microbatch"
            )
        return term.factor * self.count / whole if whole else 0.0

    def _add_named(self) -> None:
        """Add the values of named losses to the result, when the run has ended and they are known.

        A rank whose stages have losses of layers alone has terms, and no weight of a batch.
        """
        parts = self._grid.context.size * self._sliced
        weight = 1.0 / parts if self._last_stage in self._module.stages else 0.0
        for index, named in self._result.named.items():
            loss = torch.zeros((), device=self._grid.device, dtype=torch.float64)
            if self._training:
                for name, term in named.terms.items():
                    loss = loss + term.total.double() * self._share(name, term, "loss_fn", "weight(labels)")
            self._result.losses[index] = loss, weight

    def _join_slices(self) -> None:
        """Add up the losses of the slices of each microbatch, when the run has ended and they are known."""
        if self._sliced == 1:
            return
        joined: dict[int, tuple[Tensor, Tensor | float]] = {}
        for index, (loss, weight) in self._result.losses.items():
            total, count = joined.get(index // self._sliced, (0.0, 0.0))
            joined[index // self._sliced] = loss + total, weight + count
        self._result.losses = joined

    def _refuse_mean(self, term: str, whose: str) -> None:
        """Refuse a mean of a part of a sequence."""
        if self._sliced > 1:
            raise ValueError(
                f"the schedule cuts each sequence into {self._sliced} slices, and with a mean{term} all of them would "
                f"have the same weight, however many labels they have: let {whose} return a pair (sum of the losses, "
                "number of labels), as triax.NextTokenLoss does"
            )
        if (parts := self._grid.context.size) > 1:
            raise ValueError(
                f"the grid has context={parts}, so each rank computes the loss of its part of a sequence, and with "
                f"a mean{term} all parts would have the same weight, however many labels they have: let {whose} "
                "return a pair (sum of the losses, number of labels), as triax.NextTokenLoss does"
            )

    def _require_form(self, form: Any, stage: int) -> None:
        """Check that each microbatch has named losses of one form: the same names, means or pairs, and sizes.

        Args:
            form: the form of this microbatch's losses; None if its loss has no names.
            stage: the stage that computed the losses.
        """
        before = self.forms.setdefault((self._training, stage), form)
        if form != before:
            who = "loss_fn" if stage == self._last_stage else f"the layers of stage {stage}"
            raise ValueError(
                f"{who} returned {described_form(form)}, and before {described_form(before)}: return the same "
                "names in the same form for every microbatch, a term that does not occur with the weight 0"
            )

    def _kind(self, index: int) -> Hashable:
        # Without gradients the schema differs: no tensor requires a gradient.
        return self._microbatches[index].kind, self._training

    def _failed(self, op: str, error: Exception) -> RuntimeError:
        """Return the error, with this rank, its coordinate and op, or with the error of a rank that failed first."""
        reported = self._grid.failure_cause(error)
        message = f"{self._grid.describe()} failed at {op}: {type(error).__name__}: {error}"
        if reported is not None and reported != message:
            return RuntimeError(f"{self._grid.describe()} stopped at {op}, because {reported}")
        self._grid.report_failure(message)
        return RuntimeError(message)


def _narrow(value: Any, start: int, stop: int, tokens: int, what: str) -> Any:
    """Return the tokens of a slice from each tensor of a nest.

    Raises:
        ValueError: dim 1 of a tensor does not count the tokens.
    """

    def narrowed(tensor: Tensor) -> Tensor:
        if tensor.dim() < 2 or tensor.shape[1] != tokens:
            raise ValueError(
                f"the {what} have a tensor of the shape {tuple(tensor.shape)}, but a schedule with slices cuts dim 1, "
                f"which must count the {tokens} tokens of a sequence: use schedule.slices=1"
            )
        return tensor[:, start:stop]

    return map_tensors(narrowed, value)


def _pass_state(module: PipelineModule) -> tuple[range | None, Callable[[Any], object] | None]:
    """Return what a pass sets in the model while it runs."""
    return module.dropout_state.samples, module.check_hook


def _restore(module: PipelineModule, state: tuple[range | None, Callable[[Any], object] | None]) -> None:
    module.dropout_state.samples, module.check_hook = state


def _do_nothing() -> None:
    pass
