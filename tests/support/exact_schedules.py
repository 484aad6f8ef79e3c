"""Exact solver of the scheduling problem, for small sizes: a model of constraints for OR-Tools' CP-SAT.

It shares nothing with triax's search but the definition of the problem: a rank runs one op at a time, a message takes
its time, an input gradient follows the stage's forward and the next stage's input gradient, a weight gradient follows
its input gradient, and a rank holds at most so many activations, each from the start of F to the end of W. Microbatches
are equal, so in every stage they may keep their order: exchanging two of them changes no time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import pytest

from triax.pipe.program.ops import Op
from triax.pipe.program.schedule import Schedule


class Exact(NamedTuple):
    """Answer of the solver: the best makespan found, a proven bound, and the schedule."""

    makespan: int
    bound: int  # no schedule is shorter; equal to ``makespan`` if that is proved to be the least
    schedule: Schedule


def solve(
    placement: Sequence[int],
    microbatches: int,
    costs: Mapping[str, Sequence[int]],
    hops: Sequence[int],
    limits: Sequence[int],
    seconds: float,
) -> Exact | None:
    """Return the shortest schedule, or the shortest that the solver finds in the given time; None if it finds none.

    Args:
        placement: the rank of each stage.
        microbatches: microbatches of the step.
        costs: times of F, I and W of each stage, whole numbers.
        hops: time of a message across each boundary.
        limits: for each rank, activations that it may hold, each of one microbatch in one stage.
        seconds: limit of the solver's time.
    """
    cp_model = pytest.importorskip("ortools.sat.python.cp_model")
    model = cp_model.CpModel()
    stages, pipe = len(placement), max(placement) + 1
    horizon = microbatches * sum(map(sum, costs.values())) + 2 * sum(hops)
    starts = {
        Op(kind, s, m): model.new_int_var(0, horizon, f"{s}{kind}{m}")
        for kind in "FIW"
        for s in range(stages)
        for m in range(microbatches)
    }
    ends = {op: start + costs[op.kind][op.stage] for op, start in starts.items()}
    makespan = model.new_int_var(0, horizon, "makespan")
    for m in range(microbatches):
        for s in range(stages):
            forward, gradient, weights = (Op(kind, s, m) for kind in "FIW")
            model.add(starts[gradient] >= ends[forward])
            model.add(starts[weights] >= ends[gradient])
            model.add(makespan >= ends[weights])
            if s:
                hop = 0 if placement[s] == placement[s - 1] else hops[s - 1]
                model.add(starts[forward] >= ends[Op("F", s - 1, m)] + hop)
                model.add(starts[Op("I", s - 1, m)] >= ends[gradient] + hop)
            if m:
                for op in (forward, gradient, weights):
                    model.add(starts[op] >= ends[op._replace(microbatch=m - 1)])
    for rank, limit in zip(range(pipe), limits, strict=True):
        own = [op for op in starts if placement[op.stage] == rank]
        model.add_no_overlap(
            model.new_fixed_size_interval_var(starts[op], costs[op.kind][op.stage], str(op)) for op in own
        )
        held = []
        for op in own:
            if op.kind == "F":
                life = model.new_int_var(0, horizon, f"life {op}")
                end = ends[op._replace(kind="W")]
                held.append(model.new_interval_var(starts[op], life, end, f"held {op}"))
        if limit < len(held):
            model.add_cumulative(held, [1] * len(held), limit)
    model.minimize(makespan)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = seconds
    solver.parameters.num_workers = 2
    status = solver.solve(model)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return None
    times = {op: solver.value(start) for op, start in starts.items()}
    orders = tuple(
        tuple(sorted((op for op in starts if placement[op.stage] == rank), key=lambda op: times[op]))
        for rank in range(pipe)
    )
    found = Schedule("exact", pipe, microbatches, stages // pipe, tuple(placement), orders)
    return Exact(round(solver.objective_value), round(solver.best_objective_bound), found)
