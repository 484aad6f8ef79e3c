"""A model from the meta device starts bitwise as one that was built at once, and no rank holds more than it must."""

from __future__ import annotations

import gc
import resource
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import triax
from triax import Grid, LayerSpec, PipelineModule, TiedLayerSpec

from support.resident import Growth, own_pages, status
from support.training import small_config, tiny_gpt

WIDTH, SAMPLES = 8, 8


class Odd(nn.Module):
    """A frozen parameter, one that hangs in two places, buffers, and tensors kept as plain attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.second.weight = self.first.weight
        self.frozen = nn.Parameter(torch.randn(WIDTH), requires_grad=False)
        self.register_buffer("mask", torch.rand(WIDTH))
        self.register_buffer("nothing", None)
        self.tables: list[Any] = [torch.rand(WIDTH), {"last": torch.arange(WIDTH)}]

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.second(self.first(x)) * self.frozen + self.mask + self.tables[0] + self.tables[1]["last"]
        return y


class Head(nn.Module):
    """Another class than its tie's other end."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.scale = nn.Parameter(torch.rand(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight) * self.scale


class OtherHead(Head):
    """A third class of the tie."""


def odd_layers() -> list[Any]:
    listed_twice = nn.Linear(WIDTH, WIDTH)
    return [
        TiedLayerSpec("ends", nn.Linear, WIDTH, WIDTH),
        listed_twice,
        LayerSpec(Odd),
        torch.tanh,
        LayerSpec(nn.BatchNorm1d, WIDTH),
        TiedLayerSpec("same", nn.Linear, WIDTH, WIDTH, bias=False),
        listed_twice,
        TiedLayerSpec("same", nn.Linear, WIDTH, WIDTH, bias=False),
        TiedLayerSpec("ends", Head),
        TiedLayerSpec("ends", OtherHead),
    ]


def gpt_model(grid: Grid, **options: Any) -> PipelineModule:
    shape: dict[str, Any] = {
        "max_position_embeddings": 6,
        "num_attention_heads": 8,
        "tie_word_embeddings": True,
        "dropout": 0.1,
    }
    return tiny_gpt(grid, dtype=torch.float32, **shape, **options)


def odd_model(grid: Grid, **options: Any) -> PipelineModule:
    torch.manual_seed(grid.rank)  # rank 0's weights are everybody's
    loss = F.mse_loss
    return PipelineModule(odd_layers(), grid=grid, loss_fn=loss, partition="uniform", seed=3, **options)


def batches(kind: str, grid: Grid) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(5)
    while True:
        x = torch.randn(SAMPLES, WIDTH, generator=generator)
        ids = torch.randint(37, (SAMPLES, 7), generator=generator)
        share = SAMPLES // grid.data.size
        for i in range(grid.data.rank * share, (grid.data.rank + 1) * share, 2):
            yield (ids[i : i + 2, :-1], ids[i : i + 2, 1:]) if kind == "gpt" else (x[i : i + 2], x[i : i + 2] ** 2)


Cell = tuple[str, int, str, int, dict[str, Any]]  # model, stage, schedule, chunks, the rest of the configuration


def trained(shape: tuple[int, int, int], cells: list[Cell]) -> list[bool]:
    """Equality of the two builds' tensors, at the start and after training, for each cell."""
    grid = Grid(*shape, timeout=60)
    alike = []
    for kind, stage, schedule, chunks, more in cells:
        states: list[list[Any]] = []
        for device in (None, "meta"):
            make = gpt_model if kind == "gpt" else odd_model
            model = make(grid, chunks=chunks, device=device)
            parameters = list(model.parameters())
            zero = {"stage": stage, "reduce_bucket_size": 300}
            config = small_config("AdamW", 0.01, batch=SAMPLES, micro=2, zero=zero, schedule=schedule, **more)
            engine, *_ = triax.initialize(model=model, config=config)
            if schedule in ("gpipe", "1f1b"):  # else stages may have moved
                assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
            masters = [b.master.detach().clone() for b in engine.data_axis.buckets if b.master is not None]
            buffers = [b.clone() for b in model.buffers()]
            before, data = engine.gather(), batches(kind, grid)
            losses = [engine.train_batch(data) for _ in range(2)]
            states.append([before, masters, buffers, losses, engine.gather()])
        torch.testing.assert_close(states[0], states[1], rtol=0, atol=0)
        alike.append(not any(bool(t.isnan().any()) for t in states[1][0].values()))
    return alike


