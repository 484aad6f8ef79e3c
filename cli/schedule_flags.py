"""Flags of ``triax schedule``, and the schedule that they make."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from ..base.errors import escaped, no_such
from ..base.option_error import OptionError, refusal
from ..base.tables import terminal
from ..options.base import Options, option
from ..pipe.program.costs import Costs
from ..pipe.program.offload import offload_pass
from ..pipe.program.pairs import pair_pass
from ..pipe.program.recompute_pass import recompute_pass
from ..pipe.program.schedule import Schedule
from ..pipe.program.slices import slice_lengths
from ..pipe.program.verify import verify
from ..pipe.schedules.choose import FILES, NAMES, make_schedule, read_schedule, schedule_names
from ..pipe.schedules.registry import RECIPES
from ..pipe.schedules.search import Found, tune

LARGEST = 2**20  # passes of a microbatch through a stage


@dataclass(frozen=True, kw_only=True)
class SizeFlags(Options):
    """Sizes of a schedule."""

    pipe: int = option(4, "Size of the pipe axis.", least=1)
    microbatches: int | None = option(
        None,
        "Microbatches per step. Default: twice --pipe, or the least number of a schedule that needs more.",
        least=1,
    )
    chunks: int | None = option(None, "Stages per rank. Default: as the schedule needs.", least=1)


@dataclass(frozen=True, kw_only=True)
class ScheduleFlags(SizeFlags):
    """Sizes of schedules, and what their passes cost."""

    costs: tuple[float, ...] = option(
        (1.0, 1.0, 1.0),
        "F,I,W[,COMM[,GATHER[,O[,R]]]]: time of a rank's forward, input-gradient and weight-gradient passes of one "
        "microbatch, of a message, of gathering the rank's weights in ZeRO stage 3, and of copying the activations of "
        "one microbatch to the host and back.",
        least=0,
    )
    collectives: tuple[float, ...] = option(
        (0.0,),
        "AR[,A2A]: time of the tensor axis's all-reduces, and of the expert axis's all-to-alls, in a rank's forward or "
        "input-gradient pass of one microbatch.",
        least=0,
    )
    work: tuple[float, ...] = option(
        (),
        "X,X,...: work of each microbatch over the mean, such as 1.5,0.5 for documents of unequal lengths.",
        least=0,
    )
    memory: float | None = option(
        None, "Limit of activations per rank, in units of one microbatch through 1/pipe of the model.", above=0
    )
    pairs: bool = option(False, "Join passes into pairs if that hides collectives and shortens the step.")
    keep_gathered: bool = option(False, "ZeRO stage 3: gather weights once per step, not for each pass.")

    def check(self) -> None:
        """Check the number of the costs."""
        if not 3 <= len(self.costs) <= 7:
            wanted = "give F,I,W[,COMM[,GATHER[,O[,R]]]]. An example is 1,1,1,0.05"
            raise OptionError("costs", self.costs, wanted)
        if len(self.collectives) > 2:
            raise OptionError("collectives", self.collectives, "give AR[,A2A]. An example is 0.25")

    @property
    def times(self) -> Costs:
        """The costs of the passes."""
        all_reduce, exchange = (*self.collectives, 0.0)[:2]
        return replace(Costs(*self.costs), AR=all_reduce, A2A=exchange, work=self.work)

    @property
    def mean_times(self) -> Costs:
        """The costs of a mean microbatch, for which schedules are made."""
        return replace(self.times, work=())

    @property
    def lengths(self) -> tuple[float, ...]:
        """Relative lengths of the slices of a sequence."""
        return slice_lengths(1)

    def count(self, name: str = "") -> int:
        """Return the number of microbatches of a schedule.

        Raises:
            OptionError: the schedule would be too large to be simulated.
        """
        count = self.microbatches or max(2 * self.pipe, RECIPES[name].least(self.pipe) if name in RECIPES else 1)
        passes = self.pipe * count * (self.chunks or 1) * len(self.lengths)
        if passes > LARGEST:
            at_most = f"gives {passes:,} passes of a microbatch through a stage, but at most {LARGEST:,} are simulated"
            raise refusal(f"<pipe> {self.pipe} <microbatches> {count} {at_most}: give smaller sizes")
        return count

    def load(self, file: Path) -> Schedule:
        """Return the schedule of a file, which says its sizes.

        Raises:
            ValueError: the file is no schedule, or one of other sizes than those that were typed.
        """
        own = read_schedule(file)
        for name, field in (("pipe", "pipe"), ("microbatches",) * 2, ("chunks",) * 2, ("slices", "lengths")):
            if name in self.given and getattr(self, field) != (written := getattr(own, name)):
                raise OptionError(name, getattr(self, name), f"{file} has {name}={written}. Leave it out")
        verify(own)
        return own


@dataclass(frozen=True, kw_only=True)
class ChangeFlags(ScheduleFlags):
    """Sizes of one schedule, and changes of it."""

    slices: int | tuple[float, ...] = option(
        1, "Slices of each sequence: their number, or their relative lengths, such as 4 or 3,2,2,1.", above=0
    )
    attention: float = option(
        0.0,
        "With --slices: share of causal attention in F and I. Later slices have more of it.",
        least=0,
        most=1,
    )
    offload: float = option(
        0.0, "Share of the activations to offload to the host, if their copies fit.", least=0, most=1
    )
    recompute: float = option(0.0, "Share of the activations to recompute by ops of the schedule.", least=0, most=1)

    @property
    def times(self) -> Costs:
        """The costs of the passes."""
        return replace(super().times, attention=self.attention)

    @property
    def lengths(self) -> tuple[float, ...]:
        """Relative lengths of the slices of a sequence."""
        return slice_lengths(self.slices)

    def made(self, name: str) -> Schedule:
        """Return the schedule of a name or a file, with the changes.

        Raises:
            ValueError: it does not exist in this size, the file has another one, or it would hang or hold too much.
        """
        chosen = self.load(Path(name)) if name.endswith(FILES) else self._named(name)
        if self.attention and len(chosen.slices) == 1:
            raise OptionError(
                "attention", self.attention, "it is for slices of sequences: give <slices> too, such as 4"
            )
        unused, costs, searched = list[str](), self.mean_times, isinstance(chosen, Found)
        if self.pairs:
            chosen = pair_pass(chosen, costs)
            if not chosen.pairs:
                unused.append("--pairs joins no passes: no pair hides enough of --collectives to shorten the step")
        if self.offload and not (searched and self.memory is not None):
            chosen = offload_pass(chosen, self.offload, costs=costs)
            if not chosen.offloads:
                unused.append("--offload copies nothing: no copy fits into the step and lowers a peak")
        if self.recompute and not searched:
            chosen = recompute_pass(chosen, self.recompute, costs=costs)
            if not chosen.recomputes:
                unused.append("--recompute recomputes nothing: no peak would become smaller")
        for note in unused:
            terminal(stderr=True).print(escaped(f"triax schedule: {note}"), style="yellow")
        verify(chosen, self.memory)
        return chosen

    def _named(self, name: str) -> Schedule:
        if name not in (*NAMES, *(names := schedule_names())):
            raise ValueError(no_such("triax schedule", name, (*names, "compare", "explain", "cuts")))
        searched = name == "auto"  # it chooses what is recomputed, and within a limit what is offloaded
        shares = self.offload * (searched and self.memory is not None), self.recompute * searched
        sizes = self.pipe, self.count(name), self.chunks
        costs = self.mean_times
        return tuned(make_schedule(name, *sizes, costs, self.memory, *shares, slices=self.lengths), costs)


def tuned(chosen: Schedule, costs: Costs) -> Schedule:
    """Adapt a zero-bubble schedule to unequal costs of F, I and W, as in the zero-bubble paper."""
    recipe = RECIPES.get(chosen.name)
    tunable = recipe is not None and recipe.tunable
    return tune(chosen, costs) if tunable and costs != Costs() and len(chosen.slices) == 1 else chosen
