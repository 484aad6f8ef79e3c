"""MLPs in tiles of tokens, each recomputed, beside the same on all tokens at once."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import triax
from triax import Grid
from triax.models.config import AnyDecoderConfig, GPTConfig, LlamaConfig
from triax.models.decoder import decoder_layers
from triax.models.layers import NextTokenLoss
from triax.options.recomputation import Recomputation
from triax.plugins.plan.memory import ModelMemory
from triax.plugins.plan.parallel_layout import ParallelLayout
from triax.plugins.plan.state_memory import StateOptions
from triax.testing.pool import RankFailure

from support.sweeps import some
from support.training import SGD, microbatches, pipeline_engine, text_batches

VOCABULARY, SAMPLES, LENGTH = 37, 4, 12
LLAMA = LlamaConfig.preset("llama-tiny", num_hidden_layers=4, vocab_size=VOCABULARY)
GPT = GPTConfig.preset("bytes-tiny", num_hidden_layers=4, vocab_size=VOCABULARY)


def engine_of(
    grid: Grid,
    config: AnyDecoderConfig,
    schedule: str,
    stage: Any,
    recompute: Recomputation,
    shards: bool = False,
    size: int = 1,
) -> triax.PipelineEngine:
    model = triax.PipelineModule(
        decoder_layers(config, sequence_parallel=shards),
        grid=grid,
        loss_fn=NextTokenLoss(grid, VOCABULARY),
        dtype=torch.float64,
        seed=5,
    )
    batch = triax.Batch(size=SAMPLES, microbatch=size)
    return pipeline_engine(model, batch, stage, schedule=schedule, recompute=recompute)


def whole_and_tiled_steps(
    axes: dict[str, Any], config: AnyDecoderConfig, schedule: str, stage: Any, tile: int, shards: bool, **more: Any
) -> list[tuple[float, dict[str, Tensor]]]:
    grid, found = Grid(**axes, timeout=60), []
    size = max(1, SAMPLES // (2 * grid.pipe.size * grid.data.size))  # twice as many microbatches as stages, or less
    for each in (None, tile):
        engine = engine_of(grid, config, schedule, stage, Recomputation(mlp_tile=each, **more), shards, size)
        loss = engine.train_batch(microbatches(grid, text_batches(VOCABULARY, SAMPLES, LENGTH, 1), size)).item()
        found.append((loss, engine.gather("gradients")))
    return found


CASES: list[tuple[dict[str, int], AnyDecoderConfig, str, int, int, bool, dict[str, Any]]] = [
    ({}, GPT, "1f1b", 0, 5, False, {}),
    ({"pipe": 2}, LLAMA, "zb-h1", 2, 4, False, {}),
    ({"pipe": 2, "data": 2}, LLAMA, "zb-v", 3, 5, False, {"granularity": "full"}),
    ({"data": 2}, GPT, "1f1b", 3, 5, False, {"granularity": "matmul"}),
    ({"tensor": 2}, LLAMA, "1f1b", 1, 4, True, {"granularity": "selective"}),
    ({"tensor": 2, "context": 2}, GPT, "1f1b", 2, 2, True, {"interval": 2, "partition_activations": True}),
]


@pytest.mark.parametrize(("axes", "config", "schedule", "stage", "tile", "shards", "more"), some(CASES, (1, 3, 4, 5)))
def test_tiled_mlps_have_the_gradients_of_whole_ones(
    ranks: Any,
    axes: dict[str, int],
    config: AnyDecoderConfig,
    schedule: str,
    stage: int,
    tile: int,
    shards: bool,
    more: dict[str, Any],
) -> None:
    count = math.prod(axes.values())
    for (loss, whole), (tiled_loss, tiled) in ranks(
        count, whole_and_tiled_steps, axes, config, schedule, stage, tile, shards, **more
    ):
        assert tiled_loss == pytest.approx(loss, rel=1e-13)
        for name, gradient in whole.items():
            assert (tiled[name] - gradient).abs().max() <= 1e-12 * gradient.abs().max(), name


@pytest.mark.parametrize("config", [GPT, LLAMA])
def test_a_tiled_mlp_holds_the_bytes_of_the_formula(config: AnyDecoderConfig) -> None:
    found = {}
    for tile in (None, 4):
        grid = Grid()
        engine = engine_of(grid, config, "1f1b", 0, Recomputation(mlp_tile=tile))
        engine.record_memory = True
        engine.train_batch(microbatches(grid, text_batches(VOCABULARY, SAMPLES, LENGTH, 1)))
        memory = ModelMemory(config, options=StateOptions(precision="fp64", mlp_tile=tile), device="cpu")
        layout = ParallelLayout(pipe=1, data=1, tensor=1)
        found[tile] = engine.memory_report()["held"]["activations"]
        assert found[tile] == memory.ranks(layout, SAMPLES, LENGTH)[0].activations, tile
    assert found[4] < 0.75 * found[None]


class Wide(nn.Module):
    """An MLP of a user's own, with dropout if p > 0."""

    in_tiles: Any = None

    def __init__(self, p: float = 0.0) -> None:
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(8, 32), nn.Linear(32, 8), nn.Dropout(p)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self._run(x) if self.in_tiles is None else self.in_tiles(self._run, x)
        return y

    def _run(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(self.drop(torch.relu(self.up(x))))
        return y


def module_step(tile: int | None, p: float = 0.0, grid: Grid | None = None) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(Wide(p), nn.Tanh(), Wide()).double()
    engine = triax.Engine(
        model,
        optimizer=SGD,
        batch=triax.Batch(size=2, microbatch=2),
        recompute=Recomputation(mlp_tile=tile),
        grid=grid,
    )
    assert isinstance(engine, triax.ModuleEngine)
    x = torch.linspace(-1, 1, 2 * 9 * 8, dtype=torch.float64).view(2, 9, 8)
    loss = engine.module(x).square().sum()
    engine.backward(loss)
    engine.step()
    return engine.gather("gradients")


def test_a_user_module_in_tiles_has_the_same_gradients() -> None:
    whole, tiled = module_step(None), module_step(4)
    for name, gradient in whole.items():
        assert (tiled[name] - gradient).abs().max() <= 1e-12 * gradient.abs().max(), name


def tiles_of_nothing() -> None:
    grid = Grid(pipe=2, timeout=30)
    layers = [triax.LayerSpec(nn.Linear, 4, 4), triax.LayerSpec(nn.Linear, 4, 4)]
    model = triax.PipelineModule(layers, grid=grid, loss_fn=lambda x, y: x.sum())
    triax.Engine(model, batch=triax.Batch(size=2, microbatch=1), recompute=Recomputation(mlp_tile=4))


def test_tiles_need_a_module_in_tiles_without_dropout(ranks: Any) -> None:
    with pytest.raises(RankFailure, match="mlp_tile = 4: no module of the model has a class attribute in_tiles"):
        ranks(2, tiles_of_nothing)
    with pytest.raises(triax.ConfigError, match=r"0\.drop is a dropout in a module that runs in tiles"):
        module_step(4, p=0.5)
