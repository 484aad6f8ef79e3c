"""Errors of the cost model on published tables, and the intervals that it gives.

    python benchmarks/plan_tables.py               # a minute
    python benchmarks/plan_tables.py --pairs 100

1. Each table with the figures of its machine as shipped.
2. The B200 table: times and memory after a fit to all rows, and of the others after fits to pairs of a dense row and a
   mixture, which start from the data sheet.
3. Every table predicted without it: errors, and how many runs lie within the interval of 90 %, whose width is made from
   the errors of the other tables alone. The last lines are ``plugins/plan/trust.py``'s figures.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean, median
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from rounds import print_json

from triax.base.tables import table, terminal
from triax.cli.machine import read_runs
from triax.plugins.plan.fit import MeasuredRun, figures, fit, leave_one_out
from triax.plugins.plan.machine import Machine, machine
from triax.plugins.plan.trust import SAME_SIZE, kept, student

from support.published_runs import LATER_A100, LATER_H100, TABLES, measured_runs

B200 = Path(__file__).resolve().parent / "published" / "b200.csv"


class Published(NamedTuple):
    """A table of runs on one machine."""

    name: str
    machine: str
    runs: Sequence[MeasuredRun]


class Prediction(NamedTuple):
    """A run that was predicted without its table."""

    table: str
    machine: str
    run: str
    known: str  # the class, as in plugins/plan/trust.py
    error: float  # logarithm of predicted over measured


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--json", action="store_true", help="one object instead of tables")
    options = parser.parse_args()
    tables = published()
    left = left_out(tables)
    b200 = next(each.runs for each in tables if each.machine == "b200")
    report = {
        "shipped": {each.name: shipped(each) for each in tables},
        "b200": {"memory": summary([memory_error(run) for run in b200]), "pairs": pairs(b200, options.pairs)},
        "left_out": coverage(left, [*of_classes(tables), *left]),
    }
    if options.json:
        print_json(report)
        return
    show(report)


def published() -> list[Published]:
    """Return all tables."""
    found = [Published(each.name, each.machine, measured_runs(each)) for each in (*TABLES, LATER_A100, LATER_H100)]
    return [*found, Published("SimuMax v1.2, B200", "b200", read_runs(B200))]


def summary(errors: Sequence[float]) -> dict[str, float]:
    """Return the mean and the largest size of errors."""
    return {"mean": mean(map(abs, errors)), "worst": max(map(abs, errors))}


def shipped(each: Published) -> dict[str, float]:
    """Return the errors of a table on its machine as shipped."""
    return summary([error_of(run, machine(each.machine)) for run in each.runs])


def error_of(run: MeasuredRun, on: Machine) -> float:
    """Return predicted / measured - 1 of a step's time."""
    return run.predicted(on) / run.seconds - 1


def memory_error(run: MeasuredRun) -> float:
    """Return predicted / measured - 1 of the bytes of tensors on the fullest rank."""
    assert run.memory is not None
    return run.predicted_memory(machine("b200")) / run.memory - 1


def pairs(runs: Sequence[MeasuredRun], count: int, seed: int = 0) -> dict[str, Any]:
    """Return the errors on all other rows after fits to pairs of a dense row and a mixture, drawn by seed."""
    draw, start = random.Random(seed), machine("b200").from_data_sheet()
    mixtures = [run for run in runs if run.layouts[0].expert > 1]
    dense = [run for run in runs if run.layouts[0].expert == 1]
    found: list[dict[str, Any]] = []
    for _ in range(count):
        pair = draw.choice(dense), draw.choice(mixtures)
        on = fit(start, pair)
        errors = [error_of(run, on) for run in runs if run not in pair]
        found.append({"pair": [run.name for run in pair], **summary(errors), "figures": figures(on)})
    return {
        "median": {name: median(each[name] for each in found) for name in ("mean", "worst")},
        "largest": {name: max(each[name] for each in found) for name in ("mean", "worst")},
        "pairs": found,
    }


def left_out(tables: Sequence[Published]) -> list[Prediction]:
    """Predict every table from the others of its machine or, if there are none, from the data sheet."""
    found = []
    for each in tables:
        others = [run for other in tables if other.machine == each.machine and other is not each for run in other.runs]
        on = fit(unfitted(each.machine), others) if others else machine(each.machine).from_data_sheet()
        found += [predicted(each, number, on, others) for number in range(len(each.runs))]
    return found


