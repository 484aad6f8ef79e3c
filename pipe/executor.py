"""Executor of pipeline programs: one loop over a program's ops that calls ``handlers[op.kind](op)``.

The executor does not depend on the schedule from which the program was made. ZeRO's ops are methods of the two objects
``GradientSums`` and ``Gatherer``, which the engine passes in. Losses are not divided here, because the engine divides
once, by the weight of the whole batch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from ..base.deferred import Deferred
from ..base.nest import map_tensors
from ..base.torch_private import storage_id
from ..grid.comm.lanes import Lanes
from ..grid.comm.spans import OpenSpan, Spans
from ..grid.loss_terms import NamedLosses
from .activation_offload import HostMemory, KeptActivations, OffloadLane
from .backward import SplitBackward, deferring
from .losses import Forms, LossWeights, Result, RunLosses
from .microbatch import Microbatch, cut
from .module import PipelineModule
from .p2p import Receive, channels, receive_gradients, receive_value, received_gradients, send_gradients
from .program.ops import COMPUTE, Op
from .program.program import Program
from .recompute.early import run_to_recompute
from .recompute.recompute import stateful
from .schema import Flat, flatten, unflatten
from .spec import require_arguments
from .stage_boundary import Boundary, joined

# Sends of one channel that may be pending before the next one waits for the oldest. It bounds memory. The other
# stage posts its receives early, so in normal operation the limit is not reached.
_MAX_SENDS = 8
_LOSS = "It gets the model's outputs and the labels: write loss_fn(outputs, labels)"


class GradientSums(Protocol):
    """Reductions of gradients that a program uses: ``zero.gradients.GradientReducer``."""

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


class Gatherer(Protocol):
    """Gathers of weights that a program of stage 3 uses: ``zero.layer_gather.ParameterGatherer``.

    Attributes:
        gathers: number of gathers so far: each gives some parameters another storage.
    """

    gathers: int

    def release(self, stage: int) -> None:
        """RELEASE: free the gathered parameters; this rank keeps its shard."""


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


class _SavedForBackward(NamedTuple):
    """Tensors that are kept for one stage and microbatch between its forward and its backward."""

    boundary: Boundary | None  # its inputs in the autograd graph; None at the first stage
    edges: list[GradientEdge]  # of the outputs, which get gradients from the next stage and may be freed themselves
    losses: list[GradientEdge]  # of losses, whose gradient is 1
    deferred: Deferred | None  # queue of its weight gradients, if the schedule splits this backward
    kept: KeptActivations | None = None  # what autograd saved, if it is offloaded
    again: Callable[[], None] | None = None  # runs the forward again, if it kept its input only


class ProgramFacts:
    """Facts of one rank's part of a program, which are the same in each run.

    Args:
        ops: the rank's ops.

    Attributes:
        training: True if the program has backward passes.
        split: the (stage, microbatch) whose backward is split into I and W.
        offloaded, recomputed: the (stage, microbatch) with an O, and with a C.
        last_backward: the last op of each stage that computes weight gradients.
    """

    def __init__(self, ops: Sequence[Op]) -> None:
        self.training = any(op.kind != "F" for op in ops if op.kind in COMPUTE)
        self.split, self.offloaded, self.recomputed = (
            {(op.stage, op.microbatch) for op in ops if op.kind == kind} for kind in "IOC"
        )
        self.last_backward = {op.stage: op for op in ops if op.kind in "BW"}


class ProgramRun:
    """State of one run of a program on this rank. The next run begins with a new one.

    Attributes:
        facts: what does not change from run to run.
        microbatches: the microbatches, or the slices of all of them.
        slices: number of slices of each microbatch.
        bounds: microbatch -> first token and end of each of its slices; [] if they are whole.
        keeps_outputs, wants_loss: arguments ``outputs`` and ``loss`` of ``Executor.run``.
        result: what the run returns.
        losses: reads the losses of the run into the result.
        held: state of each (stage, microbatch) between its forward and its backward.
        peak: the largest number of entries that ``held`` had.
        computed: compute ops so far.
        input_receives, gradient_receives: (stage, microbatch) -> receive that was posted: of the inputs, and of the
            gradients of the outputs.
        outputs, gradients: (stage, microbatch) -> what is not sent or read yet: the outputs, and the gradients of the
            inputs.
        span: span of the op that runs, if anything reads it.
    """

    def __init__(
        self,
        facts: ProgramFacts,
        microbatches: Sequence[Microbatch],
        losses: RunLosses,
        keeps_outputs: bool,
        wants_loss: bool,
        slices: int,
        bounds: Sequence[Sequence[tuple[int, int]]],
    ) -> None:
        self.facts, self.microbatches, self.slices, self.bounds = facts, microbatches, slices, bounds
        self.keeps_outputs, self.wants_loss = keeps_outputs, wants_loss
        self.losses, self.result = losses, losses.result
        self.held: dict[tuple[int, int], _SavedForBackward] = {}
        self.peak = self.computed = 0
        self.input_receives: dict[tuple[int, int], Receive] = {}
        self.gradient_receives: dict[tuple[int, int], Receive] = {}
        self.outputs: dict[tuple[int, int], Flat] = {}
        self.gradients: dict[tuple[int, int], list[Tensor | None]] = {}
        self.span: OpenSpan | None = None

    def kind(self, index: int) -> Hashable:
        """Return what two microbatches have in common whose messages have one schema."""
        return self.microbatches[index].kind, self.facts.training  # without gradients no tensor requires one

    def inputs_arrived(self) -> None:
        """Note that the op that runs has its inputs."""
        if self.span is not None:
            self.span.turn()


class Executor:
    """Executor of pipeline programs over this rank's stages of a ``PipelineModule``.

    Args:
        module: the model.
        reducer: runs the program's REDUCE and TIED ops.
        gatherer: runs its RELEASE ops; GATHER has no effect, because each layer gathers its weights when it runs. None
            if weights are always whole.
        spans: stream of the ops, and of the part ``stage``, the layers of one stage in a forward pass.
        memory: makes the allocator of offloaded activations, for programs with O and R.
        slices: states of the layers, for programs over slices of sequences.

    Attributes:
        weights: what the losses of the next batch are multiplied with.
        forms: (in training, stage) -> form of the losses of earlier batches, which each microbatch must have.
        interleaves: run the two passes of a pair interleaved. If False, or if no axis of the model has collectives,
            they run one after the other, as two ops.
    """

    def __init__(
        self,
        module: PipelineModule,
        reducer: GradientSums,
        gatherer: Gatherer | None,
        spans: Spans,
        memory: Callable[[], HostMemory] | None = None,
        slices: SliceStates | None = None,
    ) -> None:
        self._module, self._reducer, self._gatherer, self._spans = module, reducer, gatherer, spans
        self._grid = module.grid
        self._last_stage = len(module.placement) - 1
        self._outgoing, self._incoming = channels(module, "F"), channels(module, "B")
        self._channels = [*self._outgoing.values(), *self._incoming.values()]
        module.stage_part = partial(spans, "stage")
        self._handlers: dict[str, Callable[[ProgramRun, Op], None]] = {
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
            "REDUCE": lambda run, op: reducer.reduce_gradients(op.stage, op.microbatch),
            "TIED": lambda run, op: reducer.reduce_tied_gradients(op.microbatch),
            "GATHER": lambda run, op: None,
            "RELEASE": lambda run, op: None if gatherer is None else gatherer.release(op.stage),
        }
        # Of the two passes of a pair.
        self._lanes = Lanes(module.grid.device, partial(_pass_state, module), partial(_restore, module))
        self._model_axes = (module.grid.tensor, module.grid.context, module.grid.expert)
        self.interleaves = True
        self._memory, self._slices = memory, slices
        self._lane: OffloadLane | None = None
        self._checked: set[tuple[int, Hashable]] = set()  # stages and kinds of microbatches that have run
        self.weights = LossWeights()
        self.forms: Forms = {}
        self._program: Program | None = None  # of the last run
        self._facts = ProgramFacts([])
        self._run: ProgramRun | None = None

    @property
    def last_run(self) -> ProgramRun:
        """The run that goes on, or the last one.

        Raises:
            RuntimeError: there was none.
        """
        if self._run is None:
            raise RuntimeError("no program has run yet: call engine.train_batch first")
        return self._run

    def forget_schemas(self) -> None:
        """Drop the cached schemas of messages on both ends, because they may change, e.g. if layers were frozen."""
        for channel in self._channels:
            channel.schemas.clear()
        self._checked.clear()

    def abandon(self) -> None:
        """After a failure: drop every message, so that the connections to the other ranks can close."""
        for channel in self._channels:
            channel.abandon()
        self._run = None
        self._clear()

    def _clear(self) -> None:
        """Drop what an earlier run has left in host memory and in the states of slices."""
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
        run = self._run = self._begin(program, ops, microbatches, outputs, loss)
        activity = self._grid.activity
        for together in self._together(program.schedule.pairs, ops):
            try:
                if len(together) == 1:
                    (op,) = together
                    activity.start(op)
                    self._op(run, op)
                    run.computed += op.kind in COMPUTE
                else:
                    activity.start("{}&{}".format(*together))
                    self._pair(run, *together)
                    run.computed += 2
            except Exception as error:
                raise self._failed("&".join(map(str, together)), error) from error
        for channel in self._channels:
            channel.limit(0)
        run.losses.finish()
        activity.start("the end of the step")
        return run.result

    def _begin(
        self, program: Program, ops: Sequence[Op], microbatches: Sequence[Microbatch], outputs: bool, loss: bool
    ) -> ProgramRun:
        """Return the state of a new run; the arguments as for ``run``."""
        if program is not self._program:
            self._program, self._facts = program, ProgramFacts(ops)
        facts, slices, bounds = self._facts, program.schedule.slices, list[list[tuple[int, int]]]()
        if len(slices) > 1:
            if self._slices is None:
                raise ValueError("the schedule runs slices of sequences, but this executor has no states: give slices=")
            microbatches, bounds = cut(microbatches, slices, self._grid.tensor.size)
        if facts.offloaded and self._lane is None:
            if self._memory is None:
                raise ValueError(
                    "the schedule offloads activations, but this executor has no host memory: give Executor memory="
                )
            self._lane = OffloadLane(self._grid.device, self._memory())
        self._clear()
        losses = RunLosses(
            self._grid,
            self.weights,
            self.forms,
            facts.training,
            len(slices),
            self._last_stage,
            self._module.is_last,
            self._is_frozen,
        )
        return ProgramRun(facts, microbatches, losses, outputs, loss, len(slices), bounds)

    def _is_frozen(self, stage: int) -> bool:
        """Return True if a parameter of a stage requires no gradient."""
        return not all(p.requires_grad for _, layer in self._module.modules_of(stage) for p in layer.parameters())

    def _together(self, pairs: Collection[Op], ops: Sequence[Op]) -> Iterator[tuple[Op, ...]]:
        """Yield the ops one by one, but the two ops of a pair together if they are to run interleaved."""
        if not pairs or not self.interleaves or all(axis.size == 1 for axis in self._model_axes):
            yield from ((op,) for op in ops)
            return
        after = iter(ops)
        for op in after:
            yield (op, next(after)) if op in pairs else (op,)

    def _pair(self, run: ProgramRun, first: Op, second: Op) -> None:
        """Run two passes interleaved, from when the inputs of both have arrived."""
        with self._spans("pair", (first, second)) as span:
            for op in (first, second):
                receives = run.input_receives if op.kind == "F" else run.gradient_receives
                if op.kind != "W" and (receive := receives.get(op[1:])) is not None:
                    receive.wait()
            if span is not None:
                span.turn()
            for axis in self._model_axes:
                axis.lanes = self._lanes
            try:
                self._lanes.run(partial(self._op, run, first), partial(self._op, run, second))
            finally:
                for axis in self._model_axes:
                    axis.lanes = None

    def _running(self, run: ProgramRun, op: Op) -> AbstractContextManager[None]:
        """Return the context of a slice's forward or backward."""
        if run.slices == 1:
            self._module.dropout_state.first_token = 0
            return nullcontext()
        assert self._slices is not None  # _begin has checked
        microbatch, number = divmod(op.microbatch, run.slices)
        bounds = run.bounds[microbatch]
        self._module.dropout_state.first_token = bounds[number][0]
        return self._slices.running((op.stage, microbatch), number, *bounds[number], bounds[-1][1])

    def _op(self, run: ProgramRun, op: Op) -> None:
        """Run an op, in its span if anything is read."""
        if not self._spans.are_read:
            self._handlers[op.kind](run, op)
            return
        with self._spans(op.kind, op) as run.span:
            self._handlers[op.kind](run, op)

    def _forward(self, run: ProgramRun, op: Op) -> None:
        """Run ``outputs = stage(inputs)`` and, after the last stage, ``loss = loss_fn(outputs, labels)``."""
        _, stage, index = op
        microbatch = run.microbatches[index]
        boundary = None
        if stage == 0:
            value = microbatch.inputs
        else:
            tensors, schema = self._input(run, stage, index)
            if run.facts.training:
                boundary = Boundary(tensors, schema)
                # The boundary drops them: the graph's first node holds it, which would be a reference cycle.
                tensors, boundary.tensors = boundary.tensors, []
            value = unflatten(schema, tensors)
        if self._lane is not None:
            self._lane.wait(run.computed)
        run.inputs_arrived()
        self._module.dropout_state.samples = microbatch.samples
        deferred = Deferred() if (stage, index) in run.facts.split else None
        last = stage == self._last_stage
        with_head = last and run.wants_loss and not run.keeps_outputs and self._module.loss_takes_head
        named: list[NamedLosses] = []  # of layers
        kept = self._keeping(run, stage, index)
        with (
            self._running(run, op),
            SplitBackward(deferred) if deferred is not None else nullcontext(),
            kept.recording() if kept is not None else nullcontext(),
        ):
            # Values between layers of one stage are checked too, for grids that cut the list there.
            checked = stage, run.kind(index)
            if checks := checked not in self._checked:
                self._module.check_hook = flatten
            layers = partial(self._module.run_stage, stage, fields=microbatch.fields, without_head=with_head)
            with self._spans("stage"):
                if (stage, index) in run.facts.recomputed:
                    value, again = self._run_to_recompute(stage, layers, value, named)
                else:
                    value, again = layers(value, losses=named), None
            if checks:
                self._module.check_hook = None
                self._checked.add(checked)
            if not last:
                if run.facts.training:
                    value = joined(value)
                run.outputs[stage, index] = tensors, _ = flatten(value)
                losses = run.losses.add_layers(named, stage, index) if run.wants_loss else []
            else:
                tensors, losses = [], self._loss(run, value, named, index, with_head)
        if run.facts.training:
            run.held[stage, index] = _SavedForBackward(boundary, _edges(tensors), _edges(losses), deferred, kept, again)
            run.peak = max(run.peak, len(run.held))

    def _backward(self, run: ProgramRun, op: Op) -> None:
        """Run the whole backward: input gradient and weight gradient together."""
        with self._reducing(run, op):
            self._differentiate(run, op)
        del run.held[op.stage, op.microbatch]

    def _input_gradient(self, run: ProgramRun, op: Op) -> None:
        """Run the backward for the input gradient, and queue the weight gradients of the layers that can defer them."""
        self._differentiate(run, op)
        self._reducer.take_first_gradients(op.stage)
        held = run.held[op.stage, op.microbatch]
        run.held[op.stage, op.microbatch] = _SavedForBackward(None, [], [], held.deferred)

    def _weight_gradient(self, run: ProgramRun, op: Op) -> None:
        """Compute all queued weight gradients of a stage and microbatch, and add them to the accumulated gradients."""
        deferred = run.held[op.stage, op.microbatch].deferred
        assert deferred is not None  # forward queued them, since the program splits the backward
        with self._reducing(run, op):
            deferred.run(self._reducer.target, self._reducer.accumulated)
        del run.held[op.stage, op.microbatch]

    def _differentiate(self, run: ProgramRun, op: Op) -> None:
        """Run one backward pass from all outputs."""
        _, stage, index = op
        gradients = self._gradients_of_outputs(run, stage, index)
        boundary, edges, losses, deferred, kept, _ = run.held[stage, index]
        if kept is not None and kept.back is not None:
            kept.back()
            kept.back = None
        run.inputs_arrived()
        edges = [edge for edge, gradient in zip(edges, gradients, strict=True) if gradient is not None]
        gradients = [gradient for gradient in gradients if gradient is not None]
        if edges or losses:
            with self._running(run, op), deferring(deferred) if deferred is not None else nullcontext():
                torch.autograd.backward([*edges, *losses], [*gradients, *[None] * len(losses)])
        if run.slices > 1 and not index % run.slices:
            assert self._slices is not None
            self._slices.finish((stage, index // run.slices))
        if boundary is not None:
            run.gradients[stage, index] = boundary.gradients
            run.result.reached[stage] = boundary.reached or run.result.reached.get(stage, False)

    def _run_to_recompute(
        self, stage: int, layers: Callable[..., Any], value: Any, named: list[NamedLosses]
    ) -> tuple[Any, Callable[[], None]]:
        """Run a stage so that it keeps its input only; return its output, and the function that C calls."""
        lists = [named]  # of the first run; the second one's losses are known already

        def pass_(value: Any) -> Any:
            return layers(value, losses=lists.pop() if lists else [])

        parts = stateful(module for _, module in self._module.modules_of(stage))
        first = not any(at == stage for at, _ in self._checked)
        return run_to_recompute(self._grid, self._module.dropout_state, f"stage {stage}", parts, pass_, value, first)

    def _recompute(self, run: ProgramRun, op: Op) -> None:
        """Run a forward pass again, which kept its input only."""
        if self._lane is not None:
            self._lane.wait(run.computed)
        again = run.held[op.stage, op.microbatch].again
        assert again is not None  # the forward pass of a program with C
        again()

    def _keeping(self, run: ProgramRun, stage: int, index: int) -> KeptActivations | None:
        """Return the record of what autograd saves, if the program offloads it."""
        if (stage, index) not in run.facts.offloaded:
            return None
        held = [*self._module.parameters(), *self._module.buffers()]
        gathers, storages = -1, set[int]()

        def weights() -> set[int]:
            nonlocal gathers, storages
            if gathers != (now := 0 if self._gatherer is None else self._gatherer.gathers):
                gathers = now
                storages = {storage_id(tensor.untyped_storage()) for tensor in held}
            return storages

        return KeptActivations(weights)

    def _offload(self, run: ProgramRun, op: Op) -> None:
        """Start to copy the activations of a stage and microbatch to the host."""
        kept = run.held[op.stage, op.microbatch].kept
        assert kept is not None and self._lane is not None  # run has made both
        self._lane.offload(kept, run.computed)

    def _reload(self, run: ProgramRun, op: Op) -> None:
        """Start to copy the activations of a stage and microbatch back to the device."""
        kept = run.held[op.stage, op.microbatch].kept
        assert kept is not None and self._lane is not None
        self._lane.reload(kept)

    def _reducing(self, run: ProgramRun, op: Op) -> AbstractContextManager[None]:
        """Return the data axis's context for an op that computes weight gradients."""
        return self._reducer.backward(op.stage, last=run.facts.last_backward[op.stage] == op)

    def _send_forward(self, run: ProgramRun, op: Op) -> None:
        """Start sending a stage's outputs to the next stage."""
        _, stage, index = op
        channel = self._outgoing[stage + 1]
        channel.send(run.outputs.pop((stage, index)), run.kind(index), index)
        if not run.facts.training:
            channel.limit(_MAX_SENDS)

    def _receive_forward(self, run: ProgramRun, op: Op) -> None:
        """Post the receive of a stage's inputs from the stage before."""
        _, stage, index = op
        run.input_receives[stage, index] = receive_value(self._outgoing[stage], run.kind(index))

    def _send_backward(self, run: ProgramRun, op: Op) -> None:
        """Start sending the gradients of a stage's inputs to the stage before."""
        _, stage, index = op
        channel = self._incoming[stage]
        specs = self._outgoing[stage].schemas[run.kind(index)].gradients
        send_gradients(channel, run.gradients.pop((stage, index)), specs, index)
        channel.limit(_MAX_SENDS)

    def _receive_backward(self, run: ProgramRun, op: Op) -> None:
        """Post the receive of the gradients of a stage's outputs from the next stage."""
        _, stage, index = op
        channel, outputs = self._incoming[stage + 1], self._outgoing[stage + 1]
        run.gradient_receives[stage, index] = receive_gradients(channel, outputs, run.kind(index))

    def _input(self, run: ProgramRun, stage: int, index: int) -> Flat:
        """Return a stage's input: the output of the stage before, received or computed on this rank."""
        receive = run.input_receives.pop((stage, index), None)
        if receive is not None:
            tensors = receive.wait()
            return tensors, self._outgoing[stage].schemas[run.kind(index)]
        tensors, schema = run.outputs.pop((stage - 1, index))
        return [tensor.detach() for tensor in tensors], schema

    def _gradients_of_outputs(self, run: ProgramRun, stage: int, index: int) -> Sequence[Tensor | None]:
        """Return the gradients from the next stage; none for the last one."""
        if stage == self._last_stage:
            return []
        receive = run.gradient_receives.pop((stage, index), None)
        if receive is None:
            return run.gradients.pop((stage + 1, index))
        gradients = received_gradients(receive)
        self._outgoing[stage + 1].wait_sent(index)
        return gradients

    def _loss(
        self, run: ProgramRun, outputs: Any, layers: list[NamedLosses], index: int, with_head: bool
    ) -> list[Tensor]:
        """Compute one microbatch's loss and return the roots of its backward pass.

        Args:
            run: the run.
            outputs: output of the last layer; ``with_head``: its input.
            layers: losses that layers of the last stage returned.
            index: the microbatch.
            with_head: let the loss function run the last layer. The loss may be unknown until the backward pass.
        """
        labels, module = run.microbatches[index].labels, self._module
        if run.keeps_outputs:
            kept = outputs if module.output_fn is None else module.output_fn(outputs)
            run.result.outputs[index] = map_tensors(torch.Tensor.detach, kept)
        if not run.wants_loss:
            return []
        try:
            value = module.loss(outputs, labels, with_head)
        except TypeError:
            require_arguments(module.loss_fn or _do_nothing, (outputs, labels), "loss_fn", _LOSS)
            raise
        return run.losses.add(value, layers, index)

    def _failed(self, op: str, error: Exception) -> RuntimeError:
        """Return the error, with this rank, its coordinate and op, or with the error of a rank that failed first."""
        reported = self._grid.failure_cause(error)
        message = f"{self._grid.describe()} failed at {op}: {type(error).__name__}: {error}"
        if reported is not None and reported != message:
            return RuntimeError(f"{self._grid.describe()} stopped at {op}, because {reported}")
        self._grid.report_failure(message)
        return RuntimeError(message)


def _pass_state(module: PipelineModule) -> tuple[range | None, Callable[[Any], object] | None]:
    """Return what a pass sets in the model while it runs."""
    return module.dropout_state.samples, module.check_hook


def _restore(module: PipelineModule, state: tuple[range | None, Callable[[Any], object] | None]) -> None:
    module.dropout_state.samples, module.check_hook = state


def _edges(tensors: Sequence[Tensor]) -> list[GradientEdge]:
    return [get_gradient_edge(tensor) for tensor in tensors if tensor.requires_grad]


def _do_nothing() -> None:
    pass
