"""Microbatch size and ZeRO stage of a run on its own grid: by formulas, confirmed by measured steps.

RunToTune   what is asked of a run: its sizes, and steps that are measured
Tuner       the search: for the stage before there is an engine, then for the size
sizes       microbatch sizes to choose from, in the order of preference
search      the first sizes that fit, of which each was measured
Estimate    bytes and seconds of each size and stage, of a model whose layers are known

>>> sizes(64, pipe=1), sizes(64, pipe=4)
([64, 32, 16, 8, 4, 2, 1], [4, 2, 1])
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple, Protocol

from ...base.errors import ConfigError
from ...base.formulas import model_states
from ...base.option_error import Note, refusal
from ...models.config import TransformerConfig
from ...options.engine import EngineOptions
from ...options.tuning import Tuning
from ...pipe.program.activations import counts_in_flight
from ...pipe.program.schedule import Schedule
from ...pipe.schedules.registry import RECIPES
from .cost import CostModel
from .layer_shapes import layers_of
from .machine import MACHINES
from .memory import ModelMemory
from .parallel_layout import ParallelLayout
from .state_memory import StateOptions
from .work import Work

FILL = 4  # microbatches for each pipe rank, with which a bubble is small (GPipe: Huang et al. 2019, section 2.3)


class Measured(NamedTuple):
    """Bytes of one rank in a measured step: held between steps, kept for the backward pass, and temporaries."""

    held: float
    activations: float
    working: float

    @property
    def total(self) -> float:
        """Bytes of the rank at the step's peak."""
        return self.held + self.activations + self.working


class RunToTune(Protocol):
    """Protocol: a run that a tuner asks. All ranks call ``agree``, ``measure`` and ``time`` together.

    Attributes:
        rank, pipe_rank: this rank, and its place on the pipe axis.
        axes: axis of the grid -> its size.
        device: name of the device.
        memory: bytes that this rank may hold.
        layers, partition: the model's list of ``LayerSpec``, and how it is cut into stages.
        parameters, precision: number of parameters on this rank, and short name of their dtype.
        states: number of state tensors of the optimizer.
        sequence: tokens of a sample; None: as many as the model takes.
        samples, size: samples of a step on one replica, and of a microbatch if no size is to be found.
        stages: ZeRO stages that the other options allow.
    """

    rank: int
    pipe_rank: int
    axes: dict[str, Any]
    device: str
    memory: float
    layers: Sequence[Any]
    partition: str | Sequence[int]
    parameters: int
    precision: str
    states: int
    sequence: int | None
    samples: int
    size: int
    stages: list[int]

    def agree(self, numbers: Sequence[float]) -> list[float]:
        """Return the largest of each number on all ranks. Collective."""
        ...

    def schedule(self, microbatches: int) -> Schedule:
        """Return the schedule of a step."""
        ...

    def measure(self, size: int, expected: float) -> Measured | None:
        """Return the bytes of this rank in a step; None if there is too little memory on any rank. Collective.

        Args:
            size: microbatch size.
            expected: bytes that this rank is expected to need; 0: unknown.
        """
        ...

    def time(self, size: int, first: int, last: int) -> float:
        """Return the mean seconds of the steps ``first`` to ``last - 1`` with a microbatch size. Collective."""
        ...


class FittingSizes(NamedTuple):
    """Result of a search.

    Attributes:
        fitting: sizes that fit, in the order of preference; none if no size fits.
        measured: size -> bytes of the rank that needs most; infinity: out of memory.
    """

    fitting: list[int]
    measured: Mapping[int, float]


class FoundSize(NamedTuple):
    """Microbatch size that was found, a note on it for the log, and what was measured."""

    size: int
    note: Note
    results: dict[str, Any]