def of_classes(tables: Sequence[Published]) -> list[Prediction]:
    """Predict every run as of each class: without this run, without all of its size, and from the data sheet."""
    found = []
    for name in dict.fromkeys(each.machine for each in tables):
        own = [each for each in tables if each.machine == name]
        start, sheet = unfitted(name), machine(name).from_data_sheet()
        every = [run for each in own for run in each.runs]
        alone = iter(leave_one_out(start, every))
        without: dict[float, Machine] = {}
        for each in own:
            for number, run in enumerate(each.runs):
                found.append(predicted(each, number, sheet, []))
                others = [other for other in every if not same_size(other, run)]
                if run.parameters not in without:
                    without[run.parameters] = fit(start, others)
                found.append(predicted(each, number, without[run.parameters], others))
                error = math.log1p(next(alone))
                if any(same_size(run, other) for other in every if other is not run):
                    found.append(found[-1]._replace(known="seen machine and size", error=error))
    return found


def predicted(of: Published, number: int, on: Machine, seen: Sequence[MeasuredRun]) -> Prediction:
    """Return the prediction of a run of a table on a machine that is fitted to the runs ``seen``."""
    run = of.runs[number]
    same = any(same_size(run, other) for other in seen)
    known = "seen machine and size" if same else "seen machine, other size" if seen else "unseen machine"
    return Prediction(of.name, of.machine, f"{number + 1}: {run.name}", known, math.log1p(error_of(run, on)))


def same_size(one: MeasuredRun, other: MeasuredRun) -> bool:
    """Return True if two models have about as many parameters."""
    return 1 / SAME_SIZE <= one.parameters / other.parameters <= SAME_SIZE


def unfitted(name: str) -> Machine:
    """Return a machine without its two fitted figures; those of its links and of attention have other sources."""
    start = machine(name).from_data_sheet()
    if "fitted" in machine(name).sources["links"]:
        return start
    return replace(start, links=machine(name).links, attention_efficiency=machine(name).attention_efficiency)


def coverage(found: Sequence[Prediction], classes: Sequence[Prediction]) -> dict[str, Any]:
    """Return how many runs lie within the interval that the errors of other tables give, and its median width."""
    rows = []
    for each in found:
        half = half_width([other for other in classes if apart(other, each)], each.known)
        rows.append({**each._asdict(), "half": half, "inside": abs(each.error) <= half})
    return {
        "runs": len(rows),
        "inside": mean(row["inside"] for row in rows),
        "width": median(math.exp(row["half"]) - math.exp(-row["half"]) for row in rows),
        "classes": {known: half_width(classes, known) for known in dict.fromkeys(each.known for each in classes)},
        "rows": rows,
    }


def apart(one: Prediction, other: Prediction) -> bool:
    """Return True if the error of one says something of the other: another table, or of unseen machines another one."""
    return one.machine != other.machine if one.known == "unseen machine" else one.table != other.table


def half_width(found: Sequence[Prediction], known: str) -> float:
    """Return half the width of a class's interval, in logarithms, as plugins/plan/trust.py describes it."""
    own = [each for each in found if each.known == known]
    if known == "unseen machine":
        return student(len({each.machine for each in own})) * math.sqrt(mean(each.error**2 for each in own))
    return kept([each.error for each in own])


def show(report: Mapping[str, Any]) -> None:
    """Print the report."""
    console = terminal()
    heads = ("table", "mean error", "worst")
    rows: list[tuple[str, ...]] = [
        (name, f"{each['mean']:.1%}", f"{each['worst']:.1%}") for name, each in report["shipped"].items()
    ]
    console.print(table(heads, rows, "with the figures of the machine as shipped"))
    b200 = report["b200"]
    rows = [
        (what, f"{each['mean']:.1%}", f"{each['worst']:.1%}")
        for what, each in (
            ("memory without the margin", b200["memory"]),
            (f"time after a fit to a pair: median of {len(b200['pairs']['pairs'])} pairs", b200["pairs"]["median"]),
            ("the same, largest of the pairs", b200["pairs"]["largest"]),
        )
    ]
    console.print(table(("B200", "mean error", "worst"), rows))
    left = report["left_out"]
    rows = []
    for name in dict.fromkeys(row["table"] for row in left["rows"]):
        of_table = [row for row in left["rows"] if row["table"] == name]
        for known in dict.fromkeys(row["known"] for row in of_table):
            own = [row for row in of_table if row["known"] == known]
            errors = summary([math.expm1(row["error"]) for row in own])
            inside = f"{sum(row['inside'] for row in own)} of {len(own)}"
            half = own[0]["half"]
            interval = f"{math.expm1(-half):+.1%} to {math.expm1(half):+.1%}"
            rows.append((name, known, f"{errors['mean']:.1%}", f"{errors['worst']:.1%}", interval, inside))
    console.print(table(("left out", "class", "mean error", "worst", "interval", "inside"), rows))
    console.print(f"{left['inside']:.0%} of {left['runs']} runs inside, median width {left['width']:.1%}")
    for known, each in left["classes"].items():
        console.print(f'"{known}": {each:.3f}')


if __name__ == "__main__":
    main()
