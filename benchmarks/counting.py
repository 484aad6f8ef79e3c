"""Counting what a step does: the most memory that it has allocated at once, and the scores that its attention computes.

Both follow from the calls of torch's operators, so they are exact, and the same in every run.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default


class Counted(TorchDispatchMode):
    """Mode in which storages that are allocated, and scores of attention, are counted.

    Attributes:
        peak: the most bytes allocated in this mode that existed at once.
        scores: pairs of a query and a key for which the forward kernels computed a score.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = self.scores = self._present = 0
        self._known: dict[int, weakref.finalize[Any, Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator, and count."""
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        old = {storage._cdata for storage in _storages((args, kwargs))}
        for storage in _storages(out):
            key = storage._cdata
            if key not in old and key not in self._known:
                self._present += storage.nbytes()
                self._known[key] = weakref.finalize(storage, self._gone, key, storage.nbytes())
        self.peak = max(self.peak, self._present)
        if func is _ATTENTION:
            given = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | kwargs
            batch, heads, queries, _ = given["query"].shape
            keys = given["key"].shape[2]
            self.scores += batch * heads * (queries * (queries + 1) // 2 if given.get("is_causal") else queries * keys)
        return out

    def _gone(self, key: int, size: int) -> None:
        del self._known[key]
        self._present -= size


def counted(step: Callable[[], object]) -> Counted:
    """Run a step, and return what was counted."""
    with Counted() as counts:
        step()
    return counts


def _storages(tree: Any) -> Iterator[torch.UntypedStorage]:
    return (leaf.untyped_storage() for leaf in tree_leaves(tree) if type(leaf) in (Tensor, torch.nn.Parameter))
