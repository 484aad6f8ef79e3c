"""Tokens in front of each of a rank's pieces of a sequence, which a causal convolution needs.

In zigzag order (``order.py``) a rank of the context axis has two pieces, and what is in front of a piece lies on
another rank. The ranks gather the last tokens of all pieces. With m = min(count, T / 2c) tokens of a piece, and |x| the
bytes of a token of all rows, a rank sends 2 m |x| (c-1) bytes forward and the same number backward.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from ..grid.comm.axis import Axis
from .order import gather


def previous(x: Tensor, count: int, axis: Axis) -> Tensor:
    """Return the ``count`` tokens in front of each of this rank's two pieces. Collective; differentiable once.

    Args:
        x: (B, T_local, C), this rank's tokens, both pieces one behind the other.
        count: number of tokens.
        axis: the context axis, of at least two ranks.

    Returns:
        (B, 2, count, C). There are zeros in front of the whole sequence.
    """
    pieces = x.unflatten(1, (2, -1))  # (B, 2, T_local / 2, C)
    if not count:
        return pieces[:, :, :0]
    kept = min(count, pieces.shape[2])
    ends = pieces[:, :, pieces.shape[2] - kept :].flatten(1, 2)
    gathered = gather(ends, axis, 2 * axis.size * kept, partial=True)  # (B, 2c kept, C), in the order of the sequence
    gathered = F.pad(gathered, (0, 0, count, 0))
    numbers = axis.rank, 2 * axis.size - 1 - axis.rank
    return gathered.unfold(1, count, kept)[:, numbers, :].transpose(2, 3)
