"""Law 4: the formula is the measure. Bytes sent and bytes held are counted and equal the papers' formulas."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import triax
from triax import Grid, LayerSpec, PipelineModule

WIDTH, LAYERS, MICROBATCHES = 64, 4, 3
WEIGHTS = LAYERS * WIDTH * WIDTH  # no bias: a multiple of every padding


def accounts(grid: tuple[int, int, int], stage: int, keep: bool, config: dict[str, Any]) -> Any:
    here = Grid(*grid, timeout=60)
    layers = [LayerSpec(nn.Linear, WIDTH, WIDTH, bias=False) for _ in range(LAYERS)]
    model = PipelineModule(layers, grid=here, loss_fn=lambda o, y: (o - y).float().square().mean())
    base = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": MICROBATCHES,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": stage, "stage3_keep_gathered": keep},
    }
    engine, *_ = triax.initialize(model=model, config={**base, **config})

    def data() -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            yield torch.randn(2, WIDTH), torch.randn(2, WIDTH)

    for _ in range(2):
        engine.train_batch(data())
    return engine.traffic_report(), engine.memory_report()


@pytest.mark.parametrize("replicas", [2, 4])
def test_traffic_of_each_stage(ranks: Any, replicas: int) -> None:
    """In model bytes M over a ring: stage 0 and 1 2M, stage 2 (1 + m)M, stage 3 3m M, or (1 + m)M kept gathered.

    Where a backward pass is followed by the next forward of its stage, the first layer stays whole in between: with
    LAYERS alike, stage 3 saves 1/LAYERS M each time.
    """
    m, ring = MICROBATCHES, 4 * WEIGHTS * (replicas - 1) / replicas
    saved = (m - 1) / LAYERS
    cases = ((0, False, 2), (1, False, 2), (2, False, 1 + m), (3, False, 3 * m - saved), (3, True, 1 + m))
    for stage, keep, wanted in cases:
        for traffic, _ in ranks(replicas, accounts, (1, replicas, 1), stage, keep, {}):
            sent = traffic["sent"]["data"]
            assert sum(entry["bytes"] for entry in sent.values()) == wanted * ring, (stage, keep)
            if not keep:
                assert traffic["formula"]["data"] == (3 * m if stage == 3 else wanted) * ring


def test_traffic_of_the_pipe_axis(ranks: Any) -> None:
    """Each boundary carries each microbatch's activations forward and their gradients back, once."""
    message = 2 * WIDTH * 4
    for rank, (traffic, _) in enumerate(ranks(4, accounts, (4, 1, 1), 0, False, {})):
        ways = (rank < 3) + (rank > 0)
        assert traffic["sent"]["pipe"]["send"] == {"calls": ways * MICROBATCHES, "bytes": ways * MICROBATCHES * message}


@pytest.mark.parametrize("replicas", [1, 4])
@pytest.mark.parametrize(("kind", "config"), [("fp32", {}), ("bf16", {"bf16": {"enabled": True}})])
def test_memory_of_each_stage(ranks: Any, replicas: int, kind: str, config: dict[str, Any]) -> None:
    """Rajbhandari et al. 2020, figure 1, with gradients accumulated in fp32: bytes per parameter on each rank."""
    p, n = WEIGHTS, replicas
    for stage in range(4):
        weights, gradients, state = (1 if s <= stage else 0 for s in (3, 2, 1))
        half = kind == "bf16"
        wanted = {
            "parameters": (2 if half else 4) * p // (n if weights else 1),
            "gradients": 4 * p // (n if gradients else 1),
            "masters": (4 * p // (n if state else 1)) if half else 0,
            "optimizer": 8 * p // (n if state else 1),
            "buffers": 0,
        }
        for _, held in ranks(replicas, accounts, (1, replicas, 1), stage, False, config):
            assert held == wanted, stage
