"""Attention of a sequence whose tokens are spread over the context axis, for any module."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from ..base.autograd import cast, product_dtype
from ..base.uncompiled import uncompiled
from ..grid import Grid
from ..grid.comm.axis import Axis
from ..grid.ranges import split
from .block import Scores
from .documents import documents_of
from .gather_keys import gather_attention
from .mask import Mask
from .order import local_length
from .ring import ring_attention
from .sparsity import Sparsity
from .ulysses import ulysses_attention

_LARGEST_MASK = 2**24  # bytes; of longer rows the blocks that hold scores are computed, which takes more time

KINDS = ("ring", "ulysses", "gather")


@uncompiled
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    grid: Grid,
    kind: str = "ring",
    causal: bool = True,
    documents: Tensor | None = None,
    window: int | None = None,
    sparsity: Sparsity | None = None,
    scale: float | None = None,
    sinks: Tensor | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Softmax attention of this rank's tokens with all tokens of their sequences.

    Collective over the context axis, and so is its backward pass: every rank must call it, in the same order. On a grid
    with ``context=1`` it is plain attention.

    Args:
        q: queries (B, H, T_local, dim) of this rank's tokens, in the order of ``positions``.
        k: keys (B, K, T_local, dim); K divides H, and each key/value head is used by H / K query heads.
        v: values (B, K, T_local, width).
        grid: grid whose context axis holds the parts of the sequences.
        kind: ``ring`` (keys and values travel around the axis), ``ulysses`` (all-to-alls between shards of the sequence
            and of the heads) or ``gather`` (each rank gathers all keys and values). All give the same numbers.
        causal: a token attends to itself and to earlier tokens only.
        documents: document number of each token, integers (B, T), of the whole sequence on every rank; a token attends
            only within its document. If None, T is T_local times the size of the context axis: pass zeros if the
            sequence was padded.
        window: a token attends only to tokens at a distance below this number: if causal, to itself and to the
            ``window`` - 1 tokens before it.
        sparsity: block mask; blocks that it leaves out are not computed.
        scale: factor of the scores; None means dim ** -0.5.
        sinks: (H,), attention sinks (gpt-oss, Xiao et al. 2023, arXiv:2309.17453): for each head the score of one more
            key, which every query sees, and whose value is 0. So the weights of the tokens add up to less than 1. Its
            gradient is that of this rank's tokens. None: no sinks.
        softcap: cap c of the scores, which become c tanh(scores / c) before the mask (Gemma 2); None: no cap.

    Returns:
        (B, H, T_local, width). A token that may attend to nothing has the output 0, and so has padding, except on a
        grid with ``context=1``, where nothing is padded.

    Raises:
        ValueError: an argument has a wrong value or shape.
    """
    if documents is not None and grid.context.size > 1:
        _check_length(documents.shape[1], q.shape[2], grid.context.size, grid.tensor.size)
    heads = None
    if sparsity is not None and sparsity.different_layout_per_head:
        num_heads = q.shape[1] * grid.tensor.size if sparsity.num_heads is None else sparsity.num_heads
        heads = range(*split(num_heads, grid.tensor.size, grid.tensor.rank))
        if len(heads) != q.shape[1]:
            raise ValueError(
                f"q has {q.shape[1]} heads on this rank, but the tensor axis gives it {len(heads)} of {num_heads}. Set "
                "num_heads of the sparse attention to the number of heads of the whole layer."
            )
    return context_attention(
        q,
        k,
        v,
        axis=grid.context,
        kind=kind,
        causal=causal,
        documents=documents,
        window=window,
        sparsity=sparsity,
        heads=heads,
        scale=scale,
        sinks=sinks,
        softcap=softcap,
    )


def context_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    axis: Axis,
    kind: str = "ring",
    causal: bool = True,
    documents: Tensor | None = None,
    window: int | None = None,
    sparsity: Sparsity | None = None,
    heads: range | None = None,
    scale: float | None = None,
    sinks: Tensor | None = None,
    softcap: float | None = None,
) -> Tensor:
    """``attention`` over any axis.

    Args:
        axis: the axis that holds the parts of the sequences.
        heads: numbers of these heads in the whole layer, for ``sparsity`` with a layout per head; None: from 0 on.

    Other arguments, returns, raises: as for ``attention``.
    """
    length = q.shape[2] * axis.size if documents is None else documents.shape[1]
    _check(q, k, v, axis.size, kind, window, documents, sinks)
    dtype = product_dtype(q)
    q, k, v = cast(q, dtype), cast(k, dtype), cast(v, dtype)
    mask = Mask(length, causal, window if window is not None and window < length else None, documents_of(documents))
    if sparsity is not None:
        layout = sparsity.layout(length, range(q.shape[1]) if heads is None else heads)
        mask = replace(mask, layout=layout, block=sparsity.block)
    scores = Scores(1 / math.sqrt(q.shape[-1]) if scale is None else scale, softcap)  # exactly as torch
    if axis.size == 1:
        return _local_attention(q, k, v, mask, scores, sinks)
    if kind == "ring":
        return ring_attention(q, k, v, axis, mask, scores, sinks)
    if kind == "gather":
        return gather_attention(q, k, v, axis, mask, scores, sinks)

    def attend(q: Tensor, k: Tensor, v: Tensor, held: slice) -> Tensor:
        return _local_attention(q, k, v, _of_heads(mask, held), scores, _sinks_of(sinks, held))

    return ulysses_attention(q, k, v, axis, length, attend)


