"""ZeRO stage 3 of a plain module: units whose weights are gathered only while they run, and prefetched before.

    forward     root | unit 1 | unit 2 | ... | unit n |
    backward         | unit n | ... | unit 2 | unit 1 | root

Gathers are collectives, so every replica starts the same ones in the same order. In the forward pass that is the order
in which the module runs its units, in the backward pass the reverse. A replica that has no gradient for a unit gathers
it all the same, when its turn comes.
"""

from __future__ import annotations

import copy
import functools
from collections import Counter, deque
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from ...base.autograd import mark
from ...base.nest import visit_tensors
from ..data_axis import data_axis_of
from ..layer_gather import ParameterGatherer
from ..managed import is_released
from .tiled_linear import TiledLinear

# Attributes of modules: parameters of other modules that they use; True for one whose parameters are one unit.
_EXTERNAL, _LEAF = "triax_external_parameters", "triax_leaf"
_nodes = torch.autograd._get_sequence_nr
_PATIENCE = 3.0  # seconds that a replica waits for the others at the end of a backward pass of another order than usual


def register_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Say that a module's ``forward`` uses a parameter of another module, such as a tied weight of an embedding.

    Stage 3 then gathers it for that module too. Call it before the engine or optimizer is made.

    Raises:
        RuntimeError: it is no parameter, or an engine or optimizer has it already.
    """
    if not isinstance(parameter, nn.Parameter):
        raise RuntimeError(f"a {type(parameter).__name__} was registered, which is no parameter: give an nn.Parameter")
    if data_axis_of(parameter) is not None:
        raise RuntimeError(
            "register_external_parameter was called after the engine was made, which cut the module into units: "
            "call it before, for instance in the module's __init__"
        )
    vars(module).setdefault(_EXTERNAL, []).append(parameter)


def unregister_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Undo ``register_external_parameter``.

    Raises:
        RuntimeError: the parameter is not registered.
    """
    found = vars(module).get(_EXTERNAL, [])
    if not any(each is parameter for each in found):
        raise RuntimeError("unregister_external_parameter was called with a parameter that is not registered")
    vars(module)[_EXTERNAL] = [each for each in found if each is not parameter]


def set_leaf(module: nn.Module, leaf: bool) -> None:
    """Say whether stage 3 gathers all parameters within a module as one unit. Call it before the engine is made."""
    vars(module)[_LEAF] = leaf


def is_leaf(module: nn.Module) -> bool:
    """Return True if ``set_leaf`` made the module one unit."""
    return bool(vars(module).get(_LEAF, False))


def find_units(module: nn.Module, named: Sequence[str | nn.Module] | None = None) -> list[tuple[str, nn.Module]]:
    """Return the units of a module, with their names.

    The first unit is the module itself. It has all parameters that belong to no other unit.

    Args:
        module: the model.
        named: patterns of submodules' names (``"encoder.layers.*"``, where ``*`` stands for one level), or
            submodules. None: the entries of the outermost ``ModuleList`` s and ``Sequential`` s. An entry that is only
            a container (another ``ModuleList``, a ``ModuleDict``) is replaced by its own entries. The tiles of a
            ``TiledLinear`` are units of their own.

    Raises:
        ValueError: a pattern or a module matches no submodule, or one without a ``forward``.
    """
    inside = {name: part for name, part in module.named_modules() if name}
    found: dict[nn.Module, str] = {}
    if named is None:
        _list_entries(module, "", found)
    for wanted in named or ():
        if isinstance(wanted, nn.Module):
            names = [name for name, part in inside.items() if part is wanted]
        else:
            names = [name for name in inside if _matches(name, wanted)]
        if not names:
            what = f"pattern {wanted!r}" if isinstance(wanted, str) else f"{type(wanted).__name__} given"
            some = ", ".join([*inside][:6])
            raise ValueError(f"units: the {what} matches no submodule of the model. Its first submodules are {some}")
        for name in names:
            _require_forward(name, inside[name])
        found.update({inside[name]: name for name in names if inside[name] not in found})
    units = [(name, part) for part, name in found.items() if next(part.parameters(), None) is not None]
    return [("", module), *units]


def _list_entries(module: nn.Module, prefix: str, found: dict[nn.Module, str], within: bool = False) -> None:
    """Add the entries of the outermost lists and sequences of modules to ``found``, with their names; leaf modules."""
    within = within or isinstance(module, (nn.ModuleList, nn.Sequential))
    for name, child in module.named_children():
        if is_leaf(child) or (within and _has_forward(child)):
            found.setdefault(child, prefix + name)
            if not is_leaf(child):
                _tiles(child, prefix + name, found)
        else:
            _list_entries(child, f"{prefix}{name}.", found, within)


