"""Configurations of the models as plain data, without torch: sizes, presets, number of parameters.

Fields that Hugging Face's configurations also have are named as there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Self

from ..base.errors import nearest
from ..grid.ranges import check_units


def _shape(hidden_size: int, num_hidden_layers: int, num_attention_heads: int, **others: Any) -> dict[str, Any]:
    sizes = {"hidden_size": hidden_size, "num_hidden_layers": num_hidden_layers}
    return sizes | {"num_attention_heads": num_attention_heads, **others}


_BYTES: dict[str, Any] = {"vocab_size": 256}
_GPT3: dict[str, Any] = {"max_position_embeddings": 2048}

# GPT-2: Radford et al. 2019, table 2, and its released weights. GPT-3: Brown et al. 2020, arXiv:2005.14165,
# table 2.1, where two rows contradict their own width = heads x head dim: gpt3-xl has 24 heads of 128 for
# width 2048 (16 here) and gpt3-13b a width of 5140 for 40 heads of 128 (5120 here). Its even layers attend
# sparsely; all of ours attend densely. "bytes": any text as its UTF-8 bytes, no tokenizer; sizes for a
# laptop.
_PRESETS: dict[str, dict[str, Any]] = {
    "gpt2": _shape(768, 12, 12, dropout=0.1),
    "gpt2-medium": _shape(1024, 24, 16, dropout=0.1),
    "gpt2-large": _shape(1280, 36, 20, dropout=0.1),
    "gpt2-xl": _shape(1600, 48, 25, dropout=0.1),
    "gpt3-small": _shape(768, 12, 12, **_GPT3),
    "gpt3-medium": _shape(1024, 24, 16, **_GPT3),
    "gpt3-large": _shape(1536, 24, 16, **_GPT3),
    "gpt3-xl": _shape(2048, 24, 16, **_GPT3),
    "gpt3-2.7b": _shape(2560, 32, 32, **_GPT3),
    "gpt3-6.7b": _shape(4096, 32, 32, **_GPT3),
    "gpt3-13b": _shape(5120, 40, 40, **_GPT3),
    "gpt3-175b": _shape(12288, 96, 96, **_GPT3),
    "bytes-tiny": _shape(32, 2, 4, max_position_embeddings=64, **_BYTES),
    "bytes-small": _shape(128, 4, 4, max_position_embeddings=128, **_BYTES),
    "bytes-medium": _shape(256, 8, 8, max_position_embeddings=256, **_BYTES),
}


@dataclass(frozen=True)
class TransformerConfig:
    """Fields and checks that the configurations of all models share.

    Attributes:
        vocab_size: number of different tokens. The tensor axis need not divide it.
        max_position_embeddings: length of the longest sequence, in tokens.
        hidden_size: width of the residual stream.
        num_hidden_layers: number of blocks.
        num_attention_heads: number of query heads. The tensor axis has at most as many ranks.
        dropout: dropout probability for the embeddings and for the output of each residual branch.
        tie_word_embeddings: share one weight between the output layer and the token embedding.
        initializer_range: standard deviation of the initial weights. The last weight of a residual branch has
            ``initializer_range / sqrt(2 num_hidden_layers)`` (Radford et al. 2019, section 2.3). Biases start at 0.
        sliding_window: number of tokens that a token attends to, itself included; None: all tokens before it.

    Raises:
        ValueError: a size below 1, or a dropout outside [0, 1).
    """

    PRESETS: ClassVar[dict[str, dict[str, Any]]] = {}
    SIZES: ClassVar[tuple[str, ...]] = (
        *("vocab_size", "max_position_embeddings", "hidden_size", "num_hidden_layers", "num_attention_heads"),
    )
    SHARDED: ClassVar[tuple[str, ...]] = ("num_attention_heads", "vocab_size")  # over the tensor axis
    EPSILON: ClassVar[str]  # the field with the epsilon of the norms

    vocab_size: int
    max_position_embeddings: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    dropout: float = field(default=0.0, kw_only=True)
    tie_word_embeddings: bool = field(default=False, kw_only=True)
    initializer_range: float = field(default=0.02, kw_only=True)
    sliding_window: int | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        for name in (*self.SIZES, *(() if self.sliding_window is None else ("sliding_window",))):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}. Give at least 1.")
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"dropout is {self.dropout}. Give a probability in [0, 1).")

    @property
    def layer_count(self) -> int:
        """Number of entries in the model's list of layers: embedding, learned positions if any, blocks, norm, head."""
        return self.num_hidden_layers + 3

    @property
    def norm_epsilon(self) -> float:
        """Epsilon of the norms."""
        return float(getattr(self, self.EPSILON))

    @classmethod
    def preset(cls, name: str, **changes: Any) -> Self:
        """Make a published configuration or a small one for tests by name, with the given fields changed.

        >>> GPTConfig.preset("gpt2").parameter_count
        124439808
        >>> LlamaConfig.preset("llama3-8b").parameter_count
        8030261248

        Raises:
            ValueError: the name is unknown; the message has the nearest one.
            TypeError: a field is unknown; the message has the nearest one.
        """
        if name not in cls.PRESETS:
            raise ValueError(f"there is no preset {name!r}; {nearest(name, cls.PRESETS)}")
        known = [each.name for each in fields(cls)]
        if unknown := sorted(set(changes) - set(known)):
            raise TypeError(f"{cls.__name__} has no field {unknown[0]!r}; {nearest(unknown[0], known)}")
        return cls(**cls.PRESETS[name] | changes)

    @classmethod
    def presets(cls) -> tuple[str, ...]:
        """List the names of the presets that ``preset`` accepts."""
        return tuple(cls.PRESETS)

    @property
    def residual_std(self) -> float:
        """Initial standard deviation of the last weight of each residual branch; a block has two such branches."""
        return float(self.initializer_range / (2 * self.num_hidden_layers) ** 0.5)

    @property
    def parameter_count(self) -> int:
        """Number of parameters, a tied one counted once."""
        raise NotImplementedError(f"{type(self).__name__} does not count its parameters")

    def check_tensor(self, tensor: int) -> None:
        """Check that a tensor axis of size ``tensor`` can shard this model, before any process starts.

        Raises:
            ValueError: the size exceeds a number of ``SHARDED``, such as the number of heads or the vocabulary.
        """
        for name in self.SHARDED:
            check_units(name, getattr(self, name), 1, tensor)

    def _check_heads(self, others: str) -> None:
        """Raise ValueError if the number of heads does not divide the width."""
        heads, width = self.num_attention_heads, self.hidden_size
        if width % heads:
            raise ValueError(
                f"num_attention_heads={heads} does not divide hidden_size={width}. Give, for example, "
                f"hidden_size={width // heads * heads or heads}{others}."
            )


