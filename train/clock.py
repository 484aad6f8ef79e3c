"""Clock of a run: the time that its steps took, what is left, and the time limit."""

from __future__ import annotations

import math
import time

import torch

from ..grid import Grid


class RunClock:
    """Clock of a run. It starts when it is made.

    Args:
        grid: the run's grid.
        tokens: tokens of a step.
        limit: seconds after which the run ends; None: no limit.

    Attributes:
        elapsed: seconds since the start, at the end of the last step.
        speed: tokens per second, lately.
    """

    def __init__(self, grid: Grid, tokens: int, limit: float | None) -> None:
        self._grid, self._tokens, self._limit = grid, tokens, math.inf if limit is None else limit
        self._step = 0.0  # seconds, lately
        self._steps = 0
        self._start = self._before = time.monotonic()
        self.elapsed, self.speed = 0.0, 0.0

    def tick(self, grids: int = 1) -> None:
        """Note the end of a step, to which so many grids of this size have contributed."""
        now = time.monotonic()
        took = max(now - self._before, 1e-9)
        self._steps += 1
        # The first step also warms up: it would spoil the mean.
        self._step = took if self._steps <= 2 else 0.9 * self._step + 0.1 * took
        self._before, self.elapsed = now, now - self._start
        self.speed = grids * self._tokens / self._step

    def left(self, steps: int) -> float:
        """Return the seconds that a number of steps will take, or that the limit leaves."""
        return min(steps * self._step, max(self._limit - self.elapsed, 0.0))

    def skip(self) -> None:
        """Leave the time since the last step out of the next one."""
        self._before = time.monotonic()

    def is_up(self) -> bool:
        """Return True if the next step is the last one in time, with one to spare. Collective: rank 0 decides."""
        if self._limit == math.inf:
            return False
        up = float(time.monotonic() - self._start + 2 * self._step > self._limit)
        flag = torch.tensor([up], device=self._grid.device)
        self._grid.world.broadcast(flag)
        return bool(flag)
