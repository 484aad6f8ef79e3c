"""Report of a run as one HTML page without further files and without network access: values for page.html."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from jinja2 import ChainableUndefined, Environment, FileSystemLoader

from ....pipe.program.colors import COLORS, color
from ....pipe.program.measured_costs import simulated
from ....pipe.program.ops import Op
from ....pipe.program.schedule import Schedule
from ....pipe.program.simulate import simulate
from ....pipe.program.timeline import Timeline
from ..files import EXPERTS, METRICS, RUN, TIMELINE
from ..format import count
from ..records import Slice
from .membership import CAUSES
from .run_folder import Run, Traced, read_trace
from .svg import Bar, BarRow, Curve, line_chart, number, thinned, timeline

_TRAIN = "Train/Samples/"
_COMPUTE = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient", "C": "recompute"}
# Parts of a rank's time -> the class of their color, in the order of the bars.
_PARTS = {
    ("compute", "forward"): "F",
    ("compute", "backward"): "B",
    ("compute", "input gradient"): "I",
    ("compute", "weight gradient"): "W",
    ("compute", "recompute"): "C",
    ("compute", "optimizer"): "optimizer",
    ("tensor", "collectives"): "tensor",
    ("data", "reduce"): "data",
    ("data", "gather"): "data",
    ("world", "agree"): "world",
    ("pipe", "send"): "send",
    ("pipe", "receive"): "send",
    ("pipe", "tied weights"): "tied",
    ("host", "batch"): "host",
    ("host", "other"): "host",
    ("pipe", "idle"): "idle",
}
_PART_NAMES = _COMPUTE | {
    "optimizer": "optimizer",
    "tensor": "tensor axis",
    "data": "data axis",
    "world": "agreeing on loss and norm",
    "send": "sends and receives",
    "tied": "tied weights",
    "host": "other",
    "idle": "idle",
}
# Classes of the bars of a whole step, and of the waits within a program.
_STEP_NAMES = _COMPUTE | {"optimizer": "optimizer", "data": "reductions", "tied": "tied weights", "host": "batch"}
_WAIT_NAMES = {"tensor": "waits for tensor ranks", "data": "waits for replicas", "host": "waits within the pipe axis"}
# Kinds of slices -> the class of their color in the picture of a whole step.
_STEP_KINDS = {kind: kind for kind in _COMPUTE} | {
    "forward": "F",
    "backward": "B",
    "optimizer": "optimizer",
    "REDUCE": "data",
    "reduce": "data",
    "batch": "host",
    "TIED": "tied",
}
_MOST_RANKS = 32  # rows of a table or a picture
_MOST_HISTOGRAMS = 200  # parameters whose histograms are drawn
_MOST_OWN = 24  # charts of the user's own numbers
_MOST_POINTS = 1200  # points of a curve that the script shows under the pointer
_MOST_RUNS = 4  # runs that a page compares, which have a color each
_NUMBERS: dict[str, Callable[[float], str]] = {
    "number": number,
    "percent": "{:.1%}".format,
    "whole": "{:,}".format,
    "general": "{:g}".format,
    "megabytes": lambda size: f"{size / 1e6:,.3f}",
    "milliseconds": lambda seconds: f"{1e3 * seconds:.1f} ms",
}


def page(run: Run, live: bool = False) -> str:
    """Return the page of a run; ``live``: with a script that shows the page anew when the run's files change."""
    step, notes, ranks = None, list(run.notes), run.record.get("ranks", [])
    if run.trace is not None:
        try:
            if traced := read_trace(run.trace):
                step = _step(traced)
            else:
                notes.append(f"{TIMELINE} is not one that triax wrote")
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            notes.append(f"{TIMELINE} could not be read: {type(error).__name__}: {error}")
    losses = run.series(f"{_TRAIN}train_loss")
    traffic = [rank for rank in ranks if rank.get("traffic")]
    return _rendered(
        run=run,
        live=live,
        record=run.record,
        notes=notes,
        not_finite=[at for at, loss in losses if not math.isfinite(loss)],
        tiles=_tiles(run),
        charts=_charts(run),
        experts=_experts(run),
        histograms=_histograms(run),
        step=step,
        ranks=ranks[:_MOST_RANKS],
        memory=[rank for rank in ranks if rank.get("memory")][:_MOST_RANKS],
        traffic=traffic[:_MOST_RANKS],
        sent=sorted({(axis, kind) for r in traffic for axis, row in r["traffic"]["sent"].items() for kind in row}),
        formulas=sorted({axis for rank in traffic for axis in rank["traffic"]["formula"]}),
        grids=_grids(run),
        membership=_membership(run),
        shown=_MOST_RANKS,
        ranks_count=len(ranks),
        ratio=_ratio,
        config=_indented(run.record.get("config", {})),
    )


