"""1-bit Adam and 0/1 Adam: Adam that averages momenta over replicas, one bit an element, in place of gradients.

In the warm-up (and in some steps of 0/1 Adam) gradients are summed over the replicas as usual. In the other steps each
replica updates a momentum with its own gradient, and the mean of the momenta is compressed (``allreduce.py``). The
variance is frozen meanwhile. An element whose variance is 0, because it never had a gradient, does not change.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from ....base.errors import require_at_least
from .stepper import OneBitStepper

_ONE_FOR_ALL = ("freeze_step", "var_freeze_step", "var_update_scaler", "local_step_scaler", "local_step_clipper")
# State of 0/1 Adam between two synchronizations: the parameter at the last one, u, and the factors of u.
_LOCAL = ("anchor", "moved", "rates", "shrunk")

State = dict[str, Any]  # of one parameter; also the options of a parameter group


class LocalValue(NamedTuple):
    """A value that differs between replicas and is to be replaced by the mean over them, e.g. a momentum."""

    parameter: Tensor
    value: Tensor  # of the parameter's shape; takes the mean
    alive: Tensor  # of the same shape, 1 and 0: elements that take part
    exact: bool  # the mean must not be compressed


class OneBit(torch.optim.Optimizer):
    """Base of the 1-bit optimizers: steps on summed gradients and steps on averaged momenta, and their state.

    By default the first ``freeze_step`` steps sum gradients. On one replica, or in a plain loop of torch's, nothing is
    sent and nothing is compressed.

    Attributes:
        replicas: number of replicas; set by the stepper.
        average: function that replaces each ``LocalValue`` of a list by its mean over the replicas; set by the stepper.
            By default it does nothing.
    """

    stepper: ClassVar = OneBitStepper  # which steps it on ZeRO's buckets
    OWN: tuple[str, ...] = ("worker_error",)  # keys of state that each replica has of its own
    SERVER = "server_error"  # key of state of which each replica has the part that it is the server of
    # Why ZeRO may not shard the state, and tensor-parallel ranks not step their shards, with what to use instead.
    needs_whole_state = ("each replica holds the whole optimizer state, and its own errors of compression", "AdamW")
    needs_whole_tensors: tuple[str, str] | None = None
    means = False  # True if a chunk has two values, the means of its elements of either sign, and not one scale

    def __init__(self, params: Iterable[Any], defaults: dict[str, Any]) -> None:
        require_at_least(0.0, **{key: defaults[key] for key in ("lr", "eps", "weight_decay") if key in defaults})
        if not all(0 <= beta < 1 for beta in defaults.get("betas", ())):
            raise ValueError(f"betas={defaults['betas']}: both numbers must be at least 0 and less than 1")
        super().__init__(params, defaults)
        self.replicas = 1
        self.average: Callable[[Sequence[LocalValue]], None] = lambda values: None
        for group in self.param_groups:
            if "exp_avg_mask" in group:
                raise ValueError(
                    "exp_avg_mask, an option of DeepSpeed, marks elements that never have a gradient. Leave it out: "
                    "triax finds these elements itself, because their variance is 0 when it is frozen"
                )
            for key in _ONE_FOR_ALL:
                if group.get(key) != defaults.get(key):
                    raise ValueError(f"{key} must be equal in all parameter groups: give it once, beside lr")

    @property
    def steps(self) -> int:
        """Number of steps taken so far."""
        return max((int(state["step"]) for state in self.state.values() if "step" in state), default=0)

    def summed(self) -> bool:
        """Return True if the next step takes gradients that are summed over the replicas."""
        return self._summed(self.steps + 1)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step; return what ``closure`` returns. Parameters without a gradient do not change."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        now = self.steps + 1
        moving: list[tuple[Tensor, dict[str, Any], dict[str, Any], LocalValue | None]] = []
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state.update(self._begin(p))
                state["step"] = now
                if p.grad is not None or self._pending(state):
                    gradient = torch.zeros_like(p) if p.grad is None else p.grad
                    moving.append((p, state, group, self._collect(p, gradient, state, group, now)))
        self.average([local for *_, local in moving if local is not None])
        for p, state, group, local in moving:
            self._move(p, state, group, now, local)
        return loss

    def resume(self, parameter: Tensor, at_synchronization: bool = True) -> None:
        """Restore this replica's own weights of a parameter, after the optimizer state was loaded.

        Under 0/1 Adam replicas have different weights between two synchronizations. No effect for other optimizers.

        Args:
            parameter: the parameter whose state was loaded.
            at_synchronization: True if the parameter has its value of the last synchronization, as checkpoints save it,
                and the local change must be added; False if it has this replica's own value already.
        """

    def rejoin(self, parameter: Tensor) -> None:
        """Drop the local updates of a parameter, whose value is now the same on all replicas."""

    def synchronized_value(self, parameter: Tensor) -> Tensor:
        """Return the value that the parameter had at the last synchronization, equal on all replicas."""
        return parameter

    def _summed(self, step: int) -> bool:
        return step <= int(self.defaults["freeze_step"])

    def _begin(self, p: Tensor) -> State:
        """Return the state with which a parameter begins."""
        return {"exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}

    def _pending(self, state: State) -> bool:
        """Return True if the parameter must be stepped even without a gradient in this step; ``state`` is its state."""
        return False

    def _collect(self, p: Tensor, g: Tensor, state: State, group: State, step: int) -> LocalValue | None:
        """Update a parameter's moments with its gradient; return the value to average over the replicas, or None.

        Args:
            p, g: the parameter and its gradient.
            state: its optimizer state.
            group: the options of its parameter group.
            step: number of this step, from 1.
        """
        first, second = group["betas"]
        if not self._summed(step):
            alive = local_momentum(state["exp_avg"], g, state["exp_avg_sq"], first)
            return LocalValue(p, state["exp_avg"], alive, exact=False)
        state["exp_avg"].lerp_(g, 1 - first)
        state["exp_avg_sq"].mul_(second).addcmul_(g, g, value=1 - second)
        return None

    def _move(self, p: Tensor, state: State, group: State, step: int, local: LocalValue | None) -> None:
        """Update a parameter from its optimizer state and the value averaged over the replicas."""
        raise NotImplementedError

    def _adamw(self, p: Tensor, state: State, group: State, step: int, updates: int) -> None:
        """Update a parameter as AdamW does, with a variance that had ``updates`` updates."""
        rate = group["lr"] / corrected(group["betas"][0], step, group["bias_correction"])
        p.mul_(1 - group["lr"] * group["weight_decay"])
        p.addcdiv_(state["exp_avg"], denominator(state["exp_avg_sq"], group, updates), value=-rate)


def local_momentum(momentum: Tensor, g: Tensor, variance: Tensor, beta: float) -> Tensor:
    """Update a momentum with a replica's own gradient; return 1 where the variance is not 0, and 0 elsewhere."""
    alive = variance.sign()
    momentum.lerp_(g, 1 - beta).mul_(alive)
    return alive


