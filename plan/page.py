"""HTML section of a plan: table of layouts, memory bar and time split of the best, from what ``--json`` prints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from .picture import COLORS, name_of

_STYLE = (
    "body{font:14px/1.5 system-ui,sans-serif;max-width:70em;margin:2em auto;padding:0 1em}"
    "table{border-collapse:collapse;width:100%}td,th{padding:.25em .6em;text-align:right;border-bottom:1px solid #ddd}"
    "td:first-child,th:first-child{text-align:left}.bar{display:flex;height:1.6em;margin:.4em 0}"
    ".bar i{display:block;height:100%}.key i{display:inline-block;width:.8em;height:.8em;margin:0 .3em 0 1em}"
)


def figure(value: float) -> str:
    """Return a number as the page and the terminal show it."""
    return f"{value:.4g}"


def section(result: Mapping[str, Any], title: str) -> str:
    """Return the section of an HTML page for the object that ``--json`` prints."""
    layouts: Sequence[Mapping[str, Any]] = result["layouts"]
    heads = ("layout", "seconds", "TFLOP/s", "MFU %", "GiB")
    rows = [
        "".join(
            f"<td>{escape(cell)}</td>"
            for cell in (
                name_of(layout),
                figure(layout["step_s"]),
                figure(layout["tflops_per_gpu"]),
                figure(100 * layout["mfu"]),
                figure(sum(layout["memory_gib"].values())),
            )
        )
        for layout in layouts
    ]
    best = layouts[0]
    excluded = ", ".join(f"{count:,} {escape(reason)}" for reason, count in result["excluded"].items())
    return "\n".join(
        [
            f'<section id="plan"><h2>{escape(title)}</h2>',
            *(f"<p><b>{escape(result['unfitted'])}</b></p>" for _ in range("unfitted" in result)),
            "<table><tr>" + "".join(f"<th>{head}</th>" for head in heads) + "</tr>",
            *(f"<tr>{row}</tr>" for row in rows),
            "</table>",
            f"<p>{result['considered']:,} layouts considered: {excluded or 'none excluded'}.</p>",
            "<h3>Memory of the best layout, GiB on the fullest GPU</h3>",
            *_bar(best["memory_gib"]),
            "<h3>Time of a step of the best layout, seconds</h3>",
            *_bar(best["time_s"]),
            "</section>",
        ]
    )


def page(result: Mapping[str, Any], title: str) -> str:
    """Return a whole HTML page with the section."""
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(title)}</title>'
        f"<style>{_STYLE}</style>\n{section(result, title)}\n</html>\n"
    )


def _bar(kinds: Mapping[str, float]) -> list[str]:
    """Return a bar of colored parts, and its key with the numbers."""
    shown = {kind: value for kind, value in kinds.items() if value > 0}
    total = sum(shown.values())
    parts = (
        f'<i style="width:{100 * value / total:.2f}%;background:{COLORS[kind]}" title="{kind} {figure(value)}"></i>'
        for kind, value in shown.items()
    )
    key = (
        f'<span><i style="background:{COLORS[kind]}"></i>{kind} {figure(value)}</span>' for kind, value in shown.items()
    )
    return [f'<div class="bar">{"".join(parts)}</div>', f'<p class="key">{" ".join(key)}; all {figure(total)}</p>']
