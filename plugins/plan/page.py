"""HTML page of a plan: table of layouts, memory and time of the best as bars, from what ``--json`` prints."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .picture import COLORS, name_of

HEADS = ("layout", "seconds", "TFLOP/s", "MFU %", "GiB")


def figure(value: float) -> str:
    """Return a number as the page and the terminal show it."""
    return f"{value:.4g}"


def cells(layout: Mapping[str, Any]) -> list[str]:
    """Return the cells of a layout's row, under ``HEADS``."""
    total = sum(layout["memory_gib"].values())
    numbers = (layout["step_s"], layout["tflops_per_gpu"], 100 * layout["mfu"], total)
    return [name_of(layout), *map(figure, numbers)]


def page(result: Mapping[str, Any], title: str) -> str:
    """Return the HTML page for the object that ``--json`` prints."""
    from jinja2 import Environment, FileSystemLoader

    loader = FileSystemLoader(Path(__file__).parent)
    environment = Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters["figure"] = figure
    return environment.get_template("page.html").render(result, title=title, heads=HEADS, cells=cells, colors=COLORS)
