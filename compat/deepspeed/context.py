"""``initialize``, which registers its engines for DeepSpeed's functions that take no engine; the grid of experts."""

from __future__ import annotations

from functools import wraps
from typing import Any
from weakref import ReferenceType, WeakValueDictionary, ref

from ...engine.base import Engine
from ...engine.initialize import initialize as make_engine
from ...grid import Grid


class DeepSpeedContext:
    """Objects that DeepSpeed's functions and layers find without an argument, because its API is global.

    Attributes:
        engines: engines by id, in the order of their creation, which is the same on every rank.
        grid: the grid that layers with experts have made, or None.
    """

    def __init__(self) -> None:
        self.engines: WeakValueDictionary[int, Engine] = WeakValueDictionary()
        self._grid: ReferenceType[Grid] | None = None

    @property
    def grid(self) -> Grid | None:
        """The grid that layers with experts have made, if it is in use and not closed."""
        grid = None if self._grid is None else self._grid()
        return None if grid is None or (grid.size > 1 and grid.world.group is None) else grid

    def expert_grid(self, size: int) -> Grid:
        """Return the grid of layers whose experts are spread over ``size`` ranks, and make it if there is none yet.

        Collective when it makes the grid.

        Raises:
            ValueError: an earlier layer has asked for another size.
        """
        grid = self.grid
        if grid is None:
            grid = Grid(expert=size)
            self._grid = ref(grid)
        if grid.expert.size != size:
            raise ValueError(
                f"ep_size is {size}, but an earlier layer has spread its experts over {grid.expert.size} ranks: give "
                "all layers the same ep_size"
            )
        return grid


# The one context of this adapter.
CONTEXT = DeepSpeedContext()


@wraps(make_engine)
def initialize(*args: Any, **kwargs: Any) -> Any:
    if kwargs.get("grid") is None and CONTEXT.grid is not None:
        kwargs["grid"] = CONTEXT.grid
    made = make_engine(*args, **kwargs)
    CONTEXT.engines[id(made[0])] = made[0]
    return made
