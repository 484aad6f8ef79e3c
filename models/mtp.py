"""Multi-token prediction of DeepSeek-V3: modules behind the model that predict one token further each.

Liu et al. 2024, arXiv:2412.19437, section 2.2, equations 21 to 25. Module k of D takes, for tokens 1 to T - k,

    h'_i = M_k [RMSNorm(Emb(t_{i+k})); RMSNorm(h_i)]    h_i: of the module before, or of the main model
    h = norm_k(block_k(h'))                             P(t_{i+k+1}) = softmax(head(h_i))

Embedding and head are the main model's. The paper does not say on which side of the norm before the head h is taken:
here it is the head's input, of the main model and of each module. In the paper h stands before the embedding in M_k's
input; the published weights (``eh_proj``) have the order above.

The list of layers is ``[embedding, block 0, ..., block L - 1, norm, embedding again, module 1, ..., module D, head]``.
Between the layers before the modules the value is (x, ids), then (states, e): the states (B, T - k, D) of the model and
of the modules so far, and the embeddings of all ids. The last layer returns the logits of each, as a tuple.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..base.formulas import CHUNK_TOKENS
from ..grid import Grid
from ..grid.loss_terms import Loss
from ..grid.randomness.random import Normal
from ..pipe.chunked_loss import LastLayer, is_watched, runs_otherwise
from ..pipe.spec import LayerSpec, TiedLayerSpec
from ..tensor_parallel.embedding import VocabParallelHead
from ..tensor_parallel.norm import RMSNorm
from .config import DeepseekConfig
from .layers import NextTokenLoss, TokenEmbedding
from .replicated_linear import ReplicatedLinear


def mtp_layers(
    config: DeepseekConfig,
    block: Callable[..., nn.Module],
    block_with_ids: Callable[..., nn.Module],
    sequence_parallel: bool,
    **options: Any,
) -> list[LayerSpec]:
    """List the specs of the layers of a model with modules that predict further tokens: ids (B, T) -> D + 1 logits.

    Args:
        config: the model's configuration.
        block: class of the modules' blocks, made with ``config``, the number of the block, and ``options``.
        block_with_ids: the same class with ``CarriesIds``, of the model's blocks.
        sequence_parallel: must be False.
        options: further arguments of the blocks.

    Raises:
        ValueError: ``sequence_parallel`` is set.
    """
    depth, length = config.num_nextn_predict_layers, config.num_hidden_layers
    if sequence_parallel:
        raise ValueError(
            f"num_nextn_predict_layers={depth} shortens the sequence, and sequence_parallel=True needs equal shards of "
            "it. Leave out one of them."
        )
    width, vocab_size = config.hidden_size, config.vocab_size
    init: dict[str, Any] = {"init": Normal(config.initializer_range)}
    embedding = partial(TiedLayerSpec, "embed", TokenEmbedding, vocab_size, width, **init)
    head = LayerSpec(MTPHead, width, vocab_size, **init)
    return [
        embedding(forward_fn=embed_and_keep),
        *(LayerSpec(block_with_ids, config, i, **options) for i in range(length)),
        LayerSpec(RMSNormWithIds, width, config.rms_norm_eps),
        embedding(forward_fn=embed_again),
        *(LayerSpec(MTPModule, config, k, partial(block, config, length - 1, **options)) for k in range(1, depth + 1)),
        embedding(forward_fn=attend_each) if config.tie_word_embeddings else head,
    ]


def embed_and_keep(embedding: TokenEmbedding, ids: Any) -> tuple[Tensor, Tensor]:
    """Look up the ids: (B, T) -> (B, T, D) and the ids.

    Raises:
        ValueError: the input has packed documents, or the grid has a context axis.
    """
    if not isinstance(ids, Tensor) or embedding.context.size > 1:
        raise ValueError(
            "num_nextn_predict_layers needs ids (B, T) without documents, and a grid with context=1. Give rows of "
            "only ids (data.document_mask: false), or num_nextn_predict_layers=0."
        )
    return embedding(ids), ids


def embed_again(embedding: TokenEmbedding, value: Any) -> tuple[tuple[Tensor], Tensor]:
    """Replace the ids, which the modules do not need, by their embeddings: (x, ids) -> ((x,), (B, T, D))."""
    x, ids = value
    return (x,), embedding(ids)


def attend_each(embedding: TokenEmbedding, value: Any) -> Any:
    """Compute the logits of each state with the embedding's weight."""
    return _each(embedding.attend, value)


def _each(head: Callable[[Tensor], Tensor], value: Any) -> Any:
    """Return the logits of each state, or, in generation, those of the model alone."""
    states, _ = value
    return head(states[0]) if len(states) == 1 else tuple(head(x) for x in states)


class CarriesIds(nn.Module):
    """Base class that makes a layer of x one of (x, ids)."""

    def forward(self, x: Any) -> Any:
        """Run the layer on x of (x, ids), and return the ids beside its output."""
        x, ids = x
        return super().forward(x), ids


class RMSNormWithIds(CarriesIds, RMSNorm):
    """Final norm of a model with multi-token prediction."""


