"""What a script written for DeepSpeed calls beside ``initialize``: its arguments, and the process group."""

from __future__ import annotations

import argparse
from typing import Any

import torch.distributed as dist

from ..grid import Grid


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """``--deepspeed_config FILE`` and ``--deepspeed`` for a script; ``initialize(args=...)`` reads the first.

    Args:
        parser: the script's own.

    Returns:
        The same parser. ``--local_rank``, which launchers may pass, is the script's to add, as with DeepSpeed.
    """
    group = parser.add_argument_group("triax", "the configuration, as DeepSpeed's scripts name it")
    group.add_argument("--deepspeed", action="store_true", help="taken, and not needed: initialize says it")
    group.add_argument("--deepspeed_config", type=str, default=None, help="the configuration: a JSON file")
    return parser


def init_distributed(dist_backend: str | None = None, **options: Any) -> None:
    """Join torch's process group as the launcher says; without a launcher, a group of this process alone.

    ``initialize`` does so itself: a script needs it where it asks ``torch.distributed`` for its rank before.

    Args:
        dist_backend: must be one that the machine has; by default NCCL with a GPU, else gloo, and both are fine.
        options: DeepSpeed's others: ``timeout`` (a ``timedelta``) counts, the rest follows from the launcher.
    """
    if dist.is_initialized():
        return
    limit = options.get("timeout")
    grid = Grid() if limit is None else Grid(timeout=limit.total_seconds())
    if dist_backend == "nccl" and grid.device.type != "cuda":
        raise ValueError("dist_backend='nccl' needs a GPU, and there is none: leave it out")
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
