"""Frame: one run of a recomputed group, with stand-ins for the tensors that its graph saves."""

from __future__ import annotations

import math
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from ...base.autograd import running_again, saved_through
from ...base.torch_private import function_modes
from ...grid import Grid
from ...grid.randomness.random import DropoutState
from ..backward import SplitBackward
from .generators import generators_in, global_generators

CHECKPOINT = "torch.utils.checkpoint"

_LEAVE_OUT = (
    "leave it out of recomputation, by layers of triax.Recomputation (and no recompute of triax.ScheduleOptions)"
)
_COMPARED = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.bool)
_SAMPLE = 1024  # elements of each saved tensor that are compared
_MISSING: Any = object()  # in place of an item that a dict did not have
_OF_MODULES = frozenset(vars(nn.Module()))
_TRIAX = __name__.partition(".")[0]


class _AllRecomputed(BaseException):
    """Signal that ends the second run of a group when all saved tensors have been recomputed.

    It is not derived from ``Exception``, so that no layer catches it.
    """


class SavedValue:
    """Stand-in for a tensor that autograd saves. It holds the tensor when the group has run again.

    The graph drops it when it is no longer needed; with the last one the frame is freed.
    """

    __slots__ = ("__weakref__", "_version", "frame", "tensor")

    def __init__(self, frame: Frame) -> None:
        self.frame = frame
        self.tensor: Tensor | None = None
        self._version = 0

    def put(self, tensor: Tensor) -> None:
        """Hold the tensor."""
        self.tensor, self._version = tensor.detach(), tensor._version

    def take(self) -> Tensor:
        """Return the tensor.

        Raises:
            RuntimeError: it was changed in place since it was saved.
        """
        assert self.tensor is not None
        if self.tensor._version != self._version:
            raise RuntimeError(
                f"{self.frame.name} changes a tensor in place that its backward pass needs, of shape "
                f"{tuple(self.tensor.shape)}: change a copy of it instead, for instance x = x + 1 in place of x += 1"
            )
        return self.tensor


class Frame:
    """One run of a group: stand-ins for the saved tensors, in the order in which autograd saved them.

    Args:
        run_again: runs the group a second time.
        name: the group's name in messages.
        watches: find out whether the group calls ``torch.utils.checkpoint``. Until ``end_watch`` tensors are kept.
        compares: compare the values of both runs, in some elements of each saved tensor.

    Attributes:
        name: the group's name.
        checkpoints: True if the group was seen to call ``torch.utils.checkpoint``.
    """

    def __init__(self, run_again: Callable[[], None], name: str, watches: bool = False, compares: bool = False) -> None:
        self._run_again, self.name = run_again, name
        self._samples: list[Tensor | None] | None = [] if compares else None
        self._watches, self.checkpoints = watches, False
        active = function_modes()
        self._split = next((mode for mode in active if isinstance(mode, SplitBackward)), None)
        self._values: list[weakref.ReferenceType[SavedValue]] = []
        self._kinds: list[tuple[torch.Size, torch.dtype]] = []

    @property
    def count(self) -> int:
        """Number of tensors that autograd has saved so far in this run."""
        return len(self._values)

    def hooks(self) -> AbstractContextManager[None]:
        """Return the context in which the group runs for the first time."""
        return saved_through(self._pack, _unpack, f"recomputation of {self.name}", _LEAVE_OUT)

    def begin(self) -> None:
        """Run the group again, if a saved tensor is still missing. Called when backward reaches the output."""
        if any((value := reference()) is not None and value.tensor is None for reference in self._values):
            self.recompute()

    def recompute(self) -> None:
        """Run the group again.

        Raises:
            RuntimeError: the second run saves other tensors than the first run.
        """
        done = 0

        def pack(tensor: Tensor) -> Tensor:
            nonlocal done
            if (tensor.shape, tensor.dtype) != self._kinds[done]:
                raise RuntimeError(self._differs(done, f"is {tuple(tensor.shape)} {tensor.dtype}"))
            if self._samples is not None and not _is_near(self._samples[done], _sample(tensor)):
                raise RuntimeError(self._differs(done, "has other values"))
            if (value := self._values[done]()) is not None:
                value.put(tensor)
            done += 1
            if done == len(self._values):
                raise _AllRecomputed
            return tensor.detach()

        with (
            suppress(_AllRecomputed),
            torch.enable_grad(),
            saved_tensors_hooks(pack, lambda tensor: tensor),
            self._split_as_before(),
        ):
            self._run_again()
        if done < len(self._values):
            raise RuntimeError(self._differs(done, "is missing"))
        self._samples = None

    @contextmanager
    def _split_as_before(self) -> Iterator[None]:
        """Split the backward of products as in the first run, except where a layer calls autograd itself.

        (torch.autograd.grad turns function modes off while it runs, and such a layer calls it in its first run.)
        """
        if self._split is None:
            yield
            return
        deferred = self._split.deferred
        active, deferred.active = deferred.active, False
        try:
            with self._split:
                yield
        finally:
            deferred.active = active

    def _pack(self, tensor: Tensor) -> SavedValue:
        value = SavedValue(self)
        self._values.append(weakref.ref(value))
        self._kinds.append((tensor.shape, tensor.dtype))
        if self._samples is not None:
            self._samples.append(_sample(tensor))
        if self._watches:
            value.put(tensor)
            self.checkpoints = self.checkpoints or runs_within(CHECKPOINT)
        return value

    def end_watch(self) -> None:
        """Drop the tensors that were kept, unless the group checkpoints by itself: then it is not run again."""
        self._watches = False
        if not self.checkpoints:
            for reference in self._values:
                if (value := reference()) is not None:
                    value.tensor = None

    def _differs(self, place: int, now: str) -> str:
        was = f"{tuple(self._kinds[place][0])} {self._kinds[place][1]}"
        return (
            f"{self.name} did something else when computed again: of the {len(self._values)} tensors that autograd "
            f"saves, number {place} was {was} and {now}. A recomputed layer may depend on its input, buffers and "
            "attributes, and on random generators that are global (torch's, Python's, numpy's) or are its attributes, "
            "and on nothing else that changes between the two runs: make what changes an attribute of the layer, or "
            + _LEAVE_OUT
        )