class MTPHead(VocabParallelHead):
    """``VocabParallelHead`` of several states."""

    def forward(self, value: Any) -> Any:
        """Compute this rank's logits of each state: (states, e) -> tuple of (B, T - k, V / t)."""
        return _each(super().forward, value)


class MTPModule(nn.Module):
    """Module k of multi-token prediction.

    In generation, when the attention has a KV cache, it returns its input.

    Args:
        config: the model's configuration.
        number: k, from 1.
        make_block: maker of the block, called with the grid.
        grid: the grid.

    Attributes:
        enorm, hnorm: norms of the embedding and of the state before.
        eh_proj: M_k, (D, 2 D).
        block: the transformer block.
        norm: the norm before the head.
    """

    def __init__(
        self, config: DeepseekConfig, number: int, make_block: Callable[..., nn.Module], *, grid: Grid
    ) -> None:
        super().__init__()
        width = config.hidden_size
        norm = partial(RMSNorm, width, config.rms_norm_eps, grid=grid)
        self.number = number
        self.enorm, self.hnorm = norm(), norm()
        self.eh_proj = ReplicatedLinear(2 * width, width, grid=grid, init=Normal(config.initializer_range))
        self.block: Any = make_block(grid=grid)
        self.norm = norm()

    def forward(self, value: Any) -> Any:
        """Append the module's state: (states, e) -> (states and (B, T - k, D), e).

        Raises:
            ValueError: the rows have at most k tokens.
        """
        states, embedded = value
        if self.block.attention.cache is not None:
            return value
        if embedded.shape[1] <= self.number:
            raise ValueError(
                f"the rows have {embedded.shape[1]} tokens, so no token is followed by {self.number} further tokens. "
                f"Give rows of at least {self.number + 1} tokens, or a smaller num_nextn_predict_layers."
            )
        e, h = embedded[:, self.number :], states[-1][:, :-1]  # (B, T - k, D)
        x = self.eh_proj(torch.cat([self.enorm(e), self.hnorm(h)], dim=-1))
        return (*states, self.norm(self.block(x))), embedded


@dataclass(frozen=True)
class MTPLoss:
    """Loss of a model with multi-token prediction: ``main``, and ``mtp_1`` to ``mtp_D`` with the factor ``factor`` / D.

    Each is the mean over the labels that it predicts; the last k positions of a row have none for module k. In
    evaluation the loss is ``main``, and the others are metrics. As ``NextTokenLoss`` it runs the output layer in chunks
    of tokens.

    Args:
        grid: grid whose tensor axis shards the vocabulary.
        vocab_size: V, the size of the whole vocabulary.
        depth: D, the number of modules.
        factor: lambda of equation 25; DeepSeek-V3 was trained with 0.3 for 10T tokens, then with 0.1.
        chunk_tokens: tokens of a chunk, at most; None: compute whole logits.
    """

    grid: Grid
    vocab_size: int
    depth: int
    factor: float = 0.3
    chunk_tokens: int | None = CHUNK_TOKENS

    def __call__(self, logits: Any, labels: Tensor) -> Loss:
        """Return the terms.

        Args:
            logits: D + 1 tensors (B, T - k, V / t).
            labels: integers (B, T), the token that follows each position, or -100.
        """
        return self._terms(self._one(), logits, labels)

    def weight(self, labels: Tensor) -> dict[str, Tensor]:
        """Return the number of labels of each term."""
        return {name: self._one().weight(own_labels) for name, own_labels in self._labels(labels).items()}

    def takes_head(self, layer: nn.Module | None, function: Callable[..., Any] | None) -> bool:
        """Return True if the last layer is the output layer of such a model; see ``NextTokenLoss.takes_head``."""
        if self.chunk_tokens is None or layer is None or is_watched(layer) or runs_otherwise(self):
            return False
        if type(layer) is TokenEmbedding:
            return function is attend_each
        return function is None and type(layer) is MTPHead

    def of_head(self, head: LastLayer, value: Any, labels: Tensor) -> Loss:
        """Return the terms of the output layer's input, (states, e)."""
        layer: Any = head.layer
        attend = layer.attend if isinstance(layer, TokenEmbedding) else partial(VocabParallelHead.forward, layer)
        return self._terms(partial(self._one().of_head, replace(head, function=attend)), value[0], labels)

    def _one(self) -> NextTokenLoss:
        """Return the loss of one state."""
        return NextTokenLoss(self.grid, self.vocab_size, chunk_tokens=self.chunk_tokens)

    def _terms(self, loss: Callable[[Tensor, Tensor], Any], values: Any, labels: Tensor) -> Loss:
        """Return ``loss`` of each of D + 1 values, by name."""
        terms = {name: loss(x, own) for x, (name, own) in zip(values, self._labels(labels).items(), strict=True)}
        main, *others = terms
        if not torch.is_grad_enabled():
            return Loss({main: terms.pop(main)}, metrics=terms)
        return Loss(terms, dict.fromkeys(others, self.factor / self.depth))

    def _labels(self, labels: Tensor) -> dict[str, Tensor]:
        return {"main": labels} | {f"mtp_{k}": labels[:, k:] for k in range(1, self.depth + 1)}
