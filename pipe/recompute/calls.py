"""RecomputeCalls: recomputation of the functions that a model's own code names, ``recompute(function, *args)``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from ...grid import Grid
from ...grid.randomness.random import DropoutState
from ...grid.randomness.random_states import RandomStates
from .kept_inputs import Inputs
from .recompute import Group, Recompute, module_of, stateful


class RecomputeCalls:
    """Calls functions whose inputs are kept, and which the backward pass runs again: ``recompute(block, x)``.

    The second run has the state of all random generators of the first, so dropout is exact.

    Args:
        grid: the grid, over whose tensor axis inputs are partitioned.
        partition: each rank of the tensor axis keeps a part of an input that all of them have.
        host: keep inputs in host memory.
        synchronize: wait for the device before and after each run.
        profile: measure the second runs.
        random: named random states, which a second run repeats too.
    """

    def __init__(
        self,
        grid: Grid,
        partition: bool = False,
        host: bool = False,
        synchronize: bool = False,
        profile: bool = False,
        random: RandomStates | None = None,
    ) -> None:
        self.grid, self.random = grid, random or RandomStates()
        self._recompute = Recompute(grid, DropoutState(0), 1, synchronize=synchronize, profile=profile)
        self._recompute.inputs = Inputs(grid, partition, host)

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Return ``function(*args, **kwargs)``."""
        code = getattr(function, "__code__", None)
        where = "" if code is None else f" at line {code.co_firstlineno} of {code.co_filename}"
        name = getattr(function, "__qualname__", type(function).__name__)
        module = module_of(function)
        parts = () if module is None else stateful([module])
        group = Group(0, 1, True, f"the checkpointed function {name}{where}", (), parts)
        return self._recompute.run_block(group, self._repeating(function), *args, **kwargs)

    def _repeating(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function; in its second run it has the named random states of the first."""
        first: list[dict[str, Tensor]] = []

        def run(*args: Any, **kwargs: Any) -> Any:
            now = self.random.get_states()
            if not first:
                first.append(now)
                return function(*args, **kwargs)
            self.random.set_states(first[0])
            try:
                return function(*args, **kwargs)
            finally:
                self.random.set_states(now)

        return run
