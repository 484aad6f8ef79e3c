"""DeepSpeed's learning-rate schedules, as torch schedulers.

Each has DeepSpeed's parameter names and defaults and, step by step, its learning rates. Where DeepSpeed's code and its
documentation differ, the documentation is followed: see ``OneCycle``.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

Rates = float | list[float]


class Schedule(LRScheduler):
    """A schedule in closed form: the learning rates depend on the number of steps taken alone.

    Args:
        optimizer: whose parameter groups get the rates.
        last_batch_iteration: the index of the last step that was taken, -1 at the start.

    Attributes:
        note: what of its parameters does not act, and why; None: they all do.
    """

    note: str | None = None
    _groups: list[dict[str, Any]]  # the optimizer's parameter groups, before torch's class knows of it

    def __init__(self, optimizer: torch.optim.Optimizer, last_batch_iteration: int = -1) -> None:
        if last_batch_iteration >= 0:
            for group in optimizer.param_groups:
                group.setdefault("initial_lr", group["lr"])
        super().__init__(optimizer, last_epoch=last_batch_iteration)

    @property
    def last_batch_iteration(self) -> int:
        """The index of the last step; -1 before the first."""
        return int(self.last_epoch) - 1

    def step(self, last_batch_iteration: int | None = None) -> None:
        """After a step of the optimizer; or as if the step of this index had just been taken."""
        if last_batch_iteration is not None:
            self.last_epoch = last_batch_iteration
        super().step()

    def state_dict(self) -> dict[str, Any]:
        """How far it is, under DeepSpeed's name; the rest follows from the configuration."""
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go to where another was: the parameter groups get its learning rates at once."""
        self.last_epoch = state_dict["last_batch_iteration"] + 1
        self._step_count = self.last_epoch + 1
        self._last_lr = self.get_lr()
        for group, rate in zip(self.optimizer.param_groups, self._last_lr, strict=True):
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate

    def _per_group(self, name: str, value: Rates) -> list[float]:
        """One number for each parameter group, from a number or a list."""
        values = list(value) if isinstance(value, (list, tuple)) else [value] * len(self._groups)
        if len(values) != len(self._groups):
            raise ValueError(f"{name} has {len(values)} values for {len(self._groups)} parameter groups")
        if any(isinstance(v, bool) or not isinstance(v, (int, float)) or not v >= 0 for v in values):
            raise ValueError(f"{name} = {value!r}: give a number that is not negative, or one a parameter group")
        return [float(v) for v in values]


def _positive(name: str, value: Any, least: int = 1) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} = {value!r}: it is a whole number of at least {least}")
    return value


class LRRangeTest(Schedule):
    """A rate that grows, to find the largest with which a model still trains. Smith 2018, arXiv:1803.09820.

    Args:
        optimizer: whose parameter groups get the rates.
        lr_range_test_min_lr: the rate of the first step; a list has one a parameter group.
        lr_range_test_step_size: steps in which it grows by ``lr_range_test_step_rate`` times the first rate.
        lr_range_test_step_rate: see there.
        lr_range_test_staircase: grow at once after so many steps, instead of a little after each.
        last_batch_iteration: see ``Schedule``.
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
        self._groups = optimizer.param_groups
        self._least = self._per_group("lr_range_test_min_lr", lr_range_test_min_lr)
        self._size = _positive("lr_range_test_step_size", lr_range_test_step_size)
        self._rate, self._staircase = lr_range_test_step_rate, lr_range_test_staircase
        super().__init__(optimizer, last_batch_iteration)

    def get_lr(self) -> list[float | Tensor]:
        """The rates of the next step."""
        grown = self.last_epoch // self._size if self._staircase else self.last_epoch / self._size
        return [least * (1 + self._rate * grown) for least in self._least]


