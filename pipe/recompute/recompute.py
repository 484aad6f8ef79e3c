"""Recomputation (activation checkpointing, Chen et al. 2016, arXiv:1604.06174): keep a group's input, run it again.

Of a group of layers only the input is kept between forward and backward. The backward pass runs the group once more.

While a group runs for the first time, the tensors that autograd would save are dropped, and a ``SavedValue`` stands
for each of them in the graph (frame.py). When the backward pass asks for the first of them, the group runs again, up
to the last tensor that is needed. Gradients go through the graph of the first run, so every hook on a parameter fires
as without recomputation. The second run has the same samples and step (the keys of ``Dropout``), the same state of
random generators and of autocast, and the same buffers and attributes of modules as the first.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import groupby
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import nn

from ...base.autograd import mark
from ...grid import Grid
from ...grid.comm.lanes import keeping_turn
from ...grid.randomness.random import DropoutState
from ...grid.ranges import split
from .frame import CHECKPOINT, Frame, State, has_own_state, runs_within
from .kept_inputs import Inputs, KeptNest
from .kept_matmuls import Matmuls

Granularity = Literal["full", "matmul", "selective"]


class Stages(Protocol):
    """The stages of a pipelined module, as recomputation reads them. (``PipelineModule`` has these members.)"""

    boundaries: list[int]

    @property
    def stages(self) -> list[int]:
        """The stages of this rank."""

    def typenames(self, stage: int) -> list[str]:
        """Return the name of each layer's class."""

    def modules_of(self, stage: int, start: int = 0, stop: int | None = None) -> list[tuple[int, nn.Module]]:
        """Return (index in the model, module) of some layers of a stage, without plain functions."""


class Group(NamedTuple):
    """Consecutive layers of a stage.

    Attributes:
        start, stop: their places in the stage.
        recomputed: True if they are recomputed, all together.
        name: name of the group in error messages.
        layers: indices, in the model's list of layers, of the group's modules (without functions).
        parts: the modules whose state is restored; see ``stateful``.
    """

    start: int
    stop: int
    recomputed: bool
    name: str
    layers: tuple[int, ...]
    parts: tuple[nn.Module, ...]


def stateful(modules: Iterable[nn.Module]) -> tuple[nn.Module, ...]:
    """Return the modules, and those within them, that may change state in a run: buffers, or attributes of a user's."""
    parts = dict.fromkeys(submodule for module in modules for submodule in module.modules())
    return tuple(submodule for submodule in parts if submodule._buffers or has_own_state(submodule))


