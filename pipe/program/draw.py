"""Drawings of timelines: text in the terminal, PNG or SVG, and a trace for Chrome or Perfetto.

text(schedule)                          one row per rank, colors by op, microbatch numbers
picture([simulated, measured], "run.png")   stacked on one time axis
chrome_trace(timeline)                  open in chrome://tracing or ui.perfetto.dev
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from ...base.errors import to_install
from .chrome_trace import ChromeTrace
from .colors import COLORS, NAMES, OTHER, color
from .ops import COMPUTE, Op
from .schedule import Schedule
from .simulate import timeline_of
from .timeline import Span, Timeline, together

# kind -> (style of the first chunk, of the others) in a terminal, in colors that every terminal has
STYLES = {
    "F": ("bright_white on blue", "black on bright_cyan"),
    "B": ("bright_white on green", "black on bright_green"),
    "I": ("bright_white on red", "black on bright_red"),
    "W": ("bright_white on bright_black", "black on white"),
    "C": ("black on cyan", "black on bright_white"),
    "O": ("bright_white on magenta", "black on bright_magenta"),
    "R": ("black on yellow", "black on bright_yellow"),
}


def text(subject: Timeline | Schedule, width: int | None = None, unit: str = " units of time") -> Any:
    """Return a rich renderable: a row or two per rank, with the ops as colored letters and microbatch numbers.

    It is legible without color: letters tell kinds and stages apart, ``=`` fills an op up to its end, and ``.`` is idle
    time. How much is drawn depends on the width of the shortest op: a cell ``F0``; a letter above a number; or, in a
    long schedule, letters in the proportion of the ops alone.

    Args:
        subject: what to draw.
        width: the most columns, without the names of the ranks. None: as many as the numbers need, at most 400.
        unit: unit of time, written behind the length of a column, such as `` ms``.
    """
    from rich.text import Text

    times = timeline_of(subject) if isinstance(subject, Schedule) else subject
    rows = [[span for span in row if span.op.kind in COMPUTE] for row in times.rows]
    rows, seconds = _side_by_side(rows)
    spans = [span for row in rows for span in row]
    if not spans:
        return Text("no op runs")
    begin, end = min(s.start for s in spans), max(s.end for s in spans)
    digits = len(str(max(span.op.microbatch for span in spans)))
    copies = [span for lane in times.transfers for span in lane]
    shortest = min((s.end - s.start for s in (*spans, *copies) if s.end > s.start), default=end - begin)
    needed = max(20, round((end - begin) / shortest * (digits + 2))) if end > begin else 20
    width = min(needed, 400 if width is None else max(width, 20))
    scale = width / (end - begin) if end > begin else 1.0
    narrowest = shortest * scale
    if narrowest >= 1 and end > begin:  # whole columns, so that ops of equal cost are equally wide
        narrowest = int(narrowest + 1e-9)
        scale = narrowest / shortest
    out, notes = Text(no_wrap=True, overflow="crop"), []
    if any(span.op.stage >= len(rows) for span in spans):
        notes.append("lower case and light: a rank's later stages")
    label = len(f"rank {len(rows) - 1}")
    for rank, row in enumerate(rows):
        if narrowest >= 1:
            lines = _cells(row, len(rows), begin, end, scale, apart=narrowest <= digits, seconds=seconds)
        else:
            lines = [_summary(row, len(rows), begin, width, scale)]
        for i, line in enumerate(lines):
            out.append(f"rank {rank}".ljust(label) if i == 0 else " " * label, style="bold")
            out.append(" ").append_text(line).append("\n")
        if times.transfers and narrowest >= 1:
            for i, line in enumerate(
                _cells(times.transfers[rank], len(rows), begin, end, scale, apart=narrowest <= digits)
            ):
                out.append(("copies" if i == 0 else "").ljust(label))
                out.append(" ").append_text(line).append("\n")
    spans += [span for lane in times.transfers if narrowest >= 1 for span in lane]
    if narrowest < 1:
        notes += ["each op has columns in proportion to its time, . idle", f"a column is {1 / scale:.3g}{unit}"]
    else:
        notes.append(
            "= the op goes on, . idle" + (", & runs interleaved with the op before" if "&" in out.plain else "")
        )
        if narrowest < digits:
            notes.append("numbers: the last digit of the microbatch")
    out.append(" " * label)
    for kind, name in NAMES.items():
        if any(span.op.kind == kind for span in spans):
            out.append(" ").append(f" {kind} ", style=STYLES[kind][0]).append(f" {name} ")
    for note in notes:
        out.append("\n" + " " * (label + 1) + note)
    return out


def _letter(op: Op, ranks: int) -> tuple[str, str]:
    """Return the letter and the style of an op: lower case and light for a rank's later stages."""
    later = op.stage >= ranks
    return op.kind.lower() if later else op.kind, STYLES[op.kind][later]


