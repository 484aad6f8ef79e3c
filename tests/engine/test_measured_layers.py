"""Layers measured one by one, and engines cut by these costs: ranks agree, and gradients equal one process's."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import triax
from triax import Grid, LayerCost, LayerCosts, LayerSpec, PipelineModule
from triax.base.option_error import OptionError
from triax.models.gpt import GPTConfig, GPTLoss, gpt_layers

from support.paths import DOCS
from support.readme_blocks import programs
from support.toys import error_text, mean_loss, random_pair, same

GPT = GPTConfig(vocab_size=64, max_position_embeddings=8, hidden_size=16, num_hidden_layers=3, num_attention_heads=2)
BATCH = triax.Batch(size=8, microbatch=2)
DATA = TensorDataset(torch.randn(16, 8), torch.randn(16, 8))
SGD = partial(torch.optim.SGD, lr=0.1)


class Slow(nn.Module):
    """Linear layer that sleeps: in the forward pass, for the gradient of its inputs, and for that of its weight."""

    def __init__(self, width: int, *seconds: float) -> None:
        super().__init__()
        self.linear, self.seconds = nn.Linear(width, width, dtype=torch.float64), seconds

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self.seconds[0])
        y: Tensor = self.linear(_Sleep.apply(x, self.seconds[1]))
        return y


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        time.sleep(ctx.seconds)
        return gradients[0], None


def uneven() -> list[LayerSpec]:
    return [LayerSpec(Slow, 8, 0.0, 0.0)] * 5 + [LayerSpec(Slow, 8, 0.02, 0.03)]


def test_measured_seconds_and_bytes_match_the_layers() -> None:
    x, y = random_pair(1, 4, 8)
    options = triax.EngineOptions(optimizer=torch.optim.AdamW, batch=BATCH)
    costs = triax.measure_layers(uneven(), (x, y), loss_fn=mean_loss, options=options)
    assert [layer.name for layer in costs.layers] == ["Slow"] * 6
    first, *_, last = costs.layers
    assert costs.layers[1] == costs.layers[4] and first.inputs == 0.0  # the data has no gradient
    assert costs.layers[1].inputs > 0.0
    assert 0.02 <= last.forward < 0.2 and 0.03 <= last.inputs < 0.2
    count = 8 * 8 + 8
    assert first.states == 4 * 8 * count  # weight, gradient and two states in float64
    assert first.output == 4 * 8 * 8 and costs.layers[1].kept == 4 * 8 * 8  # a linear layer keeps its input
    assert last.kept == 2 * 4 * 8 * 8  # and the loss the difference
    assert costs.latency == costs.per_byte == 0.0 and costs.speeds == ()


@pytest.mark.parametrize(("recompute", "kept"), [("none", 4), ("full", 1)])
def test_measured_layers_with_full_recompute_keep_only_inputs(recompute: str, kept: int) -> None:
    layers = [LayerSpec(nn.Linear, 8, 8), LayerSpec(Deep, 4)]
    options = triax.EngineOptions(batch=BATCH, recompute={} if recompute == "none" else recompute)  # type: ignore[arg-type]
    costs = triax.measure_layers(layers + layers[:1], (torch.randn(4, 8), torch.randn(4, 8)), options=options)
    assert costs.layers[1].kept == kept * 4 * 8 * 4
    assert (costs.layers[1].inputs > 0.04) == (recompute == "full")


class Deep(nn.Module):
    """Products of which each keeps its input; it sleeps in the forward pass."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.parts = nn.Sequential(*(nn.Linear(8, 8) for _ in range(depth)))

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(0.05)
        y: Tensor = self.parts(x)
        return y


def gpt_step(pipe: int, method: str, schedule: str = "1f1b", chunks: int | None = None, limit: Any = None) -> Any:
    """Measure, cut, and train a step; return boundaries, costs, loss and gradients."""
    grid = Grid(pipe=pipe, timeout=60)
    tokens = torch.randint(64, (8, 9), generator=torch.Generator().manual_seed(1))
    batch = [(rows[:, :-1], rows[:, 1:]) for rows in tokens.split(2)]
    loss_fn, layers = GPTLoss(grid, vocab_size=64), gpt_layers(GPT)
    common: dict[str, Any] = {"grid": grid, "loss_fn": loss_fn, "dtype": torch.float64}
    costs = triax.measure_layers(layers, batch[0], repeats=2, **common)
    given: dict[str, Any] = {"partition": method, "costs": costs} if pipe > 1 else {}
    model = PipelineModule(layers, **given, **common)
    own = triax.ScheduleOptions(name=schedule, chunks=chunks, limit=limit)
    engine: Any = triax.Engine(model, optimizer=SGD, batch=BATCH, schedule=own)
    loss = float(engine.train_batch(iter(batch)))
    facts = model.boundaries, engine.program.schedule.name, list(model.placement), costs.to_json()
    return facts, loss, engine.gather("gradients")


@pytest.mark.parametrize(
    ("pipe", "method", "schedule", "chunks"),
    [(2, "time", "1f1b", None), (2, "auto", "1f1b", None), (2, "time", "zb-v", None), (3, "memory", "zb-h1", None)],
)
def test_gradients_of_measured_cuts_equal_one_process(
    ranks: Any, pipe: int, method: str, schedule: str, chunks: Any
) -> None:
    _, wanted_loss, wanted = ranks(1, gpt_step, 1, "uniform")[0]
    found = ranks(pipe, gpt_step, pipe, method, schedule, chunks, timeout=120)
    for facts, loss, gradients in found:
        assert facts == found[0][0]  # all ranks measured the same, and cut the same
        assert loss == pytest.approx(wanted_loss, rel=1e-10)
        same(gradients, wanted)


