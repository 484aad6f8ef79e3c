"""The gradient norm over all three axes, each element counted once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .buckets import Bucket


# Norms of rows of so many elements are taken in fp32, and added up in float64. That is off by a few units in the last
# place of fp32 for one row and by less for more of them, as they round to either side; it takes an eighth of the time.
_ROW = 2**10
# Sums of squares within which no row of fp32 overflowed, and what underflowed is nothing beside them.
_RANGE = 1e-18, 1e38
_PIECE = 2**16  # elements that are converted at once: all together, that is twice the gradients' memory


def square(flat: Tensor) -> Tensor:
    """The sum of squares of a flat tensor, 0-dim float64."""
    if flat.device.type != "cpu":
        return torch.linalg.vector_norm(flat, dtype=torch.float64).square()
    if flat.dtype == torch.float64:
        return torch.dot(flat, flat)
    if flat.dtype == torch.float32 and flat.numel() >= _ROW:
        even = flat.numel() // _ROW * _ROW
        rows = torch.linalg.vector_norm(flat[:even].view(-1, _ROW), dim=1).double()
        rest = flat[even:].double()
        found = torch.dot(rows, rows) + torch.dot(rest, rest)
        if _RANGE[0] < float(found) < _RANGE[1]:
            return found
    # On a CPU by way of a copy in float64: six times as fast as a norm that converts while it adds.
    found = torch.zeros((), dtype=torch.float64)
    for piece in flat.split(_PIECE):
        wide = piece.double()
        found += torch.dot(wide, wide)
    return found


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


def clip_factor(norm: float, limit: float) -> float:
    """The same of a number; not a number where the norm is none."""
    factor = limit / (norm + 1e-6)
    return 1.0 if factor > 1.0 else factor
