"""Bytes that a rank holds, counted by kind, and the papers' formulas for them."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from ...base.dtypes import short_name
from ...base.formulas import STATE_BYTES, STATES, ModelStates, model_states
from ...grid import Grid, layout_of
from ...zero.data_axis import ZeroDataAxis
from ...zero.held_bytes import held_bytes, offloaded_bytes
from ...zero.shard_groups import shards
from ...zero.zeropp.options import ZeroPlusPlus
from ..monitor.profiler.memory_meter import MemoryMeter


class MemoryAccounts:
    """Counter of the bytes that one rank holds, for ``Engine.memory_report``.

    Args:
        data_axis: this rank's buckets.
        module: the model.
        grid: the grid of the model.

    Attributes:
        meter: counts the activations of a step, from ``begin`` to ``end``. None otherwise.
    """

    def __init__(self, data_axis: ZeroDataAxis, module: nn.Module, grid: Grid) -> None:
        self._data_axis, self._module, self._grid = data_axis, module, grid
        self.meter: MemoryMeter | None = None
        self._before = 0
        self._activations: int | None = None
        self._working: int | None = None

    @contextmanager
    def step(self) -> Iterator[None]:
        """Context in which the activations and the working memory of a training step are counted."""
        self.begin()
        try:
            with self.counting():
                yield
        finally:
            self.end()

    def begin(self) -> None:
        """Begin to count the activations and the working memory of a training step."""
        self._before = sum(held_bytes(self._data_axis, self._module).values())
        buckets, sharded = self._data_axis.buckets, self._data_axis.gatherer is not None
        # Stage 3 alone resizes them. This is read at every operation of the step.
        weights = [bucket.weights.untyped_storage() for bucket in buckets if sharded]
        # Gradients of the last step, which may be freed when this one begins.
        made = {bucket.gradients.untyped_storage() for bucket in buckets if bucket.gradients is not None}
        old = [(weakref.ref(storage), storage.nbytes()) for storage in made]
        del made

        def elsewhere() -> int:
            return sum(w.nbytes() for w in weights) + sum(size for exists, size in old if exists() is not None)

        self.meter = MemoryMeter(elsewhere)

    def counting(self) -> AbstractContextManager[None]:
        """Context for a part of the step that is counted. It has no effect outside ``begin`` and ``end``."""
        return nullcontext() if self.meter is None else self.meter.counting()

    def end(self) -> None:
        """End the step. Does nothing without ``begin``."""
        if (meter := self.meter) is None:
            return
        self.meter = None
        # State that the optimizer makes in its first step is not working memory.
        after = sum(held_bytes(self._data_axis, self._module).values())
        self._activations = meter.activations
        self._working = max(0, self._before + meter.peak - after - meter.activations)

    def report(self) -> dict[str, Any]:
        """Return this rank's memory report, as ``Engine.memory_report`` documents."""
        held: dict[str, int | None] = {**held_bytes(self._data_axis, self._module)}
        held |= {"activations": self._activations, "working": self._working}
        return {
            "held": held,
            "offloaded": offloaded_bytes(self._data_axis),
            "formula": self._formula(),
            "peak": self._grid.peak_memory(),
        }

    def _formula(self) -> dict[str, float]:
        """Return the bytes by the papers' formulas, for this rank's trained and frozen parameters."""
        options, grid = self._data_axis.options, self._grid
        total = dict.fromkeys(ModelStates._fields, 0.0)
        trained = {m.parameter for bucket in self._data_axis.buckets if bucket.trained for m in bucket.members}
        optimizer = self._data_axis.optimizer
        for parameter in self._module.parameters():
            states = model_states(
                parameter.numel(),
                shards(grid, layout_of(parameter).replicas, options.shard_size),
                options.stage,
                short_name(parameter.dtype) or "fp32",
                states_kept(optimizer) if optimizer is not None else 0,
            )
            if options.state is not None:
                full = max(4, parameter.element_size())
                states = states._replace(optimizer=states.optimizer / full * STATE_BYTES[options.state])
            for name, value in states._asdict().items():
                if name == "parameters" or parameter in trained:
                    total[name] += value
        zeropp, gatherer = options.zeropp, self._data_axis.gatherer
        if isinstance(zeropp, ZeroPlusPlus) and gatherer is not None and gatherer.kept_bytes:
            second = (zeropp.kept(p.numel(), p.dtype, p in trained) for p in self._module.parameters())
            total["secondary"] = sum(second)
        return total


def states_kept(optimizer: torch.optim.Optimizer) -> int:
    """Return the number of state tensors per parameter that a torch optimizer keeps with its options (Adam: 2)."""
    names = [cls.__name__.lower() for cls in type(optimizer).__mro__]  # of a subclass of Adam, too
    tensors = next((STATES[name] for name in names if name in STATES), 0)
    return tensors + sum(bool(optimizer.defaults.get(key)) for key in ("momentum", "centered", "amsgrad"))
