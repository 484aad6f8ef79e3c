"""One run of a recomputed group: what its graph will need, and how to have that computed once more."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import _get_current_function_mode_stack

from ..grid import Grid
from ..grid.random import DropoutState
from .backward import SplitBackward


class _Enough(BaseException):
    """All that is needed was recomputed. (No Exception: a layer that catches those must not catch this.)"""


class _Value:
    """Stands in the graph for what autograd would have saved; the tensor is there once it was recomputed.

    The graph lets go of it when it needs it no more, and with the last one goes the frame.
    """

    __slots__ = ("__weakref__", "frame", "tensor")

    def __init__(self, frame: Frame) -> None:
        self.frame = frame
        self.tensor: Tensor | None = None


class Frame:
    """One run of a group: what its graph needs, in the order in which it was saved, and how to compute that again."""

    def __init__(self, again: Callable[[], None], name: str) -> None:
        self._again, self._name = again, name
        active = _get_current_function_mode_stack()
        self._split = next((mode for mode in active if isinstance(mode, SplitBackward)), None)
        self._values: list[weakref.ReferenceType[_Value]] = []
        self._kinds: list[tuple[torch.Size, torch.dtype]] = []

    @property
    def count(self) -> int:
        """How many tensors it stands for, so far."""
        return len(self._values)

    def hooks(self) -> AbstractContextManager[None]:
        """Within it the group runs for the first time."""
        return saved_tensors_hooks(self._pack, _unpack)

    def begin(self) -> None:
        """The backward pass comes to the output: run the group again, if anything in it needs that."""
        if any((value := reference()) is not None and value.tensor is None for reference in self._values):
            self.recompute()

    def recompute(self) -> None:
        """Run the group again.

        Raises:
            RuntimeError: it does not do what it did.
        """
        done = 0

        def pack(tensor: Tensor) -> Tensor:
            nonlocal done
            if (tensor.shape, tensor.dtype) != self._kinds[done]:
                raise RuntimeError(self._differs(done, tuple(tensor.shape), tensor.dtype))
            alias = tensor.detach()
            if (value := self._values[done]()) is not None:
                value.tensor = alias
            done += 1
            if done == len(self._values):
                raise _Enough
            return alias

        with suppress(_Enough), torch.enable_grad(), saved_tensors_hooks(pack, _same), self._splitting():
            self._again()
        if done < len(self._values):
            raise RuntimeError(self._differs(done, None, None))

    @contextmanager
    def _splitting(self) -> Iterator[None]:
        """Within it products are split as in the first run, and whole where a layer differentiates for itself.

        (torch.autograd.grad turns function modes off while it runs, and such a layer calls it in its first run.)
        """
        if self._split is None:
            yield
            return
        deferred = self._split.deferred
        collected, deferred.collects = deferred.collects, False
        try:
            with self._split:
                yield
        finally:
            deferred.collects = collected

    def _pack(self, tensor: Tensor) -> _Value:
        value = _Value(self)
        self._values.append(weakref.ref(value))
        self._kinds.append((tensor.shape, tensor.dtype))
        return value

    def _differs(self, place: int, shape: Any, dtype: Any) -> str:
        was = f"{tuple(self._kinds[place][0])} {self._kinds[place][1]}"
        now = "missing" if shape is None else f"{shape} {dtype}"
        return (
            f"{self._name} did something else when computed again: of the {len(self._values)} tensors that autograd "
            f"saves, number {place} was {was} and is {now}. What they do may depend on their input, on torch's "
            "generators and on triax's Dropout, and on nothing else that changes"
        )


def _unpack(value: _Value) -> Tensor:
    if value.tensor is None:
        value.frame.recompute()
    assert value.tensor is not None
    return value.tensor


def _same(tensor: Tensor) -> Tensor:
    return tensor


class State:
    """What a run depends on beside its input and weights, as it is now."""

    def __init__(self, grid: Grid, dropout: DropoutState, generators: bool, buffers: Sequence[Tensor]) -> None:
        self._buffers = [(buffer, buffer.detach().clone()) for buffer in buffers]
        self._dropout, self._at = dropout, (dropout.step, dropout.samples)
        device = grid.device
        self._device = None if device.type == "cpu" else device
        self._generators: tuple[Tensor, ...] = ()
        if generators:
            self._generators = _generators(self._device)
        self._autocast = {kind: _autocast(kind) for kind in dict.fromkeys(("cpu", device.type))}

    def over(self) -> None:
        """The first run is: keep what it saw of the buffers that it changed, and nothing of the others."""
        # (batch norm does not tell that it writes)
        self._buffers = [(buffer, seen) for buffer, seen in self._buffers if not torch.equal(buffer, seen)]

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Within it all is as it was, buffers that a run changes included; behind it, as it is now."""
        dropout = self._dropout
        before, (dropout.step, dropout.samples) = (dropout.step, dropout.samples), self._at
        now = _generators(self._device) if self._generators else ()
        values = [buffer.data for buffer, _ in self._buffers]
        try:
            for buffer, seen in self._buffers:  # in other memory: what autograd saves of it stays as it is
                buffer.data = seen.clone()
            _set_generators(self._generators, self._device)
            with ExitStack() as stack:
                for kind, (enabled, dtype) in self._autocast.items():
                    if _autocast(kind) != (enabled, dtype):
                        stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled))
                yield
        finally:
            dropout.step, dropout.samples = before
            _set_generators(now, self._device)
            for (buffer, _), value in zip(self._buffers, values, strict=True):
                buffer.data = value


def _autocast(kind: str) -> tuple[bool, torch.dtype]:
    return torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)


def _generators(device: torch.device | None) -> tuple[Tensor, ...]:
    """The states of torch's generators: the CPU's, and the device's."""
    states = [torch.get_rng_state()]
    if device is not None:
        states.append(torch.get_device_module(device).get_rng_state(device))
    return tuple(states)


def _set_generators(states: Sequence[Tensor], device: torch.device | None) -> None:
    if states:
        torch.set_rng_state(states[0])
    if len(states) > 1:
        assert device is not None
        torch.get_device_module(device).set_rng_state(states[1], device)
