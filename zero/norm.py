"""The gradient norm over all three axes, each element counted once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .buckets import Bucket


def square(flat: Tensor) -> Tensor:
    """The sum of squares of a flat tensor, 0-dim float64.

    On a CPU by way of a copy in float64: six times as fast as a norm that converts while it adds.
    """
    if flat.device.type == "cpu":
        wide = flat.double()
        return torch.dot(wide, wide)
    return torch.linalg.vector_norm(flat, dtype=torch.float64).square()


def squares(buckets: Sequence[Bucket], device: torch.device) -> Tensor:
    """This rank's share of the sum of squares of all gradients, 0-dim float64.

    Summed over every rank of the grid it is the square of the global norm: a sharded element counts on its own
    rank, a replicated one on the first of its replicas, a tied one on the first stage that holds it.
    """
    parts = [part for bucket in buckets for part in bucket.squares()]
    return torch.stack(parts).sum() if parts else torch.zeros((), dtype=torch.float64, device=device)


def clip_coefficient(norm: Tensor, limit: float) -> Tensor:
    """What to scale gradients of this norm by, so that they are no longer than ``limit``; 1 where they are not.

    As ``torch.nn.utils.clip_grad_norm_`` computes it, with its 1e-6.
    """
    return torch.clamp(limit / (norm + 1e-6), max=1.0)
