"""A backward pass without gradients, of some or all parameters, keeps the gradients of earlier passes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import triax

LOOPS = {  # each microbatch: a letter for each branch that the loss uses; "?" for a gradient of the input before it
    "a branch is not used again": ("ab", "a", "a", "a"),
    "a branch is used twice": ("ab", "a", "b", "a"),
    "gradients of the input between microbatches": ("ab", "?ab", "?ab", "?a"),
}
X = torch.tensor([[1.0, -2.0], [3.0, 2.0]], dtype=torch.float64)  # numbers whose sums bf16 holds


class Branches(nn.Module):
    """Two linear layers. ``used`` names those whose outputs are added."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(2, 2).double(), nn.Linear(2, 2).double()
        self.used = "ab"
        for parameter in self.parameters():
            nn.init.constant_(parameter, 0.5)

    def forward(self, x: Tensor) -> Tensor:
        outputs: list[Tensor] = [getattr(self, name)(x) for name in self.used]
        return torch.stack(outputs).sum(0)


def loop(stage: Any, precision: str | None, uses: tuple[str, ...]) -> list[str]:
    """Return the names of weights that are not those of plain PyTorch after a step."""
    grid, model, plain = triax.Grid(timeout=60), Branches(), Branches()
    batch = triax.Batch(microbatch=2, microbatches=len(uses))
    optimizer = triax.Optimizer("SGD", lr=0.5)
    more: dict[str, Any] = {"precision": precision} if precision else {}
    engine = triax.Engine(model, optimizer=optimizer, batch=batch, grid=grid, zero=triax.Zero(stage=stage), **more)
    for used in uses:
        model.used = plain.used = used.strip("?")
        x = X.clone().requires_grad_()
        y = engine(x)
        if "?" in used:
            torch.autograd.grad(y.sum(), x, retain_graph=True)
        engine.backward(y.sum())
        engine.step()
        (plain(X).sum() / len(uses)).backward()
    torch.optim.SGD(plain.parameters(), lr=0.5).step()
    weights = engine.gather()
    off = {name: (weights[name].double() - p.detach()).abs().max() for name, p in plain.named_parameters()}
    return [name for name, difference in off.items() if not difference <= 1e-10]  # NaN is off too


def every_loop() -> dict[tuple[Any, ...], list[str]]:
    cases = [(name, stage, kind) for name in LOOPS for stage in range(4) for kind in (None, "bf16")]
    return {case: wrong for case in cases if (wrong := loop(*case[1:], LOOPS[case[0]]))}


def test_a_backward_pass_without_gradients_keeps_earlier_ones(ranks: Any) -> None:
    for wrong in (*ranks(1, every_loop), *ranks(2, every_loop, timeout=120)):
        assert not wrong
