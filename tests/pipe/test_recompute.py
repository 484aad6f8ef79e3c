"""Recomputation changes what is held and nothing else: every gradient is that without it, and the bytes are counted."""

from __future__ import annotations

import copy
import gc
import itertools
import logging
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import triax
from triax import Grid, LayerSpec, PipelineModule, TiedLayerSpec
from triax.base.errors import ConfigError
from triax.models.gpt import GPTBlock, GPTConfig, GPTLoss, gpt_layers
from triax.monitor.profiler.memory_meter import MemoryMeter
from triax.pipe.recompute.frame import State
from triax.pipe.recompute.kept_inputs import Inputs, KeptNest
from triax.pipe.recompute.recompute import Recompute, shares
from triax.pipe.schedules.registry import RECIPES
from triax.randomness.random import Dropout

from paper_formulas import gpt_activations, paper_activations
from pool import RankFailure

# ---------------------------------------------------------------------------- one process: any layer, bit by bit


class Noise(nn.Module):
    """Layer with random numbers of torch's generator and of nn.Dropout, which have no key."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(width, width), nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.linear(x)) * torch.rand(x.shape, dtype=x.dtype)


class Named(nn.Module):
    """(x, ids, words) -> {"x": ..., "more": (ids, words)}: a nest with integers and with what is no tensor."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, width))
        self.keyed = Dropout(0.2)

    def forward(self, nest: tuple[Tensor, Tensor, str]) -> dict[str, Any]:
        x, ids, words = nest
        assert words == "words" and not ids.is_floating_point()
        return {"x": self.keyed(torch.tanh(x * self.scale)), "more": (ids, words), "twice": x}


