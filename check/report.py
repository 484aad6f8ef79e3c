"""Result of a check, as a table with findings and as JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from rich.text import Text

from ..base.errors import escaped
from ..base.tables import as_text, table
from .causes import Cause
from .costs import Cost

KINDS = ("outputs", "gradients", "gradient norm", "weights")


@dataclass
class Differing:
    """A number that differs.

    Attributes:
        kind: one of ``KINDS``.
        name: name of the number, parameter or metric.
        at: index of the largest difference in the tensor.
        found, wanted: the value on the grid and on one process.
        rank: the rank that has it.
    """

    kind: str
    name: str
    at: tuple[int, ...]
    found: float
    wanted: float
    rank: int

    def __str__(self) -> str:
        where = f" at {self.at}" if self.at else ""
        what = {"gradients": "gradient of ", "weights": "stepped weight of "}.get(self.kind, "")
        return (
            f"{what}{self.name}{where} is {self.found:.12g} on rank {self.rank}, and {self.wanted:.12g} on one process"
        )


@dataclass
class Finding:
    """Where and why a grid differs.

    Attributes:
        phase: ``forward``, ``backward`` or ``parameter``, as of ``Location``; ``run`` if the run itself failed.
        layer: index of the layer, or None.
        module, what, place: the module, its class, and file and line of its code; or empty.
        op, op_place: the op, and file and line of its call; or empty.
        axes: axes that make the difference each on its own; empty if only their combination does.
        parameter: the first parameter whose gradient differs, in the order of the backward pass; None if none does.
        causes: usual causes of what is seen, the most likely one first.
    """

    phase: str
    layer: int | None = None
    module: str = ""
    what: str = ""
    place: str = ""
    op: str = ""
    op_place: str = ""
    axes: tuple[str, ...] = ()
    parameter: Differing | None = None
    causes: list[Cause] = field(default_factory=list)


@dataclass
class GridResult:
    """Comparison of a grid with one process.

    Attributes:
        grid: its name, such as ``pipe=2``.
        counts: kind -> (numbers that are equal, all).
        differing: numbers that differ, the first ones in the order of the backward pass.
        error: one line if the run failed, or empty.
        finding: where it differs and why; None if all holds.
        traffic: axis -> (calls, bytes sent by rank 0, bytes by the formula or None).
    """

    grid: str
    counts: dict[str, tuple[int, int]] = field(default_factory=dict)
    differing: list[Differing] = field(default_factory=list)
    error: str = ""
    finding: Finding | None = None
    traffic: dict[str, tuple[int, float, float | None]] = field(default_factory=dict)

    @property
    def holds(self) -> bool:
        """True if the grid has the numbers of one process."""
        return not self.error and not self.differing


@dataclass
class Report:
    """Result of a check.

    Attributes:
        target: what was checked.
        grids: the grids, in the order in which they ran.
        error: one line if the model does not run on one process, or is not deterministic there; or empty.
        causes: usual causes of the error.
        without_gradient: parameters without a gradient, or with one of zeros.
        costs: costs of the layers, if asked for.
    """

    target: str
    grids: list[GridResult] = field(default_factory=list)
    error: str = ""
    causes: list[Cause] = field(default_factory=list)
    without_gradient: list[str] = field(default_factory=list)
    costs: list[Cost] = field(default_factory=list)

    @property
    def holds(self) -> bool:
        """True if every grid has the numbers of one process."""
        return not self.error and all(each.holds for each in self.grids)

    def to_dict(self) -> dict[str, Any]:
        """Return all of the report as JSON's values."""
        found = asdict(self)
        found["causes"] = [each._asdict() for each in self.causes]
        found["costs"] = [each._asdict() for each in self.costs]
        for result, made in zip(self.grids, found["grids"], strict=True):
            made["holds"] = result.holds
            if result.finding is not None:
                made["finding"]["causes"] = [each._asdict() for each in result.finding.causes]
        return {**found, "holds": self.holds}

    def text(self) -> str:
        """Return the tables and the findings as text."""
        parts: list[Any] = []
        if self.error:
            parts += [f"{self.target}: {self.error}", *_cause_lines(self.causes)]
        if self.grids:
            rows = [[r.grid, *(_cell(r, kind) for kind in KINDS), _verdict(r)] for r in self.grids]
            title = f"{self.target}: numbers equal to one process, in float64"
            parts.append(table(("grid", *KINDS, ""), rows, Text(title), left=1))
        for result in self.grids:
            if not result.holds:
                parts += ["", *_lines(result)]
        if self.without_gradient:
            parts += ["", f"Parameters without a gradient: {', '.join(self.without_gradient)}"]
        if self.costs:
            parts += ["", *_cost_tables(self)]
        if self.grids and self.holds:
            parts += ["", "All numbers of all grids are those of one process."]
        # Not plain strings, in which rich would read :name: as a picture.
        return as_text(*(Text(escaped(each)) if isinstance(each, str) else each for each in parts))


def _cell(result: GridResult, kind: str) -> str:
    if kind not in result.counts:
        return "-"
    equal, every = result.counts[kind]
    return f"{every} equal" if equal == every else f"{every - equal} of {every} differ"


def _verdict(result: GridResult) -> str:
    return "holds" if result.holds else "failed" if result.error else "DIFFERS"


def _lines(result: GridResult) -> list[str]:
    if result.error:
        return [f"{result.grid}: {result.error}"]
    lines = [f"{result.grid}: {result.differing[0]}"]
    finding = result.finding
    if finding is None:
        return lines
    if finding.module:
        layer = f"layer {finding.layer}, " if finding.module != "loss_fn" else ""
        where = f" ({finding.place})" if finding.place else ""
        which = "first output that differs" if finding.phase == "forward" else "first gradient of an input that differs"
        lines.append(f"  {which}: {layer}{finding.module}, a {finding.what}{where}")
    if finding.op:
        lines.append(f"  first op that differs: {finding.op} at {finding.op_place}")
    if finding.parameter is not None:
        lines.append(f"  first {finding.parameter}")
    axes = " and ".join(finding.axes)
    lines.append(f"  axis: {axes}" if axes else "  axis: none alone, only their combination")
    return [*lines, *(f"  {line}" for line in _cause_lines(finding.causes))]


def _cause_lines(causes: list[Cause]) -> list[str]:
    return [f"{each.name}: {each.seen}. {each.advice[:1].upper()}{each.advice[1:]}." for each in causes]


def _cost_tables(report: Report) -> list[Any]:
    rows = [
        (each.name, f"{1e3 * each.forward:.3f}", f"{each.activations:,}", ", ".join(each.undeferred) or "-")
        for each in report.costs
    ]
    heads = ("layer", "forward, ms", "activations, bytes", "computed in I, not W, by zero bubble")
    found: list[Any] = [table(heads, rows, "Costs of a microbatch on one process, in float64")]
    sent = [
        (result.grid, axis, calls, f"{size:,.0f}", "-" if formula is None else f"{formula:,.0f}")
        for result in report.grids
        for axis, (calls, size, formula) in result.traffic.items()
    ]
    if sent:
        heads = ("grid", "axis", "collectives", "bytes sent", "by the formula")
        found.append(table(heads, sent, "Collectives of rank 0 in a step", left=2))
    return found
