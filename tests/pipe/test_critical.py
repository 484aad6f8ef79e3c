"""The critical path of a simulated step, beside a search of the longest way in plain Python."""

from __future__ import annotations

import json
import random
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
from typer.testing import CliRunner

from triax.cli.main import app
from triax.pipe.program.costs import Costs
from triax.pipe.program.critical import CriticalPath, explain
from triax.pipe.program.ops import Op
from triax.pipe.program.schedule import Schedule
from triax.pipe.program.simulate import simulate
from triax.pipe.schedules.choose import make_schedule

from support.command_line import run_triax
from support.paths import DOCS

SCHEDULES = [("1f1b", 4, 6, 1), ("gpipe", 3, 4, 1), ("interleaved", 4, 8, 2), ("zb-h1", 4, 8, 1), ("zb-v", 3, 6, 2)]


def drawn_costs(stages: int, seed: int) -> Costs:
    draws = random.Random(seed)
    some = lambda low: tuple(draws.uniform(low, 2) for _ in range(stages))  # noqa: E731
    return Costs(some(0.1), some(0.1), some(0.0), draws.choice([0.0, 0.3]))


def longest(schedule: Schedule, costs: Costs) -> float:
    """Return the longest way through the ops: the makespan, found without a simulation."""
    op_costs, hops = costs.op_costs(schedule.stages, schedule.chunks), costs.hops(schedule.placement)
    before = {b: a for order in schedule.orders for a, b in pairwise(order)}
    everything = {op for order in schedule.orders for op in order}

    @cache
    def end(op: Op) -> float:
        starts = [0.0]
        if op in before:
            starts.append(end(before[op]))
        if op.kind == "F" and op.stage:
            starts.append(end(op._replace(stage=op.stage - 1)) + hops[op.stage - 1])
        if op.kind in "BI" and op.stage + 1 < schedule.stages:
            after = [Op(kind, op.stage + 1, op.microbatch) for kind in "BI"]
            starts.append(end(next(each for each in after if each in everything)) + hops[op.stage])
        return max(starts) + op_costs[op.kind][op.stage]

    return max(map(end, everything))


@pytest.mark.parametrize(("name", "pipe", "microbatches", "chunks"), SCHEDULES)
def test_the_path_is_the_longest_way(name: str, pipe: int, microbatches: int, chunks: int) -> None:
    schedule = make_schedule(name, pipe, microbatches, chunks)
    for seed in range(20):
        costs = drawn_costs(schedule.stages, seed)
        found, makespan = CriticalPath(schedule, costs), longest(schedule, costs)
        hops = costs.hops(schedule.placement)
        assert found.path[0].start == 0
        total = sum(span.end - span.start for span in found.path)
        for first, second in pairwise(found.path):
            crossed = first.op.stage != second.op.stage and first.op.microbatch == second.op.microbatch
            wait = second.start - first.end
            assert wait == pytest.approx(hops[min(first.op.stage, second.op.stage)] if crossed and wait > 1e-9 else 0)
            total += wait
        assert total == pytest.approx(makespan, rel=1e-12) == found.timeline.makespan


@pytest.mark.parametrize(("name", "pipe", "microbatches", "chunks"), SCHEDULES)
def test_an_op_that_starts_later_by_its_slack_delays_nothing(
    name: str, pipe: int, microbatches: int, chunks: int
) -> None:
    schedule = make_schedule(name, pipe, microbatches, chunks)
    found = CriticalPath(schedule, Costs(COMM=0.25))
    slack = found.slack()
    assert all(slack[span.op] == pytest.approx(0, abs=1e-9) for span in found.path)
    for op in random.Random(0).sample(sorted(slack), 12):
        for extra, longer in ((slack[op], 0.0), (slack[op] + 0.5, 0.5)):
            assert delayed(found, schedule, op, extra) == pytest.approx(found.timeline.makespan + longer)


def delayed(found: CriticalPath, schedule: Schedule, late: Op, by: float) -> float:
    """Return the makespan if one op starts later."""
    ends: dict[Op, float] = {}
    spans = sorted((span for row in found.timeline.rows for span in row), key=lambda span: span.start)
    for span in spans:  # every op has a time above 0, so its causes stand before it
        start = max((ends[cause.op] + cause.arrival - cause.end for cause in found.causes(span.op)), default=0.0)
        if span.op == late:
            start = span.start + by
        ends[span.op] = start + span.end - span.start
    return max(ends.values())