@dataclass(frozen=True)
class GPTConfig(TransformerConfig):
    """Configuration of a decoder-only transformer like GPT-2, with learned positions, pre-LayerNorm and GELU.

    Attributes, beside those of ``TransformerConfig``:
        max_position_embeddings: length of the longest sequence, which is also the number of learned positions.
        num_attention_heads: number of heads, which must divide ``hidden_size``.
        mlp_ratio: ratio of the MLP's width to ``hidden_size``.
        layer_norm_epsilon: epsilon of each LayerNorm.

    Raises:
        ValueError: the number of heads does not divide the width, or a check of ``TransformerConfig`` fails.
    """

    PRESETS: ClassVar[dict[str, dict[str, Any]]] = _PRESETS
    SIZES: ClassVar[tuple[str, ...]] = (*TransformerConfig.SIZES, "mlp_ratio")
    EPSILON: ClassVar[str] = "layer_norm_epsilon"

    vocab_size: int = 50257
    max_position_embeddings: int = 1024
    hidden_size: int = 768
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    mlp_ratio: int = 4
    layer_norm_epsilon: float = 1e-5
    tie_word_embeddings: bool = field(default=True, kw_only=True)

    @property
    def layer_count(self) -> int:
        """Number of entries in the model's list of layers, with one for the learned positions."""
        return super().layer_count + 1

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_heads("")

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.hidden_size // self.num_attention_heads

    @property
    def intermediate_size(self) -> int:
        """Width of the MLP."""
        return self.mlp_ratio * self.hidden_size

    @property
    def parameter_count(self) -> int:
        """Number of parameters, a tied one counted once."""
        d, hidden = self.hidden_size, self.intermediate_size
        attention = 3 * d * (d + 1) + d * (d + 1)  # qkv, out: weights and biases
        mlp = hidden * (d + 1) + d * (hidden + 1)  # up, down
        norm = 2 * d
        embeddings = (self.vocab_size + self.max_position_embeddings) * d
        head = 0 if self.tie_word_embeddings else self.vocab_size * d
        return embeddings + self.num_hidden_layers * (attention + mlp + 2 * norm) + norm + head


# --------------------------------------------------------------------------------------------- Llama's family


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3.1's scaling of the rotary frequencies to contexts longer than those of pretraining.

    With L = ``original_max_position_embeddings``, wavelengths below L / ``high_freq_factor`` stay, those above
    L / ``low_freq_factor`` grow by ``factor``, and between the two the frequency is interpolated linearly
    (Grattafiori et al. 2024, arXiv:2407.21783, section 3.4.1, and the code released with it).

    Attributes:
        factor: factor by which the longest wavelengths grow.
        low_freq_factor, high_freq_factor: bounds of the interpolation: it covers the wavelengths between
            L / ``high_freq_factor`` and L / ``low_freq_factor``.
        original_max_position_embeddings: L, the context length of pretraining, in tokens.

    Raises:
        ValueError: ``factor`` is below 1, or the interval of the interpolation is empty.
    """

    factor: float = 8.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192

    def __post_init__(self) -> None:
        if self.factor < 1.0 or self.original_max_position_embeddings < 1:
            raise ValueError(
                f"rope_scaling: factor is {self.factor} and original_max_position_embeddings is "
                f"{self.original_max_position_embeddings}. Give at least 1 for each."
            )
        if not 0.0 < self.low_freq_factor < self.high_freq_factor:
            raise ValueError(
                f"low_freq_factor is {self.low_freq_factor} and high_freq_factor is {self.high_freq_factor}. Give "
                "0 < low_freq_factor < high_freq_factor, such as 1 and 4."
            )


@dataclass(frozen=True)
class LinearScaling:
    """Linear scaling of the rotary positions: every position is divided by ``factor`` (arXiv:2306.15595).

    Raises:
        ValueError: ``factor`` is below 1.
    """

    factor: float = 8.0

    def __post_init__(self) -> None:
        if self.factor < 1.0:
            raise ValueError(f"rope_scaling: factor is {self.factor}. Give at least 1.")


@dataclass(frozen=True)
class YarnScaling:
    """YaRN's scaling of the rotary frequencies, and of the attention, to contexts longer than those of pretraining.

    Peng et al. 2023, arXiv:2309.00071; with DeepSeek's factors of the attention (arXiv:2405.04434, section 3.1.4).

    Attributes:
        factor: ratio of the longest context to that of pretraining.
        original_max_position_embeddings: context length of pretraining, in tokens.
        beta_fast, beta_slow: pairs with at least ``beta_fast`` rotations over that length keep their frequency, those
            with at most ``beta_slow`` get 1 / ``factor`` of it, and those between are interpolated.
        mscale, mscale_all_dim: coefficients of ln ``factor`` in the factors of the rotated channels, and of the scores;
            0: not given.
        attention_factor: factor of the rotated channels; None: computed from the other fields.
        truncate: round the bounds of the interpolation to whole pairs.

    Raises:
        ValueError: ``factor`` is below 1, or the interval of the interpolation is empty.
    """

    factor: float = 40.0
    original_max_position_embeddings: int = 4096
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    attention_factor: float | None = None
    truncate: bool = True

    def __post_init__(self) -> None:
        if self.factor < 1.0 or self.original_max_position_embeddings < 1:
            raise ValueError(
                f"rope_scaling: factor is {self.factor} and original_max_position_embeddings is "
                f"{self.original_max_position_embeddings}. Give at least 1 for each."
            )
        if not 0.0 < self.beta_slow <= self.beta_fast:
            raise ValueError(
                f"beta_slow is {self.beta_slow} and beta_fast is {self.beta_fast}. Give 0 < beta_slow <= beta_fast, "
                "such as 1 and 32."
            )

    def magnitude(self) -> float:
        """Return the factor of the rotated channels of queries and keys."""
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self._grown(self.mscale) / self._grown(self.mscale_all_dim)
        return self._grown(1.0)

    def score_factor(self) -> float:
        """Return the factor of the attention's scores."""
        return self._grown(self.mscale_all_dim) ** 2 if self.mscale_all_dim else 1.0

    def _grown(self, coefficient: float) -> float:
        return 0.1 * coefficient * math.log(self.factor) + 1.0


