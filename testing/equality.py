"""Equality of a model's numbers on grids and on one process, in float64.

Each step is compared: the loss of an evaluation and of training, the metrics, the gradient norm and every gradient by
its name in the whole model, and after the last step every weight. The error names the first difference, with its
numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..base.torch_private import tree_leaves, tree_map
from ..engine.engines import Engine
from ..engine.pipeline_engine import PipelineEngine
from ..grid import Grid
from ..pipe.module import PipelineModule
from ..pipe.program.schedule import Schedule
from ..pipe.program.verify import verify
from ..pipe.spec import LayerSpec
from .grids import Composition, covering_grids
from .pool import RankFailure, run_ranks

Build = Callable[[Grid], PipelineModule]
Microbatch = tuple[Any, Any]
Data = Callable[[], Sequence[Sequence[Microbatch]]]


class Step(NamedTuple):
    """Numbers of one step.

    Attributes:
        evaluation, loss: loss of the batch before the step, in evaluation and in training.
        norm: norm of the gradients.
        metrics: named losses and metrics.
        gradients: by name in the whole model.
        weights: after the step; of the last step only.
        sent: axis -> bytes that this rank sent in the step; "world" are those by which the ranks agree on a step.
        formula: axis -> bytes that ZeRO's paper counts for the step, of the axes that it knows.
    """

    evaluation: float
    loss: float
    norm: float
    metrics: dict[str, Any]
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]
    sent: dict[str, float]
    formula: dict[str, float]


Steps = list[Step]


def assert_equals_one_process(
    build: Build,
    data: Data,
    grids: Iterable[Composition] | None = None,
    *,
    ranks: int = 4,
    axes: Sequence[str] = ("pipe", "data", "tensor"),
    schedules: Sequence[str] = ("1f1b", "interleaved", "zb-h1", "zb-v"),
    stages: Sequence[int] = (0, 1, 2, 3),
    rtol: float = 1e-10,
    timeout: float = 120,
    over_replicas: bool = False,
    **options: Any,
) -> None:
    """Check that a model has the same numbers on grids as on one process.

    Args:
        build: called with the grid on each rank; returns the model, in float64, with its ``loss_fn``. A function from
            the top level of a file.
        data: called on each rank; returns a batch for each step, a list of microbatches (inputs, labels). Replica r of
            d gets the r-th of d parts of the list. All microbatches have the same number of rows.
        grids: compositions to run; None: ``covering_grids(ranks, axes, schedules, stages)``.
        ranks, axes, schedules, stages: see ``covering_grids``.
        rtol: largest difference of a tensor, relative to its largest element.
        timeout: seconds that a run may take.
        over_replicas: True if the loss of a microbatch covers the rows of all replicas, as CLIP's does. To compare with
            d replicas, one process then trains microbatches that join the rows of those of the d replicas.
        options: options of ``triax.Engine`` for every run, such as ``clip`` or ``recompute``. The optimizer is SGD with
            a learning rate of 0.1 unless given.

    Raises:
        AssertionError: a number differs; the message names the grid, the tensor and the numbers.
        RankFailure: a rank raised, died or did not end in time.
        TypeError: the model has parameters of another dtype than float64.
    """
    layers, microbatches = run_ranks(1, sizes_of, build, data, timeout=timeout)[0]
    reference = reference_of(build, data, options, timeout, over_replicas)
    if grids is None:
        grids = covering_grids(ranks, axes, schedules, stages, layers, microbatches)
    if not (grids := list(grids)):
        raise ValueError("assert_equals_one_process was given no grid: give at least one Composition, or leave it out")
    for grid in grids:
        _compare_run(build, data, grid, None, options, reference(grid), rtol, timeout)


def assert_schedule(
    make: Callable[[int, int], Schedule],
    sizes: Sequence[tuple[int, int]] = ((2, 4), (4, 8)),
    build: Build | None = None,
    data: Data | None = None,
    *,
    stages: Sequence[int] = (0, 2),
    rtol: float = 1e-10,
    timeout: float = 120,
) -> None:
    """Check a schedule of your own: ``verify`` accepts it, it runs, and a model's numbers are those of one process.

    Args:
        make: called with the number of ranks and of microbatches; returns the schedule.
        sizes: (ranks, microbatches) of each schedule.
        build: makes the model, as for ``assert_equals_one_process``; None: a small stack of linear layers.
        data: makes the batches, with as many microbatches as the schedule; None: random ones. Give both or neither.
        stages: stages of ZeRO.
        rtol, timeout: as for ``assert_equals_one_process``.

    Raises:
        ScheduleError: the schedule is incomplete, out of order, or hangs.
        AssertionError, RankFailure: as for ``assert_equals_one_process``.
        ValueError: a schedule has other sizes, or ``build`` is given without ``data``.
    """
    if (build is None) != (data is None):
        raise ValueError("assert_schedule was given one of build and data: give both, or neither")
    if not sizes or not stages:
        raise ValueError(f"assert_schedule was given sizes={sizes} and stages={stages}: give at least one of each")
    for pipe, microbatches in sizes:
        schedule = make(pipe, microbatches)
        if (schedule.pipe, schedule.microbatches) != (pipe, microbatches):
            raise ValueError(
                f"make({pipe}, {microbatches}) returned a schedule of {schedule.pipe} ranks and "
                f"{schedule.microbatches} microbatches: return one of the sizes that it was called with"
            )
        verify(schedule)
        its_build = build or partial(_stack, 2 * schedule.stages)
        its_data = data or partial(_random_batches, microbatches)
        (wanted,) = run_ranks(1, steps_of, its_build, its_data, Composition(), None, {}, timeout=timeout)
        for stage in stages:
            at = Composition((("pipe", pipe),), schedule.name, stage)
            _compare_run(its_build, its_data, at, schedule.to_json(), {}, wanted, rtol, timeout)


def _compare_run(
    build: Build,
    data: Data,
    at: Composition,
    schedule: str | None,
    options: dict[str, Any],
    wanted: Steps,
    rtol: float,
    timeout: float,
) -> None:
    """Run one composition, and compare its steps on each rank with those of one process."""
    try:
        steps_of_ranks = run_ranks(at.ranks, steps_of, build, data, at, schedule, options, timeout=timeout)
    except RankFailure as failure:
        other = "" if schedule else ". To leave it out, give the other runs as grids="
        failure.add_note(f"{at}: the run failed{other}")
        raise
    for rank, steps in enumerate(steps_of_ranks):
        for number, (step, own) in enumerate(zip(steps, wanted, strict=True)):
            if text := difference(step, own, rtol):
                raise AssertionError(f"{at}, step {number}, rank {rank}: {text}")


def reference_of(
    build: Build, data: Data, options: Mapping[str, Any], timeout: float, over_replicas: bool
) -> Callable[[Composition], Steps]:
    """Return the function that gives one process's steps for a composition; each is run once.

    Args: as for ``assert_equals_one_process``.
    """

    @cache
    def steps(replicas: int) -> Steps:
        joined = partial(_joined, data, replicas) if replicas > 1 else data
        return run_ranks(1, steps_of, build, joined, Composition(), None, options, timeout=timeout)[0]

    return lambda at: steps(dict(at.axes).get("data", 1) if over_replicas else 1)


def _joined(data: Data, replicas: int) -> list[list[Microbatch]]:
    """Return batches whose microbatch m has the rows of the microbatches m of all replicas."""
    batches = []
    for batch in data():
        share = len(batch) // replicas
        batches.append([tree_map(_rows, *batch[m : share * replicas : share]) for m in range(share)])
    return batches


def _rows(*parts: Any) -> Any:
    return torch.cat(parts) if isinstance(parts[0], Tensor) else parts[0]


def sizes_of(build: Build, data: Data) -> tuple[int, int]:
    """Return the number of layers, and of microbatches of a batch."""
    batches = data()
    counts = {len(batch) for batch in batches}
    if len(counts) != 1 or not max(counts):
        raise ValueError(f"data() returned batches of {sorted(counts)} microbatches: return the same number in each")
    model = build(Grid())
    if not isinstance(model, PipelineModule):
        raise TypeError(f"build(grid) returned a {type(model).__name__}: return a triax.PipelineModule")
    return len(model.layer_specs), counts.pop()


def steps_of(
    build: Build,
    data: Data,
    at: Composition,
    schedule: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Steps:
    """Train on this rank of a grid, and return the numbers of each step.

    Args:
        build, data: as for ``assert_equals_one_process``.
        at: the grid, the schedule's name and the ZeRO stage.
        schedule: a schedule as JSON, in place of the name.
        options: options of the engine.
    """
    axes: dict[str, Any] = dict(at.axes)
    grid = Grid(**axes)
    module, batches = build(grid), data()
    for name, parameter in module.named_parameters():
        if parameter.is_floating_point() and parameter.dtype != torch.float64:
            raise TypeError(
                f"{name} is {parameter.dtype}, in which rounding hides small differences: make the model in float64, "
                "as PipelineModule(..., dtype=torch.float64) does"
            )
    share, rest = divmod(len(batches[0]), grid.data.size)
    if rest:
        raise ValueError(f"{at} divides batches of {len(batches[0])} microbatches among {grid.data.size} replicas")
    rows = rows_of(batches[0][0][0])
    engine = Engine(
        module,
        batch={"size": rows * len(batches[0]), "microbatch": rows},
        schedule=at.schedule if schedule is None else Schedule.from_json(schedule),
        zero={"stage": at.stage},
        **{"optimizer": partial(torch.optim.SGD, lr=0.1), **(options or {})},
    )
    assert isinstance(engine, PipelineEngine)
    steps = []
    for number, batch in enumerate(batches):
        own_microbatches = batch[grid.data.rank * share : (grid.data.rank + 1) * share]
        evaluation = engine.eval_batch(iter(own_microbatches)).item()
        loss = engine.train_batch(iter(own_microbatches)).item()
        gradients = engine.gather("gradients")
        weights = engine.gather() if number == len(batches) - 1 else {}
        report = engine.traffic_report()
        sent = {axis: sum(counts["bytes"] for counts in kinds.values()) for axis, kinds in report["sent"].items()}
        norm = float(engine.grad_norm or 0.0)
        steps.append(Step(evaluation, loss, norm, engine.metrics, gradients, weights, sent, report["formula"]))
    return steps


def rows_of(inputs: Any) -> int:
    """Return the number of rows of a microbatch: the first dim of its first tensor."""
    leaves = tree_leaves(inputs)
    tensor = next((leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim()), None)
    if tensor is None:
        raise ValueError(
            "the inputs of a microbatch have no tensor: return (inputs, labels) with a row for each sample"
        )
    return tensor.shape[0]


def difference(step: Step, own: Step, rtol: float) -> str:
    """Return the first difference of a step from one process's in words, or ""."""
    numbers = [("loss of an evaluation", step.evaluation, own.evaluation), ("loss", step.loss, own.loss)]
    if step.metrics.keys() != own.metrics.keys():
        return f"the metrics are {', '.join(step.metrics)}, and on one process {', '.join(own.metrics)}"
    numbers += [(f"metric {name!r}", step.metrics[name], value) for name, value in own.metrics.items()]
    tensors = []
    for kind in ("gradient", "weight"):
        tensors_here, wanted = getattr(step, f"{kind}s"), getattr(own, f"{kind}s")
        if tensors_here.keys() != wanted.keys():
            names = sorted(tensors_here.keys() ^ wanted.keys())
            return f"the {kind}s of {', '.join(names)} exist on one process or on the grid alone"
        tensors += [(f"{kind} of {name}", tensors_here[name], tensor) for name, tensor in wanted.items()]
    norm = [("gradient norm", step.norm, own.norm)]
    every = [*numbers, *tensors, *norm]
    different = [text for name, tensor, wanted in every if (text := _differs(name, tensor, wanted, rtol))]
    if not different:
        return ""
    others = f"; so do {len(different) - 1} other numbers" if len(different) > 1 else ""
    return f"the {different[0]}{others}"


