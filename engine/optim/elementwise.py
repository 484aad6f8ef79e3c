"""Elementwise optimizers that torch does not have: Lion, and Adam without bias correction."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch


class _Elementwise(torch.optim.Optimizer):
    """Base class of optimizers whose ``step`` calls ``_update`` for each parameter with a gradient.

    Attributes:
        moments: names of the state's tensors, of a parameter's shape, which start at 0.
    """

    moments: tuple[str, ...] = ()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step; return the result of ``closure``."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                for name in self.moments:
                    if name not in state:
                        state[name] = torch.zeros_like(parameter)
                tensors = [parameter, parameter.grad.resolve_conj(), *(state[name] for name in self.moments)]
                if parameter.is_complex():  # its parts are elements, as in torch's optimizers
                    tensors = [torch.view_as_real(tensor) for tensor in tensors]
                self._update(group, *tensors)
        return loss

    def _update(self, group: dict[str, Any], p: torch.Tensor, g: torch.Tensor, *moments: torch.Tensor) -> None:
        """Update one parameter and its moments in place from its gradient. Each optimizer implements this method."""
        raise NotImplementedError


def _check(lr: float, betas: tuple[float, float], weight_decay: float, eps: float = 0.0) -> None:
    for name, value in (("lr", lr), ("weight_decay", weight_decay), ("eps", eps)):
        if not value >= 0:
            raise ValueError(f"{name} is {value}: give a number of at least 0")
    if not all(0 <= beta < 1 for beta in betas):
        raise ValueError(f"betas are {betas}: give numbers of at least 0 and less than 1")


class Lion(_Elementwise):
    """Lion: a step by the sign of a momentum, with half of Adam's state. Chen et al. 2023, arXiv:2302.06675.

    An element whose momentum is 0 does not change, as in the paper.

    Args:
        params: parameters, or groups of them.
        lr: size of a step; the paper takes 3 to 10 times less than for AdamW.
        betas: beta1 mixes the stored momentum with the gradient for the sign of the step; beta2 does so for the
            momentum that is stored next.
        weight_decay: decoupled, as in AdamW.
    """

    moments = ("exp_avg",)

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
    ) -> None:
        _check(lr, betas, weight_decay)
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    def _update(self, group: dict[str, Any], p: torch.Tensor, g: torch.Tensor, *moments: torch.Tensor) -> None:
        first, second = group["betas"]
        (momentum,) = moments
        p.mul_(1 - group["lr"] * group["weight_decay"])
        p.sub_(momentum.lerp(g, 1 - first).sign_().mul_(group["lr"]))
        momentum.lerp_(g, 1 - second)


class UncorrectedAdam(_Elementwise):
    """Adam without bias correction of its moments, as BERT was trained: ``bias_correction: false``.

    Kingma and Ba 2015, arXiv:1412.6980, without its section 3.

    Args:
        params: parameters, or groups of them.
        lr, betas, eps, weight_decay: as in torch's AdamW.
        decoupled: decay the weights, as AdamW; False: add the decay to the gradient, as Adam.
    """

    moments = ("exp_avg", "exp_avg_sq")

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        decoupled: bool = True,
    ) -> None:
        _check(lr, betas, weight_decay, eps)
        options = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "decoupled": decoupled}
        super().__init__(params, options)

    def _update(self, group: dict[str, Any], p: torch.Tensor, g: torch.Tensor, *moments: torch.Tensor) -> None:
        first, second = group["betas"]
        mean, square = moments
        if group["decoupled"]:
            p.mul_(1 - group["lr"] * group["weight_decay"])
        elif group["weight_decay"]:
            g = g.add(p, alpha=group["weight_decay"])
        mean.lerp_(g, 1 - first)
        square.mul_(second).addcmul_(g, g, value=1 - second)
        p.addcdiv_(mean, square.sqrt().add_(group["eps"]), value=-group["lr"])
