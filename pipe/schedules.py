"""The named schedules: `make_schedule("1f1b", pipe=2, microbatches=3)`.

    >>> print(make_schedule("1f1b", pipe=2, microbatches=3))
    1f1b: pipe 2, microbatches 3, chunks 1
    rank 0: 0F0 0F1 0B0 0F2 0B1 0B2
    rank 1: 1F0 1B0 1F1 1B1 1F2 1B2

The generators are in classic.py, zero_bubble.py, v_shaped.py and wave.py, each under a drawing of its own
output; the value they make is in schedule.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from . import classic, v_shaped, wave, zero_bubble
from .ops import Op
from .schedule import Schedule

__all__ = ["NAMES", "RECIPES", "Recipe", "Schedule", "loop", "make_schedule", "zigzag"]

Order = list[Op]


@dataclass(frozen=True)
class Recipe:
    """How a named schedule is made, and which chunks it knows."""

    make: Callable[[int, int, int], list[Order]]  # (pipe, microbatches, chunks) -> the order of each rank
    place: Callable[[int, int], tuple[int, ...]]  # (pipe, chunks) -> the rank of each stage
    chunks: int = 1  # when the user does not say
    accepts: Callable[[int], bool] = lambda chunks: chunks == 1
    least: Callable[[int], int] = lambda pipe: 1  # microbatches it needs at least


def loop(pipe: int, chunks: int) -> tuple[int, ...]:
    """0 1 2 3 0 1 2 3: from the last rank back to the first."""
    return tuple(range(pipe)) * chunks


def zigzag(pipe: int, chunks: int) -> tuple[int, ...]:
    """0 1 2 3 3 2 1 0: back the way it came, so each turn stays on one rank."""
    return tuple(r for c in range(chunks) for r in (range(pipe) if c % 2 == 0 else reversed(range(pipe))))


RECIPES: dict[str, Recipe] = {
    "gpipe": Recipe(classic.gpipe, loop),
    "1f1b": Recipe(classic.one_f_one_b, loop),
    "eager-1f1b": Recipe(classic.eager_1f1b, loop),
    "interleaved": Recipe(classic.interleaved, loop, 2, lambda chunks: chunks >= 2),
    "looped-bfs": Recipe(classic.looped_bfs, loop, 2, lambda chunks: chunks >= 2),
    "zb-h1": Recipe(zero_bubble.zb_h1, loop),
    "zb-h2": Recipe(zero_bubble.zb_h2, loop),
    "zb-v": Recipe(v_shaped.zb_v, zigzag, 2, lambda chunks: chunks == 2),
    "v-half": Recipe(v_shaped.v_half, zigzag, 2, lambda chunks: chunks == 2),
    "v-min": Recipe(v_shaped.v_min, zigzag, 2, lambda chunks: chunks == 2),
    "dualpipe-v": Recipe(v_shaped.dualpipe_v, zigzag, 2, lambda chunks: chunks == 2, lambda pipe: 2 * pipe),
    "wave": Recipe(wave.wave, zigzag, 2, lambda chunks: chunks >= 2 and chunks % 2 == 0),
    "forward": Recipe(classic.forward, loop, 1, lambda chunks: chunks >= 1),
}

NAMES = (*RECIPES, "auto")


def make_schedule(name: str, pipe: int, microbatches: int, chunks: int | None = None) -> Schedule:
    """The schedule `name` for `pipe` ranks; `chunks` is the stages per rank (None: its own default).

    `auto` is searched for: at F = I = W, within 1F1B's memory. For measured costs see `find_schedule`.
    """
    if name == "auto":
        from .search import find_schedule  # it starts from the named ones

        return find_schedule(pipe, microbatches, memory=pipe, chunks=chunks)
    recipe = RECIPES.get(name)
    if recipe is None:
        raise ValueError(f"there is no schedule {name!r}: choose one of {', '.join(NAMES)}")
    if pipe < 1 or microbatches < 1:
        raise ValueError(
            f"{name} needs at least 1 rank and 1 microbatch, not pipe={pipe}, microbatches={microbatches}: "
            f"the nearest is pipe={max(pipe, 1)}, microbatches={max(microbatches, recipe.least(max(pipe, 1)))}"
        )
    if chunks is None:
        chunks = recipe.chunks
    if not recipe.accepts(chunks):
        near = sorted(range(1, max(chunks, 1) + 5), key=lambda c: (abs(c - chunks), c))
        nearest = next(c for c in near if recipe.accepts(c))
        raise ValueError(f"{name} does not run {chunks} chunks per rank: the nearest is chunks={nearest}")
    if microbatches < recipe.least(pipe):
        fits = max((p for p in range(1, pipe) if recipe.least(p) <= microbatches), default=None)
        or_ = "" if fits is None else f", or pipe={fits} with microbatches={microbatches}"
        raise ValueError(
            f"{name} needs at least {recipe.least(pipe)} microbatches for {pipe} ranks, not {microbatches}: "
            f"the nearest is microbatches={recipe.least(pipe)}{or_}"
        )
    orders = recipe.make(pipe, microbatches, chunks)
    return Schedule(name, pipe, microbatches, chunks, recipe.place(pipe, chunks), tuple(map(tuple, orders)))
