"""The norm of all gradients, by which they are clipped: each element of the model counts once, on one rank.

    norm = sqrt(sum over all ranks of counted_squares) / divisor        factor = min(1, limit / (norm + 1e-6))

``ZeroDataAxis.squares`` adds up this rank's squares. ``engine/optimizer_step.py`` adds up the squares of all ranks, in
the step's one all-reduce.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .flat import RUNS, SHARDED
from .protocols import GradientBucket

# Norms of rows of so many elements are computed in fp32 and added up in float64. The error is a few units in the last
# place of fp32 for one row, and less for several, as errors have either sign. It takes an eighth of the time.
_ROW = 2**10
# Range of a sum of squares in which no row overflowed in fp32, and elements that underflowed do not matter.
_RANGE = 1e-18, 1e38
_PIECE = 2**16  # elements that are converted at once: a copy of all gradients would take twice their memory


def square(flat: Tensor) -> Tensor:
    """Return the sum of squares of a flat tensor's absolute values, 0-dim float64."""
    if flat.is_complex():
        flat = torch.view_as_real(flat).view(-1)
    if flat.device.type != "cpu":
        return torch.linalg.vector_norm(flat, dtype=torch.float64).square()
    if flat.dtype == torch.float64:
        return torch.dot(flat, flat)
    if flat.dtype == torch.float32 and flat.numel() >= _ROW:
        even = flat.numel() // _ROW * _ROW
        rows = torch.linalg.vector_norm(flat[:even].view(-1, _ROW), dim=1).double()
        rest = flat[even:].double()
        total = torch.dot(rows, rows) + torch.dot(rest, rest)
        if _RANGE[0] < float(total) < _RANGE[1]:
            return total
    # On a CPU, convert first: six times as fast as a norm with dtype=float64.
    total = torch.zeros((), dtype=torch.float64)
    for piece in flat.split(_PIECE):
        wide = piece.double()
        total += torch.dot(wide, wide)
    return total


def counted_squares(bucket: GradientBucket, gradients: Tensor, first_tensor_rank: bool) -> list[Tensor]:
    """Return the sums of squares of those runs of a bucket's gradients that this rank counts in a norm.

    Args:
        bucket: the bucket.
        gradients: (numel,), its unsharded gradients.
        first_tensor_rank: True on the first rank of the tensor axis. It alone counts the replicated and partial runs,
            which all ranks of this axis hold.
    """
    runs = [run for run in RUNS if bucket.counted and (run == SHARDED or first_tensor_rank)]
    return [square(gradients[slice(*bucket.flat.runs[run])]) for run in runs]


def global_norm(square: float, divisor: float = 1.0) -> float:
    """Return the norm of the gradients divided by ``divisor``, from the sum of their squares over all ranks."""
    return math.sqrt(square) / divisor if square >= 0 else math.nan


def clip_coefficient(norm: Tensor, limit: float) -> Tensor:
    """Return the factor that reduces gradients of this norm to ``limit``; 1 if the norm is smaller.

    Computed as in ``torch.nn.utils.clip_grad_norm_``, with its 1e-6.
    """
    return torch.clamp(limit / (norm + 1e-6), max=1.0)


def clip_factor(norm: float, limit: float) -> float:
    """Return the factor of ``clip_coefficient`` for a norm that is a Python float. A norm of NaN gives NaN."""
    factor = limit / (norm + 1e-6)
    return 1.0 if factor > 1.0 else factor
