"""DeepSpeed's monitors outside of an engine: ``MonitorMaster``, and one class for each of its monitors."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from ...engine.monitor.monitor import Monitor
from ...engine.monitor.writers import csv_writer, make_writers, tensorboard_writer, wandb_writer
from .config.read import Section
from .config.to_options import folder, options_of


class MonitorMaster(Monitor):
    """Monitors that the configuration enables: ``write_events([(name, value, samples)])`` writes on rank 0.

    Args:
        monitor_config: ``DeepSpeedConfig(...).monitor_config``.
    """

    def __init__(self, monitor_config: Section) -> None:
        super().__init__(make_writers(options_of(monitor_config).monitor) if _first() else ())


class _One(Monitor):
    """A single monitor; the keys of its section are attributes.

    Args:
        config: the section.
    """

    def __init__(self, config: Any) -> None:
        self._section = config
        super().__init__([self._writer()] if config.enabled and _first() else ())

    def _writer(self) -> Any:
        raise NotImplementedError

    @property
    def enabled(self) -> bool:
        """True if the section enables the monitor; rank 0 writes."""
        return bool(self._section.enabled)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_section"], name)


class TensorBoardMonitor(_One):
    """Monitor of the section ``tensorboard``."""

    def _writer(self) -> Any:
        return tensorboard_writer(folder(self._section))


class csvMonitor(_One):  # DeepSpeed's name
    """Monitor of the section ``csv_monitor``."""

    def _writer(self) -> Any:
        return csv_writer(folder(self._section))


class WandbMonitor(_One):
    """Monitor of the section ``wandb``."""

    def _writer(self) -> Any:
        return wandb_writer(self._section.project, self._section.group, self._section.team)


def _first() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0
