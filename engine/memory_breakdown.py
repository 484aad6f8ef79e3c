"""``memory_breakdown``: what every rank holds around forward, backward and step, by kind, printed.

The kinds are those of ``engine.memory_report``: what is held between two steps (parameters, gradients, masters,
optimizer, buffers), activations (all that autograd saved), and working: what else a step made and has not let go of.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..grid import Grid
from ..pipe.ops import Op
from ..zero.replicas import Replicas
from . import units
from .accounts import held_bytes
from .meter import Meter

if TYPE_CHECKING:
    from .engine import Engine
    from .module_engine import ModuleEngine

Row = dict[str, int]  # kind -> bytes


class Breakdown:
    """The points of one step, and what this rank held at each."""

    def __init__(self, grid: Grid, replicas: Replicas, module: nn.Module) -> None:
        self._grid, self._replicas, self._module = grid, replicas, module
        self.rows: dict[str, Row] = {}
        self._start, self._gathered = 0, 0

    def weights(self) -> int:
        """Bytes of whole weights; stage 3 has them come and go."""
        return sum(bucket.weights.untyped_storage().nbytes() for bucket in self._replicas.buckets)

    def note(self, point: str, meter: Meter | None = None, most: bool = False) -> None:
        """What is held now.

        Args:
            point: of the step; what was noted of it before is forgotten.
            meter: that counts what the step makes; None: nothing of it is left.
            most: keep what was noted before, if more activations were held then.
        """
        held = held_bytes(self._replicas, self._module)
        total = sum(held.values())
        if meter is None:
            row: Row = {**held, "activations": 0, "working": 0}
            self._start, self._gathered = total, self.weights()
        else:
            # What the step made is counted by the meter, and of that the kinds above once more.
            kinds = total - self._start - (self.weights() - self._gathered)
            row = {**held, "activations": meter.saved, "working": max(0, meter.live - meter.saved - max(0, kinds))}
        if most and point in self.rows and self.rows[point]["activations"] >= row["activations"]:
            return
        row["process peak"] = self._grid.peak_memory()
        self.rows[point] = row

    def show(self, step: int) -> None:
        """Rank 0 prints what all ranks noted, and forgets it. Collective."""
        everyone = self._grid.world.all_gather_object(self.rows)
        if self._grid.rank == 0:
            print(table(step, self._grid, everyone), flush=True)
        self.rows = {}


def table(step: int, grid: Grid, everyone: list[dict[str, Row]]) -> str:
    """A line for each rank and point, a column for each kind."""
    kinds = list(next(row for rows in everyone for row in rows.values()))
    width = max(len(point) for rows in everyone for point in rows) + 2
    lines = [f"memory at step {step}, by kind", " " * width + "".join(f"{kind:>14}" for kind in kinds)]
    for rank, rows in enumerate(everyone):
        lines.append(grid.describe(rank))
        for point, row in rows.items():
            lines.append(f"{point:<{width}}" + "".join(f"{units.size(row.get(kind, 0)):>14}" for kind in kinds))
    return "\n".join(lines)


def of_pipeline(engine: Engine) -> None:
    """Note and print each ``train_batch``. Forward passes alternate with backward passes: of all points behind a
    forward pass, that with the most activations is told."""
    breakdown = Breakdown(engine.grid, engine._replicas, engine.module)
    train = engine.train_batch

    def around(op: Op) -> Any:
        return noted(op) if engine._accounts.meter is not None else nullcontext()

    @contextmanager
    def noted(op: Op) -> Iterator[None]:
        yield
        if op.kind == "F":
            breakdown.note("after forward", engine._accounts.meter, most=True)
        else:
            breakdown.note("after backward", engine._accounts.meter)

    def train_batch(data_iter: Iterator[Any] | None = None) -> Tensor:
        breakdown.rows = {}
        breakdown.note("before forward")
        recorded, engine.record_memory = engine.record_memory, True
        try:
            loss = train(data_iter)
        finally:
            engine.record_memory = recorded
        breakdown.note("after step")
        if _printed(engine):
            breakdown.show(engine.global_steps)
        return loss

    for kind in ("F", "B", "I", "W"):
        engine._executor.wrap(kind, around)
    engine.train_batch = train_batch  # type: ignore[method-assign]


def of_module(engine: ModuleEngine) -> None:
    """Note and print each step; of its microbatches, the last one's points. What is made outside of the engine's own
    calls (a loss, say) is not counted."""
    breakdown = Breakdown(engine.grid, engine._replicas, engine.module)
    forward, backward, step = engine.forward, engine.backward, engine.step
    meters: list[Meter] = []  # of this step

    def run(*args: Any, **kwargs: Any) -> Any:
        if not (torch.is_grad_enabled() and engine.module.training):
            return forward(*args, **kwargs)
        if not meters:
            breakdown.note("before forward")
            meters.append(Meter(breakdown.weights))
        with meters[0].counting():
            result = forward(*args, **kwargs)
        breakdown.note("after forward", meters[0])
        return result

    def run_backward(*args: Any, **kwargs: Any) -> Tensor:
        with meters[0] if meters else nullcontext():
            result = backward(*args, **kwargs)
        if meters:
            breakdown.note("after backward", meters[0])
        return result

    def run_step(*args: Any, **kwargs: Any) -> None:
        last = engine.is_gradient_accumulation_boundary()
        with meters[0] if meters else nullcontext():
            step(*args, **kwargs)
        if last and meters:
            meters.clear()
            breakdown.note("after step")
            if _printed(engine):
                breakdown.show(engine.global_steps)

    for name, method in (("forward", run), ("backward", run_backward), ("step", run_step)):
        setattr(engine, name, method)


def _printed(engine: Engine | ModuleEngine) -> bool:
    every = engine.config.steps_per_print
    return every is None or engine.global_steps % every == 0
