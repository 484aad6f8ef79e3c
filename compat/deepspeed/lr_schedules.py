"""DeepSpeed's learning-rate schedules, as torch schedulers.

Parameter names, defaults and the learning rates of every step are DeepSpeed's. Where DeepSpeed's code and
documentation differ, these schedules follow the documentation: see ``OneCycle``.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ...base.errors import ConfigError
from ...engine.optim.closed_form import ClosedFormSchedule

VALID_LR_SCHEDULES = ("LRRangeTest", "OneCycle", "WarmupLR", "WarmupDecayLR", "WarmupCosineLR")

Rates = float | list[float]


def _per_group(optimizer: torch.optim.Optimizer, name: str, value: Rates) -> list[float]:
    """Return one number for each parameter group, from a number or a list."""
    groups = len(optimizer.param_groups)
    values = list(value) if isinstance(value, (list, tuple)) else [value] * groups
    if len(values) != groups:
        raise ConfigError(
            f"{name} has {len(values)} values, but the optimizer has parameter groups: {groups}. Give one number, or a "
            "list with one for each group"
        )
    if any(isinstance(v, bool) or not isinstance(v, (int, float)) or not v >= 0 for v in values):
        raise ValueError(
            f"{name} = {value!r}: give a number of at least 0, or a list with one for each parameter group"
        )
    return [float(v) for v in values]


def _positive(name: str, value: Any, least: int = 1) -> int:
    if isinstance(value, bool) or not isinstance(value, int | float) or value % 1 or value < least:
        raise ValueError(f"{name} = {value!r}: give a whole number of at least {least}")
    return int(value)  # 1e3 in a JSON file is a float


class LRRangeTest(ClosedFormSchedule):
    """Learning rate range test: a growing rate, to find the largest usable one. Smith 2018, arXiv:1803.09820.

    Args:
        optimizer: its parameter groups get the rates.
        lr_range_test_min_lr: rate of the first step; a list has one for each parameter group.
        lr_range_test_step_size: steps in which the rate grows by ``lr_range_test_step_rate`` times the first rate.
        lr_range_test_step_rate: growth in ``lr_range_test_step_size`` steps, as a factor of the first rate.
        lr_range_test_staircase: grow once every ``lr_range_test_step_size`` steps, instead of a little after each.
        last_batch_iteration: see ``ClosedFormSchedule``.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        lr_range_test_min_lr: Rates = 1e-3,
        lr_range_test_step_size: int = 2000,
        lr_range_test_step_rate: float = 1.0,
        lr_range_test_staircase: bool = False,
        last_batch_iteration: int = -1,
    ) -> None:
        self._least = _per_group(optimizer, "lr_range_test_min_lr", lr_range_test_min_lr)
        self._size = _positive("lr_range_test_step_size", lr_range_test_step_size)
        self._rate, self._staircase = lr_range_test_step_rate, lr_range_test_staircase
        super().__init__(optimizer, last_batch_iteration)

    def get_lr(self) -> list[float | Tensor]:
        """Return the rates of the next step, one for each parameter group."""
        grown = self.last_epoch // self._size if self._staircase else self.last_epoch / self._size
        return [least * (1 + self._rate * grown) for least in self._least]


