"""Layers that all models share: token embedding and head, residual block, final norm, loss.

Each layer takes ``x``, or ``(x, documents)`` if rows are packed (``packed.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..base.checks import check_count
from ..base.formulas import CHUNK_TOKENS
from ..context.dropout import dropout
from ..context.order import local_length, shard
from ..context.slices import Slices
from ..grid import Grid
from ..grid.randomness.random import Normal
from ..moe.layer import MoE
from ..pipe.chunked_loss import LastLayer, is_watched, loss_in_chunks, runs_otherwise
from ..pipe.spec import LayerSpec, TiedLayerSpec
from ..tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from ..tensor_parallel.embedding import VocabParallelEmbedding, VocabParallelHead
from ..tensor_parallel.norm import LayerNorm, OffsetLayerNorm, OffsetRMSNorm, RMSNorm
from .config import TransformerConfig
from .packed import attach, check_documents, detach, valid_and_positions

# The activations of MLPs, by Hugging Face's names.
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
    "gelu": F.gelu,
    "gelu_new": partial(F.gelu, approximate="tanh"),
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
    "gelu_bloom": lambda x: 0.5 * x * (1.0 + torch.tanh(0.79788456 * x * (1.0 + 0.044715 * x * x))),
}

# Labels of tokens, or labels and weights.
Labels = Tensor | Sequence[Tensor]


class TokenEmbedding(VocabParallelEmbedding):
    """``VocabParallelEmbedding`` that also accepts ``(ids, documents)`` for packed rows.

    With ``(ids, documents)`` it returns the embeddings together with the documents. Ids are those of the whole sequence
    on every rank; on a grid with a context axis the result has this rank's tokens (``context/order.py``), padded if
    the sequence has to be, and then together with documents. There ids may also be this rank's tokens already, as
    ``context.shard`` cuts them, if ``documents``, of the whole sequence, are given.

    Args:
        args, grid, kwargs: as for ``VocabParallelEmbedding``.
        logit_scale: factor of the logits that ``attend`` returns.
        softcap: cap of these logits, as for ``softcapped``.

    Attributes:
        slices: set if a pipeline cuts sequences into slices: then ids are those of a slice, and ``documents`` whole.

    Raises:
        ValueError: in forward, ``documents`` does not have one document number for each token.
    """

    slices: Slices | None = None

    def __init__(
        self, *args: Any, grid: Grid, logit_scale: float = 1.0, softcap: float | None = None, **kwargs: Any
    ) -> None:
        super().__init__(*args, grid=grid, **kwargs)
        self.context, self.logit_scale, self.softcap = grid.context, logit_scale, softcap

    def attend(self, x: Tensor) -> Tensor:
        """Compute logits with the embedding's weight, as a tied output layer."""
        return softcapped(self.uncapped(x), self.softcap)

    def uncapped(self, x: Tensor) -> Tensor:
        """Compute the logits without their cap."""
        return super().attend(scaled(x, self.logit_scale))

    def forward(self, ids: Any) -> Any:
        """Look up the ids: (B, T) -> (B, T, D), or (B, T / t, D) under sequence parallelism."""
        ids, documents = detach(ids)
        multiple, sequence = self.axis.size if self.sequence_parallel else 1, ids if documents is None else documents
        if self.context.size > 1:
            local = local_length(sequence.shape[1], self.context.size, multiple)
            if local == sequence.shape[1]:  # a part could not be told from the whole
                raise ValueError(
                    f"the rows have {local} tokens, too few for context={self.context.size}, whose ranks need equally "
                    f"many tokens each. Give rows of at least {local + 1} tokens, or use context=1."
                )
            if ids.shape[1] == local:  # this rank's already
                check_documents(sequence, documents)
                return attach(super().forward(ids), documents)
        if self.slices is not None and self.slices.active:
            self.slices.require(ids.shape[1])
            check_documents(sequence, documents)
            return attach(super().forward(ids), documents)
        check_documents(ids, documents)
        own_ids = shard(ids, self.context, multiple=multiple)
        if documents is None and own_ids.shape[1] * self.context.size != ids.shape[1]:
            documents = torch.zeros_like(ids)
        return attach(super().forward(own_ids), documents)


