"""Shapes of a model's layers: parameters, matrix products and attention of each, from its configuration. No torch.

``layers_of`` lists the layers of the functions that make a model (``decoder_layers``, ``deepseek_layers``), in their
order. The formulas for memory, time and traffic read these shapes only.

>>> from triax.models.config import LlamaConfig
>>> layers = layers_of(LlamaConfig.preset("llama3-8b"))
>>> [layer.name for layer in layers[:2]], len(layers), sum(layer.parameters for layer in layers)
(['TokenEmbedding', 'LlamaBlock'], 35, 8030261248)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ...grid.ranges import shard_shape
from ...models.config import CONFIGS, DecoderConfig, DeepseekConfig, TransformerConfig


@dataclass(frozen=True)
class Weight:
    """One parameter of a layer. Its fields are those of ``grid.layout.Layout``, which needs torch.

    Attributes:
        name: name within the layer, such as ``attention.out.weight``.
        shape: the unsharded shape.
        shard_dim: the dim that the tensor axis shards; None: each rank holds the whole tensor, and under sequence
            parallelism its gradient is summed over the tensor axis.
        parts: lengths of fused parts along ``shard_dim``, each sharded on its own; None: one part.
        unit: rows along ``shard_dim`` that stay together.
        expert_dim: the dim that the expert axis shards, or None.
        heads: if given, the tensor axis shards the weight only if its size divides this number, and otherwise each rank
            holds the whole weight (keys and values of grouped queries).
    """

    name: str
    shape: tuple[int, ...]
    shard_dim: int | None = None
    parts: tuple[int, ...] | None = None
    unit: int = 1
    expert_dim: int | None = None
    heads: int | None = None

    @property
    def numel(self) -> int:
        """Number of elements of the unsharded tensor."""
        return math.prod(self.shape)

    def sharded(self, tensor: int) -> bool:
        """Return True if a tensor axis of this size shards the weight."""
        return self.shard_dim is not None and (self.heads is None or self.heads % tensor == 0)

    def local_shape(self, rank: int, tensor: int, expert: tuple[int, int] = (0, 1)) -> tuple[int, ...]:
        """Return the shape of a rank's shard.

        Args:
            rank, tensor: rank on, and size of, the tensor axis.
            expert: rank on, and size of, the expert axis.
        """
        dim = self.shard_dim if self.sharded(tensor) else None
        return shard_shape(self.shape, rank, tensor, dim, self.parts, self.unit, expert, self.expert_dim)


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


def layers_of(config: TransformerConfig, shard_tensor: bool = False) -> list[LayerShape]:
    """List the layers of a model.

    Args:
        config: the model's configuration.
        shard_tensor: the tensor axis shards the hidden width of experts, as the option of ``decoder_layers`` does.

    Raises:
        TypeError: the configuration's class is not one of ``models/config.CONFIGS``.
        ValueError: the model has modules that predict further tokens.
    """
    if isinstance(config, DecoderConfig):
        if config.linear_attention is not None or config.one_branch or config.attn_output_gate:
            raise ValueError(
                f"triax plan does not count blocks of 'linear_attention', of which layer_types has "
                f"{config.layer_types.count('linear_attention')}, one_branch={config.one_branch} and "
                f"attn_output_gate={config.attn_output_gate}. Give a configuration without them."
            )
        return _decoder(config, shard_tensor)
    if isinstance(config, DeepseekConfig):
        if config.num_nextn_predict_layers:
            raise ValueError(
                f"num_nextn_predict_layers is {config.num_nextn_predict_layers}, and modules that predict further "
                "tokens are not counted. Plan with 0, and leave memory for as many more blocks."
            )
        return _deepseek(config, shard_tensor)
    raise TypeError(f"the layers of a {type(config).__name__} are unknown. Give one of {', '.join(sorted(CONFIGS))}.")


# ------------------------------------------------------------------------------------------------ parts of layers


def _linear(name: str, outputs: int, inputs: int, bias: bool, sharding: str, **how: Any) -> tuple[Weight, ...]:
    """Return weight and bias of a column-parallel or a row-parallel linear layer."""
    dim = {"column": 0, "row": 1, "none": None}[sharding]
    weights = [Weight(f"{name}.weight", (outputs, inputs), dim, **how)]
    if bias:
        column = {"shard_dim": 0, **how} if sharding == "column" else {}
        weights.append(Weight(f"{name}.bias", (outputs,), **column))
    return tuple(weights)


def _norm(name: str, width: int, kind: str) -> tuple[Weight, ...]:
    """Return the weights of a norm; ``name`` ends with a dot, or is empty."""
    endings = () if kind.endswith("plain") else ("weight", "bias")[: 2 if kind in ("layer", "layer_offset") else 1]
    return tuple(Weight(f"{name}{ending}", (width,)) for ending in endings)


def _products(weights: Sequence[Weight], times: int = 1) -> tuple[MatrixProduct, ...]:
    """Return the products with the matrices among the weights."""
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


def _mlp(width: int, hidden: int, gated: bool, bias: bool) -> tuple[Weight, ...]:
    if gated:
        first = _linear("mlp.gate_up", 2 * hidden, width, bias, "column", parts=(hidden, hidden))
    else:
        first = _linear("mlp.up", hidden, width, bias, "column")
    return (*first, *_linear("mlp.down", width, hidden, bias, "row"))


def _experts(
    width: int, sizes: Feedforward, shard_tensor: bool, gate: bool = False, bias: bool = False, by_turns: bool = False
) -> tuple[Weight, ...]:
    """Return the weights of a mixture of gated experts.

    Args:
        width: width of the residual stream.
        sizes: the experts.
        shard_tensor: the tensor axis shards their hidden width.
        gate: the shared experts have a gate.
        bias: router and experts have biases.
        by_turns: the rows of gate and up lie by turns.
    """
    shards = shard_tensor
    weights = [Weight("mlp.shared_gate", (1, width))] if gate and sizes.shared else []
    weights += [Weight("mlp.router.weight", (sizes.experts, width))]
    weights += [Weight("mlp.router.bias", (sizes.experts,))] if bias else []
    for name, each, count in (("routed", sizes.width, sizes.experts), ("shared", sizes.shared, 0)):
        if not each:
            continue
        lead, at = ((count,), 1) if count else ((), 0)
        expert: dict[str, Any] = {"expert_dim": 0} if count else {}
        parts: dict[str, Any] = {"parts": (2 * each,), "unit": 2} if by_turns else {"parts": (each, each)}
        first: dict[str, Any] = {"shard_dim": at, **parts} if shards else {}
        last: dict[str, Any] = {"shard_dim": at + 1} if shards else {}
        weights.append(Weight(f"mlp.{name}.gate_up", (*lead, 2 * each, width), **first, **expert))
        weights.append(Weight(f"mlp.{name}.down", (*lead, width, each), **last, **expert))
        if bias and count:
            weights.append(Weight(f"mlp.{name}.gate_up_bias", (count, 2 * each), **first, **expert))
            weights.append(Weight(f"mlp.{name}.down_bias", (count, width), **expert))
    return tuple(weights)


def _projection(inputs: int, outputs: int) -> LayerShape:
    """Return a projection between the width of the token embeddings and that of the model."""
    weights = _linear("linear", outputs, inputs, False, "none")
    return LayerShape("projection", "Projection", outputs, weights, _products(weights))


def _ends(
    config: TransformerConfig, softcap: bool = False, bias: bool = False, narrow: int = 0
) -> tuple[LayerShape, LayerShape]:
    """Return the token embedding and the head; ``narrow`` is their width if it is not the model's."""
    vocabulary, width = config.vocab_size, narrow or config.hidden_size
    rows = Weight("weight", (vocabulary, width), 0)
    tie = "embed" if config.tie_word_embeddings else None
    embedding = LayerShape("embedding", "TokenEmbedding", width, (rows,), tie=tie)
    weights = (rows, Weight("bias", (vocabulary,), 0)) if bias else (rows,)
    name = "TokenEmbedding" if tie else "CappedHead" if softcap else "VocabParallelHead"
    return embedding, LayerShape("head", name, width, weights, _products(weights), tie=tie)


