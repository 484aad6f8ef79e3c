"""Report of a run as one HTML page without further files and without network access."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from html import escape
from typing import Any

from ...pipe.program.measured_costs import costs_of
from ...pipe.program.schedule import Schedule
from ...pipe.program.simulate import simulate
from ...pipe.program.timeline import Timeline
from ..files import METRICS, RUN, TIMELINE
from ..protocol import Slice
from .elements import chart, details, legend, megabytes, milliseconds, picture, plain_number, table
from .run_folder import Run, Traced, read_trace
from .style import SCRIPT, STYLE
from .svg import Bar, BarRow, Curve, number

_PAGE = """\
<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>\
<meta name="viewport" content="width=device-width, initial-scale=1">\
<style>{style}</style></head><body><main>{body}</main><script>{script}</script></body></html>
"""
_TILE = '<div class="tile"><b>{value}</b><span>{name}</span></div>'
_TIME_BAR = '<span>rank {rank}</span><div class="bar">{parts}</div><span>{total}</span>'
_TIME_PART = '<div class="{kind}" style="width:{percent:.2f}%" title="{name}: {time}"></div>'
_SOFT = '<p class="soft">{text}</p>'
_FOOTNOTE = "<br><span class='soft'>{text}</span>"

_TRAIN = "Train/Samples/"
_COMPUTE = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient"}
# Parts of a rank's time -> the class of their color, in the order of the bars.
_PARTS = {
    ("compute", "forward"): "F",
    ("compute", "backward"): "B",
    ("compute", "input gradient"): "I",
    ("compute", "weight gradient"): "W",
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
_MOST_RANKS = 32  # rows of a table or a picture


def page(run: Run) -> str:
    """Return the page of a run."""
    traced, notes = None, list(run.notes)
    if run.trace is not None:
        try:
            traced = read_trace(run.trace)
        except (KeyError, ValueError, TypeError, IndexError) as error:
            notes.append(f"{TIMELINE} could not be read: {type(error).__name__}: {error}")
        else:
            if traced is None:
                notes.append(f"{TIMELINE} is not one that triax wrote")
    body = [_summary(run), _curves(run)]
    if traced is not None:
        body += [_timelines(traced), _times(traced)]
    body += [_memory(run), _traffic(run), _configuration(run), _end(run, notes)]
    title = escape(f"{run.name}: triax report")
    return _PAGE.format(title=title, style=STYLE, script=SCRIPT, body="".join(body))


def _summary(run: Run) -> str:
    """Return the heading: grid, model and schedule, and tiles with the run's main numbers."""
    record, loss = run.record, run.series(f"{_TRAIN}train_loss")
    about = []
    if grid := record.get("grid"):
        about.append(" × ".join(f"{size} {axis}" for axis, size in grid.items()))
    if record.get("parameters"):
        about.append(f"{number(record['parameters'])} parameters")
    if "zero" in record:
        about.append(f"ZeRO {record['zero']}")
    if schedule := record.get("schedule"):
        about.append(f"{schedule['name']}, {schedule['microbatches']} microbatches")
    about += [str(record[key]) for key in ("device", "written") if record.get(key)]
    line = _SOFT.format(text=escape(" · ".join(about))) if about else ""
    infinite = [step for step, y in loss if not math.isfinite(y)]
    stopped = f'<p class="stopped">The loss was not finite at step {infinite[0]}.</p>' if infinite else ""
    tiles = "".join(_TILE.format(value=escape(value), name=escape(name)) for name, value in _main_numbers(run))
    return f'<h1>{escape(run.name)}</h1>{line}{stopped}<div class="tiles">{tiles}</div>'


def _main_numbers(run: Run) -> list[tuple[str, str]]:
    """Return the names and values of the tiles."""
    loss, validation = run.series(f"{_TRAIN}train_loss"), _validation(run)
    tiles = [("steps", f"{run.last_step:,}")] if run.last_step else []
    if loss:
        tiles.append(("training loss, last step", plain_number(loss[-1][1])))
    if validation:
        tiles.append(("validation loss, last", plain_number(validation[-1][1])))
    speed = "tokens" if run.series(f"{_TRAIN}tokens_per_second") else "samples"
    for key, name, scale, unit in (
        (f"{speed}_per_second", f"{speed}/s, median", 1, ""),
        ("mfu", "MFU, median", 100, " %"),
        ("bubble", "bubble, median of recorded steps", 100, " %"),
        ("peak_memory_gb", "peak memory of rank 0", 1, " GB"),
    ):
        values = [y for _, y in run.series(_TRAIN + key) if math.isfinite(y)]
        if values:
            value = max(values) if key == "peak_memory_gb" else statistics.median(values)
            tiles.append((name, plain_number(value * scale) + unit))
    return tiles


