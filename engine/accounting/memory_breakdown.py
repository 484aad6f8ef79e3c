"""``memory_breakdown``: prints the bytes that every rank holds around forward, backward and step, by kind.

The kinds are those of ``Engine.memory_report``:

- parameters, gradients, masters, optimizer, buffers: memory held between two steps
- activations: tensors that autograd saved
- working: all other memory that the step allocated and has not freed
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from ...base.records import show
from ...grid import Grid
from ...grid.comm.spans import OpenSpan
from ...pipe.program.ops import COMPUTE, MAKES
from ...zero.data_axis import ZeroDataAxis
from ...zero.held_bytes import held_bytes
from ..kinds import AnyEngine, is_pipelined
from ..monitor import format as units
from ..monitor.profiler.memory_meter import MemoryMeter

BytesByKind = dict[str, int]


class MemoryBreakdown:
    """Bytes that this rank held at each point of one step.

    Attributes:
        rows: point of the step -> bytes by kind.
    """

    def __init__(self, grid: Grid, data_axis: ZeroDataAxis, module: nn.Module) -> None:
        self._grid, self._data_axis, self._module = grid, data_axis, module
        self.rows: dict[str, BytesByKind] = {}
        self._start, self._gathered = 0, 0

    def weights(self) -> int:
        """Return the bytes of the unsharded weights on this rank, which stage 3 gathers and releases."""
        return sum(bucket.weights.untyped_storage().nbytes() for bucket in self._data_axis.buckets)

    def note(self, point: str, meter: MemoryMeter | None = None, most: bool = False) -> None:
        """Record the bytes held now.

        Args:
            point: name of the point of the step. An earlier record of the same point is replaced.
            meter: counts the bytes that the step allocates. None between two steps.
            most: keep the earlier record if more activations were held then.
        """
        held = held_bytes(self._data_axis, self._module)
        total = sum(held.values())
        if meter is None:
            row: BytesByKind = {**held, "activations": 0, "working": 0}
            self._start, self._gathered = total, self.weights()
        else:
            # The meter counts all that the step made; what the kinds above count already is not working memory.
            kinds = total - self._start - (self.weights() - self._gathered)
            row = {**held, "activations": meter.saved, "working": max(0, meter.live - meter.saved - max(0, kinds))}
        if most and point in self.rows and self.rows[point]["activations"] >= row["activations"]:
            return
        row["process peak"] = self._grid.peak_memory()
        self.rows[point] = row

    def end_step(self, step: int, print_every: int | None) -> None:
        """Print the step's table on rank 0 if one is due, then delete the records. Collective if a table is due.

        Args:
            step: number of the step that ended.
            print_every: ``steps_per_print``: a table is due every so many steps. None: after every step.
        """
        self.note("after step")
        if print_every is None or step % print_every == 0:
            everyone = self._grid.world.all_gather_json(self.rows)
            if self._grid.rank == 0:
                show(table(step, self._grid, everyone))
        self.rows = {}


def table(step: int, grid: Grid, everyone: list[dict[str, BytesByKind]]) -> str:
    """Return a text with a line for each rank and point of the step, and a column for each kind of memory.

    Args:
        step: number of the step, for the title.
        grid: the ranks.
        everyone: ``MemoryBreakdown.rows`` of each rank.
    """
    kinds = list(next(row for rows in everyone for row in rows.values()))
    width = max(len(point) for rows in everyone for point in rows) + 2
    lines = [f"memory at step {step}, by kind", " " * width + "".join(f"{kind:>14}" for kind in kinds)]
    for rank, rows in enumerate(everyone):
        lines.append(grid.describe(rank))
        for point, row in rows.items():
            lines.append(f"{point:<{width}}" + "".join(f"{units.size(row.get(kind, 0)):>14}" for kind in kinds))
    return "\n".join(lines)


def install(engine: AnyEngine) -> None:
    """Record the bytes held in each step of an engine, and print them every ``monitor.print_every`` steps.

    They are recorded after each forward and backward pass. Of all forward passes in a step of a pipeline, only the
    record with the most activations is kept. In other steps each microbatch replaces the records of the one before;
    tensors made outside the engine's calls, such as the loss, do not count.
    """
    breakdown = MemoryBreakdown(engine.grid, engine.data_axis, engine.module)
    engine.record_memory = True

    @contextmanager
    def passes(span: OpenSpan) -> Iterator[None]:
        trains = engine.module.training and torch.is_grad_enabled()
        if span.kind == "forward" and trains and not breakdown.rows:
            breakdown.note("before forward")
        yield
        if (meter := engine.accounts.meter) is not None and (trains or span.kind != "forward"):
            forward = span.kind in (*MAKES, "forward")
            breakdown.note("after forward" if forward else "after backward", meter, most=span.kind in MAKES)

    @contextmanager
    def step(span: OpenSpan) -> Iterator[None]:
        if is_pipelined(engine):
            breakdown.rows = {}
            breakdown.note("before forward")
        last = engine.is_last_microbatch()
        yield
        if last and breakdown.rows:
            breakdown.end_step(engine.global_steps, engine.options.monitor.print_every)

    engine.spans.read(passes, *COMPUTE, "forward", "backward")
    engine.spans.read(step, "step")