def _tiles(module: nn.Module, prefix: str, found: dict[nn.Module, str]) -> None:
    """Add the tiles of the ``TiledLinear`` s within a module, which are units within its unit."""
    for path, part in module.named_modules(prefix=prefix):
        if isinstance(part, TiledLinear):
            for name, tile in part.linears.named_modules(prefix=f"{path}.linears"):
                if not isinstance(tile, nn.ModuleList):
                    found.setdefault(tile, name)


def _has_forward(module: nn.Module) -> bool:
    # A scripted module has its forward in the instance.
    return "forward" in vars(module) or getattr(type(module), "forward", None) is not nn.Module.forward


def _require_forward(name: str, module: nn.Module) -> None:
    if _has_forward(module) or next(module.parameters(), None) is None:
        return
    inside = [f"{name}.{child}" for child, _ in module.named_children()]
    instead = f"what it holds: {', '.join(inside[:6])}, or {name}.*" if inside else "the module around it"
    raise ValueError(
        f"units: {name} is a {type(module).__name__}, which has no forward, so nothing runs it and its weights would "
        f"never be gathered: name {instead}"
    )


def _matches(name: str, pattern: str) -> bool:
    levels, wanted = name.split("."), pattern.split(".")
    return len(levels) == len(wanted) and all(map(fnmatchcase, levels, wanted))


def unit_names(units: Sequence[tuple[str, nn.Module]]) -> list[str]:
    """Return the names of units in messages."""
    return [f"unit {name}" if name else "the module" for name, _ in units]


def users(units: Sequence[tuple[str, nn.Module]]) -> dict[nn.Parameter, list[int]]:
    """Return for each parameter the units that use it; parameters of the first unit come first.

    A module belongs to the innermost unit that contains it.
    """
    number = {part: i for i, (_, part) in enumerate(units)}
    found: dict[nn.Parameter, list[int]] = {}
    seen: set[tuple[nn.Module, int]] = set()

    def walk(module: nn.Module, unit: int) -> None:
        unit = number.get(module, unit)
        if (module, unit) in seen:
            return
        seen.add((module, unit))
        for parameter in (*module._parameters.values(), *vars(module).get(_EXTERNAL, ())):
            if parameter is not None and unit not in (mine := found.setdefault(parameter, [])):
                mine.append(unit)
        for child in module.children():
            walk(child, unit)

    walk(units[0][1], 0)
    return dict(sorted(found.items(), key=lambda item: 0 not in item[1]))


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
        functools.update_wrapper(self, method)
        self._run, self._unit, self._method, self._require_whole = run, unit, method, require_whole

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._run(self._unit, self._method, *args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., Any]:
        self._require_whole(self._unit, "copy.deepcopy copied")
        return copy.deepcopy(self._method, memo)


