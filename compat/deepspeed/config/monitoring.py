"""Sections of the monitors, the timeline, the FLOPs profiler and the communication logger."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Strict, model_validator

from ....base.checks import check_folder_name
from ....base.errors import no_such
from ....options.monitoring import OPERATIONS
from .base import Section, SwitchSection, setting

# DeepSpeed's and torch's names of operations.
_ALSO = {
    "all_gather_into_tensor": "all_gather",
    "all_gather_base": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "reduce_scatter_base": "reduce_scatter",
    "all_gather_object": "all_gather_json",
    "all_to_all_single": "all_to_all",
    "isend": "send",
    "recv": "receive",
    "irecv": "receive",
}


class MonitorConfig(Section):
    """``tensorboard``, ``csv_monitor``, ``json_monitor``: files to which rank 0 writes the metrics of each step."""

    enabled: bool = setting(False, "Write the metrics of each step.")
    output_path: str = setting("", "Folder; empty: the current folder.")
    job_name: Annotated[str, AfterValidator(check_folder_name)] = setting(
        "triax", "Folder of the run inside output_path."
    )

    @property
    def folder(self) -> Path:
        """Folder that the files are written to."""
        return Path(self.output_path) / self.job_name


class WandbConfig(Section):
    """``wandb``: metrics of each step, logged to Weights & Biases by rank 0."""

    enabled: bool = setting(False, "Log the metrics of each step.")
    group: str | None = setting(None, "Group of the run.")
    team: str | None = setting(None, "Team of the project; null: your default.")
    project: str = setting("triax", "Project.")


class HistogramsConfig(SwitchSection):
    """``histograms``: of weights and gradients by parameter, to tensorboard, wandb and the page of json_monitor."""

    every: int | None = setting(None, "Count weights and gradients every N steps; null: never.", ge=1)
    bins: int = setting(64, "Number of equal bins over a tensor's range.", needs="every", ge=2, le=1024)


class TimelineConfig(Section):
    """``timeline``: a trace of one step of all ranks, in one file."""

    step: int | None = setting(None, "Step to trace, counted from 1 in this process; null: none.", ge=1)
    file: str | None = setting(
        None, "File; null: timeline.json, in json_monitor's folder if that is enabled.", needs="step"
    )


class FlopsProfilerConfig(SwitchSection):
    """``flops_profiler``: FLOPs, parameters and times of one step, for each module."""

    enabled: bool = setting(False, "Report FLOPs and times of one step, for each module.")
    recompute_fwd_factor: float = setting(
        0.0, "Recomputed forward passes per backward pass, for the FLOP rate: 1 with full recomputation.", ge=0.0
    )
    profile_step: int = setting(1, "Step to report, counted from 0.", ge=0)
    module_depth: int = setting(-1, "Depth to which the summary lists modules; -1: all.", ge=-1)
    top_modules: int = setting(1, "Number of module classes listed at each depth.", ge=1)
    detailed: bool = setting(True, "Print the tree of modules too.")
    output_file: str | None = setting(None, "File for the report; null: print it.")


class CommsLoggerConfig(SwitchSection):
    """``comms_logger``: counts and times of collectives and messages."""

    enabled: bool = setting(False, "Count and time every collective and message, for engine.log_summary().")
    verbose: bool = setting(False, "Log each operation when it ends, on rank 0.")
    prof_all: bool = setting(True, "Log all operations; false: only those of prof_ops.")
    prof_ops: tuple[Annotated[str, Strict()], ...] = setting(
        (), f"Operations to log if prof_all is false: {', '.join(OPERATIONS)}, or DeepSpeed's names of these."
    )
    debug: bool = setting(False, "Log the function that called each operation.")

    @model_validator(mode="after")
    def _known(self) -> CommsLoggerConfig:
        for name in self.prof_ops:
            if name not in OPERATIONS and name not in _ALSO:
                raise ValueError(no_such("prof_ops", name, OPERATIONS))
        return self

    @property
    def wanted(self) -> frozenset[str]:
        """Triax's names of the operations to log."""
        return frozenset(OPERATIONS if self.prof_all else (_ALSO.get(name, name) for name in self.prof_ops))
