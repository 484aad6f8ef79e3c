"""Self-attention, sharded by heads over the tensor axis: grouped queries, rotary positions, packed documents.

Query heads are sharded over the tensor-parallel ranks (Shoeybi et al. 2019, arXiv:1909.08053, section 3), unevenly if
the number of ranks does not divide the number of heads. With grouped queries (Ainslie et al. 2023, arXiv:2305.13245)
several query heads share one key/value head: ``head_groups.py`` has their projection. ``attention_options.py`` has the
options of a layer.

A call projects x to q, k and v, gives q and k their positions, attends, and projects back. What attends depends on the
state of the layer; the first row that holds:

| state | tokens whose positions count | computed by |
|---|---|---|
| a pipeline cuts sequences into slices | those of the slice | ``Slices.attend`` |
| generation has a KV cache | the new ones | ``cache.attend``, which calls ``attend`` |
| any rule but the causal one, or a context axis | this rank's part of the sequence | ``attend_in_parts`` |
| none of these | from 0 | ``attend``: torch's kernel |

With ``causal=False``, in encoders, a token attends to all tokens of its row, or of its document.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from ..context.context_attention import attention
from ..context.documents import positions_within
from ..context.slices import Slices
from ..grid import Grid
from ..grid.layout import Layout
from ..grid.randomness.random import Constant, Distribution, sharded_parameter
from ..grid.ranges import split
from ..tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear
from .attention_options import AttentionOptions, ScoreOptions
from .head_groups import HeadGroups, project_together
from .packed import token_positions
from .qk_norm import qk_norms
from .rope import Rope

_ZERO = Constant(0.0)


class _Way(NamedTuple):
    """A row of the table above: positions of the tokens, and what attends.

    Attributes:
        positions: (B or 1, T); None: 0 to T - 1.
        length: tokens of the whole row, on which some rotary positions depend.
        attend: called with q, k, v and ``others``; returns (B, heads, T, dim).
    """

    positions: Tensor | None
    length: int
    attend: Callable[..., Tensor]
    others: tuple[Tensor | None, ...] = ()


class ShardedAttention(nn.Module):
    """Attention over this rank's heads: what follows the projections to queries, keys and values.

    A subclass makes the projections: ``_project``, and the module ``out``.

    Args:
        heads: H, the number of query heads, at least the number of tensor-parallel ranks.
        options: options of positions, mask and scores.
        grid: grid whose tensor axis shards the heads.
        sequence_parallel: input and output are this rank's shards of the sequence.
        kind: how the ranks of the context axis compute attention: ``ring``, ``ulysses`` or ``gather``.

    Attributes:
        sinks: (H,), the scores of attention sinks, sharded by heads, with initial values 0; None without sinks.
        heads: number of query heads that this rank computes.
        groups: the key/value heads that they use.
        sparsity: block mask of sparse attention, or None; the engine's option ``sparse_attention`` sets it.
        cache: KV cache with the earlier keys and values and the positions of the new tokens during generation, else
            None.
        slices: keys and values of earlier slices, if a pipeline cuts sequences into slices, else None.
        recompute: if set, it is called as ``recompute(attend, q, k, v, ...)`` in place of ``attend(q, k, v, ...)``.

    Raises:
        ValueError: there are fewer heads than tensor-parallel ranks.
    """

    cache: Any = None
    slices: Slices | None = None
    recompute: Any = None
    out: nn.Module

    @property
    def refuses_slices(self) -> str | None:
        """Reason why the layer cannot run slices of sequences; None if it can."""
        if not self.options.causal:
            return "attends to later tokens too (causal=False)"
        if self.sparsity is not None:
            return "has sparse attention (<sparse_attention>), whose blocks slices would cut"
        return None

    @property
    def _plain(self) -> bool:
        """True if the options leave scores as they are, and a token sees all tokens, or itself and all earlier ones."""
        options = self.options
        return all(rule is None for rule in (options.window, options.chunk, options.softcap, self.sinks))

    @property
    def kv_heads(self) -> int:
        """Number of key/value heads that this rank computes."""
        return self.groups.count

    def __init__(
        self, heads: int, options: ScoreOptions, *, grid: Grid, sequence_parallel: bool = False, kind: str = "ring"
    ) -> None:
        super().__init__()
        self.grid, self.axis, self.sequence_parallel = grid, grid.tensor, sequence_parallel
        self.options, self.kind, self.sparsity = options, kind, options.sparsity
        start, stop = split(heads, self.axis.size, self.axis.rank)
        self.heads = stop - start  # this rank's
        self.groups = HeadGroups(heads, self.heads)
        layout = Layout((heads,), shard_dim=0)
        self.sinks = sharded_parameter(layout, _ZERO, self.axis.rank, self.axis.size) if options.sinks else None

    def forward(self, x: Tensor, documents: Tensor | None = None) -> Tensor:
        """Project x to q, k and v, attend and project the result back to width D.

        Args:
            x: the normalized residual stream, (B, T, D), or this rank's part of its tokens.
            documents: document number of each token, integers (B, T), for packed rows (see ``packed.py``). Every rank
                passes the numbers of the whole sequence.
        """
        q, k, v, *gate = self._project(x)  # (B, heads, T, dim), twice (B, kv_heads, T, dim)
        y = self._attended(q, k, v, documents)
        out: Tensor = self.out(y * gate[0].sigmoid() if gate else y)
        return out

    def _attended(self, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None = None) -> Tensor:
        """Give q and k their positions, and attend: (B, T, heads dim)."""
        way = self._way(q, documents)
        q, k = self._placed(q, k, way.positions, way.length)
        if self.recompute is not None and self.cache is None:
            y = self.recompute(way.attend, q, k, v, *way.others)
        else:
            y = way.attend(q, k, v, *way.others)
        return rearrange(y, "b heads t dim -> b t (heads dim)")

    def _way(self, q: Tensor, documents: Tensor | None) -> _Way:
        length = q.shape[2]
        positions: Tensor | None
        if self.slices is not None and self.slices.active:
            positions = self.slices.positions(documents, q.device)
            return _Way(positions, self.slices.length, self._attend_slice, (documents,))
        if self.cache is not None:
            return _Way(self.cache.positions, 0, partial(self.cache.attend, self))
        if documents is not None or self.grid.context.size > 1 or self.sparsity is not None or not self._plain:
            positions = token_positions(length, self.grid.context, documents, q.device)
            total = length * self.grid.context.size if documents is None else documents.shape[1]
            return _Way(positions, total, self.attend_in_parts, (documents,))
        return _Way(None, length, self.attend)

    def _placed(self, q: Tensor, k: Tensor, positions: Tensor | None, length: int) -> tuple[Tensor, Tensor]:
        """Return queries and keys with their positions; ``positions`` and ``length`` as for ``Rope``."""
        options = self.options
        if options.rope is not None:
            q, k = options.rope(q, k, positions, length)
        if options.l2_norm is not None:
            q, k = (F.rms_norm(x, x.shape[-1:], eps=options.l2_norm) for x in (q, k))
        if options.temperature is not None:
            at = torch.arange(q.shape[2], device=q.device)[None] if positions is None else positions
            factor, length = options.temperature
            wide = torch.promote_types(q.dtype, torch.float32)
            grown = 1 + factor * torch.log1p(((at + 1) // length).to(wide))
            q = q * grown[:, None, :, None].to(q.dtype)
        return q, k

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        """Softmax attention of this rank's heads.

        Args:
            q: (B, heads, T, dim).
            k, v: (B, kv_heads, S, dim). Each key/value head is paired here with the query heads that use it.
            mask: mask that is added to the scores, (B or 1, 1, T, S). If None, each token attends to itself and to
                earlier tokens, or with ``causal=False`` to all tokens, within ``window`` and ``chunk``.

        Returns:
            (B, heads, T, dim).
        """
        if mask is None and not self._plain:
            return self.attend_in_parts(q, k, v)
        k, v = self.groups.for_heads(1, k, v)
        if mask is not None and (self.options.softcap is not None or self.sinks is not None):
            return self._attend_plainly(q, k, v, mask)
        if k.shape[1] != q.shape[1] and mask is not None and q.device.type != "cpu":
            # Elsewhere than on a CPU no fused kernel takes both a mask and fewer heads of k and v.
            k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        grouped = k.shape[1] != q.shape[1]
        causal = mask is None and self.options.causal
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=causal, scale=self.options.scale, enable_gqa=grouped
        )

    def attend_in_parts(self, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None = None) -> Tensor:
        """``context.attention`` of this rank's heads.

        Args:
            q: (B, heads, T, dim), rotated.
            k, v: (B, kv_heads, T, dim).
            documents: (B, T_whole), of the whole sequence; None if T times the size of the context axis is its length.

        Returns:
            (B, heads, T, dim).
        """
        options = self.options
        k, v = self.groups.for_heads(1, k, v)
        documents = self._in_chunks(documents, q, q.shape[2] * self.grid.context.size)
        return attention(
            *(q, k, v),
            grid=self.grid,
            kind=self.kind,
            causal=options.causal,
            documents=documents,
            window=options.window,
            sparsity=self.sparsity,
            scale=options.scale,
            sinks=self.sinks,
            softcap=options.softcap,
        )

    def _attend_slice(self, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None) -> Tensor:
        """Attend to the tokens of this slice and of the earlier ones; arguments and result as for ``attend``."""
        assert self.slices is not None
        options = self.options
        k, v = self.groups.for_heads(1, k, v)
        documents = self._in_chunks(documents, q, self.slices.length)
        rules = (options.window, options.scale, self.sinks, options.softcap)
        return self.slices.attend(self, q, k, v, documents, *rules)

    def _attend_plainly(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        """Softmax attention of new tokens with capped scores or with sinks, as for ``attend``: (B, heads, T, dim)."""
        scale, softcap = self.options.scale, self.options.softcap
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        scores = q @ k.transpose(2, 3) * (q.shape[3] ** -0.5 if scale is None else scale)
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        scores = scores + mask  # (B, heads, T, S)
        if self.sinks is not None:
            scores = torch.cat([scores, self.sinks[:, None, None].expand(*scores.shape[:3], 1).to(scores.dtype)], -1)
        shares = scores.softmax(-1, torch.promote_types(q.dtype, torch.float32)).to(q.dtype)
        return shares[..., : k.shape[2]] @ v

    def _in_chunks(self, documents: Tensor | None, q: Tensor, length: int) -> Tensor | None:
        """Return the numbers of the chunks of each document, as documents of their own: integers (B, T_whole)."""
        chunk = self.options.chunk
        if chunk is None:
            return documents
        if documents is None:
            return (torch.arange(length, device=q.device) // chunk).expand(len(q), -1)
        begins = positions_within(documents) % chunk == 0
        return begins.cumsum(1)

    def _project(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return q (B, heads, T, dim), k and v (B, kv_heads, T, dim), not rotated, and any gate (B, T, heads dim)."""
        raise NotImplementedError


