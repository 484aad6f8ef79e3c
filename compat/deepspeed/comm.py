"""DeepSpeed's module ``deepspeed.comm``: torch.distributed's collectives under their names, and ``log_summary``."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.distributed import GroupMember as GroupMember
from torch.distributed import P2POp as P2POp
from torch.distributed import ProcessGroup as ProcessGroup
from torch.distributed import ReduceOp as ReduceOp
from torch.distributed import all_gather as all_gather
from torch.distributed import all_gather_into_tensor as all_gather_into_tensor
from torch.distributed import all_gather_object as all_gather_object
from torch.distributed import all_reduce as all_reduce
from torch.distributed import all_to_all as all_to_all
from torch.distributed import all_to_all_single as all_to_all_single
from torch.distributed import barrier as barrier
from torch.distributed import batch_isend_irecv as batch_isend_irecv
from torch.distributed import broadcast as broadcast
from torch.distributed import broadcast_object_list as broadcast_object_list
from torch.distributed import destroy_process_group as destroy_process_group
from torch.distributed import gather as gather
from torch.distributed import get_process_group_ranks as get_all_ranks_from_group
from torch.distributed import get_rank as get_rank
from torch.distributed import get_world_size as get_world_size
from torch.distributed import group as group
from torch.distributed import irecv as irecv
from torch.distributed import is_available as is_available
from torch.distributed import is_initialized as is_initialized
from torch.distributed import isend as isend
from torch.distributed import monitored_barrier as monitored_barrier
from torch.distributed import new_group as new_group
from torch.distributed import recv as recv
from torch.distributed import reduce as reduce
from torch.distributed import reduce_scatter as reduce_scatter
from torch.distributed import reduce_scatter_tensor as reduce_scatter_tensor
from torch.distributed import scatter as scatter
from torch.distributed import send as send
from torch.distributed.device_mesh import init_device_mesh

from ...grid.environment import local_rank as get_local_rank
from ...grid.errors import ConfigError
from ...monitor.trace.comms_logger import summary
from .accelerator import get_accelerator
from .arguments import init_distributed as init_distributed
from .context import CONTEXT
from .modules import rest_of

__all__ = ["get_all_ranks_from_group", "get_local_rank"]

allgather_fn = all_gather_into_tensor
reduce_scatter_fn = reduce_scatter_tensor
inference_all_reduce = all_reduce


def has_all_gather_into_tensor() -> bool:
    """Return True: torch has it."""
    return True


has_reduce_scatter_tensor = has_all_gather_into_tensor


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
    grids = list(
        dict.fromkeys(engine.grid for engine in CONTEXT.engines.values() if engine.config.comms_logger.enabled)
    )
    if not grids:
        raise ConfigError('nothing was logged: set "comms_logger": {"enabled": true} in the configuration')
    return "\n".join(summary(grid, show_straggler) for grid in grids)


__getattr__, __path__ = rest_of(__name__)