class OneCycle(Schedule):
    """Up, down, and then a decay; Adam's momentum moves the other way. Smith 2018, arXiv:1803.09820.

    The learning rates are DeepSpeed's. Two things of its momentum are not: the first step has ``cycle_max_mom``, as
    documented (DeepSpeed's code gives it ``cycle_min_mom``), and Adam's second beta stays what the optimizer was
    given (DeepSpeed's code sets it to 0.99).

    Args:
        optimizer: whose parameter groups get the rates.
        cycle_min_lr, cycle_max_lr: the ends of the cycle; lists have one a parameter group.
        decay_lr_rate: after the cycle the least rate is divided by 1 + this * steps / ``decay_step_size``.
        cycle_first_step_size: steps upwards.
        cycle_second_step_size: steps downwards; None: as many.
        cycle_first_stair_count, cycle_second_stair_count: stairs of the half; 0: none. None: those of the first half.
        decay_step_size: 0: no decay.
        cycle_momentum: move ``betas[0]``, of optimizers that have it.
        cycle_min_mom, cycle_max_mom: its ends.
        decay_mom_rate: after the cycle the momentum is multiplied by 1 + this * steps / ``decay_step_size``.
        last_batch_iteration: see ``Schedule``.
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
        self._groups = optimizer.param_groups
        self._first = _positive("cycle_first_step_size", cycle_first_step_size)
        second = cycle_first_step_size if cycle_second_step_size is None else cycle_second_step_size
        self._total = self._first + _positive("cycle_second_step_size", second, 0)
        stairs = cycle_first_stair_count if cycle_second_stair_count is None else cycle_second_stair_count
        self._stairs = (
            _positive("cycle_first_stair_count", cycle_first_stair_count, 0),
            _positive("cycle_second_stair_count", stairs, 0),
        )
        self._decay_size = _positive("decay_step_size", decay_step_size, 0)
        self._low = self._per_group("cycle_min_lr", cycle_min_lr)
        self._high = self._per_group("cycle_max_lr", cycle_max_lr)
        self._decay_lr, self._decay_mom = decay_lr_rate, decay_mom_rate
        self._light = self._per_group("cycle_min_mom", cycle_min_mom)
        self._heavy = self._per_group("cycle_max_mom", cycle_max_mom)
        if max(*self._light, *self._heavy) >= 1:
            name, value = (
                ("cycle_max_mom", cycle_max_mom) if max(self._heavy) >= 1 else ("cycle_min_mom", cycle_min_mom)
            )
            raise ValueError(f"{name} = {value!r}: a momentum is less than 1")
        self._moves = cycle_momentum and "betas" in optimizer.defaults
        if cycle_momentum and not self._moves:
            self.note = (
                f"scheduler: OneCycle moves no momentum, because {type(optimizer).__name__} has no betas: set "
                "cycle_momentum to false"
            )
        super().__init__(optimizer, last_batch_iteration)

    def get_lr(self) -> list[float | Tensor]:
        """The rates of the next step."""
        if self.last_batch_iteration >= self._total:
            return [low / self._decayed(self._decay_lr) for low in self._low]
        height = self._height()
        return [low + (high - low) * height for low, high in zip(self._low, self._high, strict=True)]

    def get_mom(self) -> list[tuple[float, float]] | None:
        """The betas of the next step; None where they stay."""
        if not self._moves:
            return None
        if self.last_batch_iteration >= self._total:
            momenta = [heavy * self._decayed(self._decay_mom) for heavy in self._heavy]
        else:
            height = self._height()
            momenta = [heavy - (heavy - light) * height for light, heavy in zip(self._light, self._heavy, strict=True)]
        return [(mom, group["betas"][1]) for mom, group in zip(momenta, self.optimizer.param_groups, strict=True)]

    def step(self, last_batch_iteration: int | None = None) -> None:
        """See ``Schedule.step``; the betas move too."""
        super().step(last_batch_iteration)
        self._move()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """See ``Schedule.load_state_dict``; the betas go there too."""
        super().load_state_dict(state_dict)
        self._move()

    def _move(self) -> None:
        for group, betas in zip(self.optimizer.param_groups, self.get_mom() or (), strict=False):
            group["betas"] = betas

    def _height(self) -> float:
        """Where in the cycle: 0 at its ends, 1 at the top."""
        at = self.last_epoch % self._total
        up = at <= self._first
        whole = self._first if up else self._total - self._first
        done, stairs = (at, self._stairs[0]) if up else (self._total - at, self._stairs[1])
        return done * stairs // whole / stairs if stairs else done / whole

    def _decayed(self, rate: float) -> float:
        over = self.last_epoch - self._total
        return 1 + rate * over / self._decay_size if self._decay_size else 1.0


class _Warmup(Schedule):
    """The part that those that warm up have in common: how far the warming up is, from 0 to 1."""

    def _set_warmup(self, steps: int, kind: str) -> None:
        self._warmup = max(2, _positive("warmup_num_steps", steps))
        if kind not in ("log", "linear"):
            raise ValueError(f"warmup_type = {kind!r}: it is 'log' or 'linear'")
        self._log = kind == "log"

    def _warmed(self) -> float:
        last = self.last_batch_iteration
        if last < 0:
            return 0.0
        return math.log(last + 1) / math.log(self._warmup) if self._log else last / self._warmup

    def _set_total(self, total: int) -> None:
        self._total = _positive("total_num_steps", total)
        if total < self._warmup:
            self.note = f"scheduler: total_num_steps {total} are over before warmup_num_steps {self._warmup} are"


class WarmupLR(_Warmup):
    """From ``warmup_min_lr`` up to ``warmup_max_lr``, and there it stays.

    Args:
        optimizer: whose parameter groups get the rates.
        warmup_min_lr: where it starts; a list has one a parameter group.
        warmup_max_lr: where it goes; None: the optimizer's own rates.
        warmup_num_steps: in so many steps, at least 2.
        warmup_type: ``log``, with the logarithm of the step, or ``linear``.
        last_batch_iteration: see ``Schedule``.
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
        self._groups = optimizer.param_groups
        own = [float(group["lr"]) for group in self._groups]
        self._low = self._per_group("warmup_min_lr", warmup_min_lr)
        self._high = self._per_group("warmup_max_lr", own if warmup_max_lr is None else warmup_max_lr)
        self._set_warmup(warmup_num_steps, warmup_type)
        super().__init__(optimizer, last_batch_iteration)

    def get_lr(self) -> list[float | Tensor]:
        """The rates of the next step."""
        share = self._warmed() if self.last_batch_iteration < self._warmup else self._after()
        return [low + (high - low) * share for low, high in zip(self._low, self._high, strict=True)]

    def _after(self) -> float:
        return 1.0