def _curves(run: Run) -> str:
    """Return the charts: loss, learning rate, gradient norm, loss scale, speed, MFU and bubble by step."""
    validation = _validation(run)
    losses = [
        Curve("training", run.series(f"{_TRAIN}train_loss"), 0),
        Curve("validation", validation, 1, marked=True),
    ]
    unit = "of each batch; validation where it was measured" if validation else "of each batch"
    charts = [chart("Loss", unit, losses, wide=True, level=_level(run))]
    speed = "tokens" if run.series(f"{_TRAIN}tokens_per_second") else "samples"
    for key, title, unit, color, scale in (
        ("lr", "Learning rate", "", 0, 1),
        ("grad_norm", "Gradient norm", "before clipping", 0, 1),
        ("loss_scale", "Loss scale", "fp16", 3, 1),
        (f"{speed}_per_second", "Speed", f"{speed}/s", 2, 1),
        ("mfu", "MFU", "%, the model's FLOPs a second over the devices' peak", 3, 100),
        ("bubble", "Bubble", "% of the makespan, where it was measured", 3, 100),
    ):
        points = [(step, scale * y) for step, y in run.series(_TRAIN + key)]
        charts.append(chart(title, unit, [Curve(title.lower(), points, color)]))
    made = "".join(charts)
    return f'<h2>Curves</h2><div class="charts">{made}</div>' if made else ""


def _validation(run: Run) -> list[tuple[int, float]]:
    return run.series("Validation/loss")


def _level(run: Run) -> tuple[str, float] | None:
    """Return a validation number that was written once, as a line for the loss to get below: (name, value)."""
    names = {name for row in run.rows for name in row if name.startswith("Validation/") and name != "Validation/loss"}
    for name in sorted(names):
        if len(found := run.series(name)) == 1:
            return name.partition("/")[2].replace("_", " "), found[0][1]
    return None


def _timelines(traced: Traced) -> str:
    """Return the measured timeline beside the simulated one, and the step on all ranks."""
    heading = f"<h2>Step {traced.step}, measured</h2>"
    comparison = "" if traced.schedule is None else _comparison(traced, traced.schedule)
    rows = [BarRow(name, _step_bars(slices)) for name, slices in zip(traced.names, traced.slices, strict=True)]
    rows = rows[:_MOST_RANKS]
    names = _COMPUTE | {"optimizer": "optimizer", "data": "reductions", "tied": "tied weights", "host": "batch"}
    drawn = {bar.kind for row in rows for bar in row.bars}
    longest = max(slices[0].end for slices in traced.slices) * 1.01
    everything = (
        legend((kind, name, "") for kind, name in names.items() if kind in drawn)
        + picture(rows, longest, 200)
        + _SOFT.format(text=f"{TIMELINE} opens in ui.perfetto.dev, with messages as arrows.")
    )
    return heading + comparison + details(f"All {len(traced.names)} ranks, the whole step", everything)


def _comparison(traced: Traced, schedule: Schedule) -> str:
    """Return the timeline of the first replica, the simulation with its costs, and a table of both bubbles."""
    measured = traced.timeline()
    simulated = simulate(schedule, costs_of([measured], schedule.placement)).timeline
    even = simulate(schedule)
    begin = min(span.start for row in measured.rows for span in row)
    waits = [_wait_bars(traced.slices[rank], begin) for rank in traced.replica()]
    drawn = {bar.kind for row in waits for bar in row}
    wait_names = {
        "tensor": "waits for tensor ranks",
        "data": "waits for replicas",
        "host": "waits within the pipe axis",
    }
    kinds = [kind for kind in _COMPUTE if any(s.op.kind == kind for row in measured.rows for s in row)]
    entries = [(kind, _COMPUTE[kind], "") for kind in kinds] + [("idle", "idle", "")]
    entries += [(kind, name, "thin") for kind, name in wait_names.items() if kind in drawn]
    longest = max(measured.makespan, simulated.makespan) * 1.01
    rows = [BarRow(r.name, [*r.bars, *wait]) for r, wait in zip(_op_rows(measured), waits, strict=True)]
    clock = escape(traced.clock[:1].upper() + traced.clock[1:])
    about = f"{escape(schedule.name)} on {schedule.pipe} pipe ranks of the first replica. The number is the microbatch."
    return "".join(
        (
            f"<p>{about} {clock}.</p>",
            legend(entries),
            _timeline_heading("Measured", measured, ""),
            picture(rows, longest, 66),
            _timeline_heading(
                "Simulated with its costs",
                simulated,
                ": each op takes the median of its stage, each message that of its boundary",
            ),
            picture(_op_rows(simulated), longest, 66),
            table(
                ("", "makespan", "bubble"),
                [
                    ("measured", milliseconds(measured.makespan), f"{measured.bubble:.1%}"),
                    ("simulated with its costs", milliseconds(simulated.makespan), f"{simulated.bubble:.1%}"),
                    ("simulated with F = I = W = 1 and messages that take no time", "", f"{even.bubble:.1%}"),
                ],
            ),
        )
    )