class CappedHead(VocabParallelHead):
    """``VocabParallelHead`` whose logits have a factor, or a cap as for ``softcapped``.

    The factor multiplies the layer's input, which is smaller than the logits. A bias gets no factor.
    """

    def __init__(
        self, *args: Any, grid: Grid, logit_scale: float = 1.0, softcap: float | None = None, **kwargs: Any
    ) -> None:
        super().__init__(*args, grid=grid, **kwargs)
        self.logit_scale, self.softcap = logit_scale, softcap

    def forward(self, x: Tensor) -> Tensor:
        """Compute this rank's logits: (B, T, D) -> (B, T, V / t)."""
        return softcapped(self.uncapped(x), self.softcap)

    def uncapped(self, x: Tensor) -> Tensor:
        """Compute the logits without their cap."""
        return super().forward(scaled(x, self.logit_scale))


def scaled(x: Tensor, factor: float) -> Tensor:
    """Return factor * x; x itself if the factor is 1."""
    return x if factor == 1.0 else x * factor


def softcapped(x: Tensor, cap: float | None) -> Tensor:
    """Return cap * tanh(x / cap), which stays within the cap; x itself if the cap is None."""
    return x if cap is None else cap * torch.tanh(x / cap)


def uncapped(head: LastLayer) -> tuple[LastLayer, float | None]:
    """Return an output layer without the cap of its logits, and the cap, for losses that cap in small blocks."""
    layer = head.layer
    if not isinstance(layer, (CappedHead, TokenEmbedding)) or layer.softcap is None:
        return head, None
    return replace(head, function=layer.uncapped), layer.softcap


def first_and_last(
    config: TransformerConfig,
    sequence_parallel: bool,
    scale: float = 1.0,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    bias: bool = False,
    width: int = 0,
) -> tuple[LayerSpec, LayerSpec]:
    """Return the specs of the token embedding and of the head.

    The two are separate layers or, with ``tie_word_embeddings``, one layer that is tied with the key ``"embed"``.

    Args:
        config: the model's configuration.
        sequence_parallel: keep on each tensor-parallel rank only its shard of the sequence.
        scale: factor of the embeddings.
        logit_scale: factor of the logits.
        softcap: cap of the logits, as for ``softcapped``.
        bias: add a bias to a head that is not tied.
        width: width of the embeddings and of the head's input; 0: ``hidden_size``.
    """
    common: dict[str, Any] = {"init": Normal(config.initializer_range), "sequence_parallel": sequence_parallel}
    vocab_size, width = config.vocab_size, width or config.hidden_size
    further: dict[str, Any] = {} if scale == 1.0 else {"scale": scale}
    cap: dict[str, Any] = {} if softcap is None else {"softcap": softcap}
    cap |= {} if logit_scale == 1.0 else {"logit_scale": logit_scale}
    if not config.tie_word_embeddings:
        ends: dict[str, Any] = common | cap | ({"bias": True} if bias else {})
        head = LayerSpec(CappedHead if cap else VocabParallelHead, width, vocab_size, **ends)
        return LayerSpec(TokenEmbedding, vocab_size, width, **common, **further), head
    common |= further | cap
    embedding = TiedLayerSpec("embed", TokenEmbedding, vocab_size, width, **common)
    attend = TokenEmbedding.attend
    return embedding, TiedLayerSpec("embed", TokenEmbedding, vocab_size, width, **common, forward_fn=attend)