class _Call:
    """A call of a unit: what is left to do when its forward begins and ends.

    Attributes:
        unit: number of the unit.
        prefetch: unit to prefetch when the forward begins.
        end: ends the unit's backward; None if nothing is recorded.
        nodes: autograd's count of nodes before the hooks that precede the forward; None without such hooks.
        before_hooks: True if these hooks record nodes, so that the backward ends with theirs.
        hook: called with the output of the forward; ``seen`` is its result.
    """

    def __init__(self, unit: int) -> None:
        self.unit = unit
        self.prefetch: int | None = None
        self.end: Callable[[], None] | None = None
        self.nodes: int | None = None
        self.before_hooks = False
        self.hook: Callable[[Any], bool] | None = None
        self.seen: bool | None = None

    def end_before_hooks(self) -> None:
        """End the unit's backward, if its hooks take part in it."""
        if self.before_hooks and self.end is not None:
            self.end()


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
        self._calls: list[_Call] = []  # calls of units whose forward has not begun
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
        """Run a unit with its hooks."""
        before, call = len(self._calls), _Call(unit)
        self._calls.append(call)
        try:
            return self._run(unit, method, args, kwargs, call)
        finally:
            del self._calls[before:]

    def _run_forward(self, unit: int, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run the ``forward`` of a unit, within a call of it or by itself."""
        if not self._calls or self._calls[-1].unit != unit:
            return self._run(unit, forward, args, kwargs)
        call = self._calls.pop()
        if call.prefetch is not None:
            self._gatherer.start_gather(call.prefetch)
        if call.end is not None:
            module = self._modules[unit]
            hooked = bool(module._backward_hooks or module._backward_pre_hooks)  # torch records a node for them
            call.before_hooks = call.nodes is not None and _nodes() - call.nodes > hooked
            if not call.before_hooks:
                args, kwargs = mark((args, kwargs), call.end, exact=True)
        y = forward(*args, **kwargs)
        if call.hook is not None:
            call.seen = call.hook(y)
        return y

    def _run(
        self,
        unit: int,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        call: _Call | None = None,
    ) -> Any:
        """Run ``forward(*args, **kwargs)`` of a unit with gathered weights, and gather them again for its backward.

        ``call`` is given if this is a call of the module, in which its hooks run too.
        """
        if self._transformed:
            return forward(*args, **kwargs)
        if torch._C._current_graph_task_id() != -1:
            # Activation checkpointing runs it again. Its backward follows at once, so the weights stay gathered.
            self._enter_backward()
            self._gatherer.start_gather(unit)
            self._gatherer.wait(unit)
            if torch.is_grad_enabled():  # of a reentrant checkpoint: the backward goes through the graph of this run
                self._repeated[unit] += 1
                args, kwargs = mark((args, kwargs), lambda: self._end_repeated(unit), exact=True)
            return forward(*args, **kwargs)
        if (transform := self._transform(unit)) is not None:
            self.require_whole(unit, transform)
            self._transformed = True
            try:
                return forward(*args, **kwargs)
            finally:
                self._transformed = False
        outermost = not self._running
        if outermost:
            self._tape = UnitTape()
        tape, trains = self._tape, torch.is_grad_enabled()
        began = self._begin(unit, tape, call)
        self._running.append(unit)
        hooked = False
        try:
            if trains:
                args, kwargs = self._mark(tape, unit, began, call, args, kwargs)
            y = forward(*args, **kwargs)
            self._gatherer.require_unwritten(unit)
            if trains:
                hooked = self._hook(tape, unit, began, y) if call is None or call.seen is None else call.seen
        finally:
            self._running.pop()
            if trains and (self._keep or unit == 0 or not hooked):
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
        return y

    def _mark(
        self,
        tape: UnitTape,
        unit: int,
        began: int,
        call: _Call | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Mark the inputs of a run, so that the unit is released when their gradients are computed.

        In a call of the module the marks lie behind its hooks, unless these compute something that needs gradients, for
        instance a weight from its norm and direction: then the unit's backward ends before the hooks.
        """
        end = functools.partial(self._end, tape, unit)
        if call is None:
            return mark((args, kwargs), end, exact=True)
        module, call.end = self._modules[unit], end
        if not module._forward_hooks:
            call.hook = functools.partial(self._hook, tape, unit, began)
        if module._forward_pre_hooks:
            args, kwargs = mark((args, kwargs), call.end_before_hooks, exact=True)
            call.nodes = _nodes()
        return args, kwargs

    def _transform(self, unit: int) -> str | None:
        """Return the function of ``torch.func`` under which a unit runs. Marks in the graph do not work there."""
        if torch._C._are_functorch_transforms_active():
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

    def _begin(self, unit: int, tape: UnitTape, call: _Call | None) -> int:
        """Gather a unit's weights, and prefetch the unit that followed it in the last forward pass.

        Args:
            unit: number of the unit.
            tape: record of the running forward pass.
            call: the call of the module. If hooks run before its forward, the next unit is prefetched after them.

        Returns:
            The index of this run in ``tape.entered``.
        """
        order = self._orders.get(self._running[0] if self._running else unit, [])
        at = len(tape.entered)
        tape.entered.append(unit)
        self._gatherer.start_gather(unit)
        if at + 1 < len(order) and order[at] == unit:
            if call is not None and self._modules[unit]._forward_pre_hooks:
                call.prefetch = order[at + 1]
            else:
                self._gatherer.start_gather(order[at + 1])
        self._gatherer.wait(unit)
        return at

    def _hook(self, tape: UnitTape, unit: int, began: int, y: Any) -> bool:
        """Record that a run of a unit has ended, and register hooks on its outputs for the backward pass.

        The hooks gather the unit's weights.

        Args:
            tape: record of the running forward pass.
            unit: number of the unit.
            began: index of the run in ``tape.entered``.
            y: the unit's outputs.

        Returns:
            False if the outputs hold objects of unknown types, in which tensors cannot be found.
        """
        outputs: list[Tensor] = []
        seen = visit_tensors(outputs.append, y)
        wanted = [tensor for tensor in outputs if tensor.requires_grad]
        if wanted:
            place = len(tape.ended)
            tape.ended.append(unit)
            tape.began.append(began)
            for tensor in wanted:
                tensor.register_hook(lambda _: self._reach(tape, place))
        return seen

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
