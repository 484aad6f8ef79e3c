"""State of a step's backward passes: each row of the table in ``StepState``, on steps of an engine."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import triax
from triax.zero.modules.step_state import StepState

STATES = "|".join(state.name for state in StepState)
ROWS = re.findall(rf"^ {{4}}({STATES}) +({STATES}) ", StepState.__doc__ or "", re.MULTILINE)
X = torch.linspace(-1.0, 2.0, 6, dtype=torch.float64).view(2, 3)


class Walk:
    """Steps of an engine, and the states that they go through."""

    def __init__(self, stage: Any) -> None:
        self.model, self.plain = net(), net()
        optimizer, grid = triax.Optimizer("SGD", lr=0.1), triax.Grid(timeout=60)
        self.engine: Any = triax.Engine(
            self.model, optimizer=optimizer, batch=2 * grid.size, grid=grid, zero=triax.Zero(stage=stage)
        )
        self.states = [self.state]

    @property
    def state(self) -> str:
        return str(self.engine.backward_passes.state.name)

    def see(self, gradient: Tensor | None = None) -> None:
        if self.state != self.states[-1]:
            self.states.append(self.state)

    def train(self, times: float) -> None:
        """Run a backward pass, here and in plain PyTorch, and see the state when it has begun and ended."""
        y = self.engine(X)
        self.see()
        y.register_hook(self.see)
        (times * y.square().mean()).backward()
        self.see()
        (times * self.plain(X).square().mean()).backward()

    def probe(self) -> None:
        """Run a backward pass that gives no parameter a gradient."""
        x = X.clone().requires_grad_()
        y = self.engine(x)
        y.register_hook(self.see)
        torch.autograd.grad(y.sum(), x)
        self.see()

    def reduce(self) -> None:
        self.engine.clip_grad_norm_(1e9)
        self.see()

    def fail(self) -> None:
        def refuse(gradient: Tensor) -> None:
            raise ValueError("half way")

        handle = next(self.model.parameters()).register_hook(refuse)
        with pytest.raises(ValueError, match="half way"):
            self.engine(X).square().mean().backward()
        handle.remove()
        self.see()

    def discard(self) -> None:
        self.engine.zero_grad()
        self.plain.zero_grad()
        self.see()

    def step(self) -> None:
        """Take the step, here and in plain PyTorch, with equal weights after it."""
        self.reduce()
        self.engine.step()
        self.see()
        torch.optim.SGD(self.plain.parameters(), lr=0.1).step()
        self.plain.zero_grad()
        weights = self.engine.gather()
        for name, parameter in self.plain.named_parameters():
            torch.testing.assert_close(weights[name], parameter.detach(), rtol=0, atol=1e-10)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()


def states_of_a_step(stage: int) -> list[str]:
    walk = Walk(stage)
    for times in (1.0, 0.5):
        walk.train(times)
    walk.reduce()
    walk.train(0.25)
    walk.step()
    walk.train(2.0)
    walk.probe()
    walk.reduce()
    walk.train(3.0)
    walk.step()
    walk.train(1.0)
    walk.reduce()
    walk.discard()
    if walk.engine.grid.size == 1:
        walk.fail()
        walk.discard()
    walk.train(1.0)
    walk.step()
    return walk.states


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("size", [1, 2])
def test_a_step_goes_through_exactly_the_listed_states(ranks: Any, size: int, stage: int) -> None:
    rows = [row for row in ROWS if size == 1 or row != ("LAST_BEGAN", "OPEN")]
    for states in ranks(size, states_of_a_step, stage):
        assert sorted(set(pairwise(states))) == sorted(rows), states
