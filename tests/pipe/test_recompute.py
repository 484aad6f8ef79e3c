"""Recomputation changes what is held and nothing else: every gradient is that without it, and the bytes are counted."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import triax
from triax import Grid, LayerSpec, PipelineModule, TiedLayerSpec
from triax.engine.monitor.profiler.memory_meter import MemoryMeter
from triax.grid.randomness.random import Dropout, DropoutState
from triax.pipe.recompute.frame import State
from triax.pipe.recompute.recompute import Recompute

from support.recompute_layers import counting, runs
from support.training import small_config


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
def test_recomputed_layers_of_each_kind_equal_plain_ones_bitwise(granularity: str) -> None:
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
    config = small_config(
        lr=1.0, micro=len(batches[0]), accumulation=len(batches), schedule=schedule, activation_checkpointing=section
    )
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
def test_recomputed_layers_may_differentiate_in_their_forward_pass(section: dict[str, Any], schedule: str) -> None:
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
def test_recomputation_sees_the_buffers_of_the_first_run(
    layer: type[nn.Module], section: dict[str, Any], schedule: str
) -> None:
    batches = list(torch.randn(4, 3, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(2)))
    for difference in trained(layer, batches, section, schedule):
        assert difference.abs().max() < 1e-10


def test_recomputation_keeps_buffers_of_meta_device_models() -> None:
    """The groups of ``number_checkpoints`` are made before the buffers have values."""
    batches = list(torch.randn(4, 3, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(2)))
    for difference in trained(Drifting, batches, {"number_checkpoints": 1}, "1f1b", "meta"):
        assert difference.abs().max() < 1e-10


def test_recomputation_keeps_only_buffers_that_change() -> None:
    """Of ``scale`` and ``table``, the layer changes the first: the second run finds its value of before the first."""
    layer, grid = Drifting(WIDTH), Grid()
    scale, before = layer.scale, layer.scale.clone()
    state = State(grid, DropoutState(0), True, (layer,))
    layer(torch.randn(3, WIDTH))
    state.keep_changed()
    ((changed, kept),) = state._tensors
    assert changed is scale and torch.equal(kept, before)
    place, after = scale.data_ptr(), scale.clone()
    assert not torch.equal(after, before)
    with state.restored():
        assert torch.equal(scale, before)
        scale.zero_()
    assert scale.data_ptr() == place and torch.equal(scale, after) and torch.equal(kept, before)


def test_recomputed_layers_run_twice_and_once_without_backward() -> None:
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
def test_a_recomputed_layer_may_change_its_input_in_place(granularity: Any) -> None:
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


def test_recomputation_drops_products_that_change_in_place() -> None:
    """Granularity ``matmul`` keeps the second product of a layer, not the first, which ReLU overwrites."""
    layers = [nn.Sequential(nn.Linear(3, 5), nn.ReLU(inplace=True), nn.Linear(5, 3), nn.Tanh())]
    x, found = torch.randn(2, 3), []
    wanted = torch.autograd.grad(layers[0](x).square().sum(), [*layers[0].parameters()])
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
    for _, gradients in found:
        torch.testing.assert_close(gradients, [*wanted], rtol=1e-6, atol=1e-7)
    assert all(map(torch.equal, found[0][1], found[1][1]))
    assert found[1][0] - found[0][0] == 2 * 3 * 4  # bytes of the second product, (2, 3) in fp32


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
def test_recomputation_advances_the_state_of_a_layer_once(layer: type[nn.Module]) -> None:
    """The second run begins with the state before the first run, and its own changes are dropped."""
    found = []
    for recomputes in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(layer(), layer()).double()
        config = small_config(micro=8, activation_checkpointing={"enabled": recomputes})
        engine = triax.initialize(model=model, config=config, grid=triax.Grid())[0]
        for step in range(3):
            x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
            engine.backward(engine(x).pow(3).mean())
            engine.step()
        found.append({name: value.clone() for name, value in model.state_dict().items()})
    last: Any = model[1]
    assert int(last.runs) == 3
    torch.testing.assert_close(found[1], found[0], rtol=1e-10, atol=1e-13)
