"""Capacity: an expert takes at most C = ceil(factor * k * T / E) tokens of a sequence, in the order of the sequence.

T is the number of the sequence's tokens, without padding. Taken over one sequence, the capacity does not depend on the
microbatch, on the replicas, or on the ranks over which the sequence is sharded.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from ..grid.comm.axis import Axis


def within_capacity(
    experts: Tensor, count: int, factor: float, axes: Sequence[Axis] = (), positions: Tensor | None = None
) -> Tensor:
    """Return which of the chosen experts take their token: bool (B, T, k). Collective over the axes.

    Args:
        experts: int64 (B, T, k), the experts chosen for this rank's tokens; ``count`` means none.
        count: E, the number of experts.
        factor: capacity factor.
        axes: axes over which the sequence is sharded.
        positions: int64 (T,), position of each token in its sequence. None: in the order given.
    """
    batch, length, k = experts.shape
    if positions is None:
        positions = torch.arange(length, device=experts.device)
    own = torch.cat([experts.flatten(2), positions.view(1, -1, 1).expand(batch, -1, 1)], dim=-1)  # (B, T, k + 1)
    parts = own[None]  # (ranks, B, T, k + 1)
    for axis in axes:
        if axis.size > 1:
            gathered = parts.new_empty(axis.size * parts.shape[0], *parts.shape[1:])
            axis.all_gather(gathered, parts.contiguous())
            parts = gathered
    all_choices = rearrange(parts, "ranks b t columns -> b (ranks t) columns")
    chosen, places = all_choices[..., :k], all_choices[..., k]
    order = places.argsort(dim=1, stable=True)  # positions of padding are beyond the sequence's end
    taken = F.one_hot(chosen.gather(1, order[..., None].expand(-1, -1, k)), count + 1).sum(2)  # (B, all T, E + 1)
    before = taken.cumsum(1) - taken  # tokens of the sequence that chose the expert earlier
    tokens = (chosen[..., 0] < count).sum(1)  # (B,)
    capacity = (tokens.double() * (factor * k) / count - 1e-9).ceil().long()  # (B,); a product may be rounded up
    # Back to this rank's tokens: the place of each position in the sorted sequence.
    own_indices = torch.searchsorted(places.gather(1, order).contiguous(), positions.expand(batch, -1).contiguous())
    rank = before.gather(1, own_indices[..., None].expand(-1, -1, count + 1)).gather(2, experts)  # (B, T, k)
    return (rank < capacity[:, None, None]) & (experts < count)
