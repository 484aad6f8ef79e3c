"""Loss scales of the engine of plain modules: one engine, engines in a row, outputs of any kind, eval mode."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from triax import initialize

from support.module_jobs import plain
from support.module_training import MICRO, STEPS, WIDTH, config, groups, microbatch, net

HALF = {"enabled": True, "initial_scale_power": 6, "hysteresis": 1}


def overflow() -> tuple[list[Any], list[dict[str, Tensor]]]:
    engine, *_ = initialize(model=net().float(), config=config("SGD", 2, 2, fp16=HALF, nan_loss="ignore"))
    facts, states = [], [engine.module_state_dict()]
    for step in range(2):
        for index in range(2):
            x, y = microbatch(step, index, engine.grid.data.rank)
            if (step, index, engine.grid.data.rank) == (0, 0, 1):
                x = x + torch.inf
            output = engine(x)  # float64, cast
            assert output.dtype == torch.float16
            engine.backward((output - y.half()).square().mean())
            engine.step()
        facts.append((engine.loss_scale(), engine.skipped_steps, engine.global_steps, engine.get_lr()))
        states.append(engine.module_state_dict())
    return facts, states


def test_an_overflow_on_one_rank_skips_the_step_on_both(ranks: Any) -> None:
    for facts, states in ranks(2, overflow):
        assert [f[:3] for f in facts] == [(32.0, 1, 1), (32.0, 1, 2)]
        assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
        assert not torch.equal(states[1]["enter.weight"], states[2]["enter.weight"])


class Named(dict[str, Any]):
    """Output with named fields, as models of Hugging Face return it."""


class Wrapped(nn.Module):
    def __init__(self, opaque: bool = False) -> None:
        super().__init__()
        self.inner, self.opaque = net().float(), opaque

    def forward(self, x: Tensor, ids: Tensor) -> Any:
        assert x.dtype == self.inner.norm.weight.dtype and ids.dtype == torch.int64
        y = self.inner(x)
        if self.opaque:
            return iter([y])
        return Named(first=y, second=(y * 2, None))


@pytest.mark.parametrize("way", ["backward", "scale", "plain", "together"])
def test_each_loss_scale_is_applied_once(way: str) -> None:
    """Two engines have different loss scales; an engine, a scaled loss or torch calls the backward pass."""
    x, _ = microbatch(0, 0, 0)
    ids = torch.zeros(3, dtype=torch.int64)
    scales = [{**HALF, "initial_scale_power": power} for power in (4, 7)]
    engines = [initialize(model=Wrapped(), config=config(fp16=scale))[0] for scale in scales]
    losses = []
    for engine in engines:
        y = engine(x.float(), ids=ids)
        assert isinstance(y, Named) and y["first"].dtype == torch.float16
        losses.append((y["first"].float().square().mean() + y["second"][0].float().mean()) * 8)
    if way == "backward":
        for engine, loss in zip(engines, losses, strict=True):
            engine.backward(loss)
    elif way == "scale":
        torch.stack([engine.scale(loss) for engine, loss in zip(engines, losses, strict=True)]).sum().backward()
    elif way == "plain":
        (losses[0] + losses[1]).backward()
    else:
        engines[0].backward(losses[0] + losses[1])
    for engine in engines:
        engine.step()
    first, second = (engine.get_global_grad_norm() for engine in engines)
    model = net().float()
    y = model(x.float())
    ((y.square().mean() + (y * 2).mean()) * 8).backward()
    expected = nn.utils.clip_grad_norm_(model.parameters(), 1.0).item()
    assert first == pytest.approx(expected, rel=2e-3) and second == pytest.approx(expected, rel=2e-3)


def test_opaque_outputs_need_engine_backward_or_scale() -> None:
    ids = torch.zeros(3, dtype=torch.int64)
    engine, *_ = initialize(model=Wrapped(opaque=True), config=config(fp16=HALF))
    next(engine(torch.ones(MICRO, WIDTH), ids)).float().mean().backward()
    with pytest.raises(RuntimeError, match=re.escape("engine.scale(loss).backward()")):
        engine.step()
    engine.zero_grad()
    engine.backward(next(engine(torch.ones(MICRO, WIDTH), ids)).float().mean())
    engine.step()
    assert engine.global_steps == 1


@pytest.mark.parametrize("way", ["plain", "first", "second", "scale", "other scale"])
@pytest.mark.parametrize("powers", [(4, 7), (None, 7), (7, None)])
def test_chained_engines_apply_their_own_loss_scales(way: str, powers: tuple[int | None, int | None]) -> None:
    """A module of an engine uses this engine's loss scale; outside, that of the engine that began the pass."""
    scales = [None if power is None else {**HALF, "initial_scale_power": power} for power in powers]
    settings = [config() if scale is None else config(fp16=scale) for scale in scales]
    first, second = (initialize(model=net().float(), config=each)[0] for each in settings)
    x = microbatch(0, 0, 0)[0].float().requires_grad_()
    between = first(x)
    loss = second(between if powers[1] else between.float()).float().square().mean() * 4
    if way == "plain":
        loss.backward()
    elif way in ("first", "second"):
        {"first": first, "second": second}[way].backward(loss)
    else:
        {"scale": second, "other scale": first}[way].scale(loss).backward()
    first.step()
    second.step()
    models = [net().float(), net().float()]
    plain_x = x.detach().clone().requires_grad_()
    (models[1](models[0](plain_x)).square().mean() * 4).backward()
    for engine, model in zip((first, second), models, strict=True):
        expected = nn.utils.clip_grad_norm_(model.parameters(), 1.0).item()
        assert engine.get_global_grad_norm() == pytest.approx(expected, rel=5e-3)
    began = {"plain": None, "first": powers[0], "second": powers[1], "scale": powers[1], "other scale": powers[0]}[way]
    assert x.grad is not None and plain_x.grad is not None
    torch.testing.assert_close(x.grad / 2 ** (began or 0), plain_x.grad, rtol=2e-2, atol=2e-3)