def _timeline_heading(title: str, times: Timeline, note: str) -> str:
    return f"<h3>{title} <small>makespan {milliseconds(times.makespan)}, bubble {times.bubble:.1%}{note}</small></h3>"


def _op_rows(times: Timeline) -> list[BarRow]:
    """Return a row of bars for each pipe rank, a bar for each op."""
    begin = min(span.start for row in times.rows for span in row)
    return [
        BarRow(
            f"pipe {rank}",
            [Bar(s.start - begin, s.end - begin, s.op.kind, str(s.op.microbatch), str(s.op)) for s in row],
        )
        for rank, row in enumerate(times.rows)
    ]


def _wait_bars(slices: Sequence[Slice], begin: float) -> list[Bar]:
    """Return thin bars for the collectives that a rank waited for while its program ran."""
    found, program = [], next((s for s in slices if s.kind == "program"), slices[0])
    for s in slices:
        axis, _, collective = s.kind.partition(":")
        if collective and collective != "barrier" and program.start <= s.start < program.end:
            kind = axis if axis in ("tensor", "data") else "host"
            found.append(Bar(s.start - begin, s.end - begin, kind, "", f"{axis}: {collective}", thin=True))
    return found


def _step_bars(slices: Sequence[Slice]) -> list[Bar]:
    """Return the bars of a rank's step: its ops, and the engine's phases around them."""
    kinds = {kind: kind for kind in _COMPUTE} | {"forward": "F", "backward": "B", "optimizer": "optimizer"}
    kinds |= {"REDUCE": "data", "reduce": "data", "batch": "host", "TIED": "tied"}
    return [Bar(s.start, s.end, kinds[s.kind], "", s.name) for s in slices if s.kind in kinds]


def _times(traced: Traced) -> str:
    """Return the parts of each rank's step, as bars and as a table."""
    ranks = [traced.parts(rank) for rank in range(min(len(traced.names), _MOST_RANKS))]
    known = [key for key in _PARTS if any(parts.get(key, 0.0) > 0 for parts in ranks)]
    longest = max(sum(parts.values()) for parts in ranks)
    bars = []
    for rank, parts in enumerate(ranks):
        cells = (
            _TIME_PART.format(
                kind=_PARTS[key],
                percent=100 * parts[key] / longest,
                name=" ".join(key),
                time=milliseconds(parts[key]),
            )
            for key in known
            if parts.get(key, 0.0) > 0
        )
        bars.append(_TIME_BAR.format(rank=rank, parts="".join(cells), total=milliseconds(sum(parts.values()))))
    shown = {_PARTS[key] for key in known}
    head = ("ms", *(f"{axis}<br>{part}" for axis, part in known))
    rows = [
        (name, *(f"{1e3 * parts.get(key, 0.0):.2f}" for key in known))
        for name, parts in zip(traced.names, ranks, strict=False)
    ]
    return (
        f"<h2>Time of step {traced.step} by part</h2>"
        + legend((kind, name, "") for kind, name in _PART_NAMES.items() if kind in shown)
        + f"<div class='bars'>{''.join(bars)}</div>"
        + details("In numbers", table(head, rows))
    )