def _differs(name: str, found: Any, wanted: Any, rtol: float) -> str:
    """Return how a number or tensor differs, or ""."""
    a, b = (torch.as_tensor(value) for value in (found, wanted))
    if a.shape != b.shape:
        return f"{name} has the shape {tuple(a.shape)}, and on one process {tuple(b.shape)}"
    if not a.numel():
        return ""
    error, largest = errors(a, b)
    if bool((error <= rtol * largest + 1e-14).all()):
        return ""
    index = tuple(int(i) for i in torch.unravel_index(error.argmax(), a.shape))
    where = f" at {index}" if index else ""
    return f"{name} differs{where}: {a[index].item():.12g}, and on one process {b[index].item():.12g}"


def errors(found: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """Return how far each element is off, and the largest finite element. inf equals inf; NaN is off by any number."""
    dtype = torch.complex128 if found.is_complex() or wanted.is_complex() else torch.float64
    a, b = found.to(dtype), wanted.to(dtype)
    error = torch.where(a == b, 0.0, (a - b).abs()).nan_to_num(torch.inf)
    return error, b.abs().masked_fill(~b.isfinite(), 0.0).max()


def _stack(layers: int, grid: Grid) -> PipelineModule:
    """Return a stack of linear layers."""
    specs: list[Any] = [LayerSpec(_Tanh, 6) for _ in range(layers)]
    return PipelineModule(
        specs, grid=grid, loss_fn=nn.functional.mse_loss, dtype=torch.float64, seed=3, partition="uniform"
    )


class _Tanh(nn.Module):
    """A linear layer and a tanh, with a residual connection."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Run the layer: (B, D) -> (B, D)."""
        y: Tensor = x + torch.tanh(self.linear(x))
        return y


def _random_batches(microbatches: int) -> list[list[Microbatch]]:
    """Return two batches of random numbers."""
    generator = torch.Generator().manual_seed(4)
    draw = partial(torch.randn, 2, 6, generator=generator, dtype=torch.float64)
    return [[(draw(), draw()) for _ in range(microbatches)] for _ in range(2)]