class Unnamed(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.rows = nn.Embedding(5, width)
        self.normal = nn.BatchNorm1d(width)  # a run changes its buffers

    def forward(self, nest: dict[str, Any]) -> Tensor:
        y: Tensor = self.normal(nest["x"] + self.rows(nest["more"][0]) + nest["twice"])
        return y


class Penalty(nn.Module):
    """A layer that differentiates something for itself on the way."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((width,), 0.7))

    def forward(self, x: Tensor) -> Tensor:
        energy = (torch.sin(x * self.weight) ** 2).sum()
        (slope,) = torch.autograd.grad(energy, self.weight, create_graph=True)
        return x * slope


def nested(x: Tensor) -> tuple[Tensor, Tensor, str]:
    return x, torch.arange(x.shape[0]) % 5, "words"


def frozen(layer: nn.Module) -> nn.Module:
    return layer.requires_grad_(False)


class Frozen(nn.Linear):
    def __init__(self, width: int) -> None:
        super().__init__(width, width)
        self.requires_grad_(False)


WIDTH = 6
ZOO: list[Any] = [
    LayerSpec(Frozen, WIDTH),
    TiedLayerSpec("tie", nn.Linear, WIDTH, WIDTH),
    LayerSpec(Noise, WIDTH),
    nested,
    LayerSpec(Named, WIDTH),
    LayerSpec(Unnamed, WIDTH),
    torch.nn.functional.gelu,
    LayerSpec(Penalty, WIDTH),
    TiedLayerSpec("tie", nn.Linear, WIDTH, WIDTH),
    LayerSpec(nn.GRU, WIDTH, WIDTH),
    lambda pair: pair[0],
]


def zoo(interval: int, granularity: str = "full", number: int | None = None) -> tuple[Any, ...]:
    """Outputs, gradients of input and parameters, buffers and the generator's state, of two steps."""
    model = PipelineModule(ZOO, grid=Grid(), seed=3, dtype=torch.float64, activation_checkpoint_interval=interval)
    if granularity != "full" or number:
        model.recompute = Recompute(
            model.grid,
            model.dropout_state,
            interval,
            number,
            granularity=granularity,  # type: ignore[arg-type]
        )
    torch.manual_seed(5)
    found = []
    for model.dropout_state.step in range(2):
        x = torch.randn(4, WIDTH, dtype=torch.float64, requires_grad=True)
        y = model(x)
        model.dropout_state.step = 99  # by the time of its backward, the model is elsewhere
        y.square().sum().backward()
        found += [y.detach(), x.grad, *(p.grad for p in model.parameters() if p.requires_grad), *model.buffers()]
    return (*found, torch.get_rng_state())


@pytest.mark.parametrize("granularity", ["full", "matmul"])
def test_every_kind_of_layer_bit_by_bit(granularity: str) -> None:
    wanted = zoo(0)
    for interval in (1, 2, 3, 4, 100):
        found = zoo(interval, granularity)
        assert len(found) == len(wanted) and all(map(torch.equal, found, wanted)), interval
    assert all(map(torch.equal, zoo(0, granularity, number=4), wanted))


class Force(nn.Module):
    """Differentiates its own products on the way, by torch.autograd.grad."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inward, self.outward = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        v = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(torch.tanh(self.inward(v)).square().sum(), v)
        return torch.relu(self.inward(x)) + self.outward(slope)


def trained(
    layer: type[nn.Module], batches: list[Tensor], section: dict[str, Any], schedule: str, device: str | None = None
) -> list[Tensor]:
    """Difference of parameters and buffers from plain torch's after two steps of two such layers."""
    model = PipelineModule(
        [LayerSpec(layer, WIDTH), LayerSpec(layer, WIDTH)],
        grid=Grid(),
        loss_fn=lambda y, _: y.square().mean(),
        dtype=torch.float64,
        seed=4,
        device=device,
    )
    config = {
        "train_micro_batch_size_per_gpu": len(batches[0]),
        "gradient_accumulation_steps": len(batches),
        "optimizer": {"type": "SGD", "params": {"lr": 1.0}},
        "pipeline": {"schedule": schedule},
        "activation_checkpointing": section,
    }
    engine, *_ = triax.initialize(model=model, config=config)
    start = [p.detach().clone() for p in model.parameters()]
    plain = copy.deepcopy(nn.Sequential(*model.layers.values())).train()
    for _ in range(2):
        engine.train_batch(iter([(batch, None) for batch in batches]))
    optimizer = torch.optim.SGD(plain.parameters(), lr=1.0)
    for _ in range(2):
        optimizer.zero_grad()
        for batch in batches:
            (plain(batch).square().mean() / len(batches)).backward()
        optimizer.step()
    assert not any(map(torch.equal, start, plain.parameters()))
    found, wanted = [[*m.parameters(), *m.buffers()] for m in (model, plain)]
    return [p.detach() - q.detach() for p, q in zip(found, wanted, strict=True)]


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb-h1"])
@pytest.mark.parametrize("section", [{}, {"interval": 1}, {"interval": 2}, {"granularity": "matmul"}])
def test_a_layer_that_differentiates_its_own_products(section: dict[str, Any], schedule: str) -> None:
    batches = list(torch.randn(4, 3, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(2)))
    for difference in trained(Force, batches, section, schedule):
        assert difference.abs().max() < 1e-10


class Spectral(nn.Module):
    """Layer whose weight depends on vectors that every run changes."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.utils.parametrizations.spectral_norm(nn.Linear(width, width))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


class Drifting(nn.Linear):
    """Changes a buffer so that its version counter does not tell, and keeps another, which nothing changes."""

    scale: Tensor
    table: Tensor

    def __init__(self, width: int) -> None:
        super().__init__(width, width)
        self.register_buffer("scale", torch.ones(width))
        self.register_buffer("table", torch.linspace(0.5, 1.5, width))

    def forward(self, x: Tensor) -> Tensor:
        self.scale.data.mul_(1 - 0.3 * x.detach().mean(0).tanh().abs())
        return torch.sin(super().forward(x)) * self.scale.clone() * self.table


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb-h1"])
@pytest.mark.parametrize("section", [{}, {"interval": 1}, {"interval": 2}, {"granularity": "matmul"}])
@pytest.mark.parametrize("layer", [Spectral, Drifting])
def test_buffers_are_what_the_first_run_saw(layer: type[nn.Module], section: dict[str, Any], schedule: str) -> None:
    batches = list(torch.randn(4, 3, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(2)))
    for difference in trained(layer, batches, section, schedule):
        assert difference.abs().max() < 1e-10


def test_buffers_of_a_model_that_was_built_on_the_meta_device() -> None:
    """The groups of ``number_checkpoints`` are made before the buffers have values: they were those of no layer."""
    batches = list(torch.randn(4, 3, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(2)))
    for difference in trained(Drifting, batches, {"number_checkpoints": 1}, "1f1b", "meta"):
        assert difference.abs().max() < 1e-10


def test_buffers_that_a_run_does_not_change_are_not_kept() -> None:
    model = PipelineModule([LayerSpec(Drifting, WIDTH)], grid=Grid(), activation_checkpoint_interval=1)
    ((_, layer),) = model.modules_of(0, 0, 1)
    assert isinstance(layer, Drifting)
    scale = layer.scale
    state = State(model.grid, model.dropout_state, True, (layer,))
    model(torch.randn(3, WIDTH))
    state.keep_changed()
    (kept,) = state._tensors
    place, today = scale.data_ptr(), scale.clone()
    assert kept[0] is scale and not torch.equal(kept[1], today)
    with state.restored():
        assert torch.equal(scale, kept[1])
        scale.zero_()
    assert scale.data_ptr() == place and torch.equal(scale, today) and kept[1].all()


class Counts(nn.Linear):
    """Counts how often it runs."""

    def __init__(self, width: int) -> None:
        super().__init__(width, width)
        self.record = SimpleNamespace(runs=0)  # an attribute itself would not count the second run

    def forward(self, x: Tensor) -> Tensor:
        self.record.runs += 1
        return super().forward(x).relu()


def counting(interval: int, **options: Any) -> PipelineModule:
    layers = [LayerSpec(Counts, 4) for _ in range(5)]
    return PipelineModule(layers, grid=Grid(), activation_checkpoint_interval=interval, **options)


def runs(model: PipelineModule) -> list[int]:
    layers: list[Any] = [*model.layers.values()]
    return [layer.record.runs for layer in layers]


def test_each_layer_runs_twice_and_once_where_there_is_no_backward() -> None:
    model = counting(2)
    x = torch.randn(3, 4, requires_grad=True)
    y = model(x)
    assert runs(model) == [1] * 5
    y.sum().backward(retain_graph=True)
    assert runs(model) == [2] * 5
    first = x.grad.clone()  # type: ignore[union-attr]
    y.sum().backward()  # what was computed again is kept as long as the graph is
    assert torch.equal(x.grad, 2 * first) and runs(model) == [2] * 5  # type: ignore[arg-type]
    with torch.no_grad():
        model(x)
    model.eval()
    assert runs(model) == [3] * 5


def test_groups() -> None:
    assert [g[:3] for g in counting(2).recompute.groups(counting(2), 0)] == [(0, 2, True), (2, 4, True), (4, 5, True)]
    assert [g[:3] for g in counting(0).recompute.groups(counting(0), 0)] == [(0, 5, False)]
    layers: list[Any] = [
        LayerSpec(nn.Linear, 2, 2),
        LayerSpec(Counts, 2),
        LayerSpec(Counts, 2),
        torch.relu,
        LayerSpec(Counts, 2),
    ]
    model = PipelineModule(layers, grid=Grid(), activation_checkpoint_interval=5, checkpointable_layers=["Counts"])
    cut = [g[:4] for g in model.recompute.groups(model, 0)]
    assert cut == [
        (0, 1, False, "layer 0"),
        (1, 3, True, "layers 1 to 2"),
        (3, 4, False, "layer 3"),
        (4, 5, True, "layer 4"),
    ]
    assert shares([6, 3], 4) == [3, 1] and shares([2, 2], 1) == [1, 1] and shares([2, 1], 9) == [2, 1]
    with pytest.raises(ValueError, match="interval=-1: give a whole number of at least 0"):
        counting(-1)


def test_nothing_is_left_behind() -> None:
    """Neither frames nor slots wait for Python's collector."""
    model = counting(2)
    model.recompute.inputs = Inputs(model.grid, slots=3)
    x = torch.randn(3, 4, requires_grad=True)
    model(x).sum().backward()
    gc.collect()
    gc.disable()
    try:
        y = model(x)
        arena = model.recompute.inputs._arena
        assert arena is not None and arena._buffer is not None
        buffer = arena._buffer()
        assert buffer is not None and len(buffer.free) == 0 and buffer.memory.numel() == 3 * 64
        del buffer
        outputs = weakref.ref(y.untyped_storage())
        y.sum().backward()
        del y
        assert arena._buffer() is None and outputs() is None
    finally:
        gc.enable()


def test_a_layer_that_does_something_else_is_refused() -> None:
    class Moody(nn.Linear):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            type(self).calls += 1
            return super().forward(x).exp() if self.calls == 1 else super().forward(x[:1])

    model = PipelineModule([Moody(3, 3)], grid=Grid(), activation_checkpoint_interval=1)
    with pytest.raises(RuntimeError, match=r"layer 0 did something else when computed again: of the .* number 0 was"):
        model(torch.randn(2, 3)).sum().backward()

    class Shorter(nn.Linear):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            type(self).calls += 1
            return super().forward(x).exp() if self.calls == 1 else super().forward(x)

    model = PipelineModule([Shorter(3, 3)], grid=Grid(), activation_checkpoint_interval=1)
    with pytest.raises(RuntimeError, match="and is missing"):
        model(torch.randn(2, 3)).sum().backward()


class Shifts(nn.Module):
    """Changes its inputs in place, integers too, and reads one of them again by its other name."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.linear = nn.Embedding(9, 3), nn.Linear(3, 3)

    def forward(self, nest: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        x, ids, again = nest
        x.mul_(2.0).add_(1.0)
        ids += ids.step  # type: ignore[attr-defined]  # an attribute of the test's
        y = self.linear(torch.tanh(again) + self.table(ids.clone()))
        return y, ids, y


@pytest.mark.parametrize("granularity", ["full", "matmul"])
def test_a_layer_may_change_its_input_in_place(granularity: Any) -> None:
    """torch refused it under recomputation, although a stage's boundary promises it."""

    def enters(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        ids = torch.tensor([0, 2])
        ids.step = 1  # type: ignore[attr-defined]
        return x, ids, x

    relu = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(3, 3))
    layers: list[Any] = [nn.Linear(3, 3), relu, enters, Shifts(), Shifts()]
    found = []
    for interval in (0, 1, 2):
        model = PipelineModule(layers, grid=Grid())
        model.recompute = Recompute(model.grid, model.dropout_state, interval, granularity=granularity)
        for _ in range(2):  # inputs that change are found out in the first run
            model.zero_grad()
            y, ids, _ = model(torch.linspace(-1, 1, 6).view(2, 3))
            assert ids.tolist() == [2, 4]
            y.square().sum().backward()
            found.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    for gradients in found:
        assert all(map(torch.equal, gradients, found[0])), granularity


def test_inputs_changed_in_place_that_cannot_be_restored_are_refused() -> None:
    class Moody(nn.Linear):
        changes = False

        def forward(self, x: Tensor | tuple[Tensor, Tensor]) -> Tensor:
            x = x if isinstance(x, Tensor) else x[0]
            return super().forward(x.relu_() if self.changes else x)

    def parts(x: Tensor) -> tuple[Tensor, Tensor]:
        return x[..., :3], x[..., 1:]

    def call(layers: list[Any]) -> None:
        model = PipelineModule(layers, grid=Grid(), activation_checkpoint_interval=1)
        model(torch.randn(2, 3)).sum().backward()
        layers[-1].changes = True
        model(torch.randn(2, 3))

    with pytest.raises(
        RuntimeError, match=r"layer 1 changes its input of shape \(2, 3\) in place, and did not in its f"
    ):
        call([nn.Linear(3, 3), Moody(3, 3)])
    moody = Moody(3, 3)
    moody.changes = True
    with pytest.raises(RuntimeError, match=r"layer 2 changes .* in place, which shares its memory with another input"):
        call([nn.Linear(3, 4), parts, moody])


def test_products_that_are_changed_in_place_are_not_kept() -> None:
    layers = [nn.Sequential(nn.Linear(3, 5), nn.ReLU(inplace=True), nn.Linear(5, 3), nn.Tanh())]
    x, found = torch.randn(2, 3), []
    for granularity in ("full", "matmul"):
        model = PipelineModule(layers, grid=Grid())
        model.recompute = Recompute(model.grid, model.dropout_state, 1, granularity=granularity)
        model.zero_grad()
        meter = MemoryMeter(lambda: 0)
        with meter.counting():
            y = model(x)
            found.append((meter.saved, y))
            y.square().sum().backward()
        found[-1] = (found[-1][0], [p.grad.clone() for p in model.parameters()])  # type: ignore
    assert all(map(torch.equal, found[0][1], found[1][1]))
    assert found[1][0] - found[0][0] == 2 * 3 * 4  # of the last product, not of the first


class Core(nn.Module):
    """A layer with a part that asks to be recomputed."""

    recompute: Any = None

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inward, self.outward = nn.Linear(width, 2 * width), nn.Linear(width, width)
        self.record = SimpleNamespace(runs=0)

    def core(self, a: Tensor, b: Tensor, sharp: float) -> Tensor:
        self.record.runs += 1
        weights = torch.softmax(a @ b.T * sharp, -1)
        return torch.nn.functional.dropout(weights, 0.2) @ b

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.inward(x).chunk(2, -1)
        y = self.core(a, b, sharp=0.5) if self.recompute is None else self.recompute(self.core, a, b, sharp=0.5)
        result: Tensor = x + self.outward(y)
        return result


def selective(granularity: str | None) -> tuple[list[Tensor], int, list[int]]:
    model = PipelineModule([LayerSpec(Core, 4) for _ in range(3)], grid=Grid(), loss_fn=lambda y, _: y.square().sum())
    section = {"granularity": granularity}
    config = {"train_micro_batch_size_per_gpu": 8, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    engine, *_ = triax.initialize(model=model, config={**config, "activation_checkpointing": section})
    engine.record_memory = True
    torch.manual_seed(2)
    x = torch.randn(8, 4)
    engine.train_batch(iter([(x, None)]))
    counts = runs(model)
    return list(engine.gather("gradients").values()), engine.memory_report()["held"]["activations"], counts


def test_selective_recomputes_what_asks_for_it() -> None:
    wanted, held, once = selective(None)
    found, less, twice = selective("selective")
    assert all(map(torch.equal, found, wanted)) and once == [1] * 3 and twice == [2] * 3
    # Each core saves 8 x 8 numbers three times over: the softmax, dropout's mask, and what dropout returns.
    assert held - less == 3 * 3 * 64 * 4
    with pytest.raises(ConfigError, match="no module of the model has a class attribute recompute"):
        configured({"granularity": "selective"})


# ------------------------------------------------------------------------------------------ the configuration


def configured(section: dict[str, Any], interval: int = 0, grid: Grid | None = None, layers: int = 4) -> Any:
    model = PipelineModule(
        [LayerSpec(nn.Linear, 4, 4) for _ in range(layers)],
        grid=grid or Grid(),
        loss_fn=lambda y, _: y.square().sum(),
        activation_checkpoint_interval=interval,
    )
    config = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    engine, *_ = triax.initialize(model=model, config={**config, "activation_checkpointing": section})
    return engine


@pytest.mark.parametrize(
    ("section", "interval", "message"),
    [
        ({"contiguous_memory_optimization": True}, 0, "set partition_activations to true, and give number_checkpoints"),
        ({"interval": 2, "number_checkpoints": 2}, 0, "interval 2 and number_checkpoints 2 both set"),
        (
            {"number_checkpoints": 2},
            3,
            "number_checkpoints 2 was given, but the model has activation_checkpoint_interval=3",
        ),
        ({"enabled": False}, 3, "enabled false was given, but the model has activation_checkpoint_interval=3"),
        ({"enabled": True, "interval": 0}, 0, "enabled is true, but interval 0 recomputes nothing"),
        ({"interval": 2}, 3, "interval 2 was given, but the model has activation_checkpoint_interval=3"),
        ({"granularity": "selective"}, 3, "granularity selective was given, but the model has"),
        ({"granularity": "selective", "interval": 1}, 0, "leave out interval and number_checkpoints"),
        (
            {"interval": 1, "checkpointable_layers": ["GPTBlock"]},
            0,
            "no layer of the model is a GPTBlock; there are Linear",
        ),
        ({"intervall": 1}, 0, "did you mean 'interval'"),
    ],
)
def test_contradictions(section: dict[str, Any], interval: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        configured(section, interval)


@pytest.mark.parametrize(
    ("section", "note"),
    [
        (
            {"cpu_checkpointing": True, "interval": 0, "profile": True},
            "cpu_checkpointing, profile: nothing is recomputed; set interval",
        ),
        ({"interval": 1, "partition_activations": True}, "the tensor axis has one rank"),
        ({"interval": 1, "cpu_checkpointing": True}, "the model is in the host's memory"),
        ({"number_checkpoints": 9}, "a rank with 1 stages of 4 layers has at least 1 groups and at most 4"),
    ],
)
def test_what_changes_nothing_is_said(caplog: pytest.LogCaptureFixture, section: dict[str, Any], note: str) -> None:
    with caplog.at_level(logging.WARNING, "triax"):
        configured(section)
    assert note in caplog.text


def test_which_layers_each_key_recomputes() -> None:
    def groups(section: dict[str, Any], interval: int = 0) -> list[int]:
        module = configured(section, interval).module
        return [group.stop - group.start for group in module.recompute.groups(module, 0) if group.recomputed]

    assert groups({}) == [] and groups({}, 3) == [3, 1] and groups({"interval": 3}) == [3, 1]
    assert groups({"interval": 0}) == [] and groups({"number_checkpoints": 3}) == [1, 1, 2]
    assert groups({"granularity": "full"}) == groups({"granularity": "matmul"}) == [1] * 4
    for asks in ("enabled", "partition_activations", "cpu_checkpointing"):
        assert groups({asks: True}) == [1] * 4 and groups({asks: True}, 3) == groups({asks: True, "interval": 3})
        assert groups({asks: True, "number_checkpoints": 2}) == [2, 2]
    assert groups({"enabled": False, "interval": 1, "cpu_checkpointing": True}) == []
    assert groups({"granularity": "matmul", "interval": 2}) == groups({"granularity": "matmul"}, 2) == [2, 2]


def test_the_profile(caplog: pytest.LogCaptureFixture) -> None:
    engine = configured({"interval": 1, "profile": True, "synchronize_checkpoint_boundary": True})
    with caplog.at_level(logging.WARNING, "triax"):
        engine.train_batch(iter([(torch.randn(2, 4), None)]))
    assert "4 recomputations took" in caplog.text and "ms of this step" in caplog.text


# ----------------------------------------------------------------------------------------- every grid and schedule

SAMPLES, LENGTH, VOCABULARY = 8, 6, 37
Cell = tuple[str, int, int, bool, bool, dict[str, Any]]  # schedule, chunks, ZeRO, tied, sequence parallel, recompute


def train(grid: tuple[int, int, int], cells: list[Cell], steps: int = 1) -> list[tuple[float, dict[str, Tensor]]]:
    """Return for each cell the last step's loss and gradients: a GPT with dropout 0.1 in float64."""
    here, results = Grid(*grid, timeout=60), []
    text = torch.randint(VOCABULARY, (steps, SAMPLES, LENGTH + 1), generator=torch.Generator().manual_seed(3))
    for schedule, chunks, stage, tied, shards, section in cells:
        shape = GPTConfig(
            vocab_size=VOCABULARY,
            max_position_embeddings=LENGTH,
            hidden_size=16,
            num_hidden_layers=4,
            num_attention_heads=4,
            dropout=0.1,
            tie_word_embeddings=tied,
        )
        model = PipelineModule(
            gpt_layers(shape, sequence_parallel=shards),
            grid=here,
            loss_fn=GPTLoss(here, vocab_size=VOCABULARY),
            seed=7,
            dtype=torch.float64,
            chunks=chunks,
        )
        config = {
            "train_batch_size": SAMPLES,
            "train_micro_batch_size_per_gpu": 1,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
            "zero_optimization": {"stage": stage, "reduce_bucket_size": 2000},
            "pipeline": {"schedule": schedule},
            "activation_checkpointing": section,
            "seed": 11,
        }
        engine, *_ = triax.initialize(model=model, config=config)
        share = SAMPLES // here.data.size
        mine = slice(here.data.rank * share, (here.data.rank + 1) * share)
        data = iter([(s[None, :-1], s[None, 1:]) for batch in text for s in batch[mine]])
        loss = [engine.train_batch(data).item() for _ in range(steps)][-1]
        gradients = engine.gather("gradients")
        results.append((loss, gradients if here.rank == 0 else {}))
    return results


SECTIONS: list[dict[str, Any]] = [
    {"interval": 1},
    {"granularity": "matmul", "interval": 2},
    {"granularity": "selective"},
    {"number_checkpoints": 3, "partition_activations": True, "contiguous_memory_optimization": True},
    {"interval": 3, "partition_activations": True, "cpu_checkpointing": True},
    {"interval": 100},
]


def check(ranks: Any, grid: tuple[int, int, int], cells: list[Cell], steps: int = 1) -> None:
    """Equal to one process without recomputation, to 1e-10."""
    plain: dict[bool, Cell] = {tied: ("gpipe", 1, 0, tied, False, {}) for tied in {cell[3] for cell in cells}}
    wanted = {tied: train((1, 1, 1), [cell], steps)[0] for tied, cell in plain.items()}
    found = ranks(grid[0] * grid[1] * grid[2], train, grid, cells, steps, timeout=240)
    for i, cell in enumerate(cells):
        loss, gradients = wanted[cell[3]]
        assert [rank[i][0] for rank in found] == pytest.approx([loss] * len(found), rel=1e-10, abs=0), cell
        assert found[0][i][1].keys() == gradients.keys()
        for name, gradient in gradients.items():
            message = f"{cell} {name}: {{}}".format
            torch.testing.assert_close(found[0][i][1][name], gradient, rtol=1e-10, atol=1e-12, msg=message)


def test_gradients_on_one_process(ranks: Any) -> None:
    turns = zip(SECTIONS, itertools.cycle((("1f1b", 1, 0), ("zb-h1", 1, 3), ("zb-v", 2, 1))), strict=False)
    cells = [(*schedule, i % 2 == 0, False, section) for i, (section, schedule) in enumerate(turns)]
    check(ranks, (1, 1, 1), cells)


@pytest.mark.parametrize("grid", [(2, 2, 1), (2, 1, 2)], ids=lambda g: "x".join(map(str, g)))
def test_gradients_on_a_grid(ranks: Any, grid: tuple[int, int, int]) -> None:
    """A part of the sweep below: each section once, with schedules, stages, ties and shards in turn."""
    turns = zip(
        SECTIONS,
        itertools.cycle([("1f1b", 1), ("zb-v", 2), ("zb-h1", 1), ("gpipe", 1), ("interleaved", 2)]),
        itertools.cycle([3, 1, 3, 2]),
        strict=False,
    )
    cells = [
        (*schedule, stage, i % 2 == 0, grid[2] == 2 and i % 3 != 0, section)
        for i, (section, schedule, stage) in enumerate(turns)
    ]
    # What is divided over the tensor axis on a grid that has one, and the others on a grid of replicas.
    check(ranks, grid, [cell for cell in cells if (grid[2] == 2) == ("partition_activations" in cell[-1])])


@pytest.mark.exhaustive
@pytest.mark.parametrize("section", SECTIONS, ids=lambda s: "-".join(map(str, s.values())))
@pytest.mark.parametrize("grid", [(2, 2, 1), (2, 2, 2), (4, 1, 2), (1, 2, 4)], ids=lambda g: "x".join(map(str, g)))
def test_gradients_everywhere(ranks: Any, grid: tuple[int, int, int], section: dict[str, Any]) -> None:
    names = [
        (name, chunks)
        for name, recipe in RECIPES.items()
        for chunks in (1, 2)
        if recipe.accepts(chunks) and name != "forward" and grid[0] * chunks <= 8
    ]
    for schedule in names:
        cells = [(*schedule, stage, stage % 2 == 0, False, section) for stage in range(4)]
        if grid[2] == 2:
            cells += [(*schedule, stage, True, True, section) for stage in (0, 3)]
        check(ranks, grid, cells, steps=2)


class Sometimes(nn.Linear):
    """Drops itself out on about every second sample: another replica may have its gradient, or a whole group's."""

    def __init__(self, place: int) -> None:
        super().__init__(64, 64, bias=False)
        self.place = place

    def forward(self, x: Tensor) -> Tensor:
        return x if int(x[0, self.place].item() * 1000) % 2 else x + super().forward(x)


def stage_three(replicas: int, section: dict[str, Any], sometimes: bool, **zero: Any) -> tuple[Any, Any]:
    grid = Grid(data=replicas, timeout=10)
    plain = LayerSpec(nn.Linear, 64, 64, bias=False)
    layers = [plain, *(LayerSpec(Sometimes, i) if sometimes else plain for i in range(5))]
    model = PipelineModule(layers, grid=grid, loss_fn=lambda y, _: y.square().sum(), dtype=torch.float64)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 8,
        "optimizer": {"type": "SGD", "params": {"lr": 0.0}},
        "zero_optimization": {"stage": 3, **zero},
        "activation_checkpointing": section,
    }
    engine, *_ = triax.initialize(model=model, config=config)
    generator = torch.Generator().manual_seed(1)
    data = torch.randn(16, 1, 64, generator=generator, dtype=torch.float64)
    for _ in range(2):
        engine.train_batch(iter([(sample, None) for sample in data[grid.data.rank * 8 :][:8]]))
    return engine.traffic_report()["sent"], engine.gather("gradients")


def test_stage_three_gathers_no_more_than_without(ranks: Any) -> None:
    """The weights that a second run gathers stay for the backward pass that follows it."""
    plain = ranks(2, stage_three, 2, {}, False)
    for section in ({"interval": 1}, {"interval": 4}):
        for (sent, gradients), (wanted, same) in zip(ranks(2, stage_three, 2, section, False), plain, strict=True):
            # The group's first layers are whole until the next forward, which needs them too: never more.
            assert sent["data"]["all_gather"]["bytes"] <= wanted["data"]["all_gather"]["bytes"]
            assert all(torch.equal(gradients[name], same[name]) for name in same)


def test_replicas_that_differ_meet_in_the_same_gathers(ranks: Any) -> None:
    wanted = ranks(2, stage_three, 2, {}, True)[0][1]
    assert all(gradient.any() for gradient in wanted.values())
    zeros: list[dict[str, Any]] = [{"overlap_comm": False}, {"stage3_max_live_parameters": 5000}]
    for interval, zero in itertools.product((2, 6), zeros):
        found = ranks(2, stage_three, 2, {"interval": interval}, True, **zero, timeout=40)[0][1]
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)


# ------------------------------------------------------------------------------------- what is kept, in slices


def sliced(size: int, section: dict[str, Any]) -> tuple[int, bool, list[Any]]:
    """Bytes kept of inputs; whether each input came back bit by bit, in its order of memory; what was kept whole."""
    grid = Grid(tensor=size, timeout=30)
    inputs = Inputs(grid, section.get("partition", False), host=True, slots=section.get("slots", 0))
    generator = torch.Generator().manual_seed(1)
    same = torch.randn(3, 5, 7, generator=generator)
    own = torch.randn(4, 4, generator=torch.Generator().manual_seed(grid.rank))
    tensors = [same, same.transpose(0, 2), same[:, ::2, 1:], own, torch.zeros(4, 4), same.bfloat16(), same[0, 0, 0]]
    nest: dict[str, Any] = {
        "float": [t.requires_grad_() if t.is_leaf else t for t in tensors],
        "ids": torch.arange(9),
        "word": "word",
    }
    nest["float"][1:3] = [t.detach().requires_grad_() for t in nest["float"][1:3]]
    right = True
    for _ in range(2):
        kept = KeptNest(inputs, "all", nest)
        back = kept.restore()
        right &= back["word"] == "word" and back["ids"] is nest["ids"]
        for a, b in zip(nest["float"], back["float"], strict=True):
            right &= torch.equal(a, b) and a.dtype == b.dtype and b.is_leaf and b.requires_grad
            right &= not a.is_contiguous() or b.is_contiguous()
        right &= back["float"][1].stride() == nest["float"][1].stride()
    numbers = [tensor.untyped_storage().nbytes() for tensor in kept._saver.grad_fn.saved_tensors]  # type: ignore
    return sum(numbers), right, [key for key, replicated in inputs._replicated.items() if not replicated]


@pytest.mark.parametrize("size", [2, 3, 4])
def test_slices_come_back_whole(ranks: Any, size: int) -> None:
    elements = [105, 105, 54]
    for kept, right, own in ranks(size, sliced, size, {"partition": True}):
        slices = sum(4 * -(-n // size) for n in elements) + 2 * -(-105 // size)
        # Each rank's own, the constant one and the number with one element are kept whole, as are integers.
        assert right and kept == slices + 64 + 64 + 105 * 4 + 9 * 8
        assert len(own) == 1
    for _, right, _ in ranks(size, sliced, size, {"partition": True, "slots": 7}):
        assert right


def test_a_buffer_without_a_tensor_axis() -> None:
    assert sliced(1, {"slots": 3})[1]
    assert sliced(1, {})[1]


def differ(section: dict[str, Any]) -> None:
    class Moody(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            return y.exp() if torch.is_grad_enabled() and x.grad_fn is not None else y

    grid = Grid(tensor=2, timeout=20)
    model = PipelineModule([nn.Linear(3, 3), Moody(3, 3)], grid=grid, loss_fn=lambda y, _: y.sum())
    config = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.0}}}
    engine, *_ = triax.initialize(model=model, config={**config, "activation_checkpointing": section})
    engine.train_batch(iter([(torch.ones(2, 3), None)]))


def test_a_failure_names_the_rank_and_the_layers(ranks: Any) -> None:
    with pytest.raises(RankFailure, match="failed at 0B0: RuntimeError: layer 1 did something else"):
        ranks(2, differ, {"interval": 1})


# ---------------------------------------------------------------------------------------- counted, and the formulas


def block_bytes(tensor: int, cells: list[dict[str, Any]]) -> list[int]:
    """Bytes that one block holds from its forward to its backward, counted."""
    grid, found = Grid(tensor=tensor, timeout=30), []
    for cell in cells:
        shape = GPTConfig(
            vocab_size=9,
            max_position_embeddings=8,
            hidden_size=32,
            num_hidden_layers=1,
            num_attention_heads=4,
            dropout=0.1 * cell["dropout"],
        )
        dtype = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16}[cell["precision"]]
        layers = [LayerSpec(GPTBlock, shape, sequence_parallel=cell["sequence_parallel"])]
        model = PipelineModule(layers, grid=grid, dtype=dtype)
        if cell["recompute"] != "none":
            interval = int(cell["recompute"] != "selective")
            model.recompute = Recompute(grid, model.dropout_state, interval, granularity=cell["recompute"])
            model.recompute.inputs = Inputs(grid, partition=cell["partitioned"])
            model.recompute.install(model)
        length = 8 // tensor if cell["sequence_parallel"] else 8
        values = torch.randn(2, length, 32, dtype=dtype, generator=torch.Generator().manual_seed(0))
        meter = MemoryMeter(lambda: 0)
        with meter.counting():
            y = model((values * 1).requires_grad_())
            found.append(meter.saved)
            y.sum().backward()
            del y
        assert meter.saved == 0
    return found