class OneCycle(ClosedFormSchedule):
    """1cycle policy: rate up, down, then decay; Adam's momentum the other way. Smith 2018, arXiv:1803.09820.

    The learning rates are DeepSpeed's. The momentum differs in two points: the first step has ``cycle_max_mom``, as
    documented (DeepSpeed's code uses ``cycle_min_mom``), and Adam's second beta keeps its value (DeepSpeed's code
    sets it to 0.99).

    Args:
        optimizer: its parameter groups get the rates.
        cycle_min_lr, cycle_max_lr: lowest and highest rate; lists have one for each parameter group.
        decay_lr_rate: after the cycle the lowest rate is divided by 1 + decay_lr_rate * steps / ``decay_step_size``.
        cycle_first_step_size: steps of the rising half.
        cycle_second_step_size: steps of the falling half; None: as many as rising.
        cycle_first_stair_count, cycle_second_stair_count: stairs of each half; 0: no stairs. None: as the first half.
        decay_step_size: steps of one unit of decay; 0: no decay.
        cycle_momentum: change ``betas[0]`` too, if the optimizer has betas.
        cycle_min_mom, cycle_max_mom: lowest and highest momentum.
        decay_mom_rate: after the cycle the momentum is multiplied by 1 + decay_mom_rate * steps / ``decay_step_size``.
        last_batch_iteration: see ``ClosedFormSchedule``.

    Attributes:
        min_lrs, max_lrs: lowest and highest rate of each parameter group.
        total_size: steps of the cycle.
        step_ratio: share of the rising half in them.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        cycle_min_lr: Rates,
        cycle_max_lr: Rates,
        decay_lr_rate: float = 0.0,
        cycle_first_step_size: int = 2000,
        cycle_second_step_size: int | None = None,
        cycle_first_stair_count: int = 0,
        cycle_second_stair_count: int | None = None,
        decay_step_size: int = 0,
        cycle_momentum: bool = True,
        cycle_min_mom: Rates = 0.8,
        cycle_max_mom: Rates = 0.9,
        decay_mom_rate: float = 0.0,
        last_batch_iteration: int = -1,
    ) -> None:
        self._first = _positive("cycle_first_step_size", cycle_first_step_size)
        second = cycle_first_step_size if cycle_second_step_size is None else cycle_second_step_size
        self.total_size = self._first + _positive("cycle_second_step_size", second, 0)
        self.step_ratio = self._first / self.total_size
        stairs = cycle_first_stair_count if cycle_second_stair_count is None else cycle_second_stair_count
        self._stairs = (
            _positive("cycle_first_stair_count", cycle_first_stair_count, 0),
            _positive("cycle_second_stair_count", stairs, 0),
        )
        self._decay_size = _positive("decay_step_size", decay_step_size, 0)
        self.min_lrs = _per_group(optimizer, "cycle_min_lr", cycle_min_lr)
        self.max_lrs = _per_group(optimizer, "cycle_max_lr", cycle_max_lr)
        self._decay_lr, self._decay_mom = decay_lr_rate, decay_mom_rate
        self._light = _per_group(optimizer, "cycle_min_mom", cycle_min_mom)
        self._heavy = _per_group(optimizer, "cycle_max_mom", cycle_max_mom)
        for name, low, high in (("lr", self.min_lrs, self.max_lrs), ("mom", self._light, self._heavy)):
            if any(a > b for a, b in zip(low, high, strict=True)):
                raise ValueError(f"cycle_min_{name} = {low} is above cycle_max_{name} = {high}: exchange them")
        for name, momenta in (("cycle_max_mom", self._heavy), ("cycle_min_mom", self._light)):
            if max(momenta) >= 1:
                raise ValueError(f"{name} = {momenta}: give momenta below 1")
        self._moves = cycle_momentum and "betas" in optimizer.defaults
        if cycle_momentum and not self._moves:
            self.note = (
                f"scheduler: OneCycle changes no momentum, because {type(optimizer).__name__} has no betas: set "
                "cycle_momentum to false"
            )
        super().__init__(optimizer, last_batch_iteration)

    def get_lr(self) -> list[float | Tensor]:
        """Return the rates of the next step, one for each parameter group."""
        if self.last_batch_iteration >= self.total_size:
            return [low / self._decayed(self._decay_lr) for low in self.min_lrs]
        height = self._height()
        return [low + (high - low) * height for low, high in zip(self.min_lrs, self.max_lrs, strict=True)]

    def get_mom(self) -> list[tuple[float, float]] | None:
        """Return the betas of the next step, or None if the schedule does not change the betas."""
        if not self._moves:
            return None
        if self.last_batch_iteration >= self.total_size:
            momenta = [heavy * self._decayed(self._decay_mom) for heavy in self._heavy]
        else:
            height = self._height()
            momenta = [heavy - (heavy - light) * height for light, heavy in zip(self._light, self._heavy, strict=True)]
        return [(mom, group["betas"][1]) for mom, group in zip(momenta, self.optimizer.param_groups, strict=True)]

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Set the rates and betas of the next step; ``last_batch_iteration`` as in ``ClosedFormSchedule.step``."""
        super().step(last_batch_iteration)
        for group, betas in zip(self.optimizer.param_groups, self.get_mom() or (), strict=False):
            group["betas"] = betas

    def _height(self) -> float:
        """Return where the rate lies in the cycle: 0 is the lowest rate (at both ends of the cycle), 1 the highest."""
        at = self.last_epoch % self.total_size
        up = at <= self._first
        half = self._first if up else self.total_size - self._first
        done, stairs = (at, self._stairs[0]) if up else (self.total_size - at, self._stairs[1])
        return done * stairs // half / stairs if stairs else done / half

    def _decayed(self, rate: float) -> float:
        over = self.last_epoch - self.total_size
        return 1 + rate * over / self._decay_size if self._decay_size else 1.0


class _Warmup(ClosedFormSchedule):
    """Base class of the schedules with warmup. It computes the progress of the warmup, from 0 to 1.

    Attributes:
        warmup_num_steps: steps of the warmup, at least 2.
        warmup_type: ``log`` or ``linear``.
        total_num_steps: step at which the decay ends, if there is one.
    """

    total_num_steps: int

    def _set_warmup(self, steps: int, kind: str, total: int | None = None) -> None:
        self.warmup_num_steps = max(2, _positive("warmup_num_steps", steps, 0))
        if kind not in ("log", "linear"):
            raise ValueError(f"warmup_type = {kind!r}: give 'log' or 'linear'")
        self.warmup_type = kind
        if total is not None:
            self.total_num_steps = total = _positive("total_num_steps", total)
            if total < self.warmup_num_steps:
                self.note = (
                    f"scheduler: total_num_steps = {total} is less than warmup_num_steps = {self.warmup_num_steps}"
                )

    def _warmed(self) -> float:
        last = self.last_batch_iteration
        if last < 0:
            return 0.0
        return (
            math.log(last + 1) / math.log(self.warmup_num_steps)
            if self.warmup_type == "log"
            else last / self.warmup_num_steps
        )


