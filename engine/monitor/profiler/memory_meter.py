"""MemoryMeter: counts the bytes that a step allocates and that autograd saves."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from ....base.torch_private import TorchDispatchMode


class MemoryMeter(TorchDispatchMode):
    """Dispatch mode that counts the bytes of tensor storages allocated while it is active.

    Each storage counts once, from its allocation until it is freed.

    Args:
        elsewhere: returns the bytes of memory that is resized without a dispatched operation: the weights that stage 3
            of ZeRO gathers and releases.

    Attributes:
        live: bytes of the counted storages that are not freed yet.
        peak: the largest sum so far of ``live`` and the change of ``elsewhere``.
        saved: bytes that autograd holds now for the backward pass.
        activations: the largest value of ``saved`` so far.
    """

    def __init__(self, elsewhere: Callable[[], int]) -> None:
        super().__init__()
        self._elsewhere = elsewhere
        self._before = elsewhere()
        self._storages: dict[int, tuple[weakref.ref[Any], int, bool]] = {}  # id -> the storage, bytes, saved
        self.live = self.peak = self.saved = self.activations = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operation and count the storages that it made."""
        kwargs = kwargs or {}
        for tensor in _tensors((*args, *kwargs.values())):
            self._track(tensor, made=False)  # it existed before, so a view of it is not new
        result = func(*args, **kwargs)
        for tensor in _tensors((result,)):
            self._track(tensor, made=True)
        self.peak = max(self.peak, self.live + self._elsewhere() - self._before)
        return result

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Context in which allocated storages and tensors saved by autograd are counted."""
        with self, saved_tensors_hooks(self._save, lambda tensor: tensor):
            yield

    def _track(self, tensor: Tensor, made: bool) -> None:
        if tensor.layout != torch.strided:
            return
        storage = tensor.untyped_storage()
        if id(storage) not in self._storages:
            reference = weakref.ref(storage, partial(self._forget, id(storage)))
            size = storage.nbytes() if made else 0
            self._storages[id(storage)] = reference, size, False
            self.live += size

    def _save(self, tensor: Tensor) -> Tensor:
        if tensor.layout == torch.strided:
            self._track(tensor, made=False)
            key = id(tensor.untyped_storage())
            reference, size, saved = self._storages[key]
            if not saved:
                self._storages[key] = reference, size, True
                self.saved += size
                self.activations = max(self.activations, self.saved)
        return tensor

    def _forget(self, key: int, _: Any) -> None:
        _, size, saved = self._storages.pop(key)
        self.live -= size
        self.saved -= size if saved else 0


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    """Yield the tensors of an operation's arguments or results, which may be in lists."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)
