"""DeepSpeed's module ``deepspeed.comm``: ``log_summary``."""

from __future__ import annotations

from ...grid.errors import ConfigError
from ...monitor.trace.comms_logger import summary
from .context import CONTEXT
from .modules import rest_of


def log_summary(show_straggler: bool = False) -> str:
    """Print the table of logged communication of every engine on rank 0, and return the table of this rank.

    Args:
        show_straggler: add a column with the time spent waiting for the slowest rank. Collective.

    Raises:
        ConfigError: no engine logs its communication.
    """
    grids = list(
        dict.fromkeys(engine.grid for engine in CONTEXT.engines.values() if engine.config.comms_logger.enabled)
    )
    if not grids:
        raise ConfigError('nothing was logged: set "comms_logger": {"enabled": true} in the configuration')
    return "\n".join(summary(grid, show_straggler) for grid in grids)


__getattr__, __path__ = rest_of(__name__)