class Tuner:
    """Search for the microbatch size and the ZeRO stage of a run. Every rank makes one, before its engine.

    Args:
        options: the options, in which the microbatch size or the stage is to be found.
        run: the run.

    Attributes:
        options: the options to make the engine with: with a stage, and the first size to try.
    """

    def __init__(self, options: EngineOptions, run: RunToTune) -> None:
        section, zero = options.tuning or Tuning(sizes=1), options.zero
        self._run, self._tunes, self._samples, self._tuning = run, options.tunes_microbatch, run.samples, section
        self._limit = -run.agree([-run.memory])[0]  # the least of all ranks
        self._wanted = section.sizes
        self._order = [run.size]
        if self._tunes:
            self._order = self._runnable(sizes(run.samples, run.axes["pipe"], section.least, section.most))
        self._estimate = estimate = estimate_of(options, run)
        self._stage: Any = self._best_stage() if zero.stage == "auto" else zero.stage
        if estimate is not None and self._wanted > 1:
            self._order.sort(key=lambda size: estimate.seconds_of(size, self._stage))
        self.options = self._with(options.changed(zero=zero.changed(stage=self._stage)), self._order[0])

    def _runnable(self, order: list[int]) -> list[int]:
        """Return the sizes with whose number of microbatches the schedule runs, on the ranks of the first one."""
        made: dict[int, Sequence[int]] = {}
        for size in order:
            try:
                made[size] = self._run.schedule(self._samples // size).placement
            except ConfigError:
                if size == order[-1] and not made:
                    raise
        return [size for size, placement in made.items() if placement == next(iter(made.values()))]

    def _best_stage(self) -> int:
        """Return the ZeRO stage of the fastest step that fits; of an unknown model, the lowest whose states fit."""
        run, stages = self._run, self._run.stages
        if self._estimate is not None:
            found = self._estimate.best_stage(stages, self._order, self._limit)
        else:
            shards = run.axes["data"] * run.axes["context"]
            of = [model_states(run.parameters, shards, stage, run.precision, run.states).total for stage in stages]
            found = next(
                (stage for stage, need in zip(stages, run.agree(of), strict=True) if need <= self._limit), None
            )
        return stages[-1] if found is None else found

    def finish(self) -> FoundSize:
        """Measure sizes with the engine that was made. Collective.

        Raises:
            OptionError: no size fits.
        """
        run, section, stage = self._run, self._tuning, self._stage
        found, seconds, estimate = FittingSizes(self._order[:1], {}), dict[int, float](), self._estimate
        if self._tunes and run.device == "meta":  # a dry run, in which nothing can be measured
            fits = [size for size in self._order if estimate is None or estimate.bytes_of(size, stage) <= self._limit]
            found = FittingSizes(fits[:1] or self._order[-1:], {})
        elif self._tunes:
            found = search(
                *(self._order, self._wanted, self._limit, run.measure, run.agree),
                in_flight=lambda size: most_in_flight(run.schedule(self._samples // size), run.pipe_rank),
                estimate=None if estimate is None else lambda size: estimate.bytes_of(size, stage),
            )
        if not found.fitting:
            size, needed = min(found.measured.items())
            raise refusal(
                f"the smallest microbatch, of {size} samples, needs {needed / 1e9:.4g} GB on a rank, but only "
                f"{self._limit / 1e9:.4g} GB are available: set a higher <zero.stage> or <recompute>, use more ranks, "
                "or raise <tuning.memory>",
            )
        best = found.fitting[0]
        if found.measured and self._wanted > 1:
            steps = section.first_step, section.last_step
            seconds = {size: run.agree([run.time(size, *steps)])[0] for size in found.fitting}
            best = min(seconds, key=lambda size: seconds[size])
        results = {"limit": self._limit, "bytes": found.measured, "seconds": seconds}
        told = [f"{size}: {each / 1e9:.4g} GB" for size, each in sorted(found.measured.items())]
        told += [f"{size}: {each:.3g} s a step" for size, each in sorted(seconds.items())]
        text = (
            f"<batch.microbatch> {best} and <zero.stage> {stage} were chosen for {self._limit / 1e9:.4g} GB a rank"
            f"{' (' + ', '.join(told) + ')' if told else ''}"
        )
        return FoundSize(best, Note("", text), results)

    def _with(self, options: EngineOptions, size: int) -> EngineOptions:
        """Return the options with a microbatch size."""
        return options.changed(batch=options.batch.changed(microbatch=size, microbatches=self._samples // size))


def sizes(samples: int, pipe: int = 1, least: int = 1, most: int | None = None) -> list[int]:
    """Return the microbatch sizes to choose from, the preferred one first: the largest.

    On a pipeline only those sizes count that leave ``FILL`` microbatches for each pipe rank, or else the smallest.

    Args:
        samples: samples of a step on one replica.
        pipe: ranks of the pipe axis.
        least, most: limits of the size.

    Raises:
        OptionError: no size within the limits divides the samples.
    """
    found = [size for size in range(samples, 0, -1) if samples % size == 0 and least <= size <= (most or size)]
    if not found:
        raise refusal(
            f"no microbatch size from {least} to {most} divides the {samples} samples of a step on one replica: "
            "change <tuning.least> or <tuning.most>, or the batch",
        )
    filled = [size for size in found if pipe == 1 or samples // size >= FILL * pipe]
    return filled or found[-1:]


def search(
    order: Sequence[int],
    wanted: int,
    limit: float,
    measure: Callable[[int, float], Measured | None],
    agree: Callable[[Sequence[float]], list[float]],
    *,
    in_flight: Callable[[int], float],
    estimate: Callable[[int], float] | None = None,
) -> FittingSizes:
    """Find the first sizes of an order that fit, by measured steps. Collective.

    A size is measured only if it fits by what is known so far: the estimate, with the error that it had at the nearest
    measured size; or a line through the two nearest measured sizes. Without an estimate, the two smallest sizes are
    measured first.

    Args:
        order: sizes, in the order of preference.
        wanted: number of sizes to find.
        limit: bytes of a rank.
        measure, agree: as in ``RunToTune``.
        in_flight: size -> microbatches whose activations this rank keeps.
        estimate: size -> bytes, by formulas.
    """
    own: dict[int, Measured] = {}
    measured: dict[int, float] = {}
    formula = {} if estimate is None else {size: estimate(size) for size in order}

    def expected(size: int) -> float:
        """Return the bytes of a size that is not measured yet; 0: unknown."""
        if any(other < size and total > limit for other, total in measured.items()):
            return math.inf  # a larger size needs no less
        near = sorted(own, key=lambda other: (abs(math.log(other / size)), other))[:2]
        if len(near) == 2:
            a, b = near
            kept = [other * in_flight(other) for other in (size, a, b)]
            held = _line(size, a, b, own[a].held + own[a].working, own[b].held + own[b].working)
            return held + _line(kept[0], kept[1], kept[2], own[a].activations, own[b].activations)
        return formula.get(size, 0.0) + sum(own[other].total - formula[other] for other in near if formula)

    while True:
        untried = sorted(size for size in order if size not in measured)
        needs = dict(zip(untried, agree([expected(size) for size in untried]), strict=True))
        if not formula and len(measured) < 2:
            missing = [size for size in untried[:1] if needs[size] <= limit]
        else:
            fits = [size for size in order if measured.get(size, needs.get(size, 0.0)) <= limit][:wanted]
            missing = [size for size in fits if size not in measured]
            if not fits:  # the smallest size is measured before it is said that none fits
                missing = [size for size in untried[:1] if needs[size] < math.inf]
        if not missing:
            return FittingSizes([size for size in order if measured.get(size, math.inf) <= limit][:wanted], measured)
        size = missing[0]
        result = measure(size, needs[size])
        (measured[size],) = agree([math.inf if result is None else result.total])
        if result is not None:
            own[size] = result


def _line(x: float, a: float, b: float, at_a: float, at_b: float) -> float:
    """Return the value at x of the line through two points; of points at one place, the larger value."""
    return max(at_a, at_b) if a == b else at_a + (at_b - at_a) * (x - a) / (b - a)


def most_in_flight(schedule: Schedule, pipe_rank: int) -> float:
    """Return the largest number of microbatches, over all stages of a rank, whose activations it keeps."""
    return max(map(sum, counts_in_flight(schedule)[pipe_rank]))


@dataclass(frozen=True)
class Estimate:
    """Formulas for the sizes and stages of a run.

    Attributes:
        memory: the model's memory.
        cost: times of steps.
        layout: the run's grid, recomputation and offload.
        schedule: microbatches -> the run's schedule.
    """

    memory: ModelMemory
    work: Work
    layout: ParallelLayout
    schedule: Callable[[int], Schedule]

    @cached_property
    def _cost(self) -> CostModel:
        return CostModel(self.work)

    def bytes_of(self, size: int, stage: int) -> float:
        """Return the bytes of the pipe rank that needs most, without a margin."""
        layout = replace(self.layout, microbatch=size, zero=stage)
        made = self.schedule(layout.microbatches(self.work.batch))
        ranks = self.memory.ranks(layout, self.work.batch, self.work.sequence, made)
        return max(each.total - each.margin for each in ranks)

    def seconds_of(self, size: int, stage: int) -> float:
        """Return the seconds of a step by the cost model; with a schedule that has no name there, those of 1F1B."""
        layout = replace(self.layout, microbatch=size, zero=stage)
        made = self.schedule(layout.microbatches(self.work.batch))
        if made.name in RECIPES and RECIPES[made.name].accepts(made.chunks):
            layout = replace(layout, schedule=made.name, chunks=made.chunks)
        return self._cost.step(layout).seconds

    def best_stage(self, stages: Sequence[int], order: Sequence[int], limit: float) -> int | None:
        """Return the ZeRO stage of the fastest step that fits; None if no size fits in any stage."""
        fits = [(stage, size) for stage in stages for size in order if self.bytes_of(size, stage) <= limit]
        return min(fits, key=lambda pair: (self.seconds_of(pair[1], pair[0]), pair[0]))[0] if fits else None


def estimate_of(options: EngineOptions, run: RunToTune) -> Estimate | None:
    """Return the formulas for a run; None if its layers are not those of a model that ``layers_of`` knows."""
    model = model_of(run.layers)
    known = [name for name in MACHINES if name.partition("-")[0] in run.device.lower()]
    machine = MACHINES[known[0] if known else "a100-80g"]
    if model is None or options.batch.size is None or run.precision not in machine.peak:
        return None
    states = StateOptions.of(options, run.precision, run.states)
    memory = ModelMemory(model, options=states, partition=run.partition, device=run.device)
    shards_sequence = any(getattr(layer, "kwargs", {}).get("sequence_parallel") for layer in run.layers)
    layout = ParallelLayout.of(options, run.axes, sequence_parallel=shards_sequence)
    length = run.sequence or model.max_position_embeddings
    work = Work(model, machine, options.batch.size, length, run.precision)
    return Estimate(memory, work, layout, run.schedule)


def model_of(layers: Sequence[Any]) -> TransformerConfig | None:
    """Return the configuration of the model whose layers a list has; None if it is none of ``triax.models``."""
    found = [arg for layer in layers for arg in getattr(layer, "args", ()) if isinstance(arg, TransformerConfig)]
    return found[0] if found and len(layers_of(found[0])) == len(layers) else None