def comparison_page(runs: Sequence[Run], live: bool = False) -> str:
    """Return the page that compares runs: their main numbers and unequal options, and their curves in one chart each.

    Args:
        runs: two to four runs, with different names.
        live: with a script that shows the page anew when the runs' files change.

    Raises:
        ValueError: there are fewer or more runs.
    """
    if not 2 <= len(runs) <= _MOST_RUNS:
        raise ValueError(f"{len(runs)} runs cannot be compared: give 2 to {_MOST_RUNS}")
    return _rendered(
        run=Run(" and ".join(run.name for run in runs)),
        live=live,
        record={},
        notes=[f"{run.name}: {note}" for run in runs for note in run.notes if METRICS in note or RUN in note],
        compared={"names": [run.name for run in runs], "facts": _facts(runs), "options": _unequal_options(runs)},
        charts=_compared_charts(runs),
    )


def _rendered(**values: Any) -> str:
    """Return page.html with these values; a section without its value is left out."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=ChainableUndefined,
    )
    environment.filters |= {name: _or_text(show) for name, show in _NUMBERS.items()}
    return environment.get_template("page.html").render(op_colors=COLORS, **values)


def _facts(runs: Sequence[Run]) -> list[tuple[str, list[str]]]:
    """Return the rows (name, text of each run) of the table that compares runs."""
    facts_of: list[dict[str, str]] = []
    for run in runs:
        record = run.record
        facts = {
            "command": record.get("command", ""),
            "grid": _grid_text(record.get("grid") or {}),
            "schedule": (record.get("schedule") or {}).get("name", ""),
            "parameters": record.get("parameters", ""),
            "device": record.get("device", ""),
            **dict(_tiles(run)),
        }
        facts_of.append({name: f"{value:,}" if isinstance(value, int) else str(value) for name, value in facts.items()})
    names = dict.fromkeys(name for facts in facts_of for name in facts)
    rows = [(name, [facts.get(name, "") for facts in facts_of]) for name in names]
    return [(name, values) for name, values in rows if any(values)]


def _unequal_options(runs: Sequence[Run]) -> list[tuple[str, list[str]]]:
    """Return the rows (name, text of each run) of the options that are not the same in all runs."""

    def flat(prefix: str, value: Any) -> dict[str, str]:
        if isinstance(value, dict) and value:
            return {name: text for key in value for name, text in flat(f"{prefix}.{key}", value[key]).items()}
        return {prefix.removeprefix("."): _indented(value)}

    options = [flat("", run.record.get("config") or {}) for run in runs]
    names = dict.fromkeys(name for options_of_run in options for name in options_of_run)
    rows = [(name, [options_of_run.get(name, "") for options_of_run in options]) for name in names if name]
    return [(name, values) for name, values in rows if len(set(values)) > 1]


def _compared_charts(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Return a chart for each number of the runs, with a curve for each run that has it."""
    speed = "tokens" if any(_speed(run) == "tokens" for run in runs) else "samples"
    numbers = [
        (f"{_TRAIN}train_loss", "Training loss", "of each batch", 1, False),
        ("Validation/loss", "Validation loss", "where it was measured", 1, True),
        *((_TRAIN + key, title, unit, scale, False) for key, title, unit, _, scale in _numbers(speed)),
    ]
    made = []
    for key, title, unit, scale, marked in numbers:
        curves = [
            Curve(run.name, [(step, scale * y) for step, y in run.series(key)], index, marked)
            for index, run in enumerate(runs)
        ]
        made.append(chart(title, unit, curves, wide=key.endswith("train_loss")))
    return [made_chart for made_chart in made if made_chart]


def _indented(value: Any) -> str:
    try:
        return json.dumps(value, indent=2)
    except RecursionError:
        return "nested too deeply to be shown"


def _or_text(show: Callable[[float], str]) -> Callable[[Any], Any]:
    """Return a filter that formats numbers. None gives "", and other values stay as they are.

    Integers that are no finite float, which only a damaged file has, stay as they are too.
    """
    return lambda value: show(value) if _is_number(value) else "" if value is None else value


def _is_number(value: Any) -> bool:
    return isinstance(value, float) or (isinstance(value, int) and abs(value) < 2**1000)


