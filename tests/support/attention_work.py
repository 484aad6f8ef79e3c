"""Scores that attention computes, counted where its kernels are called."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
from torch import Tensor

from triax.context import block
from triax.context.mask import Mask
from triax.context.order import runs
from triax.context.pair import Queries


def scores_computed(mask: Mask, rows: int = 1, heads: int = 1, rank: int = 0, size: int = 1) -> int:
    """Return the scores that a rank computes in a forward pass, over the keys of all ranks of a context axis.

    Of a causal square, which a kernel computes by half, the scores up to the diagonal count.
    """
    found, forward = 0, block.forward

    def counted(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool = False, **options: Any) -> Any:
        nonlocal found
        queries, keys = q.shape[2], k.shape[2]
        found += q.shape[0] * q.shape[1] * (queries * (queries + 1) // 2 if causal else queries * keys)
        return forward(q, k, v, scale, causal, **options)

    local = mask.length // size
    held = [runs(mask.length, local, size, other) for other in range(size)]
    x = torch.zeros(rows, heads, local, 8)
    with mock.patch.object(block, "forward", counted):
        for keys in held:
            Queries(x, held[rank], mask, block.Scores(1.0)).forward(block.Merged(x.shape, x), x, x, keys)
    return found
