"""Counting what a step adds to a rank's memory while it runs: only when asked for, so that a step pays nothing."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Meter(TorchDispatchMode):
    """Counts the bytes of storages that are made within it, each once and until nothing refers to it.

    Args:
        elsewhere: bytes of memory that comes and goes without an operation: weights that stage 3 gathers.

    Attributes:
        live: bytes made here that are still there; ``peak`` the most at any time.
        saved: of these, bytes that autograd saved for a backward pass; ``activations`` the most at any time.
    """

    def __init__(self, elsewhere: Callable[[], int]) -> None:
        super().__init__()
        self._elsewhere = elsewhere
        self._before = elsewhere()
        self._storages: dict[int, tuple[weakref.ref[Any], int, bool]] = {}  # its wrapper's id -> it, bytes, saved
        self.live = self.peak = self.saved = self.activations = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operation and see what it made."""
        for value in tree_leaves((args, kwargs)):
            if isinstance(value, Tensor):
                self._meet(value, made=False)  # it was here before, and its views are not new
        result = func(*args, **(kwargs or {}))
        for value in tree_leaves(result):
            if isinstance(value, Tensor):
                self._meet(value, made=True)
        self.peak = max(self.peak, self.live + self._elsewhere() - self._before)
        return result

    @contextmanager
    def counting(self) -> Iterator[None]:
        """What runs within it is counted."""
        with self, saved_tensors_hooks(self._save, lambda tensor: tensor):
            yield

    def _meet(self, tensor: Tensor, made: bool) -> None:
        if tensor.layout != torch.strided:
            return
        storage = tensor.untyped_storage()
        if id(storage) not in self._storages:
            gone = weakref.ref(storage, partial(self._gone, id(storage)))
            size = storage.nbytes() if made else 0
            self._storages[id(storage)] = gone, size, False
            self.live += size

    def _save(self, tensor: Tensor) -> Tensor:
        if tensor.layout == torch.strided:
            self._meet(tensor, made=False)
            key = id(tensor.untyped_storage())
            reference, size, saved = self._storages[key]
            if not saved:
                self._storages[key] = reference, size, True
                self.saved += size
                self.activations = max(self.activations, self.saved)
        return tensor

    def _gone(self, key: int, _: Any) -> None:
        _, size, saved = self._storages.pop(key)
        self.live -= size
        self.saved -= size if saved else 0
