"""Recomputation that keeps matmul outputs: most of a layer's compute, little of its memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ...base.torch_private import TorchDispatchMode, tree_flatten, tree_leaves, tree_unflatten
from .frame import Frame
from .kept_inputs import save_for_backward

_ATEN = torch.ops.aten
# By name: not every version and build of torch has all of them.
_NAMES = (
    "mm",
    "addmm",
    "_addmm_activation",
    "bmm",
    "baddbmm",
    "_grouped_mm",
    "convolution",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
)
_KEPT = {getattr(_ATEN, name).default for name in _NAMES if hasattr(_ATEN, name)}


class _Product:
    """Result of one matrix product of the first run.

    Attributes:
        op: torch's op that computed it, e.g. ``aten.mm.default``.
        before: number of tensors that autograd had saved before the op ran.
        leaves, spec: the result, flattened.
        kept: False if the result was overwritten, so that it must be computed again.
    """

    def __init__(self, op: Any, before: int, result: Any) -> None:
        self.op, self.before = op, before
        self.leaves, self.spec = tree_flatten(result)
        self.kept = True

    def tensors(self) -> list[Tensor]:
        return [leaf for leaf in self.leaves if isinstance(leaf, Tensor)]


class Matmuls:
    """Results of the matrix products (and of attention) in one run, for use in the second run.

    A result that the run writes to afterwards (by an activation in place) is not kept, but computed again.
    """

    def __init__(self) -> None:
        self._products: list[_Product] = []
        self._by_memory: dict[int, _Product] = {}  # data_ptr of a result's storage -> the product
        self._saver: Tensor | None = None
        self._records = True

    @contextmanager
    def recorded(self, frame: Frame) -> Iterator[None]:
        """Record the products of the first run, which happens within the context."""
        with _Record(self, frame):
            yield
        # The second run stops at the last saved tensor, so products after it are not needed.
        self._products = [product for product in self._products if product.before < frame.count]
        tensors: list[Tensor] = []
        for product in self._products:
            if product.kept:
                tensors += [tensor.detach() for tensor in product.tensors()]
            product.leaves = [None if isinstance(leaf, Tensor) else (leaf,) for leaf in product.leaves]
        self._by_memory.clear()
        self._saver = save_for_backward(tensors)

    @contextmanager
    def replayed(self) -> Iterator[None]:
        """Return recorded results instead of computing them in the second run, which happens within the context.

        If a layer calls autograd itself, its second run comes before the first has ended: then all is computed.
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

    def add(self, op: Any, before: int, result: Any) -> None:
        """Record a product, computed when autograd had saved ``before`` tensors."""
        if self._records:
            product = _Product(op, before, result)
            self._products.append(product)
            for tensor in product.tensors():
                self._by_memory[tensor.untyped_storage().data_ptr()] = product

    def written(self, values: Any) -> None:
        """Mark the results in these tensors as overwritten."""
        for value in tree_leaves(values):
            if (
                isinstance(value, Tensor)
                and (kept_value := self._by_memory.get(value.untyped_storage().data_ptr())) is not None
            ):
                kept_value.kept = False


class _Record(TorchDispatchMode):
    """Dispatch mode of the first run that records the matrix products' results and detects writes to them."""

    def __init__(self, matmuls: Matmuls, frame: Frame) -> None:
        super().__init__()
        self._matmuls, self._frame = matmuls, frame

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before, kwargs = self._frame.count, kwargs or {}
        result = func(*args, **kwargs)
        if func in _KEPT:
            self._matmuls.add(func, before, result)
        elif func.namespace == "c10d":
            self._matmuls.written((args, kwargs))
        elif (places := _written_arguments(func)) is not None:
            self._matmuls.written([args[i] if i < len(args) else kwargs.get(name) for i, name in places])
        return result


@cache
def _written_arguments(func: Any) -> list[tuple[int, str]] | None:
    """Return the arguments that an op writes to, as (position, name); None if there are none."""
    if not func._schema.is_mutable:
        return None
    arguments = enumerate(func._schema.arguments)
    return [(i, a.name) for i, a in arguments if a.alias_info is not None and a.alias_info.is_write]


class _Replay(TorchDispatchMode):
    """Dispatch mode of the second run that returns the recorded results instead of computing matrix products."""

    def __init__(self, products: Iterator[_Product], tensors: Iterator[Tensor]) -> None:
        super().__init__()
        self._products, self._tensors = products, tensors

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _KEPT and (product := next(self._products, None)) is not None:
            if product.op is not func:
                was, now = product.op, func
                raise RuntimeError(
                    f"a recomputed layer ran {now} where its first run had {was}: both runs must do the same"
                )
            if product.kept:
                leaves = [next(self._tensors).detach() if leaf is None else leaf[0] for leaf in product.leaves]
                return tree_unflatten(leaves, product.spec)
        return func(*args, **(kwargs or {}))