def _memory(run: Run) -> str:
    """Return the bytes held by each rank, beside the formula of ZeRO's paper."""
    ranks = _ranks_with(run, "memory")
    if not ranks:
        return ""
    states = ["parameters", "gradients", "masters", "optimizer"]
    rows = []
    for rank in ranks:
        held, formula = rank["memory"]["held"], rank["memory"]["formula"]
        cells = [megabytes(held.get(key)) + _FOOTNOTE.format(text=megabytes(formula.get(key))) for key in states]
        ratio = _ratio(sum(held.get(key) or 0 for key in states), sum(formula.get(key) or 0 for key in states))
        more = [megabytes(held.get(key)) for key in ("activations", "working")]
        rows.append((escape(rank["name"]), *cells, ratio, *more, megabytes(rank["memory"].get("peak"))))
    head = ("MB (10<sup>6</sup> bytes)", *states, "held ÷<br>formula", "activations", "working", "process<br>peak")
    text = (
        f"Bytes held on each rank after step {run.record.get('after_steps', '?')}, counted. Below each, the formula of "
        "ZeRO's paper (section 3.1). Activations and working memory are the peaks of step 2."
    )
    return f"<h2>Memory</h2><p>{text}</p>{table(head, rows)}"


def _traffic(run: Run) -> str:
    """Return the bytes sent by each rank in a step, beside the formula of ZeRO's paper."""
    ranks = _ranks_with(run, "traffic")
    if not ranks:
        return ""
    kinds = sorted({(axis, kind) for r in ranks for axis, row in r["traffic"]["sent"].items() for kind in row})
    rows = []
    for rank in ranks:
        sent, formula = rank["traffic"]["sent"], rank["traffic"]["formula"].get("data")
        entries = [sent.get(axis, {}).get(kind) for axis, kind in kinds]
        cells = [
            megabytes(entry["bytes"]) + _FOOTNOTE.format(text=f"in {entry['calls']}") if entry else ""
            for entry in entries
        ]
        data = sum(entry["bytes"] for entry in sent.get("data", {}).values())
        rows.append((escape(rank["name"]), *cells, megabytes(formula), _ratio(data, formula)))
    heads = (f"{axis}<br>{kind.replace('_', ' ')}" for axis, kind in kinds)
    head = ("MB sent in a step", *heads, "data axis:<br>formula", "sent ÷<br>formula")
    text = "Bytes sent in a step, counted, and the number of calls. The formula is that of ZeRO's paper, section 7."
    return f"<h2>Traffic</h2><p>{text}</p>{table(head, rows)}"


def _ranks_with(run: Run, report: str) -> list[dict[str, Any]]:
    return [rank for rank in run.record.get("ranks", []) if rank.get(report)][:_MOST_RANKS]


def _ratio(counted: float, formula: float | None) -> str:
    return f"{counted / formula:.3f}" if formula else ""


def _configuration(run: Run) -> str:
    """Return model, batch, versions, the ranks, and the configuration with its defaults."""
    record = run.record
    if not record:
        return ""
    facts = {
        "model": record.get("model"),
        "batch": ", ".join(f"{k} {v}" for k, v in (record.get("batch") or {}).items()),
        "FLOPs of a step": number(record["flops_per_step"]) if record.get("flops_per_step") else None,
        "peak of a device": f"{record['peak_tflops']:g} TFLOP/s" if record.get("peak_tflops") else None,
        "torch": record.get("torch"),
        "triax": record.get("triax"),
    }
    ranks = [(escape(rank["name"]), f"{rank.get('parameters', 0):,}") for rank in record.get("ranks", [])[:_MOST_RANKS]]
    config = escape(json.dumps(record.get("config", {}), indent=2))
    return (
        "<h2>Grid and configuration</h2>"
        + table(("", ""), [(name, escape(str(value))) for name, value in facts.items() if value])
        + details("Ranks", table(("rank", "parameters, unsharded"), ranks))
        + details("Configuration, resolved", f"<pre>{config}</pre>")
    )


def _end(run: Run, notes: Sequence[str]) -> str:
    """Return the last lines of the ranks' logs, and notes about files that are missing or could not be read."""
    logs = "".join(f"<h3>{escape(name)}</h3><pre>{escape(text)}</pre>" for name, text in run.logs.items())
    items = "".join(f"<li>{escape(note)}</li>" for note in notes)
    return (
        (f"<h2>Last lines of the logs</h2>{logs}" if logs else "")
        + (f"<h2>Left out</h2><ul>{items}</ul>" if items else "")
        + _SOFT.format(text=f"Made by triax report from {', '.join((METRICS, RUN, TIMELINE))}.")
    )