def _ratio(counted: Iterable[Any], formula: Iterable[Any]) -> str:
    """Return one sum over another, of the values that are numbers; "" if the second sum is 0."""
    numerator, total = (sum(x for x in values if _is_number(x)) for values in (counted, formula))
    return f"{numerator / total:.3f}" if total else ""


def _grid_text(grid: Mapping[str, Any]) -> str:
    """Return a grid in words: "2 pipe × 4 data × 1 tensor"."""
    return " × ".join(f"{size} {axis}" for axis, size in grid.items())


def _grids(run: Run) -> list[dict[str, Any]]:
    """Return the grids of a run that was resumed on another one, with their first and last step; [] of other runs."""
    earlier, record = run.record.get("earlier") or [], run.record
    if not earlier:
        return []
    schedule = (record.get("schedule") or {}).get("name")
    rows = [*earlier, record | {"ranks": len(record.get("ranks", [])), "schedule": schedule}]
    ends = [row["since_step"] - 1 for row in rows[1:]] + [max(run.last_step, record["since_step"])]
    return [row | {"end": end, "words": _grid_text(row["grid"])} for row, end in zip(rows, ends, strict=True)]


def _membership(run: Run) -> dict[str, Any] | None:
    """Return the replicas of a run with ``fault_tolerance`` over time, and the time that they lost; None of others."""
    about = run.membership
    if about is None:
        return None
    rows = [
        BarRow(f"replica {name}", [Bar(since, to, "F", "", f"member of replica {name}") for since, to in spans])
        for name, spans in about.spans.items()
    ]
    return {
        "about": about,
        "timeline": timeline(rows[:_MOST_RANKS], max(about.length, 1e-3) * 1.01, 120, "s"),
        "causes": [(CAUSES[key], seconds, seconds / (about.seconds or 1.0)) for key, seconds in about.lost.items()],
    }


def _tiles(run: Run) -> list[tuple[str, str]]:
    """Return the names and values of the tiles, the run's main numbers."""
    tiles = [("steps", f"{run.last_step:,}")] if run.last_step else []
    if run.seconds:
        tiles.append(("duration", str(timedelta(seconds=round(run.seconds)))))
    if run.tokens:
        tiles.append(("tokens", count(run.tokens)))
    for name, points in (
        ("training loss, last step", run.series(f"{_TRAIN}train_loss")),
        ("validation loss, last", run.series("Validation/loss")),
    ):
        if points:
            tiles.append((name, _plain_number(points[-1][1])))
    speed = _speed(run)
    for key, name, scale, unit in (
        (f"{speed}_per_second", f"{speed}/s, median", 1, ""),
        ("mfu", "MFU, median", 100, " %"),
        ("bubble", "bubble, median of recorded steps", 100, " %"),
        ("peak_memory_gb", "peak memory of rank 0", 1, " GB"),
    ):
        values = [y for _, y in run.series(_TRAIN + key) if math.isfinite(y)]
        if values:
            value = max(values) if key == "peak_memory_gb" else statistics.median(values)
            tiles.append((name, _plain_number(value * scale) + unit))
    if run.membership is not None:
        tiles.append(("goodput", f"{run.membership.goodput:.1%}"))
    return tiles


def _plain_number(value: float) -> str:
    """Return a number with 4 digits, or with thousands separators from 1000 on."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _speed(run: Run) -> str:
    return "tokens" if run.series(f"{_TRAIN}tokens_per_second") else "samples"


def _charts(run: Run) -> list[dict[str, Any]]:
    """Return the charts: loss, learning rate, gradient norm, loss scale, speed, MFU and bubble by step."""
    training, validation = run.series(f"{_TRAIN}train_loss"), run.series("Validation/loss")
    curves = [Curve("training", training, 0), Curve("validation", validation, 1, marked=True)]
    unit = "of each batch; validation where it was measured" if validation else "of each batch"
    charts = [chart("Loss", unit, curves, wide=True, level=_level(run))]
    for key, title, unit, number_color, scale in _numbers(_speed(run)):
        points = [(step, scale * y) for step, y in run.series(_TRAIN + key)]
        charts.append(chart(title, unit, [Curve(title.lower(), points, number_color)]))
    for key, title, unit in (
        ("balance", "Load-balancing loss", "mean over the layers; 1 if all experts get equally many tokens"),
        ("z_loss", "Router z-loss", "mean over the layers"),
        ("largest_load", "Busiest expert", "its tokens over the mean of its layer; mean over the layers"),
    ):
        charts.append(chart(title, unit, [Curve(title.lower(), _mean_over_layers(run, f".{key}"), 3)]))
    charts += [chart(name, "", [Curve(name, run.series(name), 2)]) for name in _own_names(run)[:_MOST_OWN]]
    return [made for made in charts if made]


def _numbers(speed: str) -> Iterable[tuple[str, str, str, int, int]]:
    """Return the numbers of a step that have charts: key, title, unit, color, factor."""
    return (
        ("lr", "Learning rate", "", 0, 1),
        ("grad_norm", "Gradient norm", "before clipping", 0, 1),
        ("loss_scale", "Loss scale", "fp16", 3, 1),
        (f"{speed}_per_second", "Speed", f"{speed}/s", 2, 1),
        ("mfu", "MFU", "%, the model's FLOPs a second over the devices' peak", 3, 100),
        ("bubble", "Bubble", "% of the makespan, where it was measured", 3, 100),
    )


def _own_names(run: Run) -> list[str]:
    """Return the names of the user's own numbers, in order."""
    names = {name for row in run.rows for name, value in row.items() if not isinstance(value, list)}
    known = ("Train/Samples/", "Validation/")
    return sorted(name for name in names if name not in ("step", "samples", "time") and not name.startswith(known))


