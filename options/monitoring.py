"""Records of a run: monitors, printed lines, profiles and traces."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from ..base.errors import no_such
from ..base.option_error import Note, refusal
from .base import Options, option

# The collectives and messages of ``grid/comm/axis.py``, which the communication log counts.
OPERATIONS = (
    *("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send", "receive"),
    *("all_gather_json", "barrier"),
)


@dataclass(frozen=True, kw_only=True)
class Wandb(Options):
    """Metrics of each step, logged to Weights & Biases by rank 0."""

    MAIN: ClassVar = "project"

    project: str = option("triax", "Project.")
    group: str | None = option(None, "Group of the run.")
    team: str | None = option(None, "Team of the project; None: your default.")


@dataclass(frozen=True, kw_only=True)
class Histograms(Options):
    """Histograms of weights and gradients by parameter, to TensorBoard, W&B and the page of ``triax report``."""

    MAIN: ClassVar = "every"
    SWITCHED: ClassVar = True

    every: int | None = option(None, "Count weights and gradients every N steps; None: never.", least=1)
    bins: int = option(64, "Number of equal bins over a tensor's range.", needs="every", least=2, most=1024)

    def due(self, step: int) -> bool:
        """Return True if a step has histograms."""
        return self.every is not None and step % self.every == 0


@dataclass(frozen=True, kw_only=True)
class Trace(Options):
    """Trace of one step of all ranks, in one file.

    >>> triax.Monitoring(json="runs/first", trace=triax.Trace(step=15)).trace.step
    15
    """

    MAIN: ClassVar = "step"
    SWITCHED: ClassVar = True

    step: int | None = option(None, "Step to trace, counted from 1 in this process; None: none.", least=1)
    file: str | None = option(None, "File; None: timeline.json, in json's folder if that is given.", needs="step")


@dataclass(frozen=True, kw_only=True)
class Profile(Options):
    """FLOPs, parameters and times of one step, for each module."""

    MAIN: ClassVar = "step"

    step: int = option(1, "Step to report, counted from 0.", least=0)
    recompute_factor: float = option(
        0.0, "Recomputed forward passes per backward pass, for the FLOP rate: 1 with full recomputation.", least=0.0
    )
    depth: int = option(-1, "Depth to which the summary lists modules; -1: all.", least=-1)
    top_modules: int = option(1, "Number of module classes listed at each depth.", least=1)
    detailed: bool = option(True, "Print the tree of modules too.")
    file: str | None = option(None, "File for the report; None: print it.")


@dataclass(frozen=True, kw_only=True)
class TorchProfiler(Options):
    """Traces of some steps by ``torch.profiler``, one of each rank: operators, kernels, passes, messages."""

    MAIN: ClassVar = "start"

    start: int = option(3, "First step to record, counted from 1 in this process, after one to warm up.", least=1)
    steps: int = option(1, "Number of steps to record.", least=1)
    folder: str | None = option(
        None, "Folder for rank-0.pt.trace.json and so on; None: profiler, in json's folder if that is given."
    )


@dataclass(frozen=True, kw_only=True)
class CommunicationLog(Options):
    """Counts and times of collectives and messages, for ``engine.log_summary()``."""

    operations: tuple[str, ...] | None = option(None, f"Operations to log: {', '.join(OPERATIONS)}; None: all of them.")
    verbose: bool = option(False, "Log each operation when it ends, on rank 0.")
    callers: bool = option(False, "Log the function that called each operation.")

    @property
    def wanted(self) -> frozenset[str]:
        """The operations to log."""
        return frozenset(OPERATIONS if self.operations is None else self.operations)

    def check(self) -> None:
        """Check the names of the operations."""
        for name in self.operations or ():
            if name not in OPERATIONS:
                raise refusal(no_such("<operations>", name, OPERATIONS))
        if self.operations is not None and not self.operations:
            raise refusal(f"<operations> names nothing to count: name some of {', '.join(OPERATIONS)}, or leave it out")


@dataclass(frozen=True, kw_only=True)
class Monitoring(Options):
    """Records of a run: files, printed lines, profiles and traces. Rank 0 writes the folders.

    >>> model = triax.PipelineModule([triax.LayerSpec(nn.Linear, 4, 1)], loss_fn=nn.functional.mse_loss)
    >>> monitor = triax.Monitoring(json="runs/first")
    >>> engine = triax.Engine(model, optimizer=triax.Optimizer("Adam"), batch=1, monitor=monitor)
    >>> loss = engine.train_batch(iter([(torch.ones(1, 4), torch.ones(1, 1))]))
    >>> sorted(os.listdir("runs/first"))
    ['metrics.jsonl', 'run.json']
    """

    print_every: int | None = option(
        None, "Print step, loss, learning rate and samples per second on rank 0, every N steps.", least=1
    )
    json: str | None = option(
        None, "Folder for metrics.jsonl, a line per step, and run.json: triax report makes a page of them."
    )
    tensorboard: str | bool | None = option(
        None, "Folder for TensorBoard's event files, if it is installed; True: json's folder."
    )
    csv: str | bool | None = option(None, "Folder for a CSV file of each metric; True: json's folder.")
    wandb: Wandb | None = option(None, "Weights & Biases, if it is installed.")
    writers: dict[str, dict[str, Any]] = option(
        dict, "Other writers by name, each with its arguments: mlflow, trackio, and entry points of other packages."
    )
    histograms: Histograms = option(Histograms(), "Histograms of weights and gradients, for the monitors.")
    breakdown: bool = option(
        False, "Time every step; print the ranks' times by part every print_every steps, or every 10."
    )
    trace: Trace = option(Trace(), "Trace of one step of all ranks, for Perfetto or Chrome.")
    profile: Profile | None = option(None, "FLOPs and times of one step, for each module.")
    profiler: TorchProfiler | None = option(None, "Traces of some steps by torch.profiler, one of each rank.")
    communication: CommunicationLog | None = option(None, "Counts and times of collectives and messages.")
    memory: bool = option(
        False, "Print the memory of every rank, by kind, around forward, backward and step. Slows every step."
    )
    state: bool = option(False, "Print the options and what every rank holds on rank 0, at the start.")
    peak_tflops: float | None = option(
        None,
        "Peak TFLOP/s of one device in the model's dtype, for the MFU that monitors write. None: the manufacturer's "
        "number, none on a CPU.",
        above=0.0,
    )
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"] | None = option(
        None, 'Level of the log, logging.getLogger("triax"); None: as Python\'s logging is set.'
    )

    def check(self) -> None:
        """Check that files that go into json's folder have one."""
        for name in ("tensorboard", "csv"):
            if getattr(self, name) is True and self.json is None:
                raise refusal(f"<{name}> is True, which is the folder of <json>: give <json> too, or a folder")

    def folder_of(self, name: str) -> str | None:
        """Return the folder of the files of json, tensorboard or csv; None: it writes none."""
        given: str | bool | None = getattr(self, name)
        return (self.json if given is True else given) or None

    @property
    def monitored(self) -> bool:
        """True if any monitor writes metrics of each step."""
        return any((self.json, self.tensorboard, self.csv, self.writers)) or self.wandb is not None

    def notes(self) -> list[Note]:
        """Return notes on options that have no effect."""
        notes = super().notes()
        if self.histograms.every is not None and not self.monitored:
            notes.append(Note("histograms", "does nothing without a monitor: enable <tensorboard>, <json> or <wandb>"))
        return notes
