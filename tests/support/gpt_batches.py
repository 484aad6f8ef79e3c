"""Global batches of token ids and labels, and a comparison to 1e-10."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import torch
from torch import Tensor

from triax.grid import Grid

from support.reference import Batch

# 8 entries, so that a pipe axis of 8 has one a stage; 8 heads for a tensor axis of 8; 37 tokens divide by no axis.
ENTRIES, LAYERS, HEADS, VOCABULARY, LENGTH = 8, 4, 8, 37, 8
SAMPLES, STEPS, LR, CLIP = 16, 2, 1e-2, 0.5


@cache
def batches(packed: bool = False) -> list[Batch]:
    """Global batches whose samples have unlike numbers of labels that count, one of them none at all."""
    generator = torch.Generator().manual_seed(3)
    made: list[Batch] = []
    for _ in range(STEPS):
        text = torch.randint(VOCABULARY, (SAMPLES, LENGTH + 1), generator=generator)
        ids, labels = text[:, :-1], text[:, 1:].clone()
        labels[torch.rand(labels.shape, generator=generator) < 0.3] = -100
        labels[5] = -100
        documents = (torch.rand(ids.shape, generator=generator) < 0.3).long().cumsum(1)
        made.append(((ids, documents) if packed else ids, labels))
    return made


def microbatches(grid: Grid, size: int = 1, packed: bool = False) -> Iterator[Batch]:
    share = SAMPLES // grid.data.size
    for inputs, labels in batches(packed):
        for first in range(grid.data.rank * share, (grid.data.rank + 1) * share, size):
            rows = slice(first, first + size)
            yield tuple(part[rows] for part in inputs) if packed else inputs[rows], labels[rows]


def assert_close(found: dict[str, Tensor], wanted: dict[str, Tensor], what: str) -> None:
    assert found.keys() == wanted.keys(), what
    for name, tensor in wanted.items():
        message = f"{what} {name}: {{}}".format
        torch.testing.assert_close(found[name], tensor, rtol=1e-10, atol=1e-12, msg=message)
