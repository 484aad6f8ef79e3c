"""A run as one HTML page that needs nothing else: no network, no other file."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Sequence
from html import escape

from ..pipe.measured import costs_of
from ..pipe.simulate import Timeline, simulate
from .report_read import METRICS, RUN, TIMELINE, Run, Traced, read_trace
from .report_style import SCRIPT, STYLE
from .report_svg import Bar, Line, Row, line_chart, number, thinned, timeline
from .slices import Slice

_TRAIN = "Train/Samples/"
_KINDS = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient"}
# Of a rank's time: part -> the class of its colour. The order is that of the bars.
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
_MOST_RANKS = 32  # rows of a table or a picture


def page(run: Run) -> str:
    """The whole page."""
    traced, notes = None, list(run.notes)
    if run.trace is not None:
        try:
            traced = read_trace(run.trace)
        except (KeyError, ValueError, TypeError, IndexError) as error:
            notes.append(f"{TIMELINE} could not be read: {type(error).__name__}: {error}")
        else:
            if traced is None:
                notes.append(f"{TIMELINE} is not one that triax wrote")
    body = [_head(run), _curves(run)]
    if traced is not None:
        body += [_timelines(traced, run), _times(traced)]
    body += [_memory(run), _traffic(run), _grid(run), _end(run, notes)]
    title = f"{run.name}: triax report"
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{STYLE}</style></head><body><main>{''.join(body)}</main><script>{SCRIPT}</script></body></html>\n"
    )


# --------------------------------------------------------------------------------------------- the sections


def _head(run: Run) -> str:
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
    tiles = [("steps", f"{run.last_step:,}")] if run.last_step else []
    if loss:
        tiles.append(("training loss, last step", _plain(loss[-1][1])))
    if checked := _validation(run):
        tiles.append(("validation loss, last", _plain(checked[-1][1])))
    for name, label, scale, unit in (
        ("tokens_per_second", "tokens/s, median", 1, ""),
        ("samples_per_second", "samples/s, median", 1, ""),
        ("mfu", "MFU, median", 100, " %"),
        ("bubble", "bubble, median of recorded steps", 100, " %"),
        ("peak_memory_gb", "peak memory of rank 0", 1, " GB"),
    ):
        values = [y for _, y in run.series(_TRAIN + name) if math.isfinite(y)]
        if values and not (name == "samples_per_second" and any(t[0].startswith("tokens") for t in tiles)):
            tiles.append((label, _plain((max if "peak" in name else statistics.median)(values) * scale) + unit))
    boxes = "".join(f'<div class="tile"><b>{escape(v)}</b><span>{escape(k)}</span></div>' for k, v in tiles)
    odd = [step for step, y in loss if not math.isfinite(y)]
    stopped = f'<p class="stopped">The loss was no number first at step {odd[0]}.</p>' if odd else ""
    line = f'<p class="soft">{escape(" · ".join(about))}</p>' if about else ""
    return f'<h1>{escape(run.name)}</h1>{line}{stopped}<div class="tiles">{boxes}</div>'


def _curves(run: Run) -> str:
    loss, checked = run.series(f"{_TRAIN}train_loss"), _validation(run)
    names = {name for row in run.rows for name in row if name.startswith("Validation/") and name != "Validation/loss"}
    once = {name: found for name in sorted(names) if len(found := run.series(name)) == 1}  # a line to get under
    level = next(((name.partition("/")[2].replace("_", " "), found[0][1]) for name, found in once.items()), None)
    charts = [
        _chart(
            "Loss",
            "of each batch; validation where it was measured" if checked else "of each batch",
            [Line("training", loss, 0), Line("validation", checked, 1, marked=True)],
            wide=True,
            level=level,
        )
    ]
    tokens = bool(run.series(f"{_TRAIN}tokens_per_second"))
    for name, title, unit, colour, scale in (
        ("lr", "Learning rate", "", 0, 1),
        ("grad_norm", "Gradient norm", "before clipping", 0, 1),
        ("loss_scale", "Loss scale", "fp16", 3, 1),
        ("tokens_per_second" if tokens else "samples_per_second", "Speed", "tokens/s" if tokens else "samples/s", 2, 1),
        ("mfu", "MFU", "%, the model's FLOPs a second over the devices' peak", 3, 100),
        ("bubble", "Bubble", "% of the makespan, where it was measured", 3, 100),
    ):
        points = [(step, scale * y) for step, y in run.series(_TRAIN + name)]
        charts.append(_chart(title, unit, [Line(title.lower(), points, colour)]))
    made = "".join(charts)
    return f'<h2>Curves</h2><div class="charts">{made}</div>' if made else ""


def _timelines(traced: Traced, run: Run) -> str:
    """Measured beside simulated, and all ranks."""
    out = [f"<h2>Step {traced.step}, measured</h2>"]
    if traced.schedule is not None:
        measured = traced.timeline()
        costs = costs_of([measured], traced.schedule.placement)
        simulated = simulate(traced.schedule, costs).timeline
        even = simulate(traced.schedule)
        longest = max(measured.makespan, simulated.makespan) * 1.01
        here = [r for r, p in enumerate(traced.places) if p["data"] == 0 and p["tensor"] == 0]
        ranks = sorted(here, key=lambda r: traced.places[r]["pipe"])
        begin = min(span.start for row in measured.rows for span in row)
        seen = [_strips(traced.slices[rank], begin) for rank in ranks]
        kinds = [kind for kind in _KINDS if any(s.op.kind == kind for row in measured.rows for s in row)]
        strips = {bar.kind for row in seen for bar in row}
        names = {"tensor": "waits for tensor ranks", "data": "waits for replicas", "host": "waits within the pipe axis"}
        legend = [(kind, _KINDS[kind], "") for kind in kinds] + [("idle", "idle", "")]
        legend += [(kind, name, "thin") for kind, name in names.items() if kind in strips]
        bubble = measured.bubble
        out.append(
            f"<p>{escape(traced.schedule.name)} on {traced.schedule.pipe} pipe ranks, the first replica's; the number "
            f"is the microbatch. {escape(traced.clock[:1].upper() + traced.clock[1:])}.</p>"
        )
        out.append(_legend(legend))
        rows = [Row(r.name, [*r.bars, *s]) for r, s in zip(_rows(measured), seen, strict=True)]
        out.append(f"<h3>Measured <small>makespan {_ms(measured.makespan)}, bubble {bubble:.1%}</small></h3>")
        out.append(_picture(rows, longest, 66))
        out.append(
            f"<h3>Simulated with its costs <small>makespan {_ms(simulated.makespan)}, bubble {simulated.bubble:.1%}: "
            "each op takes the median of its stage, each message that of its boundary</small></h3>"
        )
        out.append(_picture(_rows(simulated), longest, 66))
        table = [
            ("measured", _ms(measured.makespan), f"{bubble:.1%}"),
            ("simulated with its costs", _ms(simulated.makespan), f"{simulated.bubble:.1%}"),
            ("the schedule on paper: F = I = W = 1, messages free", "", f"{even.bubble:.1%}"),
        ]
        out.append(_table(("", "makespan", "bubble"), table))
    rows = [Row(name, _whole(slices)) for name, slices in zip(traced.names, traced.slices, strict=True)][:_MOST_RANKS]
    names = {**_KINDS, "optimizer": "optimizer", "data": "reductions", "tied": "tied weights", "host": "batch"}
    drawn = {bar.kind for row in rows for bar in row.bars}
    longest = max(slices[0].end for slices in traced.slices) * 1.01
    out.append(
        f"<details><summary>All {len(traced.names)} ranks, the whole step</summary>"
        + _legend([(kind, name, "") for kind, name in names.items() if kind in drawn])
        + _picture(rows, longest, 200)
        + f'<p class="soft">{TIMELINE} opens in ui.perfetto.dev, with messages as arrows.</p></details>'
    )
    return "".join(out)


def _times(traced: Traced) -> str:
    """Where each rank's time went."""
    ranks = range(min(len(traced.names), _MOST_RANKS))
    parts = [traced.parts(rank) for rank in ranks]
    known = [key for key in _PARTS if any(p.get(key, 0.0) > 0 for p in parts)]
    longest = max(sum(p.values()) for p in parts)
    bars = []
    for rank in ranks:
        pieces = "".join(
            f'<div class="{_PARTS[key]}" style="width:{100 * parts[rank][key] / longest:.2f}%" '
            f'title="{" ".join(key)}: {_ms(parts[rank][key])}"></div>'
            for key in known
            if parts[rank].get(key, 0.0) > 0
        )
        short = f"rank {rank}"
        whole = _ms(sum(parts[rank].values()))
        bars.append(f'<span>{short}</span><div class="bar">{pieces}</div><span>{whole}</span>')
    names = {
        "F": "forward",
        "B": "backward",
        "I": "input gradient",
        "W": "weight gradient",
        "optimizer": "optimizer",
        "tensor": "tensor axis",
        "data": "data axis",
        "world": "agreeing on loss and norm",
        "send": "sends and receives",
        "tied": "tied weights",
        "host": "other",
        "idle": "idle",
    }
    shown = {_PARTS[key] for key in known}
    legend = _legend([(kind, name, "") for kind, name in names.items() if kind in shown])
    rows = [(n, *(f"{1e3 * p.get(key, 0.0):.2f}" for key in known)) for n, p in zip(traced.names, parts, strict=False)]
    table = _table(("ms", *(f"{axis}<br>{part}" for axis, part in known)), rows)
    return (
        f"<h2>Where the time of step {traced.step} went</h2>{legend}<div class='bars'>{''.join(bars)}</div>"
        f"<details><summary>In numbers</summary>{table}</details>"
    )


