"""The pictures of the report: plain SVG, coloured by the page's style sheet, so that they follow its light or dark."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import NamedTuple

Points = Sequence[tuple[float, float]]


class Line(NamedTuple):
    """One curve: its name, its (x, y), the number of its colour, and whether its points are marked."""

    name: str
    points: Points
    colour: int
    marked: bool = False


class Bar(NamedTuple):
    """A piece of a row: from, to, the class of its colour, what is written on it, and what it is called."""

    start: float
    end: float
    kind: str
    text: str
    title: str
    thin: bool = False  # a strip along the foot of the row, over what is there


class Row(NamedTuple):
    """A row of bars."""

    name: str
    bars: Sequence[Bar]


_LEFT, _RIGHT, _TOP, _BOTTOM = 50, 12, 10, 36


def line_chart(lines: Sequence[Line], width: int, height: int, x_label: str, level: float | None = None) -> str:
    """Curves over one pair of axes; "" where there is nothing to draw.

    Args:
        lines: points that are no number are left out, and so is a curve without points.
        width, height: in pixels, as they will be shown.
        x_label: under the axis.
        level: where a dashed line goes across.
    """
    shown = [line._replace(points=_finite(line.points)) for line in lines]
    shown = [line for line in shown if line.points]
    if not shown:
        return ""
    xs = [x for line in shown for x, _ in line.points]
    ys = [y for line in shown for _, y in line.points] + ([level] if level is not None else [])
    x_ticks, y_ticks = ticks(min(xs), max(xs), width // 90), ticks(min(ys), max(ys), height // 45)
    x0, x1 = min(xs), max(max(xs), min(xs) + 1e-9)
    y0, y1 = min(y_ticks[0], min(ys)), max(y_ticks[-1], max(ys))

    def at(x: float, y: float) -> tuple[float, float]:
        across = (x - x0) / (x1 - x0) if x1 > x0 else 0.5
        return (
            _LEFT + across * (width - _LEFT - _RIGHT),
            height - _BOTTOM - (y - y0) / (y1 - y0) * (height - _TOP - _BOTTOM),
        )

    out = [_open(width, height, f'data-x0="{x0:.9g}" data-x1="{x1:.9g}" data-left="{_LEFT}" data-right="{_RIGHT}"')]
    for y in y_ticks:
        _, v = at(x0, y)
        out.append(f'<path class="grid" d="M{_LEFT} {v:.1f}H{width - _RIGHT}"/>')
        out.append(f'<text class="tick" x="{_LEFT - 6}" y="{v + 4:.1f}" text-anchor="end">{number(y)}</text>')
    for x in x_ticks:
        if x0 <= x <= x1:
            u, _ = at(x, y0)
            out.append(f'<path class="axis" d="M{u:.1f} {height - _BOTTOM}v4"/>')
            out.append(f'<text class="tick" x="{u:.1f}" y="{height - 18}" text-anchor="middle">{number(x)}</text>')
    out.append(f'<path class="axis" d="M{_LEFT} {height - _BOTTOM}H{width - _RIGHT}"/>')
    middle = (_LEFT + width - _RIGHT) / 2
    out.append(f'<text class="tick" x="{middle:.0f}" y="{height - 3}" text-anchor="middle">{escape(x_label)}</text>')
    if level is not None:
        _, v = at(x0, level)
        out.append(f'<path class="level" d="M{_LEFT} {v:.1f}H{width - _RIGHT}"/>')
    for line in shown:
        points = [at(x, y) for x, y in thinned(line.points, 2 * width)]
        path = "L".join(f"{u:.1f} {v:.1f}" for u, v in points)
        out.append(f'<path class="line c{line.colour}{" main" if line.marked else ""}" d="M{path}"/>')
        if line.marked or len(points) == 1:
            out += [f'<circle class="dot c{line.colour}" cx="{u:.1f}" cy="{v:.1f}" r="3"/>' for u, v in points[-40:]]
    out.append("</svg>")
    return "".join(out)


def timeline(rows: Sequence[Row], longest: float, width: int, label: int) -> str:
    """Rows of bars over one time axis in milliseconds.

    Args:
        rows: times in seconds, from 0.
        longest: where the axis ends, in seconds.
        width: in pixels.
        label: pixels for the names of the rows.
    """
    high, gap, foot = 24, 5, 34
    height = len(rows) * (high + gap) + foot
    scale = (width - label - 10) / longest
    out = [_open(width, height, "")]
    for t in ticks(0.0, 1e3 * longest, width // 90):
        u = label + t / 1e3 * scale
        if u <= width:
            out.append(f'<path class="grid" d="M{u:.1f} 0V{height - foot}"/>')
            out.append(f'<text class="tick" x="{u:.1f}" y="{height - 18}" text-anchor="middle">{number(t)}</text>')
    out.append(f'<text class="tick" x="{(label + width) / 2:.0f}" y="{height - 3}" text-anchor="middle">ms</text>')
    for i, row in enumerate(rows):
        top = i * (high + gap)
        out.append(f'<text class="name" x="0" y="{top + high / 2 + 4:.0f}">{escape(row.name)}</text>')
        out.append(f'<rect class="idle" x="{label}" y="{top}" width="{longest * scale:.1f}" height="{high}"/>')
        for bar in row.bars:
            u, w = label + bar.start * scale, (bar.end - bar.start) * scale
            if w < 0.15:
                continue
            y, h = (top + high - 5, 5) if bar.thin else (top, high)
            title = f"<title>{escape(bar.title)}: {1e3 * (bar.end - bar.start):.2f} ms</title>"
            out.append(
                f'<rect class="b {bar.kind}" x="{u:.1f}" y="{y}" width="{max(w, 0.4):.1f}" height="{h}">{title}</rect>'
            )
            if bar.text and w >= 7 * len(bar.text) + 3:
                out.append(f'<text class="on" x="{u + w / 2:.1f}" y="{top + 14}">{escape(bar.text)}</text>')
    out.append("</svg>")
    return "".join(out)


def ticks(low: float, high: float, most: int) -> list[float]:
    """Round numbers from at most ``low`` to at least ``high``, about ``most`` of them.

    >>> ticks(0.3, 9.1, 5), ticks(2.0, 2.0, 4)
    ([0.0, 2.0, 4.0, 6.0, 8.0, 10.0], [1.0, 2.0, 3.0])
    """
    if not high > low:
        step = abs(low) / 2 or 1.0
        return [low - step, low, low + step]
    rough = (high - low) / max(2, most)
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(m * unit for m in (1, 2, 5, 10) if m * unit >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(k * step, 12) for k in range(first, last + 1)]


def number(value: float) -> str:
    """A number as an axis shows it.

    >>> [number(x) for x in (0, 0.004, 2.5, 1200, 25000, 3.1e6)]
    ['0', '0.004', '2.5', '1200', '25k', '3.1M']
    """
    if value and abs(value) < 1e-3:
        return f"{value:.0e}".replace("e-0", "e-")
    for unit, name in ((1e12, "T"), (1e9, "G"), (1e6, "M")):
        if abs(value) >= unit:
            return f"{value / unit:.4g}{name}"
    return f"{value / 1e3:.4g}k" if abs(value) >= 10_000 else f"{value:.4g}"


def thinned(points: Points, most: int) -> Points:
    """At most so many points: of each run of neighbours the lowest and the highest, so that spikes stay."""
    if len(points) <= most:
        return points
    size = math.ceil(2 * len(points) / most)
    kept: list[tuple[float, float]] = []
    for start in range(0, len(points), size):
        run = points[start : start + size]
        kept += sorted({min(run, key=lambda p: p[1]), max(run, key=lambda p: p[1])})
    return kept


def _finite(points: Points) -> Points:
    return [(x, y) for x, y in points if math.isfinite(y)]


def _open(width: int, height: int, more: str) -> str:
    return f'<svg viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img" {more}>'
