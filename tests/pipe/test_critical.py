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
def test_the_critical_path_is_the_longest_way_through_ops(name: str, pipe: int, microbatches: int, chunks: int) -> None:
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


# F takes 1, B 2, and a message 0.25: 3F0 ends at 4.75, 3B0 at 6.75, 2B0 at 9, and 1B0 at 11.25.
ONE_F_ONE_B, WITH_MESSAGES = make_schedule("1f1b", pipe=4, microbatches=8), Costs(COMM=0.25)


@pytest.mark.parametrize(
    ("op", "words"),
    [
        (
            "0B0",
            (
                "0B0 runs from 11.5 to 13.5 on rank 0. It starts when its gradient arrives, at 11.5: 1B0 of rank 1 "
                "ends at 11.25 and its message takes 0.25.\n"
                "Rank 0 was ready at 4, after 0F3, and idle for 7.5.\n"
                "It is on a critical path: the step would be longer if it started later."
            ),
        ),
        ("3F5", "2F5 of rank 2 ends at 20"),
        ("3F5", "It could start up to 0.5 later without a longer step."),
        ("0F0", "Nothing comes before it."),
    ],
)
def test_explain_tells_the_cause_of_a_start_and_the_slack(op: str, words: str) -> None:
    assert words in explain(ONE_F_ONE_B, WITH_MESSAGES, Op.parse(op))


def test_explain_refuses_an_op_that_the_schedule_lacks() -> None:
    with pytest.raises(ValueError, match="the schedule has no op 0I0, but 0B0"):
        explain(ONE_F_ONE_B, WITH_MESSAGES, Op.parse("0I0"))


@pytest.mark.parametrize(
    ("name", "bubble", "bubble_paper"),
    [
        ("zb-h2", 3 / 27, 0),  # Qi et al. 2024, table 2: no bubble at F = I = W; each rank starts one F after the other
        ("1f1b", 9 / 33, 9 / 33),  # rank 0 is at work from the start to the end: 3 (F + I + W) idle
    ],
)
def test_bubble_paper_counts_from_a_ranks_first_op_to_its_last(name: str, bubble: float, bubble_paper: float) -> None:
    times = simulate(make_schedule(name, pipe=4, microbatches=8)).timeline
    assert times.bubble == pytest.approx(bubble)
    assert times.bubble_paper == pytest.approx(bubble_paper, abs=1e-12)


@pytest.mark.parametrize(("name", "chunks"), [("1f1b", 1), ("interleaved", 2), ("interleaved", 3)])
def test_bubble_of_ideal_equals_narayanans_formula(name: str, chunks: int) -> None:
    """Narayanan et al. 2021: (p - 1) / m, and of interleaved stages divided by their number on a rank."""
    times = simulate(make_schedule(name, pipe=4, microbatches=8, chunks=chunks)).timeline
    assert times.bubble_of_ideal == pytest.approx(3 / 8 / chunks)


def test_triax_schedule_explains_an_op_as_the_page_shows() -> None:
    typed = "triax schedule explain 1f1b 0B0 --costs 1,1,1,0.25"
    page = (DOCS / "schedules.md").read_text().partition(f"$ {typed}\n```\n\n```text\n")[2].partition("```")[0]
    assert CliRunner().invoke(app, typed.split()[1:]).output.split() == page.split()  # the page breaks its lines
    code, output = run_triax("schedule", "explain", "zb-v", "1F0", "--pipe", "2")
    assert code == 0 and output.startswith("1F0 runs from 0.5 to 1 on rank 1. It starts when its input")


def test_the_critical_option_adds_the_path_to_json_and_plot(tmp_path: Path) -> None:
    sizes, plot = ["--pipe", "2", "--microbatches", "2"], tmp_path / "s.svg"
    output = run_triax("schedule", "1f1b", *sizes, "--json", "--critical", "--plot", str(plot))[1]
    found = json.loads(output)
    assert found["critical_path"] == ["0F0", "1F0", "1B0", "1F1", "1B1", "0B1"]  # 1 + 1 + 2 + 1 + 2 + 2 = 9
    assert found["bubble_paper"] == pytest.approx(3 / 9)  # of rank 0, which works for 6
    assert "critical path" in plot.read_text()


def test_triax_schedule_prints_a_written_schedule_as_the_original(tmp_path: Path) -> None:
    csv = tmp_path / "s.csv"
    _, made = run_triax("schedule", "1f1b", "--pipe", "2", "--output", str(csv))
    assert "bubble / ideal time 25.00% (Narayanan 2021)" in made
    assert csv.read_text() == make_schedule("1f1b", pipe=2, microbatches=4).to_csv()
    _, read = run_triax("schedule", str(csv))
    assert read.splitlines()[1:] == made.splitlines()[1:]  # the first line has the name


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("explain 1f1b 9F0", "the schedule has no op 9F0"),
        ("1f1b --explain 0F0", "--explain is a verb now: type triax schedule explain NAME OP"),
        ("1f1b --critical", "--critical does nothing without --plot"),
    ],
)
def test_triax_schedule_refuses_to_explain_without_an_op(words: str, message: str) -> None:
    code, output = run_triax("schedule", *words.split())
    assert code == 2 and message in output
