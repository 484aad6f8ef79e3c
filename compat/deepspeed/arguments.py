"""DeepSpeed's ``add_config_arguments`` and ``init_distributed``."""

from __future__ import annotations

import argparse
from typing import Any

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
        found, rest = parse(args, namespace)
        default = parser.get_default("local_rank")
        if default is not None and found.local_rank == default and read_environment() is not None:
            found.local_rank = local_rank()
        return found, rest

    parser.parse_known_args = with_local_rank  # type: ignore[method-assign]
    return parser


def init_distributed(dist_backend: str | None = None, **options: Any) -> None:
    """Join torch's process group as the launcher says; without a launcher, make a group of this process alone.

    ``initialize`` joins the group itself. A script calls this function to use ``torch.distributed`` before that.

    Args:
        dist_backend: a backend that the machine has; by default NCCL on GPUs, else gloo.
        options: DeepSpeed's other arguments. ``timeout`` (a ``timedelta``) has an effect; the launcher's variables
            decide the rest.

    Raises:
        ValueError: NCCL without a GPU.
    """
    if dist.is_initialized():
        return
    limit = options.get("timeout")
    grid = Grid() if limit is None else Grid(timeout=limit.total_seconds())
    if dist_backend == "nccl" and grid.device.type != "cuda":
        raise ValueError("dist_backend='nccl' needs a GPU, and this machine has none: leave dist_backend out")
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
