"""Optimizers as other packages write them: what they count, where they keep it, and on what an update depends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor


class Foreign(torch.optim.Optimizer):
    """Base class: a step calls ``update`` for each tensor with a gradient."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            self.begin(group)
            for p in group["params"]:
                if p.grad is not None:
                    self.update(group, p, p.grad, self.state[p])

    def begin(self, group: dict[str, Any]) -> None: ...

    def update(self, group: dict[str, Any], p: Tensor, g: Tensor, state: dict[str, Any]) -> None:
        p.sub_(g, alpha=group["lr"])

    def trained(self) -> Iterator[Tensor]:
        return (p for group in self.param_groups for p in group["params"] if p.grad is not None)


class CountsInGroup(Foreign):
    def begin(self, group: dict[str, Any]) -> None:
        group["n"] = group.get("n", 0) + 1

    def update(self, group: dict[str, Any], p: Tensor, g: Tensor, state: dict[str, Any]) -> None:
        p.sub_(g, alpha=group["lr"] / group["n"])


class CountsWhereItSteps(Foreign):
    """Counts in a group only if it has a tensor of the group."""

    def begin(self, group: dict[str, Any]) -> None:
        group["n"] = group.get("n", 0) + (1 if group["params"] else 0)

    def update(self, group: dict[str, Any], p: Tensor, g: Tensor, state: dict[str, Any]) -> None:
        p.sub_(g, alpha=group["lr"] / group["n"])


class HalvesItsRate(Foreign):
    def begin(self, group: dict[str, Any]) -> None:
        group["lr"] *= 0.5


class CountsInObject(Foreign):
    count = 0

    def begin(self, group: dict[str, Any]) -> None:
        self.count += 1

    def update(self, group: dict[str, Any], p: Tensor, g: Tensor, state: dict[str, Any]) -> None:
        p.sub_(g, alpha=group["lr"] / self.count)


class CountsAndSaves(CountsInObject):
    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "count": self.count}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict({key: value for key, value in state_dict.items() if key != "count"})
        self.count = state_dict["count"]


class CountsInState(Foreign):
    """As MADGRAD: a number in the state that belongs to no parameter."""

    def begin(self, group: dict[str, Any]) -> None:
        state: Any = self.state
        state["k"] = {"n": state.get("k", {"n": 0})["n"] + 1}

    def update(self, group: dict[str, Any], p: Tensor, g: Tensor, state: dict[str, Any]) -> None:
        every: Any = self.state
        p.sub_(g, alpha=group["lr"] / every["k"]["n"])


class StartsWithState(Foreign):
    """Makes its state with itself, as Adagrad."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, lr)
        for p in (p for group in self.param_groups for p in group["params"]):
            self.state[p]["sum"] = torch.full_like(p, 0.5)

    def update(self, group: dict[str, Any], p: Tensor, g: Tensor, state: dict[str, Any]) -> None:
        p.addcdiv_(g, state["sum"].addcmul_(g, g).sqrt(), value=-group["lr"])


class StartsFromWeights(Foreign):
    """As MADGRAD: steps from the weights at the start, which it copies when it is made."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, lr)
        for p in (p for group in self.param_groups for p in group["params"]):
            self.state[p].update(start=p.detach().clone(), sum=torch.zeros_like(p))

    def update(self, group: dict[str, Any], p: Tensor, g: Tensor, state: dict[str, Any]) -> None:
        p.copy_(state["start"]).sub_(state["sum"].add_(g), alpha=group["lr"])


class NarrowState(Foreign):
    """Keeps its momentum in bfloat16."""

    def update(self, group: dict[str, Any], p: Tensor, g: Tensor, state: dict[str, Any]) -> None:
        mean = state.setdefault("mean", torch.zeros_like(p, dtype=torch.bfloat16))
        mean.copy_(0.9 * mean.to(p.dtype) + g)
        p.sub_(mean.to(p.dtype) + 0.1 * g, alpha=group["lr"])


