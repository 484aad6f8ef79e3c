"""Mixtures of experts under the engines: one division for all losses, loads and biases over steps, checkpoints."""

from __future__ import annotations

import itertools
import json
import logging
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import triax
from triax.base.deferred import Deferred
from triax.engine.auxiliary_steps import AuxiliarySteps
from triax.engine.monitor.report.write import write_report
from triax.grid import Grid
from triax.grid.auxiliary import AuxiliaryLosses
from triax.grid.comm.regions import gather_split
from triax.grid.layout import Layout
from triax.grid.randomness.random import Normal, sharded_parameter
from triax.grid.ranges import split
from triax.moe import GEGLU, GELU, Activation, MoE, ReLU, SwiGLU
from triax.moe.grouped import Groups, grouped_linear, grouped_mlp
from triax.pipe.backward import SplitBackward, deferring
from triax.pipe.spec import LayerSpec

from support.moe_reference import reference
from support.rank_checks import float64_by_default
from support.training import small_config

D, E, K, W, ROWS, T = 6, 4, 2, 4, 8, 4
OPTIONS: dict[str, Any] = {"z_loss": 0.01, "balance_coefficient": 0.1, "bias_rate": 0.05}
PLAIN = {"pipe": 1, "data": 1, "context": 1, "tensor": 1, "expert": 1}
CASES: dict[int, list[dict[str, Any]]] = {
    1: [
        {"accumulation": 4},
        {"accumulation": 1, "recompute": 1, "granularity": "matmul"},
        {"accumulation": 2, "stage": 3},
    ],
    2: [
        {"data": 2, "expert": 2, "stage": 1, "recompute": 1},
        {"context": 2, "expert": 2, "stage": 3},
        {"pipe": 2, "schedule": "zb-v", "accumulation": 4},
        {"tensor": 2},
        {"tensor": 2, "sequence_parallel": True, "stage": 2},
    ],
    4: [
        {"pipe": 2, "data": 2, "expert": 2, "schedule": "zb-v", "accumulation": 4},
        {"pipe": 2, "context": 2, "expert": 2, "stage": 2, "recompute": 1},
        {"data": 2, "context": 2, "expert": 4, "stage": 3},
        {"data": 2, "tensor": 2, "expert": 2, "sequence_parallel": True, "stage": 1},
    ],
}


class Part(nn.Module):
    """This rank's part of the sequence, over context and then, if asked, over tensor."""

    def __init__(self, sequence_parallel: bool, *, grid: Grid) -> None:
        super().__init__()
        self.axes = [grid.context, grid.tensor] if sequence_parallel else [grid.context]
        self.weight = sharded_parameter(Layout((D,), partial=sequence_parallel), Normal(1.0), 0, 1)

    def forward(self, x: Tensor) -> Tensor:
        for axis in self.axes:
            start, stop = split(x.shape[1], axis.size, axis.rank)
            x = x[:, start:stop]
        return x * self.weight


class Dense(nn.Module):
    """Layer whose tokens may be spread over the tensor axis."""

    def __init__(self, sequence_parallel: bool) -> None:
        super().__init__()
        self.weight = sharded_parameter(Layout((D, D), partial=sequence_parallel), Normal(0.4), 0, 1)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight).tanh()


class Block(nn.Module):
    """x + experts(x)."""

    def __init__(self, options: dict[str, Any], sequence_parallel: bool = False, *, grid: Grid) -> None:
        super().__init__()
        place: dict[str, Any] = {"sequence_parallel": sequence_parallel, "shard_tensor": not sequence_parallel}
        self.moe = MoE(D, E, K, grid=grid, width=W, init=Normal(0.4), **place, **OPTIONS, **options)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.moe(x)


class Whole(nn.Module):
    """The tokens of the tensor axis."""

    def __init__(self, sequence_parallel: bool, *, grid: Grid) -> None:
        super().__init__()
        self.axis = grid.tensor if sequence_parallel else None

    def forward(self, x: Tensor) -> Tensor:
        return x if self.axis is None else gather_split(x, self.axis, dim=1)


