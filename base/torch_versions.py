"""Differences between the versions of torch that pyproject.toml allows."""

from __future__ import annotations

import torch.distributed as dist

# torch 2.13 has given these collectives other names, and warns about the old ones.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
