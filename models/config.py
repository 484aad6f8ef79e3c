"""What a model is, as plain data: sizes, presets, and the number of parameters. No torch here."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

_BYTES: dict[str, Any] = {"vocab_size": 256}
_GPT3: dict[str, Any] = {"sequence_length": 2048}

# GPT-2: Radford et al. 2019, table 2, and its released weights. GPT-3: Brown et al. 2020, arXiv:2005.14165,
# table 2.1, where two rows contradict their own width = heads x head dim: gpt3-xl has 24 heads of 128 for
# width 2048 (16 here) and gpt3-13b a width of 5140 for 40 heads of 128 (5120 here). Its even layers attend
# sparsely; all of ours attend densely. "bytes": any text as its UTF-8 bytes, no tokenizer; sizes for a
# laptop.
_PRESETS: dict[str, dict[str, Any]] = {
    "gpt2": {"width": 768, "layers": 12, "heads": 12, "dropout": 0.1},
    "gpt2-medium": {"width": 1024, "layers": 24, "heads": 16, "dropout": 0.1},
    "gpt2-large": {"width": 1280, "layers": 36, "heads": 20, "dropout": 0.1},
    "gpt2-xl": {"width": 1600, "layers": 48, "heads": 25, "dropout": 0.1},
    "gpt3-small": {"width": 768, "layers": 12, "heads": 12} | _GPT3,
    "gpt3-medium": {"width": 1024, "layers": 24, "heads": 16} | _GPT3,
    "gpt3-large": {"width": 1536, "layers": 24, "heads": 16} | _GPT3,
    "gpt3-xl": {"width": 2048, "layers": 24, "heads": 16} | _GPT3,
    "gpt3-2.7b": {"width": 2560, "layers": 32, "heads": 32} | _GPT3,
    "gpt3-6.7b": {"width": 4096, "layers": 32, "heads": 32} | _GPT3,
    "gpt3-13b": {"width": 5120, "layers": 40, "heads": 40} | _GPT3,
    "gpt3-175b": {"width": 12288, "layers": 96, "heads": 96} | _GPT3,
    "bytes-tiny": {"sequence_length": 64, "width": 32, "layers": 2, "heads": 4} | _BYTES,
    "bytes-small": {"sequence_length": 128, "width": 128, "layers": 4, "heads": 4} | _BYTES,
    "bytes-medium": {"sequence_length": 256, "width": 256, "layers": 8, "heads": 8} | _BYTES,
}


@dataclass(frozen=True)
class GPTConfig:
    """A decoder-only transformer of GPT-2's shape: learned positions, pre-LayerNorm, GELU.

    Attributes:
        vocab_size: number of different tokens; any number.
        sequence_length: the longest sequence, and the number of learned positions.
        width: of the residual stream.
        layers: number of blocks.
        heads: of attention; they divide ``width``. A tensor axis of up to as many ranks shares them out.
        mlp_ratio: the MLP's hidden width over ``width``.
        dropout: probability, on embeddings and on what each block adds to the residual stream.
        tie_embeddings: the output layer's weight is the token embedding's.
        init_std: standard deviation of the initial weights; those that end a residual branch take
            ``init_std / sqrt(2 layers)`` (Radford et al. 2019, section 2.3). Biases start at 0.
        norm_eps: LayerNorm's epsilon.

    Raises:
        ValueError: a size below 1, heads that do not divide the width, a dropout outside [0, 1).
    """

    vocab_size: int = 50257
    sequence_length: int = 1024
    width: int = 768
    layers: int = 12
    heads: int = 12
    mlp_ratio: int = 4
    dropout: float = 0.0
    tie_embeddings: bool = True
    init_std: float = 0.02
    norm_eps: float = 1e-5

    def __post_init__(self) -> None:
        for name in ("vocab_size", "sequence_length", "width", "layers", "heads", "mlp_ratio"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; give at least 1")
        if self.width % self.heads:
            near = self.width // self.heads * self.heads or self.heads
            raise ValueError(f"{self.heads} heads do not divide a width of {self.width}; give width={near}, say")
        _check_dropout(self.dropout)

    @classmethod
    def preset(cls, name: str, **changes: Any) -> GPTConfig:
        """A published or a laptop-sized configuration by name, with some fields changed.

        >>> GPTConfig.preset("gpt2").parameter_count
        124439808

        Raises:
            ValueError: an unknown name, with the names there are.
            TypeError: an unknown field, with the fields there are.
        """
        return cls(**_fields_of(cls, _PRESETS, name, changes))

    @classmethod
    def presets(cls) -> tuple[str, ...]:
        """The names that ``preset`` knows."""
        return tuple(_PRESETS)

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.width // self.heads

    @property
    def residual_std(self) -> float:
        """Initial standard deviation of the weights that end a residual branch: two to a block."""
        return float(self.init_std / (2 * self.layers) ** 0.5)

    @property
    def parameter_count(self) -> int:
        """Number of parameters, a tied one counted once."""
        d, hidden = self.width, self.mlp_ratio * self.width
        attention = 3 * d * (d + 1) + d * (d + 1)  # qkv, out: weights and biases
        mlp = hidden * (d + 1) + d * (hidden + 1)  # up, down
        norm = 2 * d
        embeddings = (self.vocab_size + self.sequence_length) * d
        head = 0 if self.tie_embeddings else self.vocab_size * d
        return embeddings + self.layers * (attention + mlp + 2 * norm) + norm + head

    def check_tensor(self, tensor: int) -> None:
        """Whether a tensor axis of that size can shard this model: for a clear word before any process
        starts.

        Raises:
            ValueError: it exceeds the heads or the vocabulary.
        """
        _check_tensor(tensor, self.heads, self.vocab_size)


# --------------------------------------------------------------------------------------------- Llama's family


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3.1's stretch of the rotary frequencies to contexts longer than those of pretraining.

    Wavelengths below ``original_length / high_freq_factor`` stay, those above ``original_length /
    low_freq_factor`` grow by ``factor``, and between the two the frequency is blended in a straight line
    (Grattafiori et al. 2024, arXiv:2407.21783, section 3.4.1, and the code released with it).

    Attributes:
        factor: of the longest wavelengths.
        low_freq_factor, high_freq_factor: where the blend ends and begins.
        original_length: the context of pretraining, in tokens.

    Raises:
        ValueError: a factor below 1, or a blend without room.
    """

    factor: float = 8.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_length: int = 8192

    def __post_init__(self) -> None:
        if self.factor < 1.0 or self.original_length < 1:
            raise ValueError(f"a factor of {self.factor} over {self.original_length} tokens; give at least 1 of each")
        if not 0.0 < self.low_freq_factor < self.high_freq_factor:
            raise ValueError(
                f"low_freq_factor {self.low_freq_factor} and high_freq_factor {self.high_freq_factor}: give "
                "0 < low < high, such as 1 and 4"
            )


