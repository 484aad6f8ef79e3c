"""Observers of an engine's steps: the order of their calls, and a step that one of them skips."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import triax
from triax.engine.step_observer import StepObserver

X, Y = torch.ones(2, 3, dtype=torch.float64), torch.zeros(2, 1, dtype=torch.float64)


class Vetoes(StepObserver):
    """Leaves out the second step, and notes all calls."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def before_step(self) -> None:
        self.calls.append("before")

    def may_step(self, loss: float | None, norm: float | None) -> bool:
        self.calls.append((loss, norm))
        return self.calls.count("before") != 2

    def after_step(self, grid: triax.Grid, loss: Tensor) -> None:
        self.calls.append(("after", float(loss)))


def take_step(engine: Any) -> None:
    if isinstance(engine, triax.PipelineEngine):
        engine.train_batch(iter([(X, Y)] * 2))
        return
    for _ in range(2):
        engine.backward((engine(X) - Y).square().mean())
        engine.step()


@pytest.mark.parametrize("pipelined", [True, False])
def test_a_step_observer_can_skip_a_step(pipelined: bool) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(3, 1).double()
    model = triax.PipelineModule([layer], grid=triax.Grid(), loss_fn=nn.MSELoss()) if pipelined else layer
    batch = triax.Batch(size=4, microbatch=2)
    engine = triax.Engine(model, optimizer=partial(torch.optim.SGD, lr=0.1), batch=batch, clip=1e9)
    vetoes, others = Vetoes(), Vetoes()
    engine.observers += [vetoes, others]
    weights = []
    for _ in range(3):
        gradient = torch.autograd.grad((layer(X) - Y).square().mean(), layer.weight)[0]
        before = layer.weight.detach().clone()
        wanted = float((layer(X) - Y).square().mean().detach())
        take_step(engine)
        loss, norm = vetoes.calls[-2]
        assert vetoes.calls[-3:] == ["before", (loss, norm), ("after", loss)] and norm == engine.grad_norm
        assert loss == pytest.approx(wanted, rel=1e-12)
        (found,) = (value for name, value in engine.gather("gradients").items() if name.endswith("weight"))
        torch.testing.assert_close(found, gradient, rtol=0, atol=1e-12)
        weights.append(torch.equal(before, layer.weight))
    assert weights == [False, True, False] and engine.global_steps == 3 and others.calls == vetoes.calls


def test_gradients_that_were_read_before_a_skipped_step_are_means() -> None:
    """Reading ``.grad`` divides what the engine holds, so ``gather`` must not divide it by the whole weight again."""
    torch.manual_seed(0)
    layer = nn.Linear(3, 1).double()
    engine = triax.Engine(layer, optimizer=partial(torch.optim.SGD, lr=0.1), batch=triax.Batch(size=4, microbatch=2))
    engine.observers.append(Vetoes())
    for reads in (False, True):  # the second step is the skipped one
        wanted = torch.autograd.grad((layer(X) - Y).square().mean(), layer.weight)[0]
        for microbatch in range(2):
            engine.backward((engine(X) - Y).square().mean())
            if reads and microbatch == 1:
                assert layer.weight.grad is not None
                torch.testing.assert_close(layer.weight.grad.clone(), wanted, rtol=0, atol=1e-12)
            engine.step()
    torch.testing.assert_close(engine.gather("gradients")["weight"], wanted, rtol=0, atol=1e-12)
