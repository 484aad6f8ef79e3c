"""Search for a schedule that keeps a memory limit with activations in host memory, where that makes the step shorter.

Offload by `offload_pass` changes no time, so a schedule that needs more memory may take the place of a slower one. The
candidates are the named schedules, and what the search finds within wider limits. Each rank offloads the least share,
in steps of an eighth, that keeps its limit; a rank that keeps it in any case offloads nothing.

    >>> found = find_offloaded(4, 8, Costs(1, 1, 1, 0, 0, 1, 1), memory=2.5, effort=0.01)
    >>> found.offloads, found.makespan, max(peak_activations(found))
    (True, 27.0, 2.5)
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from ..program.offload import offload_pass
from ..program.schedule import Schedule
from ..program.simulate import Costs, peak_activations, simulate
from .registry import RECIPES, named_schedule
from .search import Found, chunk_counts, find_schedule

STEPS = 8  # shares of a rank's activations that are tried
WIDER = (1.5, 2.0, 3.0)  # memory limits of the search, as multiples of the given one; and none


def find_offloaded(
    pipe: int,
    microbatches: int,
    costs: Costs | None = None,
    memory: float | Sequence[float] = 1.0,
    chunks: int | None = None,
    fraction: float = 1.0,
    stages: Collection[int] | None = None,
    *,
    effort: float = 1.0,
    seed: int = 0,
) -> Found:
    """Search for the fastest schedule, with at most `memory` activations on a rank and the others in host memory.

    Args:
        pipe, microbatches, chunks, effort, seed: as for ``find_schedule``. It takes two to three times as long.
        costs: costs of F, I, W, a message, and the copies O and R.
        memory: activations that a rank may hold on its device, in microbatches through 1/pipe of the model.
        fraction: largest share of a rank's activations that may be offloaded.
        stages: stages whose activations may be offloaded; None: all.

    Returns:
        The schedule, without O and R if offload makes the step no shorter. Its lower bound is that without a limit.

    Raises:
        ValueError: as ``find_schedule`` and ``offload_pass``, or stages without chunks.
    """
    costs = costs or Costs()
    if stages is not None and chunks is None:
        raise ValueError(
            f"the stages {sorted(stages)} may be offloaded, but their numbers depend on the chunks of a rank: give chunks"
        )
    plain = find_schedule(pipe, microbatches, costs, memory, chunks, effort=effort, seed=seed)
    limits = [float(memory)] * pipe if isinstance(memory, int | float) else [float(limit) for limit in memory]
    free = find_schedule(pipe, microbatches, costs, None, chunks, effort=effort / 2, seed=seed)
    best: Schedule = plain
    least = plain.makespan
    tried: list[Schedule] = [
        named_schedule(name, pipe, microbatches, v)
        for v in chunk_counts(pipe, costs, chunks)
        for name, recipe in RECIPES.items()
        if name != "forward" and recipe.accepts(v) and microbatches >= recipe.least(pipe)
    ]
    tried.sort(key=lambda schedule: simulate(schedule, costs).makespan)
    for candidate in (free, *tried):
        made = _offloaded(candidate, limits, fraction, stages, costs, least)
        if made is not None:
            best, least = made, simulate(made, costs).makespan
    for factor in WIDER:
        if least <= free.makespan * (1 + 1e-12):
            break
        wider = [factor * limit for limit in limits]
        found = find_schedule(pipe, microbatches, costs, wider, chunks, effort=effort / 4, seed=seed)
        made = _offloaded(found, limits, fraction, stages, costs, least)
        if made is not None:
            best, least = made, found.makespan
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


def _offloaded(
    schedule: Schedule,
    limits: Sequence[float],
    fraction: float,
    stages: Collection[int] | None,
    costs: Costs,
    below: float,
) -> Schedule | None:
    """Return a schedule with O and R that keeps the limits; None if it cannot, or takes no less time than `below`."""
    if simulate(schedule, costs).makespan >= below * (1 - 1e-12):
        return None
    orders = list(schedule.orders)
    above = [rank for rank, peak in enumerate(peak_activations(schedule)) if peak > limits[rank] + 1e-9]
    for step in range(1, STEPS + 1):
        if not above:
            break
        offloaded = offload_pass(schedule, fraction * step / STEPS, stages, costs)
        peaks = peak_activations(offloaded)
        for rank in [rank for rank in above if peaks[rank] <= limits[rank] + 1e-9]:
            orders[rank] = offloaded.orders[rank]
            above.remove(rank)
    return None if above else replace(schedule, orders=tuple(orders))