_LLAMA2: dict[str, Any] = {"vocab_size": 32000, "sequence_length": 4096}
_LLAMA3: dict[str, Any] = {"vocab_size": 128256, "sequence_length": 8192, "kv_heads": 8, "rope_theta": 5e5}
_LLAMA31: dict[str, Any] = _LLAMA3 | {"sequence_length": 131072, "rope_scaling": RopeScaling()}
_QWEN: dict[str, Any] = {"vocab_size": 151936, "rope_theta": 1e6, "norm_eps": 1e-6, "tie_embeddings": True}

# Touvron et al. 2023, arXiv:2307.09288; Grattafiori et al. 2024, arXiv:2407.21783, table 3; Qwen2.5:
# arXiv:2412.15115, table 1; Qwen3: arXiv:2505.09388, table 1; and the configurations released with the weights.
_LLAMA_PRESETS: dict[str, dict[str, Any]] = {
    "llama2-7b": {"width": 4096, "layers": 32, "heads": 32, "hidden": 11008} | _LLAMA2,
    "llama2-13b": {"width": 5120, "layers": 40, "heads": 40, "hidden": 13824} | _LLAMA2,
    "llama2-70b": {"width": 8192, "layers": 80, "heads": 64, "kv_heads": 8, "hidden": 28672} | _LLAMA2,
    "llama3-8b": {"width": 4096, "layers": 32, "heads": 32, "hidden": 14336} | _LLAMA3,
    "llama3-70b": {"width": 8192, "layers": 80, "heads": 64, "hidden": 28672} | _LLAMA3,
    "llama3.1-8b": {"width": 4096, "layers": 32, "heads": 32, "hidden": 14336} | _LLAMA31,
    "llama3.2-1b": {"width": 2048, "layers": 16, "heads": 32, "hidden": 8192}
    | _LLAMA31
    | {"rope_scaling": RopeScaling(factor=32.0), "tie_embeddings": True},
    "qwen2.5-0.5b": {"width": 896, "layers": 24, "heads": 14, "kv_heads": 2, "hidden": 4864}
    | _QWEN
    | {"sequence_length": 32768, "qkv_bias": True},
    "qwen3-0.6b": {"width": 1024, "layers": 28, "heads": 16, "kv_heads": 8, "head_dim": 128, "hidden": 3072}
    | _QWEN
    | {"sequence_length": 40960, "qk_norm": True},
    "llama-tiny": {"sequence_length": 64, "width": 32, "layers": 2, "heads": 4, "kv_heads": 2, "hidden": 88} | _BYTES,
    "llama-small": {"sequence_length": 128, "width": 128, "layers": 4, "heads": 4, "kv_heads": 2, "hidden": 344}
    | _BYTES,
}