def test_a_backward_after_a_scaled_loss_is_scaled_too() -> None:
    """In one microbatch a module has a loss of ``scale``, and one that another engine's ``backward`` runs."""
    first, second = (
        initialize(model=net().float(), config=config(fp16={**HALF, "initial_scale_power": power}))[0]
        for power in (4, 7)
    )
    x = microbatch(0, 0, 0)[0].float()
    second.scale(second(x).float().square().mean()).backward()
    first.backward(second(first(x)).float().square().mean() * 4)
    second.step()
    models = [net().float(), net().float()]
    (models[1](x).square().mean() + models[1](models[0](x)).square().mean() * 4).backward()
    expected = nn.utils.clip_grad_norm_(models[1].parameters(), 1.0).item()
    assert second.get_global_grad_norm() == pytest.approx(expected, rel=5e-3)


def penalty(critic: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """A gradient penalty's loss, and the gradient."""
    y = critic(x).float()
    (gradient,) = torch.autograd.grad(y.mean() * MICRO, x, create_graph=True)
    return y.square().mean() + (gradient.norm(dim=1) - 1).square().mean(), gradient


@pytest.mark.parametrize("way", ["backward", "scale", "plain"])
def test_gradient_penalties_are_right_under_a_loss_scale(way: str) -> None:
    engine, *_ = initialize(model=net().float(), config=config(fp16=HALF))
    model = net().float()
    x = microbatch(0, 0, 0)[0].float().requires_grad_()
    (loss, gradient), (expected, whole) = penalty(engine, x), penalty(model, x)
    assert gradient.dtype == torch.float32
    torch.testing.assert_close(gradient, whole, rtol=2e-2, atol=2e-3)
    assert loss.item() == pytest.approx(expected.item(), rel=5e-3)
    if way == "backward":
        engine.backward(loss)
    else:
        (engine.scale(loss) if way == "scale" else loss).backward()
    engine.step()
    expected.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0).item()
    assert engine.get_global_grad_norm() == pytest.approx(norm, rel=1e-2)


def test_input_gradients_too_small_for_float16_are_kept() -> None:
    """Scaled inside, and true in float32: as float16, they would be nothing."""
    engine, *_ = initialize(model=net().float(), config=config(fp16={**HALF, "initial_scale_power": 16}))
    x = microbatch(0, 0, 0)[0].float().requires_grad_()
    factor = 2.0**-24  # the least of float16
    (small,) = torch.autograd.grad((engine(x).float() * factor).sum(), x)
    (expected,) = torch.autograd.grad((net().float()(x) * factor).sum(), x)
    torch.testing.assert_close(small / factor, expected / factor, rtol=2e-2, atol=5e-3)