BF16: dict[str, Any] = {"bf16": {"enabled": True}}


@pytest.mark.parametrize(
    ("shape", "cells"),
    [
        ((1, 1, 1), [("odd", s, "1f1b", 1, {}) for s in (0, 3)] + [("gpt", 3, "1f1b", 1, BF16)]),
        ((2, 2, 1), [("odd", 3, "interleaved", 2, {}), ("gpt", 3, "zb-v", 2, BF16)]),
        pytest.param((1, 1, 1), [("odd", s, "1f1b", 1, {}) for s in (1, 2)], marks=pytest.mark.exhaustive),
        pytest.param((2, 2, 1), [("odd", 2, "gpipe", 1, {})], marks=pytest.mark.exhaustive),
        pytest.param((2, 2, 2), [("gpt", 3, "zb-v", 2, BF16)], marks=pytest.mark.exhaustive),
        pytest.param((2, 2, 1), [("odd", s, "gpipe", 1, {}) for s in (0, 3)], marks=pytest.mark.exhaustive),
        pytest.param((2, 2, 2), [("gpt", 1, "1f1b", 1, BF16), ("gpt", 3, "1f1b", 1, {})], marks=pytest.mark.exhaustive),
    ],
    ids=str,
)
def test_meta_device_models_train_bitwise_as_directly_built_ones(
    ranks: Any, shape: tuple[int, int, int], cells: list[Cell]
) -> None:
    for alike in ranks(shape[0] * shape[1] * shape[2], trained, shape, cells):
        assert all(alike)


def test_placeholders_read_as_nan_until_they_are_filled() -> None:
    model = odd_model(Grid(), device="meta")
    weight = dict(model.named_parameters())["layers.2.first.weight"]
    assert weight.isnan().all() and weight.untyped_storage().nbytes() == 4
    with pytest.raises(RuntimeError, match="single memory location"):
        nn.init.normal_(weight)
    with pytest.raises(RuntimeError, match=r"placeholders .*: call model\.fill\(\), or make an engine of the model"):
        model(torch.ones(2, WIDTH))
    weight.requires_grad_(False)
    groups = [{"params": [weight]}, {"params": [p for p in model.parameters() if p is not weight]}]
    model.fill()
    assert (
        not weight.requires_grad and groups[0]["params"][0] is dict(model.named_parameters())["layers.2.first.weight"]
    )
    built = odd_model(Grid())
    torch.testing.assert_close(dict(model.state_dict()), dict(built.state_dict()), rtol=0, atol=0)
    x = torch.ones(2, WIDTH)
    assert torch.equal(model(x), built(x))


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("weight", lambda layer: nn.init.zeros_(layer.weight)),
        ("weight", lambda layer: setattr(layer.weight, "data", torch.zeros(WIDTH, WIDTH))),
        ("bias", lambda layer: setattr(layer, "bias", nn.Parameter(torch.zeros(WIDTH)))),
    ],
)
def test_a_changed_placeholder_is_refused_by_its_name(name: str, change: Callable[[Any], object]) -> None:
    model = odd_model(Grid(), device="meta")
    change(model.layers["2"].first)
    with pytest.raises(RuntimeError, match=rf"layers\.2\.first\.{name} was changed while it was a placeholder"):
        triax.initialize(model=model, config={"train_batch_size": 1})


