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
        heads: of attention; they divide ``width``, and the grid's tensor axis must divide them.
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
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"dropout is a probability in [0, 1), not {self.dropout}")

    @classmethod
    def preset(cls, name: str, **changes: Any) -> GPTConfig:
        """A published or a laptop-sized configuration by name, with some fields changed.

        >>> GPTConfig.preset("gpt2").parameter_count
        124439808

        Raises:
            ValueError: an unknown name, with the names there are.
            TypeError: an unknown field, with the fields there are.
        """
        if name not in _PRESETS:
            raise ValueError(f"no preset {name!r}; there are {', '.join(_PRESETS)}")
        known = [field.name for field in fields(cls)]
        if unknown := sorted(set(changes) - set(known)):
            raise TypeError(f"no field {', '.join(unknown)} in a GPTConfig; its fields are {', '.join(known)}")
        return cls(**(_PRESETS[name] | changes))

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
            ValueError: it does not divide the heads (and with them every width), or exceeds the vocabulary.
        """
        if self.heads % tensor:
            fits = ", ".join(str(t) for t in range(1, self.heads + 1) if self.heads % t == 0)
            raise ValueError(
                f"{self.heads} attention heads do not divide over tensor={tensor}; give tensor={fits}, "
                "or another number of heads"
            )
        if self.vocab_size < tensor:
            raise ValueError(
                f"a vocabulary of {self.vocab_size} does not reach over tensor={tensor}; "
                f"give tensor={self.vocab_size} at most"
            )
