"""1-bit Adam and 0/1 Adam: Adam that averages momenta over replicas, one bit an element, in place of gradients.

In the warm-up (and in some steps of 0/1 Adam) gradients are summed over the replicas as usual. In the other steps each
replica updates a momentum with its own gradient, and the mean of the momenta is compressed (``allreduce.py``). The
variance is frozen meanwhile. An element whose variance is 0, because it never had a gradient, does not change.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ....base.errors import require_at_least
from .optimizer import LocalValue, OneBit, State, corrected, denominator, local_momentum
from .stepper import OneBitStepper

# State of 0/1 Adam between two synchronizations: the parameter at the last one, u, and the factors of u.
_LOCAL = ("anchor", "moved", "rates", "shrunk")


class OneBitAdam(OneBit):
    """1-bit Adam: Adam for ``freeze_step`` steps, then a compressed momentum over a frozen variance.

    Tang et al. 2021, arXiv:2102.02888, algorithm 1; names and defaults are those of the authors' code.
    Weight decay is AdamW's.

    Args:
        params: parameters, or groups of them.
        lr, betas, eps, weight_decay: as torch's AdamW, but the default of the decay is 0.
        freeze_step: steps of the warm-up, at least 1, after which the variance should have settled.
        bias_correction: correct both moments for their start from 0, the variance as it was at ``freeze_step``. The
            paper corrects nothing; nor does the authors' code, whatever is given.
    """

    stepper = OneBitStepper

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
        self._adamw(p, state, group)


class ZeroOneAdam(OneBit):
    """0/1 Adam: updates the variance, and averages the momentum (one bit an element), more and more rarely.

    Lu et al. 2022, arXiv:2202.06009, algorithm 1 and section 6; names and defaults are those of the authors' code.
    Between two synchronizations each replica takes local steps. A step that updates the variance has the mean gradient,
    so the momentum is updated with that, and nothing is compressed (as in the authors' code).

    Args:
        params: parameters, or groups of them.
        lr, bias_correction, betas, eps, weight_decay: as ``OneBitAdam``.
        var_freeze_step: the last step that may update the variance. Up to it replicas synchronize in each step.
        var_update_scaler: kappa: after so many updates of the variance, they become half as frequent; and so on.
        local_step_scaler: after so many steps behind ``var_freeze_step``, synchronizations become half as frequent;
            and so on.
        local_step_clipper: replicas synchronize at least once in so many steps.
    """

    stepper = OneBitStepper

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
        doublings = max(past // kappa + 1, 1).bit_length() - 1
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
            updates = state.get("variance_updates", self._variance_updates(int(state["step"])))
            self._place(parameter, state, state["moved"], denominator(state["exp_avg_sq"], group, updates))

    def rejoin(self, parameter: Tensor) -> None:
        """Drop the local updates of a parameter, whose value is now equal on all replicas."""
        for key in _LOCAL:
            self.state[parameter].pop(key, None)

    def synchronized_value(self, parameter: Tensor) -> Tensor:
        """Return the value that the parameter had at the last synchronization, equal on all replicas."""
        anchor: Tensor = self.state.get(parameter, {}).get("anchor", parameter)
        return anchor

    def _variance_updates(self, step: int) -> int:
        return self.updates(step)[0]

    def _pending(self, state: State) -> bool:
        return "moved" in state

    def _collect(self, p: Tensor, g: Tensor, state: State, group: State, step: int) -> LocalValue | None:
        if self._summed(step):
            return super()._collect(p, g, state, group, step)
        self._count(state, step)
        first = group["betas"][0]
        key, together = "exp_avg", self.synchronizes(step)
        if not together or "local_avg" in state:
            # From here to the next synchronization it is this replica's own, and saved as such.
            key = "local_avg"
            if key not in state:
                state[key] = state.pop("exp_avg")
        alive = local_momentum(state[key], g, state["exp_avg_sq"], first)
        # u, and what it is the momentum times: all the rates since the last synchronization.
        rate = group["lr"] / corrected(first, state["updates"], group["bias_correction"])
        shrink = 1 - group["lr"] * group["weight_decay"]
        if "moved" in state:
            moved = state["moved"].mul_(shrink).add_(state[key], alpha=rate)
        else:
            moved, state["rates"], state["shrunk"] = state[key] * rate, 0.0, 1.0
        state["rates"], state["shrunk"] = state["rates"] * shrink + rate, state["shrunk"] * shrink
        if not together:
            state["moved"] = moved
            return None
        exact = state["rates"] == 0  # nothing moved, so only the momentum itself can tell its mean
        return LocalValue(p, state[key] if exact else moved, alive, exact)

    def _move(self, p: Tensor, state: State, group: State, step: int, local: LocalValue | None) -> None:
        if self._summed(step):
            self._adamw(p, state, group)
            return
        divisor = denominator(state["exp_avg_sq"], group, state["variance_updates"])
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
        self.rejoin(p)

    @staticmethod
    def _place(p: Tensor, state: State, moved: Tensor, divisor: Tensor) -> None:
        """Set a parameter to its value at the last synchronization, plus its change since then."""
        p.copy_(torch.addcdiv(state.get("anchor", p) * state["shrunk"], moved, divisor, value=-1))
