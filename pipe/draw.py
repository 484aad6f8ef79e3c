"""Timelines as pictures: text in the terminal, PNG or SVG, and a trace for Chrome or Perfetto.

text(schedule)                          colours by op, microbatch numbers, one row per rank
picture([ideal, measured], "run.png")   stacked on one time axis
chrome_trace(timeline)                  open in chrome://tracing or ui.perfetto.dev
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .ops import COMPUTE, Op
from .schedule import Schedule
from .simulate import Span, Timeline, timeline

# F, B, I, W: (colour of the first chunk, of the last one), dark enough for white letters
COLOURS = {
    "F": ("#1f5fa8", "#7fb2e5"),
    "B": ("#1d7a3f", "#7cc492"),
    "I": ("#b3541e", "#e8a36f"),
    "W": ("#6d6875", "#b5adbd"),
}
OTHER = "#d9d9d9"
# the same in a terminal, in colours that every terminal has
STYLES = {
    "F": ("white on blue", "black on bright_blue"),
    "B": ("white on green", "black on bright_green"),
    "I": ("white on red", "black on bright_red"),
    "W": ("white on bright_black", "black on white"),
}


def text(subject: Timeline | Schedule, width: int | None = None) -> Any:
    """A rich renderable: each rank a row, each op a coloured run of cells with its microbatch.

    `width` is the number of columns (None: as many as a microbatch's number needs, at most 400).
    """
    from rich.text import Text

    times = timeline(subject) if isinstance(subject, Schedule) else subject
    rows = [[span for span in row if span.op.kind in COMPUTE] for row in times.rows]
    spans = [span for row in rows for span in row]
    if not spans:
        return Text("nothing runs")
    begin, end = min(s.start for s in spans), max(s.end for s in spans)
    digits = len(str(max(span.op.microbatch for span in spans)))
    if width is None:
        shortest = min((s.end - s.start for s in spans if s.end > s.start), default=end - begin)
        width = min(400, max(20, round((end - begin) / shortest * (digits + 1)))) if end > begin else 20
    scale = width / (end - begin) if end > begin else 1.0
    stages = 1 + max(span.op.stage for span in spans)
    label = len(f"rank {len(rows) - 1}")
    out = Text(no_wrap=True, overflow="crop")
    for rank, row in enumerate(rows):
        out.append(f"rank {rank}".ljust(label) + " ", style="bold")
        column = 0
        for span in row:
            first, last = round((span.start - begin) * scale), round((span.end - begin) * scale)
            out.append(" " * max(0, first - column))
            cells = last - max(first, column)
            number = str(span.op.microbatch)
            content = span.op.kind + number if len(number) < cells else number
            out.append(
                content.ljust(cells)[:cells] if len(content) <= cells else " " * cells,
                style=_style(span.op, stages, len(rows)),
            )
            column = max(column, last)
        out.append("\n")
    out.append(" " * (label + 1))
    for kind, name in (("F", "forward"), ("B", "backward"), ("I", "input gradient"), ("W", "weight gradient")):
        if any(span.op.kind == kind for span in spans):
            out.append(f" {kind} ", style=STYLES[kind][0])
            out.append(f" {name}  ")
    return out


def _style(op: Op, stages: int, ranks: int) -> str:
    return STYLES[op.kind][0 if op.stage < ranks or stages == ranks else 1]


def colour(op: Op, stages: int, ranks: int) -> str:
    """By kind; a rank's later chunks are lighter."""
    if op.kind not in COLOURS:
        return OTHER
    dark, light = COLOURS[op.kind]
    chunks = max(1, stages // ranks)
    share = (op.stage // ranks) / max(1, chunks - 1) if chunks > 1 else 0.0
    mix = (round(int(dark[i : i + 2], 16) * (1 - share) + int(light[i : i + 2], 16) * share) for i in (1, 3, 5))
    return "#" + "".join(f"{x:02x}" for x in mix)


def picture(
    timelines: Timeline | Sequence[Timeline], path: str | Path, titles: Sequence[str] | None = None, unit: str = ""
) -> None:
    """Draws timelines one above the other on one time axis; `path` ends in .png or .svg (or .pdf).

    Each starts at its own first op. `unit` is written at the time axis.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError:
        raise ImportError("pictures need matplotlib: pip install matplotlib, or triax[plot]") from None
    times = [timelines] if isinstance(timelines, Timeline) else list(timelines)
    if not times:
        raise ValueError("there is no timeline to draw")
    if titles is not None and len(titles) != len(times):
        raise ValueError(f"{len(titles)} titles for {len(times)} timelines: give one for each")
    longest = max(max(t.makespan for t in times), 1e-12)
    ops = max((len(row) for t in times for row in t.rows), default=1)
    width = min(40.0, max(9.0, 0.16 * ops))
    heights = [0.34 * len(t.rows) + 0.55 for t in times]
    figure = Figure(figsize=(width, sum(heights) + 0.9), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(times), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    inches = (width - 1.0) / longest  # per unit of time
    for i, (axis, one) in enumerate(zip(axes, times, strict=True)):
        stages = 1 + max((span.op.stage for row in one.rows for span in row), default=0)
        begin = min((span.start for row in one.rows for span in row), default=0.0)
        for rank, row in enumerate(one.rows):
            spans = [span for span in row if span.op.kind in COMPUTE]
            fills = [colour(span.op, stages, len(one.rows)) for span in spans]
            bars = [(span.start - begin, span.end - span.start) for span in spans]
            axis.broken_barh(bars, (rank - 0.4, 0.8), facecolors=fills, edgecolor="white", linewidth=0.4)
            for span, fill in zip(spans, fills, strict=True):
                _number(axis, rank, span, begin, fill, inches)
            flights = one.flights[rank] if one.flights else ()  # below the row: light under way, dark waited for
            axis.broken_barh([(f.start - begin, f.end - f.start) for f in flights], (rank + 0.4, 0.07), color=OTHER)
            axis.broken_barh([(f.waited - begin, f.end - f.waited) for f in flights], (rank + 0.4, 0.07), color="black")
        axis.set_ylim(len(one.rows) - 0.4, -0.6)
        axis.set_yticks(range(len(one.rows)), [f"rank {r}" for r in range(len(one.rows))])
        axis.set_xlim(0, longest * 1.005)
        axis.spines[["top", "right"]].set_visible(False)
        name = f"{titles[i]}   " if titles is not None else ""
        axis.set_title(f"{name}makespan {one.makespan:.4g}{unit}, bubble {one.bubble:.1%}", loc="left", fontsize=10)
    axes[-1].set_xlabel(f"time ({unit.strip()})" if unit.strip() else "time")
    names = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient"}
    seen = {span.op.kind for t in times for row in t.rows for span in row}
    handles = [Patch(color=COLOURS[k][0], label=name) for k, name in names.items() if k in seen]
    figure.legend(handles=handles, loc="outside lower center", ncols=max(1, len(handles)), frameon=False, fontsize=9)
    figure.savefig(path, dpi=130)


def _number(axis: Any, rank: int, span: Span, begin: float, fill: str, inches: float) -> None:
    number = str(span.op.microbatch)
    length = span.end - span.start
    size = min(8.0, length * inches * 72 / (0.62 * len(number) + 0.2))  # the largest letters that fit, in points
    if size >= 4.5:
        ink = "white" if int(fill[3:5], 16) < 150 else "black"
        middle = span.start - begin + length / 2
        axis.text(middle, rank, number, ha="center", va="center", color=ink, fontsize=size)


def chrome_trace(times: Timeline, scale: float = 1e6) -> dict[str, Any]:
    """Chrome's trace format, a row per rank and one for its collectives; `scale` makes units microseconds."""
    events: list[dict[str, Any]] = []
    for rank, row in enumerate(times.rows):
        events.append({"ph": "M", "pid": 0, "tid": rank, "name": "thread_name", "args": {"name": f"rank {rank}"}})
        events += [
            {
                "ph": "X",
                "pid": 0,
                "tid": rank,
                "name": str(span.op),
                "cat": span.op.kind,
                "ts": span.start * scale,
                "dur": (span.end - span.start) * scale,
                "args": {"stage": span.op.stage, "microbatch": span.op.microbatch},
            }
            for span in row
        ]
    for rank, flights in enumerate(times.flights):
        below = len(times.rows) + rank
        events.append(
            {"ph": "M", "pid": 0, "tid": below, "name": "thread_name", "args": {"name": f"rank {rank}, data"}}
        )
        for name, start, waited, end in flights:
            # Those under way at once overlap: pairs of events that share a number, and not spans of one row.
            common = {"pid": 0, "tid": below, "name": name, "cat": "data", "id": len(events)}
            events.append({"ph": "b", "ts": start * scale, "args": {"waited": (end - waited) * scale}, **common})
            events.append({"ph": "e", "ts": end * scale, **common})
    return {"traceEvents": events, "displayTimeUnit": "ms"}
