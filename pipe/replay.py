"""Recomputation that keeps matrix products: they are most of a layer's time and, of what it makes, the smaller part."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from .frame import Frame
from .saved import save

_ATEN = torch.ops.aten
# By name, as not every version and build has them all.
_NAMES = (
    "mm",
    "addmm",
    "_addmm_activation",
    "bmm",
    "baddbmm",
    "convolution",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
)
_KEPT = {getattr(_ATEN, name).default for name in _NAMES if hasattr(_ATEN, name)}


class _Product:
    """What one matrix product of the first run returned."""

    def __init__(self, op: Any, before: int, result: Any) -> None:
        self.op, self.before = op, before  # tensors that had been saved before it
        self.leaves, self.spec = tree_flatten(result)
        self.kept = True

    def tensors(self) -> list[Tensor]:
        return [leaf for leaf in self.leaves if isinstance(leaf, Tensor)]


class Matmuls:
    """What the matrix products of one run returned (attention's too), for the second run.

    What the run writes to afterwards (an activation in place) is not kept, but computed again.
    """

    def __init__(self) -> None:
        self._products: list[_Product] = []
        self._at: dict[int, _Product] = {}  # by where the memory of their tensors begins
        self._saver: Tensor | None = None
        self._records = True

    @contextmanager
    def kept(self, frame: Frame) -> Iterator[None]:
        """The first run is within."""
        with _Record(self, frame):
            yield
        # Whoever runs again stops before what came after the last tensor that was saved.
        self._products = [product for product in self._products if product.before < frame.count]
        tensors: list[Tensor] = []
        for product in self._products:
            if product.kept:
                tensors += [tensor.detach() for tensor in product.tensors()]
            product.leaves = [None if isinstance(leaf, Tensor) else (leaf,) for leaf in product.leaves]
        self._at.clear()
        self._saver = save(tensors)

    @contextmanager
    def replayed(self) -> Iterator[None]:
        """The second run is within: what was kept is not computed.

        A layer that differentiates something for itself has it before the first run is over: then all is computed.
        """
        if self._saver is None:
            self._records = False
            try:
                yield
            finally:
                self._records = True
            return
        tensors = self._saver.grad_fn.saved_tensors  # type: ignore[union-attr]
        with _Replay(iter(self._products), iter(tensors)):
            yield

    def made(self, op: Any, before: int, result: Any) -> None:
        """A product was computed, when so many tensors had been saved."""
        if self._records:
            product = _Product(op, before, result)
            self._products.append(product)
            for tensor in product.tensors():
                self._at[tensor.untyped_storage().data_ptr()] = product

    def wrote(self, values: Any) -> None:
        """Something was written to these tensors."""
        for value in tree_leaves(values):
            if isinstance(value, Tensor) and (found := self._at.get(value.untyped_storage().data_ptr())) is not None:
                found.kept = False


class _Record(TorchDispatchMode):
    def __init__(self, matmuls: Matmuls, frame: Frame) -> None:
        super().__init__()
        self._matmuls, self._frame = matmuls, frame

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before, kwargs = self._frame.count, kwargs or {}
        result = func(*args, **kwargs)
        if func in _KEPT:
            self._matmuls.made(func, before, result)
        elif func.namespace == "c10d":
            self._matmuls.wrote((args, kwargs))
        elif (places := _written(func)) is not None:
            self._matmuls.wrote([args[i] if i < len(args) else kwargs.get(name) for i, name in places])
        return result


@cache
def _written(func: Any) -> list[tuple[int, str]] | None:
    """The arguments that an op writes to; None if there are none."""
    if not func._schema.is_mutable:
        return None
    arguments = enumerate(func._schema.arguments)
    return [(i, a.name) for i, a in arguments if a.alias_info is not None and a.alias_info.is_write]


class _Replay(TorchDispatchMode):
    def __init__(self, products: Iterator[_Product], tensors: Iterator[Tensor]) -> None:
        super().__init__()
        self._products, self._tensors = products, tensors

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _KEPT and (product := next(self._products, None)) is not None:
            if product.op is not func:
                was, now = product.op, func
                raise RuntimeError(f"a layer computed {now} again where it had computed {was}: it must do the same")
            if product.kept:
                leaves = [next(self._tensors).detach() if leaf is None else leaf[0] for leaf in product.leaves]
                return tree_unflatten(leaves, product.spec)
        return func(*args, **(kwargs or {}))
