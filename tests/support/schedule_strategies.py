"""Hypothesis strategies for schedules."""

from __future__ import annotations

from hypothesis import strategies as st

from triax.pipe.program.schedule import Schedule
from triax.pipe.schedules.choose import make_schedule
from triax.pipe.schedules.registry import RECIPES


@st.composite
def schedules(draw: st.DrawFn, names: tuple[str, ...] = tuple(RECIPES)) -> Schedule:
    name = draw(st.sampled_from(names))
    recipe = RECIPES[name]
    pipe = draw(st.integers(1, 5))
    chunks = draw(st.sampled_from([c for c in range(1, 5) if recipe.accepts(c)]))
    return make_schedule(name, pipe, draw(st.integers(recipe.least(pipe), 12)), chunks)
