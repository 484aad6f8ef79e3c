"""One run of a model on one rank: a training step with SGD on a grid, with the values that are compared."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..engine.engines import Engine
from ..engine.pipeline_engine import PipelineEngine
from ..grid import Grid, Layout
from ..options.batch import Batch
from ..pipe.module import PipelineModule
from ..randomness.random import SampleRandom
from .costs import Cost, measure
from .grids import Axes, name_of
from .recording import Record, Recorder
from .target import Microbatch, Target, batch_of, float64, rows_of

RATE = 0.1  # learning rate of SGD


class Run(NamedTuple):
    """Settings of a run.

    Attributes:
        axes: the grid.
        seed: added to the seeds of the default generators, which differ from rank to rank.
        reverse: take the microbatches in reversed order.
        still: without triax's dropout, whose masks depend on a sample's place in the batch.
        record: record layers and modules.
        ops: record the ops of this microbatch; -1: none.
        costs: measure the costs of layers.
    """

    axes: Axes = ()
    seed: int = 0
    reverse: bool = False
    still: bool = False
    record: bool = True
    ops: int = -1
    costs: bool = False


@dataclass
class Observed:
    """Values of one rank.

    Attributes:
        place: coordinate of the rank: axis -> rank on it.
        share: microbatches of this rank's replica.
        layers, microbatches, experts: sizes of the model and of the batch, and True if a parameter counts experts.
        numbers: loss, loss of an evaluation, gradient norm and metrics, by name.
        gradients, weights: unsharded, by whole-model name; on rank 0 only.
        local: name -> (layout, this rank's gradient).
        initial: name -> (layout, this rank's weight before the step).
        changed: buffers that the step changed.
        ties: name of a tied parameter -> number of stages that hold it.
        records, losses: as in ``Recorder``.
        traffic: axis -> (calls, bytes, bytes by the formula or None) that this rank sent in the step.
        batch: the global batch; on one process only.
        costs: costs of the layers, if asked for.
    """

    place: dict[str, int]
    share: int
    layers: int
    microbatches: int
    experts: bool
    numbers: dict[str, float] = field(default_factory=dict)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    weights: dict[str, Tensor] = field(default_factory=dict)
    local: dict[str, tuple[Layout, Tensor]] = field(default_factory=dict)
    initial: dict[str, tuple[Layout, Tensor]] = field(default_factory=dict)
    changed: list[str] = field(default_factory=list)
    ties: dict[str, int] = field(default_factory=dict)
    records: list[Record] = field(default_factory=list)
    losses: dict[int, list[Tensor]] = field(default_factory=dict)
    traffic: dict[str, tuple[int, float, float | None]] = field(default_factory=dict)
    costs: list[Cost] = field(default_factory=list)
    batch: list[Microbatch] = field(default_factory=list)


def observe(target: Target, run: Run, batch: list[Microbatch] | None = None) -> Observed:
    """Train one step on this rank of a grid, and return what was seen.

    Args:
        target: the model.
        run: settings.
        batch: the global batch; None, on one process: the user's, or a made one.

    Raises:
        TypeError: ``build`` returned no ``PipelineModule``.
        ValueError: the batch does not fit the model or the grid.
    """
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        return _observe(target, run, batch)
    finally:
        torch.set_default_dtype(before)


def _observe(target: Target, run: Run, batch: list[Microbatch] | None) -> Observed:
    sizes: dict[str, Any] = dict(run.axes)
    grid = Grid(**{"data": 1, **sizes}, device="cpu")
    build, made = target.open()
    module = _built(target, build, grid)
    costs: list[Cost] = []
    if batch is None:
        batch = _batch(target, module, made)
        costs = measure(module, batch[0]) if run.costs else []
        module = _built(target, build, grid)  # the trial may have left something in it
    if run.still:
        for part in module.modules():
            if isinstance(part, SampleRandom) and hasattr(part, "p"):
                part.p = 0.0
    share, rest = divmod(len(batch), grid.data.size)
    if rest:
        raise ValueError(
            f"{name_of(run.axes)} divides a batch of {len(batch)} microbatches among {grid.data.size} replicas: give a "
            f"multiple of {grid.data.size}"
        )
    mine = batch[grid.data.rank * share : (grid.data.rank + 1) * share]
    mine = mine[::-1] if run.reverse else mine
    rows = rows_of(batch[0][0])
    engine = Engine(
        module, optimizer=partial(torch.optim.SGD, lr=RATE), batch=Batch(size=rows * len(batch), microbatch=rows)
    )
    assert isinstance(engine, PipelineEngine)
    recorder = Recorder(module, grid.data.rank * share, target.path, run.ops) if run.record else None
    if recorder is not None:
        engine.executor.wrap("F", recorder.forward)
    initial = engine.shards()
    buffers = {name: value.clone() for name, value in module.named_buffers()}
    _seed(run.seed + 1000 * grid.rank)
    evaluation = engine.eval_batch(iter(mine)).item()
    if recorder is not None:
        recorder.active = True
    loss = engine.train_batch(iter(mine)).item()
    layouts = [layout for layout, _ in initial.values()]
    found = Observed(
        dict(grid.coordinate._asdict()),
        share,
        len(module.layer_specs),
        len(batch),
        any(layout.expert_dim is not None for layout in layouts),
    )
    found.numbers = {"loss": loss, "loss of an evaluation": evaluation, "gradient norm": float(engine.grad_norm or 0.0)}
    found.numbers |= {f"metric {name}": float(value) for name, value in engine.metrics.items()}
    traffic = engine.traffic_report()
    for axis, report in traffic["sent"].items():
        calls, size = (sum(each[key] for each in report.values()) for key in ("calls", "bytes"))
        found.traffic[axis] = int(calls), float(size), traffic["formula"].get(axis)
    found.local, found.initial = engine.shards("gradients"), initial
    gradients, weights = engine.gather("gradients"), engine.gather()
    if grid.rank == 0:
        found.gradients, found.weights = gradients, weights
    found.changed = [name for name, value in module.named_buffers() if not torch.equal(value, buffers.get(name, value))]
    stages = {tie.key: len(tie.stages) for tie in module.ties}
    found.ties = {layout.name: stages[layout.tie] for layout in layouts if layout.tie in stages}
    found.costs = costs
    found.batch = batch if grid.size == 1 else []
    if recorder is not None:
        found.records, found.losses = recorder.records, recorder.losses
    return found


def _built(target: Target, build: Callable[[Grid], Any], grid: Grid) -> PipelineModule:
    """Return the user's model in float64. Its weights may come from a default generator, and are then rank 0's."""
    _seed(1000 * grid.rank)
    module = build(grid)
    if not isinstance(module, PipelineModule):
        raise TypeError(f"{target.function}(grid) returned a {type(module).__name__}: return a triax.PipelineModule")
    if module.grid is not grid:
        raise ValueError(
            f"{target.function}(grid) made a PipelineModule without the grid that it was called with: write "
            "PipelineModule(..., grid=grid)"
        )
    float64(module)
    return module


def _batch(target: Target, module: PipelineModule, made: Any) -> list[Microbatch]:
    """Return the global batch on one process: the user's, or a made one that runs through the model."""

    def trial(microbatch: Microbatch) -> None:
        with torch.no_grad():
            module.loss(module(microbatch[0]), microbatch[1])

    module.eval()
    found = batch_of(target, module, made, trial)
    module.train()
    return found


def _seed(seed: int) -> None:
    """Seed the default generators: what depends on them differs between ranks, and between two runs."""
    torch.manual_seed(1 + seed)
    random.seed(1 + seed)
    np.random.seed(1 + seed)  # noqa: NPY002 (the global generator is the point)
