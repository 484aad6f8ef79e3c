"""ZeRO stage 3 of a plain module: units whose weights are gathered only while they run, and prefetched before.

    forward     root | unit 1 | unit 2 | ... | unit n |
    backward         | unit n | ... | unit 2 | unit 1 | root

Gathers are collectives, so every replica starts the same ones in the same order. In the forward pass that is the order
in which the module runs its units, in the backward pass the reverse. A replica that has no gradient for a unit gathers
it all the same, when its turn comes.

One unit in time, where h is a hook of the module:

    forward     begin: gather | h before | enter: prefetch the next, mark the inputs | forward
                | leave: watch the outputs | h after | end: release
    backward    gradient of an output is there: gather | backward | gradients of the marked inputs are there: release

A call of the module runs its hooks, which may use its weights; ``module.forward(x)`` runs none. If the hooks before the
forward compute something that needs gradients, for instance a weight from its norm and direction, the inputs are marked
before them; outputs are watched after the hooks that may replace them.
"""

from __future__ import annotations

import copy
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial, update_wrapper
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from ...base.autograd import mark
from ...base.nest import visit_tensors
from ...base.torch_private import backward_task, in_transform, module_hooks, recorded_nodes
from ..layer_gather import ParameterGatherer
from ..managed import is_released
from .units import unit_names

_PATIENCE = 3.0  # seconds that a replica waits for the others at the end of a backward pass of another order than usual


class _UnitRun:
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


