"""Choice of the pipeline schedule."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

from ..base.option_error import OptionError
from .base import Options, option
from .zero import Offload

_MOST_SLICES = 10**6  # of a sequence


@dataclass(frozen=True, kw_only=True)
class OffloadActivations(Offload):
    """Activations that a pipeline schedule copies to the host while others are computed, and back."""

    fraction: float = option(1.0, "Share of each rank's activations to offload, if their copies fit.", least=0, most=1)
    stages: tuple[int, ...] | None = option(None, "Stages whose activations may be offloaded; by default all.")
    copy_time: float = option(
        1.0,
        "Time to copy the activations of a microbatch in 1/pipe of the model one way, in the unit of costs.",
        least=0,
    )


@dataclass(frozen=True, kw_only=True)
class ScheduleOptions(Options):
    """Pipeline schedule by name, or a ``triax.Schedule`` as ``value``; and what a search takes into account.

    >>> model = triax.PipelineModule([triax.LayerSpec(nn.Linear, 4, 1)], loss_fn=nn.functional.mse_loss)
    >>> schedule = triax.ScheduleOptions(name="zb-h1")
    >>> batch = triax.Batch(microbatch=1, microbatches=3)
    >>> engine = triax.Engine(model, optimizer=triax.Optimizer("Adam"), batch=batch, schedule=schedule)
    >>> print(engine.program.schedule)
    zb-h1: pipe 1, microbatches 3, chunks 1
    rank 0: 0F0 0I0 0W0 0F1 0I1 0W1 0F2 0I2 0W2

    Attributes:
        value: the schedule itself, for these ranks and microbatches; None: ``name`` says which.
    """

    MAIN: ClassVar = "name"

    name: str = option("1f1b", "Name of a schedule, auto (search for one), or path of a .csv, .json or .txt file.")
    chunks: int | None = option(None, "Stages per rank; None: as the model or the schedule has them.", least=1)
    costs: tuple[float, ...] = option(
        (1.0, 1.0, 1.0),
        "For auto, pairs, recompute and offload: measured times of a forward pass (F), the input gradients (I), the "
        "weight gradients (W) and (optional) a message, in any unit.",
        least=0,
    )
    memory: float | None = option(
        None,
        "For auto: limit of activations per rank, in units of one microbatch through 1/pipe of the model.",
        above=0,
    )
    limit: float | tuple[float, ...] | None = option(
        None,
        "For partition time, memory and auto: GB (1e9 bytes) that a pipe rank may take, for each, or one for all.",
        above=0,
    )

    pairs: float | None = option(
        None,
        "Join passes to pairs, in which the tensor axis's collectives of each run beside the other: the time of these "
        "collectives in a pass, in the unit of costs. None: only pairs that the schedule itself has.",
        least=0,
    )
    recompute: float = option(
        0.0,
        "Share of each rank's activations that ops of the schedule recompute; for auto, the largest share.",
        least=0,
        most=1,
    )
    slices: int | tuple[float, ...] = option(
        1,
        "Slices of each sequence, which pass the pipeline one after the other: their number, or relative lengths.",
        above=0,
    )
    offload: OffloadActivations = option(OffloadActivations(), "Where activations are offloaded to.")

    value: Any = field(default=None, repr=False)

    @classmethod
    def of(cls, value: Any) -> Self:
        """Return the section for a name, a mapping, or a schedule."""
        if hasattr(value, "orders") and hasattr(value, "placement"):
            return cls(name=value.name, value=value)
        return super().of(value)

    @property
    def chooses_offload(self) -> bool:
        """True if the search for a schedule chooses which activations are offloaded, within ``memory``."""
        return self.name == "auto" and self.memory is not None and self.offload.device != "none"

    @property
    def limits(self) -> float | tuple[float, ...] | None:
        """The option ``limit`` in bytes, as ``find_cut`` takes it."""
        if isinstance(self.limit, tuple):
            return tuple(1e9 * each for each in self.limit)
        return None if self.limit is None else 1e9 * self.limit

    def check(self) -> None:
        """Check the numbers of costs and of slices."""
        slices = self.slices if isinstance(self.slices, int) else len(self.slices)
        if not 0 < slices <= _MOST_SLICES:
            raise OptionError("slices", self.slices, f"give 1 to {_MOST_SLICES:,} slices, or their relative lengths")
        if not 3 <= len(self.costs) <= 4:
            times = "the times of F (forward), I (input gradients) and W (weight gradients)"
            raise OptionError("costs", self.costs, f"give {times}, and of a message if you know it")
