"""Registry of the published schedules: name -> generator, placement, and the sizes it exists for.

>>> print(named_schedule("1f1b", pipe=2, microbatches=3))
1f1b: pipe 2, microbatches 3, chunks 1
rank 0: 0F0 0F1 0B0 0F2 0B1 0B2
rank 1: 1F0 1B0 1F1 1B1 1F2 1B2
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ...base.errors import nearest
from ..program.ops import Op, Orders
from ..program.placement import loop, zigzag
from ..program.schedule import Schedule
from ..program.slices import in_order_of_slices, slice_lengths
from . import braided, classic, hanayo, v_shaped, zero_bubble
from . import closed_forms as forms
from .closed_forms import ClosedForm, InFlight


@dataclass(frozen=True)
class Recipe:
    """Entry of the registry: generator of a schedule, placement of its stages, and sizes for which it exists."""

    # (pipe, microbatches, chunks) -> the order of each rank; with `sliced` also slices, and all slices of the step
    # in place of the microbatches
    make: Callable[..., Orders]
    place: Callable[[int, int], tuple[int, ...]]  # (pipe, chunks) -> the rank of each stage
    chunks: int = 1  # the default
    accepts: Callable[[int], bool] = lambda chunks: chunks == 1
    least: Callable[[int], int] = lambda pipe: 1  # pipe -> the least number of microbatches
    pairs: Callable[[int, int, int], frozenset[Op]] | None = None  # as make -> the first op of each pair
    sliced: bool = False  # runs slices of sequences too
    trains: bool = True  # has backward passes
    split: bool = False  # weight gradients are passes of their own
    tunable: bool = False  # its passes can be arranged for their measured times, as `tune` does
    searched: bool = False  # searches for the fastest schedule and cut try it
    sends_ahead: bool = False  # no rank waits for a message
    closed: ClosedForm | None = None  # idle time of a step
    in_flight: InFlight = lambda pipe, microbatches, chunks: None  # activations held
    steady: Callable[[int], float] = lambda pipe: 2 * pipe  # pipe -> microbatches beyond which no more are in flight
    # (forward, input gradients, weight gradients, collectives of a pass), pipe -> idle time of ranks whose collectives
    # run beside other passes
    idle_in_pairs: Callable[[float, float, float, float, int], float] | None = None


def _two(chunks: int) -> bool:
    return chunks == 2


RECIPES: dict[str, Recipe] = {
    "gpipe": Recipe(
        classic.gpipe,
        loop,
        sliced=True,
        closed=forms.WHOLE,
        in_flight=forms.all_in_flight,
        steady=lambda pipe: math.inf,
    ),
    "1f1b": Recipe(
        *(classic.one_f_one_b, loop),
        sliced=True,
        searched=True,
        closed=forms.WHOLE,
        in_flight=forms.one_f_one_b_in_flight,
        steady=lambda pipe: pipe,
    ),
    "eager-1f1b": Recipe(classic.eager_1f1b, loop, sends_ahead=True, closed=forms.WHOLE),
    "interleaved": Recipe(
        *(classic.interleaved, loop, 2, lambda chunks: chunks >= 2),
        sliced=True,
        searched=True,
        closed=forms.ROUNDS,
        in_flight=forms.interleaved_in_flight,
    ),
    "looped-bfs": Recipe(
        *(classic.looped_bfs, loop, 2, lambda chunks: chunks >= 2),
        closed=forms.ROUNDS,
        in_flight=forms.all_in_flight,
        steady=lambda pipe: math.inf,
    ),
    "zb-h1": Recipe(
        *(zero_bubble.zb_h1, loop),
        sliced=True,
        split=True,
        tunable=True,
        searched=True,
        closed=forms.ZB_H1,
        in_flight=forms.zb_h1_in_flight,
        steady=lambda pipe: pipe,
    ),
    "zb-h2": Recipe(
        *(zero_bubble.zb_h2, loop),
        split=True,
        tunable=True,
        searched=True,
        closed=forms.ZB_H2,
        in_flight=forms.zb_h2_in_flight,
    ),
    "zb-v": Recipe(
        *(v_shaped.zb_v, zigzag, 2, _two),
        split=True,
        tunable=True,
        searched=True,
        closed=forms.ZB_V,
        in_flight=forms.zb_v_in_flight,
    ),
    "v-half": Recipe(v_shaped.v_half, zigzag, 2, _two, split=True, tunable=True, searched=True),
    "v-min": Recipe(v_shaped.v_min, zigzag, 2, _two, split=True, tunable=True, searched=True),
    "dualpipe-v": Recipe(v_shaped.dualpipe_v, zigzag, 2, _two, lambda pipe: 2 * pipe, split=True),
    "stp": Recipe(
        *(braided.stp, zigzag, 2, _two, lambda pipe: 3 * pipe - 1),
        pairs=braided.stp_pairs,
        split=True,
        idle_in_pairs=braided.stp_idle,
    ),
    "wave": Recipe(hanayo.wave, zigzag, 2, lambda chunks: chunks >= 2 and chunks % 2 == 0),
    "forward": Recipe(classic.forward, loop, 1, lambda chunks: chunks >= 1, trains=False),
}


def named_schedule(
    name: str, pipe: int, microbatches: int, chunks: int | None = None, slices: int | Sequence[float] = 1
) -> Schedule:
    """Make the schedule `name`, a key of RECIPES.

    Args:
        name: a key of RECIPES. (`make_schedule` in choose.py also takes `auto` and files.)
        pipe: ranks of the pipe axis.
        microbatches: microbatches of a step.
        chunks: stages per rank; None: the recipe's default.
        slices: slices of each microbatch: their number, or their relative lengths.

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
    lengths = slice_lengths(slices)
    sizes = pipe, microbatches, chunks
    if (count := len(lengths)) == 1:
        orders, lengths = recipe.make(*sizes), (1,)
    elif not recipe.sliced:
        sliced = ", ".join(other for other, known in RECIPES.items() if known.sliced)
        raise ValueError(f"{name} runs whole microbatches, not {count} slices of each: use {sliced}, or slices=1")
    else:
        orders = in_order_of_slices(recipe.make(pipe, microbatches * count, chunks, count), count)
    pairs = frozenset[Op]() if recipe.pairs is None else recipe.pairs(*sizes)
    placement = recipe.place(pipe, chunks)
    return Schedule(name, *sizes, placement, tuple(map(tuple, orders)), pairs=pairs, slices=lengths)