def corrected(beta: float, updates: int, wanted: bool) -> float:
    """Return the bias correction of a moving average after ``updates`` updates. Kingma and Ba 2015, section 3."""
    return 1.0 - beta**updates if wanted else 1.0


def denominator(variance: Tensor, group: State, updates: int) -> Tensor:
    """Return sqrt(variance / correction) + eps."""
    correction = corrected(group["betas"][1], updates, group["bias_correction"])
    return variance.sqrt().div_(math.sqrt(correction)).add_(group["eps"])


class OneBitAdam(OneBit):
    """1-bit Adam: Adam for ``freeze_step`` steps, then a compressed momentum over a frozen variance.

    Tang et al. 2021, arXiv:2102.02888, algorithm 1; names and defaults are DeepSpeed's. Weight decay is AdamW's.

    Args:
        params: parameters, or groups of them.
        lr, betas, eps, weight_decay: as torch's AdamW, but the default of the decay is 0.
        freeze_step: steps of the warm-up, at least 1, after which the variance should have settled.
        bias_correction: correct both moments for their start from 0, the variance as it was at ``freeze_step``. The
            paper corrects nothing; nor does DeepSpeed, whatever is given.
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
        require_at_least(1, freeze_step=freeze_step)
        options = {"lr": lr, "freeze_step": freeze_step, "bias_correction": bias_correction}
        super().__init__(params, {**options, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    def _move(self, p: Tensor, state: State, group: State, step: int, local: LocalValue | None) -> None:
        self._adamw(p, state, group, step, min(step, self.defaults["freeze_step"]))


class ZeroOneAdam(OneBit):
    """0/1 Adam: updates the variance, and averages the momentum (one bit an element), more and more rarely.

    Lu et al. 2022, arXiv:2202.06009, algorithm 1 and section 6; names and defaults are DeepSpeed's. Between two
    synchronizations each replica takes local steps. A step that updates the variance has the mean gradient, so the
    momentum is updated with that, and nothing is compressed (as in DeepSpeed).

    Args:
        params: parameters, or groups of them.
        lr, bias_correction, betas, eps, weight_decay: as ``OneBitAdam``.
        var_freeze_step: the last step that may update the variance. Up to it replicas synchronize in each step.
        var_update_scaler: kappa: after so many updates of the variance, they become half as frequent; and so on.
        local_step_scaler: after so many steps behind ``var_freeze_step``, synchronizations become half as frequent;
            and so on.
        local_step_clipper: replicas synchronize at least once in so many steps.
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
        require_at_least(1, **policy)
        options = {"lr": lr, "bias_correction": bias_correction, "betas": betas, "eps": eps}
        super().__init__(params, {**options, "weight_decay": weight_decay, **policy})

    def updates(self, step: int) -> tuple[int, bool]:
        """Return the number of updates of the variance up to a step, and True if that step is one of them.

        The first update is step 1; ``var_update_scaler`` updates follow at a distance of one step, as many at a
        distance of two, as many at four, ...
        """
        kappa = int(self.defaults["var_update_scaler"])
        past = min(step, int(self.defaults["var_freeze_step"])) - 1
        doublings = (past // kappa + 1).bit_length() - 1
        within = past - kappa * (2**doublings - 1)
        taken = kappa * doublings + within // 2**doublings + 1
        return taken, within % 2**doublings == 0 and step - 1 == past

    def synchronizes(self, step: int) -> bool:
        """Return True if replicas synchronize in this step."""
        past = step - int(self.defaults["var_freeze_step"])
        if past <= 0 or self.replicas == 1:
            return True
        most = int(self.defaults["local_step_clipper"])
        doublings = (past - 1) // int(self.defaults["local_step_scaler"])
        return past % min(most, 2 ** min(doublings, most.bit_length())) == 0

    def resume(self, parameter: Tensor, at_synchronization: bool = True) -> None:
        """Restore this replica's own weights of a parameter, after the optimizer state was loaded.

        Args:
            parameter: the parameter whose state was loaded.
            at_synchronization: True if the parameter has its value of the last synchronization, as checkpoints save it,
                and the local change must be added; False if it has this replica's own value already.
        """
        state = self.state[parameter]
        if at_synchronization:
            state.pop("anchor", None)
        if "moved" in state:
            state.setdefault("anchor", parameter.detach().clone())
            group = next(g for g in self.param_groups if any(parameter is p for p in g["params"]))
            self._place(parameter, state, state["moved"], denominator(state["exp_avg_sq"], group, self._taken(state)))

    def rejoin(self, parameter: Tensor) -> None:
        """Drop the local updates of a parameter, whose value is now equal on all replicas."""
        for key in _LOCAL:
            self.state[parameter].pop(key, None)

    def synchronized_value(self, parameter: Tensor) -> Tensor:
        """Return the value that the parameter had at the last synchronization, equal on all replicas."""
        anchor: Tensor = self.state.get(parameter, {}).get("anchor", parameter)
        return anchor

    def _taken(self, state: State) -> int:
        return self.updates(int(state["step"]))[0]

    def _summed(self, step: int) -> bool:
        return self.updates(step)[1]

    def _pending(self, state: State) -> bool:
        return "moved" in state

    def _collect(self, p: Tensor, g: Tensor, state: State, group: State, step: int) -> LocalValue | None:
        if self._summed(step):
            return super()._collect(p, g, state, group, step)
        first = group["betas"][0]
        key, together = "exp_avg", self.synchronizes(step)
        if not together or "local_avg" in state:
            # From here to the next synchronization it is this replica's own, and saved as such.
            key = "local_avg"
            if key not in state:
                state[key] = state.pop("exp_avg")
        alive = local_momentum(state[key], g, state["exp_avg_sq"], first)
        # u, and what it is the momentum times: all the rates since the last synchronization.
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
            return LocalValue(p, state[key], alive, exact=True)
        return LocalValue(p, moved, alive, exact=False)

    def _move(self, p: Tensor, state: State, group: State, step: int, local: LocalValue | None) -> None:
        if self._summed(step):
            self._adamw(p, state, group, step, self._taken(state))
            return
        divisor = denominator(state["exp_avg_sq"], group, self._taken(state))
        if local is None:
            if "anchor" not in state:
                state["anchor"] = p.detach().clone()
            self._place(p, state, state["moved"], divisor)
            return
        momentum = state.pop("local_avg", None)
        if local.exact:
            state["exp_avg"] = local.value
            self._place(p, state, torch.zeros_like(p), divisor)
        else:
            # The mean momentum follows from the mean of u.
            state["exp_avg"] = torch.div(local.value, state["rates"], out=state.get("exp_avg", momentum))
            self._place(p, state, local.value, divisor)
        for key in _LOCAL:
            state.pop(key, None)

    @staticmethod
    def _place(p: Tensor, state: State, moved: Tensor, divisor: Tensor) -> None:
        """Set a parameter to its value at the last synchronization, plus its change since then."""
        p.copy_(torch.addcdiv(state.get("anchor", p) * state["shrunk"], moved, divisor, value=-1))