def test_inputs_of_a_module_engine_are_not_copied() -> None:
    class Kept(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.given = net().float(), None

        def forward(self, x: Tensor, more: Any) -> Tensor:
            self.given = more
            y: Tensor = self.inner(torch.relu_(x))  # in place
            return y

    scaling, *_ = initialize(model=net().float(), config=config(fp16=HALF))
    engine, *_ = initialize(model=Kept(), config=config())
    more = Named(cache=[torch.ones(2)])
    x = microbatch(0, 0, 0)[0].float().requires_grad_()
    y = engine(x * 1.0, more)
    assert engine.module.given is more
    y /= 2  # in place, too
    y.mean().backward()
    assert x.grad is not None and scaling is not None


def in_eval_mode(stage: int, way: str, half: bool) -> tuple[list[float], dict[str, Tensor]]:
    """Fine-tuning without dropout, with evaluations between, of which no backward pass follows."""
    more: dict[str, Any] = {"fp16": {**HALF, "initial_scale_power": 8}} if half else {}
    model = net().float() if half else net()
    engine, *_ = initialize(model=model, model_parameters=groups(model), config=config("SGD", 2, stage, **more))
    engine.eval()
    norms = []
    for step in range(STEPS):
        for index in range(2):
            x, y = microbatch(step, index, engine.grid.data.rank)
            loss = (engine(x, times=0.9).to(y.dtype) - y).square().mean()
            assert engine(x).requires_grad
            engine.backward(loss) if way == "backward" else loss.backward()
            assert engine(x).requires_grad
            engine.step()
        norm = engine.get_global_grad_norm()
        assert norm is not None
        norms.append(norm)
        gradients = {name: value.clone() for name, value in engine.gather("gradients").items()}
        assert engine(x).requires_grad
        for name, value in engine.gather("gradients").items():
            assert torch.equal(value, gradients[name])
    return norms, engine.gather()


@pytest.mark.parametrize(
    ("stage", "way"),
    [
        (0, "plain"),
        (2, "backward"),
        (3, "plain"),
        *(
            pytest.param(*cell, marks=pytest.mark.exhaustive)
            for cell in ((0, "backward"), (2, "plain"), (3, "backward"))
        ),
    ],
)
def test_eval_mode_trains_as_plain_pytorch(ranks: Any, stage: int, way: str) -> None:
    expected = plain("SGD", 2, 2)
    for norms, weights in ranks(2, in_eval_mode, stage, way, half=False):
        assert norms == pytest.approx([norm for _, _, norm in expected], rel=1e-10)
        for name, value in weights.items():
            torch.testing.assert_close(value, expected[-1][1][name], rtol=0, atol=1e-10)


@pytest.mark.parametrize("way", ["plain", "backward"])
def test_eval_mode_with_a_loss_scale_trains_as_plain_pytorch(way: str) -> None:
    norms, _ = in_eval_mode(0, way, half=True)
    assert norms == pytest.approx([norm for _, _, norm in plain("SGD", 1, 2)], rel=2e-2)


def test_opaque_outputs_in_eval_mode_need_engine_backward() -> None:
    ids, x = torch.zeros(3, dtype=torch.int64), torch.ones(MICRO, WIDTH)
    engine, *_ = initialize(model=Wrapped(opaque=True), config=config(fp16=HALF))
    engine.eval()
    for _ in range(2):
        engine.backward(next(engine(x, ids)).float().mean())
        engine.step()
    next(engine(x, ids)).float().mean().backward()
    with pytest.raises(RuntimeError, match=re.escape("engine.scale(loss).backward()")):
        engine.step()
    engine.zero_grad()
    engine(x, ids)  # an evaluation
    engine.train().module.opaque = False
    engine(x, ids)["first"].float().mean().backward()
    engine.step()
    assert engine.global_steps == 3


def in_a_row(half: bool, how: str) -> list[dict[str, Tensor]]:
    """Return the gradients of two engines, one after the other; of the second's inputs, they are small for fp16."""
    engines = []
    torch.manual_seed(0)
    for power in (16, 12):
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)).double()
        if power == 12 and how == "only way":
            for weight in [parameter for parameter in model.parameters() if parameter.dim() == 2]:
                weight.data.mul_(2.0**-7)
        config = {"train_batch_size": 4, "optimizer": {"type": "SGD", "params": {"lr": 0.0}}}
        fp16 = {"enabled": half, **({"initial_scale_power": power} if half else {})}
        engines.append(initialize(model=model, config={**config, "fp16": fp16})[0])
    first, second = engines
    y = first(torch.linspace(-1, 1, 4 * WIDTH, dtype=torch.float64).view(4, WIDTH))
    loss = second(y).double().square().mean() * 0.05
    (loss if how == "only way" else loss + y.double().mean() * 0.01).backward()
    for engine in engines:
        engine.step()
    return [{name: value.double() for name, value in engine.gather("gradients").items()} for engine in engines]


@pytest.mark.parametrize("how", ["only way", "two ways"])
def test_fp16_gradients_from_one_engine_to_the_next_stay_scaled(how: str) -> None:
    """Under ``loss.backward()`` the gradients between the engines were unscaled, in fp16, and became 0."""
    for mine, theirs in zip(in_a_row(half=True, how=how), in_a_row(half=False, how=how), strict=True):
        for name, value in theirs.items():
            assert value.abs().max() > 0
            assert (mine[name] - value).norm() < 0.01 * value.norm(), name
