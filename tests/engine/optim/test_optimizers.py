"""Optimizers by name, through the engine, against torch's on whole tensors or the formula of their paper."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import triax
from triax import Grid, LayerSpec, PipelineModule
from triax.base.errors import ConfigError
from triax.compat.deepspeed.config.optimizer_names import NAMES, native_optimizer
from triax.compat.deepspeed.config.to_options import batch_sizes
from triax.compat.deepspeed.from_config import read_config, resolve_config
from triax.engine.optim.elementwise import Lion, UncorrectedAdam
from triax.engine.optim.optimizers import names
from triax.plugins.gradient_compression import OneBitAdam

from support.sweeps import some
from support.toys import mean_loss

WIDTH, STEPS = 3, 5
LR = 0.02


def layers() -> list[Any]:
    return [LayerSpec(nn.Linear, WIDTH, WIDTH), torch.tanh, LayerSpec(nn.Linear, WIDTH, WIDTH)]


def data(replica: int = 0, replicas: int = 1) -> Iterator[tuple[Tensor, Tensor]]:
    x, y = torch.randn(2, 4, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    share = 4 // replicas
    while True:
        yield x[replica * share : (replica + 1) * share], y[replica * share : (replica + 1) * share]


def trained(optimizer: dict[str, Any], grid: Grid | None = None, **config: Any) -> dict[str, Tensor]:
    grid = grid or Grid()
    model = PipelineModule(layers(), grid=grid, loss_fn=mean_loss, dtype=torch.float64)
    whole = {"train_batch_size": 4, "optimizer": optimizer, "gradient_clipping": 0.5, **config}
    engine = triax.initialize(model=model, config=whole)[0]
    batches = data(grid.data.rank, grid.data.size)
    for _ in range(STEPS):
        engine.train_batch(batches)
    return engine.gather()


Update = Callable[[Tensor, Tensor, dict[str, Any], int], None]


def reference(
    update: Update | None = None, make: Callable[[Any], torch.optim.Optimizer] | None = None, frozen: int = 0
) -> Any:
    """Reference steps on whole tensors, by an optimizer of torch or by ``update(p, g, state, step)``."""
    model = PipelineModule(layers(), loss_fn=mean_loss, dtype=torch.float64)
    for p in model.parameters():
        p.requires_grad_(p.dim() != frozen)
    optimizer = None if make is None else make(model.parameters())
    states: dict[Tensor, dict[str, Any]] = {p: {} for p in model.parameters()}
    batches = data()
    for step in range(1, STEPS + 1):
        x, y = next(batches)
        model.zero_grad()
        mean_loss(model(x), y).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        if optimizer is not None:
            optimizer.step()
        with torch.no_grad():
            for p in model.parameters() if update is not None else ():
                assert update is not None and p.grad is not None
                update(p, p.grad, states[p], step)
    return {name: p.detach() for name, p in model.named_parameters()}


def adam(decay: float, corrected: bool, decoupled: bool, betas: tuple[float, float] = (0.9, 0.999)) -> Update:
    """Kingma and Ba 2015, algorithm 1; Loshchilov and Hutter 2019, algorithm 2."""

    def update(p: Tensor, g: Tensor, state: dict[str, Any], step: int) -> None:
        if not decoupled:
            g = g + decay * p
        m = state["m"] = betas[0] * state.get("m", 0) + (1 - betas[0]) * g
        v = state["v"] = betas[1] * state.get("v", 0) + (1 - betas[1]) * g * g
        if corrected:
            m, v = m / (1 - betas[0] ** step), v / (1 - betas[1] ** step)
        p.copy_(p - LR * (decay * p if decoupled else 0) - LR * m / (v.sqrt() + 1e-8))

    return update


def lion(decay: float, betas: tuple[float, float]) -> Update:
    """Chen et al. 2023, algorithm 2."""

    def update(p: Tensor, g: Tensor, state: dict[str, Any], step: int) -> None:
        m = state.get("m", torch.zeros_like(p))
        c = betas[0] * m + (1 - betas[0]) * g
        p.copy_(p - LR * (c.sign() + decay * p))
        state["m"] = betas[1] * m + (1 - betas[1]) * g

    return update


def case(kind: str, **params: Any) -> dict[str, Any]:
    return {"type": kind, "params": {"lr": LR, **params}}


BY_FORMULA: list[tuple[dict[str, Any], Update]] = [
    (case("Adam"), adam(0.0, True, True)),
    (case("Adam", weight_decay=0.1), adam(0.1, True, True)),
    (case("adam", weight_decay=0.1, adam_w_mode=False, torch_adam=True), adam(0.1, True, False)),
    (case("AdamW"), adam(0.01, True, True)),  # torch's default
    (case("AdamW", weight_decay=0.1, betas=[0.8, 0.9], adam_w_mode=False), adam(0.1, True, True, (0.8, 0.9))),
    (case("FusedAdam", weight_decay=0.1, set_grad_none=True), adam(0.1, True, True)),
    (case("FusedAdam", weight_decay=0.1, adam_w_mode=False, bias_correction=False), adam(0.1, False, False)),
    (case("DeepSpeedCPUAdam", weight_decay=0.1, adamw_mode=False), adam(0.1, True, False)),
    (case("DeepSpeedCPUAdam", fp32_optimizer_states=True, bias_correction=False), adam(0.0, False, True)),
    (case("Lion", weight_decay=0.1), lion(0.1, (0.9, 0.999))),
    (case("FusedLion", betas=[0.9, 0.99]), lion(0.0, (0.9, 0.99))),
]


@pytest.mark.parametrize(("optimizer", "update"), BY_FORMULA, ids=[str(c[0]) for c in BY_FORMULA])
def test_each_optimizer_steps_by_its_formula(optimizer: dict[str, Any], update: Update) -> None:
    torch.testing.assert_close(trained(optimizer), reference(update), rtol=1e-10, atol=1e-13)


BY_TORCH: list[tuple[dict[str, Any], str, dict[str, Any]]] = [
    (case("SGD", momentum=0.9, nesterov=True, weight_decay=0.1), "SGD", {}),
    (case("Adagrad", weight_decay=0.1), "Adagrad", {}),
    (case("DeepSpeedCPUAdagrad"), "Adagrad", {}),
    *((case(name), name, {}) for name in ("Adadelta", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop")),
    (case("Adam", amsgrad=True), "AdamW", {"weight_decay": 0.0}),
    (case("AdamW", weight_decay="auto", betas="auto", eps="auto"), "AdamW", {"weight_decay": 0.01}),
]


@pytest.mark.parametrize(("optimizer", "name", "more"), BY_TORCH, ids=[str(c[0]) for c in BY_TORCH])
def test_optimizers_by_name_step_as_torchs_own(optimizer: dict[str, Any], name: str, more: dict[str, Any]) -> None:
    options = {key: value for key, value in optimizer["params"].items() if value != "auto"} | more
    wanted = reference(make=lambda parameters: getattr(torch.optim, name)(parameters, **options))
    torch.testing.assert_close(trained(optimizer), wanted, rtol=1e-10, atol=1e-13)


WHOLE: list[tuple[str, dict[str, Any]]] = [
    ("Adafactor", {"lr": LR, "weight_decay": 0.1}),
]


def on_whole_tensors(shape: tuple[int, int, int], name: str, params: dict[str, Any], given: str) -> Any:
    """Steps by an optimizer that needs whole tensors."""
    grid = Grid(*shape, timeout=60)
    model = PipelineModule(layers(), grid=grid, loss_fn=mean_loss, dtype=torch.float64, partition="uniform")
    parameters = list(model.parameters())
    config: dict[str, Any] = {"train_micro_batch_size_per_gpu": 4 // shape[1], "gradient_clipping": 0.5}
    config["zero_optimization"] = {"reduce_bucket_size": 5}
    more: dict[str, Any] = {"model_parameters": parameters}
    if given == "instance":
        more = {"optimizer": getattr(torch.optim, name)(parameters, **params)}
    else:
        config["optimizer"] = {"type": name, "params": params}
    engine, optimizer, *_ = triax.initialize(model=model, config=config, **more)
    batches = data(grid.data.rank, grid.data.size)
    for _ in range(STEPS):
        engine.train_batch(batches)
    assert type(optimizer) is getattr(torch.optim, name)
    return engine.gather()


@pytest.mark.parametrize(("name", "params"), WHOLE, ids=[name for name, _ in WHOLE])
def test_whole_tensor_optimizers_step_as_torch_in_stage_0(ranks: Any, name: str, params: dict[str, Any]) -> None:
    def make(parameters: Any) -> torch.optim.Optimizer:
        return getattr(torch.optim, name)(parameters, **params)

    wanted = reference(make=make)
    for shape, given in (((1, 1, 1), "instance"), ((1, 2, 1), "config"), ((2, 1, 1), "config")):
        for found in ranks(shape[0] * shape[1], on_whole_tensors, shape, name, params, given):
            torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-13)


def sharded_whole() -> list[str]:
    said = []
    for grid, zero in ((Grid(tensor=2, timeout=60), {}), (Grid(data=2, timeout=60), {"stage": 1})):
        try:
            trained(case("Adafactor"), grid, zero_optimization=zero)
        except ConfigError as error:
            said.append(str(error))
    return said


def test_whole_tensor_optimizers_refuse_sharded_tensors(ranks: Any) -> None:
    for said in ranks(2, sharded_whole):
        assert "the grid's tensor axis of 2 shards tensors: make a grid of tensor 1, or use Lion" in said[0]
        assert "shards the optimizer state into flat ranges: set stage 0, or use Lion" in said[1]
    zero = {"offload_optimizer": {"device": "cpu"}}
    with pytest.raises(ConfigError, match="leave them out, or use Lion"):
        read_config({"train_batch_size": 4, "optimizer": {"type": "Adafactor"}, "zero_optimization": zero})


def test_every_optimizer_name_is_tested() -> None:
    cases = [case for case, _ in BY_FORMULA] + [case for case, *_ in BY_TORCH]
    tried = {case["type"].lower() for case in cases}
    elsewhere = {"adafactor", "muon", "deepspeedcpulion", "lamb", "fusedlamb"}  # above, and in test_layerwise.py
    one_bit = {"onebitadam", "zerooneadam", "onebitlamb", "onebitsgd"}  # in gradient_compression/
    assert {name.lower() for name in (*names(), *NAMES)} == tried | elsewhere | one_bit | {"uncorrectedadam"}
    assert native_optimizer("DeepSpeedCPULion", {}) == native_optimizer("Lion", {})


def sharded(stage: int, zero: dict[str, Any]) -> list[dict[str, Tensor]]:
    cases = [case("Lion", weight_decay=0.1), case("Adam", weight_decay=0.1, bias_correction=False)]
    return [
        trained(each, Grid(data=2, timeout=60), zero_optimization={"stage": stage, "reduce_bucket_size": 5, **zero})
        for each in cases
    ]


@pytest.mark.parametrize("make", [Lion, UncorrectedAdam])
def test_lion_and_adam_step_complex_numbers_as_their_real_parts(make: Any) -> None:
    """Lion failed, and Adam used the square of a complex gradient as its second moment."""
    whole = nn.Parameter(torch.randn(5, dtype=torch.complex128))
    parts = nn.Parameter(torch.view_as_real(whole.detach()).clone())
    optimizers = make([whole], lr=0.1, weight_decay=0.1), make([parts], lr=0.1, weight_decay=0.1)
    for _ in range(3):
        whole.grad = torch.randn(5, dtype=torch.complex128).conj()
        parts.grad = torch.view_as_real(whole.grad.resolve_conj())
        for optimizer in optimizers:
            optimizer.step()
        assert torch.equal(torch.view_as_real(whole.detach()), parts.detach())
    assert all(value.dtype == whole.dtype for value in optimizers[0].state[whole].values())


@pytest.mark.parametrize("stage", some(range(4), [1, 3]))
def test_lion_and_adam_follow_their_formulas_when_sharded(ranks: Any, stage: int) -> None:
    wanted = [reference(lion(0.1, (0.9, 0.999))), reference(adam(0.1, corrected=False, decoupled=True))]
    for zero in ({}, {"sub_group_size": 4}):
        for found in ranks(2, sharded, stage, zero):
            torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("name", ["Adafactor", "Adam", "Rprop", "OneBitAdam", "Muon", "Lamb"])
def test_a_resolved_configuration_is_read_again_unchanged(name: str) -> None:
    """Adafactor's default eps, (None, 0.001), was refused as no list of two numbers."""
    config = read_config({"train_batch_size": 4, "optimizer": {"type": name}})
    sizes = batch_sizes(config, 1)
    resolved = json.loads(json.dumps(resolve_config(config, sizes)))
    assert json.loads(json.dumps(resolve_config(read_config(resolved), sizes))) == resolved