def _histograms(run: Run) -> dict[str, Any] | None:
    """Return the histograms of the last step that has them, weights and gradients by parameter; None without."""
    if run.histograms is None:
        return None
    rows_of: dict[str, dict[str, Any]] = {}
    for name, counted in run.histograms["histograms"].items():
        kind, _, parameter = name.partition("/")
        most = max(counted["counts"], default=0) or 1
        bars = [(number, 30 * count / most) for number, count in enumerate(counted["counts"])]
        rows_of.setdefault(parameter, {})[kind] = {**counted, "bars": [(n, height) for n, height in bars if height > 0]}
    rows = list(rows_of.items())
    return {"step": run.histograms["step"], "rows": rows[:_MOST_HISTOGRAMS], "left_out": len(rows[_MOST_HISTOGRAMS:])}


def _mean_over_layers(run: Run, ending: str) -> list[tuple[int, float]]:
    """Return (step, mean) of all numbers whose name has an ending, by step."""
    names = {name for row in run.rows for name in row if name.startswith(_TRAIN) and name.endswith(ending)}
    by_layer: dict[int, list[float]] = {}
    for name in names:
        for step, value in run.series(name):
            by_layer.setdefault(step, []).append(value)
    return [(step, statistics.fmean(values)) for step, values in sorted(by_layer.items())]


def _experts(run: Run) -> dict[str, Any] | None:
    """Return the loads of all experts in the last step that has them, over the mean of their layer; None without."""
    row = next((row for row in reversed(run.rows) if any(name.startswith(EXPERTS) for name in row)), None)
    if row is None:
        return None
    layers = []
    for name, loads in row.items():
        if name.startswith(EXPERTS) and isinstance(loads, list) and loads:
            mean = sum(loads) / len(loads) or 1.0
            layers.append({"name": name.removeprefix(EXPERTS), "loads": loads, "over_mean": [n / mean for n in loads]})
    return {"step": row["step"], "layers": layers}


def _level(run: Run) -> tuple[str, float] | None:
    """Return a number to compare the loss with, as a dashed line in its chart: (name, value). None if there is none.

    It is a number ``Validation/...`` that the run wrote only once, such as the loss of a bigram model.
    """
    names = {name for row in run.rows for name in row if name.startswith("Validation/") and name != "Validation/loss"}
    for name in sorted(names):
        if len(points := run.series(name)) == 1:
            return name.partition("/")[2].replace("_", " "), points[0][1]
    return None


def chart(
    title: str, unit: str, curves: Sequence[Curve], wide: bool = False, level: tuple[str, float] | None = None
) -> dict[str, Any] | None:
    """Return a chart in two sizes, of which the style sheet shows one; None without points.

    Args:
        title: heading.
        unit: small text beside the heading.
        curves: the curves. Points that are not finite are left out, and so are curves without points.
        wide: the chart takes the width of the page.
        level: name and height of a dashed horizontal line.
    """
    finite = (curve._replace(points=[(x, y) for x, y in curve.points if math.isfinite(y)]) for curve in curves)
    shown = [curve for curve in finite if curve.points]
    if not shown:
        return None
    height = level[1] if level else None
    legend = [(f"c{curve.color}", curve.name, "") for curve in shown]
    return {
        "title": title,
        "unit": unit,
        "wide": wide,
        "legend": legend + ([("level", f"{level[0]} {_plain_number(level[1])}", "")] if level else []),
        "large": line_chart(shown, 1060 if wide else 510, 300 if wide else 210, height),
        "small": line_chart(shown, 362, 220, height),
        "data": [
            {"name": c.name, "points": [(x, float(f"{y:.6g}")) for x, y in thinned(c.points, _MOST_POINTS)]}
            for c in shown
        ],
    }