def _memory(run: Run) -> str:
    """Bytes held beside the paper's formula."""
    ranks = [r for r in run.record.get("ranks", []) if r.get("memory")][:_MOST_RANKS]
    if not ranks:
        return ""
    states = ["parameters", "gradients", "masters", "optimizer"]
    rows = []
    for rank in ranks:
        held, formula = rank["memory"]["held"], rank["memory"]["formula"]
        total = sum(held.get(key) or 0 for key in states)
        said = sum(formula.get(key) or 0 for key in states)
        cells = [f"{_mb(held.get(key))}<br><span class='soft'>{_mb(formula.get(key))}</span>" for key in states]
        ratio = f"{total / said:.3f}" if said else ""
        more = [_mb(held.get(key)) for key in ("activations", "working")]
        rows.append((escape(rank["name"]), *cells, ratio, *more, _mb(rank["memory"].get("peak"))))
    head = ("MB (10<sup>6</sup> bytes)", *states, "held ÷<br>formula", "activations", "working", "process<br>at most")
    text = (
        f"Held on each rank after step {run.record.get('after_steps', '?')}, counted; below it, the formula of ZeRO's "
        "paper (section 3.1). Activations and working memory are the most of step 2."
    )
    return f"<h2>Memory</h2><p>{text}</p>{_table(head, rows)}"