class SelfAttention(ShardedAttention):
    """Self-attention with the heads sharded over the tensor axis, causal unless the options say otherwise.

    Args:
        width: D, the width of the residual stream.
        heads: H, the number of query heads, at least the number of tensor-parallel ranks.
        options: options of the layer; None: their defaults.
        grid: grid whose tensor axis shards the heads.
        init: distribution of the initial weights of q, k and v.
        out_init: distribution of the initial weights of the output projection.
        sequence_parallel: input and output are this rank's shards of the sequence.
        kind: how the ranks of the context axis compute attention: ``ring``, ``ulysses`` or ``gather``.
        changes: single options by keyword, such as ``kv_heads=2``, in place of those of ``options``.

    Attributes, beside those of ``ShardedAttention``:
        qkv: fused projection without ``kv_heads``: (3 H dim, D), where q, k and v are each sharded by heads.
        q, kv: projections with ``kv_heads``: (H dim, D), sharded by heads, and (2 kv_heads dim, D), keys, then values.
        out: output projection, (D, H dim), sharded by heads.
        gate: projection to the gate, (H dim, D), sharded by heads, present only with ``output_gate``.
        q_norm, k_norm: norms of queries and keys, present only with ``qk_norm``. Their weight is (dim,) or, with
            ``norm_all_heads``, (H dim,) and (kv_heads dim,), sharded by heads; with ``norm_per_head``, (H, dim) and
            (kv_heads, dim).

    Shape:
        (B, T, D) -> (B, T, D), equal on every tensor-parallel rank. With a context axis T counts this rank's tokens.
        With ``sequence_parallel``: (B, T / t, D) -> (B, T / t, D).

    Raises:
        ValueError: there are fewer heads than tensor-parallel ranks, or ``kv_heads`` does not divide ``heads``.
    """

    options: AttentionOptions

    def __init__(
        self,
        width: int,
        heads: int,
        options: AttentionOptions | None = None,
        *,
        grid: Grid,
        init: Distribution,
        out_init: Distribution,
        sequence_parallel: bool = False,
        kind: str = "ring",
        **changes: Any,
    ) -> None:
        options = replace(options or AttentionOptions(), **changes)
        super().__init__(heads, options, grid=grid, sequence_parallel=sequence_parallel, kind=kind)
        self.head_dim = dim = options.head_dim or width // heads
        common: dict[str, Any] = {"grid": grid, "sequence_parallel": sequence_parallel}
        inward: dict[str, Any] = {**common, "bias": options.bias, "init": init, "bias_init": _ZERO}
        if options.kv_heads is None:
            self.qkv = ColumnParallelLinear(width, 3 * heads * dim, parts=(heads * dim,) * 3, unit=dim, **inward)
        else:
            self.groups = HeadGroups.on(grid.tensor, heads, options.kv_heads, "kv_heads")
            self.q = ColumnParallelLinear(width, heads * dim, unit=dim, **inward)
            self.kv = self.groups.projection(width, dim, **inward)
        if options.qk_norm is not None:
            self.q_norm, self.k_norm = qk_norms(options, heads, dim, self.groups, grid)
        if options.output_gate:
            self.gate = ColumnParallelLinear(width, heads * dim, unit=dim, **inward)
        outward: dict[str, Any] = {**common, "bias": options.out_bias, "init": out_init, "bias_init": _ZERO}
        self.out = RowParallelLinear(heads * dim, width, unit=dim, **outward)

    def _project(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return q (B, heads, T, dim), k and v (B, kv_heads, T, dim), normalized but not rotated, and any gate."""
        options, gates = self.options, [self.gate] if self.options.output_gate else []
        if options.kv_heads is None:
            q, k, v = self._by_heads(self.qkv(x), 3)
            gate = [layer(x) for layer in gates]
        else:
            layers = (self.q, self.kv, *gates)
            queries, pair, *gate = project_together(x, layers, self.axis, self.sequence_parallel)
            (q,), (k, v) = self._by_heads(queries, 1), self._by_heads(pair, 2)
        if options.qk_norm is not None and not options.norm_after:
            q, k = self.q_norm(q), self.k_norm(k)
        if options.clip is not None:
            q, k, v = (tensor.clamp(-options.clip, options.clip) for tensor in (q, k, v))
        return q, k, v, *gate

    def _placed(self, q: Tensor, k: Tensor, positions: Tensor | None, length: int) -> tuple[Tensor, Tensor]:
        q, k = super()._placed(q, k, positions, length)
        return (self.q_norm(q), self.k_norm(k)) if self.options.norm_after else (q, k)

    def _by_heads(self, y: Tensor, parts: int) -> tuple[Tensor, ...]:
        """Return the parts of a fused projection by heads: (B, T, parts x heads x dim) -> (B, heads, T, dim) each."""
        form = "b t (parts heads dim) -> parts b heads t dim"
        parts_by_heads: Tensor = rearrange(y, form, parts=parts, dim=self.head_dim)
        return parts_by_heads.unbind()


def joint_attention(layers: list[SelfAttention], streams: list[Tensor], rope: Rope, positions: Tensor) -> list[Tensor]:
    """Attend from the tokens of each stream to those of all streams; each stream has its layer's projections and norms.

    Args:
        layers: a layer for each stream, with the same heads, without rotary embedding. Options of scores are the
            first's.
        streams: (B, T_i, D), the normalized tokens of each stream.
        rope: rotary embedding, computed in fp32 at least.
        positions: positions of the tokens of all streams, as ``rope`` takes them.

    Returns:
        (B, T_i, D) for each stream.
    """
    q, k, v = (torch.cat(parts, 2) for parts in zip(*(layer._project(x) for layer, x in zip(layers, streams))))
    wide = torch.promote_types(q.dtype, torch.float32)
    q, k = (x.to(v.dtype) for x in rope(q.to(wide), k.to(wide), positions))
    parts = layers[0]._attended(q, k, v).split([x.shape[1] for x in streams], 1)
    return [layer.out(part) for layer, part in zip(layers, parts)]
