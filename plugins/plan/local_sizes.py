"""Elements per token of the tensors in a block, on the tensor-parallel rank with most of them."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from ...grid import Axis
from ...models.head_groups import HeadGroups
from .layer_shapes import Attention, LayerShape


class LocalSizes(NamedTuple):
    """Elements per token of a block on one rank, and its heads.

    Attributes:
        attention: queries, keys, values and the output of attention.
        heads: query heads.
        product: output of the first product of the MLP, of shared experts and of the experts that a token goes to.
        activation: tensors that follow, up to the input of the last product.
        routed: inputs of experts, and their outputs before they are summed.
    """

    attention: float
    heads: float
    product: float
    activation: float
    routed: float


def local_sizes(
    layer: LayerShape, tensor: int, hidden_shards: int, shard_tensor: bool, fused_kernels: bool
) -> LocalSizes:
    """Return the sizes of a block; tokens are spread evenly over experts.

    Args:
        layer: a block.
        tensor: size of the tensor axis.
        hidden_shards: ranks that share the hidden states.
        shard_tensor, fused_kernels: as for ``ModelMemory``.
    """
    attention, feedforward = layer.attention, layer.feedforward
    assert attention is not None and feedforward is not None
    kept, heads = _attention(attention, tensor, fused_kernels), -(-attention.heads // tensor)
    factor = 2 if feedforward.gated else 1
    if not feedforward.experts:
        width = -(-feedforward.width // tensor)
        return LocalSizes(kept, heads, factor * width, width if fused_kernels else factor * width, 0.0)
    # Without ``shard_tensor`` each rank has whole experts, for its own tokens.
    share = 1 / tensor if shard_tensor or hidden_shards > 1 else 1.0
    rows, shared = feedforward.per_token * share, feedforward.shared * share
    routed = 2 * rows * layer.hidden * (tensor if shard_tensor else 1)
    product = factor * (rows * feedforward.width + shared)
    if fused_kernels:  # the products' inputs: tokens in the order of their experts, and the gate's output
        return LocalSizes(kept, heads, product, rows * feedforward.width + shared, routed / 2)
    return LocalSizes(kept, heads, product, factor * shared, routed)


def _attention(attention: Attention, tensor: int, fused_kernels: bool) -> float:
    """Return the elements per token of queries, keys, values and output; values are views of the product."""
    heads, keys = -(-attention.heads // tensor), kv_heads(attention, tensor)
    query, value = attention.query_dim, attention.value_dim
    if attention.latent:  # keys are concatenated into new tensors
        return heads * (2 * query + (query - attention.rotated + value) + value)
    kept = heads * (query + value) + keys * (query + value)
    kept += _new_keys(attention, keys, fused_kernels)
    return kept + (heads * query if attention.norms else 0)


def _new_keys(attention: Attention, keys: int, fused_kernels: bool) -> int:
    """Return the elements per token of keys that rotation or a norm makes as new tensors."""
    return keys * attention.query_dim if (attention.rotated and not fused_kernels) or attention.norms else 0


@cache
def kv_heads(attention: Attention, tensor: int) -> int:
    """Return the most key/value heads that a tensor-parallel rank computes."""
    axes = (Axis("tensor", range(tensor), rank, None) for rank in range(tensor))
    return max(HeadGroups.on(axis, attention.heads, attention.kv_heads).count for axis in axes)