@dataclass(frozen=True)
class LlamaConfig:
    """A decoder-only transformer of Llama's shape: rotary positions, pre-RMSNorm, SwiGLU, grouped queries, no biases.

    With ``qkv_bias`` it is Qwen2's shape, with ``qk_norm`` Qwen3's.

    Attributes:
        vocab_size: number of different tokens; any number.
        sequence_length: the longest sequence that the model is meant for; nothing in it has this size.
        width: of the residual stream.
        layers: number of blocks.
        heads: of the queries. A tensor axis of up to as many ranks shares them out.
        kv_heads: of keys and values; they divide ``heads``. 0: as many as ``heads``. Where the tensor axis does not
            divide them, each rank holds the keys' and values' weights whole, and computes the heads that it needs.
        hidden: width of the gated MLP.
        head_dim: width of one head, an even number; 0: ``width / heads``.
        rope_theta: base of the rotary wavelengths (Su et al. 2021, arXiv:2104.09864).
        rope_scaling: Llama 3.1's, or None.
        norm_eps: RMSNorm's epsilon.
        tie_embeddings: the output layer's weight is the token embedding's.
        qkv_bias: queries, keys and values have biases; they start at 0.
        qk_norm: an RMSNorm over each head of the queries and of the keys, before the rotation.
        dropout: probability, on embeddings and on what each block adds to the residual stream.
        init_std: standard deviation of the initial weights; those that end a residual branch take
            ``init_std / sqrt(2 layers)``.

    Raises:
        ValueError: a size below 1, heads that do not fit each other or the width, a dropout outside [0, 1).
    """

    vocab_size: int = 32000
    sequence_length: int = 4096
    width: int = 4096
    layers: int = 32
    heads: int = 32
    kv_heads: int = 0
    hidden: int = 11008
    head_dim: int = 0
    rope_theta: float = 1e4
    rope_scaling: RopeScaling | None = None
    norm_eps: float = 1e-5
    tie_embeddings: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    dropout: float = 0.0
    init_std: float = 0.02

    def __post_init__(self) -> None:
        for name in ("vocab_size", "sequence_length", "width", "layers", "heads", "hidden"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; give at least 1")
        if not self.head_dim and self.width % self.heads:
            near = self.width // self.heads * self.heads or self.heads
            raise ValueError(
                f"{self.heads} heads do not divide a width of {self.width}; give width={near}, say, or head_dim"
            )
        # What was left out is written down, so that whoever reads it need not know the rule.
        object.__setattr__(self, "kv_heads", self.kv_heads or self.heads)
        object.__setattr__(self, "head_dim", self.head_dim or self.width // self.heads)
        if self.kv_heads < 1 or self.heads % self.kv_heads:
            fits = ", ".join(str(n) for n in range(1, self.heads + 1) if self.heads % n == 0)
            raise ValueError(f"{self.kv_heads} kv_heads do not divide {self.heads} heads; give kv_heads={fits}")
        if self.head_dim < 1 or self.head_dim % 2:
            raise ValueError(f"a head_dim of {self.head_dim}: rotary positions turn pairs; give an even number")
        _check_dropout(self.dropout)

    @classmethod
    def preset(cls, name: str, **changes: Any) -> LlamaConfig:
        """A published or a laptop-sized configuration by name, with some fields changed.

        >>> LlamaConfig.preset("llama3-8b").parameter_count
        8030261248

        Raises:
            ValueError: an unknown name, with the names there are.
            TypeError: an unknown field, with the fields there are.
        """
        return cls(**_fields_of(cls, _LLAMA_PRESETS, name, changes))

    @classmethod
    def presets(cls) -> tuple[str, ...]:
        """The names that ``preset`` knows."""
        return tuple(_LLAMA_PRESETS)

    @property
    def residual_std(self) -> float:
        """Initial standard deviation of the weights that end a residual branch: two to a block."""
        return float(self.init_std / (2 * self.layers) ** 0.5)

    @property
    def parameter_count(self) -> int:
        """Number of parameters, a tied one counted once."""
        d, q, kv = self.width, self.heads * self.head_dim, 2 * self.kv_heads * self.head_dim
        attention = 2 * d * q + d * kv  # q, out; k and v
        attention += q + kv if self.qkv_bias else 0
        attention += 2 * self.head_dim if self.qk_norm else 0
        mlp = 3 * d * self.hidden  # gate, up, down
        embeddings = self.vocab_size * d * (1 if self.tie_embeddings else 2)
        return embeddings + self.layers * (attention + mlp + 2 * d) + d

    def check_tensor(self, tensor: int) -> None:
        """Whether a tensor axis of that size can shard this model: for a clear word before any process
        starts.

        Raises:
            ValueError: it exceeds the heads, the MLP's width or the vocabulary.
        """
        _check_tensor(tensor, self.heads, self.vocab_size)
        if self.hidden < tensor:
            raise ValueError(f"a hidden width of {self.hidden} does not reach over tensor={tensor}")


# ------------------------------------------------------------------------------------------------ in common


def _fields_of(cls: Any, presets: dict[str, dict[str, Any]], name: str, changes: dict[str, Any]) -> dict[str, Any]:
    """A preset's fields with some changed; see ``GPTConfig.preset`` for what is refused."""
    if name not in presets:
        raise ValueError(f"no preset {name!r}; there are {', '.join(presets)}")
    known = [field.name for field in fields(cls)]
    if unknown := sorted(set(changes) - set(known)):
        raise TypeError(f"no field {', '.join(unknown)} in a {cls.__name__}; its fields are {', '.join(known)}")
    return presets[name] | changes


def _check_dropout(p: float) -> None:
    if not 0.0 <= p < 1.0:
        raise ValueError(f"dropout is a probability in [0, 1), not {p}")


def _check_tensor(tensor: int, heads: int, vocab_size: int) -> None:
    if heads < tensor:
        raise ValueError(
            f"{heads} attention heads do not reach over tensor={tensor}; give tensor={heads} at most, or more heads"
        )
    if vocab_size < tensor:
        raise ValueError(
            f"a vocabulary of {vocab_size} does not reach over tensor={tensor}; give tensor={vocab_size} at most"
        )
