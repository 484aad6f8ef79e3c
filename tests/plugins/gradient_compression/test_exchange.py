"""An ``Exchange`` in place of the sum of gradients: called once a step, with the promised arguments."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import triax
from triax import Grid, PipelineModule
from triax.engine import base
from triax.models.gpt import GPTConfig, GPTLoss, gpt_layers
from triax.zero.axis_options import ZeroOptions
from triax.zero.protocols import GradientBucket

from support.sweeps import some

VOCABULARY, LENGTH, SAMPLES = 20, 6, 8


class PlainSum:
    """An exchange that computes the plain sum."""

    def __init__(self, grid: Grid, buckets: Sequence[GradientBucket]) -> None:
        self._axis, self.calls = grid.data, 0

    def gradients(self, buckets: Sequence[GradientBucket]) -> None:
        self.calls += 1
        for bucket in buckets:
            assert bucket.gradients is not None and bucket.gradients.isfinite().all()
            self._axis.all_reduce(bucket.gradients)

    def state(self) -> dict[str, list[Tensor]]:
        return {}


def mode_with(config: Any, grid: Grid, module: nn.Module) -> ZeroOptions:
    return replace(MODE(config, grid, module), exchange=PlainSum)


MODE = base.zero_options


def text(grid: Grid) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches with unequal shares of the replicas: some labels do not count."""
    generator = torch.Generator().manual_seed(3)
    share = SAMPLES // grid.data.size
    while True:
        ids = torch.randint(VOCABULARY, (SAMPLES, LENGTH + 1), generator=generator)
        labels = ids[:, 1:].masked_fill(torch.rand(SAMPLES, LENGTH, generator=generator) < 0.4, -100)
        mine = slice(grid.data.rank * share, (grid.data.rank + 1) * share)
        yield from zip(ids[mine, :-1].split(2), labels[mine].split(2), strict=True)


def trained(shape: tuple[int, int, int], stage: int, exchanged: bool, options: dict[str, Any]) -> Any:
    grid = Grid(*shape, timeout=60)
    model = GPTConfig(
        vocab_size=VOCABULARY, max_position_embeddings=LENGTH, hidden_size=8, num_hidden_layers=2, num_attention_heads=2
    )
    module = PipelineModule(gpt_layers(model), grid=grid, loss_fn=GPTLoss(grid, vocab_size=VOCABULARY))
    if not options.get("fp16"):
        module.double()
    config = {
        "train_batch_size": SAMPLES,
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 300},
        "gradient_clipping": 0.1,
        **options,
    }
    with mock.patch.object(base, "zero_options", mode_with if exchanged else MODE):
        engine, *_ = triax.initialize(model=module, config=config)
    data, losses, norms = text(grid), [], []
    for _ in range(3):
        losses.append(engine.train_batch(data).item())
        norms.append(engine.get_global_grad_norm())
    exchange = engine.data_axis.exchange
    calls = exchange.calls if exchange is not None else 0  # type: ignore[attr-defined]
    return losses, norms, engine.gather("gradients"), engine.gather(), calls, engine.skipped_steps


@pytest.mark.parametrize(
    ("shape", "stage"), some([((1, 2, 1), 0), ((2, 2, 1), 1), ((1, 2, 2), 1), ((1, 1, 1), 0)], [0, 2])
)
def test_a_custom_exchange_that_sums_trains_as_the_default_one(
    ranks: Any, shape: tuple[int, int, int], stage: int
) -> None:
    size = shape[0] * shape[1] * shape[2]
    wanted = ranks(size, trained, shape, stage, False, {})
    found = ranks(size, trained, shape, stage, True, {})
    for (losses, norms, gradients, weights, calls, _), want in zip(found, wanted, strict=True):
        assert calls == 3
        assert losses == pytest.approx(want[0], rel=1e-12) and norms == pytest.approx(want[1], rel=1e-10)
        for mine, theirs in ((gradients, want[2]), (weights, want[3])):
            for name, value in theirs.items():
                torch.testing.assert_close(mine[name], value, rtol=1e-10, atol=1e-14)


def test_steps_that_overflow_call_no_exchange(ranks: Any) -> None:
    """A scale beyond fp16's range: every step is skipped on all ranks, before state takes infinite values."""
    options = {"fp16": {"enabled": True, "initial_scale_power": 40, "hysteresis": 1}}
    for *_, calls, skipped in ranks(2, trained, (1, 2, 1), 0, True, options):
        assert (calls, skipped) == (0, 3)
