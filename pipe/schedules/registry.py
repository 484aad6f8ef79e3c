"""Registry of the published schedules: name -> generator, placement, and the sizes it exists for.

>>> print(named_schedule("1f1b", pipe=2, microbatches=3))
1f1b: pipe 2, microbatches 3, chunks 1
rank 0: 0F0 0F1 0B0 0F2 0B1 0B2
rank 1: 1F0 1B0 1F1 1B1 1F2 1B2
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ...base.errors import nearest
from ..program.ops import Op, Orders
from ..program.placement import loop, zigzag
from ..program.schedule import Schedule
from . import braided, classic, hanayo, v_shaped, zero_bubble


@dataclass(frozen=True)
class Recipe:
    """Entry of the registry: generator of a schedule, placement of its stages, and sizes for which it exists."""

    make: Callable[[int, int, int], Orders]  # (pipe, microbatches, chunks) -> the order of each rank
    place: Callable[[int, int], tuple[int, ...]]  # (pipe, chunks) -> the rank of each stage
    chunks: int = 1  # the default
    accepts: Callable[[int], bool] = lambda chunks: chunks == 1
    least: Callable[[int], int] = lambda pipe: 1  # pipe -> the least number of microbatches
    pairs: Callable[[int, int, int], frozenset[Op]] | None = None  # as make -> the first op of each pair


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
    "stp": Recipe(
        braided.stp, zigzag, 2, lambda chunks: chunks == 2, lambda pipe: 3 * pipe - 1, pairs=braided.stp_pairs
    ),
    "wave": Recipe(hanayo.wave, zigzag, 2, lambda chunks: chunks >= 2 and chunks % 2 == 0),
    "forward": Recipe(classic.forward, loop, 1, lambda chunks: chunks >= 1),
}


def named_schedule(name: str, pipe: int, microbatches: int, chunks: int | None = None) -> Schedule:
    """Make the schedule `name`, a key of RECIPES.

    Args:
        name: a key of RECIPES. (`make_schedule` in choose.py also takes `auto` and files.)
        pipe: ranks of the pipe axis.
        microbatches: microbatches of a step.
        chunks: stages per rank; None: the recipe's default.

    Raises:
        ValueError: an unknown name, or sizes that the schedule does not exist for; the message gives the nearest.
    """
    recipe = RECIPES.get(name)
    if recipe is None:
        raise ValueError(f"there is no schedule {name!r}; {nearest(name, (*RECIPES, 'auto'))}")
    if pipe < 1 or microbatches < 1:
        raise ValueError(
            f"{name} needs at least 1 rank and 1 microbatch, not pipe={pipe}, microbatches={microbatches}: "
            f"the nearest is pipe={max(pipe, 1)}, microbatches={max(microbatches, recipe.least(max(pipe, 1)))}"
        )
    if chunks is None:
        chunks = recipe.chunks
    if not recipe.accepts(chunks):
        near = sorted(range(1, max(chunks, 1) + 5), key=lambda c: (abs(c - chunks), c))
        other = next(c for c in near if recipe.accepts(c))
        raise ValueError(f"{name} does not run {chunks} chunks per rank: the nearest is chunks={other}")
    if microbatches < recipe.least(pipe):
        fits = max((p for p in range(1, pipe) if recipe.least(p) <= microbatches), default=None)
        or_ = "" if fits is None else f", or pipe={fits} with microbatches={microbatches}"
        raise ValueError(
            f"{name} needs at least {recipe.least(pipe)} microbatches for {pipe} ranks, not {microbatches}: "
            f"the nearest is microbatches={recipe.least(pipe)}{or_}"
        )
    sizes = pipe, microbatches, chunks
    orders = tuple(map(tuple, recipe.make(*sizes)))
    pairs = frozenset[Op]() if recipe.pairs is None else recipe.pairs(*sizes)
    return Schedule(name, *sizes, recipe.place(pipe, chunks), orders, pairs=pairs)
