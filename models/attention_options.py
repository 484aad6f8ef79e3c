"""Options of a layer of attention, by which the layers of the families differ."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from ..context.sparsity import Sparsity
from ..options.base import Declared, option
from ..tensor_parallel.norm import RMSNorm
from .alibi import Alibi
from .rope import Rope


@dataclass(frozen=True, kw_only=True)
class ScoreOptions(Declared):
    """Options of what follows the projections to queries, keys and values: positions, mask, scores."""

    rope: Rope | Alibi | None = option(
        None, "Rotary embedding of queries and keys, or Alibi, which needs scale; None: no positions."
    )
    causal: bool = option(True, "A token attends to itself and to earlier tokens only; False: to all of its row.")
    window: int | None = option(
        None, "Tokens that a token attends to, itself included (sliding window); None: all before it."
    )
    chunk: int | None = option(None, "A token attends within its chunk of this many tokens only; None: no chunks.")
    sparsity: Sparsity | None = option(None, "Block mask of sparse attention; None: no mask.")
    scale: float | None = option(None, "Factor of the scores; None: dim ** -0.5, of the width of a query.")
    softcap: float | None = option(None, "Cap c of the scores, which become c tanh(scores / c); None: no cap.")
    sinks: bool = option(
        False, "Each head has one more score, which takes a part of the softmax and adds nothing (gpt-oss)."
    )
    l2_norm: float | None = option(
        None, "Epsilon of an RMSNorm without a weight over each head of q and k, behind rope; None: none."
    )
    temperature: tuple[float, int] | None = option(
        None,
        "(a, n): the queries at position p are multiplied by 1 + a ln(1 + floor((p + 1) / n)) (Llama 4); None: by 1.",
    )


@dataclass(frozen=True, kw_only=True)
class AttentionOptions(ScoreOptions):
    """Options of ``SelfAttention``."""

    head_dim: int = option(0, "Width of each head; 0: width / heads.")
    kv_heads: int | None = option(
        None, "Key/value heads, a divisor of the heads; None: as many, and q, k and v are one weight."
    )
    bias: bool = option(False, "Add biases to q, k and v, with initial value 0.")
    out_bias: bool = option(False, "Add a bias to the output projection.")
    qk_norm: float | None = option(None, "Epsilon of an RMSNorm over each head of q and of k; None: no norm.")
    norm_all_heads: bool = option(False, "This norm is over all heads of q together, and over all heads of k.")
    norm_per_head: bool = option(False, "This norm is a LayerNorm with a weight for each head.")
    norm_after: bool = option(False, "This norm is behind rope, not before it.")
    norm: Callable[..., nn.Module] = option(RMSNorm, "Maker of this norm over each head.")
    clip: float | None = option(
        None, "q, k and v are clipped to plus and minus this number, before rope; None: no limit."
    )
    output_gate: bool = option(False, "Multiply the result by the sigmoid of a projection of the input (Qwen3-Next).")