@pytest.mark.parametrize(
    ("tensor", "precisions"),
    [
        (1, ("fp64", "fp32", "bf16")),
        (4, ("bf16",)),
        *(pytest.param(size, ("fp64", "fp32", "bf16"), marks=pytest.mark.exhaustive) for size in (2, 4)),
    ],
)
def test_counted_activations_are_the_formulas(ranks: Any, tensor: int, precisions: tuple[str, ...]) -> None:
    cells: list[dict[str, Any]] = [
        {"recompute": r, "sequence_parallel": s, "partitioned": p, "dropout": d, "precision": e}
        for r, s, p, d, e in itertools.product(
            ("none", "selective", "matmul", "full"),
            (False, True),
            (False, True),
            (False, True),
            precisions,
        )
        if not (s and (p or tensor == 1)) and not (p and r in ("none", "selective"))
    ]
    wanted = [gpt_activations(2, 8, 32, 4, tensor, **cell) for cell in cells]
    for counted in ranks(tensor, block_bytes, tensor, cells):
        assert dict(zip(map(str, cells), counted, strict=True)) == dict(zip(map(str, cells), wanted, strict=True))


def test_the_papers_table() -> None:
    """Korthikanti et al. 2022, table 2, and what is ours and what theirs of it."""
    shape, sbh = (1, 2048, 12288, 96), 2048 * 12288
    assert paper_activations(*shape) == sbh * (34 + 5 * 96 * 2048 / 12288)
    assert paper_activations(*shape, 8) == sbh * (10 + 24 / 8 + 5 * 96 * 2048 / 12288 / 8)
    assert paper_activations(*shape, 8, True) == sbh * (34 + 5 * 96 * 2048 / 12288) / 8
    assert paper_activations(*shape, 8, False, "selective") == sbh * (10 + 24 / 8)
    assert paper_activations(*shape, 8, True, "selective") == sbh * 34 / 8
    assert paper_activations(*shape, 8, True, "full") == 2 * sbh
    for tensor, parallel in ((1, False), (8, False), (8, True)):
        ours = gpt_activations(*shape, tensor, parallel, precision="bf16")
        apart = tensor if parallel else 1
        beside = 4 * 2048 * 96 / tensor + 8 * 2048 / apart  # the softmax's sums, the norms' numbers
        assert ours - beside == paper_activations(*shape, tensor, parallel, "selective")
    with pytest.raises(ValueError, match="one of none, selective, matmul, full"):
        gpt_activations(1, 1, 1, 1, recompute="some")


