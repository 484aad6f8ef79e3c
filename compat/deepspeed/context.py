"""``initialize``, which registers its engines for DeepSpeed's functions that take no engine; the experts' grid."""

from __future__ import annotations

from functools import wraps
from typing import Any
from weakref import WeakValueDictionary

from ...engine.base import Engine
from ...engine.initialize import initialize as make_engine
from ...grid import Grid

# The one context of this adapter, because DeepSpeed's API is global: engines by id, in the order of their creation,
# which is the same on every rank.
ENGINES: WeakValueDictionary[int, Engine] = WeakValueDictionary()


# The grid that layers with experts made, by the number 0: DeepSpeed's layers take no grid either.
GRIDS: WeakValueDictionary[int, Grid] = WeakValueDictionary()


def expert_grid(size: int) -> Grid:
    """Return the grid of layers whose experts are spread over ``size`` ranks, and make it if there is none yet.

    Collective when it makes the grid.

    Raises:
        ValueError: an earlier layer has asked for another size.
    """
    grid = GRIDS.get(0)
    if grid is None or (grid.size > 1 and grid.world.group is None):  # none yet, or closed
        grid = GRIDS[0] = Grid(expert=size)
    if grid.expert.size != size:
        raise ValueError(
            f"ep_size is {size}, but an earlier layer has spread its experts over {grid.expert.size} ranks: give all "
            "layers the same ep_size"
        )
    return grid


@wraps(make_engine)
def initialize(*args: Any, **kwargs: Any) -> Any:
    if kwargs.get("grid") is None and (grid := GRIDS.get(0)) is not None:
        kwargs["grid"] = grid
    made = make_engine(*args, **kwargs)
    ENGINES[id(made[0])] = made[0]
    return made
