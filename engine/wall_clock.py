"""``wall_clock_breakdown``: what the ranks' time went to, as a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .slices import PARTS, WORLD

Parts = Mapping[str, Mapping[str, float]]

_ROWS = list(dict.fromkeys([*PARTS.values(), ("tensor", "collectives"), WORLD]))
_AXES = ["compute", "pipe", "tensor", "data", "world", "host"]
ROWS = sorted(_ROWS, key=lambda row: _AXES.index(row[0]))
_STAGES = 8  # more pipe ranks than that have no column each


class Means:
    """Adds up the parts of steps."""

    def __init__(self) -> None:
        self._forget()

    def _forget(self) -> None:
        self.steps = 0
        self._sums: dict[str, dict[str, float]] = {}
        self._bubbles: list[float] = []

    def add(self, parts: Parts, bubble: float | None) -> None:
        """One more step."""
        self.steps += 1
        for axis, row in parts.items():
            mine = self._sums.setdefault(axis, {})
            for part, seconds in row.items():
                mine[part] = mine.get(part, 0.0) + seconds
        if bubble is not None:
            self._bubbles.append(bubble)

    def take(self) -> dict[str, Any]:
        """The means, and start again."""
        parts = {axis: {part: s / self.steps for part, s in row.items()} for axis, row in self._sums.items()}
        bubble = sum(self._bubbles) / len(self._bubbles) if self._bubbles else None
        means = {"steps": self.steps, "parts": parts, "bubble": bubble}
        self._forget()
        return means


def table(means: Sequence[Mapping[str, Any]], stages: Sequence[int], step: int) -> Any:
    """A rich table in milliseconds: a column for each pipe rank (its mean), the mean of all, the most, and whose.

    Args:
        means: of each rank, as ``Means.take`` has them.
        stages: the position of each rank on the pipe axis.
        step: the last one of them.
    """
    from rich.console import Group
    from rich.table import Table

    count = max(stages) + 1
    columns = range(count) if 1 < count <= _STAGES else range(0)
    title = f"step {step}: wall clock of {means[0]['steps']} steps, ms a step"
    bubble = means[0]["bubble"]
    title += f", bubble {bubble:.1%}" if bubble is not None else ""
    made = Table()
    for head in ("axis", ""):
        made.add_column(head)
    for head in (*(f"pipe {c}" for c in columns), "mean", "most", "rank"):
        made.add_column(head, justify="right")
    before = None
    for axis, part in ROWS:
        values = [m["parts"].get(axis, {}).get(part) for m in means]
        if all(value is None for value in values):
            continue
        numbers = [value or 0.0 for value in values]
        if before not in (None, axis):
            made.add_section()
        most = max(range(len(numbers)), key=numbers.__getitem__)
        cells = [_mean([n for n, stage in zip(numbers, stages, strict=True) if stage == c]) for c in columns]
        cells += [_mean(numbers), numbers[most]]
        made.add_row(axis if axis != before else "", part, *(f"{1e3 * c:.2f}" for c in cells), str(most))
        before = axis
    made.add_section()
    wholes = [sum(sum(row.values()) for row in m["parts"].values()) for m in means]
    cells = [_mean([w for w, stage in zip(wholes, stages, strict=True) if stage == c]) for c in columns]
    most = max(range(len(wholes)), key=wholes.__getitem__)
    cells += [_mean(wholes), wholes[most]]
    made.add_row("step", "", *(f"{1e3 * c:.2f}" for c in cells), str(most))
    return Group(title, made)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