def report(section: dict[str, Any], schedule: str, shards: bool) -> list[int]:
    """Activations of each step of an engine's, in bytes, on each rank."""
    grid = Grid(pipe=2, tensor=2, timeout=30)
    shape = GPTConfig(
        vocab_size=16, max_position_embeddings=8, hidden_size=32, num_hidden_layers=4, num_attention_heads=4
    )
    blocks = [LayerSpec(GPTBlock, shape, sequence_parallel=shards) for _ in range(4)]
    first = nn.Linear(32, 32)  # a rank's first block has an input that wants a gradient
    model = PipelineModule([first, *blocks], grid=grid, partition=[0, 3, 5], loss_fn=lambda y, _: y.sum())
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 4,
        "optimizer": {"type": "SGD", "params": {"lr": 0.0}},
        "pipeline": {"schedule": schedule},
        "activation_checkpointing": {**section, "checkpointable_layers": ["GPTBlock"]},
    }
    engine, *_ = triax.initialize(model=model, config=config)
    length = 4 if shards else 8
    generator, held = torch.Generator().manual_seed(grid.tensor.rank if shards else 0), []
    batches = [(torch.randn(2, length, 32, generator=generator), torch.zeros(1)) for _ in range(4)]
    for engine.record_memory in (True, True):
        engine.train_batch(iter(batches))
        held.append(engine.memory_report()["held"]["activations"])
    return held


