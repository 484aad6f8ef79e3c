"""Shapes of a model's layers: parameters, matrix products and attention of each, read from the layers themselves.

``layers_of`` builds the layers of a configuration on the meta device, without memory and processes, and reads them. The
formulas for memory, time and traffic read these shapes only.

>>> from triax.models.config import LlamaConfig
>>> layers = layers_of(LlamaConfig.preset("llama3-8b"))
>>> [layer.name for layer in layers[:2]], len(layers), sum(layer.parameters for layer in layers)
(['TokenEmbedding', 'LlamaBlock'], 35, 8030261248)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from torch import nn

from ...grid.layout import Layout, layout_of
from ...models.alibi import Alibi
from ...models.attention import SelfAttention, ShardedAttention
from ...models.config import CONFIGS, AnyDecoderConfig, DeepseekConfig, EncoderConfig, TransformerConfig
from ...models.decoder import Projection
from ...models.deepseek import LatentOptions
from ...models.encoder_decoder_config import EncoderDecoderFields
from ...models.layers import ResidualBlock, WithoutNorm
from ...models.mlp import MLP, GatedMLP
from ...models.positions import PositionEmbedding
from ...models.rope import Rope
from ...models.shapes import built_on_meta
from ...pipe.spec import LayerSpec, TiedLayerSpec


@dataclass(frozen=True)
class Weight(Layout):
    """One parameter of a layer, by its layout, with its name within the layer, such as ``attention.out.weight``.

    Attributes, beside those of ``Layout``:
        heads: if given, the tensor axis shards the weight only if its size divides this number, and otherwise each rank
            holds the whole weight (keys and values of grouped queries).
    """

    heads: int | None = None

    @property
    def numel(self) -> int:
        """Number of elements of the unsharded tensor."""
        return math.prod(self.shape)

    def shards_over(self, tensor: int) -> bool:
        """Return True if a tensor axis of this size shards the weight."""
        return self.sharded and (self.heads is None or self.heads % tensor == 0)

    def local_shape(self, rank: int, size: int, expert: tuple[int, int] = (0, 1)) -> tuple[int, ...]:
        """Return the shape of the shard of a rank, as for ``Layout``."""
        if self.sharded and not self.shards_over(size):
            return self.shape
        return super().local_shape(rank, size, expert)


@dataclass(frozen=True)
class MatrixProduct:
    """Matrix product of each token with a weight: ``inputs`` -> ``outputs`` numbers, over all tensor-parallel ranks.

    Attributes:
        weight: name of the weight.
        sharding: ``column``: the tensor axis shards the outputs; ``row``: the inputs; ``none``: every rank has the
            whole weight and computes the tokens of its hidden states (1/t of them under sequence parallelism).
        times: products of one token: 1, or the number of experts that it goes to.
        heads: as for ``Weight``; a rank that holds the whole weight multiplies the rows of its own queries' heads only.
    """

    weight: str
    inputs: int
    outputs: int
    sharding: str = "none"
    times: int = 1
    heads: int | None = None


@dataclass(frozen=True)
class Attention:
    """Sizes of causal attention.

    Attributes:
        heads, kv_heads: heads of queries, and of keys and values.
        query_dim, value_dim: width of a head of queries and keys, and of values.
        window: number of tokens that a token attends to, or None.
        rotated: channels of a head of queries and keys that are rotated; 0: none.
        norms: queries and keys are normalized.
        latent: width of the vectors from which DeepSeek's heads are projected, in all; 0 without them.
    """

    heads: int
    kv_heads: int
    query_dim: int
    value_dim: int
    window: int | None = None
    rotated: int = 0
    norms: bool = False
    latent: int = 0


@dataclass(frozen=True)
class Feedforward:
    """Sizes of an MLP, or of a mixture of experts.

    Attributes:
        width: hidden width of the MLP, or of one expert.
        gated: there are a gate and a product with it.
        experts: number of experts; 0: an MLP.
        per_token: number of experts that each token goes to.
        shared: hidden width of the experts that every token goes to.
    """

    width: int
    gated: bool
    experts: int = 0
    per_token: int = 0
    shared: int = 0


@dataclass(frozen=True)
class LayerShape:
    """One layer of a model's list.

    Attributes:
        kind: ``embedding``, ``projection``, ``positions``, ``block``, ``norm`` or ``head``.
        name: name of its class.
        hidden: width of the hidden states.
        weights: its parameters, in the module's order.
        products: its products with weights.
        attention, feedforward: of a block.
        norms: number of norms over the hidden states; norm: their kind, as in ``DecoderConfig``.
        inputs: tensors of the hidden width that the norms take.
        branches: tensors of the hidden width that attention and MLP take; 1 if both take the same.
        dropout: it has a dropout (a block has two).
        tie: key of the layers that share its weights, or None.
        buffers: bytes of its buffers.
    """

    kind: str
    name: str
    hidden: int
    weights: tuple[Weight, ...]
    products: tuple[MatrixProduct, ...] = ()
    attention: Attention | None = None
    feedforward: Feedforward | None = None
    norms: int = 0
    norm: str = "rms"
    inputs: int = 1
    branches: int = 0
    dropout: bool = False
    tie: str | None = None
    buffers: int = 0

    @property
    def parameters(self) -> int:
        """Number of parameters of the unsharded layer."""
        return sum(weight.numel for weight in self.weights)


@cache
def layers_of(config: TransformerConfig, shard_tensor: bool = False) -> tuple[LayerShape, ...]:
    """List the layers of a model.

    Args:
        config: the model's configuration.
        shard_tensor: the tensor axis shards the hidden width of experts, as the option of ``decoder_layers`` does.

    Raises:
        TypeError: the configuration's class is not one of ``models/config.CONFIGS``.
        ValueError: the model is an encoder, or has recurrent layers, blocks with one branch, a gate of the attention's
            output, or modules that predict further tokens.
    """
    if isinstance(config, EncoderConfig | EncoderDecoderFields):
        kind = type(config).__name__
        raise ValueError(f"triax plan and triax memory count decoders, and no {kind}. Give a decoder's configuration.")
    if not isinstance(config, (AnyDecoderConfig, DeepseekConfig)):
        known = ", ".join(sorted(CONFIGS))
        raise TypeError(f"the layers of a {type(config).__name__} are unknown. Give one of {known}.")
    if isinstance(config, DeepseekConfig):
        if config.num_nextn_predict_layers:
            raise ValueError(
                f"num_nextn_predict_layers is {config.num_nextn_predict_layers}, and modules that predict further "
                "tokens are not counted. Plan with 0, and leave memory for as many more blocks."
            )
    elif config.linear_attention is not None or config.one_branch or config.attn_output_gate:
        raise ValueError(
            f"triax plan does not count blocks of 'linear_attention', of which layer_types has "
            f"{config.layer_types.count('linear_attention')}, one_branch={config.one_branch} and "
            f"attn_output_gate={config.attn_output_gate}. Give a configuration without them."
        )
    options: dict[str, Any] = {"shard_tensor": True} if shard_tensor and config.moe_layers else {}
    built = built_on_meta(config, **options)
    return tuple(_shape(config, spec, module, spec is built[-1][0]) for spec, module in built)


def _shape(config: AnyDecoderConfig | DeepseekConfig, spec: LayerSpec, module: nn.Module, last: bool) -> LayerShape:
    """Return the shape of a layer, which is the last one of the model or not."""
    weights, hidden = _weights(module), config.hidden_size
    tie = spec.key if isinstance(spec, TiedLayerSpec) else None
    norm = config.norm if isinstance(config, AnyDecoderConfig) else "rms"
    if isinstance(module, ResidualBlock):
        return _block(spec.typename, module, weights, norm, config)
    if isinstance(module, PositionEmbedding):
        return LayerShape("positions", spec.typename, hidden, weights, dropout=config.dropout > 0)
    if isinstance(module, Projection):
        return LayerShape("projection", spec.typename, weights[0].shape[0], weights, _products(weights))
    if last or tie or spec.typename == "TokenEmbedding":
        kind, width = "head" if last else "embedding", weights[0].shape[1]
        return LayerShape(kind, spec.typename, width, weights, _products(weights) if last else (), tie=tie)
    if isinstance(module, WithoutNorm):
        return LayerShape("norm", spec.typename, hidden, weights)
    return LayerShape("norm", spec.typename, hidden, weights, norms=1, norm=norm)


def _block(
    name: str,
    block: ResidualBlock,
    weights: tuple[Weight, ...],
    norm: str,
    config: AnyDecoderConfig | DeepseekConfig,
) -> LayerShape:
    norms = sum(each is not None for each in (block.norm1, block.norm2, block.post_norm1, block.post_norm2))
    mlp = block.mlp
    if isinstance(mlp, MLP):
        feedforward = Feedforward(mlp.down.weight.shape[1], isinstance(mlp, GatedMLP))
    else:
        moe = config.moe_arguments()
        shared = moe["shared_width"] if "shared_width" in moe else moe["shared_experts"] * moe["width"]
        feedforward = Feedforward(moe["width"], True, moe["experts"], moe["top_k"], shared)
    return LayerShape(
        *("block", name, config.hidden_size, weights, _products(weights, feedforward.per_token)),
        attention=_attention(block.attention),
        feedforward=feedforward,
        norms=norms,
        inputs=1 if block.parallel else norms,
        branches=1 if block.parallel and block.norm2 is None else 2,
        norm=norm,
        dropout=config.dropout > 0,
        buffers=sum(buffer.nbytes for buffer in block.buffers()),
    )


def _attention(layer: Any) -> Attention:
    """Return the sizes of a block's attention."""
    assert isinstance(layer, ShardedAttention)
    options, heads, keys = layer.options, layer.heads, layer.kv_heads
    rotated = options.rope.head_dim if isinstance(options.rope, Rope) else 0
    if isinstance(options, LatentOptions):
        latent = (options.q_rank or 0) + options.kv_rank + rotated
        return Attention(heads, heads, options.nope_dim + rotated, options.value_dim, rotated=rotated, latent=latent)
    assert isinstance(layer, SelfAttention)
    dim, biases = layer.head_dim, options.rope.group if isinstance(options.rope, Alibi) else 0
    return Attention(heads, keys, dim + biases, dim, options.window, rotated, layer.options.qk_norm is not None)