class Recompute:
    """Recomputation of a module's layers: groups them, and runs them so that their backward pass recomputes.

    Args:
        grid: the module's grid.
        dropout: step and samples that key the module's dropout, restored for the second run.
        interval: recompute groups of this many consecutive layers of a stage; 0: none.
        number: cut the layers of this rank into this many groups instead.
        layers: recompute layers of these classes only; None: every group that has parameters.
        granularity: ``full``: keep a group's input only. ``matmul``: keep the results of its matrix products (and of
            attention) too. ``selective``: no groups; every module that has a class attribute ``recompute`` recomputes
            the function that it calls through this attribute: the core of attention.
        preserve_rng_state: give random generators the states of the first run.
        synchronize: wait for the device before and after each group.
        profile: measure the time, see ``report``.

    Attributes:
        grid, interval, number, granularity: the arguments.
        inputs: how inputs are kept; by default as they are.
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
        synchronize: bool = False,
        profile: bool = False,
    ) -> None:
        if interval < 0:
            raise ValueError(f"recomputation has an interval of {interval} layers: give 0 for none, n for groups of n")
        self.grid = grid
        self.interval = interval
        self.number = number
        self.granularity = granularity
        self.names = None if layers is None else tuple(layers)
        self.inputs = Inputs(grid)
        self._dropout = dropout
        self._preserve_rng_state = preserve_rng_state
        self._synchronize, self._profile = synchronize, profile
        self._groups: dict[int, list[Group]] = {}
        self._changed: dict[str, Collection[int]] = {}  # by group: its inputs that it changes in place
        self._watched: set[str] = set()  # blocks of a plain module that have run once
        self._checkpointing: set[str] = set()  # blocks that call torch.utils.checkpoint
        self._count, self._seconds = 0, 0.0

    def groups(self, module: Stages, stage: int) -> Sequence[Group]:
        """Return the groups of one of this rank's stages.

        While gradients are off, and with granularity ``selective``, it is one group of all layers, which is not
        recomputed.
        """
        wanted = self.granularity != "selective" and (self.interval or self.number)
        if not wanted or not torch.is_grad_enabled():
            return (Group(0, module.boundaries[stage + 1] - module.boundaries[stage], False, "", (), ()),)
        if stage not in self._groups:
            self._groups = self._cut(module)
        return self._groups[stage]

    def forget(self) -> None:
        """Drop the groups: the module's stages moved, or its layers were built anew."""
        self._groups.clear()

    def install(self, module: nn.Module) -> int:
        """Set the attribute ``recompute`` of all modules whose class has it; return the number of these modules.

        With granularity ``selective`` it is set to a function that runs its argument with recomputation, otherwise to
        None.
        """
        asking = [submodule for submodule in module.modules() if getattr(type(submodule), "recompute", self) is None]
        for submodule in asking:
            parts = stateful([submodule]) if has_own_state(submodule) else ()
            group = Group(0, 0, True, f"a part of {type(submodule).__name__}", (), parts)
            submodule.recompute = partial(self.run, group) if self.granularity == "selective" else None  # type: ignore
        return len(asking)

    def report(self) -> tuple[int, float] | None:
        """Return the number of recomputations since the last report, and their seconds; None without ``profile``."""
        counted = (self._count, self._seconds) if self._profile else None
        self._count, self._seconds = 0, 0.0
        return counted

    def run(
        self,
        group: Group,
        function: Callable[..., Any],
        *args: Any,
        prefetch: Callable[[], None] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Return ``function(*args, **kwargs)``, whose backward pass runs the function once more.

        Args:
            group: names the function in messages, and lists the modules whose state it may change.
            function: the group's forward.
            args, kwargs: its arguments; their tensors are what is kept.
            prefetch: called when the backward pass reaches the output. The second run then begins at that point, not
                when a saved tensor is asked for: all replicas gather weights at the same point.
        """
        return (
            self._run(group, function, args, kwargs, prefetch) if torch.is_grad_enabled() else function(*args, **kwargs)
        )

    def run_block(self, group: Group, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Run a block of a plain module as ``run`` does, but without recomputation if it is recomputed already.

        A block is recomputed already within another block or within ``torch.utils.checkpoint``, or if it calls
        ``torch.utils.checkpoint`` itself, which its first run finds out.
        """
        if not torch.is_grad_enabled() or group.name in self._checkpointing or runs_within(__name__, CHECKPOINT):
            return function(*args, **kwargs)
        return self._run(group, function, args, kwargs, watches=group.name not in self._watched)

    def __deepcopy__(self, memo: object) -> Recompute:
        return self  # a copied module recomputes as the first does

    def _run(
        self,
        group: Group,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        prefetch: Callable[[], None] | None = None,
        watches: bool = False,
    ) -> Any:
        if self._synchronize:
            self.grid.synchronize()
        inputs = KeptNest(self.inputs, group.name, (args, kwargs), self._changed.get(group.name))
        state = State(self.grid, self._dropout, self._preserve_rng_state, group.parts)
        matmuls = Matmuls() if self.granularity == "matmul" else None

        def run_again() -> None:
            with (
                keeping_turn(self.grid.tensor.lanes),
                self._measured(),
                state.restored(),
                matmuls.replayed() if matmuls else nullcontext(),
            ):
                repeated, named = inputs.restore()
                function(*repeated, **named)

        frame = Frame(run_again, group.name, watches, compares=group.name not in self._changed)
        with matmuls.recorded(frame) if matmuls else nullcontext(), frame.hooks():
            result = function(*args, **kwargs)
        state.keep_changed()
        self._changed[group.name] = inputs.run_ended()
        if watches:
            frame.end_watch()
            self._watched.add(group.name)
            self._checkpointing |= {group.name} if frame.checkpoints else set()
        if prefetch is not None:
            begin = weakref.WeakMethod(frame.begin)  # the graph's values hold the frame as long as it is needed

            def reached() -> None:
                prefetch()
                if (method := begin()) is not None:
                    method()

            result = mark(result, reached)
        if self._synchronize:
            self.grid.synchronize()
        return result

    @contextmanager
    def _measured(self) -> Iterator[None]:
        if self._profile or self._synchronize:
            self.grid.synchronize()
        start = time.perf_counter()
        try:
            yield
        finally:
            if self._profile or self._synchronize:
                self.grid.synchronize()
            self._count += 1
            self._seconds += time.perf_counter() - start

    def _cut(self, module: Stages) -> dict[int, list[Group]]:
        """Cut this rank's stages into groups.

        Each stage is first cut where layers of the wanted classes begin and end. Then each run of wanted layers is cut
        into groups of ``interval`` layers, or into its share of ``number`` groups.
        """
        runs: list[tuple[int, int, int, bool]] = []  # stage, start, stop, wanted
        for stage in module.stages:
            flags = [self.names is None or name in self.names for name in module.typenames(stage)]
            start = 0
            for wanted, layers in groupby(flags):
                stop = start + len(list(layers))
                runs.append((stage, start, stop, wanted))
                start = stop
        lengths = [stop - start for _, start, stop, wanted in runs if wanted]
        counts = iter(shares(lengths, self.number)) if self.number else None
        groups: dict[int, list[Group]] = {stage: [] for stage in module.stages}
        for stage, start, stop, wanted in runs:
            bounds = [(start, stop)]
            if wanted and counts is not None:
                count = next(counts)
                bounds = [(start + a, start + b) for a, b in (split(stop - start, count, i) for i in range(count))]
            elif wanted:
                bounds = [(a, min(a + self.interval, stop)) for a in range(start, stop, self.interval)]
            groups[stage] += [self._group(module, stage, a, b, wanted) for a, b in bounds]
        return groups

    def _group(self, module: Stages, stage: int, start: int, stop: int, wanted: bool) -> Group:
        modules = module.modules_of(stage, start, stop)
        first = module.boundaries[stage] + start
        name = f"layer {first}" if stop - start == 1 else f"layers {first} to {first + stop - start - 1}"
        recomputed = wanted and any(next(layer.parameters(), None) is not None for _, layer in modules)
        parts = stateful(layer for _, layer in modules) if recomputed else ()
        return Group(start, stop, recomputed, name, tuple(index for index, _ in modules), parts)


def module_of(function: Callable[..., Any]) -> nn.Module | None:
    """Return the module if the function is a module or a method of one; else None."""
    while isinstance(function, partial):
        function = function.func
    owner = getattr(function, "__self__", function)
    return owner if isinstance(owner, nn.Module) else None


def shares(lengths: Sequence[int], number: int) -> list[int]:
    """Distribute ``number`` groups over runs of consecutive layers; return the number of groups of each run.

    The longest group is as short as possible. Each run is at least one group, and a group is at least one layer.

    Args:
        lengths: the number of layers of each run.
        number: number of groups in all.

    >>> shares([6, 3], 4)
    [3, 1]
    """
    counts = [1] * len(lengths)
    while sum(counts) < min(number, sum(lengths)):
        longest = max(range(len(lengths)), key=lambda i: lengths[i] / counts[i])
        counts[longest] += 1
    return counts