@pytest.mark.exhaustive
@pytest.mark.parametrize("cut", [[0, 1, 7], [0, 3, 7], [0, 6, 7], [0, 2, 3, 5, 7]])
def test_every_partition_has_the_same_gradients(ranks: Any, cut: list[int]) -> None:
    _, wanted_loss, wanted = ranks(1, gpt_step, 1, "uniform")[0]
    for _, loss, gradients in ranks(2, gpt_given, cut):
        assert loss == pytest.approx(wanted_loss, rel=1e-10)
        same(gradients, wanted)


def gpt_given(cut: list[int]) -> Any:
    """Train a step with given boundaries."""
    grid = Grid(pipe=2, timeout=60)
    tokens = torch.randint(64, (8, 9), generator=torch.Generator().manual_seed(1))
    batch = [(rows[:, :-1], rows[:, 1:]) for rows in tokens.split(2)]
    model = PipelineModule(
        gpt_layers(GPT), grid=grid, loss_fn=GPTLoss(grid, vocab_size=64), dtype=torch.float64, partition=cut
    )
    schedule = "1f1b" if len(cut) == 3 else "interleaved"
    engine: Any = triax.Engine(model, optimizer=SGD, batch=BATCH, schedule=schedule)
    return None, float(engine.train_batch(iter(batch))), engine.gather("gradients")


def slow_rank() -> Any:
    """Measure on ranks of which the second takes longer."""
    grid = Grid(pipe=2, timeout=60)
    layers = [LayerSpec(Slow, 8, 0.02 * (1 + grid.rank), 0.02 * (1 + grid.rank))] * 6
    costs = triax.measure_layers(layers, random_pair(1, 4, 8), grid=grid, loss_fn=mean_loss, repeats=3)
    return costs.to_json(), costs.speeds, triax.find_cut("time", costs, 2, 8).boundaries, costs.latency


def test_a_slow_rank_gets_fewer_layers(ranks: Any) -> None:
    found = ranks(2, slow_rank, timeout=120)
    assert found[0] == found[1]
    _, speeds, boundaries, latency = found[0]
    assert speeds[0] == 1.0 and speeds[1] == pytest.approx(0.5, abs=0.1)
    assert boundaries[1] > 3 and 0 < latency < 0.1


def model(partition: Any = "time", **arguments: Any) -> PipelineModule:
    costs = LayerCosts([LayerCost(1.0, 1.0, 1.0, states=1e9, kept=1e9)] * 4)
    arguments = {"costs": costs, **arguments}
    return PipelineModule([LayerSpec(nn.Linear, 8, 8)] * 4, loss_fn=F.mse_loss, partition=partition, **arguments)


def test_partition_auto_cuts_the_layers_and_logs_it(caplog: pytest.LogCaptureFixture) -> None:
    engine: Any = triax.Engine(model("auto"), optimizer=SGD, batch=BATCH)
    assert "the layers are cut by auto: [0, 4], 1f1b, chunks 1, 4.8e+04 ms" in caplog.text
    assert engine.module.partition == [0, 4]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: model(costs=None), "partition='time' needs the costs of the layers: pass costs=triax.measure_layers"),
        (lambda: model(costs=LayerCosts([LayerCost(1.0)])), "the costs are of 1 layers, and the list has 4"),
        (lambda: model("uniform"), "costs have no effect on partition='uniform'"),
        (lambda: engine_of("time", schedule="auto"), "write partition='auto'"),
        (lambda: engine_of("auto", schedule="zb-h1"), "partition='auto' chooses the schedule"),
        (lambda: engine_of("time", schedule={"memory": 2}), "or give limit"),
        (lambda: engine_of("time", schedule={"limit": 4.5}), "takes 8 GB on rank 0: 4 GB of weights"),
        (
            lambda: engine_of("uniform", costs=None, schedule={"limit": 4.5}),
            "it is for PipelineModule(partition='time'",
        ),
        (
            lambda: engine_of("time", batch=triax.Batch(size=8, microbatch="auto"), training_data=DATA),
            "triax is to find batch.microbatch, but partition='time'",
        ),
    ],
)
def test_measuring_layers_refuses_what_it_cannot_measure(make: Any, words: str) -> None:
    assert words in error_text(make, (ValueError, OptionError))


def engine_of(partition: str, costs: Any = (), batch: Any = BATCH, **options: Any) -> Any:
    made = model(partition) if costs == () else model(partition, costs=costs)
    return triax.Engine(made, optimizer=SGD, batch=batch, **options)


def test_measure_layers_refuses_lora_and_interval() -> None:
    layers, pair = [LayerSpec(nn.Linear, 8, 8)] * 2, (torch.randn(2, 8), torch.randn(2, 8))
    cases: list[tuple[dict[str, Any], str]] = [
        ({"lora": {"rank": 2}}, "lora"),
        ({"recompute": {"interval": 2}}, "interval"),
    ]
    for given, words in cases:
        options: Any = triax.EngineOptions(batch=BATCH, **given)
        assert words in error_text(partial(triax.measure_layers, layers, pair, options=options))


def test_the_program_of_the_cuts_page_prints_every_partition(capsys: pytest.CaptureFixture[str]) -> None:
    found: dict[str, Any] = {"__name__": "cut"}
    exec(programs((DOCS / "schedules.md").read_text())["cut.py"], found)
    rows = capsys.readouterr().out.splitlines()
    assert [row.partition(":")[0] for row in rows] == ["uniform", "parameters", "time", "memory", "auto"]
    assert found["engine"].module.boundaries == [0, 8] and len(found["costs"].layers) == 8
