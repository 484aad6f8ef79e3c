"""A model with a plan of its own, and how far it is from one process."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from triax.tensor_parallel.plans import Column, Local, Row


def worst(a: Tensor, b: Tensor) -> float:
    assert a.shape == b.shape, (a.shape, b.shape)
    return float((a - b).abs().max() / b.abs().max().clamp_min(1e-3))


class Attention(nn.Module):
    """Self-attention of 6 heads, in no library's words."""

    def __init__(self) -> None:
        super().__init__()
        self.heads, self.inner = 6, 24
        self.project = nn.Linear(16, 3 * 24)
        self.merge = nn.Linear(24, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.project(x).split(self.inner, -1)
        )
        y: Tensor = self.merge(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return y


class Model(nn.Module):
    """Everything a plan can name, once; `twice` hangs in two places, the head is tied."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(19, 16, padding_idx=17)
        self.attention = Attention()
        self.up, self.down = nn.Linear(16, 21), nn.Linear(21, 16)
        self.twice = self.down
        self.whole = nn.Linear(16, 16)
        self.head = nn.Linear(16, 19)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.attention(self.embedding(ids))
        x = self.whole(x + self.down(torch.tanh(self.up(x))) + self.twice(torch.relu(self.up(x))))
        y: Tensor = self.head(x)
        return y


PLAN: dict[str, Any] = {
    "embedding": "vocab",
    "attention": Local({"heads": 1, "inner": 4}),
    "*.project": Column(parts=3, unit=4),
    "*.merge": Row(unit=4),
    "up": "column",
    "down": "row",
    "twice": "row",
    "head": "column_gather",
}
