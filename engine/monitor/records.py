"""Records of a step and of a run: plain data that ``engine/`` fills in and this folder turns into files and pages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor


class Slice(NamedTuple):
    """An interval in which a rank did one thing, in seconds as ``time.perf_counter`` counts them."""

    name: str
    kind: str  # a key of step_record.PARTS, or axis:collective
    start: float
    end: float
    args: dict[str, Any]


class UnderWay(NamedTuple):
    """Collective that ran asynchronously while its rank did other work."""

    axis: str
    collective: str
    start: float
    end: float
    bytes: float


@dataclass(frozen=True)
class StepRecord:
    """The timeline of one step on one rank.

    Attributes:
        step: number of the step, from 1.
        slices: the whole step first; a slice comes before those within it.
        under_way: collectives that overlapped the rank's other work.
    """

    step: int
    slices: tuple[Slice, ...]
    under_way: tuple[UnderWay, ...]

    @property
    def seconds(self) -> float:
        """Duration of the step."""
        return self.slices[0].end - self.slices[0].start


class Histogram(NamedTuple):
    """Histogram of the elements of a tensor: counts of equal parts of the range from ``low`` to ``high``.

    Elements that are not finite are counted in ``not_finite`` alone.
    """

    low: float
    high: float
    counts: Sequence[int]
    elements: int
    sum: float
    squares: float
    not_finite: int

    def edges(self) -> list[float]:
        """Return the ends of the parts, one more than there are counts. Equal elements get a range around them."""
        low, high = (self.low, self.high) if self.low < self.high else (self.low - 0.5, self.high + 0.5)
        width = (high - low) / len(self.counts)
        return [*(low + number * width for number in range(len(self.counts))), high]


@dataclass(frozen=True)
class StepMetrics:
    """The numbers of one optimizer step, as monitors write them.

    Attributes:
        step: optimizer steps so far, this one included.
        samples: samples of all these steps, over all replicas.
        loss: 0-dim. It is read only when it is written: on a GPU, reading it waits for the step.
        lr: learning rate of each parameter group in this step.
        loss_scale: fp16's; None without fp16.
        grad_norm: norm of the gradient before clipping; None where it is not known.
        skipped_steps: steps skipped so far, because of an overflow or a loss that is not finite.
        timings: further numbers by name: step time, throughput, memory, bubble, MFU.
        auxiliary: auxiliary losses by name.
        metrics: terms and metrics of the loss by name, a number each, or numbers.
        loads: layer -> tokens that each of its experts was given in the step.
        histograms: name -> histogram of a parameter's weights or gradients, as the fields of ``Histogram``.
    """

    step: int
    samples: int
    loss: Tensor
    lr: Sequence[float]
    loss_scale: float | None
    grad_norm: float | None
    skipped_steps: int
    timings: Mapping[str, float]
    auxiliary: Mapping[str, float] = field(default_factory=dict)
    metrics: Mapping[str, float | list[float]] = field(default_factory=dict)
    loads: Mapping[str, Sequence[int]] = field(default_factory=dict)
    histograms: Mapping[str, Sequence[Any]] = field(default_factory=dict)


@dataclass(frozen=True)
class RunRecord:
    """The description of a run. The fields are keys of ``run.json``.

    Attributes:
        since_step: the first step on this grid, in this process.
        after_steps: optimizer steps taken when this was recorded.
        device: name of the device of rank 0.
        grid: axis -> number of ranks along it.
        model: class of the model.
        parameters: elements of the whole model.
        zero: ZeRO's stage.
        batch: the three batch sizes.
        schedule: the pipeline schedule as a dict; None for a plain module.
        flops_per_step: FLOPs of the model in one step; None where they were not counted.
        peak_tflops: TFLOP/s of one device; None where it is not known.
        config: the options with their defaults.
        ranks: for each rank its name, coordinate, parameters, memory report and traffic report.
    """

    since_step: int
    after_steps: int
    device: str
    grid: Mapping[str, int]
    model: str
    parameters: int
    zero: int
    batch: Mapping[str, Any]
    schedule: Mapping[str, Any] | None
    flops_per_step: float | None
    peak_tflops: float | None
    config: Mapping[str, Any]
    ranks: Sequence[Mapping[str, Any]]
