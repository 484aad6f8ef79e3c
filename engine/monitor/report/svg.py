"""Coordinates of the report's charts and timelines, which page.html draws as SVG."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

Points = Sequence[tuple[float, float]]


class Curve(NamedTuple):
    """One curve: its name, its points (x, y), the number of its color, and whether its points are marked."""

    name: str
    points: Points
    color: int
    marked: bool = False


class Bar(NamedTuple):
    """One bar of a row: begin, end, the class of its color, the text on it, and its title under the pointer.

    ``thin``: a strip along the lower edge of the row, over other bars. ``fill``: a color in place of the class's.
    """

    start: float
    end: float
    kind: str
    text: str
    title: str
    thin: bool = False
    fill: str = ""


class BarRow(NamedTuple):
    """A row of bars: its name and the bars."""

    name: str
    bars: Sequence[Bar]


_LEFT, _RIGHT, _TOP, _BOTTOM = 50, 12, 10, 36  # margins of a chart
_WIDTH = 1060  # of a timeline


def line_chart(curves: Sequence[Curve], width: int, height: int, level: float | None = None) -> dict[str, Any]:
    """Return curves over one pair of axes, in pixels.

    Args:
        curves: curves with at least one point each; all numbers are finite.
        width, height: size in pixels.
        level: height of a dashed horizontal line.
    """
    xs = [x for curve in curves for x, _ in curve.points]
    ys = [y for curve in curves for _, y in curve.points] + ([level] if level is not None else [])
    x_ticks, y_ticks = ticks(min(xs), max(xs), width // 90), ticks(min(ys), max(ys), height // 45)
    x0, x1 = min(xs), max(max(xs), min(xs) + 1e-9)
    y0, y1 = min(y_ticks[0], min(ys)), max(y_ticks[-1], max(ys))

    def across(x: float) -> float:
        return round(_LEFT + ((x - x0) / (x1 - x0) if x1 > x0 else 0.5) * (width - _LEFT - _RIGHT), 1)

    def down(y: float) -> float:
        return round(height - _BOTTOM - (y - y0) / (y1 - y0) * (height - _TOP - _BOTTOM), 1)

    return {
        "width": width,
        "height": height,
        "left": _LEFT,
        "right": _RIGHT,
        "foot": height - _BOTTOM,
        "x0": f"{x0:.9g}",
        "x1": f"{x1:.9g}",
        "x_ticks": [(across(x), number(x)) for x in x_ticks if x0 <= x <= x1],
        "y_ticks": [(down(y), number(y)) for y in y_ticks],
        "level": None if level is None else down(level),
        "curves": [(c, [(across(x), down(y)) for x, y in thinned(c.points, 2 * width)]) for c in curves],
    }


def timeline(rows: Sequence[BarRow], longest: float, label: int, unit: str = "ms") -> dict[str, Any]:
    """Return rows of bars over one time axis.

    Args:
        rows: the rows, with times in seconds from 0.
        longest: end of the time axis in seconds.
        label: pixels for the names of the rows.
        unit: unit of the axis, ms or s.
    """
    factor = 1e3 if unit == "ms" else 1.0
    scale = (_WIDTH - label - 10) / longest
    places = ((label + t / factor * scale, number(t)) for t in ticks(0.0, factor * longest, _WIDTH // 90))
    return {
        "width": _WIDTH,
        "label": label,
        "scale": scale,
        "unit": unit,
        "factor": factor,
        "ticks": [(round(u, 1), text) for u, text in places if u <= _WIDTH - 16],
        "rows": rows,
    }


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