class ResidualBlock(nn.Module):
    """One transformer layer: x = x + attention(norm1(x)), then x = x + mlp(norm2(x)): (B, T, D) -> (B, T, D).

    With ``norm_place="sum"`` it is x = norm(x + attention(x)), then x = norm(x + mlp(x)).

    Dropout acts on the output of attention and of MLP. The MLP may be a mixture of experts, ``MoE``, and attention a
    recurrent layer. A block may also have one of the two alone.

    Args:
        config: the model's configuration.
        grid: grid whose tensor axis shards the heads and the MLP's width.
        sequence_parallel: input and output are this rank's shards of the sequence, (B, T / t, D).
        make_norm: the norms' maker, called as ``make_norm(width, epsilon, grid=..., sequence_parallel=...)``.
        make_attention: maker of the attention, called as ``make_attention(grid=..., sequence_parallel=..., init=...,
            out_init=...)``; None: the block has none.
        make_mlp: the MLP's maker, called as ``make_mlp(config, grid=..., sequence_parallel=...)``; None: the block has
            none.
        make_post_norm: maker of the norms behind the branches, as for ``make_norm``, which is the default.
        norm_place: the norms are ``before`` the branches, ``after`` them, ``both``, or behind the ``sum`` with x.
        parallel: attention and MLP both take the block's input, and both are added to it. Without effect on a block
            that has one of the two.
        shared_norm: one norm for attention and MLP, with ``parallel``.
        multiplier: factor of the output of attention and of MLP, before it is added.

    Attributes:
        norm1, norm2: norms before the branches, or None.
        post_norm1, post_norm2: norms behind the branches, or behind the sums, or None.

    Raises:
        ValueError: the tensor axis is larger than the number of heads.
    """

    def __init__(
        self,
        config: TransformerConfig,
        *,
        grid: Grid,
        sequence_parallel: bool = False,
        make_norm: Callable[..., nn.Module],
        make_attention: Callable[..., nn.Module] | None,
        make_mlp: Callable[..., nn.Module] | None,
        make_post_norm: Callable[..., nn.Module] | None = None,
        norm_place: str = "before",
        parallel: bool = False,
        shared_norm: bool = False,
        multiplier: float = 1.0,
    ) -> None:
        super().__init__()
        config.check_tensor(grid.tensor.size)
        if parallel and norm_place == "sum":
            raise ValueError("norm_place is 'sum', but parallel branches have one sum. Give another place.")
        two = make_attention is not None and make_mlp is not None
        self.context, self.parallel, self.multiplier = grid.context, parallel and two, multiplier
        common: dict[str, Any] = {"grid": grid, "sequence_parallel": sequence_parallel}
        inits: dict[str, Any] = {"init": Normal(config.initializer_range), "out_init": Normal(config.residual_std)}
        norm = partial(make_norm, config.hidden_size, config.norm_epsilon, **common)
        before, after = norm_place in ("before", "both"), norm_place != "before"
        self.norms_sums = norm_place == "sum"
        self.norm1 = norm() if before and make_attention is not None else None
        self.attention = None if make_attention is None else make_attention(**common, **inits)
        self.dropout1 = dropout(config.dropout, grid, sequence_parallel)
        self.norm2 = norm() if before and make_mlp is not None and not (shared_norm and two) else None
        self.mlp = None if make_mlp is None else make_mlp(config, **common)
        self.dropout2 = dropout(config.dropout, grid, sequence_parallel)
        post_norm = partial(make_post_norm or make_norm, config.hidden_size, config.norm_epsilon, **common)
        self.post_norm1 = post_norm() if after else None
        self.post_norm2 = post_norm() if after else None

    def forward(self, x: Any) -> Any:
        """Run the layer on x, or on ``(x, documents)`` for packed rows."""
        x, documents = detach(x)
        first = normalized(x, self.norm1)
        if self.attention is not None:
            added = self._added(self.attention(first, documents), self.post_norm1, self.dropout1)
            if not self.parallel:
                x = first = self._summed(x, added, self.post_norm1)
        if self.mlp is None:
            return attach(x, documents)
        second = first if self.norm2 is None else self.norm2(x)
        y = self._added(self._run_mlp(second, documents), self.post_norm2, self.dropout2)
        return attach(x + added + y if self.parallel else self._summed(x, y, self.post_norm2), documents)

    def _added(self, y: Tensor, norm: nn.Module | None, dropout: nn.Module) -> Tensor:
        """Return what the block adds to the residual stream for the output of a branch."""
        return scaled(dropout(y if self.norms_sums else normalized(y, norm)), self.multiplier)

    def _summed(self, x: Tensor, added: Tensor, norm: nn.Module | None) -> Tensor:
        return normalized(x + added, norm) if self.norms_sums else x + added

    def _run_mlp(self, x: Tensor, documents: Tensor | None) -> Tensor:
        y: Tensor
        if isinstance(self.mlp, MoE):
            tensor = self.mlp.grid.tensor if self.mlp.sequence_parallel else None
            y = self.mlp(x, *valid_and_positions(x, self.context, tensor, documents))
        else:
            assert self.mlp is not None
            y = self.mlp(x)
        return y