@pytest.mark.parametrize(
    ("schedule", "microbatches"), [pytest.param("gpipe", (4, 4), marks=pytest.mark.exhaustive), ("1f1b", (2, 1))]
)
def test_an_engines_count(ranks: Any, schedule: str, microbatches: tuple[int, int]) -> None:
    """Two blocks on each of two stages, whose activations are held for as many microbatches as the schedule has."""
    cases: list[tuple[dict[str, Any], bool, dict[str, Any], int]] = [
        ({}, False, {"recompute": "none"}, 2),
        ({"interval": 1}, False, {"recompute": "full"}, 2),
        ({"interval": 2}, True, {"recompute": "full", "sequence_parallel": True}, 1),
        (
            {"number_checkpoints": 2, "partition_activations": True, "contiguous_memory_optimization": True},
            False,
            {"recompute": "full", "partitioned": True},
            2,
        ),
    ]
    for section, shards, options, kept in cases:
        block = gpt_activations(2, 8, 32, 4, 2, dropout=False, **options)
        for rank, found in enumerate(ranks(4, report, section, schedule, shards)):
            assert found == [microbatches[rank // 2] * kept * block] * 2, (section, rank)


class Remembers(nn.Module):
    """A layer that assigns a buffer anew in each run, and counts its runs in another."""

    memory: Tensor
    runs: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.register_buffer("memory", torch.zeros(4))
        self.register_buffer("runs", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(torch.tanh(self.linear(x) + self.memory))
        self.memory = 0.5 * self.memory + y.detach().mean(0)
        self.runs += 1
        return y


class Attributes(nn.Module):
    """A layer that keeps what it remembers in plain attributes: numbers, tensors, lists and dicts."""

    first: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.memory, self.runs = nn.Linear(4, 4), torch.zeros(4, dtype=torch.float64), 0
        self.sums: dict[str, Tensor] = {}
        self.past: list[Tensor] = []
        self.inner = nn.ModuleDict({"inside": Scaled()})

    def forward(self, x: Tensor) -> Tensor:
        self.runs += 1
        if not hasattr(self, "first"):
            self.first = x.detach().mean(0)
        y: Tensor = self.inner["inside"](torch.tanh(self.linear(x) * self.runs + self.memory + self.first))
        y = y + sum(self.past, 0.0 * y) + self.sums.get("y", 0.0 * y)
        self.past.append(0.1 * y.detach().mean(0))
        self.sums["y"] = y.detach().sum(0)
        self.memory.mul_(0.5).add_(y.detach().mean(0))
        return y


class Scaled(nn.Module):
    scale: Any = 1.0

    def forward(self, x: Tensor) -> Tensor:
        y = x * self.scale
        self.scale = 0.5 * self.scale + y.detach().abs().mean()
        return y


@pytest.mark.parametrize("layer", [Remembers, Attributes])
def test_what_a_layer_remembers_advances_once(layer: type[nn.Module]) -> None:
    """The second run began with the values of the first run's end, and its own were kept: they advanced twice."""
    found = []
    for recomputes in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(layer(), layer()).double()
        config = {
            "train_micro_batch_size_per_gpu": 8,
            "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
            "activation_checkpointing": {"enabled": recomputes},
        }
        engine = triax.initialize(model=model, config=config, grid=triax.Grid())[0]
        for step in range(3):
            x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
            engine.backward(engine(x).pow(3).mean())
            engine.step()
        found.append({name: value.clone() for name, value in model.state_dict().items()})
    last: Any = model[1]
    assert int(last.runs) == 3
    torch.testing.assert_close(found[1], found[0], rtol=1e-10, atol=1e-13)
