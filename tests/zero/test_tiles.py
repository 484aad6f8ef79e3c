"""``TiledLinear`` in stage 3: tiles are gathered one after the other, with the numbers of the whole layer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from triax import Grid
from triax.zero import gathered
from triax.zero.modules.tiled_linear import TiledLinear
from triax.zero.modules.units import find_units

from support.sharded_loops import sharded_sgd

WIDTH = 8


class TiledBlock(nn.Module):
    def __init__(self, base: nn.Linear, out: nn.Linear, tiled: bool) -> None:
        super().__init__()
        self.norm, self.out = nn.LayerNorm(WIDTH), out
        self.wide = TiledLinear(WIDTH, 3 * WIDTH, in_splits=3, out_splits=2, init_linear=base) if tiled else base

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.out(torch.relu(self.wide(self.norm(x))))
        return x + y


def tiled_model(tiled: bool) -> nn.Module:
    torch.manual_seed(3)
    pairs = [(nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)) for _ in range(2)]
    return nn.Sequential(*(TiledBlock(*pair, tiled) for pair in pairs)).double()


def gathers_tiles() -> tuple[int, int]:
    """Train tiles in stage 3, compare weights with the untiled layers', and return elements gathered and of a layer."""
    grid, reference, model = Grid(timeout=30), tiled_model(False), tiled_model(True)
    optimizer = sharded_sgd(model, grid, lr=0.3)
    own = torch.optim.SGD(reference.parameters(), lr=0.3)
    buckets, most = optimizer.backward_passes.data_axis.buckets, 0

    def look(*_: Any) -> None:
        nonlocal most
        most = max(most, sum(bucket.flat.numel for bucket in buckets if not bucket.released))

    for part in model.modules():
        part.register_forward_pre_hook(look)
        part.register_full_backward_hook(look)
    for step in range(2):
        xs = torch.randn(grid.data.size, 4, WIDTH, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        optimizer.zero_grad()
        model(xs[grid.data.rank]).square().mean().backward()
        optimizer.step()
        own.zero_grad()
        reference(xs.flatten(0, 1)).square().mean().backward()
        own.step()
    with gathered(model):
        block: Any
        plain: Any
        for block, plain in zip(model.children(), reference.children(), strict=True):
            found = nn.Linear(WIDTH, 3 * WIDTH).double()
            for row, top in zip(block.wide.linears, block.wide.out_parts, strict=False):
                for tile, left in zip(row, block.wide.in_parts, strict=False):
                    height, width = tile.weight.shape
                    found.weight.data[top : top + height, left : left + width] = tile.weight
                found.bias.data[top : top + height] = row[-1].bias
            torch.testing.assert_close(found.state_dict(), plain.wide.state_dict(), rtol=1e-10, atol=1e-12)
            torch.testing.assert_close(block.out.weight, plain.out.weight, rtol=1e-10, atol=1e-12)
    return most, sum(p.numel() for p in reference.parameters()) // 2


def test_tiles_are_gathered_one_after_the_other(ranks: Any) -> None:
    assert len(find_units(tiled_model(tiled=True))) == 1 + 2 * (1 + 6)
    for most, block in ranks(2, gathers_tiles):
        wide = 3 * WIDTH * (WIDTH + 1)  # of a block; the next one is prefetched, but for its tiles, and the next tile
        assert most <= 2 * (block - wide) + 2 * (WIDTH * WIDTH // 2 + 3 * WIDTH // 2) < 2 * block - wide
