"""Diffusion transformers on any grid beside diffusers: outputs, losses and gradients of a batch."""

from __future__ import annotations

from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import triax
from triax import Grid, PipelineModule
from triax.base.nest import map_tensors
from triax.grid.layout import layout_of
from triax.models import diffusion_loss

from support.toys import same

ROWS = 4
AXES = [((2, 1, 1), 0), ((1, 1, 2), 0), ((1, 2, 1), 3), ((2, 1, 2), 0)]  # pipe, data, tensor; stage of ZeRO
NAMES = ["pipe", "tensor", "zero-3", "pipe-tensor"]
Batch = tuple[Any, Tensor]  # inputs of the model, and the target


class PaperTime(nn.Module):
    """Frequencies of the released code, in float64. Those of diffusers differ from them."""

    def forward(self, time: Tensor) -> Tensor:
        turns = time[:, None] / 10000.0 ** (torch.arange(128, dtype=torch.float64) / 128)
        return torch.cat([turns.cos(), turns.sin()], 1)


def fill(model: PipelineModule, weights: dict[str, Tensor]) -> None:
    """Give this rank its shards of whole weights."""
    axis = model.grid.tensor
    for name, parameter in model.named_parameters():
        for box in layout_of(parameter).boxes(axis.rank, axis.size):
            parameter.data[box.local] = weights[name][box.whole]


def engine_of(config: Any, grid: Grid, weights: dict[str, Tensor], stage: Any = 0, **options: Any) -> Any:
    """Return the engine of a model with these weights."""
    model = PipelineModule(config.layers(), grid=grid, loss_fn=diffusion_loss, dtype=torch.float64, seed=2)
    fill(model, weights)
    options = {"optimizer": partial(torch.optim.SGD, lr=0.1), "zero": triax.Zero(stage=stage), **options}
    return triax.Engine(model, batch=triax.Batch(size=ROWS, microbatch=1), **options)


def microbatches(grid: Grid, inputs: Any, target: Tensor) -> list[Any]:
    """Return this replica's microbatches of one row."""
    own = ROWS // grid.data.size
    rows = range(grid.data.rank * own, (grid.data.rank + 1) * own)
    return [map_tensors(itemgetter(slice(row, row + 1)), (inputs, target)) for row in rows]


def random_weights(config: Any) -> dict[str, Tensor]:
    """Return whole random weights, by the names of triax."""
    generator = torch.Generator().manual_seed(1)
    module = PipelineModule(config.layers(), loss_fn=diffusion_loss)
    return {
        name: torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.1
        for name, parameter in module.named_parameters()
    }


def trained(
    paths: list[str], sizes: tuple[int, int, int], stage: int, options: dict[str, Any] | None = None
) -> list[dict[str, Any]]:
    """Evaluate and train each model on a grid."""
    grid, found = Grid(*sizes), []
    for path in paths:
        config, weights, batch = torch.load(path, weights_only=False)
        engine = engine_of(config, grid, weights, stage, **(options or {}))
        parts = microbatches(grid, *batch)
        _, outputs = engine.eval_batch(iter(parts), return_logits=True)
        loss = engine.train_batch(iter(parts)).item()
        found.append({"outputs": torch.cat(outputs), "loss": loss, "gradients": engine.gather("gradients")})
    return found


def require_equal(
    ranks: Any, right: dict[Path, dict[str, Any]], sizes: Any, stage: int = 0, options: dict[str, Any] | None = None
) -> None:
    """Train on a grid the models that files hold, with their weights and batches; compare with the right numbers."""
    results = ranks(
        torch.Size(sizes).numel(), trained, [str(path) for path in right], sizes, stage, options, timeout=300
    )
    for each in zip(right.values(), *results, strict=True):
        wants, founds = each[0], each[1:]
        whole = torch.cat([founds[rank]["outputs"] for rank in (0, 1)]) if sizes[1] == 2 else founds[0]["outputs"]
        same(whole, wants["outputs"], atol=1e-11)
        for found in founds:
            assert found["loss"] == pytest.approx(wants["loss"], rel=1e-10)
            assert found["gradients"].keys() == wants["gradients"].keys()
            same(found["gradients"], wants["gradients"], atol=1e-11)
