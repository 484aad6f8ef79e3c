"""Stage 3 for any module: it is cut into units, each whole only while it runs, the next one on its way by then.

    forward     root | unit 1 | unit 2 | ... | unit n |
    backward         | unit n | ... | unit 2 | unit 1 | root

Gathers are collectives, so every replica starts the same ones in the same order. Forward that is the order in which
the module runs its units; backward it is the reverse, and a replica that has no gradient for a unit gathers it in its
turn all the same.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from .parameters import ParameterGatherer, mark

# What holds no tensors, so that a unit may return it without anybody looking inside.
_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)


def find_units(module: nn.Module, named: Sequence[str | nn.Module] | None = None) -> list[tuple[str, nn.Module]]:
    """The units of a module, with their names; the first is the module itself, which has what no other unit has.

    Args:
        module: any.
        named: patterns of submodules' names (``"encoder.layers.*"``, where ``*`` stands for one level), or
            submodules. None: the entries of its outermost ``ModuleList`` s and ``Sequential`` s; in place of an entry
            that only holds modules (another ``ModuleList``, a ``ModuleDict``) those that it holds.

    Raises:
        ValueError: a pattern or a module that names none of its submodules, or one without a ``forward``.
    """
    inside = {name: part for name, part in module.named_modules() if name}
    found: dict[nn.Module, str] = {}
    if named is None:
        _entries(module, "", found)
    for wanted in named or ():
        if isinstance(wanted, nn.Module):
            names = [name for name, part in inside.items() if part is wanted]
        else:
            names = [name for name in inside if _matches(name, wanted)]
        if not names:
            what = f"pattern {wanted!r}" if isinstance(wanted, str) else f"{type(wanted).__name__} given"
            some = ", ".join([*inside][:6])
            raise ValueError(f"units: the {what} is none of the module's submodules; these begin with {some}")
        for name in names:
            _require_forward(name, inside[name])
        found.update({inside[name]: name for name in names if inside[name] not in found})
    units = [(name, part) for part, name in found.items() if next(part.parameters(), None) is not None]
    return [("", module), *units]


def _entries(module: nn.Module, prefix: str, found: dict[nn.Module, str], within: bool = False) -> None:
    within = within or isinstance(module, (nn.ModuleList, nn.Sequential))
    for name, child in module.named_children():
        if within and _runs(child):
            found.setdefault(child, prefix + name)
        else:
            _entries(child, f"{prefix}{name}.", found, within)


def _runs(module: nn.Module) -> bool:
    """Whether a module can be called: it has a ``forward``."""
    # (The class of a scripted module does not say what its forward is.)
    return "forward" in vars(module) or getattr(type(module), "forward", None) is not nn.Module.forward


def _require_forward(name: str, module: nn.Module) -> None:
    if _runs(module) or next(module.parameters(), None) is None:
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


def users(units: Sequence[tuple[str, nn.Module]]) -> dict[nn.Parameter, list[int]]:
    """For each parameter the units that use it, those of the root first: each the innermost one around a module."""
    number = {part: i for i, (_, part) in enumerate(units)}
    found: dict[nn.Parameter, list[int]] = {}
    seen: set[tuple[nn.Module, int]] = set()

    def walk(module: nn.Module, unit: int) -> None:
        unit = number.get(module, unit)
        if (module, unit) in seen:
            return
        seen.add((module, unit))
        for parameter in module._parameters.values():
            if parameter is not None and unit not in (mine := found.setdefault(parameter, [])):
                mine.append(unit)
        for child in module.children():
            walk(child, unit)

    walk(units[0][1], 0)
    return dict(sorted(found.items(), key=lambda item: 0 not in item[1]))


class _Tape:
    """The runs of units in one forward pass, in the order in which they ended. Backward, it is read from the end."""

    def __init__(self) -> None:
        self.entered: list[int] = []  # units, in the order in which they began
        self.ended: list[int] = []  # those whose outputs a backward pass can come to
        self.began: list[int] = []  # for each of ``ended``, its place in ``entered``
        self.left = 0  # how many of ``ended`` the backward pass has not come to


class Units:
    """Runs the units of a module, forward and backward, with their weights whole.

    The ``forward`` of each is replaced. All replicas run the same units in the same order.

    Args:
        units: from ``find_units``.
        gatherer: of their weights, a unit being a layer.
        keep: leave them whole from the first forward pass of a step until ``drop``.
        expected: backward passes of a step.
        over: told, within a backward pass, that one of a unit's runs is over, and of how many.
    """

    def __init__(
        self,
        units: Sequence[tuple[str, nn.Module]],
        gatherer: ParameterGatherer,
        keep: bool,
        expected: int,
        over: Callable[[int, int], None],
    ) -> None:
        self._gatherer, self._keep, self._over, self._count = gatherer, keep, over, len(units)
        self._running: list[int] = []
        self._held: set[int] = set()  # units that stay whole to the end of the backward pass
        self._open: set[int] = set()  # those whose backward runs
        self._tape = _Tape()
        self._waiting: deque[_Tape] = deque(maxlen=expected)  # forward passes that no backward pass came to yet
        self._unseen = 0  # forward passes since the last backward pass
        self._reached: list[_Tape] = []  # those that the running backward pass came to
        self._alive: WeakSet[_Tape] = WeakSet()  # those that one may come to
        self._orders: dict[int, list[int]] = {}  # for each outermost unit, in which order units began in it
        self._task = -1
        for number, (_, module) in enumerate(units):
            forward = module.forward
            module.forward = functools.wraps(forward)(functools.partial(self._run, number, forward))

    def drop(self) -> None:
        """Keep the shards only, of all units."""
        for unit in range(self._count):
            self._gatherer.drop(unit)
        self._held.clear()
        self._open.clear()

    def catch_up(self, passes: int) -> None:
        """Start the gathers of backward passes that other replicas may have had and this one had not."""
        for _ in range(min(passes, len(self._waiting))):
            for unit in reversed(self._waiting.popleft().ended):
                self._gatherer.fetch(unit)

    @property
    def knows_the_last(self) -> bool:
        """Whether there was one forward pass since the last backward pass, so that the next one can only be of it."""
        return self._unseen == 1 and len(self._waiting) > 0

    def absent(self) -> None:
        """The backward pass of the last forward pass has no gradient here: gather, and let go, as the others do."""
        tape = self._waiting.pop()
        self._alive.add(tape)
        self._skip(tape, 0)
        self._alive.discard(tape)
        self._unseen = 0
        if not self._keep:
            self.drop()

    def forget(self) -> None:
        """The step is over: no backward pass is to come."""
        self._unseen = 0
        self._waiting.clear()
        self._reached.clear()
        self._task = -1

    def _run(self, unit: int, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """``forward(*args, **kwargs)``, one unit, whole: now, and when its backward pass comes."""
        if torch._C._current_graph_task_id() != -1:
            # A checkpoint computes it once more. Its backward comes at once; the weights stay for that.
            self._enter_backward()
            self._gatherer.fetch(unit)
            self._gatherer.arrive(unit)
            return forward(*args, **kwargs)
        outermost = not self._running
        if outermost:
            self._tape = _Tape()
        tape, trains = self._tape, torch.is_grad_enabled()
        began = self._begin(unit, tape)
        self._running.append(unit)
        hooked = False
        try:
            if trains:
                args, kwargs = _mark((args, kwargs), lambda: self._end(tape, unit))
            y = forward(*args, **kwargs)
            hooked = trains and self._hook(tape, unit, began, y)
        finally:
            self._running.pop()
            if trains and (self._keep or unit == 0 or not hooked):
                self._held.add(unit)
            self._let_go(unit)
        if outermost:
            self._orders[unit] = tape.entered
            tape.left = len(tape.ended)
            if tape.left:
                self._unseen += 1
                self._waiting.append(tape)
                self._alive.add(tape)
        return y

    def _begin(self, unit: int, tape: _Tape) -> int:
        """Have a unit whole, and start fetching the one that began after it the last time; returns its place."""
        order = self._orders.get(self._running[0] if self._running else unit, [])
        at = len(tape.entered)
        tape.entered.append(unit)
        self._gatherer.fetch(unit)
        if at + 1 < len(order) and order[at] == unit:
            self._gatherer.fetch(order[at + 1])
        self._gatherer.arrive(unit)
        return at

    def _hook(self, tape: _Tape, unit: int, began: int, y: Any) -> bool:
        """Have the unit whole when the backward pass comes to its outputs; False where one cannot see all of these."""
        outputs: list[Tensor] = []
        seen = _visit(y, outputs.append)
        wanted = [tensor for tensor in outputs if tensor.requires_grad]
        if wanted:
            place = len(tape.ended)
            tape.ended.append(unit)
            tape.began.append(began)
            for tensor in wanted:
                tensor.register_hook(lambda _: self._reach(tape, place))
        return seen

    def _reach(self, tape: _Tape, place: int) -> None:
        """The backward pass comes to a run, after whose output it is: have its weights whole."""
        self._enter_backward()
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
        self._open.add(unit)
        self._gatherer.fetch(unit)  # gone again: a second backward pass through the same graph
        self._gatherer.arrive(unit)

    def _skip(self, tape: _Tape, to: int, began: int = 0) -> None:
        """Gather, and let go, the runs that have no gradient here: another replica may have one.

        What is around the run that ``began`` there is not let go: its backward is to come.
        """
        while tape.left > to:
            tape.left -= 1
            self._fetch(tape, tape.left)
            if tape.began[tape.left] >= began:
                self._end(tape, tape.ended[tape.left])
            else:
                self._open.add(tape.ended[tape.left])

    def _fetch(self, tape: _Tape, place: int) -> None:
        """Start gathering a run's unit, and that of the run whose backward comes after it."""
        for unit in tape.ended[max(place - 1, 0) : place + 1][::-1]:
            self._gatherer.fetch(unit)

    def _end(self, tape: _Tape, unit: int) -> None:
        """The backward of one of a unit's runs is over."""
        self._open.discard(unit)
        self._let_go(unit)
        self._over(unit, sum(each.entered.count(unit) for each in self._alive))

    def _let_go(self, unit: int) -> None:
        """Keep the shards only, but of what another unit still uses."""
        using = {*self._held, *self._running, *self._open}
        if unit not in using:
            self._gatherer.drop(unit, using)

    def _enter_backward(self) -> None:
        """Within a backward pass: have ``_leave_backward`` called at its end, once."""
        task = torch._C._current_graph_task_id()
        if task != self._task:
            self._task = task
            self._reached = []
            torch.autograd.Variable._execution_engine.queue_callback(self._leave_backward)

    def _leave_backward(self) -> None:
        for tape in self._reached:
            self._skip(tape, 0)
        self._alive.difference_update(self._reached)
        self._reached, self._unseen = [], 0
        if not self._keep:
            self.drop()


def _visit(value: Any, function: Callable[[Tensor], object]) -> bool:
    """Call a function with each tensor of a nest; False where there is something that it cannot look into."""
    if isinstance(value, Tensor):
        function(value)
        return True
    inside: Iterable[Any]
    if isinstance(value, Mapping):
        inside = value.values()
    elif isinstance(value, (tuple, list)):
        inside = value
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        inside = [getattr(value, field.name) for field in dataclasses.fields(value)]
    else:
        return isinstance(value, _PLAIN)
    seen = [_visit(item, function) for item in inside]
    return all(seen)


def _mark(value: Any, action: Callable[[], None]) -> Any:
    """``mark`` for arguments: containers of kinds of their own (a model's outputs, a cache) are left as they are."""
    tensors: list[Tensor] = []
    _map(value, tensors.append)
    marked = iter(mark(tensors, action))
    return _map(value, lambda _: next(marked))


def _map(value: Any, function: Callable[[Tensor], Any]) -> Any:
    if isinstance(value, Tensor):
        return function(value)
    if type(value) in (tuple, list):
        return type(value)([_map(item, function) for item in value])
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*[_map(item, function) for item in value])
    if type(value) is dict:
        return {key: _map(item, function) for key, item in value.items()}
    return value
