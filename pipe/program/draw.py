"""Drawings of timelines: text in the terminal, PNG or SVG, and a trace for Chrome or Perfetto.

text(schedule)                          one row per rank, colors by op, microbatch numbers
picture([ideal, measured], "run.png")   stacked on one time axis
chrome_trace(timeline)                  open in chrome://tracing or ui.perfetto.dev
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .chrome_trace import ChromeTrace
from .ops import COMPUTE, Op
from .schedule import Schedule
from .simulate import timeline_of
from .timeline import Span, Timeline

NAMES = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient"}
# kind -> (color of the first chunk, of the last one), dark enough for white letters
COLORS = {
    "F": ("#1f5fa8", "#7fb2e5"),
    "B": ("#1d7a3f", "#7cc492"),
    "I": ("#b3541e", "#e8a36f"),
    "W": ("#6d6875", "#b5adbd"),
}
OTHER = "#d9d9d9"
# kind -> (style of the first chunk, of the others) in a terminal, in colors that every terminal has
STYLES = {
    "F": ("white on blue", "black on bright_blue"),
    "B": ("white on green", "black on bright_green"),
    "I": ("white on red", "black on bright_red"),
    "W": ("white on bright_black", "black on white"),
}


def text(subject: Timeline | Schedule, width: int | None = None) -> Any:
    """Return a rich renderable: a row per rank, and per op colored cells with its microbatch.

    Args:
        subject: what to draw.
        width: number of columns. If None, it is the number that the microbatch numbers need, at most 400.
    """
    from rich.text import Text

    times = timeline_of(subject) if isinstance(subject, Schedule) else subject
    rows = [[span for span in row if span.op.kind in COMPUTE] for row in times.rows]
    spans = [span for row in rows for span in row]
    if not spans:
        return Text("no op runs")
    begin, end = min(s.start for s in spans), max(s.end for s in spans)
    digits = len(str(max(span.op.microbatch for span in spans)))
    if width is None:
        shortest = min((s.end - s.start for s in spans if s.end > s.start), default=end - begin)
        width = min(400, max(20, round((end - begin) / shortest * (digits + 1)))) if end > begin else 20
    scale = width / (end - begin) if end > begin else 1.0
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
                style=STYLES[span.op.kind][min(1, span.op.stage // len(rows))],
            )
            column = max(column, last)
        out.append("\n")
    out.append(" " * (label + 1))
    for kind, name in NAMES.items():
        if any(span.op.kind == kind for span in spans):
            out.append(f" {kind} ", style=STYLES[kind][0])
            out.append(f" {name}  ")
    return out


def color(op: Op, stages: int, ranks: int) -> str:
    """Return the color of an op: by kind, lighter for a rank's later chunks."""
    if op.kind not in COLORS:
        return OTHER
    dark, light = COLORS[op.kind]
    chunks = max(1, stages // ranks)
    share = (op.stage // ranks) / max(1, chunks - 1) if chunks > 1 else 0.0
    mix = (round(int(dark[i : i + 2], 16) * (1 - share) + int(light[i : i + 2], 16) * share) for i in (1, 3, 5))
    return "#" + "".join(f"{x:02x}" for x in mix)


def picture(
    timelines: Timeline | Sequence[Timeline], path: str | Path, titles: Sequence[str] | None = None, unit: str = ""
) -> None:
    """Draw timelines one above the other on one time axis. Each starts at its own first op.

    Args:
        timelines: one or several.
        path: file to write; ends in .png, .svg or .pdf.
        titles: one for each timeline.
        unit: unit of time, written at the axis.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError:
        raise ImportError("pictures need matplotlib: pip install matplotlib, or triax[plot]") from None
    times = [timelines] if isinstance(timelines, Timeline) else list(timelines)
    if not times:
        raise ValueError("the list of timelines is empty: give at least one, such as simulate(schedule).timeline")
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
            fills = [color(span.op, stages, len(one.rows)) for span in spans]
            bars = [(span.start - begin, span.end - span.start) for span in spans]
            axis.broken_barh(bars, (rank - 0.4, 0.8), facecolors=fills, edgecolor="white", linewidth=0.4)
            for span, fill in zip(spans, fills, strict=True):
                _number(axis, rank, span, begin, fill, inches)
            # A thin bar below the row: light while a collective is under way, black while the rank waits for it.
            collectives = one.collectives[rank] if one.collectives else ()
            whole = [(c.start - begin, c.end - c.start) for c in collectives]
            waits = [(c.waited - begin, c.end - c.waited) for c in collectives]
            axis.broken_barh(whole, (rank + 0.4, 0.07), color=OTHER)
            axis.broken_barh(waits, (rank + 0.4, 0.07), color="black")
        axis.set_ylim(len(one.rows) - 0.4, -0.6)
        axis.set_yticks(range(len(one.rows)), [f"rank {r}" for r in range(len(one.rows))])
        axis.set_xlim(0, longest * 1.005)
        axis.spines[["top", "right"]].set_visible(False)
        name = f"{titles[i]}   " if titles is not None else ""
        axis.set_title(f"{name}makespan {one.makespan:.4g}{unit}, bubble {one.bubble:.1%}", loc="left", fontsize=10)
    axes[-1].set_xlabel(f"time ({unit.strip()})" if unit.strip() else "time")
    seen = {span.op.kind for t in times for row in t.rows for span in row}
    handles = [Patch(color=COLORS[k][0], label=name) for k, name in NAMES.items() if k in seen]
    figure.legend(handles=handles, loc="outside lower center", ncols=max(1, len(handles)), frameon=False, fontsize=9)
    figure.savefig(path, dpi=130)


def _number(axis: Any, rank: int, span: Span, begin: float, fill: str, inches: float) -> None:
    number = str(span.op.microbatch)
    length = span.end - span.start
    size = min(8.0, length * inches * 72 / (0.62 * len(number) + 0.2))  # points: the largest digits that fit
    if size >= 4.5:
        ink = "white" if int(fill[3:5], 16) < 150 else "black"
        middle = span.start - begin + length / 2
        axis.text(middle, rank, number, ha="center", va="center", color=ink, fontsize=size)


def chrome_trace(times: Timeline, scale: float = 1e6) -> dict[str, Any]:
    """Return the timeline in Chrome's trace format: a row per rank, and one for its collectives.

    Args:
        times: timeline of a simulation or of a measured step.
        scale: microseconds per unit of the timeline's times.
    """
    trace = ChromeTrace(scale)
    for rank, row in enumerate(times.rows):
        trace.name_thread(0, rank, f"rank {rank}")
        for op, start, end in row:
            trace.span(0, rank, str(op), op.kind, start, end - start, {"stage": op.stage, "microbatch": op.microbatch})
    for rank, collectives in enumerate(times.collectives):
        below = len(times.rows) + rank
        trace.name_thread(0, below, f"rank {rank}, data")
        for name, start, waited, end in collectives:
            identifier = len(trace.events)
            trace.begin(0, below, name, "data", identifier, start, {"waited": (end - waited) * scale})
            trace.end(0, below, name, "data", identifier, end)
    return trace.to_dict()
