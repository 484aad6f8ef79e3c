"""Sections of the configuration under the names of DeepSpeed's classes: ``DeepSpeedZeroConfig(stage=2)``."""

from __future__ import annotations

from typing import Any, ClassVar

from .config.read import Section, section


class _SectionClass(Section):
    """Section that is made from its keys."""

    PATH: ClassVar[str] = ""

    def __init__(self, **values: Any) -> None:
        made = section(self.PATH, **values)
        super().__init__(made.table, made.values, made.given)


class DeepSpeedMonitorConfig(_SectionClass):
    """The whole configuration, whose monitors ``MonitorMaster`` reads."""


class TensorBoardConfig(_SectionClass):
    """``tensorboard``."""

    PATH = "tensorboard"


class CSVConfig(_SectionClass):
    """``csv_monitor``."""

    PATH = "csv_monitor"


class WandbConfig(_SectionClass):
    """``wandb``."""

    PATH = "wandb"


class DeepSpeedZeroConfig(_SectionClass):
    """``zero_optimization``."""

    PATH = "zero_optimization"


class DeepSpeedZeroOffloadOptimizerConfig(_SectionClass):
    """``zero_optimization.offload_optimizer``."""

    PATH = "zero_optimization.offload_optimizer"


class DeepSpeedZeroOffloadParamConfig(_SectionClass):
    """``zero_optimization.offload_param``."""

    PATH = "zero_optimization.offload_param"