def stepped(optimizer: Any, **options: Any) -> tuple[dict[str, Tensor], Any]:
    """Weights after three steps of a plain module, and its optimizer."""
    torch.manual_seed(0)
    engine: Any = triax.Engine(nn.Linear(WIDTH, WIDTH), optimizer=optimizer, batch=triax.Batch(microbatch=4), **options)
    for _ in range(3):
        engine.backward(engine(torch.ones(4, WIDTH)).square().mean())
        engine.step()
    return engine.gather(), engine.optimizer


@pytest.mark.parametrize(
    ("given", "named"),
    [
        (partial(torch.optim.AdamW, lr=LR, betas=(0.8, 0.9)), triax.Optimizer("AdamW", lr=LR, betas=(0.8, 0.9))),
        (torch.optim.Adam, triax.Optimizer("Adam")),
        (partial(torch.optim.Adafactor, lr=LR), triax.Optimizer("Adafactor", lr=LR)),
        (partial(OneBitAdam, lr=LR, freeze_step=1), triax.Optimizer("OneBitAdam", lr=LR, freeze_step=1)),
    ],
    ids=["partial", "class", "whole tensors", "1-bit"],
)
def test_an_optimizer_class_and_its_name_step_bitwise_equal(given: Any, named: triax.Optimizer) -> None:
    (found, optimizer), (wanted, expected) = stepped(given), stepped(named)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert optimizer.param_groups[0].get("fused") == expected.param_groups[0].get("fused")


@pytest.mark.parametrize(
    ("given", "options", "message"),
    [
        (partial(torch.optim.Muon, lr=LR), {}, r"steps only matrices: write triax.Optimizer\('Muon', lr=...\)"),
        (partial(torch.optim.Adafactor, lr=LR), {"zero": 1}, "set stage 0, or use Lion"),
        (partial(torch.optim.LBFGS, lr=LR), {}, "LBFGS needs whole tensors"),
    ],
)
def test_optimizer_classes_that_cannot_be_sharded_are_refused(
    given: Any, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        stepped(given, **options)
