"""Hypothesis strategies for schedules, grids and numbers of microbatches."""

from __future__ import annotations

import math

from ..base.errors import to_install

try:
    from hypothesis import strategies as st
except ImportError:
    raise ImportError(f"strategies need hypothesis: {to_install('testing')}", name="hypothesis") from None

from ..pipe.program.schedule import Schedule
from ..pipe.schedules.choose import make_schedule
from ..pipe.schedules.registry import RECIPES
from .grids import AXES

_ALONE = tuple(name for name, recipe in RECIPES.items() if recipe.pairs is None)


@st.composite
def schedules(draw: st.DrawFn, names: tuple[str, ...] = _ALONE, most: int = 12) -> Schedule:
    """Draw a named schedule, by default without pairs, of 1 to 5 ranks and at most ``most`` microbatches."""
    name = draw(st.sampled_from(names))
    recipe = RECIPES[name]
    pipe = draw(st.integers(1, 5))
    chunks = draw(st.sampled_from([c for c in range(1, 5) if recipe.accepts(c)]))
    return make_schedule(name, pipe, draw(microbatch_counts(name, pipe, most)), chunks)


def microbatch_counts(name: str, pipe: int, most: int = 12) -> st.SearchStrategy[int]:
    """Draw a number of microbatches for which a named schedule exists on ``pipe`` ranks."""
    least = RECIPES[name].least(pipe)
    return st.integers(least, max(least, most))


@st.composite
def grids(draw: st.DrawFn, ranks: int = 8, axes: tuple[str, ...] = ("pipe", "data", "tensor")) -> dict[str, int]:
    """Draw sizes of the axes of a grid with at most ``ranks`` ranks, as keyword arguments of ``triax.Grid``."""
    sizes: dict[str, int] = {}
    for axis in draw(st.permutations(axes)):
        sizes[axis] = draw(st.integers(1, ranks // math.prod(sizes.values())))
    return {axis: sizes[axis] for axis in AXES if axis in sizes}
