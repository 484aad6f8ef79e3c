"""``monitor.breakdown``: the time of each part of a step over the ranks: once as a table, then in a line."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any

from ...base.records import show
from ...grid import Grid
from .step_record import PARTS, WORLD, Parts

_AXES = ["compute", "pipe", "tensor", "data", "world", "host"]
ROWS = sorted(dict.fromkeys([*PARTS.values(), ("tensor", "collectives"), WORLD]), key=lambda row: _AXES.index(row[0]))
_SHARE = 0.01  # of a step: shorter parts are not in a line
_COLUMNS = 8  # pipe ranks that have a column each; with more of them the table shows means only


class PartMeans:
    """Running means of the time in each part of a step, over several steps on one rank."""

    def __init__(self) -> None:
        self._steps: list[tuple[Parts, float | None]] = []  # parts and bubble of each step
        self.shown = False  # the table was printed

    def add(self, parts: Parts, bubble: float | None) -> None:
        """Add the seconds of one step's parts and its bubble to the running means."""
        self._steps.append((parts, bubble))

    def take(self) -> dict[str, Any]:
        """Return the means since the last call: number of steps, seconds of each part, bubble."""
        steps, self._steps = self._steps, []
        parts: Parts = {}
        keys = dict.fromkeys((axis, part) for step, _ in steps for axis, row in step.items() for part in row)
        for axis, part in keys:
            seconds = sum(step.get(axis, {}).get(part, 0.0) for step, _ in steps)
            parts.setdefault(axis, {})[part] = seconds / len(steps)
        bubbles = [bubble for _, bubble in steps if bubble is not None]
        return {"steps": len(steps), "parts": parts, "bubble": fmean(bubbles) if bubbles else None}


def table(means: Sequence[Mapping[str, Any]], stages: Sequence[int], step: int) -> Any:
    """Return a rich table in milliseconds.

    Its columns are the mean of each pipe rank, the mean of all ranks, the largest value, and the rank that has it.

    Args:
        means: the result of ``PartMeans.take`` on each rank.
        stages: coordinate of each rank on the pipe axis.
        step: number of the last step that the means include.
    """
    from rich.console import Group
    from rich.table import Table

    pipe = max(stages) + 1
    columns = range(pipe) if 1 < pipe <= _COLUMNS else range(0)

    def cells(numbers: Sequence[float]) -> Iterable[str]:
        largest = max(range(len(numbers)), key=numbers.__getitem__)
        shown = [fmean([n for n, stage in zip(numbers, stages, strict=True) if stage == c]) for c in columns]
        return (*(f"{1e3 * seconds:.2f}" for seconds in (*shown, fmean(numbers), numbers[largest])), str(largest))

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
        if before not in (None, axis):
            made.add_section()
        made.add_row(axis if axis != before else "", part, *cells([value or 0.0 for value in values]))
        before = axis
    made.add_section()
    made.add_row("step", "", *cells([sum(sum(row.values()) for row in m["parts"].values()) for m in means]))
    title = f"step {step}: wall clock of {means[0]['steps']} steps, ms a step"
    bubble = means[0]["bubble"]
    return Group(title if bubble is None else f"{title}, bubble {bubble:.1%}", made)


def line(means: Sequence[Mapping[str, Any]], step: int) -> str:
    """Return the means over all ranks in one line, the longest part first, in milliseconds.

    Args:
        means, step: as in ``table``.
    """
    steps = [sum(sum(row.values()) for row in mean["parts"].values()) for mean in means]
    slowest = max(range(len(steps)), key=steps.__getitem__)
    seconds_of = {
        part if axis == "compute" else f"{axis} {part}": fmean([m["parts"].get(axis, {}).get(part, 0.0) for m in means])
        for axis, part in ROWS
    }
    parts = sorted(
        ((seconds, name) for name, seconds in seconds_of.items() if seconds >= _SHARE * fmean(steps)), reverse=True
    )
    bubble = means[0]["bubble"]
    words = [f"step {step}: {1e3 * fmean(steps):.2f} ms a step"]
    words += [f"rank {slowest} {1e3 * steps[slowest]:.2f}"] if len(steps) > 1 else []
    words += [] if bubble is None else [f"bubble {bubble:.1%}"]
    return f"{', '.join(words)}: {', '.join(f'{name} {1e3 * seconds:.2f}' for seconds, name in parts)}"


def print_means(grid: Grid, means: PartMeans, step: int) -> None:
    """Print on rank 0 the means of the steps since the last call: the first time a table, then a line. Collective."""
    everyone = grid.world.all_gather_json(means.take())
    shown, means.shown = means.shown, True
    if grid.rank == 0 and shown:
        show(line(everyone, step))
    elif grid.rank == 0:
        from rich.console import Console

        stages = [grid.topology.coordinate(rank)._asdict()["pipe"] for rank in range(grid.size)]
        with contextlib.suppress(OSError):
            Console(width=70 + 9 * grid.pipe.size).print(table(everyone, stages, step))


def phase_times(parts: Parts) -> dict[str, float]:
    """Return the seconds of a step's phases, as the metrics ``elapsed_time_ms_...`` name them."""
    compute, data = parts.get("compute", {}), parts.get("data", {})
    inner = sum(compute.get(part, 0.0) for part in ("backward", "input gradient", "weight gradient", "recompute"))
    reduce = data.get("reduce", 0.0)
    return {
        "forward": compute.get("forward", 0.0),
        "backward": inner + reduce,
        "backward_inner": inner,
        "backward_allreduce": reduce,
        "step": compute.get("optimizer", 0.0) + data.get("gather", 0.0),
    }