class WarmupDecayLR(WarmupLR):
    """``WarmupLR``, and then straight down to ``warmup_min_lr`` at ``total_num_steps``."""

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
        self._set_warmup(warmup_num_steps, warmup_type)
        self._set_total(total_num_steps)
        super().__init__(optimizer, warmup_min_lr, warmup_max_lr, warmup_num_steps, warmup_type, last_batch_iteration)

    def _after(self) -> float:
        left = self._total - self.last_batch_iteration
        return max(0.0, left / max(1, self._total - self._warmup))


class WarmupCosineLR(_Warmup):
    """The optimizer's own rates times a ratio: from ``warmup_min_ratio`` to 1, then a half cosine down.

    Args:
        optimizer: whose parameter groups get the rates.
        total_num_steps: where the cosine ends.
        warmup_min_ratio: where it starts.
        warmup_num_steps: steps up, at least 2.
        cos_min_ratio: where it ends, and stays.
        warmup_type: ``log`` or ``linear``.
        last_batch_iteration: see ``Schedule``.
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
        self._set_warmup(warmup_num_steps, warmup_type)
        self._set_total(total_num_steps)
        self._least, self._last = warmup_min_ratio, cos_min_ratio
        super().__init__(optimizer, last_batch_iteration)

    def get_lr(self) -> list[float | Tensor]:
        """The rates of the next step."""
        return [base * self._ratio() for base in self.base_lrs]

    def _ratio(self) -> float:
        last = self.last_batch_iteration
        if last < 0:
            return 0.0  # DeepSpeed's first step has no rate at all
        if last < self._warmup:
            return self._least + (1 - self._least) * self._warmed()
        done = min(1.0, (last - self._warmup + 1) / max(1, self._total - self._warmup))
        return self._last + (1 - self._last) * (1 + math.cos(math.pi * done)) / 2
