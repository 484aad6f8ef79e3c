"""Frame: one run of a recomputed group, with stand-ins for the tensors that its graph saves."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import _get_current_function_mode_stack

from ...grid import Grid
from ...grid.random import DropoutState
from ..backward import SplitBackward

CHECKPOINT = "torch.utils.checkpoint"

Slot = tuple[dict[str, Tensor | None], str, Tensor | None]  # a module's dict of buffers, a name, the buffer


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

    Attributes:
        name: the group's name.
        checkpoints: True if the group was seen to call ``torch.utils.checkpoint``.
    """

    def __init__(self, run_again: Callable[[], None], name: str, watches: bool = False) -> None:
        self._run_again, self.name = run_again, name
        self._watches, self.checkpoints = watches, False
        active = _get_current_function_mode_stack()
        self._split = next((mode for mode in active if isinstance(mode, SplitBackward)), None)
        self._values: list[weakref.ReferenceType[SavedValue]] = []
        self._kinds: list[tuple[torch.Size, torch.dtype]] = []

    @property
    def count(self) -> int:
        """Number of tensors that autograd has saved so far in this run."""
        return len(self._values)

    def hooks(self) -> AbstractContextManager[None]:
        """Return the context in which the group runs for the first time."""
        return saved_tensors_hooks(self._pack, _unpack)

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
                raise RuntimeError(self._differs(done, f"{tuple(tensor.shape)} {tensor.dtype}"))
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
            raise RuntimeError(self._differs(done, "missing"))

    @contextmanager
    def _split_as_before(self) -> Iterator[None]:
        """Split the backward of products as in the first run, except where a layer calls autograd itself.

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

    def _pack(self, tensor: Tensor) -> SavedValue:
        value = SavedValue(self)
        self._values.append(weakref.ref(value))
        self._kinds.append((tensor.shape, tensor.dtype))
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
            f"saves, number {place} was {was} and is {now}. A recomputed layer may depend on its input, on torch's "
            "generators and on triax's Dropout, and on nothing else that changes between the two runs"
        )


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


class State:
    """State of the first run, which the second run gets back: buffers, dropout keys, generators, autocast.

    Args:
        grid: grid whose ``device`` tells which random generators to restore.
        dropout: the keys of dropout.
        generators: restore the states of torch's random generators too.
        buffers: the group's buffers, which the first run may change.
        slots: the places of these buffers, where the first run may put others.
    """

    def __init__(
        self,
        grid: Grid,
        dropout: DropoutState,
        generators: bool,
        buffers: Sequence[Tensor],
        slots: Sequence[Slot] = (),
    ) -> None:
        self._slots = slots
        self._buffers = [(buffer, buffer.detach().clone()) for buffer in buffers]
        self._dropout, self._at = dropout, (dropout.step, dropout.samples)
        self._grid = grid
        self._generators = self._read_generators() if generators else None
        self._autocast = {kind: _autocast(kind) for kind in dict.fromkeys(("cpu", grid.device.type))}

    def keep_changed_buffers(self) -> None:
        """After the first run: keep the copies of the buffers that it changed, drop those of the others."""
        self._slots = [(owner, name, buffer) for owner, name, buffer in self._slots if owner.get(name) is not buffer]
        # (Compared by value: batch norm writes without raising the version counter.)
        self._buffers = [(buffer, seen) for buffer, seen in self._buffers if not torch.equal(buffer, seen)]

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Restore the state of the first run within the context, and the present state after it."""
        dropout = self._dropout
        before, (dropout.step, dropout.samples) = (dropout.step, dropout.samples), self._at
        now = self._read_generators() if self._generators else None
        values = [buffer.data for buffer, _ in self._buffers]
        replaced = [owner.get(name) for owner, name, _ in self._slots]
        try:
            for owner, name, buffer in self._slots:  # ``self.buffer = ...`` in a forward
                owner[name] = buffer
            for buffer, seen in self._buffers:  # in other memory: a buffer that autograd saved stays unchanged
                buffer.data = seen.clone()
            self._set_generators(self._generators)
            with ExitStack() as stack:
                for kind, (enabled, dtype) in self._autocast.items():
                    if _autocast(kind) != (enabled, dtype):
                        stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled))
                yield
        finally:
            dropout.step, dropout.samples = before
            self._set_generators(now)
            for (buffer, _), value in zip(self._buffers, values, strict=True):
                buffer.data = value
            for (owner, name, _), last in zip(self._slots, replaced, strict=True):
                owner[name] = last

    def _read_generators(self) -> tuple[Tensor, Tensor | None]:
        """Return the states of torch's generators: the CPU's, and the GPU's if there is one."""
        return torch.get_rng_state(), self._grid.random_state()

    def _set_generators(self, states: tuple[Tensor, Tensor | None] | None) -> None:
        if states is not None:
            torch.set_rng_state(states[0])
            if states[1] is not None:
                self._grid.set_random_state(states[1])


def _autocast(kind: str) -> tuple[bool, torch.dtype]:
    return torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
