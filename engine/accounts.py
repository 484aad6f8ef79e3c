"""What a step sent and what a rank holds, counted; and beside it what the papers' formulas say."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from ..grid import Grid
from ..pipe.executor import Executor
from ..pipe.module import PipelineModule
from ..pipe.ops import COMPUTE
from ..pipe.passes import Program
from ..pipe.simulate import Flight, Span, Timeline
from ..zero.buckets import Bucket
from ..zero.compressor import Compressor
from ..zero.replicas import Replicas
from .formulas import STATES, ModelStates, model_states
from .meter import Meter

_NAMES = {torch.float64: "fp64", torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


def data_axis_formula(
    buckets: Sequence[Bucket], replicas: int, stage: int, program: Program, rank: int, narrow: bool = True
) -> float:
    """Bytes that ZeRO sends on the data axis in one step, from each rank: Rajbhandari et al. 2020, section 7.

    With M the bytes of a rank's weights and N replicas, a reduce-scatter or an all-gather of them sends
    (N-1)/N M. Stage 0 (an all-reduce) and 1 send two of these. Stage 2 reduces after every backward: one for each
    microbatch and one all-gather. Stage 3 gathers for each forward and each backward pass and reduces after each.
    (It sends less where weights stay whole from one pass to the next: the first layer's of a stage that turns from
    a backward to a forward; all of them if they are kept gathered within the step; and what is frozen below the first
    trained layer, which no backward pass reaches.) Frozen weights are gathered there as others are, and else not sent.

    Args:
        buckets: of the rank.
        replicas, stage: N, and that of ZeRO.
        program, rank: which stages run backward how often.
        narrow: gradients travel in the dtype of communication; False: in that in which they are accumulated.
    """
    backwards = backward_passes(program, rank)
    total = 0.0
    for bucket in buckets:
        gradient = bucket.flat.numel * (bucket.communicate if narrow else bucket.owned_gradient.dtype).itemsize
        weight = bucket.flat.numel * bucket.weights.element_size()
        runs = sum(backwards.get(s, 0) for s in bucket.stages)
        if bucket.gathered:
            total += 2 * runs * weight
        if not bucket.trained:
            continue
        if stage == 0:
            total += 2 * gradient
        else:
            total += (runs if bucket.each else 1) * gradient + (0 if bucket.gathered else weight)
    return total * (replicas - 1) / replicas


def backward_passes(program: Program, rank: int) -> dict[int, int]:
    """How many each stage of a rank has in a step."""
    backwards: dict[int, int] = {}
    for op in program.ops[rank]:
        if op.kind in "BW":
            backwards[op.stage] = backwards.get(op.stage, 0) + 1
    return backwards


def data_axis(replicas: Replicas, size: int, stage: int, program: Program, rank: int) -> tuple[float, float]:
    """What the papers' formulas say that one step sends on the data axis: with what is configured, and without.

    Args:
        replicas: of this rank.
        size, stage, program, rank: of ``data_axis_formula``.
    """
    whole = data_axis_formula(replicas.buckets, size, stage, program, rank, narrow=False)
    if isinstance(replicas.exchanges, Compressor):
        trained = [bucket for bucket in replicas.buckets if bucket.trained] if stage else []
        weights = sum(bucket.flat.numel * bucket.weights.element_size() for bucket in trained)
        return replicas.exchanges.formula() + weights * (size - 1) / size, whole
    return data_axis_formula(replicas.buckets, size, stage, program, rank), whole


def measured(grid: Grid, executor: Executor) -> Timeline:
    """When the ops of the step that just ended ran, on every pipe rank of this replica, and its collectives with them.

    Collective over the pipe axis.
    """
    clock = executor.clock
    assert clock is not None
    clock.settle()
    origin = clock.at(executor.origin)
    spans = [Span(op, clock.at(began) - origin, clock.at(end) - origin) for op, _, began, end in executor.marks]
    mine = [
        Flight(f.collective, *(clock.at(at) - origin for at in (f.start, f.waited, f.end)))
        for f in grid.traffic.flights or []
        if f.axis.split()[0] == "data"  # "data within" too
    ]
    both = grid.pipe.all_gather_object((tuple(s for s in spans if s.op.kind in COMPUTE), tuple(mine)))
    return Timeline(tuple(spans for spans, _ in both), tuple(flights for _, flights in both))


class Accounts:
    """Counts what one rank holds, for ``engine.memory_report``.

    Attributes:
        meter: what counts a step's activations while it runs, if that is wanted.
    """

    meter: Meter | None = None

    def __init__(self, replicas: Replicas, module: PipelineModule) -> None:
        self._replicas, self._module = replicas, module
        self._activations: int | None = None
        self._working: int | None = None

    @contextmanager
    def step(self) -> Iterator[None]:
        """Within it a step runs, whose activations are counted."""
        before = sum(held_bytes(self._replicas, self._module).values())
        weights = [bucket.weights.untyped_storage() for bucket in self._replicas.buckets]
        # The last step's gradients, which may go when this one begins.
        made = {bucket.gradients.untyped_storage() for bucket in self._replicas.buckets if bucket.gradients is not None}
        old = [(weakref.ref(storage), storage.nbytes()) for storage in made]
        del made
        meter = Meter(lambda: sum(w.nbytes() for w in weights) + sum(n for there, n in old if there() is not None))
        self.meter = meter
        try:
            with meter.counting():
                yield
        finally:
            self.meter = None
        # An optimizer makes its state in its first step: that is no working memory.
        after = sum(held_bytes(self._replicas, self._module).values())
        self._activations = meter.activations
        self._working = max(0, before + meter.peak - after - meter.activations)

    def report(self) -> dict[str, Any]:
        """See ``Engine.memory_report``."""
        held: dict[str, int | None] = {**held_bytes(self._replicas, self._module)}
        held |= {"activations": self._activations, "working": self._working}
        elsewhere = self._replicas.offloaded()
        return {
            "held": held,
            "offloaded": elsewhere,
            "formula": self._formula(),
            "peak": self._module.grid.peak_memory(),
        }

    def _formula(self) -> dict[str, float]:
        """The papers' bytes for this rank's parameters, trained and not."""
        mode, replicas = self._replicas.mode, self._module.grid.data.size
        total = dict.fromkeys(ModelStates._fields, 0.0)
        trained = {m.parameter for bucket in self._replicas.buckets if bucket.trained for m in bucket.members}
        optimizer = self._replicas.optimizer
        for parameter in self._module.parameters():
            states = model_states(
                parameter.numel(),
                replicas,
                mode.stage,
                _NAMES.get(parameter.dtype, "fp32"),
                states_kept(optimizer) if optimizer is not None else 0,
            )
            for name, value in states._asdict().items():
                if name == "parameters" or parameter in trained:
                    total[name] += value
        if mode.plus is not None and self._replicas.gatherer is not None and self._replicas.gatherer.secondary:
            shards = (mode.plus.kept(p.numel(), p.dtype, p in trained) for p in self._module.parameters())
            total["secondary"] = sum(shards)
        return total


def held_bytes(replicas: Replicas, module: torch.nn.Module) -> dict[str, int]:
    """Bytes that this rank holds between two steps, by what they are for.

    Weights that are a view of something else count once: in stage 3 shards, else whole; a master that is the shard
    itself is not counted again. What is offloaded is not here: ``Replicas.offloaded`` counts that.
    """

    def here(tensor: torch.Tensor) -> int:
        return tensor.untyped_storage().nbytes() if replicas.place(tensor) == "none" else 0

    held = {"parameters": 0, "gradients": 0, "masters": 0, "optimizer": 0, "buffers": 0}
    managed: set[Any] = set()
    for bucket in replicas.buckets:
        managed.update(member.parameter for member in bucket.members)
        whole = bucket.weights.untyped_storage().nbytes()
        apart = bucket.shard.untyped_storage().data_ptr() != bucket.weights.untyped_storage().data_ptr()
        held["parameters"] += whole + (here(bucket.shard) if apart else 0)
        gradient = bucket.gradients if bucket.gradients is not None else bucket.owned_gradient
        held["gradients"] += here(gradient)
        if bucket.master is not None and bucket.master.data_ptr() != bucket.shard.data_ptr():
            held["masters"] += here(bucket.master)
    held["parameters"] += sum(_size(p) for p in module.parameters() if p not in managed)
    held["buffers"] = sum(_size(buffer) for buffer in module.buffers())
    if replicas.gatherer is not None and replicas.gatherer.secondary:
        held["secondary"] = replicas.gatherer.secondary
    if replicas.exchanges is not None:
        held["compression"] = sum(_size(t) for flats in replicas.exchanges.state().values() for t in flats)
    if replicas.optimizer is not None:
        states = [t for state in replicas.optimizer.state.values() for t in state.values() if torch.is_tensor(t)]
        held["optimizer"] = sum(_size(t) for t in states if t.dim() and replicas.place(t) == "none")
    return held


def states_kept(optimizer: torch.optim.Optimizer) -> int:
    """How many tensors as large as its parameters an optimizer of torch keeps with its options."""
    name, options = type(optimizer).__name__.lower(), optimizer.defaults
    return STATES.get(name, 0) + sum(bool(options.get(key)) for key in ("momentum", "centered", "amsgrad"))


def _size(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