def _positions(config: TransformerConfig, offset: int = 0) -> LayerShape:
    weight = Weight("weight", (offset + config.max_position_embeddings, config.hidden_size))
    return LayerShape("positions", "PositionEmbedding", config.hidden_size, (weight,), dropout=config.dropout > 0)


def _final_norm(width: int, kind: str) -> LayerShape:
    offset, base = "Offset" * kind.endswith("offset"), "LayerNorm" if kind.startswith("layer") else "RMSNorm"
    return LayerShape("norm", f"Final{offset}{base}", width, _norm("", width, kind), norms=1, norm=kind)


# ------------------------------------------------------------------------------------------------------ families


def _decoder(config: DecoderConfig, shard_tensor: bool) -> list[LayerShape]:
    d, hidden, kind = config.hidden_size, config.intermediate_size, config.norm
    attention, mlp = _attention(config), _mlp(d, hidden, config.gated, config.mlp_bias)
    dense, sparse = Feedforward(hidden, config.gated), set(config.moe_layers)
    shared = config.shared_expert_intermediate_size
    experts = Feedforward(config.moe_intermediate_size, True, config.num_experts, config.num_experts_per_tok, shared)
    clamped, biased = config.swiglu_limit is not None, config.selection_bias or config.scoring_func == "sigmoid"
    mixture = _experts(d, experts, shard_tensor, config.shared_expert_gate, config.moe_bias, clamped) if sparse else ()
    before, behind = config.norm_place in ("before", "both"), config.norm_place != "before"
    norms = 1 if config.shared_norm else 4 if before and behind else 2
    blocks = []
    for layer in range(config.num_hidden_layers):
        branch, sizes = (mixture, experts) if layer in sparse else (mlp, dense)
        weights = (
            *(_norm("norm1.", d, kind) if before else ()),
            *attention,
            *(_norm("norm2.", d, kind) if before and not config.shared_norm else ()),
            *branch,
            *((*_norm("post_norm1.", d, kind), *_norm("post_norm2.", d, kind)) if behind else ()),
        )
        blocks.append(
            LayerShape(
                *("block", config.BLOCK, d, weights, (*_products(attention), *_products(branch, sizes.per_token))),
                attention=_attention_sizes(config, layer),
                feedforward=sizes,
                norms=norms,
                inputs=1 if config.parallel_residual else norms,
                branches=1 if config.shared_norm else 2,
                norm=kind,
                dropout=config.dropout > 0,
                buffers=4 * config.num_experts if layer in sparse and biased else 0,  # the router's bias, fp32
            )
        )
    capped = config.final_logit_softcapping is not None or config.logit_scale != 1.0
    first, head = _ends(config, capped, config.head_bias, config.embedding_size)
    learned = [_positions(config, config.position_offset)] * config.learned_positions
    if config.embedding_norm:
        learned.insert(0, LayerShape("norm", "EmbeddingNorm", d, _norm("norm.", d, kind), norms=1, norm=kind))
    last = LayerShape("norm", "WithoutNorm", d, ()) if config.norm_place == "sum" else _final_norm(d, kind)
    widened, narrowed = [], []
    if narrow := config.embedding_size:
        widened, narrowed = [_projection(narrow, d)], [_projection(d, narrow)]
    return [first, *widened, *learned, *blocks, last, *narrowed, head]


