"""Search for a schedule that keeps a memory limit by offload and recomputation, where that makes the step shorter.

Offload by `offload_pass` changes no time, and recomputation by `recompute_pass` costs none where a rank waits. So a
schedule that needs more memory may take the place of a slower one. The candidates are the named schedules, and what the
search finds within wider limits. Each rank gives up the least share of its activations, in steps of an eighth, that
keeps its limit, by offload if that is enough; a rank that keeps it in any case gives up nothing.

    >>> found = find_fitting(4, 8, Costs(1, 1, 1, 0, 0, 1, 1), memory=2.5, offload=1, effort=0.01)
    >>> found.offloads, found.makespan, max(peak_activations(found))
    (True, 25.5, 2.5)
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import partial

from ..program.activations import peak_activations
from ..program.costs import Costs
from ..program.offload import offload_pass
from ..program.recompute_pass import recompute_pass
from ..program.schedule import Schedule
from ..program.simulate import simulate
from .registry import RECIPES, named_schedule
from .search import Found, chunk_counts, find_schedule, without_pairs

STEPS = 8  # shares of a rank's activations that are tried
WIDER = (1.5, 2.0, 3.0)  # memory limits of the search, as multiples of the given one; and none


def find_fitting(
    pipe: int,
    microbatches: int,
    costs: Costs | None = None,
    memory: float | Sequence[float] = 1.0,
    chunks: int | None = None,
    offload: float = 0.0,
    recompute: float = 0.0,
    stages: Collection[int] | None = None,
    *,
    effort: float = 1.0,
    seed: int = 0,
) -> Found:
    """Search for the fastest schedule with at most `memory` activations on a rank, the others offloaded or recomputed.

    Args:
        pipe, microbatches, chunks, effort, seed: as for ``find_schedule``. It takes two to three times as long.
        costs: costs of F, I, W, a message, and the copies O and R.
        memory: activations that a rank may hold on its device, in microbatches through 1/pipe of the model.
        offload: largest share of a rank's activations that may be offloaded.
        recompute: largest share of a rank's activations that may be recomputed by C ops.
        stages: stages whose activations may be offloaded; None: all.

    Returns:
        The schedule, without O, R and C if they make the step no shorter. Its lower bound ignores the limit.

    Raises:
        ValueError: as ``find_schedule`` and ``offload_pass``, or stages without chunks.
    """
    costs = costs or Costs()
    if stages is not None and chunks is None:
        raise ValueError(
            f"the stages {sorted(stages)} may be offloaded, and their numbers depend on the chunks: give chunks"
        )
    plain = find_schedule(pipe, microbatches, costs, memory, chunks, effort=effort, seed=seed)
    limits = [float(memory)] * pipe if isinstance(memory, int | float) else [float(limit) for limit in memory]
    free = find_schedule(pipe, microbatches, costs, None, chunks, effort=effort / 2, seed=seed)
    best: Schedule = plain
    least = plain.makespan
    tried: list[Schedule] = [
        without_pairs(named_schedule(name, pipe, microbatches, v))
        for v in chunk_counts(pipe, costs, chunks)
        for name, recipe in RECIPES.items()
        if name != "forward" and recipe.accepts(v) and microbatches >= recipe.least(pipe)
    ]
    tried.sort(key=lambda schedule: simulate(schedule, costs).makespan)
    for candidate in (free, *tried):
        made = _fitted(candidate, limits, offload, recompute, stages, costs, least)
        if made is not None:
            best, least = made, simulate(made, costs).makespan
    for factor in WIDER:
        if least <= free.makespan * (1 + 1e-12):
            break
        wider = [factor * limit for limit in limits]
        searched = find_schedule(pipe, microbatches, costs, wider, chunks, effort=effort / 4, seed=seed)
        made = _fitted(searched, limits, offload, recompute, stages, costs, least)
        if made is not None:
            best, least = made, simulate(made, costs).makespan
    result = simulate(best, costs)
    return replace(
        plain,
        chunks=best.chunks,
        placement=best.placement,
        orders=best.orders,
        makespan=result.makespan,
        bubble=result.bubble,
        lower_bound=min(free.lower_bound, result.makespan),
    )


def _fitted(
    schedule: Schedule,
    limits: Sequence[float],
    offload: float,
    recompute: float,
    stages: Collection[int] | None,
    costs: Costs,
    below: float,
) -> Schedule | None:
    """Return a schedule with O, R and C that keeps the limits; None if it cannot, or is not faster than `below`."""
    if simulate(schedule, costs).makespan >= below * (1 - 1e-12):
        return None
    orders = list(schedule.orders)
    above = [rank for rank, peak in enumerate(peak_activations(schedule)) if peak > limits[rank] + 1e-9]
    shares = [k / STEPS for k in range(1, STEPS + 1)]
    ways = [partial(offload_pass, schedule, offload * share, stages, costs) for share in shares if offload]
    ways += [partial(recompute_pass, schedule, recompute * share, None, costs) for share in shares if recompute]
    for way in ways:
        if not above:
            break
        made = way()
        peaks = peak_activations(made)
        for rank in [rank for rank in above if peaks[rank] <= limits[rank] + 1e-9]:
            orders[rank] = made.orders[rank]
            above.remove(rank)
    changed = replace(schedule, orders=tuple(orders))
    return None if above or simulate(changed, costs).makespan >= below * (1 - 1e-12) else changed