def test_an_op_is_explained() -> None:
    schedule = make_schedule("1f1b", pipe=4, microbatches=8)
    costs = Costs(COMM=0.25)
    assert explain(schedule, costs, Op("B", 0, 0)) == (
        "0B0 runs from 11.5 to 13.5 on rank 0. It starts when its gradient arrives, at 11.5: 1B0 of rank 1 ends at "
        "11.25 and its message takes 0.25.\n"
        "Rank 0 was ready at 4, after 0F3, and idle for 7.5.\n"
        "It is on a critical path: the step would be longer if it started later."
    )
    assert "2F5 of rank 2 ends at 20" in (text := explain(schedule, costs, Op("F", 3, 5)))
    assert "It could start up to 0.5 later without a longer step." in text
    assert "Nothing comes before it." in explain(schedule, costs, Op("F", 0, 0))
    with pytest.raises(ValueError, match="the schedule has no op 0I0, but 0B0"):
        explain(schedule, costs, Op("I", 0, 0))


def test_the_papers_bubble_leaves_the_first_way_out() -> None:
    """Qi et al. 2024, table 2: ZB-H2 has no bubble at F = I = W, and 1F1B has (p - 1)(F + I + W - W) less than ours."""
    two = simulate(make_schedule("zb-h2", 4, 8)).timeline
    assert two.bubble_paper == pytest.approx(0, abs=1e-12) and two.bubble > 0.1
    one = simulate(make_schedule("1f1b", 4, 8)).timeline
    assert one.bubble_of_ideal == pytest.approx(3 / 8)  # Narayanan et al. 2021: (p - 1) / m
    assert simulate(make_schedule("interleaved", 4, 8)).timeline.bubble_of_ideal == pytest.approx(3 / 8 / 2)
    assert one.bubble_paper == one.bubble == pytest.approx(9 / 33)  # rank 0 is there from the start to the end


def test_the_command_explains_marks_and_lists(tmp_path: Path) -> None:
    run = CliRunner().invoke(app, ["schedule", "explain", "zb-v", "1F0", "--pipe", "2"])
    assert run.exit_code == 0 and run.output.startswith("1F0 runs from 0.5 to 1 on rank 1. It starts when its input")
    shown = "triax schedule explain 1f1b 0B0 --costs 1,1,1,0.25"
    run = CliRunner().invoke(app, shown.split()[1:])
    page = (DOCS / "schedules.md").read_text().partition(f"$ {shown}\n```\n\n```text\n")[2].partition("```")[0]
    assert page.split() == run.output.split()  # the page breaks its lines
    plot = tmp_path / "s.svg"
    run = CliRunner().invoke(app, ["schedule", "1f1b", "--pipe", "2", "--json", "--critical", "--plot", str(plot)])
    found = json.loads(run.output)
    schedule = make_schedule("1f1b", 2, 4)
    assert found["critical_path"] == [str(span.op) for span in CriticalPath(schedule).path]
    assert found["bubble_paper"] == simulate(schedule).timeline.bubble_paper
    csv = tmp_path / "s.csv"
    run = CliRunner().invoke(app, ["schedule", "1f1b", "--pipe", "2", "--write", str(csv)])
    assert csv.read_text() == schedule.to_csv() and "bubble / ideal time 25.00% (Narayanan 2021)" in run.output
    again = CliRunner().invoke(app, ["schedule", str(csv)])
    assert again.output.splitlines()[1:] == run.output.splitlines()[1:]
    assert "critical path" in plot.read_text()
    code, said = run_triax("schedule", "explain", "1f1b", "9F0")
    assert code == 2 and "the schedule has no op 9F0" in said
    code, said = run_triax("schedule", "1f1b", "--explain", "0F0")
    assert code == 2 and "--explain is a verb now: type triax schedule explain NAME OP" in said
    code, said = run_triax("schedule", "1f1b", "--critical")
    assert code == 2 and "--critical does nothing without --plot" in said