def _attention(config: DecoderConfig) -> tuple[Weight, ...]:
    """Return the weights of the attention of a block."""
    d, heads, keys, dim = config.hidden_size, config.num_attention_heads, config.num_key_value_heads, config.head_dim
    queries, pair = heads * dim, {"parts": (keys * dim, keys * dim), "unit": dim, "heads": keys}
    weights = [Weight("attention.sinks", (heads,), 0)] if config.attention_sinks else []
    if config.fused_qkv:
        weights += _linear("attention.qkv", 3 * queries, d, config.qkv_bias, "column", parts=(queries,) * 3, unit=dim)
    else:
        weights += _linear("attention.q", queries, d, config.qkv_bias, "column", unit=dim)
        weights += _linear("attention.kv", 2 * keys * dim, d, config.qkv_bias, "column", **pair)
    if config.qk_norm_all_heads:
        weights += [
            Weight(f"attention.{name}_norm.weight", (count * dim,), 0, unit=dim)
            for name, count in (("q", heads), ("k", keys))
        ]
    elif config.qk_norm_per_head:
        weights += [Weight("attention.q_norm.weight", (heads, dim), 0)]
        weights += [Weight("attention.k_norm.weight", (keys, dim), 0, heads=keys)]
    elif config.qk_norm and config.norm != "rms_plain":
        weights += [Weight(f"attention.{name}_norm.weight", (dim,)) for name in "qk"]
    return (*weights, *_linear("attention.out", d, queries, config.out_bias, "row", unit=dim))