class NeedsValues(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = float(torch.rand(()).item())


def test_layers_that_cannot_be_built_on_meta_are_refused() -> None:
    with pytest.raises(ValueError, match=r"layer 0, LayerSpec\(NeedsValues\), cannot be built on the meta device"):
        PipelineModule([LayerSpec(NeedsValues)], device="meta")
    with torch.device("meta"):
        module = nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"layer 0, a Linear, was built on the meta device and has no values: list"):
        PipelineModule([module])
    with pytest.raises(ValueError, match=r"device='cpu' is not possible, .* the grid's device"):
        PipelineModule([LayerSpec(nn.Linear, 2, 2)], device="cpu")


LAYER, LAYERS = 1024, 24  # 4 MiB each


def peak(stage: int, device: str | None) -> float:
    """Peak growth of the process from before the model to its first step, in layers."""
    grid = Grid(data=2, timeout=60)
    with own_pages():
        for width in (8, LAYER):  # the first, small one for what is imported on the way
            growth = Growth()
            layers = [LayerSpec(nn.Linear, width, width, bias=False) for _ in range(LAYERS)]
            model = PipelineModule(layers, grid=grid, loss_fn=F.mse_loss, device=device)
            config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": stage}}
            # Without an optimizer, weights are all there is.
            triax.initialize(model=model, model_parameters=[], config=config)
        return growth.measure()[0] / (LAYER * LAYER * 4)


def test_meta_device_models_hold_at_most_a_shard_and_a_layer(ranks: Any) -> None:
    """Resident memory, measured in layers of 24: half of them is a rank's share in stage 3.

    Less a few pages: what the small model before left free. In a process that ran other tests, small objects lie
    scattered over the pages that those left, megabytes more.
    """
    for found in ranks(2, peak, 3, "meta", new_processes=True):
        assert LAYERS / 2 - 0.01 <= found < LAYERS / 2 + 1.5
    for found in ranks(2, peak, 0, "meta", new_processes=True):
        assert LAYERS - 0.01 <= found < LAYERS + 1.5
    for found in ranks(2, peak, 3, None, new_processes=True):
        assert found > LAYERS - 0.01


ALLOWANCE, THIN = 24 * 2**20, 512  # bytes that a rank may take beyond what it takes to train next to nothing


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + 0.1 * self.linear(x)
        return y


def losses_with_limited_memory(stage: int) -> str | list[float]:
    """The losses of a model whose states (16 bytes a parameter) are 4 times what a rank may allocate; or why not."""
    grid = Grid(data=8, timeout=60)
    before = resource.getrlimit(resource.RLIMIT_DATA)
    with own_pages():
        try:
            for width in (8, THIN):
                if width == THIN:
                    gc.collect()
                    resource.setrlimit(resource.RLIMIT_DATA, (status("VmData") + ALLOWANCE, before[1]))
                count = 4 * ALLOWANCE // (16 * THIN**2)
                layers = [LayerSpec(Residual, width) for _ in range(count)]
                model = PipelineModule(layers, grid=grid, loss_fn=F.mse_loss, device="meta")
                config = small_config("AdamW", lr=1e-4, micro=1, zero={"stage": stage, "reduce_bucket_size": THIN**2})
                engine, *_ = triax.initialize(model=model, config=config)
                x = torch.randn(1, width, generator=torch.Generator().manual_seed(grid.rank))
                losses = [engine.train_batch(iter([(x, x)])).item() for _ in range(2)]
            return losses
        except RuntimeError as error:
            grid.close()  # a rank that found more free than the others waits for them
            return str(error)
        finally:
            resource.setrlimit(resource.RLIMIT_DATA, before)


def test_a_model_4_times_what_a_rank_may_hold_trains_in_stage_3(ranks: Any) -> None:
    for losses in ranks(8, losses_with_limited_memory, 3):
        assert losses[1] < losses[0]


@pytest.mark.parametrize("stage", [pytest.param(0, marks=pytest.mark.exhaustive), 2])
def test_a_model_4_times_the_limit_fails_below_stage_3(ranks: Any, stage: int) -> None:
    """Stage 2 holds less than stage 0, and all the same too much."""
    assert any("memory" in said for said in ranks(8, losses_with_limited_memory, stage))
