"""A model with layers, a loss and a schedule of its own."""

import dataclasses

import torch
import torch.nn.functional as F
from torch import nn

import triax
from triax.pipe import Op

WIDTH, WORDS, LENGTH = 16, 24, 6


class GatedBlock(nn.Module):
    """Residual block whose inner width is sharded over the tensor axis: x + down(gate(x) * up(x))."""

    def __init__(self, width, inner, grid):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = triax.ColumnParallelLinear(width, inner, bias=False, grid=grid)
        self.gate = triax.ColumnParallelLinear(width, inner, bias=False, grid=grid)
        self.down = triax.RowParallelLinear(inner, width, bias=False, grid=grid)

    def forward(self, x):
        h = self.norm(x)
        return x + self.down(torch.sigmoid(self.gate(h)) * self.up(h))


def loss_fn(logits, labels):
    """Return the sum over the labels that count, and their number."""
    losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum", ignore_index=-100)
    return losses, (labels != -100).sum()


def build(grid):
    """Return the model for a grid."""
    layers = [
        triax.LayerSpec(nn.Embedding, WORDS, WIDTH),
        *(triax.LayerSpec(GatedBlock, WIDTH, 2 * WIDTH) for _ in range(6)),
        triax.LayerSpec(nn.Linear, WIDTH, WORDS),
    ]
    return triax.PipelineModule(layers, grid=grid, loss_fn=loss_fn, dtype=torch.float64, partition="uniform")


def batches():
    """Return two batches of four microbatches with different numbers of labels."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(WORDS, (2, 4, 2, LENGTH + 1), generator=generator)
    labels = torch.where(torch.rand(ids.shape, generator=generator) < 0.7, ids, -100)
    return [[(ids[s, m, :, :-1], labels[s, m, :, 1:]) for m in range(4)] for s in range(2)]


def late_weights(pipe, microbatches):
    """1F1B with every weight gradient at the end of the step."""
    base = triax.make_schedule("1f1b", pipe, microbatches)
    orders = []
    for order in base.orders:
        first = [op._replace(kind="I") if op.kind == "B" else op for op in order]
        last = [Op("W", op.stage, op.microbatch) for op in order if op.kind == "B"]
        orders.append((*first, *last))
    return dataclasses.replace(base, name="late-weights", orders=tuple(orders))
