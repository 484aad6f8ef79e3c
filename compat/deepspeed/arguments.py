"""DeepSpeed's ``add_config_arguments`` and ``init_distributed``."""

from __future__ import annotations

import argparse
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ...grid import Grid
from ...grid.environment import local_rank, read_environment


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add ``--deepspeed_config FILE`` and ``--deepspeed`` to a parser; ``initialize(args=...)`` reads the first.

    Args:
        parser: the script's parser.

    Returns:
        The same parser. If the script itself adds ``--local_rank``, before or after, and its launcher sets the rank
        without passing the option, as ``triax run`` and torchrun do, then ``args.local_rank`` is that rank.
    """
    group = parser.add_argument_group("triax", "configuration, with DeepSpeed's option names")
    group.add_argument("--deepspeed", action="store_true", help="accepted without effect: the script calls initialize")
    group.add_argument("--deepspeed_config", type=str, default=None, help="configuration: path of a JSON file")
    parse = parser.parse_known_args

    def with_local_rank(args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        arguments, rest = parse(args, namespace)
        default = parser.get_default("local_rank")
        if default is not None and arguments.local_rank == default and read_environment() is not None:
            arguments.local_rank = local_rank()
        return arguments, rest

    parser.parse_known_args = with_local_rank  # type: ignore[method-assign]
    return parser


def init_distributed(
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,
    distributed_port: int = 29500,
    verbose: bool = True,
    timeout: timedelta | None = None,
    init_method: str | None = None,
    dist_init_required: bool | None = None,
    config: Any = None,
    rank: int = -1,
    world_size: int = -1,
) -> None:
    """Join torch's process group as the launcher says; without a launcher, make a group of this process alone.

    ``initialize`` joins the group itself. A script calls this function to use ``torch.distributed`` before that.

    Args:
        dist_backend: a backend that the machine has; by default NCCL on GPUs, else gloo.
        timeout: limit of a collective, by default the grid's.
        init_method: address of the rendezvous, such as ``tcp://host:port``; by default the launcher's variables.
        dist_init_required: False: make no group.
        auto_mpi_discovery, distributed_port, verbose, config: without effect.
        rank, world_size: number of this process, and number of processes; by default the launcher's.

    Raises:
        ValueError: NCCL without a GPU.
    """
    if dist.is_initialized() or dist_init_required is False:
        return
    if dist_backend == "nccl" and not (torch.accelerator.is_available() and dist.is_nccl_available()):
        raise ValueError("dist_backend='nccl' needs a GPU, and this machine has none: leave dist_backend out")
    if init_method is not None or rank >= 0:
        dist.init_process_group(dist_backend, init_method or "env://", timeout, world_size, rank)
        return
    Grid() if timeout is None else Grid(timeout=timeout.total_seconds())
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