class WarmupLR(_Warmup):
    """Warmup from ``warmup_min_lr`` to ``warmup_max_lr``, then a constant rate.

    Args:
        optimizer: its parameter groups get the rates.
        warmup_min_lr: first rate; a list has one for each parameter group.
        warmup_max_lr: last rate; None: the optimizer's own rates.
        warmup_num_steps: steps of the warmup; 0 and 1 count as 2.
        warmup_type: ``log``, with the logarithm of the step, or ``linear``.
        last_batch_iteration: see ``ClosedFormSchedule``.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        warmup_min_lr: Rates = 0.0,
        warmup_max_lr: Rates | None = None,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        own = [float(group["lr"]) for group in optimizer.param_groups]
        self.min_lrs = _per_group(optimizer, "warmup_min_lr", warmup_min_lr)
        self.max_lrs = _per_group(optimizer, "warmup_max_lr", own if warmup_max_lr is None else warmup_max_lr)
        if warmup_max_lr is not None and any(low > high for low, high in zip(self.min_lrs, self.max_lrs, strict=True)):
            raise ValueError(f"warmup_min_lr = {warmup_min_lr} is above warmup_max_lr = {warmup_max_lr}: exchange them")
        self._set_warmup(warmup_num_steps, warmup_type)
        super().__init__(optimizer, last_batch_iteration)

    def get_lr(self) -> list[float | Tensor]:
        """Return the rates of the next step, one for each parameter group."""
        share = self._warmed() if self.last_batch_iteration < self.warmup_num_steps else self._after()
        return [low + (high - low) * share for low, high in zip(self.min_lrs, self.max_lrs, strict=True)]

    def _after(self) -> float:
        return 1.0


class WarmupDecayLR(WarmupLR):
    """``WarmupLR``, then a linear decay to ``warmup_min_lr``, which is reached at step ``total_num_steps``.

    The other arguments are those of ``WarmupLR``.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        total_num_steps: int,
        warmup_min_lr: Rates = 0.0,
        warmup_max_lr: Rates | None = 0.001,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        self._set_warmup(warmup_num_steps, warmup_type, total_num_steps)
        super().__init__(optimizer, warmup_min_lr, warmup_max_lr, warmup_num_steps, warmup_type, last_batch_iteration)

    def _after(self) -> float:
        left = self.total_num_steps - self.last_batch_iteration
        return max(0.0, left / max(1, self.total_num_steps - self.warmup_num_steps))


class WarmupCosineLR(_Warmup):
    """Optimizer's own rates times a ratio: from ``warmup_min_ratio`` to 1, then a half cosine down.

    Args:
        optimizer: its parameter groups get the rates.
        total_num_steps: step at which the cosine ends.
        warmup_min_ratio: first ratio.
        warmup_num_steps: steps of the warmup; 0 and 1 count as 2.
        cos_min_ratio: last ratio of the cosine, kept afterwards.
        warmup_type: ``log`` or ``linear``.
        last_batch_iteration: see ``ClosedFormSchedule``.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        total_num_steps: int,
        warmup_min_ratio: float = 0.0,
        warmup_num_steps: int = 1000,
        cos_min_ratio: float = 0.0001,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        self._set_warmup(warmup_num_steps, warmup_type, total_num_steps)
        for name, ratio in (("warmup_min_ratio", warmup_min_ratio), ("cos_min_ratio", cos_min_ratio)):
            if not 0 <= ratio <= 1:
                raise ValueError(f"{name} = {ratio}: give a ratio from 0 to 1, of the optimizer's own rate")
        self._least, self._last = warmup_min_ratio, cos_min_ratio
        super().__init__(optimizer, last_batch_iteration)

    def get_lr(self) -> list[float | Tensor]:
        """Return the rates of the next step, one for each parameter group."""
        return [base * self.get_lr_ratio() for base in self.base_lrs]

    def get_lr_ratio(self) -> float:
        """Return the factor of the optimizer's own rates."""
        last = self.last_batch_iteration
        if last < 0:
            return 0.0  # DeepSpeed's first step has rate 0
        if last < self.warmup_num_steps:
            return self._least + (1 - self._least) * self._warmed()
        done = min(1.0, (last - self.warmup_num_steps + 1) / max(1, self.total_num_steps - self.warmup_num_steps))
        return self._last + (1 - self._last) * (1 + math.cos(math.pi * done)) / 2
