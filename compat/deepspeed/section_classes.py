"""Sections of the configuration under the names of DeepSpeed's classes: ``DeepSpeedZeroConfig(stage=2)``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from .config.read import Section, checked_section
from .config.table import Table, table


class SectionClass(Section):
    """Section that is made from its keys.

    Attributes:
        PATH: path of the section.
        TABLE: function that returns the table of the file in which it is a section.
    """

    PATH: ClassVar[str] = ""
    TABLE: ClassVar[Callable[[], Table]] = table

    def __init__(self, **values: Any) -> None:
        made = checked_section(type(self).TABLE().at(self.PATH), values)
        super().__init__(made.table, made.values, made.given)


class DeepSpeedMonitorConfig(SectionClass):
    """The whole configuration, whose monitors ``MonitorMaster`` reads."""


class TensorBoardConfig(SectionClass):
    """``tensorboard``."""

    PATH = "tensorboard"


class CSVConfig(SectionClass):
    """``csv_monitor``."""

    PATH = "csv_monitor"


class WandbConfig(SectionClass):
    """``wandb``."""

    PATH = "wandb"


class DeepSpeedZeroConfig(SectionClass):
    """``zero_optimization``."""

    PATH = "zero_optimization"


class DeepSpeedZeroOffloadOptimizerConfig(SectionClass):
    """``zero_optimization.offload_optimizer``."""

    PATH = "zero_optimization.offload_optimizer"


class DeepSpeedZeroOffloadParamConfig(SectionClass):
    """``zero_optimization.offload_param``."""

    PATH = "zero_optimization.offload_param"
