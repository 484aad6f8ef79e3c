"""DeepSpeed's module ``deepspeed.comm``: ranks, ``log_summary``; by the ledger, torch.distributed's collectives."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import init_device_mesh

from ...base.errors import ConfigError
from ...engine.monitor.trace.comms_logger import summary
from ...grid.environment import local_rank as get_local_rank
from .accelerator import get_accelerator
from .arguments import init_distributed as init_distributed
from .context import CONTEXT
from .modules import rest_of

__all__ = ["get_local_rank", "init_distributed"]


def get_world_group() -> ProcessGroup:
    """Return the group of all processes."""
    world = dist.group.WORLD
    if world is None:
        raise RuntimeError("there is no process group yet: call init_distributed() first")
    return world


def get_global_rank(group: ProcessGroup | None, group_rank: int) -> int:
    """Return the global rank of a group's process; None: the group of all processes."""
    return dist.get_global_rank(get_world_group() if group is None else group, group_rank)


def initialize_mesh_device(mesh_shape: tuple[int, ...], mesh_dim_names: tuple[str, ...]) -> Any:
    """Return torch's mesh of all processes with these dims."""
    return init_device_mesh(get_accelerator().device_name(), tuple(mesh_shape), mesh_dim_names=tuple(mesh_dim_names))


def log_summary(show_straggler: bool = False, return_dict: bool = False) -> str:
    """Print the table of logged communication of every engine on rank 0, and return the table of this rank.

    Args:
        show_straggler: add a column with the time spent waiting for the slowest rank. Collective.
        return_dict: False: the table is a text.

    Raises:
        ConfigError: no engine logs its communication, or ``return_dict`` is True.
    """
    if return_dict:
        raise ConfigError("log_summary(return_dict=True) is not possible, because the table is a text: leave it out")
    engines = [engine for engine in CONTEXT.engines.values() if engine.options.monitor.communication is not None]
    grids = {id(engine.grid.traffic): engine.grid for engine in engines}.values()
    if not grids:
        raise ConfigError('nothing was logged: set "comms_logger": {"enabled": true} in the configuration')
    return "\n".join(summary(grid, show_straggler) for grid in grids)


__getattr__, __path__ = rest_of(__name__)
