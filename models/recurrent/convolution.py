"""Short causal convolution of each channel by itself, in front of a recurrence."""

from __future__ import annotations

import torch
from torch import Tensor


def causal_convolution(
    x: Tensor, earlier: Tensor, weight: Tensor, bias: Tensor | None, places: Tensor | None = None
) -> Tensor:
    """Return y_t = sum_j weight_{w-1-j} x_{t-j} + bias, j from 0 to w - 1, over the tokens of t's own document.

    Args:
        x: (B, p, L, C), the tokens of p pieces of a sequence.
        earlier: (B, p, w - 1, C), the tokens in front of each piece.
        weight: (C, 1, w), as for ``nn.Conv1d`` with a group for each channel.
        bias: (C,), or None.
        places: place of each token in its document, integers (B, p, L); None: one document.

    Returns:
        (B, p, L, C).
    """
    width, length = weight.shape[2], x.shape[2]
    padded = torch.cat([earlier, x], 2)
    y = x * weight[:, 0, -1]
    for back in range(1, width):
        term = padded[:, :, width - 1 - back :][:, :, :length] * weight[:, 0, width - 1 - back]
        y = y + (term if places is None else term * (places >= back)[..., None])
    return y if bias is None else y + bias
