"""The simulator against an independent one, and its figures against their definitions."""

from __future__ import annotations

import sys
from collections.abc import Collection
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from triax.pipe.program.costs import Costs
from triax.pipe.program.deadlock import ScheduleError
from triax.pipe.program.ops import Op
from triax.pipe.program.schedule import Schedule
from triax.pipe.program.simulate import simulate, timeline_of
from triax.pipe.program.timeline import Timeline
from triax.pipe.schedules.choose import make_schedule
from triax.testing.strategies import schedules

sys.setrecursionlimit(max(10_000, sys.getrecursionlimit()))  # `ends` is recursive
cost = st.floats(0, 3, allow_nan=False)


def ends(schedule: Schedule, costs: Costs) -> dict[Op, tuple[float, float]]:
    """Longest paths, by recursion over what each op waits for."""
    given = (costs.F, costs.I, costs.W, costs.COMM)
    f, i, w, hop = (x for x in given if isinstance(x, float))
    f, i, w = (x / schedule.chunks for x in (f, i, w))
    work = costs.work or [1.0] * schedule.microbatches
    length = {"F": f, "I": i, "W": w, "B": i + w}
    before = {b: a for order in schedule.orders for a, b in pairwise(order)}
    every = {op for order in schedule.orders for op in order}
    known: dict[Op, tuple[float, float]] = {}

    def end(op: Op) -> float:
        if op not in known:
            kind, s, m = op
            start = end(before[op]) if op in before else 0.0
            reads = (
                Op("F", s - 1, m)
                if kind == "F"
                else next((Op(k, s + 1, m) for k in "BI" if Op(k, s + 1, m) in every), op)
            )
            if kind != "W" and reads in every and reads != op:
                there, here = schedule.placement[reads.stage], schedule.placement[s]
                start = max(start, end(reads) + (0 if there == here else hop * work[m]))
            known[op] = start, start + length[kind] * work[m]
        return known[op][1]

    for op in every:
        end(op)
    return known


@settings(max_examples=200, derandomize=True)
@given(schedules(), cost, cost, cost, cost, st.lists(cost, min_size=1, max_size=4))
def test_ops_run_at_the_times_of_an_independent_simulator(
    schedule: Schedule, f: float, i: float, w: float, comm: float, work: list[float]
) -> None:
    """With one number for the work of each microbatch, or the same work for all."""
    costs = Costs(f, i, w, comm, work=[work[m % len(work)] for m in range(schedule.microbatches) if len(work) > 1])
    expected = ends(schedule, costs)
    result = simulate(schedule, costs)
    for row in result.timeline.rows:
        for op, start, stop in row:
            assert (start, stop) == pytest.approx(expected[op], abs=1e-9)
    first, last = min(a for a, _ in expected.values()), max(b for _, b in expected.values())
    assert result.makespan == pytest.approx(last - first, abs=1e-9)
    if result.makespan:
        busiest = max(sum(expected[op][1] - expected[op][0] for op in order) for order in schedule.orders)
        assert result.bubble == pytest.approx(1 - busiest / result.makespan, abs=1e-9)


@settings(max_examples=100, derandomize=True)
@given(schedules())
def test_an_activation_is_held_until_its_last_backward(schedule: Schedule) -> None:
    result = simulate(schedule)
    if schedule.name == "forward":
        assert result.peak_activations == (1 / schedule.chunks,) * schedule.pipe
        assert result.peak_of_stages == (1 / schedule.chunks,) * schedule.stages
        return

    def most_held(stages: Collection[int]) -> float:
        """Return the most activations of some stages at one time."""
        events = []
        for op, start, stop in (span for row in result.timeline.rows for span in row):
            if op.stage in stages and op.kind == "F":
                events.append((start, 1))
            elif op.stage in stages and op.kind in "BW":
                events.append((stop, -1))
        held = peak = 0
        for _, change in sorted(events):
            held += change
            peak = max(peak, held)
        return peak / schedule.chunks

    for rank, most in enumerate(result.peak_activations):
        assert most == most_held([stage for stage, home in enumerate(schedule.placement) if home == rank])
    assert result.peak_of_stages == tuple(most_held([stage]) for stage in range(schedule.stages))


@settings(max_examples=50, derandomize=True)
@given(schedules(), cost, cost, cost, cost)
def test_gathers_cost_the_time_of_an_independent_simulator(
    schedule: Schedule, f: float, i: float, w: float, gather: float
) -> None:
    """Each pass: as if F and I took no less than the gather. Once: as if that of each stage's first F did."""
    slower = ends(schedule, Costs(max(f, gather), max(i, gather), w, 0.1))
    for op, _, end in (span for row in simulate(schedule, Costs(f, i, w, 0.1, gather)).timeline.rows for span in row):
        if "B" not in {op.kind for order in schedule.orders for op in order}:
            assert end == pytest.approx(slower[op][1], abs=1e-9)
    each = simulate(schedule, Costs(f, i, w, 0.1, gather)).makespan
    once = simulate(schedule, Costs(f, i, w, 0.1, gather), keep_gathered=True).makespan
    never = simulate(schedule, Costs(f, i, w, 0.1)).makespan
    assert never - 1e-9 <= once <= each + 1e-9
    assert once <= never + schedule.chunks * schedule.pipe * gather + 1e-9


def test_gathering_for_each_pass_costs_the_time_of_the_formula() -> None:
    """1F1B's steady state: a forward that takes its gather's time, and a backward that hides it."""
    schedule = make_schedule("1f1b", pipe=2, microbatches=4)
    costs = Costs(F=1, I=1, W=1, GATHER=1.5)
    assert simulate(schedule, costs).makespan == (4 + 1) * (1.5 + 2)
    assert simulate(schedule, costs, keep_gathered=True).makespan == (4 + 1) * 3 + 0.5 + 0.5
    assert simulate(make_schedule("gpipe", 1, 4), Costs(1, 1, 1, GATHER=3)).makespan == 4 * 6


def test_costs_are_given_for_a_rank_or_for_each_stage() -> None:
    schedule = make_schedule("interleaved", 2, 4)
    whole = simulate(schedule, Costs(2, 1, 1, 0.5))
    each = simulate(schedule, Costs([1] * 4, [0.5] * 4, [0.5] * 4, [0.5] * 3))
    assert whole == each
    slow = simulate(schedule, Costs([1, 1, 1, 5], 1, 1))
    assert slow.makespan > simulate(schedule, Costs(1, 1, 1)).makespan
    with pytest.raises(ValueError, match="F has 3 values for 4 stages"):
        simulate(schedule, Costs([1, 1, 1]))
    with pytest.raises(ValueError, match="4 stages have 3 boundaries"):
        simulate(schedule, Costs(COMM=[1] * 4))
    with pytest.raises(ValueError, match="from 0 to 1e100"):
        Costs(F=-1)


def test_simulating_a_schedule_that_hangs_is_an_error() -> None:
    circle = Schedule.from_csv("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n")
    with pytest.raises(ScheduleError, match="deadlock"):
        timeline_of(circle)


def test_a_timeline_survives_json_unchanged() -> None:
    times = timeline_of(make_schedule("zb-v", 3, 5), Costs(1, 1.1, 0.9, 0.1))
    assert Timeline.from_json(times.to_json()) == times
    assert Timeline(()).makespan == 0 and Timeline(((),)).bubble == 0