def _side_by_side(rows: list[list[Span]]) -> tuple[list[list[Span]], set[Op]]:
    """Return rows in which each op of a pair has one half of their time, and the second ops of the pairs."""
    split: list[list[Span]] = []
    for row in rows:
        split.append([])
        for spans in together(row):
            start, end, parts = spans[0].start, spans[0].end, len(spans)
            times = [start + (end - start) * i / parts for i in range(parts)] + [end]
            split[-1] += [Span(span.op, times[i], times[i + 1]) for i, span in enumerate(spans)]
    return split, {spans[1].op for row in rows for spans in together(row) if len(spans) == 2}


def _cells(
    row: Sequence[Span],
    ranks: int,
    begin: float,
    end: float,
    scale: float,
    apart: bool,
    seconds: Collection[Op] = (),
) -> list[Any]:
    """Return a rank's line of cells such as ``F0=``; with ``apart``, a line of letters and one of numbers.

    Cells of ``seconds``, the second ops of pairs, begin with ``&`` if they are wide enough.
    """
    from rich.text import Text

    lines, column = [Text() for _ in range(1 + apart)], 0
    for span in row:
        first, last = round((span.start - begin) * scale), round((span.end - begin) * scale)
        cells = max(0, last - max(first, column))
        letter, style = _letter(span.op, ranks)
        number = str(span.op.microbatch)
        if span.op in seconds and cells > 1 + (not apart) * len(number):
            letter = "&" + letter
        lines[0].append("." * (first - column))
        lines[0].append((letter if apart else letter + number).ljust(cells, "=")[:cells], style=style)
        if apart:
            lines[1].append(" " * (first - column))
            lines[1].append(number[-cells:].ljust(cells) if cells else "", style=style)
        column = max(column, last)
    lines[0].append("." * (round((end - begin) * scale) - column))
    return lines


def _summary(row: Sequence[Span], ranks: int, begin: float, width: int, scale: float) -> Any:
    """Return a rank's line of letters: each kind of op has letters by its share of the time; idle time is a dot."""
    from rich.text import Text

    line, owed, at = Text(), {(".", ""): 0.0}, 0
    for column in range(width):
        left, right = begin + column / scale, begin + (column + 1) / scale
        while at < len(row) and row[at].end <= left:
            at += 1
        idle, k, here = 1.0, at, set()
        while k < len(row) and row[k].start < right:
            share = (min(row[k].end, right) - max(row[k].start, left)) * scale
            letter = _letter(row[k].op, ranks)
            owed[letter] = owed.get(letter, 0.0) + share
            here.add(letter)
            idle, k = idle - share, k + 1
        if idle > 1e-9:
            owed[".", ""] += idle
            here.add((".", ""))
        # The others of this column are owed to the next ones, so that over a few of them the shares are right.
        most = max(sorted(here), key=lambda letter: owed[letter])
        owed[most] -= 1
        line.append(most[0], style=most[1])
    return line


