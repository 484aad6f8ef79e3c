"""1-bit LAMB: LAMB that averages momenta over replicas, one bit an element, with layerwise rates that still adapt."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ....base.errors import require_at_least
from ....grid.layout import layout_of
from .optimizer import LocalValue, OneBit, State, corrected, denominator
from .stepper import OneBitStepper


class OneBitLamb(OneBit):
    """1-bit LAMB: LAMB for ``freeze_step`` steps, then a compressed momentum over a frozen variance.

    After the warm-up each tensor's coefficient is the mean of its coefficients so far, times a factor that estimates
    how much the variance would have changed. Experts that are stacked in one tensor have a coefficient each: in a state
    of one number for each of them, of as many dims as the tensor.

    Li et al. 2021, arXiv:2104.06069, algorithm 1; LAMB: You et al. 2020, arXiv:1904.00962, algorithm 2. Names,
    defaults, and the effect of weight decay on the factor are those of the authors' code.

    Args:
        params: parameters, or groups of them, each a whole tensor.
        lr, betas, eps, weight_decay: as ``OneBitAdam``; the decay is a part of the update, and counts in its norm.
        freeze_step: steps of the warm-up, at least 1.
        bias_correction: correct the start from 0 of both moments and of the mean coefficient. The paper corrects
            nothing; nor does the authors' code, whatever is given.
        max_coeff, min_coeff: limits of a tensor's coefficient in the warm-up: its norm over that of its update.
        coeff_beta: decay of the moving average of coefficients.
        factor_max, factor_min: limits of the factor.
        factor_threshold: relative change of the factor in a step, at most.
    """

    stepper = OneBitStepper

    needs_whole_tensors = ("its coefficients are of whole tensors", "OneBitAdam")

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        freeze_step: int = 100000,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
        coeff_beta: float = 0.9,
        factor_max: float = 4.0,
        factor_min: float = 0.5,
        factor_threshold: float = 0.1,
    ) -> None:
        require_at_least(1, freeze_step=freeze_step)
        require_at_least(0.0, min_coeff=min_coeff, factor_min=factor_min, factor_threshold=factor_threshold)
        require_at_least(0.0, coeff_beta=coeff_beta)
        require_at_least(min_coeff, max_coeff=max_coeff)
        require_at_least(factor_min, factor_max=factor_max)
        if not coeff_beta < 1:
            raise ValueError(f"coeff_beta={coeff_beta} is too large: give a number from 0 to below 1")
        options = {"lr": lr, "freeze_step": freeze_step, "bias_correction": bias_correction, "betas": betas, "eps": eps}
        limits = {"max_coeff": max_coeff, "min_coeff": min_coeff, "coeff_beta": coeff_beta, "factor_max": factor_max}
        limits |= {"factor_min": factor_min, "factor_threshold": factor_threshold}
        super().__init__(params, {**options, "weight_decay": weight_decay, **limits})
        self._momenta: dict[Tensor, Tensor] = {}  # of the last step, until the new ones are averaged

    def _collect(self, p: Tensor, g: Tensor, state: State, group: State, step: int) -> LocalValue | None:
        if not self._summed(step):
            self._momenta[p] = state["exp_avg"].clone()
        return super()._collect(p, g, state, group, step)

    def _move(self, p: Tensor, state: State, group: State, step: int, local: LocalValue | None) -> None:
        divisor = denominator(state["exp_avg_sq"], group, state["variance_updates"])
        rate = 1 / corrected(group["betas"][0], state["updates"], group["bias_correction"])
        update = state["exp_avg"] * rate / divisor
        small = _norm(p, update)
        update.add_(p, alpha=group["weight_decay"])
        if local is None:
            coefficient = self._trust(p, update, group)
            self._average(state, coefficient, group)
        else:
            factor = self._factor(p, state, group, divisor)
            if group["weight_decay"]:
                # As in the authors' code: only the part of the update that is not decay depends on the variance.
                part = (small / _norm(p, update)).nan_to_num(1.0).clamp(max=1.0)
                factor = factor * part + (1 - part)
            factor = factor.clamp(group["factor_min"], group["factor_max"])
            # Scalars loaded from a checkpoint are on the CPU.
            last, change = state.get("factor", torch.ones_like(factor)).to(p.device), group["factor_threshold"]
            state["factor"] = factor.clamp(last * (1 - change), last * (1 + change))
            coefficient = state["factor"] * self._mean(state, group)
        p.sub_(update.mul_(coefficient * group["lr"]))

    def _trust(self, p: Tensor, update: Tensor, group: State) -> Tensor:
        """Return LAMB's coefficient: a layer's norm over that of its update, within limits; 1 if one of them is 0."""
        weight, step = _norm(p, p), _norm(p, update)
        ratio = (weight / step).clamp(group["min_coeff"], group["max_coeff"])
        return torch.where((weight > 0) & (step > 0), ratio, torch.ones_like(ratio))

    def _average(self, state: State, coefficient: Tensor, group: State) -> None:
        """Update the moving average of a tensor's coefficients, ``coeff``, which starts at 0.

        ``coeff_weight`` is the sum of the weights in this average: dividing by it corrects the start from 0.
        """
        beta = group["coeff_beta"]
        before = state.get("coeff", torch.zeros_like(coefficient)).to(coefficient.device)
        state["coeff"] = coefficient * (1 - beta) + before * beta
        state["coeff_weight"] = 1 - beta + state.get("coeff_weight", 0.0) * beta

    def _mean(self, state: State, group: State) -> Any:
        """Return the mean coefficient of the warm-up; 0 for a tensor that had no gradient in it."""
        if "coeff" not in state:
            return 0.0
        return state["coeff"] / state["coeff_weight"] if group["bias_correction"] else state["coeff"]

    def _factor(self, p: Tensor, state: State, group: State, divisor: Tensor) -> Tensor:
        """Return the factor of the coefficient: the largest ratio, over the elements, of two roots of variances.

        One variance is frozen since the warm-up. The other is still updated, with a gradient that is computed from the
        momenta of this step and the step before. ``divisor`` is the root of the frozen variance plus eps.
        """
        first, second = group["betas"]
        gradient = (state["exp_avg"] - first * self._momenta.pop(p)).div_(1 - first)
        if "exp_avg_sq_fresh" not in state:
            state["exp_avg_sq_fresh"] = state["exp_avg_sq"].clone()
        fresh = state["exp_avg_sq_fresh"].mul_(second).addcmul_(gradient, gradient, value=1 - second)
        ratio = (divisor / denominator(fresh, group, state["updates"])).mul_(state["exp_avg_sq"].sign())
        dims = _within_a_layer(p)
        if not ratio.numel():
            return divisor.new_ones(())
        return ratio.amax(dims, keepdim=True) if dims is not None else ratio.max()


def _within_a_layer(p: Tensor) -> tuple[int, ...] | None:
    """Return the dims of each of the experts in a tensor; None of a tensor that is one layer."""
    expert_dim = layout_of(p).expert_dim
    return None if expert_dim is None else tuple(dim for dim in range(p.dim()) if dim != expert_dim)


def _norm(p: Tensor, x: Tensor) -> Tensor:
    """Return the 2-norm of each layer of a tensor: (), or one for each expert, of as many dims as the tensor."""
    dims = _within_a_layer(p)
    return x.norm() if dims is None else torch.linalg.vector_norm(x, dim=dims, keepdim=True)
