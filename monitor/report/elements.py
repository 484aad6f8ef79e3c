"""HTML elements of the report: chart, timeline, table, legend, and numbers as text."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from html import escape

from .svg import BarRow, Curve, line_chart, thinned, timeline

_CHART = """\
<div class="chart{wide}"><h3>{title}{note}</h3>{legend}{large}{small}\
<div class="tip"></div><script type="application/json">{data}</script></div>"""
_DETAILS = "<details><summary>{summary}</summary>{content}</details>"
_LEGEND_ENTRY = '<span><i class="{kind} {form}"></i>{name}</span>'
_SCROLL = '<div class="scroll">{content}</div>'  # scrolled sideways on a narrow page
_TABLE = "<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
_POINTS = 1200  # points of a curve that the script shows under the pointer


def chart(
    title: str, unit: str, curves: Sequence[Curve], wide: bool = False, level: tuple[str, float] | None = None
) -> str:
    """Return a chart in two sizes, of which the style sheet shows one, and its data for the script.

    Args:
        title: heading.
        unit: small text beside the heading.
        curves: the curves. Without any points there is no chart: "".
        wide: the chart takes the width of the page.
        level: name and height of a dashed horizontal line.
    """
    height = level[1] if level else None
    large = line_chart(curves, 1060 if wide else 510, 300 if wide else 210, "step", height)
    if not large:
        return ""
    small = line_chart(curves, 362, 220, "step", height)
    shown = [curve for curve in curves if curve.points]
    entries = [(f"c{curve.color}", curve.name, "") for curve in shown]
    entries += [("level", f"{level[0]} {plain_number(level[1])}", "")] if level else []
    return _CHART.format(
        wide=" wide" if wide else "",
        title=escape(title),
        note=f" <small>{escape(unit)}</small>" if unit else "",
        legend=legend(entries) if len(entries) > 1 else "",
        large=large.replace("<svg ", '<svg class="w" ', 1),
        small=small.replace("<svg ", '<svg class="n" ', 1),
        data=json.dumps([{"name": curve.name, "points": _rounded(curve.points)} for curve in shown]),
    )


def picture(rows: Sequence[BarRow], longest: float, label: int) -> str:
    """Return a timeline; see ``svg.timeline``."""
    return _SCROLL.format(content=timeline(rows, longest, 1060, label))


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table whose cells are HTML."""
    top = "".join(f"<th>{cell}</th>" for cell in head)
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    return _SCROLL.format(content=_TABLE.format(head=top, body=body))


def legend(entries: Iterable[tuple[str, str, str]]) -> str:
    """Return a legend of (class of the color, name, "" or "thin")."""
    spans = (_LEGEND_ENTRY.format(kind=kind, form=form, name=escape(name)) for kind, name, form in entries)
    return f'<div class="legend">{"".join(spans)}</div>'


def details(summary: str, content: str) -> str:
    """Return HTML that is hidden behind a line of text until the reader opens it."""
    return _DETAILS.format(summary=escape(summary), content=content)


def milliseconds(seconds: float) -> str:
    """Return ``12.3 ms`` for seconds."""
    return f"{1e3 * seconds:.1f} ms"


def megabytes(size: float | None) -> str:
    """Return bytes in units of 10^6; "" for None."""
    return "" if size is None else f"{size / 1e6:,.3f}"


def plain_number(value: float) -> str:
    """Return a number with 4 digits, or with thousands separators from 1000 on."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _rounded(points: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    return [(x, float(f"{y:.6g}")) for x, y in thinned([p for p in points if math.isfinite(p[1])], _POINTS)]