class Loss:
    """Sum of squares of the tokens that count."""

    def __init__(self, grid: Grid | None = None) -> None:
        self.axis = None if grid is None else grid.context

    def part(self, labels: Tensor) -> Tensor:
        start, stop = (0, T) if self.axis is None else split(T, self.axis.size, self.axis.rank)
        return labels[:, start:stop]

    def __call__(self, y: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        return (y.square().sum(-1) * self.part(labels)).sum(), self.weight(labels)

    def weight(self, labels: Tensor) -> Tensor:
        return self.part(labels).sum()


def layers(options: dict[str, Any], sequence_parallel: bool = False) -> list[LayerSpec]:
    return [
        LayerSpec(Part, sequence_parallel),
        LayerSpec(Block, options, sequence_parallel),
        LayerSpec(Dense, sequence_parallel),
        LayerSpec(Block, options, sequence_parallel),
        LayerSpec(Whole, sequence_parallel),
    ]


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(ROWS, T, D, generator=generator, dtype=torch.float64)
    return x, (torch.rand(ROWS, T, generator=generator, dtype=torch.float64) < 0.7).double()


@float64_by_default()
def train(
    case: dict[str, Any], options: dict[str, Any], folder: str = "", load: bool = False, steps: int = 2
) -> dict[str, Any]:
    grid = Grid(**(PLAIN | {axis: case[axis] for axis in PLAIN if axis in case}))
    schedule, accumulation = case.get("schedule", "1f1b"), case.get("accumulation", 2)
    model = triax.PipelineModule(
        layers(options, case.get("sequence_parallel", False)),
        grid=grid,
        loss_fn=Loss(grid),
        seed=3,
        chunks=2 if schedule == "zb-v" else 1,
        activation_checkpoint_interval=case.get("recompute", 0),
    )
    config = {
        "train_batch_size": ROWS,
        "gradient_accumulation_steps": accumulation,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": case.get("stage", 0), "reduce_bucket_size": 40},
        "pipeline": {"schedule": schedule},
        "activation_checkpointing": {"granularity": case.get("granularity")},
    }
    engine, *_ = triax.initialize(model=model, config=config)
    if load:
        assert engine.load_checkpoint(folder)[0] is not None
    found: dict[str, Any] = {"losses": [], "auxiliary": [], "loads": [], "gradients": []}
    for step in range(steps):
        x, labels = (
            part.unflatten(0, (accumulation, grid.data.size, -1))[:, grid.data.rank] for part in batch(step + 2 * load)
        )
        found["losses"].append(float(engine.train_batch(iter(list(zip(x, labels, strict=True))))))
        found["auxiliary"].append(engine.auxiliary_losses())
        found["loads"].append(engine.expert_loads())
        found["gradients"].append(engine.gather("gradients"))
    if folder and not load:
        engine.save_checkpoint(folder)
    found["weights"] = engine.gather()
    found["buffers"] = {name: buffer.clone() for name, buffer in model.named_buffers()}
    return found


def run(cells: list[tuple[dict[str, Any], dict[str, Any]]]) -> list[dict[str, Any]]:
    return [train(*cell) for cell in cells]


KINDS: tuple[dict[str, Any], ...] = (
    {"balance": ("bias", "sequence"), "router": "sigmoid"},
    {"balance": "batch", "shared_experts": 1},
)


@pytest.fixture(scope="module")
def alone() -> list[dict[str, Any]]:
    return [train({}, options) for options in KINDS]


def require_equal_run(found: dict[str, Any], alone: dict[str, Any], what: Any) -> None:
    assert found["losses"] == pytest.approx(alone["losses"], rel=1e-10), what
    assert found["loads"] == alone["loads"], what
    for got, wanted in zip(found["auxiliary"], alone["auxiliary"], strict=True):
        assert got == pytest.approx(wanted, rel=1e-10), what
        assert len(wanted) == 4
    for got, wanted in zip([*found["gradients"], found["weights"]], [*alone["gradients"], alone["weights"]]):
        assert got.keys() == wanted.keys(), what
        for name, value in wanted.items():
            torch.testing.assert_close(got[name], value, rtol=1e-10, atol=1e-11, msg=f"{what} {name}")
    for name, buffer in found["buffers"].items():
        assert torch.equal(buffer, alone["buffers"][name]), (what, name)


@pytest.mark.parametrize("every_kind", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("size", list(CASES))
def test_every_grid_of_experts_trains_as_one_process(
    ranks: Any, alone: list[dict[str, Any]], size: int, every_kind: bool
) -> None:
    """Each grid with one kind of experts, in turn; in the sweep with both."""
    cells = [*itertools.product(CASES[size], KINDS)]
    if not every_kind:
        cells = [*zip(CASES[size], itertools.cycle(KINDS), strict=False)]
    for found in ranks(size, run, cells, timeout=120):
        for (case, options), got in zip(cells, found, strict=True):
            require_equal_run(got, alone[KINDS.index(options)], (case, options))


def test_auxiliary_losses_are_means_over_the_whole_batch(alone: list[dict[str, Any]]) -> None:
    options = KINDS[0]
    with float64_by_default():
        model = triax.PipelineModule(layers(options), seed=3).eval()
    total, values = torch.zeros(()), {}

    def add(layer: MoE, args: tuple[Tensor], _: Tensor) -> None:
        nonlocal total
        weights: dict[str, Tensor] = dict(layer.named_parameters())
        _, losses, _ = reference(args[0], weights, OPTIONS | options, K, bias=torch.zeros(E))
        for name, coefficient in (("balance", 0.1), ("z_loss", 0.01)):
            total = total + coefficient * losses[name] / ROWS
            values[f"{layer.name}.{name}"] = float(losses[name].detach()) / ROWS

    for layer in model.modules():
        if isinstance(layer, MoE):
            layer.register_forward_hook(add)
    x, labels = batch(0)
    main, weight = Loss()(model(x), labels)
    assert alone[0]["losses"][0] == pytest.approx(float(main.detach() / weight), rel=1e-12)
    assert alone[0]["auxiliary"][0] == pytest.approx(values, rel=1e-12)
    (main / weight + total).backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(alone[0]["gradients"][0][name], parameter.grad, rtol=1e-10, atol=1e-12)


def test_the_first_steps_loads_are_those_of_plain_loops(alone: list[dict[str, Any]]) -> None:
    for options, found in zip(KINDS, alone, strict=True):
        with float64_by_default():
            model = triax.PipelineModule(layers(options), seed=3).eval()
        inputs: dict[str, Tensor] = {}
        mixtures = [layer for layer in model.modules() if isinstance(layer, MoE)]
        for layer in mixtures:
            layer.register_forward_hook(lambda layer, args, _, inputs=inputs: inputs.update({layer.name: args[0]}))
        model(batch(0)[0])
        loads = {
            layer.name: reference(inputs[layer.name], dict(layer.named_parameters()), OPTIONS | options, K)[2].tolist()
            for layer in mixtures
        }
        assert found["loads"][0] == loads and len(loads) == 2
        assert all(len(set(counts)) > 1 for counts in loads.values())  # else a wrong order of experts would pass


def test_each_step_moves_the_routing_bias_by_the_expert_loads(alone: list[dict[str, Any]]) -> None:
    """DeepSeek-V3's rule: an expert with fewer tokens than the mean gains 0.05, one with more loses 0.05."""
    found = train({}, KINDS[0], steps=3)
    for layer in ("layers.1.moe", "layers.3.moe"):
        bias = torch.zeros(E)
        for loads in found["loads"]:
            assert sum(loads[layer]) == ROWS * T * K
            bias += 0.05 * torch.tensor([ROWS * T * K / E - load for load in loads[layer]]).sign()
        assert bias.any()
        assert torch.equal(found["buffers"][f"{layer}.router.correction_bias"], bias)
        assert alone[1]["buffers"][f"{layer}.past_loads"].tolist() == alone[1]["loads"][-1][layer]


def test_routing_bias_and_loads_resume_on_another_grid(ranks: Any, tmp_path: Path) -> None:
    """Two steps on one grid and, from the checkpoint, two on another equal four steps of one process."""
    for index, options in enumerate(KINDS):
        folder = str(tmp_path / str(index))
        ranks(2, train, {"data": 2, "expert": 2, "stage": 1}, options, folder)
        wanted = train({}, options, steps=4)
        for key in ("losses", "auxiliary", "loads", "gradients"):
            wanted[key] = wanted[key][2:]
        for found in (train({}, options, folder, True), *ranks(2, train, {"pipe": 2}, options, folder, True)):
            require_equal_run(found, wanted, options)


ACTIVATIONS: dict[str, tuple[Activation, Callable[[Tensor], Tensor]]] = {  # the library's, and the formula
    "SwiGLU": (SwiGLU, lambda x: F.silu(x[:, :W]) * x[:, W:]),
    "GEGLU": (GEGLU, lambda x: F.gelu(x[:, :W]) * x[:, W:]),
    "GELU": (GELU, F.gelu),
    "ReLU": (ReLU, F.relu),
}


class ExpertsOnTokens:
    """Weights of three experts, which get 2, 0 and 3 tokens; outputs and gradients of a loop over them."""

    def __init__(self, kind: Activation, activation: Callable[[Tensor], Tensor]) -> None:
        numbers = partial(torch.randn, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        self.groups, self.x, self.dy = Groups(torch.tensor([2, 0, 3])), numbers(5, D).requires_grad_(), numbers(5, D)
        self.first = nn.Parameter(numbers(3, 2 * W if kind.gated else W, D))
        self.last = nn.Parameter(numbers(3, D, W))
        self.leaves = (self.x, self.first, self.last)
        self.y = torch.cat(
            [
                F.linear(activation(F.linear(tokens, self.first[expert])), self.last[expert])
                for expert, tokens in enumerate(self.x.split([2, 0, 3]))
            ]
        )
        self.gradients = torch.autograd.grad(self.y, self.leaves, self.dy)


@pytest.mark.parametrize(("kind", "activation"), ACTIVATIONS.values(), ids=ACTIVATIONS)
def test_grouped_mlp_equals_a_loop_over_experts(kind: Activation, activation: Callable[[Tensor], Tensor]) -> None:
    wanted = ExpertsOnTokens(kind, activation)

    def mlp(x: Tensor, first: Tensor, last: Tensor) -> Tensor:
        return grouped_mlp(x, first, last, wanted.groups, kind)

    y = mlp(*wanted.leaves)
    torch.testing.assert_close(y, wanted.y, rtol=0, atol=1e-12)
    gradients = torch.autograd.grad(y, wanted.leaves, wanted.dy)
    torch.testing.assert_close(gradients, wanted.gradients, rtol=0, atol=1e-12)
    assert torch.autograd.gradgradcheck(mlp, wanted.leaves)


@pytest.mark.parametrize(("kind", "activation"), ACTIVATIONS.values(), ids=ACTIVATIONS)
@pytest.mark.parametrize("call", ["grouped_mlp", "grouped_linear"])
def test_weight_gradients_of_experts_can_be_deferred(
    kind: Activation, activation: Callable[[Tensor], Tensor], call: str
) -> None:
    wanted, deferred, done = ExpertsOnTokens(kind, activation), Deferred(), list[Tensor]()
    x, first, last = wanted.leaves
    with SplitBackward(deferred):
        if call == "grouped_mlp":
            y = grouped_mlp(x, first, last, wanted.groups, kind)
        else:
            y = grouped_linear(activation(grouped_linear(x, first, wanted.groups)), last, wanted.groups)
    with deferring(deferred):
        y.backward(wanted.dy)
    assert first.grad is None and last.grad is None
    deferred.run(lambda parameter: None, done.append)
    assert {id(parameter) for parameter in done} == {id(first), id(last)} and len(done) == 2
    torch.testing.assert_close((x.grad, first.grad, last.grad), wanted.gradients, rtol=0, atol=1e-12)


@float64_by_default()
def module_engine(data: int, expert: int, accumulation: int) -> dict[str, Any]:
    grid = Grid(data=data, expert=expert)
    torch.manual_seed(1)
    block = Block({"balance": ("bias", "sequence")}, grid=grid)
    model = nn.Sequential(nn.Linear(D, D), block)
    engine, *_ = triax.initialize(
        model=model,
        grid=grid,
        config=small_config(batch=ROWS, accumulation=accumulation),
    )
    for step in range(2):
        for x in batch(step)[0].unflatten(0, (accumulation, data, -1))[:, grid.data.rank]:
            engine.backward(engine(x).square().mean())
            engine.step()
    found = {"auxiliary": engine.auxiliary_losses(), "loads": engine.expert_loads(), "weights": engine.gather()}
    return found | {"bias": block.moe.router.correction_bias}


@float64_by_default()
def module_steps_of_plain_loops() -> dict[str, Any]:
    """Two steps of SGD, as ``module_engine`` takes them, with the experts of ``moe_reference.py`` and autograd."""
    torch.manual_seed(1)
    options: dict[str, Any] = {"balance": ("bias", "sequence")}
    block = Block(options, grid=Grid())
    model = nn.Sequential(nn.Linear(D, D), block)
    weights, bias = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}, torch.zeros(E)
    prefix = "1.moe."
    for step in range(2):
        h = F.linear(batch(step)[0], weights["0.weight"], weights["0.bias"])
        experts = {name.removeprefix(prefix): w for name, w in weights.items() if name.startswith(prefix)}
        y, losses, loads = reference(h, experts, OPTIONS | options, K, bias=bias)
        means = {name: loss / ROWS for name, loss in losses.items()}
        total = (h + y).square().mean() + 0.1 * means["balance"] + 0.01 * means["z_loss"]
        for weight, gradient in zip(weights.values(), torch.autograd.grad(total, [*weights.values()]), strict=True):
            weight.data -= 0.1 * gradient
        bias += 0.05 * (loads.sum() / E - loads).sign()
    auxiliary = {f"{prefix}{name}": float(mean.detach()) for name, mean in means.items()}
    return {
        "auxiliary": auxiliary,
        "loads": {"1.moe": loads.tolist()},
        "weights": {name: w.detach() for name, w in weights.items()},
        "bias": bias.float(),
    }


def test_a_plain_module_with_experts_trains_as_plain_loops(ranks: Any) -> None:
    wanted = module_steps_of_plain_loops()
    assert set(wanted["auxiliary"]) == {"1.moe.balance", "1.moe.z_loss"}
    for sizes in ((1, 1, 1), (2, 2, 2), (2, 1, 1)):
        for found in ranks(sizes[0], module_engine, *sizes):
            assert found["weights"].keys() == wanted["weights"].keys()
            assert found["auxiliary"] == pytest.approx(wanted["auxiliary"], rel=1e-10)
            assert found["loads"] == wanted["loads"] and torch.equal(found["bias"], wanted["bias"])
            for name, value in wanted["weights"].items():
                torch.testing.assert_close(found["weights"][name], value, rtol=1e-10, atol=1e-12)


DISCARDS: dict[str, Callable[[Any], object]] = {
    "engine.zero_grad()": lambda engine: engine.zero_grad(),
    "optimizer.zero_grad()": lambda engine: engine.optimizer.zero_grad(),
    "module.zero_grad()": lambda engine: engine.module.zero_grad(),
}


@pytest.mark.parametrize("discard", DISCARDS.values(), ids=DISCARDS)
@pytest.mark.parametrize("when", ["before the forward pass", "after the forward pass"])
def test_discarded_microbatches_do_not_count_in_expert_loads(discard: Callable[[Any], object], when: str) -> None:
    """The discarded microbatch counts nowhere, and the one whose forward pass has run counts."""
    grid = Grid()
    block = MoE(D, E, K, grid=grid, width=W, balance="bias", z_loss=0.01, dtype=torch.float64)
    wanted, found = (
        triax.Engine(deepcopy(block), grid=grid, optimizer=triax.Optimizer("SGD", lr=0.1), batch=triax.Batch(size=ROWS))
        for _ in range(2)
    )
    for step in range(2):
        x, y = (batch(2 * step + i)[0] for i in range(2))
        wanted.backward(wanted(y).square().mean())
        wanted.step()
        found.backward(found(x).square().mean())
        if when.startswith("before"):
            discard(found)
        output = found(y)
        if when.startswith("after"):
            discard(found)
        found.backward(output.square().mean())
        found.step()
        assert found.expert_loads() == wanted.expert_loads() and sum(wanted.expert_loads()[""]) == y[..., 0].numel() * K
        assert found.auxiliary_losses() == pytest.approx(wanted.auxiliary_losses(), rel=1e-12)
    for name, value in wanted.module.state_dict().items():
        torch.testing.assert_close(found.module.state_dict()[name], value, rtol=0, atol=1e-12)


@pytest.mark.parametrize("balance", [("bias", "sequence"), "batch"])
def test_recomputation_does_not_count_tokens_twice(balance: Any) -> None:
    found = []
    for recompute in (0.0, 0.5, 1.0):
        model = triax.PipelineModule(layers({"balance": balance}), loss_fn=Loss(), seed=3).double()
        schedule = triax.ScheduleOptions(name="gpipe", recompute=recompute)
        batch_sizes = triax.Batch(size=ROWS, microbatches=4)
        optimizer = triax.Optimizer("SGD", lr=0.1)
        engine = triax.Engine(model, optimizer=optimizer, batch=batch_sizes, schedule=schedule)
        repeats = sum(op.kind == "C" for op in engine.program.schedule.orders[0])
        assert repeats == 4 * recompute
        for step in range(2):
            engine.train_batch(iter([*zip(*(part.chunk(4) for part in batch(step)), strict=True)]))
        state = model.state_dict() | {name: torch.tensor(value) for name, value in engine.auxiliary_losses().items()}
        found.append((engine.expert_loads(), state))
    for loads, state in found[1:]:
        assert loads == found[0][0]
        assert all(torch.equal(state[name], value) for name, value in found[0][1].items())


def small_engine(loss_fn: Any, tmp_path: Path | None = None) -> Any:
    config: dict[str, Any] = {"train_batch_size": ROWS, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    if tmp_path is not None:
        config["json_monitor"] = {"enabled": True, "output_path": str(tmp_path), "job_name": "run"}
    model = triax.PipelineModule(layers({"balance": "sequence"}), loss_fn=loss_fn, seed=3, dtype=torch.float64)
    return triax.initialize(model=model, config=config)[0]


def test_fp16_scales_the_auxiliary_losses_and_the_bias_keeps_float32() -> None:
    found = []
    for precision in ({"fp16": {"enabled": True, "loss_scale": 64}}, {"fp16": {"enabled": True, "loss_scale": 1}}):
        model = triax.PipelineModule(layers({"balance": ("bias", "sequence")}), loss_fn=Loss(), seed=3)
        config = {"train_batch_size": ROWS, "optimizer": {"type": "SGD", "params": {"lr": 0.0}}, **precision}
        engine = triax.initialize(model=model, config=config)[0]
        engine.train_batch(iter([batch(0)]))
        found.append(engine.gather("gradients"))
        biases = {name: buffer for name, buffer in model.named_buffers() if name.endswith("correction_bias")}
        assert len(biases) == 2 and all(bias.dtype == torch.float32 and bias.any() for bias in biases.values())
    for name, value in found[0].items():
        torch.testing.assert_close(found[1][name], value, rtol=0.02, atol=2e-3)
    assert any(name.endswith("router.weight") for name in found[0])


def test_a_loss_pair_without_a_method_weight_is_refused() -> None:
    engine = small_engine(lambda y, labels: Loss()(y, labels))
    before = engine.gather()
    with pytest.raises(RuntimeError, match=r"was assumed to be 1, but .* weight 2\d: give loss_fn a method weight"):
        engine.train_batch(iter([batch(0)]))
    assert all(torch.equal(value, before[name]) for name, value in engine.gather().items())
    mean = small_engine(lambda y, labels: y.square().mean())
    mean.train_batch(iter([batch(0)]))
    assert len(mean.auxiliary_losses()) == 4


def test_the_run_report_shows_expert_loads(tmp_path: Path) -> None:
    engine = small_engine(Loss(), tmp_path)
    for step in range(2):
        engine.train_batch(iter([batch(step)]))
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    loads = engine.expert_loads()["layers.1.moe"]
    assert rows[-1]["Train/Experts/layers.1.moe"] == loads
    assert rows[-1]["Train/Samples/layers.1.moe.largest_load"] == pytest.approx(max(loads) / (ROWS * T * K / E))
    assert rows[-1]["Train/Samples/layers.3.moe.balance"] == engine.auxiliary_losses()["layers.3.moe.balance"]
    page = write_report(tmp_path / "run").read_text()
    assert "<h2>Experts</h2>" in page and f"expert 3: {loads[3]} tokens" in page
    assert "Load-balancing loss" in page


def test_a_starving_expert_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    grid, layer = Grid(), MoE(D, E, K, grid=Grid(), width=W)
    layer.bind("layers.1.moe", AuxiliaryLosses())
    steps = AuxiliarySteps(layer, grid, layer.auxiliary)
    with caplog.at_level(logging.WARNING, "triax"):
        for _ in range(120):
            layer.loads = torch.tensor([60, 30, 28, 2])
            steps.end(grid, steps.local_sums(grid.device), 1.0, skipped=False, report=True)
    (line,) = caplog.messages
    assert line.startswith(
        "expert 3 of layers.1.moe starves: in each of the last 100 steps it was given less than 10 %"
    )
    assert "(2 of 30 tokens in the last one)" in line
