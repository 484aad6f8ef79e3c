"""Forward passes of a module under ZeRO stage 3: each unit's weights are gathered while it runs, and prefetched before.

    forward     root | unit 1 | unit 2 | ... | unit n |
    backward         | unit n | ... | unit 2 | unit 1 | root

Gathers are collectives, so every replica starts the same ones in the same order. In the forward pass that is the order
in which the module runs its units, in the backward pass the reverse (``UnitBackward``).

One unit in time, where h is a hook of the module, and the methods are those of ``_UnitRun``:

    forward     gather | enter_call | h before | enter_forward: prefetch the next | forward
                | leave_forward | h after | leave_call | release
    backward    gradient of an output is there: gather | backward | gradients of the marked inputs are there: release

A call of the module runs its hooks, which may use its weights; ``module.forward(x)`` runs none. If the hooks before the
forward compute something that needs gradients, for instance a weight from its norm and direction, the inputs are marked
before them; outputs are watched after the hooks that may replace them. The methods that do so:

    inputs      enter_call, if a hook before the forward computes something that needs gradients; else enter_forward
    outputs     leave_call, if there is a hook after the forward; else leave_forward
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial, update_wrapper
from typing import Any

import torch
from torch import Tensor, nn

from ...base.autograd import mark
from ...base.nest import visit_tensors
from ...base.torch_private import backward_task, module_hooks, recorded_nodes
from .forward_passes import EndedRun, ForwardPass, ForwardPasses
from .unit_backward import UnitBackward
from .unit_weights import UnitWeights


class _UnitMethod:
    """A method of a unit that runs it with gathered weights. A copy of the module gets the module's own method.

    Args:
        run: called as ``run(unit, method, *args, **kwargs)``.
        unit: number of the unit.
        method: the module's own method.
        require_whole: called as ``require_whole(unit, ...)`` before the module is copied.
    """

    def __init__(
        self, run: Callable[..., Any], unit: int, method: Callable[..., Any], require_whole: Callable[[int, str], None]
    ) -> None:
        update_wrapper(self, method)
        self._run, self._unit, self._method, self._require_whole = run, unit, method, require_whole

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._run(self._unit, self._method, *args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., Any]:
        self._require_whole(self._unit, "copy.deepcopy copied")
        return copy.deepcopy(self._method, memo)


class _UnitRun:
    """Run of a unit that records nothing for a backward pass.

    The methods are called in their order; ``enter_call`` and ``leave_call`` in a call of the module only.

    Args:
        prefetch: starts the gather of the next unit; None: there is none, or it has started.

    Attributes:
        watched: True if the outputs have hooks for the backward pass; False if some are objects of unknown types.
    """

    watched: bool | None = None

    def __init__(self, prefetch: Callable[[], None] | None = None) -> None:
        self._prefetch = prefetch

    def enter_call(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Begin a call of the module; return its arguments."""
        return args, kwargs

    def enter_forward(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Begin its forward, after the hooks before it; return the arguments."""
        if self._prefetch is not None:
            self._prefetch()
        return args, kwargs

    def leave_forward(self, outputs: Any) -> None:
        """End its forward."""

    def leave_call(self, outputs: Any) -> None:
        """End the call, after the hooks behind the forward."""


class _TrainedRun(_UnitRun):
    """Run of a unit through whose graph a backward pass may go.

    Args:
        prefetch: as in ``_UnitRun``.
        module: the unit.
        called: the module is called; False: its forward alone.
        end: ends the unit's backward.
        watch: registers hooks on outputs, for the backward pass; returns ``watched``.
    """

    def __init__(
        self,
        prefetch: Callable[[], None] | None,
        module: nn.Module,
        called: bool,
        end: Callable[[], None],
        watch: Callable[[Any], bool],
    ) -> None:
        super().__init__(prefetch)
        self._module, self._called, self._end, self._watch = module, called, end, watch
        self._nodes: int | None = None  # autograd's count of nodes before the hooks that precede the forward
        self._hooks_compute = False  # these hooks compute something that needs gradients

    def enter_call(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        if module_hooks(self._module, "forward_pre"):
            args, kwargs = mark((args, kwargs), self._end_before_hooks, exact=True)
            self._nodes = recorded_nodes()
        return args, kwargs

    def enter_forward(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        super().enter_forward(args, kwargs)
        own = module_hooks(self._module, "backward", "backward_pre")  # torch records a node for them
        self._hooks_compute = self._nodes is not None and recorded_nodes() - self._nodes > own
        return (args, kwargs) if self._hooks_compute else mark((args, kwargs), self._end, exact=True)

    def leave_forward(self, outputs: Any) -> None:
        if not (self._called and module_hooks(self._module, "forward")):
            self.watched = self._watch(outputs)

    def leave_call(self, outputs: Any) -> None:
        if self.watched is None:
            self.watched = self._watch(outputs)

    def _end_before_hooks(self) -> None:
        if self._hooks_compute:
            self._end()


class UnitForward:
    """Runs the units of a module with their weights, and prepares the backward pass.

    The ``forward`` of each unit is replaced, and its call. All replicas run the same units in the same order.

    Args:
        weights: the weights of the units.
        passes: notes the forward passes, for backward passes.
        backward: gathers the weights again in backward passes.
    """

    def __init__(self, weights: UnitWeights, passes: ForwardPasses, backward: UnitBackward) -> None:
        self._weights, self._passes, self._backward = weights, passes, backward
        self._forward = ForwardPass()  # the running pass
        self._orders: dict[int, list[int]] = {}  # for each outermost unit, the order in which units began in it
        self._calls: list[tuple[int, _UnitRun]] = []  # units that are called, and whose forward has not begun
        self._transformed = False  # within a run under a transform of ``torch.func``
        for number, module in enumerate(weights.modules):
            # The call, because hooks of the module may use its weights; and forward, which a module may call itself.
            call: Any = _UnitMethod(self._call, number, module._call_impl, weights.require_whole)
            module._call_impl = call  # type: ignore[method-assign]
            module.forward = _UnitMethod(self._run_forward, number, module.forward, weights.require_whole)

    def _call(self, unit: int, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a unit: its hooks, and its forward, which torch calls as ``_run_forward``."""
        before = len(self._calls)
        with self._running(unit, called=True) as run:
            self._calls.append((unit, run))
            try:
                args, kwargs = run.enter_call(args, kwargs)
                outputs = method(*args, **kwargs)
                run.leave_call(outputs)
            finally:
                del self._calls[before:]
        return outputs

    def _run_forward(self, unit: int, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run the ``forward`` of a unit, within a call of it or by itself."""
        called = bool(self._calls) and self._calls[-1][0] == unit
        with nullcontext(self._calls.pop()[1]) if called else self._running(unit, called=False) as run:
            args, kwargs = run.enter_forward(args, kwargs)
            outputs = forward(*args, **kwargs)
            run.leave_forward(outputs)
        return outputs

    @contextmanager
    def _running(self, unit: int, called: bool) -> Iterator[_UnitRun]:
        """Context around a run of a unit, in which its weights are there.

        Args:
            unit: number of the unit.
            called: the module is called, with its hooks; False: its forward alone.
        """
        if self._transformed:
            yield _UnitRun()
        elif backward_task() != -1:
            yield self._recomputed(unit, called)
        elif (transform := self._weights.transform(unit)) is not None:
            self._weights.require_whole(unit, transform)
            self._transformed = True
            try:
                yield _UnitRun()
            finally:
                self._transformed = False
        elif self._weights.running:
            with self._in_pass(unit, called) as run:
                yield run
        else:
            forward, trains = ForwardPass(), torch.is_grad_enabled()
            self._forward = forward
            with self._in_pass(unit, called) as run:
                yield run
            self._orders[unit] = forward.begun
            self._passes.end(forward, trains)

    def _recomputed(self, unit: int, called: bool) -> _UnitRun:
        """Begin a run by activation checkpointing. Its backward follows at once, so the weights stay gathered."""
        self._backward.enter()
        self._weights.gather(unit)
        if not torch.is_grad_enabled():
            return _UnitRun()
        self._backward.begin_repeated(unit)  # by a reentrant checkpoint
        end = partial(self._backward.end_repeated, unit)
        return _TrainedRun(None, self._weights.modules[unit], called, end, watch=lambda outputs: True)

    @contextmanager
    def _in_pass(self, unit: int, called: bool) -> Iterator[_UnitRun]:
        """Context around a run of a unit in a forward pass, which gathers and releases its weights, and notes it."""
        module, weights, trains = self._weights.modules[unit], self._weights, torch.is_grad_enabled()
        forward, index = self._forward, len(self._forward.begun)
        prefetch = self._gather(unit, waits=called and module_hooks(module, "forward_pre"))
        run = _UnitRun(prefetch)
        if trains:
            end = partial(self._backward.end, forward, unit)
            watch = partial(self._watch, forward, EndedRun(unit, index))
            run = _TrainedRun(prefetch, module, called, end, watch)
        weights.running.append(unit)
        try:
            yield run
            weights.gatherer.require_unwritten(unit)
        finally:
            weights.end_forward(hold=trains and (weights.keep or unit == 0 or not run.watched))

    def _gather(self, unit: int, waits: bool) -> Callable[[], None] | None:
        """Gather the weights of a unit that begins, and prefetch the unit that followed it in the last forward pass.

        Args:
            unit: number of the unit.
            waits: the caller starts the prefetch later, after the hooks before the unit's forward.

        Returns:
            The function that starts the prefetch, if it waits.
        """
        begun, gatherer = self._forward.begun, self._weights.gatherer
        index = len(begun)
        begun.append(unit)
        gatherer.start_gather(unit)
        prefetch = None
        order = self._orders.get(begun[0], [])
        if index + 1 < len(order) and order[index] == unit:
            prefetch = partial(gatherer.start_gather, order[index + 1])
            if not waits:
                prefetch()
                prefetch = None
        gatherer.wait(unit)
        return prefetch

    def _watch(self, forward: ForwardPass, run: EndedRun, outputs: Any) -> bool:
        """Note that a run of a unit has ended, and hook its outputs, by which the backward pass reaches it.

        Returns:
            False if the outputs hold objects of unknown types, in which tensors cannot be found.
        """
        tensors: list[Tensor] = []
        known = visit_tensors(tensors.append, outputs)
        wanted = [tensor for tensor in tensors if tensor.requires_grad]
        if wanted:
            index = len(forward.ended)
            forward.ended.append(run)
            for tensor in wanted:
                tensor.register_hook(lambda _: self._backward.reach(forward, index))
        return known