Scaling = RopeScaling | YarnScaling | LinearScaling

_LLAMA2: dict[str, Any] = {"vocab_size": 32000, "max_position_embeddings": 4096}
_LLAMA3: dict[str, Any] = {
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "num_key_value_heads": 8,
    "rope_theta": 5e5,
}
_LLAMA31: dict[str, Any] = _LLAMA3 | {"max_position_embeddings": 131072, "rope_scaling": RopeScaling()}
_QWEN: dict[str, Any] = {"vocab_size": 151936, "rope_theta": 1e6, "rms_norm_eps": 1e-6, "tie_word_embeddings": True}

# Touvron et al. 2023, arXiv:2307.09288; Grattafiori et al. 2024, arXiv:2407.21783, table 3; Qwen2.5:
# arXiv:2412.15115, table 1; Qwen3: arXiv:2505.09388, table 1; and the configurations released with the weights.
_LLAMA_PRESETS: dict[str, dict[str, Any]] = {
    "llama2-7b": _shape(4096, 32, 32, intermediate_size=11008, **_LLAMA2),
    "llama2-13b": _shape(5120, 40, 40, intermediate_size=13824, **_LLAMA2),
    "llama2-70b": _shape(8192, 80, 64, intermediate_size=28672, num_key_value_heads=8, **_LLAMA2),
    "llama3-8b": _shape(4096, 32, 32, intermediate_size=14336, **_LLAMA3),
    "llama3-70b": _shape(8192, 80, 64, intermediate_size=28672, **_LLAMA3),
    "llama3.1-8b": _shape(4096, 32, 32, intermediate_size=14336, **_LLAMA31),
    "llama3.1-70b": _shape(8192, 80, 64, intermediate_size=28672, **_LLAMA31),
    "llama3.1-405b": _shape(16384, 126, 128, intermediate_size=53248, **_LLAMA31),
    "llama3.2-1b": _shape(2048, 16, 32, intermediate_size=8192, tie_word_embeddings=True, **_LLAMA31)
    | {"rope_scaling": RopeScaling(factor=32.0)},
    "qwen2.5-0.5b": _shape(896, 24, 14, intermediate_size=4864, num_key_value_heads=2, **_QWEN)
    | {"max_position_embeddings": 32768, "qkv_bias": True},
    "qwen3-0.6b": _shape(1024, 28, 16, intermediate_size=3072, num_key_value_heads=8, head_dim=128, **_QWEN)
    | {"max_position_embeddings": 40960, "qk_norm": True},
    "llama-tiny": _shape(32, 2, 4, intermediate_size=88, num_key_value_heads=2, max_position_embeddings=64, **_BYTES),
    "llama-small": _shape(
        128, 4, 4, intermediate_size=344, num_key_value_heads=2, max_position_embeddings=128, **_BYTES
    ),
}


