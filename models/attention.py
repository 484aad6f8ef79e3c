"""Causal self-attention, sharded by heads over the tensor axis: grouped queries, rotary positions, packed documents.

On a grid with a context axis each rank has a part of the tokens (``context/order.py``), and ``context.attention``
computes what they see of the whole sequence.

Query heads are sharded over the tensor-parallel ranks (Shoeybi et al. 2019, arXiv:1909.08053, section 3), unevenly if
the number of ranks does not divide the number of heads. With grouped queries (Ainslie et al. 2023, arXiv:2305.13245)
several query heads share one key/value head. If the number of ranks divides the number of key/value heads, these are
sharded too. Otherwise the key/value weights are replicated on every rank: each rank computes only the key/value heads
that its query heads use, and the gradients of the replicated weights are summed over the tensor axis.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from ..context.context_attention import attention
from ..context.slices import Slices
from ..context.sparsity import Sparsity
from ..grid import Grid
from ..grid.layout import Layout
from ..grid.randomness.random import Constant, Distribution, sharded_parameter
from ..grid.ranges import split
from ..tensor_parallel.column import column_linears
from ..tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear, updated
from ..tensor_parallel.norm import RMSNorm, sharded_rms_norm
from .alibi import Alibi
from .packed import packing, positions_within, token_positions
from .rope import Rope

_ZERO = Constant(0.0)


class CausalAttention(nn.Module):
    """Causal attention over this rank's heads: what follows the projections to queries, keys and values.

    A subclass makes the projections: ``_project``, and the module ``out``.

    Args:
        heads: H, the number of query heads, at least the number of tensor-parallel ranks.
        grid: grid whose tensor axis shards the heads.
        rope: rotary embedding of queries and keys, or ``Alibi``, which needs ``scale``; or None.
        sequence_parallel: input and output are this rank's shards of the sequence.
        kind, window, sparsity: as for ``SelfAttention``.
        scale: factor of the scores; None: dim ** -0.5, of the width of a query.
        softcap: cap c of the scores, which become c tanh(scores / c); None: no cap.
        sinks: have attention sinks: for each head one more score, which takes a part of the softmax, and adds nothing
            to the output (gpt-oss).
        chunk: a token attends only to the tokens before it in its chunk of this many tokens; None: no chunks.
        l2_norm: epsilon of an RMSNorm without a weight over each head of q and of k, behind ``rope``; None: no norm.
        temperature: (a, n): the queries at position p are multiplied by 1 + a ln(1 + floor((p + 1) / n)); None: by 1.

    Attributes:
        sinks: (H,), these scores, sharded by heads, with initial values 0; None without sinks.
        cache, heads, kv_heads, recompute: as for ``SelfAttention``.
        slices: keys and values of earlier slices, if a pipeline cuts sequences into slices, else None.
    """

    cache: Any = None
    slices: Slices | None = None
    recompute: Any = None
    out: nn.Module

    @property
    def refuses_slices(self) -> str | None:
        """Reason why the layer cannot run slices of sequences; None if it can."""
        if self.sparsity is not None:
            return "has sparse attention (<sparse_attention>), whose blocks slices would cut"
        return None

    def __init__(
        self,
        heads: int,
        *,
        grid: Grid,
        rope: Rope | Alibi | None,
        sequence_parallel: bool,
        kind: str,
        window: int | None,
        sparsity: Sparsity | None = None,
        scale: float | None = None,
        softcap: float | None = None,
        sinks: bool = False,
        chunk: int | None = None,
        l2_norm: float | None = None,
        temperature: tuple[float, int] | None = None,
    ) -> None:
        super().__init__()
        if softcap is not None and (grid.context.size > 1 or sparsity is not None):
            raise ValueError(
                f"softcap={softcap} caps attention scores, which a context axis (context={grid.context.size}) and "
                "sparse attention do not support. Use a grid with context=1, without sparse attention."
            )
        self.grid, self.axis, self.sequence_parallel = grid, grid.tensor, sequence_parallel
        self.kind, self.window, self.sparsity, self.scale, self.softcap = kind, window, sparsity, scale, softcap
        self.rope, self.chunk, self.l2_norm, self.temperature = rope, chunk, l2_norm, temperature
        start, stop = split(heads, self.axis.size, self.axis.rank)
        self.heads = self.kv_heads = stop - start  # this rank's
        layout = Layout((heads,), shard_dim=0)
        self.sinks = sharded_parameter(layout, _ZERO, self.axis.rank, self.axis.size) if sinks else None
        self._looks_at: list[int] | None = None  # for each query head the head of k and v, where that is irregular

    def forward(self, x: Tensor, documents: Tensor | None = None) -> Tensor:
        """Project x to q, k and v, attend causally and project the result back to width D.

        Args:
            x: the normalized residual stream, of the shape in the class's docstring.
            documents: document number of each token, integers (B, T), for packed rows (see ``packed.py``). Every rank
                passes the numbers of the whole sequence.
        """
        parts = any(each is not None for each in (self.window, self.chunk, self.sparsity, self.sinks))
        q, k, v, *gate = self._project(x)  # (B, heads, T, dim), twice (B, kv_heads, T, dim)
        if self.slices is not None and self.slices.active:
            return self._project_out(self._attend_slice(self.slices, q, k, v, documents), *gate)
        if self.cache is None and (parts or self.grid.context.size > 1):
            return self._project_out(self._attend_by_blocks(q, k, v, documents), *gate)
        packed = packing(documents, q.dtype) if documents is not None and self.cache is None else None
        positions = packed.positions if packed is not None else None
        if self.cache is None:
            q, k = self._placed(q, k, positions, q.shape[2])
        else:
            q, k = self._placed(q, k, self.cache.positions, 0)
        mask = packed.mask if packed is not None else None
        if self.cache is not None:
            y = self.cache.attend(self, q, k, v)
        elif self.recompute is not None:
            y = self.recompute(self.attend, q, k, v, mask)
        else:
            y = self.attend(q, k, v, mask)
        return self._project_out(y, *gate)

    def _attend_by_blocks(self, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None) -> Tensor:
        """Attend over the context axis, or with a window or a block mask; arguments and result as for ``attend``."""
        length = q.shape[2] * self.grid.context.size if documents is None else documents.shape[1]
        q, k = self._placed(q, k, token_positions(q.shape[2], self.grid.context, documents, q.device), length)
        if self.recompute is not None:
            y: Tensor = self.recompute(self.attend_in_parts, q, k, v, documents)
            return y
        return self.attend_in_parts(q, k, v, documents)

    def _attend_slice(self, slices: Slices, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None) -> Tensor:
        """Attend to the tokens of this slice and of the earlier ones; arguments and result as for ``attend``."""
        q, k = self._placed(q, k, slices.positions(documents, q.device), slices.length)
        k, v = self._of_own_heads(k, v)
        documents = self._in_chunks(documents, len(q), slices.length)
        others = documents, self.window, self.scale, self.sinks, self.softcap
        if self.recompute is not None:
            y: Tensor = self.recompute(slices.attend, self, q, k, v, *others)
            return y
        return slices.attend(self, q, k, v, *others)

    def _placed(self, q: Tensor, k: Tensor, positions: Tensor | None, length: int) -> tuple[Tensor, Tensor]:
        """Return queries and keys with their positions; ``positions`` and ``length`` as for ``Rope``."""
        if self.rope is not None:
            q, k = self.rope(q, k, positions, length)
        if self.l2_norm is not None:
            q, k = (F.rms_norm(x, x.shape[-1:], eps=self.l2_norm) for x in (q, k))
        if self.temperature is not None:
            at = torch.arange(q.shape[2], device=q.device)[None] if positions is None else positions
            factor, length = self.temperature
            wide = torch.promote_types(q.dtype, torch.float32)
            grown = 1 + factor * torch.log1p(((at + 1) // length).to(wide))
            q = q * grown[:, None, :, None].to(q.dtype)
        return q, k

    def _in_chunks(self, documents: Tensor | None, rows: int, length: int) -> Tensor | None:
        """Return the numbers of the chunks of each document, as documents of their own: integers (B, T_whole)."""
        if self.chunk is None:
            return documents
        if documents is None:
            return (torch.arange(length) // self.chunk).expand(rows, -1)
        begins = positions_within(documents) % self.chunk == 0
        return begins.cumsum(1)

    def attend_in_parts(self, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None = None) -> Tensor:
        """``context.attention`` of this rank's heads.

        Args:
            q: (B, heads, T, dim), rotated.
            k, v: (B, kv_heads, T, dim).
            documents: (B, T_whole), of the whole sequence; None if T times the size of the context axis is its length.

        Returns:
            (B, heads, T, dim).
        """
        k, v = self._of_own_heads(k, v)
        documents = self._in_chunks(documents, len(q), q.shape[2] * self.grid.context.size)
        if self.softcap is not None:
            return self._attend_plainly(q, k, v, _mask(q, self.window, documents))
        return attention(
            *(q, k, v),
            grid=self.grid,
            kind=self.kind,
            documents=documents,
            window=self.window,
            sparsity=self.sparsity,
            scale=self.scale,
            sinks=self.sinks,
        )

    def _project_out(self, y: Tensor, gate: Tensor | None = None) -> Tensor:
        y = rearrange(y, "b heads t dim -> b t (heads dim)")
        out: Tensor = self.out(y if gate is None else y * gate.sigmoid())
        return out

    def _of_own_heads(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Return a key/value head for each query head where they are shared irregularly, else k and v."""
        if self._looks_at is None:
            return k, v
        index = torch.tensor(self._looks_at, device=k.device)
        return k.index_select(1, index), v.index_select(1, index)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        """Softmax attention of this rank's heads.

        Args:
            q: (B, heads, T, dim).
            k, v: (B, kv_heads, S, dim). Each key/value head is paired here with the query heads that use it.
            mask: mask that is added to the scores, (B or 1, 1, T, S). If None, the mask is causal, so that each token
                attends to itself and to earlier tokens.

        Returns:
            (B, heads, T, dim).
        """
        plain = self.softcap is not None or self.sinks is not None
        if mask is None and (plain or self.window is not None or self.chunk is not None):  # prefill
            return self.attend_in_parts(q, k, v)
        k, v = self._of_own_heads(k, v)
        if plain and mask is not None:
            return self._attend_plainly(q, k, v, mask)
        if k.shape[1] != q.shape[1] and mask is not None and q.device.type != "cpu":
            # Elsewhere than on a CPU no fused kernel takes both a mask and fewer heads of k and v.
            k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=self.scale, enable_gqa=k.shape[1] != q.shape[1]
        )

    def _attend_plainly(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        """Softmax attention with capped scores or with sinks, as for ``attend``: (B, heads, T, dim)."""
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        scores = q @ k.transpose(2, 3) * (q.shape[3] ** -0.5 if self.scale is None else self.scale)
        if self.softcap is not None:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        scores = scores + mask  # (B, heads, T, S)
        if self.sinks is not None:
            scores = torch.cat([scores, self.sinks[:, None, None].expand(*scores.shape[:3], 1).to(scores.dtype)], -1)
        shares = scores.softmax(-1, torch.promote_types(q.dtype, torch.float32)).to(q.dtype)
        return shares[..., : k.shape[2]] @ v

    def _project(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return q (B, heads, T, dim), k and v (B, kv_heads, T, dim), not rotated, and any gate (B, T, heads dim)."""
        raise NotImplementedError


def _mask(q: Tensor, window: int | None, documents: Tensor | None) -> Tensor:
    """Return the mask to add to the scores of queries (B, heads, T, dim) and T keys: (B or 1, 1, T, T)."""
    place = torch.arange(q.shape[2], device=q.device)
    ahead = place - place[:, None]
    unseen = (ahead > 0 if window is None else (ahead > 0) | (ahead <= -window))[None]
    if documents is not None:
        unseen = unseen | (documents[:, :, None] != documents[:, None])
    return torch.zeros(unseen.shape, dtype=q.dtype, device=q.device).masked_fill_(unseen, -torch.inf)[:, None]


class SelfAttention(CausalAttention):
    """Causal self-attention with the heads sharded over the tensor axis.

    Args:
        width: D, the width of the residual stream.
        heads: H, the number of query heads, at least the number of tensor-parallel ranks.
        grid: grid whose tensor axis shards the heads.
        head_dim: width of each head; 0 means ``width / heads``.
        kv_heads: number of key/value heads, which must divide ``heads``. If None, it equals ``heads``, and q, k and v
            are one fused weight.
        rope: rotary embedding of queries and keys, or ``Alibi``, which needs ``scale``. If None, the positions must
            already be added to x.
        bias: add biases to q, k and v, with initial value 0.
        out_bias: add a bias to the output projection.
        qk_norm: epsilon of an RMSNorm over each head of q and of k, before ``rope``. If None, there is no norm.
        norm_all_heads: the norm is over all heads of q together, and over all heads of k.
        norm_per_head: the norm is a LayerNorm with a weight for each head.
        norm_after: the norm is behind ``rope``.
        clip: largest absolute value of q, k and v, to which they are clipped before ``rope``; None: no limit.
        init: distribution of the initial weights of q, k and v.
        out_init: distribution of the initial weights of the output projection.
        sequence_parallel: input and output are this rank's shards of the sequence.
        kind: how the ranks of the context axis compute attention: ``ring``, ``ulysses`` or ``gather``.
        window: a token attends only to itself and to the ``window`` - 1 tokens before it (sliding window); None: to all
            tokens before it.
        sparsity: block mask of sparse attention, or None.
        scale, softcap, sinks, chunk, l2_norm, temperature: as for ``CausalAttention``.
        norm: maker of the norms of ``qk_norm``.
        output_gate: multiply the result of attention by the sigmoid of a projection of x.

    Attributes:
        qkv: fused projection without ``kv_heads``: (3 H dim, D), where q, k and v are each sharded by heads.
        q, kv: projections with ``kv_heads``: (H dim, D), sharded by heads, and (2 kv_heads dim, D), keys, then values.
        out: output projection, (D, H dim), sharded by heads.
        gate: projection to the gate, (H dim, D), sharded by heads, present only with ``output_gate``.
        q_norm, k_norm: norms of queries and keys, present only with ``qk_norm``. Their weight is (dim,) or, with
            ``norm_all_heads``, (H dim,) and (kv_heads dim,), sharded by heads; with ``norm_per_head``, (H, dim) and
            (kv_heads, dim).
        cache: KV cache with the earlier keys and values and the positions of the new tokens during generation, else
            None.
        heads, kv_heads: number of query heads and of key/value heads that this rank computes.
        recompute: if set, it is called as ``recompute(attend, q, k, v, mask)`` in place of ``attend``.

    Shape:
        (B, T, D) -> (B, T, D), equal on every tensor-parallel rank. With a context axis T counts this rank's tokens.
        With ``sequence_parallel``: (B, T / t, D) -> (B, T / t, D).

    Raises:
        ValueError: there are fewer heads than tensor-parallel ranks, or ``kv_heads`` does not divide ``heads``.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        grid: Grid,
        head_dim: int = 0,
        kv_heads: int | None = None,
        rope: Rope | Alibi | None = None,
        bias: bool = False,
        out_bias: bool = False,
        qk_norm: float | None = None,
        norm_all_heads: bool = False,
        norm_per_head: bool = False,
        norm_after: bool = False,
        clip: float | None = None,
        init: Distribution,
        out_init: Distribution,
        sequence_parallel: bool = False,
        kind: str = "ring",
        window: int | None = None,
        sparsity: Sparsity | None = None,
        scale: float | None = None,
        softcap: float | None = None,
        sinks: bool = False,
        chunk: int | None = None,
        l2_norm: float | None = None,
        temperature: tuple[float, int] | None = None,
        norm: Callable[..., nn.Module] = RMSNorm,
        output_gate: bool = False,
    ) -> None:
        super().__init__(
            heads,
            grid=grid,
            rope=rope,
            sequence_parallel=sequence_parallel,
            kind=kind,
            window=window,
            sparsity=sparsity,
            scale=scale,
            softcap=softcap,
            sinks=sinks,
            chunk=chunk,
            l2_norm=l2_norm,
            temperature=temperature,
        )
        dim, self.clip, self.norm_after = head_dim or width // heads, clip, norm_after
        self.head_dim = dim
        common: dict[str, Any] = {"grid": grid, "unit": dim, "sequence_parallel": sequence_parallel}
        inward: dict[str, Any] = {"bias": bias, "init": init, "bias_init": _ZERO}
        if kv_heads is None:
            self.qkv = ColumnParallelLinear(width, 3 * heads * dim, parts=(heads * dim,) * 3, **common, **inward)
        else:
            if kv_heads < 1 or heads % kv_heads:
                raise ValueError(f"kv_heads={kv_heads} does not divide heads={heads}. Give a divisor of {heads}.")
            self.q = ColumnParallelLinear(width, heads * dim, **common, **inward)
            self.kv: ColumnParallelLinear | WholeKV
            if kv_heads % self.axis.size == 0:
                self.kv_heads = kv_heads // self.axis.size
                self.kv = ColumnParallelLinear(
                    width, 2 * kv_heads * dim, parts=(kv_heads * dim,) * 2, **common, **inward
                )
            else:
                heads_here, self._looks_at = shared_heads(heads, kv_heads, self.axis.rank, self.axis.size)
                self.kv_heads = heads_here.stop - heads_here.start
                self.kv = WholeKV(width, kv_heads, dim, heads_here, sequence_parallel, grid=grid, **inward)
        if qk_norm is not None and norm_all_heads:
            keys = kv_heads or heads
            if keys % self.axis.size:
                raise ValueError(
                    f"kv_heads={keys} is not a multiple of tensor={self.axis.size}, but a norm of all heads of the "
                    "keys needs each head on one rank. Give a tensor axis whose size divides it."
                )
            self.q_norm: nn.Module = AllHeadsRMSNorm(heads, dim, qk_norm, grid=grid)
            self.k_norm: nn.Module = AllHeadsRMSNorm(keys, dim, qk_norm, grid=grid)
        elif qk_norm is not None and norm_per_head:
            self.q_norm = PerHeadLayerNorm(heads, dim, qk_norm, grid=grid)
            used = self.kv.heads if kv_heads is not None and isinstance(self.kv, WholeKV) else None
            self.k_norm = PerHeadLayerNorm(kv_heads or heads, dim, qk_norm, used, grid=grid)
        elif qk_norm is not None:
            # A rank's gradient comes from its own heads alone: partial, as a norm's on sequence shards.
            self.q_norm = norm(dim, qk_norm, grid=grid, sequence_parallel=True)
            self.k_norm = norm(dim, qk_norm, grid=grid, sequence_parallel=True)
        if output_gate:
            self.gate = ColumnParallelLinear(width, heads * dim, **common, **inward)
        self.out = RowParallelLinear(heads * dim, width, bias=out_bias, init=out_init, bias_init=_ZERO, **common)

    def _project(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return q (B, heads, T, dim), k and v (B, kv_heads, T, dim), normalized but not rotated, and any gate."""
        q, k, v, *gate = self._split(x)
        if "q_norm" in self._modules and not self.norm_after:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.clip is not None:
            q, k, v = (each.clamp(-self.clip, self.clip) for each in (q, k, v))
        return q, k, v, *gate

    def _placed(self, q: Tensor, k: Tensor, positions: Tensor | None, length: int) -> tuple[Tensor, Tensor]:
        q, k = super()._placed(q, k, positions, length)
        return (self.q_norm(q), self.k_norm(k)) if self.norm_after else (q, k)

    def _split(self, x: Tensor) -> tuple[Tensor, ...]:
        gates = [self.gate] if "gate" in self._modules else []
        if "qkv" in self._modules:
            return *self._by_heads(self.qkv(x), 3), *(gate(x) for gate in gates)
        weight, bias = self.kv.used() if isinstance(self.kv, WholeKV) else (self.kv.weight, self.kv.bias)
        # x is gathered, and its gradient reduced, once for q, k and v together.
        pairs = [(self.q.weight, self.q.bias), (weight, bias), *((gate.weight, gate.bias) for gate in gates)]
        outputs = column_linears(x, pairs, self.axis, self.sequence_parallel)
        layers = (self.q, self.kv, *gates)
        updates = zip(layers, outputs, pairs, strict=True)
        queries, pair, *gate = (updated(layer, y, x, bias) for layer, y, (_, bias) in updates)
        (q,), (k, v) = self._by_heads(queries, 1), self._by_heads(pair, 2)
        return q, k, v, *gate

    def _by_heads(self, y: Tensor, parts: int) -> tuple[Tensor, ...]:
        """Return the parts of a fused projection by heads: (B, T, parts x heads x dim) -> (B, heads, T, dim) each."""
        form = "b t (parts heads dim) -> parts b heads t dim"
        found: Tensor = rearrange(y, form, parts=parts, dim=self.head_dim)
        return found.unbind()


def shared_heads(heads: int, kv_heads: int, rank: int, size: int) -> tuple[slice, list[int] | None]:
    """Return the range of the key/value heads that a rank's query heads use, and how they share them.

    Args:
        heads: number of query heads of the whole layer.
        kv_heads: number of key/value heads, which divides ``heads``.
        rank, size: rank on the tensor axis, and its size.

    Returns:
        The range, and for each query head the number of its head in the range; None: neighbouring query heads share
        one, equally many each.
    """
    start, stop = split(heads, size, rank)
    group = heads // kv_heads
    first, last = start // group, (stop - 1) // group + 1
    looks_at = [head // group - first for head in range(start, stop)]
    share, rest = divmod(stop - start, last - first)
    regular = not rest and looks_at == [head // share for head in range(stop - start)]
    return slice(first, last), None if regular else looks_at


class AllHeadsRMSNorm(nn.Module):
    """RMSNorm over all heads together, which are sharded over the tensor axis: (B, heads, T, dim), unchanged in shape.

    Args:
        heads: H, the number of heads of the whole layer.
        head_dim: dim, the width of each head.
        eps: constant that is added to the mean of the squares.
        grid: grid whose tensor axis shards the heads.

    Attributes:
        weight: (H dim,), sharded by heads, with initial values 1.
    """

    def __init__(self, heads: int, head_dim: int, eps: float, *, grid: Grid) -> None:
        super().__init__()
        self.axis, self.width, self.eps = grid.tensor, heads * head_dim, eps
        layout = Layout((self.width,), shard_dim=0, unit=head_dim)
        self.weight = sharded_parameter(layout, Constant(1.0), self.axis.rank, self.axis.size)

    def forward(self, x: Tensor) -> Tensor:
        """Normalize this rank's heads."""
        weight = self.weight.view(-1, 1, x.shape[3])
        return sharded_rms_norm(x, weight, (1, 3), self.width, self.eps, self.axis)


class PerHeadLayerNorm(nn.Module):
    """LayerNorm without a bias over each head, which has a weight of its own: (B, heads, T, dim), unchanged in shape.

    Args:
        heads: H, the number of heads of the whole layer.
        head_dim: dim, the width of each head.
        eps: constant that is added to the variance.
        used: the heads of this rank, if the weight is to be whole on every rank, as that of ``WholeKV``; None: the
            tensor axis shards the heads.
        grid: grid whose tensor axis shards the heads.

    Attributes:
        weight: (H, dim), sharded by heads or whole, with initial values 1.
    """

    def __init__(self, heads: int, head_dim: int, eps: float, used: slice | None = None, *, grid: Grid) -> None:
        super().__init__()
        self.eps, self.used, whole = eps, used, (heads, head_dim)
        if used is None:
            layout, place = Layout(whole, shard_dim=0), (grid.tensor.rank, grid.tensor.size)
        else:
            layout, place = Layout(whole, partial=True), (0, 1)
        self.weight = sharded_parameter(layout, Constant(1.0), *place)

    def forward(self, x: Tensor) -> Tensor:
        """Normalize this rank's heads."""
        weight, kind = self.weight if self.used is None else self.weight[self.used], x.dtype
        wide = torch.promote_types(kind, torch.float32)
        return (F.layer_norm(x.to(wide), x.shape[-1:], eps=self.eps) * weight[:, None].to(wide)).to(kind)


class WholeKV(nn.Module):
    """Projection to keys and values, replicated on every rank because the tensor axis does not divide the heads.

    Args:
        width: D, the width of the input.
        kv_heads: K, the number of key/value heads of the whole layer.
        head_dim: dim, the width of each head.
        heads: range of the key/value heads that this rank's query heads use.
        sequence_parallel: the input is this rank's shard of the sequence, which the caller gathers.
        bias: add a bias.
        grid: grid over whose tensor axis the gradients are summed.
        init, bias_init: distributions of the initial weight and bias.

    Attributes:
        weight: (2 K dim, D): the keys' rows, then the values'.
        bias: (2 K dim,), or None.
    """

    adaptable = True  # ``SelfAttention`` adds the updates of adapters

    def __init__(
        self,
        width: int,
        kv_heads: int,
        head_dim: int,
        heads: slice,
        sequence_parallel: bool,
        *,
        grid: Grid,
        bias: bool,
        init: Distribution,
        bias_init: Distribution,
    ) -> None:
        super().__init__()
        self.heads, self.head_dim, self.sequence_parallel = heads, head_dim, sequence_parallel
        self.rows = slice(heads.start * head_dim, heads.stop * head_dim)  # of the keys, and of the values
        rows, partial = 2 * kv_heads * head_dim, grid.tensor.size > 1
        self.weight = sharded_parameter(Layout((rows, width), partial=partial), init, rank=0, size=1)
        self.bias = sharded_parameter(Layout((rows,), partial=partial), bias_init, rank=0, size=1) if bias else None

    def used(self) -> tuple[Tensor, Tensor | None]:
        """Return the rows of weight and bias of this rank's n key/value heads: (2 n dim, D) and (2 n dim,), or None."""
        return self.selected(self.weight), None if self.bias is None else self.selected(self.bias)

    def selected(self, x: Tensor) -> Tensor:
        """Return the rows of this rank's heads, of the keys and then of the values, of a tensor (2 K dim, ...)."""
        by_heads = rearrange(x, "(two heads dim) ... -> two heads dim ...", two=2, dim=self.head_dim)
        return rearrange(by_heads[:, self.heads], "two heads dim ... -> (two heads dim) ...")
