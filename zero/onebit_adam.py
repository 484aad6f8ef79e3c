"""1-bit Adam and 0/1 Adam: Adam whose momentum, and not whose gradient, is brought together, a bit an element.

In steps of one kind gradients are summed over the replicas as ever. In the others each replica makes a momentum of its
own gradient, and their mean is compressed (``onebit.py``). What divides it, the variance, stands still meanwhile. An
element whose variance is 0 then, because it never had a gradient, has nothing to be divided by: it stands still too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

_ONE_FOR_ALL = ("freeze_step", "var_freeze_step", "var_update_scaler", "local_step_scaler", "local_step_clipper")
# State of 0/1 Adam between two meetings: where the parameter was at the last one, u, and what u is made of.
_APART = ("anchor", "moved", "rates", "shrunk")


class Outgoing(NamedTuple):
    """What a parameter's replicas have each of their own, and shall have the mean of."""

    parameter: Tensor
    value: Tensor  # of the parameter's shape; takes the mean
    alive: Tensor  # the same shape, 1 and 0: what takes part
    exact: bool  # the plain mean is wanted


def check(least: float, **numbers: float) -> None:
    """Refuse what is less than it may be.

    Raises:
        ValueError: one is.
    """
    for name, value in numbers.items():
        if not value >= least:
            raise ValueError(f"{name} is at least {least}, not {value}")


class OneBit(torch.optim.Optimizer):
    """What the three have in common: steps of two kinds, the count of them, and their state.

    On one replica, or in a plain loop of torch's, nothing travels and nothing is compressed.

    Attributes:
        replicas: their number, as whoever steps it over several says.
        meet: gives each outgoing value its mean over them.
    """

    OWN: tuple[str, ...] = ("worker_error",)  # keys of state that each replica has of its own
    SERVER = "server_error"  # that of which each has the part it is the server of

    def __init__(self, params: Iterable[Any], defaults: dict[str, Any]) -> None:
        check(0.0, lr=defaults["lr"], eps=defaults["eps"], weight_decay=defaults["weight_decay"])
        if not all(0 <= beta < 1 for beta in defaults["betas"]):
            raise ValueError(f"betas are at least 0 and less than 1, not {defaults['betas']}")
        super().__init__(params, defaults)
        self.replicas = 1
        self.meet: Callable[[Sequence[Outgoing]], None] = lambda values: None
        for group in self.param_groups:
            if "exp_avg_mask" in group:
                raise ValueError(
                    "exp_avg_mask is DeepSpeed's, for elements that never have a gradient: leave it out, they are "
                    "found here (their variance is 0 when it is frozen)"
                )
            for key in _ONE_FOR_ALL:
                if group.get(key) != defaults.get(key):
                    raise ValueError(f"{key} is one for all parameter groups: give it once, beside lr")

    @property
    def steps(self) -> int:
        """Those taken so far."""
        return max((int(state["step"]) for state in self.state.values() if "step" in state), default=0)

    def summed(self) -> bool:
        """Whether the next step takes gradients that are summed over the replicas."""
        return self._summed(self.steps + 1)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step; returns what ``closure`` does. Parameters without a gradient stand still."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        now = self.steps + 1
        moving: list[tuple[Tensor, dict[str, Any], dict[str, Any], Outgoing | None]] = []
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
                state["step"] = now
                if p.grad is not None or self._pending(state):
                    gradient = torch.zeros_like(p) if p.grad is None else p.grad
                    moving.append((p, state, group, self._collect(p, gradient, state, group, now)))
        self.meet([outgoing for *_, outgoing in moving if outgoing is not None])
        for p, state, group, outgoing in moving:
            self._move(p, state, group, now, outgoing)
        return loss

    def resume(self, parameter: Tensor, met: bool = True) -> None:
        """State was loaded: go to where this replica was.

        Args:
            parameter: of which it is.
            met: its value is what all replicas had when they last met; False: the state knows that too.
        """

    def rejoin(self, parameter: Tensor) -> None:
        """The parameter was given a value, the same on all replicas."""

    def met(self, parameter: Tensor) -> Tensor:
        """The parameter's value when all replicas had the same the last time."""
        return parameter

    def _summed(self, step: int) -> bool:
        raise NotImplementedError

    def _pending(self, state: dict[str, Any]) -> bool:
        return False

    def _collect(
        self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any], step: int
    ) -> Outgoing | None:
        """Take a gradient into the state; returns what replicas are to have the mean of."""
        raise NotImplementedError

    def _move(
        self, p: Tensor, state: dict[str, Any], group: dict[str, Any], step: int, outgoing: Outgoing | None
    ) -> None:
        """Move a parameter, by the state and by the mean."""
        raise NotImplementedError


