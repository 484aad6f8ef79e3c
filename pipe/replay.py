"""Recomputation that keeps matrix products: they are most of a layer's time and, of what it makes, the smaller part."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_unflatten

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


class Matmuls:
    """What the matrix products of one run returned (attention's too), for the second run."""

    def __init__(self) -> None:
        self._made: list[tuple[Any, int, list[Any], Any, list[int]]] = []
        self._outputs: list[tuple[Any, list[Any], Any]] = []  # op, what it returned, tensors apart, and its structure
        self._saver: Tensor | None = None

    @contextmanager
    def kept(self, frame: Frame) -> Iterator[None]:
        """The first run is within.

        Raises:
            RuntimeError: one of the results was changed in place.
        """
        with _Record(self, frame):
            yield
        tensors: list[Tensor] = []
        for op, before, leaves, spec, versions in self._made:
            if before >= frame.count:
                break  # whoever runs again stops before it
            here = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
            if [tensor._version for tensor in here] != versions:
                raise RuntimeError(
                    f"a result of {op} was changed in place, so it cannot be kept for the second run: leave out "
                    "inplace=True (or recompute with granularity 'full')"
                )
            tensors += [tensor.detach() for tensor in here]
            self._outputs.append((op, [None if isinstance(leaf, Tensor) else (leaf,) for leaf in leaves], spec))
        self._made.clear()
        self._saver = save(tensors)

    @contextmanager
    def replayed(self) -> Iterator[None]:
        """The second run is within: what was kept is not computed."""
        assert self._saver is not None and self._saver.grad_fn is not None
        with _Replay(self._outputs, iter(self._saver.grad_fn.saved_tensors)):  # type: ignore[attr-defined]
            yield

    def made(self, op: Any, before: int, result: Any) -> None:
        """One product was computed, when so many tensors had been saved."""
        leaves, spec = tree_flatten(result)
        versions = [leaf._version for leaf in leaves if isinstance(leaf, Tensor)]
        self._made.append((op, before, leaves, spec, versions))


class _Record(TorchDispatchMode):
    def __init__(self, matmuls: Matmuls, frame: Frame) -> None:
        super().__init__()
        self._matmuls, self._frame = matmuls, frame

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = self._frame.count
        result = func(*args, **(kwargs or {}))
        if func in _KEPT:
            self._matmuls.made(func, before, result)
        return result


class _Replay(TorchDispatchMode):
    def __init__(self, outputs: list[tuple[Any, list[Any], Any]], tensors: Iterator[Tensor]) -> None:
        super().__init__()
        self._outputs, self._tensors = iter(outputs), tensors

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _KEPT:
            entry = next(self._outputs, None)
            if entry is not None:
                op, leaves, spec = entry
                if op is not func:
                    raise RuntimeError(f"a layer computed {func} again where it had computed {op}: it must do the same")
                return tree_unflatten([next(self._tensors).detach() if x is None else x[0] for x in leaves], spec)
        return func(*args, **(kwargs or {}))
