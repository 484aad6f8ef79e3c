"""What of a model's state this rank holds, element by element, for whoever writes it to files or reads it from them.

A parameter's value is its master, where there is one: weights are masters, rounded. State is what torch's optimizer
keeps: tensors of a parameter's shape, each under its key, and numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..grid import Grid, Layout
from ..grid.random import derive
from . import onebit_held
from .arriving import publish
from .buckets import Bucket
from .compressor import Compressor, Kept
from .onebit_step import OneBitStepper
from .replicas import Replicas
from .whole import WholeStepper

__all__ = ["Held", "Named", "Range"]


class Named(NamedTuple):
    """A parameter of this rank."""

    parameter: nn.Parameter
    layout: Layout  # with its whole-model name
    counted: bool  # whether this pipe rank stands for those that hold it too


class Range(NamedTuple):
    """Elements ``start`` to ``stop`` of this tensor rank's part of a tensor, flat, and where they are."""

    name: str
    layout: Layout
    start: int
    stop: int
    value: Tensor  # (stop - start,): a view


class Held:
    """The values and the optimizer's state of this rank's parameters.

    Args:
        replicas: what manages them.
        parameters: all of this rank.
        grid: of both.
    """

    def __init__(self, replicas: Replicas, parameters: Sequence[Named], grid: Grid) -> None:
        self._replicas, self._grid = replicas, grid
        self._stepper = replicas._stepper
        self.parameters = list(parameters)
        self._named: dict[Tensor, Named] = {named.parameter: named for named in parameters}
        self._by_name = {named.layout.name: named for named in parameters}
        self._outside = [named for named in parameters if named.parameter not in replicas._bucket_of]

    def whole(self) -> str | None:
        """The name of a parameter that is lent out whole in stage 3, if one is: nothing may be loaded then."""
        lent = (bucket for bucket in self._replicas.buckets if bucket.gathered and not bucket.released)
        return next((bucket.members[0].layout.name for bucket in lent), None)

    def values(self, mine: bool) -> Iterator[Range]:
        """The parameters' values.

        Args:
            mine: of what several ranks hold, the part that is this one's to write; else all that is stepped here.
        """
        for bucket in self._replicas.buckets:
            home, first = _home(bucket)
            if mine and isinstance(self._stepper, OneBitStepper) and bucket.trained:
                home = self._stepper.met(bucket, home)  # replicas may be apart
            yield from self._ranges(bucket, home, first, mine)
            self.behind(home)
        for named in self._outside:
            own = named.parameter.detach()
            flat = own.contiguous().view(-1)
            yield from self._share(named, flat) if mine else [Range(*_title(named), 0, flat.numel(), flat)]
            if not mine and not own.is_contiguous():
                own.copy_(flat.view(own.shape))  # what was written to it since

    def states(self) -> Iterator[tuple[str, Range]]:
        """The optimizer's state that is this rank's to write, with its keys."""
        if isinstance(self._stepper, OneBitStepper):

            def share(parameter: Tensor, flat: Tensor) -> Iterator[Range]:
                return self._share(self._named[parameter], flat)

            found = onebit_held.states(self._stepper, lambda p: self._tells(self._named[p]), share)
            yield from ((key, Range(*piece)) for key, piece in found)
            return
        if isinstance(self._stepper, WholeStepper):
            for parameter, master, *_ in self._stepper._views:
                for key, value in self._known(master).items():
                    if _elements(value, master.shape):
                        yield from ((key, part) for part in self._share(self._named[parameter], value.view(-1)))
            return
        for bucket in self._trained():
            for key, value in self._flat(bucket).items():
                yield from ((key, part) for part in self._ranges(bucket, value, bucket.owned[0], True))
                bucket.memory.behind(value)

    def exchanged(self) -> Iterator[tuple[str, Range]]:
        """What this replica's exchange of gradients keeps, and is this rank's to write: keys, and where it is."""
        yield from self._exchanged(mine=True)

    def exchange_rooms(self) -> Iterator[tuple[str, Range]]:
        """All of that on this rank, to be written to."""
        yield from self._exchanged(mine=False)

    def kept(self) -> Iterator[tuple[Kept, bool]]:
        """What it keeps beside, alike on every replica; and whether it is this rank's to write."""
        if isinstance(self._replicas.exchanges, Compressor):
            for kept in self._replicas.exchanges.kept():
                yield kept, self._grid.data.is_first and self._tells(self._named[kept.member.parameter])

    def others(self) -> Iterator[tuple[str, str, Tensor]]:
        """State of another shape than its parameter's (Adafactor's rows and columns): name, key, and all of it.

        Only an optimizer for whole tensors has any, and then every replica has it: the first one tells.
        """
        if isinstance(self._stepper, OneBitStepper):
            return
        if isinstance(self._stepper, WholeStepper) and self._grid.data.is_first:
            for parameter, master, *_ in self._stepper._views:
                named = self._named[parameter]
                for key, value in self._known(master).items() if self._tells(named) else ():
                    if isinstance(value, Tensor) and value.dim() and value.shape != master.shape:
                        yield named.layout.name, key, value

    def numbers(self) -> dict[str, dict[str, Any]]:
        """For each parameter the part of its state that is one number, 0-dim tensors too."""
        found: dict[str, dict[str, Any]] = {}
        for master, members in self._masters():
            state = self._known(master)
            scalars = {k: v for k, v in state.items() if not (isinstance(v, Tensor) and v.dim())}
            for name in members if scalars else ():
                found[name] = dict(scalars)
        return found

    def rooms(self, has: Callable[[str, str], torch.dtype | None], keys: Iterable[str]) -> Iterator[tuple[str, Range]]:
        """Where loaded state goes, made where it was not there yet.

        Args:
            has: the dtype of a parameter's state under a key; None: it is not loaded.
            keys: that it may have.
        """
        if isinstance(self._stepper, OneBitStepper):
            yield from ((key, Range(*piece)) for key, piece in onebit_held.rooms(self._stepper, has, keys))
            return
        for key in keys:
            if isinstance(self._stepper, WholeStepper):
                for parameter, master, *_ in self._stepper._views:
                    named = self._named[parameter]
                    if (dtype := has(named.layout.name, key)) is not None:
                        flat = _room(self._state(master), key, master, dtype).view(-1)
                        yield key, Range(*_title(named), 0, flat.numel(), flat)
                continue
            for bucket in self._trained():
                dtypes = [d for m in bucket.members if (d := has(m.layout.name, key)) is not None]
                if dtypes:
                    flat = self._bucket_room(bucket, key, dtypes[0])
                    for part in self._ranges(bucket, flat, bucket.owned[0], False):
                        if has(part.name, key) is not None:
                            yield key, part
                    bucket.memory.behind(flat)

    def forget(self) -> None:
        """Begin anew with the optimizer's state: what is loaded next takes its place."""
        optimizer = self._replicas.optimizer
        for master, _ in self._masters():
            assert optimizer is not None
            if isinstance(optimizer, torch.optim.Adagrad):  # its state is made with it, and never again
                for value in optimizer.state[master].values():
                    value.zero_()
            else:
                optimizer.state.pop(master, None)
        for bucket in self._trained():
            for room in self._stepper.rooms(bucket) if self._stepper is not None else ():
                room.zero_()
                bucket.memory.behind(room)

    def set_numbers(self, numbers: Mapping[str, Mapping[str, Any]]) -> list[str]:
        """Give the state its numbers, as ``numbers`` returned them.

        Returns:
            Parameters that share a bucket and had unlike numbers (or none), one of each: the largest is everybody's.
        """
        unlike = []
        optimizer = self._replicas.optimizer
        groups = [] if optimizer is None else optimizer.param_groups
        group_of = {id(master): group for group in groups for master in group["params"]}
        for master, members in self._masters():
            told = [numbers[name] for name in members if name in numbers]
            state = self._state(master) if told else {}
            if told and len(told) < len(members):
                unlike.append(next(name for name in members if name not in numbers))
            for key in dict.fromkeys(key for each in told for key in each):
                values = [each[key] for each in told if key in each]
                best = max(values, key=float) if isinstance(values[0], (int, float, Tensor)) else values[0]
                if any(value != best for value in values):
                    unlike.append(members[0])
                state[key] = _number(key, best, master, group_of.get(id(master), {}))
        return unlike

    def resume(self) -> None:
        """All of the state was loaded."""
        if isinstance(self._stepper, OneBitStepper):
            self._stepper.resume()

    def set_other(self, name: str, key: str, value: Tensor) -> bool:
        """Give an optimizer for whole tensors state of another shape than its parameter's; False: not held here."""
        if isinstance(self._stepper, WholeStepper):
            for parameter, master, *_ in self._stepper._views:
                if self._named[parameter].layout.name == name:
                    self._state(master)[key] = value.to(master.device)
                    return True
        return False

    def behind(self, tensor: Tensor) -> None:
        """A part of a value or of state is not needed for a while: what is kept on disk need not stay in memory."""
        self._replicas._memory.behind(tensor)

    @torch.no_grad()
    def settle(self) -> None:
        """The values were written: weights take them, on every replica. Collective over the data axis."""
        for bucket in self._trained():
            bucket.update()
            bucket.memory.behind(bucket.shard)
        self._replicas.changed()
        publish(self._trained(), self._replicas.mode.together)

    def _trained(self) -> list[Bucket]:
        return [bucket for bucket in self._replicas.buckets if bucket.trained]

    def _ranges(self, bucket: Bucket, flat: Tensor, first: int, mine: bool) -> Iterator[Range]:
        """The parts of a flat tensor that begins with element ``first`` of the bucket."""
        start, stop = bucket.flat.owned(self._grid.data.rank) if mine else (first, first + flat.numel())
        for slot, member in zip(bucket.flat.slots, bucket.members, strict=True):
            low, high = max(slot.start, start), min(slot.stop, stop)
            if (low < high or slot.start == slot.stop) and not (
                mine and not self._tells(self._named[member.parameter])
            ):
                view = flat[max(low - first, 0) : max(high - first, 0)]
                yield Range(member.layout.name, member.layout, low - slot.start, high - slot.start, view)

    def _exchanged(self, mine: bool) -> Iterator[tuple[str, Range]]:
        exchange = self._replicas.exchanges
        for key, flats in ({} if exchange is None else exchange.state()).items():
            for bucket, flat in zip(self._trained(), flats, strict=True):
                for part in self._ranges(bucket, flat, 0, False) if flat.numel() else ():
                    if not mine or self._tells(self._by_name[part.name]):
                        yield key, part

    def _share(self, named: Named, flat: Tensor) -> Iterator[Range]:
        """This replica's part of what every replica holds: whole rows of it."""
        if self._tells(named):
            axis, shape = self._grid.data, named.parameter.shape
            rows = shape[0] if shape else 1
            row = flat.numel() // max(rows, 1)
            start, stop = (rows * at // axis.size * row for at in (axis.rank, axis.rank + 1))
            yield Range(*_title(named), start, stop, flat[start:stop])

    def _tells(self, named: Named) -> bool:
        """Whether it is this rank of those that hold the same that writes it: alike for all of its replicas."""
        tensor = self._grid.tensor
        turn = named.layout.sharded or derive(named.layout.name) % tensor.size == tensor.rank
        return named.counted and turn

    def _masters(self) -> Iterator[tuple[Tensor, list[str]]]:
        """What the optimizer steps: each tensor, and the parameters in it."""
        if self._stepper is None:
            return
        if isinstance(self._stepper, WholeStepper):
            for parameter, master, *_ in self._stepper._views:
                yield master, [self._named[parameter].layout.name]
            return
        for bucket in self._trained():
            assert bucket.master is not None
            yield bucket.master, [member.layout.name for member in bucket.members]

    def _state(self, master: Tensor) -> dict[str, Any]:
        """An optimizer's state of one of its tensors, to be written to."""
        optimizer = self._replicas.optimizer
        state: dict[str, Any] = {} if optimizer is None else optimizer.state[master]
        return state

    def _known(self, master: Tensor) -> dict[str, Any]:
        """The same, to be read: nothing is made."""
        optimizer = self._replicas.optimizer
        return {} if optimizer is None else optimizer.state.get(master, {})

    def _flat(self, bucket: Bucket) -> dict[str, Tensor]:
        """The state of a bucket that has a number for each element."""
        assert bucket.master is not None
        shape = bucket.master.shape
        return {key: value for key, value in self._known(bucket.master).items() if _elements(value, shape)}

    def _bucket_room(self, bucket: Bucket, key: str, dtype: torch.dtype) -> Tensor:
        assert bucket.master is not None and self._stepper is not None
        state, groups = self._state(bucket.master), self._stepper._sub_groups
        if groups is None:
            return _room(state, key, bucket.master, dtype)
        rooms = groups.rooms[bucket]
        if key not in rooms:
            rooms[key] = bucket.memory.states.zeros(bucket.master.numel(), bucket.master.dtype)
        state[key] = rooms[key]
        return rooms[key]


def _home(bucket: Bucket) -> tuple[Tensor, int]:
    """Where a bucket's values are, and its element that they begin with."""
    if bucket.master is not None:
        return bucket.master.detach(), bucket.owned[0]
    return (bucket.shard, bucket.owned[0]) if bucket.gathered else (bucket.weights, 0)


def _number(key: str, value: Any, master: Tensor, group: Mapping[str, Any]) -> Any:
    """A number as an optimizer keeps it: torch's fused kernels, and captured ones, want steps where parameters are."""
    if not isinstance(value, Tensor):
        return value
    if key == "step" and (group.get("fused") or group.get("capturable")):
        return value.to(master.device, torch.float32, copy=True)
    return value.clone()


def _room(state: dict[str, Any], key: str, master: Tensor, dtype: torch.dtype) -> Tensor:
    room = state.get(key)
    if not _elements(room, master.shape):
        kind = master.dtype if dtype.is_floating_point else dtype
        room = state[key] = torch.zeros_like(master, dtype=kind, requires_grad=False)
    assert isinstance(room, Tensor)
    return room.detach()


def _elements(value: Any, shape: torch.Size) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0 and value.shape == shape


def _title(named: Named) -> tuple[str, Layout]:
    return named.layout.name, named.layout