def _traffic(run: Run) -> str:
    """Bytes sent beside the paper's formula."""
    ranks = [r for r in run.record.get("ranks", []) if r.get("traffic")][:_MOST_RANKS]
    if not ranks:
        return ""
    kinds = sorted({(axis, kind) for r in ranks for axis, row in r["traffic"]["sent"].items() for kind in row})
    rows = []
    for rank in ranks:
        sent, formula = rank["traffic"]["sent"], rank["traffic"]["formula"].get("data")
        cells = []
        for axis, kind in kinds:
            entry = sent.get(axis, {}).get(kind)
            calls = f"<br><span class='soft'>in {entry['calls']}</span>" if entry else ""
            cells.append(_mb(entry["bytes"] if entry else None) + calls)
        data = sum(entry["bytes"] for entry in sent.get("data", {}).values())
        ratio = f"{data / formula:.3f}" if formula else ""
        rows.append((escape(rank["name"]), *cells, _mb(formula), ratio))
    heads = (f"{axis}<br>{kind.replace('_', ' ')}" for axis, kind in kinds)
    head = ("MB sent in a step", *heads, "data axis:<br>formula", "sent ÷<br>formula")
    text = "Counted in a step, and in how many calls. The formula is that of ZeRO's paper, section 7."
    return f"<h2>Traffic</h2><p>{text}</p>{_table(head, rows)}"


def _grid(run: Run) -> str:
    record = run.record
    if not record:
        return ""
    rows = [(escape(rank["name"]), f"{rank.get('parameters', 0):,}") for rank in record.get("ranks", [])[:_MOST_RANKS]]
    facts = {
        "model": record.get("model"),
        "batch": ", ".join(f"{k} {v}" for k, v in (record.get("batch") or {}).items()),
        "FLOPs of a step": number(record["flops_per_step"]) if record.get("flops_per_step") else None,
        "peak of a device": f"{record['peak_tflops']:g} TFLOP/s" if record.get("peak_tflops") else None,
        "torch": record.get("torch"),
        "triax": record.get("triax"),
    }
    known = _table(("", ""), [(k, escape(str(v))) for k, v in facts.items() if v])
    config = escape(json.dumps(record.get("config", {}), indent=2))
    return (
        f"<h2>Grid and configuration</h2>{known}"
        f"<details><summary>Ranks</summary>{_table(('rank', 'parameters, whole'), rows)}</details>"
        f"<details><summary>Configuration, resolved</summary><pre>{config}</pre></details>"
    )


