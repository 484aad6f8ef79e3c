"""Base class of the 1-bit optimizers: what they have in common, and the moments that they share."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from ....base.errors import require_at_least

_ONE_FOR_ALL = ("freeze_step", "var_freeze_step", "var_update_scaler", "local_step_scaler", "local_step_clipper")

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

    stepper: ClassVar[type]  # which steps it on ZeRO's buckets
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
                    "exp_avg_mask marks elements that never have a gradient. Leave it out: "
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
        return self._variance_updates(step) > self._variance_updates(step - 1)

    def _begin(self, p: Tensor) -> State:
        """Return the state with which a parameter begins."""
        return {"exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p), "updates": 0, "variance_updates": 0}

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
        self._count(state, step)
        first, second = group["betas"]
        if not self._summed(step):
            alive = local_momentum(state["exp_avg"], g, state["exp_avg_sq"], first)
            return LocalValue(p, state["exp_avg"], alive, exact=False)
        state["exp_avg"].lerp_(g, 1 - first)
        state["exp_avg_sq"].mul_(second).addcmul_(g, g, value=1 - second)
        return None

    def _count(self, state: State, step: int) -> None:
        """Count this step's updates of a parameter's moments, which correct their bias: some steps may leave it out.

        Checkpoints of older versions lack the counts: then each step so far counts.
        """
        state["updates"] = state.get("updates", step - 1) + 1
        state["variance_updates"] = state.get("variance_updates", self._variance_updates(step - 1)) + self._summed(step)

    def _variance_updates(self, step: int) -> int:
        """Return the number of steps up to this one that update variances."""
        return min(step, int(self.defaults["freeze_step"]))

    def _move(self, p: Tensor, state: State, group: State, step: int, local: LocalValue | None) -> None:
        """Update a parameter from its optimizer state and the value averaged over the replicas."""
        raise NotImplementedError

    def _adamw(self, p: Tensor, state: State, group: State) -> None:
        """Update a parameter as AdamW does."""
        rate = group["lr"] / corrected(group["betas"][0], state["updates"], group["bias_correction"])
        p.mul_(1 - group["lr"] * group["weight_decay"])
        p.addcdiv_(state["exp_avg"], denominator(state["exp_avg_sq"], group, state["variance_updates"]), value=-rate)


def local_momentum(momentum: Tensor, g: Tensor, variance: Tensor, beta: float) -> Tensor:
    """Update a momentum with a replica's own gradient; return 1 where the variance is not 0, and 0 elsewhere."""
    alive = variance.sign()
    momentum.lerp_(g, 1 - beta).mul_(alive)
    return alive


def corrected(beta: float, updates: int, wanted: bool) -> float:
    """Return the bias correction of a moving average after ``updates`` updates. Kingma and Ba 2015, section 3."""
    return 1.0 - beta**updates if wanted else 1.0


def denominator(variance: Tensor, group: State, updates: int) -> Tensor:
    """Return sqrt(variance / correction) + eps. Without an update the variance is 0, and so not corrected."""
    correction = corrected(group["betas"][1], max(updates, 1), group["bias_correction"])
    return variance.sqrt().div_(math.sqrt(correction)).add_(group["eps"])
