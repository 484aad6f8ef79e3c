"""Recomputation (activation checkpointing): of a group of layers only the input is kept for the backward pass, which
runs the group once more when it comes there (Chen et al. 2016, arXiv:1604.06174).

While a group runs, what autograd would save is let go, and a ``_Value`` stands for it in the graph. The first of them
that the backward pass asks for has the group run again, up to the last tensor that is needed; the gradients go through
the graph of the first run, so every hook on a parameter fires as without recomputation. The second run sees what the
first one saw: the same samples and step (which key ``Dropout``), the same state of torch's generators and of autocast.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from ..grid import Grid
from ..grid.layout import split
from ..grid.mark import mark
from ..grid.random import DropoutState
from .frame import Frame, State
from .replay import Matmuls
from .saved import Inputs

if TYPE_CHECKING:
    from .module import PipelineModule

Granularity = Literal["full", "matmul", "selective"]


class Group(NamedTuple):
    """Consecutive layers of a stage.

    Attributes:
        start, stop: their places in the stage.
        again: whether they are recomputed, as one.
        name: of them, for messages.
        layers: those with parameters.
        buffers: of these.
    """

    start: int
    stop: int
    again: bool
    name: str
    layers: tuple[int, ...]
    buffers: tuple[Tensor, ...]


class Recompute:
    """Which layers of a module are recomputed, and how.

    Args:
        grid: of the module.
        dropout: what keys its dropout.
        interval: recompute groups of so many consecutive layers of a stage; 0: none.
        number: cut the layers of this rank into so many groups instead.
        layers: recompute layers of these classes only; None: every group that has parameters.
        granularity: ``full``: keep a group's input alone; ``matmul``: and what its matrix products (attention
            included) returned; ``selective``: no groups, but in every module that has a class attribute
            ``recompute``, what that module runs through it: the core of attention.
        preserve_rng_state: give torch's generators the state of the first run.
        synchronise: wait for the device at the groups' borders.
        profile: measure the time, see ``report``.

    Attributes:
        grid, interval, number, granularity: see above.
        inputs: how inputs are kept: at first, as they are.
    """

    def __init__(
        self,
        grid: Grid,
        dropout: DropoutState,
        interval: int = 0,
        number: int | None = None,
        layers: Sequence[str] | None = None,
        granularity: Granularity = "full",
        preserve_rng_state: bool = True,
        synchronise: bool = False,
        profile: bool = False,
    ) -> None:
        if interval < 0:
            raise ValueError(f"an interval of {interval} layers: 0 recomputes none, 1 each, n groups of n")
        self.grid, self.interval, self.number, self.granularity = grid, interval, number, granularity
        self.names = None if layers is None else tuple(layers)
        self._dropout, self._preserve = dropout, preserve_rng_state
        self.inputs = Inputs(grid)
        self._synchronise, self._profile = synchronise, profile
        self._groups: dict[int, list[Group]] = {}
        self._count, self._seconds = 0, 0.0

    def groups(self, module: PipelineModule, stage: int) -> Sequence[Group]:
        """The groups of one of this rank's stages. Without gradients there is nothing to recompute: one group."""
        wanted = self.granularity != "selective" and (self.interval or self.number)
        if not wanted or not torch.is_grad_enabled():
            return (Group(0, module.boundaries[stage + 1] - module.boundaries[stage], False, "", (), ()),)
        if stage not in self._groups:
            self._groups = self._cut(module)
        return self._groups[stage]

    def forget(self) -> None:
        """The module's stages moved, or its layers were built anew."""
        self._groups.clear()

    def install(self, module: nn.Module) -> int:
        """Give the modules that ask for it what they run a part of themselves through; returns how many do."""
        asking = [part for part in module.modules() if getattr(type(part), "recompute", self) is None]
        for part in asking:
            group = Group(0, 0, True, f"a part of {type(part).__name__}", (), ())
            part.recompute = _Through(self, group) if self.granularity == "selective" else None  # type: ignore
        return len(asking)

    def report(self) -> tuple[int, float] | None:
        """How often something was recomputed since the last report, and the seconds that took; None: no profile."""
        found = (self._count, self._seconds) if self._profile else None
        self._count, self._seconds = 0, 0.0
        return found

    def run(
        self,
        group: Group,
        function: Callable[..., Any],
        *args: Any,
        ahead: Callable[[], None] | None = None,
        **kwargs: Any,
    ) -> Any:
        """``function(*args, **kwargs)``, whose backward pass runs it once more.

        Args:
            ahead: called when the backward pass comes to the output, before the second run, which then begins there
                and then and not when a saved tensor is asked for: all replicas gather weights at the same point.
        """
        if not torch.is_grad_enabled():
            return function(*args, **kwargs)
        if self._synchronise:
            self.grid.synchronise()
        inputs = self.inputs.keep(group.name, (args, kwargs))
        state = State(self.grid, self._dropout, self._preserve, group.buffers)
        matmuls = Matmuls() if self.granularity == "matmul" else None

        def again() -> None:
            with self._measured(), state.restored(), matmuls.replayed() if matmuls else nullcontext():
                repeated, named = inputs.restore()
                function(*repeated, **named)

        frame = Frame(again, group.name)
        with matmuls.kept(frame) if matmuls else nullcontext(), frame.hooks():
            result = function(*args, **kwargs)
        state.over()
        if ahead is not None:
            begin = weakref.WeakMethod(frame.begin)  # the graph's values keep the frame, as long as it is needed

            def come() -> None:
                ahead()
                if (method := begin()) is not None:
                    method()

            result = mark(result, come)
        if self._synchronise:
            self.grid.synchronise()
        return result

    @contextmanager
    def _measured(self) -> Iterator[None]:
        if self._profile or self._synchronise:
            self.grid.synchronise()
        start = time.perf_counter()
        try:
            yield
        finally:
            if self._profile or self._synchronise:
                self.grid.synchronise()
            self._count += 1
            self._seconds += time.perf_counter() - start

    def _cut(self, module: PipelineModule) -> dict[int, list[Group]]:
        """The groups of this rank's stages."""
        runs: dict[int, list[tuple[int, int, bool]]] = {}
        for stage in module.stages:
            runs[stage] = []
            for place, name in enumerate(module.typenames(stage)):
                wanted = self.names is None or name in self.names
                if runs[stage] and runs[stage][-1][2] == wanted:
                    runs[stage][-1] = (runs[stage][-1][0], place + 1, wanted)
                else:
                    runs[stage].append((place, place + 1, wanted))
        lengths = [stop - start for some in runs.values() for start, stop, wanted in some if wanted]
        if self.number:
            parts = iter(shares(lengths, self.number))
        else:
            parts = iter(-(-length // self.interval) for length in lengths)
        cut: dict[int, list[Group]] = {}
        for stage, some in runs.items():
            cut[stage] = []
            for start, stop, wanted in some:
                bounds = [(start, stop)]
                if wanted and self.number:
                    count = next(parts)
                    bounds = [tuple(start + at for at in split(stop - start, count, i)) for i in range(count)]  # type: ignore
                elif wanted:
                    count = next(parts)
                    firsts = [start + self.interval * i for i in range(count)]
                    bounds = [(first, min(first + self.interval, stop)) for first in firsts]
                cut[stage] += [self._group(module, stage, a, b, wanted) for a, b in bounds]
        return cut

    def _group(self, module: PipelineModule, stage: int, start: int, stop: int, wanted: bool) -> Group:
        held = module.held(stage, start, stop)
        first = module.boundaries[stage] + start
        name = f"layer {first}" if stop - start == 1 else f"layers {first} to {first + stop - start - 1}"
        again = wanted and any(next(layer.parameters(), None) is not None for _, layer in held)
        buffers = tuple({id(b): b for _, layer in held for b in layer.buffers()}.values())
        return Group(start, stop, again, name, tuple(index for index, _ in held), buffers)


def shares(lengths: Sequence[int], number: int) -> list[int]:
    """Into how many groups each run of layers is cut, so that there are ``number`` and the longest is short.

    At least one a run, and at most one a layer.

    >>> shares([6, 3], 4)
    [3, 1]
    """
    counts = [1] * len(lengths)
    while sum(counts) < min(number, sum(lengths)):
        longest = max(range(len(lengths)), key=lambda i: lengths[i] / counts[i])
        counts[longest] += 1
    return counts


class _Through:
    """What a module with an attribute ``recompute`` finds there: ``self.recompute(function, *args, **kwargs)``."""

    def __init__(self, recompute: Recompute, group: Group) -> None:
        self._recompute, self._group = recompute, group

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return self._recompute.run(self._group, function, *args, **kwargs)