def picture(
    timelines: Timeline | Sequence[Timeline],
    path: str | Path,
    titles: Sequence[str] | None = None,
    unit: str = "",
    paths: Sequence[Sequence[Span]] | None = None,
) -> None:
    """Draw timelines one above the other on one time axis. Each starts at its own first op.

    Args:
        timelines: one or several.
        path: file to write; ends in .png, .svg or .pdf.
        titles: one for each timeline.
        unit: unit of time, written at the axis.
        paths: critical path of each timeline (critical.py), drawn as a line.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.legend_handler import HandlerTuple
        from matplotlib.lines import Line2D
        from matplotlib.patches import Patch
    except ImportError:
        raise ImportError(f"pictures need matplotlib: {to_install('plot')}", name="matplotlib") from None
    times = [timelines] if isinstance(timelines, Timeline) else list(timelines)
    if not times:
        raise ValueError("the list of timelines is empty: give at least one, such as simulate(schedule).timeline")
    if titles is not None and len(titles) != len(times):
        raise ValueError(f"{len(titles)} titles for {len(times)} timelines: give one for each")
    longest = max(max(t.makespan for t in times), 1e-12)
    spans = [span for t in times for row in t.rows for span in row if span.op.kind in COMPUTE]
    lengths = sorted(span.end - span.start for span in spans if span.end > span.start) or [longest]
    digits = len(str(max((span.op.microbatch for span in spans), default=0)))
    # So that the number fits into three of four ops, in letters of 5 points.
    width = min(40.0, max(9.0, 1.0 + longest / lengths[len(lengths) // 4] * 5 * (0.62 * digits + 0.2) / 72))
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
            # The second op of a pair lies below the first.
            seconds = {both[1].op for both in together(spans) if len(both) == 2}
            firsts = {both[0].op for both in together(spans) if len(both) == 2}
            for ops, top, height in ((None, -0.4, 0.8), (firsts, -0.4, 0.4), (seconds, 0.0, 0.4)):
                drawn = [
                    (span, fill)
                    for span, fill in zip(spans, fills, strict=True)
                    if (span.op in ops if ops is not None else span.op not in firsts | seconds)
                ]
                bars = [(span.start - begin, span.end - span.start) for span, _ in drawn]
                colors = [fill for _, fill in drawn]
                axis.broken_barh(bars, (rank + top, height), facecolors=colors, edgecolor="white", linewidth=0.4)
                for span, fill in drawn:
                    _number(axis, rank + top + height / 2, span, begin, fill, inches)
            # Copies to and from the host, below the row.
            lane = [*one.transfers[rank]] if one.transfers else []
            bars = [(span.start - begin, span.end - span.start) for span in lane]
            fills = [color(span.op, stages, len(one.rows)) for span in lane]
            axis.broken_barh(bars, (rank + 0.4, 0.16), facecolors=fills, edgecolor="white", linewidth=0.4)
            # A thin bar below the row: light while a collective is under way, black while the rank waits for it.
            collectives = one.collectives[rank] if one.collectives else ()
            whole = [(c.start - begin, c.end - c.start) for c in collectives]
            waits = [(c.waited - begin, c.end - c.waited) for c in collectives]
            axis.broken_barh(whole, (rank + 0.4, 0.07), color=OTHER)
            axis.broken_barh(waits, (rank + 0.4, 0.07), color="black")
        if paths is not None:
            rank_of = {
                span.op: rank for rows in (one.rows, one.transfers) for rank, row in enumerate(rows) for span in row
            }
            points = [(time - begin, rank_of[span.op] + 0.32) for span in paths[i] for time in (span.start, span.end)]
            axis.plot(*zip(*points, strict=True), color="black", linewidth=1.2)
        axis.set_ylim(len(one.rows) - 0.4, -0.6)
        axis.set_yticks(range(len(one.rows)), [f"pipe {r}" for r in range(len(one.rows))])
        axis.set_xlim(0, longest * 1.005)
        axis.spines[["top", "right"]].set_visible(False)
        name = f"{titles[i]}\n" if titles is not None else ""
        least, most = min(one.idle, default=0.0), max(one.idle, default=0.0)
        idle = f"bubble {one.bubble:.1%}"
        if most > least + 0.01:
            ends = (f"pipe {one.idle.index(share)}: {share:.1%}" for share in (least, most))
            idle = f"idle for {sum(one.idle) / len(one.idle):.1%} on average ({', '.join(ends)})"
        title = f"{name}makespan {one.makespan:.4g}{unit}, {idle}"
        axis.set_title(title, loc="left", fontsize=10)
    axes[-1].set_xlabel(f"time ({unit.strip()})" if unit.strip() else "time")
    seen = {span.op.kind for t in times for row in (*t.rows, *t.transfers) for span in row}
    later = any(span.op.stage >= len(t.rows) for t in times for row in t.rows for span in row)
    shades = [tuple(Patch(color=c) for c in COLORS[k][: 1 + later]) for k in NAMES if k in seen]
    handles: list[Any] = [*shades]
    labels = [NAMES[k] for k in NAMES if k in seen]
    if later:
        handles.append(Patch(visible=False))
        labels.append("dark: a rank's first stage, light: its last")
    if paths is not None:
        handles.append(Line2D([], [], color="black", linewidth=1.2))
        labels.append("critical path")
    if any(collectives for t in times for collectives in t.collectives):
        handles += [Patch(color=OTHER), Patch(color="black")]
        labels += ["collective", "waiting for it"]
    figure.legend(
        handles,
        labels,
        handler_map={tuple: HandlerTuple(ndivide=None)},
        loc="outside lower center",
        ncols=max(1, min(len(handles), int(width // 2))),
        frameon=False,
        fontsize=9,
    )
    figure.savefig(path, dpi=130)


def _number(axis: Any, height: float, span: Span, begin: float, fill: str, inches: float) -> None:
    number = str(span.op.microbatch)
    length = span.end - span.start
    size = min(8.0, length * inches * 72 / (0.62 * len(number) + 0.2))  # points: the largest digits that fit
    if size >= 4.5:
        ink = "white" if int(fill[3:5], 16) < 150 else "black"
        middle = span.start - begin + length / 2
        axis.text(middle, height, number, ha="center", va="center", color=ink, fontsize=size)


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
    for rank, lane in enumerate(times.transfers):
        below = 2 * len(times.rows) + rank
        trace.name_thread(0, below, f"rank {rank}, copies")
        for op, start, end in lane:
            trace.span(0, below, str(op), op.kind, start, end - start, {"stage": op.stage, "microbatch": op.microbatch})
    for rank, collectives in enumerate(times.collectives):
        below = len(times.rows) + rank
        trace.name_thread(0, below, f"rank {rank}, data")
        for name, start, waited, end in collectives:
            identifier = len(trace.events)
            trace.begin(0, below, name, "data", identifier, start, {"waited": (end - waited) * scale})
            trace.end(0, below, name, "data", identifier, end)
    return trace.to_dict()