def _sample(tensor: Tensor) -> Tensor | None:
    """Return some elements of a tensor, at equal distances; None for indices, and for a tensor that has no values."""
    if tensor.dtype not in _COMPARED or tensor.layout != torch.strided or tensor.is_meta:
        return None
    places = torch.linspace(0, tensor.numel() - 1, min(tensor.numel(), _SAMPLE), dtype=torch.float64)
    return tensor.detach().take(places.long().to(tensor.device))


def _is_near(first: Tensor | None, second: Tensor | None) -> bool:
    """Return True if two samples differ by no more than another order of sums, as of kernels on a GPU, explains."""
    if first is None or second is None:
        return True
    tolerance = math.sqrt(torch.finfo(first.dtype).eps) if first.is_floating_point() else 0.1
    first, second = first.double().nan_to_num(), second.double().nan_to_num()
    return bool((first - second).norm() <= tolerance * first.norm())


def _unpack(value: SavedValue) -> Tensor:
    if value.tensor is None:
        value.frame.recompute()
    return value.take()


def runs_within(*modules: str) -> bool:
    """Return True if a function of one of these modules is running around the caller."""
    frame = sys._getframe(1).f_back
    while frame is not None:
        if frame.f_globals.get("__name__") in modules:
            return True
        frame = frame.f_back
    return False


def has_own_state(module: nn.Module) -> bool:
    """Return True if a module's class is a user's, whose forward may set attributes; torch's and triax's do not."""
    return type(module).__module__.partition(".")[0] not in ("torch", _TRIAX)


