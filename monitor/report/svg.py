"""Charts and timelines of the report as SVG. Colors are classes of the page's style sheet, for light and dark pages."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import NamedTuple

Points = Sequence[tuple[float, float]]


class Curve(NamedTuple):
    """One curve: its name, its points (x, y), the number of its color, and whether its points are marked."""

    name: str
    points: Points
    color: int
    marked: bool = False


class Bar(NamedTuple):
    """One bar of a row: begin, end, the class of its color, the text on it, and its title under the pointer."""

    start: float
    end: float
    kind: str
    text: str
    title: str
    thin: bool = False  # a strip along the lower edge of the row, over other bars


class BarRow(NamedTuple):
    """A row of bars: its name and the bars."""

    name: str
    bars: Sequence[Bar]


_LEFT, _RIGHT, _TOP, _BOTTOM = 50, 12, 10, 36


def line_chart(curves: Sequence[Curve], width: int, height: int, x_label: str, level: float | None = None) -> str:
    """Return curves over one pair of axes; "" if there are no points.

    Args:
        curves: points that are not finite are left out, and so are curves without points.
        width, height: size in pixels.
        x_label: label of the x axis.
        level: height of a dashed horizontal line.
    """
    shown = [curve._replace(points=_finite(curve.points)) for curve in curves]
    shown = [curve for curve in shown if curve.points]
    if not shown:
        return ""
    xs = [x for curve in shown for x, _ in curve.points]
    ys = [y for curve in shown for _, y in curve.points] + ([level] if level is not None else [])
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
    for curve in shown:
        points = [at(x, y) for x, y in thinned(curve.points, 2 * width)]
        path = "L".join(f"{u:.1f} {v:.1f}" for u, v in points)
        out.append(f'<path class="line c{curve.color}{" main" if curve.marked else ""}" d="M{path}"/>')
        if curve.marked or len(points) == 1:
            out += [f'<circle class="dot c{curve.color}" cx="{u:.1f}" cy="{v:.1f}" r="3"/>' for u, v in points[-40:]]
    out.append("</svg>")
    return "".join(out)


def timeline(rows: Sequence[BarRow], longest: float, width: int, label: int) -> str:
    """Return rows of bars over one time axis in milliseconds.

    Args:
        rows: the rows, with times in seconds from 0.
        longest: end of the time axis in seconds.
        width: width in pixels.
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
    """Return round numbers from at most ``low`` to at least ``high``, about ``most`` of them.

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
    """Return a number as an axis shows it.

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
    """Return at most so many points: the lowest and the highest of each run of neighbors, so that spikes stay."""
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