def normalized(x: Tensor, norm: nn.Module | None) -> Tensor:
    """Return x normalized; x itself without a norm."""
    y: Tensor = x if norm is None else norm(x)
    return y


class FinalNorm:
    """Norm before the head. For packed rows it takes ``(x, documents)`` and returns only the normalized x."""

    def forward(self, x: Any) -> Tensor:
        """Normalize x, and drop the documents: (B, T, D) -> (B, T, D)."""
        y: Tensor = super().forward(detach(x)[0])  # type: ignore[misc]
        return y


class WithoutNorm(nn.Module):
    """Layer in place of the norm before the head, of a model that has none there."""

    def forward(self, x: Any) -> Tensor:
        """Drop the documents of packed rows: (B, T, D) -> (B, T, D)."""
        return detach(x)[0]


class FinalLayerNorm(FinalNorm, LayerNorm):
    """LayerNorm before the head."""


class FinalOffsetLayerNorm(FinalNorm, OffsetLayerNorm):
    """OffsetLayerNorm before the head."""


class FinalRMSNorm(FinalNorm, RMSNorm):
    """RMSNorm before the head."""


class FinalOffsetRMSNorm(FinalNorm, OffsetRMSNorm):
    """OffsetRMSNorm before the head."""


@dataclass(frozen=True)
class NextTokenLoss:
    """Cross entropy of the next token, returned as the sum of the losses and the number of labels.

    The engine adds up the two over the whole batch and divides once. As the ``loss_fn`` of a ``PipelineModule`` it runs
    the output layer too, in chunks of tokens, so that the logits never exist as a whole (``pipe/chunked_loss.py``).

    >>> loss_fn = triax.NextTokenLoss(triax.Grid(), vocab_size=256)
    >>> loss_fn(torch.zeros(1, 3, 256), torch.tensor([[7, 8, -100]]))  # 2 ln 256, and 2 labels
    (tensor(11.0904), tensor(2))

    Args:
        grid: grid whose tensor axis shards the vocabulary, and whose context axis shards the sequence.
        vocab_size: V, the size of the whole vocabulary.
        ignore_index: label value that is left out of the loss and of the count.
        label_smoothing: amount of label smoothing, spread over the whole vocabulary.
        z_loss: coefficient of (log sum_k exp z_k)^2, which keeps the logits z small, as in PaLM (Chowdhery et al.
            2022, arXiv:2204.02311, section 5); 1e-4 there.
        chunk_tokens: tokens of a chunk, at most; None: compute whole logits.
    """

    grid: Grid
    vocab_size: int
    ignore_index: int = -100
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    chunk_tokens: int | None = CHUNK_TOKENS
    next_tokens: ClassVar[bool] = True  # the labels are shifted: batches whose labels are the ids are refused

    def __post_init__(self) -> None:
        if self.chunk_tokens is not None:
            check_count("NextTokenLoss", chunk_tokens=self.chunk_tokens)

    def __call__(self, logits: Tensor, labels: Labels, softcap: float | None = None) -> tuple[Tensor, Tensor]:
        """Return the sum of the losses and the number of labels that count.

        Args:
            logits: (B, T, V / t), this tensor-parallel rank's shard of the logits. With a context axis T counts this
                rank's tokens.
            labels: integers (B, T), for each position of the whole sequence the token that follows it; or for each of
                this rank's tokens. Or a pair (labels, weights) of such integers and a weight of each, (B, T): the
                losses are then multiplied by the weights, and the number of labels is the sum of their weights.
            softcap: cap of the logits, as for ``softcapped``, if they do not have it yet.

        Returns:
            The sum, () of the logits' dtype but at least float32, and the number, (). Both are equal on every
            tensor-parallel rank. With a context axis they are those of this rank's tokens.
        """
        own_labels, weights = self.local(labels, logits.shape[1])
        entropy = partial(
            vocab_parallel_cross_entropy,
            logits,
            own_labels,
            grid=self.grid,
            vocab_size=self.vocab_size,
            ignore_index=self.ignore_index,
            label_smoothing=self.label_smoothing,
            z_loss=self.z_loss,
            softcap=softcap,
        )
        if weights is None:
            return entropy(reduction="sum"), torch.count_nonzero(own_labels != self.ignore_index)
        losses = entropy(reduction="none")
        return (losses * weights.to(losses.dtype)).sum(), self._weight(own_labels, weights)

    def weight(self, labels: Labels) -> Tensor:
        """Return the number of labels that count, (): the engine asks for it before the forward pass of a step.

        Args:
            labels: as for a call, of the whole sequence. With a context axis only this rank's part counts.
        """
        return self._weight(*self.local(labels, None))

    def takes_head(self, layer: nn.Module | None, function: Callable[..., Any] | None) -> bool:
        """Return True if the last layer is known to act on each token by itself, and so may be run in chunks.

        Args:
            layer: the last layer of the pipeline.
            function: the function that runs it, if that is not its ``forward``.
        """
        if self.chunk_tokens is None or layer is None or is_watched(layer) or runs_otherwise(self):
            return False
        if type(layer) is TokenEmbedding:
            return function is TokenEmbedding.attend
        return function is None and type(layer) in (VocabParallelHead, CappedHead, nn.Linear)

    def of_head(self, head: LastLayer, x: Any, labels: Labels) -> Any:
        """Return the loss of the output layer's input, (B, T, D), or (B, T / t, D) under sequence parallelism."""
        assert self.chunk_tokens is not None
        head, softcap = uncapped(head)
        own_labels, weights = self.local(labels, x.shape[1] * head.shards)
        pair = own_labels if weights is None else (own_labels, weights)
        return loss_in_chunks(head, partial(self, softcap=softcap), x, pair, self.chunk_tokens)

    def local(self, labels: Labels, length: int | None) -> tuple[Tensor, Tensor | None]:
        """Return labels and weights of this rank's tokens, which are ``length``, or of any number."""
        targets, weights = labels if isinstance(labels, (tuple, list)) else (labels, None)
        if weights is not None and weights.shape != targets.shape:
            raise ValueError(
                f"labels of shape {tuple(targets.shape)} have weights of shape {tuple(weights.shape)}: give one weight "
                "for each label"
            )
        if targets.shape[1] != length:
            cut = partial(shard, axis=self.grid.context, multiple=length or 1)
            targets = cut(targets, fill=self.ignore_index)
            weights = None if weights is None else cut(weights, fill=0)
        return targets, weights

    def _weight(self, labels: Tensor, weights: Tensor | None) -> Tensor:
        counts = labels != self.ignore_index
        return torch.count_nonzero(counts) if weights is None else (weights * counts).sum()
