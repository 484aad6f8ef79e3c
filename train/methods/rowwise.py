"""Arithmetic in which a token's numbers do not depend on the other tokens that are computed with it, bit for bit.

A forward pass rounds otherwise for one new token with a KV cache than for a whole batch, because a product of matrices,
attention and vectorized functions add in an order that depends on the shapes. In the context ``exact_rows``

- a product of a matrix with the weights is computed row by row, so that each is a product of one shape;
- attention adds over keys of one length, padded behind the tokens that a query sees, query by query;
- activations get a number of elements that the vector units take whole.

The backward pass is computed as ever. Log-probabilities that were recorded in the context thus have the bits of those
that ``train_batch`` computes in it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ...base.torch_private import TorchDispatchMode, backward_task
from ...models.attention import ShardedAttention

if TYPE_CHECKING:
    from ...inference.engine import InferenceEngine

_aten = torch.ops.aten
_VECTORS = 64  # a multiple of the elements that a step of a CPU's vector units takes
_PIECE = 2**15  # elements that one thread takes at once


@contextmanager
def exact_rows(sampler: InferenceEngine) -> Iterator[None]:
    """Context in which the sampler and the engine that trains its model compute each token alone, bit for bit.

    Draw answers and take the first step on them in it: the ratios of that step are exactly 1. It is for tests and small
    models: a product of N rows reads the weights N times, and attention takes time and memory for
    ``sampler.max_length`` keys. ``Rollouts.largest_difference()`` is 0.0 after such a step, and says so if a layer of
    your own has another operation.

    Raises:
        ValueError: what it does not cover: a device other than a CPU, a context axis, more than 2 tensor-parallel
            ranks, layers with a sliding window, sparse attention or capped scores, or experts.
    """
    grid, modules = sampler.grid, list(sampler.module.modules())
    holders = [*modules, *(module.options for module in modules if isinstance(module, ShardedAttention))]
    has = lambda name: any(getattr(holder, name, None) is not None for holder in holders)  # noqa: E731
    found = {
        f"context={grid.context.size}, whose ranks add in another order": grid.context.size > 1,
        f"tensor={grid.tensor.size}, of which the order of sums depends on their size": grid.tensor.size > 2,
        f"the device {grid.device}": grid.device.type != "cpu",
        "layers with experts": has("experts"),
    }
    found |= {f"layers with a {name}": has(name) for name in ("window", "sparsity", "softcap")}
    if refused := [what for what, is_so in found.items() if is_so]:
        raise ValueError(f"exact_rows does not cover {'; '.join(refused)}. Leave the context out.")
    with _QueryByQuery(sampler.max_length), _RowProducts():
        yield


class _RowProducts(TorchDispatchMode):
    """Mode in which products are computed row by row, and activations in whole vectors, but in a backward pass."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if backward_task() != -1:  # the backward pass
            return func(*args, **kwargs)
        if func is _aten.mm.default:
            return torch.cat([func(row.clone(), args[1]) for row in args[0].split(1)])
        if func is _aten.addmm.default:
            bias, x, weight = args
            return torch.cat([func(bias, row.clone(), weight, **kwargs) for row in x.split(1)])
        if func in (_aten.silu.default, _aten.gelu.default, _aten.sigmoid.default):
            flat = args[0].flatten()
            padded = F.pad(flat, (0, -len(flat) % _VECTORS)).split(_PIECE)
            return torch.cat([func(piece, **kwargs) for piece in padded])[: len(flat)].view(args[0].shape)
        return func(*args, **kwargs)


class _QueryByQuery(TorchFunctionMode):
    """Mode in which attention is computed query by query, over keys of one length."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self._length = length

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            return self._attend(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """Return what ``scaled_dot_product_attention`` does; arguments as for it."""
        longer = (0, 0, 0, self._length - k.shape[2])
        k, v = (F.pad(each.repeat_interleave(q.shape[1] // each.shape[1], dim=1), longer) for each in (k, v))
        v = v.transpose(2, 3).contiguous()  # (B, heads, dim, length)
        places = torch.arange(self._length)
        rows = []
        for index, query in enumerate(q.unbind(2)):  # (B, heads, dim)
            scores = (query[:, :, None] * k).sum(-1) * (q.shape[3] ** -0.5 if scale is None else scale)
            if attn_mask is not None:
                mask = F.pad(attn_mask[:, :, index], (0, self._length - attn_mask.shape[3]), value=-torch.inf)
                scores = scores + mask
            if is_causal:
                scores = scores.masked_fill(places > index, -torch.inf)
            rows.append((scores.softmax(-1)[:, :, None] * v).sum(-1))
        return torch.stack(rows, 2)