@dataclass(frozen=True)
class LlamaConfig(TransformerConfig):
    """Configuration of a decoder-only transformer like Llama.

    The model has rotary positions, pre-RMSNorm, SwiGLU and grouped queries. With ``qkv_bias`` it has the architecture
    of Qwen2, with ``qk_norm`` that of Qwen3, with ``sliding_window`` that of Mistral, with ``no_rope_layers`` that of
    SmolLM3. ``DecoderConfig`` has the settings of further families.

    Attributes, beside those of ``TransformerConfig``:
        max_position_embeddings: length of the longest sequence. No tensor of the model depends on it.
        num_key_value_heads: number of key/value heads, which must divide ``num_attention_heads``; 0 means
            ``num_attention_heads``. If the tensor axis does not divide this number, each rank holds the whole weights
            of keys and values, and computes only the heads that its queries use.
        intermediate_size: width of the gated MLP.
        head_dim: width of one head, an even number; 0 means ``hidden_size / num_attention_heads``.
        rope_theta: base of the rotary wavelengths (Su et al. 2021, arXiv:2104.09864).
        rope_scaling: scaling of the rotary frequencies: Llama 3.1's, YaRN's, a linear one, or None.
        rms_norm_eps: epsilon of each norm.
        qkv_bias: add biases to queries, keys and values, with initial value 0.
        qk_norm: apply an RMSNorm to each head of the queries and of the keys, before the rotation.
        qk_norm_all_heads: apply an RMSNorm to all heads of the queries together, and to those of the keys (OLMoE,
            OLMo-2).
        out_bias, mlp_bias: add biases to the output of attention and to the linear layers of the MLP.
        layer_types: for each block ``"sliding_attention"``, with ``sliding_window``, or ``"full_attention"``; (): all
            blocks have the window if there is one.
        no_rope_layers: for each block 1 if it has rotary positions, 0 if it has none; (): all have them.

    Raises:
        ValueError: the numbers of heads or the width do not divide each other as required, or a check of
            ``TransformerConfig`` fails.
    """

    PRESETS: ClassVar[dict[str, dict[str, Any]]] = _LLAMA_PRESETS
    SIZES: ClassVar[tuple[str, ...]] = (*TransformerConfig.SIZES, "intermediate_size")
    SHARDED: ClassVar[tuple[str, ...]] = (*TransformerConfig.SHARDED, "intermediate_size")
    EPSILON: ClassVar[str] = "rms_norm_eps"

    vocab_size: int = 32000
    max_position_embeddings: int = 4096
    hidden_size: int = 4096
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int = 0
    intermediate_size: int = 11008
    head_dim: int = 0
    rope_theta: float = 1e4
    rope_scaling: Scaling | None = None
    rms_norm_eps: float = 1e-5
    qkv_bias: bool = False
    qk_norm: bool = False
    qk_norm_all_heads: bool = field(default=False, kw_only=True)
    out_bias: bool = field(default=False, kw_only=True)
    mlp_bias: bool = field(default=False, kw_only=True)
    layer_types: tuple[str, ...] = field(default=(), kw_only=True)
    no_rope_layers: tuple[int, ...] = field(default=(), kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        heads = self.num_attention_heads
        for name in ("layer_types", "no_rope_layers"):
            given = tuple(getattr(self, name))
            object.__setattr__(self, name, given)
            if given and len(given) != self.num_hidden_layers:
                raise ValueError(
                    f"{name} has {len(given)} entries, but num_hidden_layers is {self.num_hidden_layers}. Give one "
                    "for each block."
                )
        if set(self.layer_types) == {"full_attention"}:
            object.__setattr__(self, "sliding_window", None)
        if len(set(self.layer_types)) == 1:  # one configuration is written in one way
            object.__setattr__(self, "layer_types", ())
        if all(self.no_rope_layers):
            object.__setattr__(self, "no_rope_layers", ())
        if unknown := sorted(set(self.layer_types) - {"sliding_attention", "full_attention"}):
            raise ValueError(f"layer_types has {unknown[0]!r}. Give 'sliding_attention' or 'full_attention'.")
        if "sliding_attention" in self.layer_types and self.sliding_window is None:
            raise ValueError("layer_types has 'sliding_attention', but sliding_window is None. Give the window.")
        if self.qk_norm and self.qk_norm_all_heads:
            raise ValueError("qk_norm and qk_norm_all_heads are both True. Give one of them.")
        if not self.head_dim:
            self._check_heads(", or give head_dim")
        # The fields that were left out get their values, so that a reader of the configuration need not know the rule.
        object.__setattr__(self, "num_key_value_heads", self.num_key_value_heads or heads)
        object.__setattr__(self, "head_dim", self.head_dim or self.hidden_size // heads)
        if self.num_key_value_heads < 1 or heads % self.num_key_value_heads:
            fits = ", ".join(str(n) for n in range(1, heads + 1) if heads % n == 0)
            raise ValueError(
                f"num_key_value_heads={self.num_key_value_heads} does not divide num_attention_heads={heads}. Give "
                f"one of {fits}."
            )
        if self.head_dim < 1 or self.head_dim % 2:
            raise ValueError(f"head_dim is {self.head_dim}, but rotary positions need pairs. Give an even number.")

    def window_of(self, layer: int) -> int | None:
        """Return the sliding window of a block, counted from 0, or None."""
        if self.layer_types and self.layer_types[layer] == "full_attention":
            return None
        return self.sliding_window

    def has_rope(self, layer: int) -> bool:
        """Return True if a block, counted from 0, has rotary positions."""
        return not self.no_rope_layers or bool(self.no_rope_layers[layer])

    def rope_of(self, layer: int) -> tuple[float, Scaling | None]:
        """Return base and scaling of the rotary wavelengths of a block, counted from 0."""
        return self.rope_theta, self.rope_scaling

    @property
    def attention_count(self) -> int:
        """Number of parameters of the attention of a block."""
        d = self.hidden_size
        q, kv = self.num_attention_heads * self.head_dim, 2 * self.num_key_value_heads * self.head_dim
        count = 2 * d * q + d * kv  # q, out; k and v
        count += (q + kv if self.qkv_bias else 0) + (d if self.out_bias else 0)
        count += 2 * self.head_dim if self.qk_norm else 0
        return count + (q + kv // 2 if self.qk_norm_all_heads else 0)

    @property
    def parameter_count(self) -> int:
        """Number of parameters, a tied one counted once."""
        d, hidden = self.hidden_size, self.intermediate_size
        mlp = 3 * d * hidden + (2 * hidden + d if self.mlp_bias else 0)  # gate, up, down
        embeddings = self.vocab_size * d * (1 if self.tie_word_embeddings else 2)
        return embeddings + self.num_hidden_layers * (self.attention_count + mlp + 2 * d) + d


@dataclass(frozen=True)
class DecoderConfig(LlamaConfig):
    """Configuration of a decoder-only transformer with the settings in which the families differ from Llama.

    With the defaults it is Llama. ``models/huggingface/families.py`` has the settings of Gemma, Phi, Phi-3, OPT,
    GPT-NeoX, Falcon, OLMo-2 and StarCoder2.

    Attributes, beside those of ``LlamaConfig``:
        norm: ``rms`` (RMSNorm), ``rms_offset`` (RMSNorm with the factor 1 + weight, Gemma's) or ``layer`` (LayerNorm
            with a bias).
        norm_place: ``before`` each branch, ``after`` it (OLMo-2), or ``both`` (Gemma 2).
        parallel_residual: attention and MLP both take the block's input, and both are added to it.
        shared_norm: one norm for attention and MLP, with ``parallel_residual``.
        hidden_act: activation of the MLP: ``silu``, ``gelu``, ``gelu_new``, ``gelu_pytorch_tanh`` or ``relu``.
        gated: the MLP is ``down(act(gate(x)) * up(x))``; False: ``down(act(up(x)))``.
        partial_rotary_factor: fraction of each head's channels, the first ones, that are rotated.
        learned_positions: learned positions that are added to the embeddings, in place of rotary ones.
        position_offset: number of rows before the first position in the table of learned positions (2 in OPT).
        scale_embedding: multiply the token embeddings by the square root of ``hidden_size``.
        query_pre_attn_scalar: the scores are divided by the square root of this number; None: of ``head_dim``.
        attn_logit_softcapping, final_logit_softcapping: cap c of the scores and of the logits, x -> c tanh(x / c);
            None: no cap.
        rope_local_base_freq: base of the rotary wavelengths of blocks with a sliding window, which are then not
            scaled; None: ``rope_theta``.
        head_bias: add a bias to the output layer.

    Raises:
        ValueError: settings that contradict each other, or a check of ``LlamaConfig`` fails.
    """

    PRESETS: ClassVar[dict[str, dict[str, Any]]] = {}

    norm: str = field(default="rms", kw_only=True)
    norm_place: str = field(default="before", kw_only=True)
    parallel_residual: bool = field(default=False, kw_only=True)
    shared_norm: bool = field(default=False, kw_only=True)
    hidden_act: str = field(default="silu", kw_only=True)
    gated: bool = field(default=True, kw_only=True)
    partial_rotary_factor: float = field(default=1.0, kw_only=True)
    learned_positions: bool = field(default=False, kw_only=True)
    position_offset: int = field(default=0, kw_only=True)
    scale_embedding: bool = field(default=False, kw_only=True)
    query_pre_attn_scalar: float | None = field(default=None, kw_only=True)
    attn_logit_softcapping: float | None = field(default=None, kw_only=True)
    final_logit_softcapping: float | None = field(default=None, kw_only=True)
    rope_local_base_freq: float | None = field(default=None, kw_only=True)
    head_bias: bool = field(default=False, kw_only=True)

    @property
    def layer_count(self) -> int:
        """Number of entries in the model's list of layers, with one for learned positions."""
        return super().layer_count + self.learned_positions

    def __post_init__(self) -> None:
        super().__post_init__()
        known = {
            "norm": ("rms", "rms_offset", "layer"),
            "norm_place": ("before", "after", "both"),
            "hidden_act": ("silu", "gelu", "gelu_new", "gelu_pytorch_tanh", "relu"),
        }
        for name, values in known.items():
            if getattr(self, name) not in values:
                raise ValueError(f"{name} is {getattr(self, name)!r}. Give one of {', '.join(values)}.")
        if self.rotary_dim < 2 or self.rotary_dim % 2 or self.rotary_dim > self.head_dim:
            raise ValueError(
                f"partial_rotary_factor={self.partial_rotary_factor} of head_dim={self.head_dim} is {self.rotary_dim} "
                "rotated channels. Give a fraction with which the number is even, and at least 2."
            )
        if self.query_pre_attn_scalar is not None and not self.query_pre_attn_scalar > 0:
            raise ValueError(f"query_pre_attn_scalar is {self.query_pre_attn_scalar}. Give a number above 0.")
        if self.shared_norm and not self.parallel_residual:
            raise ValueError("shared_norm is True, which needs parallel_residual=True. Give both, or neither.")
        if self.parallel_residual and self.norm_place != "before":
            raise ValueError(f"norm_place is {self.norm_place!r}, but parallel_residual needs norm_place='before'.")
        if self.head_bias and self.tie_word_embeddings:
            raise ValueError("head_bias and tie_word_embeddings are both True. Give one of them.")

    @property
    def rotary_dim(self) -> int:
        """Number of rotated channels of a head."""
        return int(self.head_dim * self.partial_rotary_factor)

    def has_rope(self, layer: int) -> bool:
        """Return True if a block, counted from 0, has rotary positions."""
        return not self.learned_positions and super().has_rope(layer)

    def rope_of(self, layer: int) -> tuple[float, Scaling | None]:
        """Return base and scaling of the rotary wavelengths of a block, counted from 0."""
        if self.rope_local_base_freq is not None and self.window_of(layer) is not None:
            return self.rope_local_base_freq, None
        return super().rope_of(layer)

    @property
    def parameter_count(self) -> int:
        """Number of parameters, a tied one counted once."""
        d, hidden, matrices = self.hidden_size, self.intermediate_size, 3 if self.gated else 2
        mlp = matrices * d * hidden + ((matrices - 1) * hidden + d if self.mlp_bias else 0)
        norm = 2 * d if self.norm == "layer" else d
        norms = 1 if self.shared_norm else 4 if self.norm_place == "both" else 2
        embeddings = self.vocab_size * d * (1 if self.tie_word_embeddings else 2)
        embeddings += (self.max_position_embeddings + self.position_offset) * d if self.learned_positions else 0
        embeddings += self.vocab_size if self.head_bias else 0
        return embeddings + self.num_hidden_layers * (self.attention_count + mlp + norms * norm) + norm


# ------------------------------------------------------------------------------------------ mixtures of experts

_QWEN3_MOE: dict[str, Any] = {
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rope_theta": 1e6,
    "rms_norm_eps": 1e-6,
    "qk_norm": True,
}

# Jiang et al. 2024, arXiv:2401.04088, table 1; Qwen3: arXiv:2505.09388, table 2; OLMoE: arXiv:2409.02060, table 10; and
# the configurations released with the weights.
_MIXTRAL_PRESETS: dict[str, dict[str, Any]] = {
    "mixtral-8x7b": _shape(4096, 32, 32, intermediate_size=14336, num_key_value_heads=8, router_aux_loss_coef=0.02)
    | {"max_position_embeddings": 32768, "rope_theta": 1e6},
    "qwen3-30b-a3b": _shape(2048, 48, 32, intermediate_size=6144, num_key_value_heads=4, head_dim=128, **_QWEN3_MOE)
    | {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768},
    "olmoe-1b-7b": _shape(2048, 16, 16, intermediate_size=1024, vocab_size=50304, qk_norm_all_heads=True)
    | {"num_experts": 64, "num_experts_per_tok": 8, "norm_topk_prob": False, "router_aux_loss_coef": 0.01},
    "mixtral-tiny": _shape(32, 2, 4, intermediate_size=48, num_key_value_heads=2, max_position_embeddings=64, **_BYTES)
    | {"num_experts": 4},
}


@dataclass(frozen=True)
class MixtralConfig(LlamaConfig):
    """Configuration of a Llama with mixtures of experts in place of its MLPs: Mixtral, Qwen3-MoE or OLMoE.

    Attributes, beside those of ``LlamaConfig``:
        intermediate_size: width of the MLPs of the blocks that have no experts.
        num_experts: number of experts of a block. The expert axis must divide it.
        num_experts_per_tok: number of experts that each token goes to.
        moe_intermediate_size: width of an expert; 0 means ``intermediate_size``.
        norm_topk_prob: divide the weights of a token's experts by their sum.
        decoder_sparse_step: every block of this distance has experts: blocks ``decoder_sparse_step`` - 1, twice this
            number - 1, and so on, counted from 0. 1: every block.
        mlp_only_layers: further blocks without experts, counted from 0.
        router_aux_loss_coef: factor of the load-balancing loss, as ``transformers`` defines it: a loss of all blocks
            together, in which an expert's fractions of the tokens add up to ``num_experts_per_tok``.
        clip_qkv: largest absolute value of queries, keys and values, to which they are clipped before the rotation
            (OLMoE); None: they are not clipped.

    Raises:
        ValueError: the numbers of experts do not fit each other, no block has experts, or a check of ``LlamaConfig``
            fails.
    """

    PRESETS: ClassVar[dict[str, dict[str, Any]]] = _MIXTRAL_PRESETS
    SIZES: ClassVar[tuple[str, ...]] = (*LlamaConfig.SIZES, "num_experts", "num_experts_per_tok", "decoder_sparse_step")

    num_experts: int = 8
    num_experts_per_tok: int = 2
    moe_intermediate_size: int = 0
    norm_topk_prob: bool = True
    decoder_sparse_step: int = 1
    mlp_only_layers: tuple[int, ...] = ()
    router_aux_loss_coef: float = 0.001
    clip_qkv: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "moe_intermediate_size", self.moe_intermediate_size or self.intermediate_size)
        object.__setattr__(self, "mlp_only_layers", tuple(self.mlp_only_layers))
        _check_experts(self.num_experts, self.num_experts_per_tok, self.router_aux_loss_coef, "router_aux_loss_coef")
        if self.clip_qkv is not None and self.clip_qkv <= 0:
            raise ValueError(f"clip_qkv is {self.clip_qkv}. Give a positive number, or None.")
        if wrong := [layer for layer in self.mlp_only_layers if not 0 <= layer < self.num_hidden_layers]:
            raise ValueError(
                f"mlp_only_layers has {wrong[0]}, but the blocks are 0 to {self.num_hidden_layers - 1}. Leave it out."
            )
        if not self.moe_layers:
            raise ValueError(
                f"no block of {self.num_hidden_layers} has experts, because decoder_sparse_step is "
                f"{self.decoder_sparse_step} and mlp_only_layers is {self.mlp_only_layers}. Change one of them, or "
                "give a LlamaConfig."
            )

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """Numbers of the blocks that have experts, counted from 0."""
        step, dense = self.decoder_sparse_step, self.mlp_only_layers
        return tuple(layer for layer in range(step - 1, self.num_hidden_layers, step) if layer not in dense)

    def moe_arguments(self) -> dict[str, Any]:
        """Return the arguments of ``triax.moe.MoE`` that follow from the configuration.

        ``MoE`` has a loss for each block, in which the fractions of the tokens add up to 1.
        """
        k = self.num_experts_per_tok
        return {
            "experts": self.num_experts,
            "top_k": k,
            "width": self.moe_intermediate_size,
            "normalize": self.norm_topk_prob,
            "balance_coefficient": self.router_aux_loss_coef * k / len(self.moe_layers),
        }

    @property
    def parameter_count(self) -> int:
        """Number of parameters, of all experts, a tied one counted once."""
        d, sparse = self.hidden_size, len(self.moe_layers)
        dense = super().parameter_count - sparse * 3 * d * self.intermediate_size
        experts = self.num_experts * (3 * d * self.moe_intermediate_size + d)  # and their rows of the router
        return dense + sparse * experts


_YARN: dict[str, Any] = {"max_position_embeddings": 163840}
_V2: dict[str, Any] = _YARN | {"rope_scaling": YarnScaling(mscale=0.707, mscale_all_dim=0.707)}

# DeepSeek-V2: arXiv:2405.04434, section 3.1.2 and appendix B; DeepSeek-V3: arXiv:2412.19437, section 4.2; and the
# configurations released with the weights.
_DEEPSEEK_PRESETS: dict[str, dict[str, Any]] = {
    "deepseek-v2-lite": _V2,
    "deepseek-v2": _shape(5120, 60, 128, intermediate_size=12288, moe_intermediate_size=1536, **_V2)
    | {"n_routed_experts": 160, "n_group": 8, "topk_group": 3, "routed_scaling_factor": 16.0, "q_lora_rank": 1536},
    "deepseek-v3": _shape(
        7168, 61, 128, intermediate_size=18432, moe_intermediate_size=2048, vocab_size=129280, **_YARN
    )
    | {"rope_scaling": YarnScaling(mscale=1.0, mscale_all_dim=1.0), "scoring_func": "sigmoid", "norm_topk_prob": True}
    | {"n_routed_experts": 256, "n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5, "q_lora_rank": 1536}
    | {"num_experts_per_tok": 8, "n_shared_experts": 1, "first_k_dense_replace": 3, "aux_loss_alpha": 0.0001},
    "deepseek-tiny": _shape(32, 2, 4, intermediate_size=88, moe_intermediate_size=24, max_position_embeddings=64)
    | {"n_routed_experts": 8, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 2, "n_shared_experts": 1}
    | {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8}
    | {"scoring_func": "sigmoid", "norm_topk_prob": True}
    | _BYTES,
}


@dataclass(frozen=True)
class DeepseekConfig(TransformerConfig):
    """Configuration of a DeepSeek-V2 or DeepSeek-V3: multi-head latent attention, and mixtures of experts.

    Attributes, beside those of ``TransformerConfig``:
        max_position_embeddings: length of the longest sequence. No tensor of the model depends on it.
        intermediate_size: width of the MLPs of the first blocks, which have no experts.
        moe_intermediate_size: width of an expert.
        n_routed_experts: number of experts of a block. The expert axis must divide it.
        n_shared_experts: number of experts that every token goes to, beside those chosen for it.
        num_experts_per_tok: number of experts that are chosen for each token.
        first_k_dense_replace: number of the first blocks, without experts.
        q_lora_rank: width of the latent vector of the queries; None: queries are projected from the residual stream.
        kv_lora_rank: width of the latent vector of keys and values.
        qk_nope_head_dim, qk_rope_head_dim: channels of a head of queries and keys without and with rotary positions.
            The rotated channels of the keys are the same for all heads.
        v_head_dim: width of a head of the values.
        scoring_func: ``softmax`` (V2), or ``sigmoid`` with a bias for the selection (V3).
        norm_topk_prob: divide the weights of a token's experts by their sum.
        routed_scaling_factor: factor of these weights.
        n_group, topk_group: a token's experts are chosen from ``topk_group`` of ``n_group`` groups.
        aux_loss_alpha: factor of the load-balancing loss of each block.
        rope_theta: base of the rotary wavelengths.
        rope_scaling: YaRN's scaling of the rotary frequencies, or None.
        rope_interleave: neighbouring channels are rotated as a pair; False: channels of the two halves.
        rms_norm_eps: epsilon of each RMSNorm but those of the latent vectors, where it is 1e-6.

    Raises:
        ValueError: the numbers of experts or groups do not fit each other, ``qk_rope_head_dim`` is odd, or a check of
            ``TransformerConfig`` fails.
    """

    PRESETS: ClassVar[dict[str, dict[str, Any]]] = _DEEPSEEK_PRESETS
    SIZES: ClassVar[tuple[str, ...]] = (
        *(*TransformerConfig.SIZES, "intermediate_size", "moe_intermediate_size", "n_routed_experts"),
        *("n_shared_experts", "num_experts_per_tok", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim"),
        *("v_head_dim", "n_group", "topk_group"),
    )
    SHARDED: ClassVar[tuple[str, ...]] = (*TransformerConfig.SHARDED, "intermediate_size")
    EPSILON: ClassVar[str] = "rms_norm_eps"

    vocab_size: int = 102400
    max_position_embeddings: int = 4096
    hidden_size: int = 2048
    num_hidden_layers: int = 27
    num_attention_heads: int = 16
    intermediate_size: int = 10944
    moe_intermediate_size: int = 1408
    n_routed_experts: int = 64
    n_shared_experts: int = 2
    num_experts_per_tok: int = 6
    first_k_dense_replace: int = 1
    q_lora_rank: int | None = None
    kv_lora_rank: int = 512
    qk_nope_head_dim: int = 128
    qk_rope_head_dim: int = 64
    v_head_dim: int = 128
    scoring_func: str = "softmax"
    norm_topk_prob: bool = False
    routed_scaling_factor: float = 1.0
    n_group: int = 1
    topk_group: int = 1
    aux_loss_alpha: float = 0.001
    rope_theta: float = 1e4
    rope_scaling: YarnScaling | None = None
    rope_interleave: bool = True
    rms_norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_experts(self.n_routed_experts, self.num_experts_per_tok, self.aux_loss_alpha, "aux_loss_alpha")
        if self.scoring_func not in ("softmax", "sigmoid"):
            raise ValueError(f"scoring_func is {self.scoring_func!r}. Give 'softmax' or 'sigmoid'.")
        if self.qk_rope_head_dim % 2:
            raise ValueError(
                f"qk_rope_head_dim is {self.qk_rope_head_dim}, but rotary positions need pairs. Give an even number."
            )
        if self.q_lora_rank is not None and self.q_lora_rank < 1:
            raise ValueError(f"q_lora_rank is {self.q_lora_rank}. Give at least 1, or None.")
        if self.sliding_window is not None:
            raise ValueError(f"sliding_window is {self.sliding_window}, which DeepSeek's models lack. Leave it out.")
        each, rest = divmod(self.n_routed_experts, self.n_group)
        if rest or self.topk_group > self.n_group or self.topk_group * each < self.num_experts_per_tok:
            raise ValueError(
                f"num_experts_per_tok={self.num_experts_per_tok} of n_routed_experts={self.n_routed_experts} cannot be "
                f"chosen from topk_group={self.topk_group} of n_group={self.n_group} equal groups. Give a divisor of "
                f"{self.n_routed_experts} as n_group, and a larger topk_group, at most n_group."
            )
        if not 0 <= self.first_k_dense_replace < self.num_hidden_layers:
            raise ValueError(
                f"first_k_dense_replace is {self.first_k_dense_replace}, but there are {self.num_hidden_layers} "
                f"blocks. Give 0 to {self.num_hidden_layers - 1}, so that some have experts."
            )

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """Numbers of the blocks that have experts, counted from 0."""
        return tuple(range(self.first_k_dense_replace, self.num_hidden_layers))

    def moe_arguments(self) -> dict[str, Any]:
        """Return the arguments of ``triax.moe.MoE`` that follow from the configuration."""
        bias, loss = self.scoring_func == "sigmoid", self.aux_loss_alpha > 0
        return {
            "experts": self.n_routed_experts,
            "top_k": self.num_experts_per_tok,
            "width": self.moe_intermediate_size,
            "router": self.scoring_func,
            "normalize": self.norm_topk_prob,
            "scale": self.routed_scaling_factor,
            "groups": self.n_group,
            "groups_limit": self.topk_group,
            "shared_experts": self.n_shared_experts,
            "balance": ("bias",) * bias + ("sequence",) * loss,
            "balance_coefficient": self.aux_loss_alpha,
        }

    @property
    def parameter_count(self) -> int:
        """Number of parameters, of all experts, a tied one counted once."""
        d, heads, sparse = self.hidden_size, self.num_attention_heads, len(self.moe_layers)
        queries, inputs = heads * (self.qk_nope_head_dim + self.qk_rope_head_dim), self.q_lora_rank or d
        attention = queries * inputs + (0 if self.q_lora_rank is None else inputs * (d + 1))
        attention += d * (self.kv_lora_rank + self.qk_rope_head_dim) + self.kv_lora_rank
        attention += self.kv_lora_rank * heads * (self.qk_nope_head_dim + self.v_head_dim) + heads * self.v_head_dim * d
        dense = 3 * d * self.intermediate_size
        experts = 3 * d * self.moe_intermediate_size * (self.n_routed_experts + self.n_shared_experts)
        experts += d * self.n_routed_experts  # the router
        embeddings = self.vocab_size * d * (1 if self.tie_word_embeddings else 2)
        blocks = self.num_hidden_layers * (attention + 2 * d) + self.first_k_dense_replace * dense + sparse * experts
        return embeddings + blocks + d


def _check_experts(experts: int, chosen: int, coefficient: float, name: str) -> None:
    if chosen > experts:
        raise ValueError(
            f"num_experts_per_tok is {chosen}, but there are {experts} experts. Give at most {experts} experts per "
            "token."
        )
    if coefficient < 0:
        raise ValueError(f"{name} is {coefficient}. Give 0 or more.")


# ------------------------------------------------------------------------------------------- fields of checkpoints

# The names that fields had in checkpoints written before the fields took Hugging Face's names.
_FORMER = {
    "sequence_length": "max_position_embeddings",
    "width": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "hidden": "intermediate_size",
    "tie_embeddings": "tie_word_embeddings",
    "init_std": "initializer_range",
    "original_length": "original_max_position_embeddings",
}


CONFIGS: dict[str, type[TransformerConfig]] = {
    cls.__name__: cls for cls in (GPTConfig, LlamaConfig, DecoderConfig, MixtralConfig, DeepseekConfig)
}


def config_from_fields(kind: str, saved: Mapping[str, Any]) -> TransformerConfig:
    """Rebuild a configuration from the fields that a checkpoint's index stores as JSON.

    Args:
        kind: name of a class of ``CONFIGS``, such as ``"GPTConfig"``.
        saved: field name -> value, under the current names or the names in checkpoints of earlier versions.

    Raises:
        ValueError: ``kind`` is another name.
    """
    if kind not in CONFIGS:
        raise ValueError(f"the checkpoint stores a {kind}, but only {', '.join(CONFIGS)} can be rebuilt")
    cls = CONFIGS[kind]
    former = _FORMER | {"norm_eps": cls.EPSILON}
    renamed = {former.get(name, name): value for name, value in saved.items()}
    if (scaling := renamed.get("rope_scaling")) is not None:
        scaled: type[Scaling] = RopeScaling if "low_freq_factor" in scaling else LinearScaling
        if "beta_fast" in scaling:
            scaled = YarnScaling
        renamed["rope_scaling"] = scaled(**{former.get(name, name): value for name, value in scaling.items()})
    return cls(**renamed)