class _UnitPass:
    """Run of a unit of which nothing is recorded for a backward pass: its weights are there, and nothing else is to do.

    The methods are called in their order; ``enter_call`` and ``leave_call`` in a call of the module only.
    """

    def enter_call(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Begin a call of the module; return its arguments."""
        return args, kwargs

    def enter_forward(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Begin its forward, after the hooks before it; return the arguments."""
        return args, kwargs

    def leave_forward(self, outputs: Any) -> None:
        """End its forward."""

    def leave_call(self, outputs: Any) -> None:
        """End the call, after the hooks behind the forward."""


class _RepeatedPass(_UnitPass):
    """Run of a unit again by a reentrant checkpoint, within a backward pass that goes through the graph of this run.

    Args:
        end: called when the gradients of the inputs are computed.
        called: the module is called; False: its forward alone.
    """

    def __init__(self, end: Callable[[], None], called: bool) -> None:
        self._end, self._called = end, called

    def enter_call(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        return mark((args, kwargs), self._end, exact=True)

    def enter_forward(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        return (args, kwargs) if self._called else mark((args, kwargs), self._end, exact=True)


class _ForwardPass(_UnitPass):
    """Run of a unit in a forward pass.

    Args:
        module: the unit.
        called: the module is called; False: its forward alone.
        trains: a backward pass may follow.
        prefetch: starts the gather of the next unit; None: there is none, or it has started.
        end: ends the unit's backward.
        watch: registers hooks on outputs, for the backward pass; returns False if it does not know all types of them.

    Attributes:
        watched: what ``watch`` has returned; None: it was not called.
    """

    def __init__(
        self,
        module: nn.Module,
        called: bool,
        trains: bool,
        prefetch: Callable[[], None] | None,
        end: Callable[[], None],
        watch: Callable[[Any], bool],
    ) -> None:
        self._module, self._called, self._trains, self._prefetch = module, called, trains, prefetch
        self._end, self._watch = end, watch
        self._nodes: int | None = None  # autograd's count of nodes before the hooks that precede the forward
        self._hooks_record = False  # these hooks compute something that needs gradients
        self.watched: bool | None = None

    def enter_call(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        if self._trains and module_hooks(self._module, "forward_pre"):
            args, kwargs = mark((args, kwargs), self._end_before_hooks, exact=True)
            self._nodes = recorded_nodes()
        return args, kwargs

    def enter_forward(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        if self._prefetch is not None:
            self._prefetch()
        if not self._trains:
            return args, kwargs
        own = module_hooks(self._module, "backward", "backward_pre")  # torch records a node for them
        self._hooks_record = self._nodes is not None and recorded_nodes() - self._nodes > own
        return (args, kwargs) if self._hooks_record else mark((args, kwargs), self._end, exact=True)

    def leave_forward(self, outputs: Any) -> None:
        if self._trains and not (self._called and module_hooks(self._module, "forward")):
            self.watched = self._watch(outputs)

    def leave_call(self, outputs: Any) -> None:
        if self._trains and self.watched is None:
            self.watched = self._watch(outputs)

    def _end_before_hooks(self) -> None:
        if self._hooks_record:
            self._end()


class UnitTape:
    """Runs of units in one forward pass, in the order in which they ended. The backward pass reads it from the end."""

    def __init__(self) -> None:
        self.entered: list[int] = []  # units, in the order in which they began
        self.ended: list[int] = []  # units with outputs that a backward pass can reach
        self.began: list[int] = []  # for each of ``ended``, its index in ``entered``
        self.left = 0  # number of ``ended`` that the backward pass has not reached


class Units:
    """Gathers the weights of a module's units for their forward and backward passes, and releases them afterwards.

    The ``forward`` of each unit is replaced. All replicas run the same units in the same order.

    Args:
        units: the units and their names, as ``find_units`` returns them.
        gatherer: gathers the weights of the units; it treats each unit as a layer.
        keep: keep weights gathered from the first forward pass of a step until ``release``.
        expected: number of backward passes of a step.
        enter: called within a backward pass before its units are gathered. The first call in a pass calls
            ``begin_backward``, and ``end_backward`` follows at the pass's end.
        backward_done: called as ``backward_done(unit, runs)`` within a backward pass when the backward of one run of a
            unit has ended. ``runs`` is the number of the unit's runs in the forward passes that backward may reach.
    """

    def __init__(
        self,
        units: Sequence[tuple[str, nn.Module]],
        gatherer: ParameterGatherer,
        keep: bool,
        expected: int,
        enter: Callable[[], None],
        backward_done: Callable[[int, int], None],
    ) -> None:
        self._gatherer, self._keep = gatherer, keep
        self._names = unit_names(units)
        # Of each unit, with all that is in it: names of its parameters, and the module dicts that hold them.
        self._places = [
            [
                (f"{path}.{key}".lstrip("."), part._parameters, key, parameter)
                for path, part in unit.named_modules(prefix=name)
                for key, parameter in part._parameters.items()
                if parameter is not None
            ]
            for name, unit in units
        ]
        self._transformed = False  # a run of which nothing is recorded
        self._enter, self._backward_done = enter, backward_done
        self._running: list[int] = []
        self._held: set[int] = set()  # units that stay gathered to the end of the backward pass
        self._in_backward: set[int] = set()  # units whose backward is running
        self._tape = UnitTape()
        self._waiting: deque[UnitTape] = deque(maxlen=expected)  # forward passes that no backward pass has reached
        self._unseen = 0  # forward passes since the last backward pass
        self._reached: list[UnitTape] = []  # forward passes that the running backward pass has reached
        self._alive: WeakSet[UnitTape] = WeakSet()  # forward passes that a backward pass may reach
        self._orders: dict[int, list[int]] = {}  # for each outermost unit, the order in which units began in it
        self._entered = False  # the running backward pass has reached a unit
        self._repeated: Counter[int] = Counter()  # runs of units in it, by activation checkpointing
        self._modules = [module for _, module in units]
        self._called: list[tuple[int, _UnitPass]] = []  # units that are called, and whose forward has not begun
        for number, (_, module) in enumerate(units):
            # The call, because hooks of the module may use its weights; and forward, which a module may call itself.
            run: Any = _UnitRun(self._call, number, module._call_impl, self.require_whole)
            module._call_impl = run  # type: ignore[method-assign]
            module.forward = _UnitRun(self._run_forward, number, module.forward, self.require_whole)

    def release(self) -> None:
        """Release the gathered weights of all units."""
        for unit in range(len(self._names)):
            self._gatherer.release_layer(unit)
        self._held.clear()
        self._in_backward.clear()

    def gather_missed(self, passes: int) -> None:
        """Start the gathers of at most ``passes`` backward passes that other replicas have run and this one has not.

        The gathers follow the oldest forward passes of this step that no backward pass has reached.
        """
        for _ in range(min(passes, len(self._waiting))):
            for unit in reversed(self._waiting.popleft().ended):
                self._gatherer.start_gather(unit)
            self._mark_end()

    @property
    def one_forward_waits(self) -> bool:
        """True if one forward pass has run since the last backward pass, to which the next backward pass belongs."""
        return self._unseen == 1 and len(self._waiting) > 0

    def run_empty_backward(self) -> None:
        """Gather and release weights as the other replicas do in a backward pass that has no gradient on this one."""
        tape = self._waiting.pop()
        self._alive.add(tape)
        self._skip(tape, 0)
        self._alive.discard(tape)
        self._unseen = 0
        self._pass_ended()

    def reset(self) -> None:
        """Discard the recorded forward passes of this step, because no further backward pass of the step follows."""
        self._unseen = 0
        self._waiting.clear()
        self._reached.clear()

    def _call(self, unit: int, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a unit: its hooks, and its forward, which torch calls as ``_run_forward``."""
        before = len(self._called)
        with self._running_pass(unit, called=True) as pass_:
            self._called.append((unit, pass_))
            try:
                args, kwargs = pass_.enter_call(args, kwargs)
                outputs = method(*args, **kwargs)
                pass_.leave_call(outputs)
            finally:
                del self._called[before:]
        return outputs

    def _run_forward(self, unit: int, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run the ``forward`` of a unit, within a call of it or by itself."""
        called = bool(self._called) and self._called[-1][0] == unit
        with nullcontext(self._called.pop()[1]) if called else self._running_pass(unit, called=False) as pass_:
            args, kwargs = pass_.enter_forward(args, kwargs)
            outputs = forward(*args, **kwargs)
            pass_.leave_forward(outputs)
        return outputs

    @contextmanager
    def _running_pass(self, unit: int, called: bool) -> Iterator[_UnitPass]:
        """Context around a run of a unit, in which its weights are there.

        Args:
            unit: number of the unit.
            called: the module is called, with its hooks; False: its forward alone.
        """
        if self._transformed:
            yield _UnitPass()
        elif backward_task() != -1:
            # Activation checkpointing runs it again. Its backward follows at once, so the weights stay gathered.
            self._enter_backward()
            self._gatherer.start_gather(unit)
            self._gatherer.wait(unit)
            if torch.is_grad_enabled():  # of a reentrant checkpoint
                self._repeated[unit] += 1
                yield _RepeatedPass(partial(self._end_repeated, unit), called)
            else:
                yield _UnitPass()
        elif (transform := self._transform(unit)) is not None:
            self.require_whole(unit, transform)
            self._transformed = True
            try:
                yield _UnitPass()
            finally:
                self._transformed = False
        else:
            with self._forward_pass(unit, called) as pass_:
                yield pass_

    @contextmanager
    def _forward_pass(self, unit: int, called: bool) -> Iterator[_UnitPass]:
        """Context around a run of a unit in a forward pass, which gathers and releases its weights, and notes it."""
        outermost = not self._running
        if outermost:
            self._tape = UnitTape()
        tape, trains, began = self._tape, torch.is_grad_enabled(), len(self._tape.entered)
        prefetch = self._begin(unit, tape, waits=called and module_hooks(self._modules[unit], "forward_pre"))
        end, watch = partial(self._end, tape, unit), partial(self._watch, tape, unit, began)
        pass_ = _ForwardPass(self._modules[unit], called, trains, prefetch, end, watch)
        self._running.append(unit)
        try:
            yield pass_
            self._gatherer.require_unwritten(unit)
        finally:
            self._running.pop()
            if trains and (self._keep or unit == 0 or not pass_.watched):
                self._held.add(unit)
            self._release_unused(unit)
        if outermost:
            self._orders[unit] = tape.entered
            tape.left = len(tape.ended)
            if tape.left:
                self._unseen += 1
                self._waiting.append(tape)
            if trains:  # also if outputs are unknown objects: the marks on the inputs keep the tape
                self._alive.add(tape)

    def _transform(self, unit: int) -> str | None:
        """Return the function of ``torch.func`` under which a unit runs. Marks in the graph do not work there."""
        if in_transform():
            return "a transform of torch.func (grad, vmap, jacrev, ...) ran"
        if not self._running and any(owner.get(key) is not p for _, owner, key, p in self._places[unit]):
            return "torch.func.functional_call replaced parameters of"
        return None

    def require_whole(self, unit: int, transform: str) -> None:
        """Refuse to do something with a unit whose parameters are released.

        Args:
            unit: number of the unit.
            transform: what is done with it: the beginning of the message.
        """
        released = next((name for name, _, _, p in self._places[unit] if is_released(p)), None)
        if released is not None:
            raise RuntimeError(
                f"{transform} {self._names[unit]} while stage 3 of ZeRO has released its parameters ({released}, ...), "
                "so that they and all that is computed from them would be NaN: do it, and the backward pass of its "
                "result, on every rank within triax.zero.gathered(module)"
            )

    def _begin(self, unit: int, tape: UnitTape, waits: bool) -> Callable[[], None] | None:
        """Gather a unit's weights, and prefetch the unit that followed it in the last forward pass.

        Args:
            unit: number of the unit.
            tape: record of the running forward pass.
            waits: the caller starts the prefetch later, after the hooks before the unit's forward.

        Returns:
            The function that starts the prefetch, if it waits.
        """
        order = self._orders.get(self._running[0] if self._running else unit, [])
        at = len(tape.entered)
        tape.entered.append(unit)
        self._gatherer.start_gather(unit)
        prefetch = None
        if at + 1 < len(order) and order[at] == unit:
            prefetch = partial(self._gatherer.start_gather, order[at + 1])
            if not waits:
                prefetch()
                prefetch = None
        self._gatherer.wait(unit)
        return prefetch

    def _watch(self, tape: UnitTape, unit: int, began: int, outputs: Any) -> bool:
        """Record that a run of a unit has ended, and register hooks on its outputs for the backward pass.

        The hooks gather the unit's weights.

        Args:
            tape: record of the running forward pass.
            unit: number of the unit.
            began: index of the run in ``tape.entered``.
            outputs: the unit's outputs.

        Returns:
            False if the outputs hold objects of unknown types, in which tensors cannot be found.
        """
        tensors: list[Tensor] = []
        known = visit_tensors(tensors.append, outputs)
        wanted = [tensor for tensor in tensors if tensor.requires_grad]
        if wanted:
            place = len(tape.ended)
            tape.ended.append(unit)
            tape.began.append(began)
            for tensor in wanted:
                tensor.register_hook(lambda _: self._reach(tape, place))
        return known

    def _reach(self, tape: UnitTape, place: int) -> None:
        """Gather a unit's weights: the backward pass has reached an output of run ``place`` in ``tape.ended``."""
        self._enter_backward()
        if torch.is_grad_enabled() and not self._keep and not self._gatherer.is_gathered(tape.ended[place]):
            raise RuntimeError(
                f"create_graph=True in a backward pass through {self._names[tape.ended[place]]}: a second pass through "
                "this graph would need weights that stage 3 of ZeRO has released by then. Set "
                "keep_gathered of triax.Zero (or of ShardedOptimizer) to True, or run the forward and both backward "
                "passes on every rank within triax.zero.gathered(module)"
            )
        if tape not in self._reached:
            self._reached.append(tape)
            self._alive.add(tape)
            if tape in self._waiting:
                self._waiting.remove(tape)
        if place < tape.left:
            self._skip(tape, place + 1, tape.began[place])
            self._fetch(tape, place)
            tape.left = place
        unit = tape.ended[place]
        self._in_backward.add(unit)
        self._gatherer.start_gather(unit)  # released before, in a second backward pass through the same graph
        self._gatherer.wait(unit)

    def _skip(self, tape: UnitTape, to: int, began: int = 0) -> None:
        """Gather and release the units of all runs from ``tape.left`` down to ``to``: they have no gradient here.

        Another replica may have a gradient there, and all replicas must take part in each gather. ``began`` is the
        index in ``tape.entered`` of the run that is reached next. Units that began before it enclose it: they are not
        released, because their own backward follows.
        """
        while tape.left > to:
            tape.left -= 1
            self._fetch(tape, tape.left)
            if tape.began[tape.left] >= began:
                self._end(tape, tape.ended[tape.left])
            else:
                self._in_backward.add(tape.ended[tape.left])

    def _fetch(self, tape: UnitTape, place: int) -> None:
        """Start gathering the unit of run ``place``, and prefetch the unit of the run whose backward follows."""
        for unit in tape.ended[max(place - 1, 0) : place + 1][::-1]:
            self._gatherer.start_gather(unit)

    def _end(self, tape: UnitTape, unit: int) -> None:
        """Release a unit's weights after the backward of one of its runs."""
        self._in_backward.discard(unit)
        self._release_unused(unit)
        self._backward_done(unit, self._runs(unit))

    def _end_repeated(self, unit: int) -> None:
        """Release a unit's weights after the backward of all its runs in a reentrant checkpoint."""
        self._repeated[unit] -= 1
        if not self._repeated[unit]:
            self._release_unused(unit)
        self._backward_done(unit, self._runs(unit))

    def _runs(self, unit: int) -> int:
        return sum(each.entered.count(unit) for each in self._alive)

    def _release_unused(self, unit: int) -> None:
        """Release a unit's weights, except weights that another unit still uses."""
        using = {*self._held, *self._running, *self._in_backward}
        if unit not in using:
            self._gatherer.release_layer(unit, using)

    def _enter_backward(self) -> None:
        self._enter()
        self._entered = True

    def begin_backward(self) -> None:
        """Begin a backward pass."""
        self._reached, self._entered = [], False
        self._repeated.clear()

    def end_backward(self) -> None:
        """End a backward pass: gather what other replicas gathered, and release all weights."""
        if not self._entered:
            return
        for tape in self._reached:
            self._skip(tape, 0)
        self._alive.difference_update(self._reached)
        self._reached, self._unseen = [], 0
        self._pass_ended()

    def _pass_ended(self) -> None:
        """Release all weights after a backward pass."""
        if not self._keep:
            self.release()
        self._mark_end()

    def _mark_end(self) -> None:
        """Check that a backward pass has ended on all replicas.

        If another replica still gathers weights, this one would wait for it in the reductions that follow.
        """
        if not self._keep:
            self._gatherer.enter("ends a backward pass", limit=_PATIENCE)