def _step(traced: Traced) -> dict[str, Any]:
    """Return the step on all ranks, the parts of each rank's time, and the measured timeline beside the simulated."""
    rows = [
        BarRow(name, [Bar(s.start, s.end, _STEP_KINDS[s.kind], "", s.name) for s in slices if s.kind in _STEP_KINDS])
        for name, slices in zip(traced.names, traced.slices, strict=True)
    ][:_MOST_RANKS]
    ranks = [traced.parts(rank) for rank in range(len(rows))]
    known = [key for key in _PARTS if any(parts.get(key, 0.0) > 0 for parts in ranks)]
    return {
        "number": traced.step,
        "grid": _grid_text(traced.grid),
        "names": traced.names,
        "legend": _legend(_STEP_NAMES, {bar.kind for row in rows for bar in row.bars}),
        "timeline": timeline(rows, max(slices[0].end for slices in traced.slices) * 1.01, 200),
        "part_legend": _legend(_PART_NAMES, {_PARTS[key] for key in known}),
        "parts": [[(*key, _PARTS[key], parts.get(key, 0.0)) for key in known] for parts in ranks],
        "totals": [sum(parts.values()) for parts in ranks],
        "imbalance": traced.imbalance(),
        "comparison": None if traced.schedule is None else _comparison(traced, traced.schedule),
    }


def _comparison(traced: Traced, schedule: Schedule) -> dict[str, Any]:
    """Return the values of the comparison of the first replica's measured timeline with a simulation of its schedule.

    The simulation uses the median times of the measured ops. ``even_bubble`` is the bubble of a simulation with equal
    costs.
    """
    measured = traced.timeline()
    expected = simulated(schedule, measured)
    begin = min(span.start for row in measured.rows for span in row)
    waits = [_wait_bars(traced.slices[rank], begin, begin + measured.makespan) for rank in traced.replica()]
    ops = {span.op.kind for row in measured.rows for span in row}
    longest = max(measured.makespan, expected.makespan) * 1.01
    rows = [BarRow(r.name, [*r.bars, *wait]) for r, wait in zip(_op_rows(measured), waits, strict=True)]
    return {
        "schedule": schedule,
        "clock": traced.clock[:1].upper() + traced.clock[1:],
        "legend": _legend(_COMPUTE | {"idle": "idle"}, ops | {"idle"})
        + _legend(_WAIT_NAMES, {bar.kind for row in waits for bar in row}, "thin"),
        "measured": (measured, timeline(rows, longest, 66)),
        "simulated": (expected, timeline(_op_rows(expected), longest, 66)),
        "slower": expected.makespan - measured.makespan,
        "even_bubble": simulate(schedule).bubble,
    }


def _legend(names: dict[str, str], shown: set[str], form: str = "") -> list[tuple[str, str, str]]:
    return [(kind, name, form) for kind, name in names.items() if kind in shown]


def _op_rows(times: Timeline) -> list[BarRow]:
    """Return a row of bars for each pipe rank, a bar for each op."""
    begin, ranks = min(span.start for row in times.rows for span in row), len(times.rows)
    stages = 1 + max(span.op.stage for row in times.rows for span in row)

    def bar(op: Op, start: float, end: float) -> Bar:
        fill = color(op, stages, ranks) if op.stage >= ranks else ""
        return Bar(start - begin, end - begin, op.kind, str(op.microbatch), str(op), fill=fill)

    return [BarRow(f"pipe {rank}", [bar(*span) for span in row]) for rank, row in enumerate(times.rows)]


def _wait_bars(slices: Sequence[Slice], begin: float, end: float) -> list[Bar]:
    """Return thin bars for the collectives that a rank waited for between the first op and the last of the pipe ranks.

    A bar of a collective that began before, or ended after, is cut there.
    """
    bars = []
    for s in slices:
        axis, _, collective = s.kind.partition(":")
        if collective and collective != "barrier" and s.end > begin and s.start < end:
            kind, start, stop = axis if axis in ("tensor", "data") else "host", max(s.start, begin), min(s.end, end)
            bars.append(Bar(start - begin, stop - begin, kind, "", f"{axis}: {collective}", thin=True))
    return bars
