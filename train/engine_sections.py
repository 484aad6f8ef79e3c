"""Sections of a training file that extend an engine's: what only a run has, and its defaults."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Self

from ..base.checks import path_text
from ..base.option_error import refusal
from ..options.base import Options, option
from ..options.batch import Batch
from ..options.checkpoints import Checkpoints, resume_text
from ..options.monitoring import Monitoring, Trace
from ..options.named import Optimizer
from ..options.schedule import ScheduleOptions
from ..pipe.partition import CUTS, SEARCHED
from .numbers import count


def _partition(value: Any) -> Any:
    """Return a way to cut the layers: a name, or boundaries as a tuple."""
    boundaries = isinstance(value, (list, tuple)) and all(type(each) is int for each in value)
    if not boundaries and (not isinstance(value, str) or (value not in CUTS and not value.startswith("type:"))):
        raise ValueError(f"give {', '.join(CUTS)}, type:REGEX, or boundaries such as [0, 9, 18]")
    return tuple(value) if boundaries else value


@dataclass(frozen=True, kw_only=True)
class RunBatch(Batch):
    """``batch``: samples of a step; a sample is a sequence, or a pair of answers."""

    tokens: int | None = option(None, "Tokens per step, instead of size; a multiple of sequence.", read=count)
    microbatch: int | None = option(
        None,
        "Samples that pass through the pipeline at once; more use more memory. null: 1, or as microbatches says.",
        least=1,
    )

    def check(self) -> None:
        """Check that one option says how large a step is."""
        if self.size is not None and self.tokens is not None:
            raise refusal("<size> and <tokens> both say how large a step is: give one of them")
        super().check()


@dataclass(frozen=True, kw_only=True)
class RunSchedule(ScheduleOptions):
    """``schedule``: a name, or a section with the name and its options."""

    partition: Any = option(
        "parameters",
        "Division of the layers into stages: parameters, uniform, type:REGEX, boundaries such as [0, 9, 18]; or by "
        "the layers' costs: time, memory, or auto, which chooses the schedule too.",
        read=_partition,
    )
    layer_costs: str | None = option(
        None,
        "For partition time, memory and auto: JSON file with the layers' costs; null: the run measures them first.",
        read=path_text,
    )

    @property
    def searched(self) -> bool:
        """True if the cut goes by the layers' costs."""
        return self.partition in SEARCHED

    def check(self) -> None:
        """Check that the keys of a cut by the layers' costs, and of a searched schedule, do not mix."""
        super().check()
        if self.partition == "auto" and self.name not in ("1f1b", "auto"):
            raise refusal(f"<partition> auto chooses the schedule, and <name> is {self.name}: write time, or no name")
        if self.searched and self.name == "auto":
            raise refusal(f"<name> auto does not go with <partition> {self.partition}: write only <partition> auto")
        if self.searched and self.changes("slices"):
            raise refusal(f"<partition> {self.partition} is for whole sequences: leave out <slices>, or give a cut")
        for key in ("layer_costs", "limit"):
            if getattr(self, key) is not None and not self.searched:
                raise refusal(f"<{key}> is for <partition> time, memory and auto: leave it out, or give one of them")


@dataclass(frozen=True, init=False)
class RunOptimizer(Optimizer):
    """``optimizer``: a name, or a section with type and arguments."""

    type: str = option("AdamW", "Name of the optimizer; its arguments are further keys of this section.")
    arguments: dict[str, Any] = field(default_factory=dict)
    decays: Literal["matrices", "all"] = option(
        "matrices", "Weights that decay. matrices: not norms, biases and embeddings; all: every parameter."
    )

    def __init__(self, type: str = "AdamW", /, decays: Any = "matrices", **arguments: Any) -> None:
        object.__setattr__(self, "decays", decays)
        super().__init__(type, **arguments)

    @classmethod
    def of(cls, value: Any) -> Self:
        """Return the section for a name, or for a mapping of ``type``, ``decays`` and the arguments."""
        return super().of({"type": "AdamW", **value} if isinstance(value, Mapping) else value)

    def plain(self, given: bool = False) -> dict[str, Any]:
        """Return the section as a file has it, with the arguments beside the name."""
        return {**Options.plain(self, given), **self.arguments}

    def at_rate(self, **rate: float) -> Optimizer:
        """Return the engine's optimizer; betas and weight_decay of AdamW are those of GPT-3 if they are not given."""
        usual = {"betas": [0.9, 0.95], "weight_decay": 0.1} if self.type == "AdamW" else {}
        return Optimizer(self.type, state=self.state, **rate, **usual | self.arguments)


@dataclass(frozen=True, kw_only=True)
class RunCheckpoints(Checkpoints):
    """``checkpoint``: what a run goes on from; a number: ``every``; false: none."""

    MAIN: ClassVar = "every"
    SWITCHED: ClassVar = True

    folder: str | None = option(
        None,
        "Folder of the checkpoints, or its URI as s3://bucket/run; null: checkpoints in the run's folder.",
        read=path_text,
    )
    every: int | None = option(
        500, "Save every N steps; also at the end and when the run is stopped. null: never.", least=1
    )
    keep: int | None = option(2, "Number of checkpoints to keep; null: all.", least=1)
    resume: bool | str = option(
        "auto",
        "auto: continue from the newest checkpoint, if there is one; required: there must be one; never: start from "
        "the beginning; or the tag or path of a checkpoint.",
        read=resume_text,
    )
    background: bool = option(True, "Write in the background.")
    requeue: bool = option(
        True, "After SIGUSR1, which Slurm sends before the time limit: save, exit, and requeue the job."
    )

    @classmethod
    def of(cls, value: Any) -> Self:
        """Return the section for a mapping, a number of steps, true for the defaults, or false for none."""
        return cls() if value is True else super().of(value)

    def check(self) -> None:
        """Check nothing: the run gives the checkpoints a folder."""

    def check_given(self) -> None:
        """Check that a run without checkpoints has no options of them."""
        for name in sorted(self.given - {"every"}) if self.every is None else ():
            raise refusal(
                f"<{name}> has no effect, because <every> is null, so that there are no checkpoints: leave it out"
            )


@dataclass(frozen=True, kw_only=True)
class RunMonitoring(Monitoring):
    """``monitor``: what is printed and recorded; metrics.jsonl, report.html and pictures are always written."""

    json: str | None = None  # the run's folder
    print_every: int | None = option(20, "Without a terminal: print a line every N steps.", least=1)
    print_losses: bool = option(False, "Print every loss in full.")
    breakdown: bool = option(False, "Time every step; print the ranks' times by part every 10 steps.")
    tensorboard: str | bool | None = option(None, "Event files for TensorBoard: a folder, or true: the run's.")
    csv: str | bool | None = option(None, "A CSV file for each metric: a folder, or true: the run's.")
    trace: Trace = option(Trace(step=20), "Step to trace in timeline.json; false: none.")

    def check(self) -> None:
        """Check nothing: the run gives the monitors a folder."""