def _end(run: Run, notes: Sequence[str]) -> str:
    out = []
    if run.logs:
        logs = "".join(f"<h3>{escape(name)}</h3><pre>{escape(text)}</pre>" for name, text in run.logs.items())
        out.append(f"<h2>What the ranks said last</h2>{logs}")
    if notes:
        out.append(f"<h2>Left out</h2><ul>{''.join(f'<li>{escape(note)}</li>' for note in notes)}</ul>")
    files = ", ".join((METRICS, RUN, TIMELINE))
    return f'{"".join(out)}<p class="soft">Made by triax report from {files}.</p>'


# ---------------------------------------------------------------------------------------------- their parts


def _validation(run: Run) -> list[tuple[int, float]]:
    return run.series("Validation/loss")


def _chart(
    title: str, unit: str, lines: Sequence[Line], wide: bool = False, level: tuple[str, float] | None = None
) -> str:
    """A chart in two sizes, of which the style sheet shows one, and its data for the script."""
    at = level[1] if level else None
    big = line_chart(lines, 1060 if wide else 510, 300 if wide else 210, "step", at)
    if not big:
        return ""
    small = line_chart(lines, 362, 220, "step", at)
    shown = [line for line in lines if line.points]
    data = [{"name": line.name, "points": _data(line.points)} for line in shown]
    entries = [(f"c{line.colour}", line.name, "") for line in shown]
    entries += [("level", f"{level[0]} {_plain(level[1])}", "")] if level else []
    legend = _legend(entries) if len(entries) > 1 else ""
    small = small.replace("<svg ", '<svg class="n" ', 1)
    big = big.replace("<svg ", '<svg class="w" ', 1)
    note = f" <small>{escape(unit)}</small>" if unit else ""
    return (
        f'<div class="chart{" wide" if wide else ""}"><h3>{escape(title)}{note}</h3>{legend}{big}{small}'
        f'<div class="tip"></div><script type="application/json">{json.dumps(data)}</script></div>'
    )


def _data(points: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    return [(x, float(f"{y:.6g}")) for x, y in thinned([p for p in points if math.isfinite(p[1])], 1200)]


def _rows(times: Timeline) -> list[Row]:
    begin = min(span.start for row in times.rows for span in row)
    return [
        Row(
            f"pipe {rank}",
            [Bar(s.start - begin, s.end - begin, s.op.kind, str(s.op.microbatch), str(s.op)) for s in row],
        )
        for rank, row in enumerate(times.rows)
    ]


def _strips(slices: Sequence[Slice], begin: float) -> list[Bar]:
    """The collectives that a rank waited for while its program ran."""
    found, program = [], next((s for s in slices if s.kind == "program"), slices[0])
    for s in slices:
        axis, _, collective = s.kind.partition(":")
        if collective and collective != "barrier" and program.start <= s.start < program.end:
            kind = axis if axis in ("tensor", "data") else "host"
            found.append(Bar(s.start - begin, s.end - begin, kind, "", f"{axis}: {collective}", thin=True))
    return found


def _whole(slices: Sequence[Slice]) -> list[Bar]:
    """A rank's step: its ops, and what the engine does around them."""
    classes = {**{k: k for k in _KINDS}, "forward": "F", "backward": "B", "optimizer": "optimizer"}
    classes |= {"REDUCE": "data", "reduce": "data", "batch": "host", "TIED": "tied"}
    return [Bar(s.start, s.end, classes[s.kind], "", s.name) for s in slices if s.kind in classes]


def _picture(rows: Sequence[Row], longest: float, label: int) -> str:
    """A timeline; on a narrow page it is scrolled sideways."""
    return f'<div class="scroll">{timeline(rows, longest, 1060, label)}</div>'


def _legend(entries: Sequence[tuple[str, str, str]]) -> str:
    spans = "".join(f'<span><i class="{kind} {how}"></i>{escape(name)}</span>' for kind, name, how in entries)
    return f'<div class="legend">{spans}</div>'


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Cells are HTML."""
    top = "".join(f"<th>{cell}</th>" for cell in head)
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.1f} ms"


def _mb(size: float | None) -> str:
    return "" if size is None else f"{size / 1e6:,.3f}"


def _plain(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