def _local_attention(q: Tensor, k: Tensor, v: Tensor, mask: Mask, scores: Scores, sinks: Tensor | None) -> Tensor:
    """Return the attention over whole sequences in the order of positions."""
    if mask.window is not None and mask.window >= mask.length:
        mask = replace(mask, window=None)
    if mask.documents is not None and mask.causal and mask.layout is None:

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return _local_attention(q, k, v, replace(mask, documents=None, length=q.shape[2]), scores, sinks)

        return mask.documents.attend(attend, q, k, v)
    documents, plain = mask.documents, sinks is None and scores.softcap is None
    if documents is not None and plain and replace(mask, documents=None).plain and documents.mask_size <= _LARGEST_MASK:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=documents.mask(q.device), scale=scores.scale)
    if mask.plain and plain:
        grouped = k.shape[1] != q.shape[1]
        return F.scaled_dot_product_attention(q, k, v, is_causal=mask.causal, scale=scores.scale, enable_gqa=grouped)
    return gather_attention(q, k, v, Axis("local", (0,), 0, None), mask, scores, sinks)


def _sinks_of(sinks: Tensor | None, heads: slice) -> Tensor | None:
    """Return the sinks of some heads; heads beyond the last, which are zeros, have the sink 0."""
    if sinks is None:
        return None
    return F.pad(sinks, (0, max(heads.stop - len(sinks), 0)))[heads]


def _of_heads(mask: Mask, heads: slice) -> Mask:
    """Return the mask of some heads; heads beyond the last have the layout of the last."""
    if mask.layout is None or mask.layout.shape[0] == 1:
        return mask
    numbers = torch.arange(heads.start, heads.stop).clamp(max=mask.layout.shape[0] - 1)
    return replace(mask, layout=mask.layout[numbers])


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    size: int,
    kind: str,
    window: int | None,
    documents: Tensor | None,
    sinks: Tensor | None,
) -> None:
    if kind not in KINDS:
        raise ValueError(f"the kind of attention is {kind!r}. Give one of {', '.join(KINDS)}.")
    batch, heads, local, dim = q.shape
    if k.shape[:3] != v.shape[:3] or (k.shape[0], k.shape[2], k.shape[3]) != (batch, local, dim):
        raise ValueError(
            f"q is {tuple(q.shape)}, k is {tuple(k.shape)} and v is {tuple(v.shape)}. Give (B, H, T, dim), (B, K, T, "
            "dim) and (B, K, T, width)."
        )
    if k.shape[1] == 0 or heads % k.shape[1]:
        raise ValueError(
            f"q has {heads} heads, and k and v have {k.shape[1]}. Give a number of heads of k and v that divides "
            f"{heads}, because each of them serves equally many heads of q."
        )
    if sinks is not None and sinks.shape != (heads,):
        raise ValueError(f"sinks are {tuple(sinks.shape)}, but q has {heads} heads. Give a sink for each head of q.")
    if window is not None and window < 1:
        raise ValueError(f"window={window}. Give at least 1, with which a token attends to itself, or None.")
    if size > 1 and local % 2:
        raise ValueError(
            f"each rank has {local} tokens, but in zigzag order it has two chunks of equal length. Take this rank's "
            "tokens with triax.context.shard, which pads them to an even number."
        )
    if documents is not None and (documents.shape[0] != batch or documents.shape[1] > local * size):
        raise ValueError(
            f"documents are {tuple(documents.shape)}, but {batch} rows of {local} tokens on each of {size} ranks are "
            f"({batch}, {local * size}). Give the document numbers of the whole sequences, without padding."
        )


def _check_length(length: int, local: int, size: int, tensor: int) -> None:
    """Check that ``local`` tokens on each rank can be the parts of a sequence of ``length`` tokens."""
    fits = [local_length(length, size), local_length(length, size, tensor)]
    if local not in fits:
        raise ValueError(
            f"documents have {length} tokens, of which each of {size} ranks holds {fits[0]}, but q has {local}. Give "
            "the document numbers of the whole sequence on every rank, and this rank's tokens as triax.context.shard "
            "cuts them."
        )