def _attention_sizes(config: DecoderConfig, layer: int) -> Attention:
    normed = config.qk_norm or config.qk_norm_all_heads or config.qk_norm_per_head
    heads, keys, dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    rotated = config.rotary_dim if config.has_rope(layer) else 0
    wide = dim + (heads // keys if config.alibi else 0)
    return Attention(heads, keys, wide, dim, config.window_of(layer), rotated, normed)


def _deepseek(config: DeepseekConfig, shard_tensor: bool) -> list[LayerShape]:
    d, heads, rank = config.hidden_size, config.num_attention_heads, config.kv_lora_rank
    nope, rope, value = config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim
    query, pair = nope + rope, nope + value
    if config.q_lora_rank is None:
        queries = _linear("attention.q", heads * query, d, False, "column", unit=query)
    else:
        queries = (
            *_linear("attention.q_a", config.q_lora_rank, d, False, "none"),
            *_norm("attention.q_a_norm.", config.q_lora_rank, "rms"),
            *_linear("attention.q_b", heads * query, config.q_lora_rank, False, "column", unit=query),
        )
    attention = (
        *queries,
        *_linear("attention.kv_a", rank + rope, d, False, "none"),
        *_norm("attention.kv_a_norm.", rank, "rms"),
        *_linear("attention.kv_b", heads * pair, rank, False, "column", unit=pair),
        *_linear("attention.out", d, heads * value, False, "row", unit=value),
    )
    latent = (config.q_lora_rank or 0) + rank + rope
    shared = config.n_shared_experts * config.moe_intermediate_size
    experts = Feedforward(
        *(config.moe_intermediate_size, True, config.n_routed_experts, config.num_experts_per_tok, shared)
    )
    dense, sparse = Feedforward(config.intermediate_size, gated=True), set(config.moe_layers)
    blocks = []
    for layer in range(config.num_hidden_layers):
        sizes = experts if layer in sparse else dense
        mlp = _experts(d, sizes, shard_tensor) if layer in sparse else _mlp(d, sizes.width, True, False)
        biased = layer in sparse and config.scoring_func == "sigmoid"
        blocks.append(
            LayerShape(
                *(
                    "block",
                    "DeepseekBlock",
                    d,
                    (*_norm("norm1.", d, "rms"), *attention, *_norm("norm2.", d, "rms"), *mlp),
                ),
                products=(*_products(attention), *_products(mlp, sizes.per_token)),
                attention=Attention(heads, heads, query, value, rotated=rope, latent=latent),
                feedforward=sizes,
                norms=2,
                inputs=2,
                branches=2,
                dropout=config.dropout > 0,
                buffers=4 * config.n_routed_experts if biased else 0,  # the router's bias, fp32
            )
        )
    first, head = _ends(config)
    return [first, *blocks, _final_norm(d, "rms"), head]