class ScheduleFree(Foreign):
    """Schedule-free SGD, which has the averaged weights in eval mode only."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, lr)
        for group in self.param_groups:
            group |= {"k": 0, "train_mode": False}

    def begin(self, group: dict[str, Any]) -> None:
        if not group["train_mode"]:
            raise RuntimeError("not in train mode: call optimizer.train()")
        group["k"] += 1

    def update(self, group: dict[str, Any], p: Tensor, g: Tensor, state: dict[str, Any]) -> None:
        z = state.setdefault("z", p.clone())
        p.lerp_(z, 1 / group["k"]).sub_(g, alpha=0.1 * group["lr"])
        z.sub_(g, alpha=group["lr"])

    def train(self) -> None:
        self._switch(True, 1 - 1 / 0.9)

    def eval(self) -> None:
        self._switch(False, 0.1)

    @torch.no_grad()
    def _switch(self, mode: bool, weight: float) -> None:
        for group in self.param_groups:
            for p in group["params"] if group["train_mode"] is not mode else ():
                if "z" in self.state[p]:
                    p.lerp_(self.state[p]["z"], weight)
            group["train_mode"] = mode


class PerTensor(Foreign):
    """As StableAdamW: an update that is clipped by its root mean square."""

    def update(self, group: dict[str, Any], p: Tensor, g: Tensor, state: dict[str, Any]) -> None:
        square = state.setdefault("square", torch.ones_like(p)).mul_(0.5).addcmul_(g, g, value=0.5)
        rate = (g.square() / square).mean().sqrt()
        p.addcdiv_(g, square.sqrt() * rate.clamp(min=0.2), value=-group["lr"])


class PerTensorNumber(Foreign):
    """As NovoGrad: a number for each tensor."""

    def update(self, group: dict[str, Any], p: Tensor, g: Tensor, state: dict[str, Any]) -> None:
        state["norm"] = 0.5 * state.get("norm", 0.0) + 0.5 * float(g.norm())
        p.sub_(g, alpha=group["lr"] / (1 + state["norm"]))


class PerRow(Foreign):
    """As SM3 and Adafactor: a number for each row."""

    def update(self, group: dict[str, Any], p: Tensor, g: Tensor, state: dict[str, Any]) -> None:
        rows = g.square().view(len(g), -1).mean(1)
        state["rows"] = rows if "rows" not in state else 0.5 * state["rows"] + 0.5 * rows
        p.view(len(g), -1).addcdiv_(g.view(len(g), -1), state["rows"].sqrt()[:, None] + 0.1, value=-group["lr"])


class PerBlock(Foreign):
    """As 8-bit optimizers: a momentum of bytes, with a scale for each block of 4 elements."""

    def update(self, group: dict[str, Any], p: Tensor, g: Tensor, state: dict[str, Any]) -> None:
        blocks = torch.nn.functional.pad(g.flatten(), (0, -g.numel() % 4)).view(-1, 4)
        if "mean" in state:
            blocks = blocks + 0.9 * state["mean"].to(g.dtype) * state["scale"]
        state["scale"] = blocks.abs().amax(1, keepdim=True).clamp(min=1e-12) / 100
        state["mean"] = (blocks / state["scale"]).round().to(torch.int8)
        update = state["mean"].to(g.dtype) * state["scale"]
        p.sub_(update.flatten()[: g.numel()].view(g.shape), alpha=group["lr"])


class OverAll(Foreign):
    """As Prodigy: a rate from sums over all tensors."""

    def begin(self, group: dict[str, Any]) -> None:
        group["d"] = group.get("d", 0.1) + sum(float(p.grad.norm()) for p in self.trained() if p.grad is not None)

    def update(self, group: dict[str, Any], p: Tensor, g: Tensor, state: dict[str, Any]) -> None:
        p.sub_(g, alpha=group["lr"] * group["d"])


class Draws(Foreign):
    """As Langevin dynamics: noise in the update."""

    def update(self, group: dict[str, Any], p: Tensor, g: Tensor, state: dict[str, Any]) -> None:
        p.sub_(g + 0.1 * torch.randn_like(p), alpha=group["lr"])


class KeepsObjects(Foreign):
    """As Shampoo: a list of tensors, which checkpoints cannot hold."""

    def update(self, group: dict[str, Any], p: Tensor, g: Tensor, state: dict[str, Any]) -> None:
        state["factors"] = [torch.eye(2), g]
        super().update(group, p, g, state)


class NeedsClosure(Foreign):
    def begin(self, group: dict[str, Any]) -> None:
        raise RuntimeError("requires a closure")


ELEMENTS = (
    CountsInGroup,
    HalvesItsRate,
    CountsAndSaves,
    CountsInState,
    StartsWithState,
    StartsFromWeights,
    NarrowState,
    ScheduleFree,
)
WHOLE = (PerTensor, PerTensorNumber, PerRow, PerBlock)  # in stage 0 without a tensor axis
MODEL = (OverAll,)  # nor a pipe axis
REFUSED = {
    CountsInObject: "cannot be saved and resumed",
    KeepsObjects: "factors",
    NeedsClosure: "requires a closure",
}