def _weights(module: nn.Module) -> tuple[Weight, ...]:
    """Return the parameters of a layer, in the module's order."""
    attention: Any = getattr(module, "attention", None)
    heads: dict[str, int] = {}  # of weights that the tensor axis shards by the heads of the keys
    if isinstance(attention, SelfAttention) and attention.options.kv_heads is not None:
        heads["attention.kv"] = attention.kv_heads
        if attention.options.norm_per_head:
            heads["attention.k_norm"] = attention.kv_heads
    return tuple(
        Weight(**vars(layout_of(parameter)) | {"name": name, "heads": heads.get(name.rpartition(".")[0])})
        for name, parameter in module.named_parameters()
    )


def _products(weights: Sequence[Weight], times: int = 1) -> tuple[MatrixProduct, ...]:
    """Return the products with the matrices among the weights; experts have ``times`` products of a token."""
    found = []
    for weight in weights:
        if len(weight.shape) < 2 or weight.name.endswith(("_norm.weight", "bias")):
            continue
        *_, outputs, inputs = weight.shape
        dims = len(weight.shape)
        sharding = "none" if weight.shard_dim is None else ("column", "row")[weight.shard_dim - (dims - 2)]
        repeated = times if weight.expert_dim is not None else 1
        found.append(MatrixProduct(weight.name, inputs, outputs, sharding, repeated, weight.heads))
    return tuple(found)