class State:
    """State of the first run, which the second run gets back: modules' state, dropout keys, generators, autocast.

    The state of a module is its buffers and, if the class is a user's, its attributes: numbers, tensors, random
    generators, and the items of its lists and dicts.

    Args:
        grid: grid whose ``device`` tells which random generators to restore.
        dropout: the keys of dropout.
        generators: restore the states of random generators too: the global ones, and those of modules.
        parts: the group's modules that may change state.
    """

    def __init__(self, grid: Grid, dropout: DropoutState, generators: bool, parts: Sequence[nn.Module] = ()) -> None:
        dicts: list[dict[str, Any]] = []
        self._lists: list[tuple[list[Any], list[Any]]] = []  # (list, its items), as in the next two
        for module in parts:
            if module._buffers:
                dicts.append(module._buffers)
            if has_own_state(module):
                dicts.append(vars(module))
                for name, value in vars(module).items():
                    if isinstance(value, list):
                        self._lists.append((value, list(value)))
                    elif isinstance(value, dict) and name not in _OF_MODULES:
                        dicts.append(value)
        self._dicts = [(entries, dict(entries)) for entries in dicts]
        tensors = {id(value): value for _, seen in self._dicts for value in seen.values() if _may_change(value)}
        self._tensors = [(tensor, tensor.detach().clone()) for tensor in tensors.values()]
        self._dropout, self._at = dropout, (dropout.step, dropout.samples)
        held = [*(seen.values() for _, seen in self._dicts), *(items for _, items in self._lists)]
        self._generators = [*global_generators(grid), *generators_in(chain(*held))] if generators else []
        self._set_generators = [generator.saved() for generator in self._generators]
        self._autocast = {kind: _autocast(kind) for kind in dict.fromkeys(("cpu", grid.device.type))}

    def keep_changed(self) -> None:
        """After the first run: keep what it changed, as it was, and drop the rest."""
        self._lists = [(items, seen) for items, seen in self._lists if not _same(items, seen)]
        self._dicts = [
            (entries, changed)
            for entries, seen in self._dicts
            if (changed := {name: seen.get(name, _MISSING) for name in _changed(entries, seen)})
        ]
        # (Compared by value: batch norm writes without raising the version counter.)
        self._tensors = [(tensor, seen) for tensor, seen in self._tensors if not torch.equal(tensor, seen)]

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Restore the state of the first run within the context, and the present state after it."""
        dropout = self._dropout
        before, (dropout.step, dropout.samples) = (dropout.step, dropout.samples), self._at
        now = [generator.saved() for generator in self._generators]
        values = [tensor.data for tensor, _ in self._tensors]
        lists = [list(entry_list) for entry_list, _ in self._lists]
        dicts = [{name: entries.get(name, _MISSING) for name in seen} for entries, seen in self._dicts]
        try:
            for kept_list, items in self._lists:
                kept_list[:] = items
            for owner, seen in self._dicts:  # ``self.buffer = ...`` in a forward
                _put(owner, seen)
            for tensor, value in self._tensors:  # in other memory: a buffer that autograd saved stays unchanged
                tensor.data = value.clone()
            for write in self._set_generators:
                write()
            with ExitStack() as stack:
                stack.enter_context(running_again())
                for kind, (enabled, dtype) in self._autocast.items():
                    if _autocast(kind) != (enabled, dtype):
                        stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled))
                yield
        finally:
            dropout.step, dropout.samples = before
            for write in now:
                write()
            for (tensor, _), value in zip(self._tensors, values, strict=True):
                tensor.data = value
            for (owner, _), last in zip(self._dicts, dicts, strict=True):
                _put(owner, last)
            for (kept_list, _), items in zip(self._lists, lists, strict=True):
                kept_list[:] = items


def _autocast(kind: str) -> tuple[bool, torch.dtype]:
    return torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)


def _may_change(value: Any) -> bool:
    """Return True for a tensor whose values may be changed in place, and can be compared."""
    if not isinstance(value, Tensor) or isinstance(value, nn.Parameter):
        return False
    return value.layout == torch.strided and not (value.is_meta or value.is_nested)


def _same(values: Sequence[Any], others: Sequence[Any]) -> bool:
    return len(values) == len(others) and all(a is b for a, b in zip(values, others, strict=True))


def _changed(values: Mapping[str, Any], others: Mapping[str, Any]) -> list[str]:
    """Return the keys under which two dicts do not hold the same object."""
    return [key for key in values.keys() | others.keys() if values.get(key, _MISSING) is not others.get(key, _MISSING)]


def _put(owner: dict[str, Any], items: Mapping[str, Any]) -> None:
    """Set items of a dict; delete an item whose value is ``_MISSING``."""
    for key, value in items.items():
        if value is _MISSING:
            owner.pop(key, None)
        else:
            owner[key] = value