def local_momentum(momentum: Tensor, g: Tensor, variance: Tensor, beta: float) -> Tensor:
    """Take a replica's own gradient into a momentum; returns what takes part, 1 and 0: where there is a variance."""
    alive = variance.sign()
    momentum.lerp_(g, 1 - beta).mul_(alive)
    return alive


def corrected(beta: float, updates: int, wanted: bool) -> float:
    """What a moving average that began with 0 is to be divided by after so many updates. Kingma and Ba 2015, 3."""
    return 1.0 - beta**updates if wanted else 1.0


def denominator(variance: Tensor, group: dict[str, Any], updates: int) -> Tensor:
    """The root of the variance, corrected, plus eps."""
    correction = corrected(group["betas"][1], updates, group["bias_correction"])
    return variance.sqrt().div_(math.sqrt(correction)).add_(group["eps"])


class OneBitAdam(OneBit):
    """1-bit Adam: Adam for ``freeze_step`` steps, then its momentum compressed, over a variance that stands still.

    Tang et al. 2021, arXiv:2102.02888, algorithm 1; names and defaults are DeepSpeed's. Weight decay is AdamW's.

    Args:
        params: parameters, or groups of them.
        lr, betas, eps, weight_decay: as torch's AdamW; the decay is 0 where none is given.
        freeze_step: steps of the warm-up, at least 1: after them the variance must be what it will be.
        bias_correction: correct the moments' start from 0, the variance's as it was at ``freeze_step``. The paper, and
            DeepSpeed whatever is given, correct nothing.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        freeze_step: int = 100000,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        check(1, freeze_step=freeze_step)
        options = {"lr": lr, "freeze_step": freeze_step, "bias_correction": bias_correction}
        super().__init__(params, {**options, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    def _summed(self, step: int) -> bool:
        return step <= int(self.defaults["freeze_step"])

    def _collect(
        self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any], step: int
    ) -> Outgoing | None:
        first, second = group["betas"]
        if not self._summed(step):
            alive = local_momentum(state["exp_avg"], g, state["exp_avg_sq"], first)
            return Outgoing(p, state["exp_avg"], alive, exact=False)
        state["exp_avg"].lerp_(g, 1 - first)
        state["exp_avg_sq"].mul_(second).addcmul_(g, g, value=1 - second)
        return None

    def _move(
        self, p: Tensor, state: dict[str, Any], group: dict[str, Any], step: int, outgoing: Outgoing | None
    ) -> None:
        rate = group["lr"] / corrected(group["betas"][0], step, group["bias_correction"])
        p.mul_(1 - group["lr"] * group["weight_decay"])
        divisor = denominator(state["exp_avg_sq"], group, min(step, self.defaults["freeze_step"]))
        p.addcdiv_(state["exp_avg"], divisor, value=-rate)


class ZeroOneAdam(OneBit):
    """0/1 Adam: the variance taken anew ever more seldom, and the momentum's mean, a bit an element, ever more seldom.

    Lu et al. 2022, arXiv:2202.06009, algorithm 1 and section 6; names and defaults are DeepSpeed's. Between two
    meetings each replica steps on its own, from where all were. In a step that takes the variance anew the mean
    gradient is there, and so the momentum is made of it, and nothing is compressed (as in DeepSpeed).

    Args:
        params: parameters, or groups of them.
        lr, bias_correction, betas, eps, weight_decay: as ``OneBitAdam``.
        var_freeze_step: the last step that may take the variance anew. Up to it replicas meet in each step.
        var_update_scaler: kappa: after so many times that the variance was taken, it is half as often.
        local_step_scaler: after so many steps behind ``var_freeze_step``, replicas meet half as often; and so on,
        local_step_clipper: but once in so many steps at least.
    """

    OWN = ("worker_error", "local_avg", "moved")

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        var_freeze_step: int = 100000,
        var_update_scaler: int = 16,
        local_step_scaler: int = 32678,
        local_step_clipper: int = 16,
    ) -> None:
        policy = {
            "var_freeze_step": var_freeze_step,
            "var_update_scaler": var_update_scaler,
            "local_step_scaler": local_step_scaler,
            "local_step_clipper": local_step_clipper,
        }
        check(1, **policy)
        options = {"lr": lr, "bias_correction": bias_correction, "betas": betas, "eps": eps}
        super().__init__(params, {**options, "weight_decay": weight_decay, **policy})

    def updates(self, step: int) -> tuple[int, bool]:
        """How often the variance was taken up to a step, and whether it is in that one.

        The first is step 1; then ``var_update_scaler`` times one step apart, as often two, as often four, ...
        """
        kappa = int(self.defaults["var_update_scaler"])
        past = min(step, int(self.defaults["var_freeze_step"])) - 1
        doublings = (past // kappa + 1).bit_length() - 1
        within = past - kappa * (2**doublings - 1)
        taken = kappa * doublings + within // 2**doublings + 1
        return taken, within % 2**doublings == 0 and step - 1 == past

    def meets(self, step: int) -> bool:
        """Whether replicas meet in this step."""
        past = step - int(self.defaults["var_freeze_step"])
        if past <= 0 or self.replicas == 1:
            return True
        most = int(self.defaults["local_step_clipper"])
        doublings = (past - 1) // int(self.defaults["local_step_scaler"])
        return past % min(most, 2 ** min(doublings, most.bit_length())) == 0

    def resume(self, parameter: Tensor, met: bool = True) -> None:
        """State was loaded: go to where this replica was."""
        state = self.state[parameter]
        if met:
            state.pop("anchor", None)
        if "moved" in state:
            state.setdefault("anchor", parameter.detach().clone())
            group = next(g for g in self.param_groups if any(parameter is p for p in g["params"]))
            self._place(parameter, state, state["moved"], denominator(state["exp_avg_sq"], group, self._taken(state)))

    def rejoin(self, parameter: Tensor) -> None:
        """The parameter was given a value, the same on all replicas."""
        for key in _APART:
            self.state[parameter].pop(key, None)

    def met(self, parameter: Tensor) -> Tensor:
        """The parameter's value when all replicas had the same the last time."""
        anchor: Tensor = self.state.get(parameter, {}).get("anchor", parameter)
        return anchor

    def _taken(self, state: dict[str, Any]) -> int:
        return self.updates(int(state["step"]))[0]

    def _summed(self, step: int) -> bool:
        return self.updates(step)[1]

    def _pending(self, state: dict[str, Any]) -> bool:
        return "moved" in state

    def _collect(
        self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any], step: int
    ) -> Outgoing | None:
        first, second = group["betas"]
        if self._summed(step):
            state["exp_avg"].lerp_(g, 1 - first)
            state["exp_avg_sq"].mul_(second).addcmul_(g, g, value=1 - second)
            return None
        key, together = "exp_avg", self.meets(step)
        if not together or "local_avg" in state:
            # From here to the next meeting it is this replica's own, and saved as such.
            key = "local_avg"
            if key not in state:
                state[key] = state.pop("exp_avg")
        alive = local_momentum(state[key], g, state["exp_avg_sq"], first)
        # u, and what it is the momentum times: all the rates since the last meeting.
        rate = group["lr"] / corrected(first, step, group["bias_correction"])
        shrink = 1 - group["lr"] * group["weight_decay"]
        if "moved" in state:
            moved = state["moved"].mul_(shrink).add_(state[key], alpha=rate)
        else:
            moved, state["rates"], state["shrunk"] = state[key] * rate, 0.0, 1.0
        state["rates"], state["shrunk"] = state["rates"] * shrink + rate, state["shrunk"] * shrink
        if not together:
            state["moved"] = moved
            return None
        if state["rates"] == 0:  # nothing moved, so only the momentum itself can tell its mean
            return Outgoing(p, state[key], alive, exact=True)
        return Outgoing(p, moved, alive, exact=False)

    def _move(
        self, p: Tensor, state: dict[str, Any], group: dict[str, Any], step: int, outgoing: Outgoing | None
    ) -> None:
        divisor = denominator(state["exp_avg_sq"], group, self._taken(state))
        if self._summed(step):
            rate = group["lr"] / corrected(group["betas"][0], step, group["bias_correction"])
            p.mul_(1 - group["lr"] * group["weight_decay"]).addcdiv_(state["exp_avg"], divisor, value=-rate)
            return
        if outgoing is None:
            if "anchor" not in state:
                state["anchor"] = p.detach().clone()
            self._place(p, state, state["moved"], divisor)
            return
        momentum = state.pop("local_avg", None)
        if outgoing.exact:
            state["exp_avg"] = outgoing.value
            self._place(p, state, torch.zeros_like(p), divisor)
        else:
            # What the mean of u says of the mean momentum.
            state["exp_avg"] = torch.div(outgoing.value, state["rates"], out=state.get("exp_avg", momentum))
            self._place(p, state, outgoing.value, divisor)
        for key in _APART:
            state.pop(key, None)

    @staticmethod
    def _place(p: Tensor, state: dict[str, Any], moved: Tensor, divisor: Tensor) -> None:
        """Where a parameter is that moved by so much since the last meeting."""
        p.copy_(torch.addcdiv(state.get("anchor", p) * state["shrunk"], moved, divisor, value=-1))
