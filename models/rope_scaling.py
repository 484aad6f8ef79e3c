"""Scalings of the rotary positions as plain data, without torch: Llama 3.1's, YaRN's, LongRoPE's and others."""

from __future__ import annotations

import math
from dataclasses import dataclass


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
    """Linear scaling of the rotary positions (arXiv:2306.15595).

    Attributes:
        factor: number by which every position is divided.

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
        llama_4_scaling_beta: coefficient b of the factor 1 + b ln(1 + floor(i / L)) of the query at position i, with
            L = ``original_max_position_embeddings`` (Ministral 3); 0: no factor.
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
    llama_4_scaling_beta: float = 0.0

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


@dataclass(frozen=True)
class LongRopeScaling:
    """LongRoPE's scaling: every pair's wavelength has its own factor, and another one in long rows (arXiv:2402.13753).

    Attributes:
        short_factor: factor of each pair in rows of at most ``original_max_position_embeddings`` tokens.
        long_factor: factor of each pair in longer rows.
        original_max_position_embeddings: context length of pretraining, in tokens.
        attention_factor: factor of the rotated channels.

    Raises:
        ValueError: the lists have different lengths, or a number is not above 0.
    """

    short_factor: tuple[float, ...]
    long_factor: tuple[float, ...]
    original_max_position_embeddings: int
    attention_factor: float = 1.0

    def __post_init__(self) -> None:
        for name in ("short_factor", "long_factor"):
            object.__setattr__(self, name, tuple(getattr(self, name)))  # a checkpoint's are lists
        count, other = len(self.short_factor), len(self.long_factor)
        if count != other or not all(factor > 0 for factor in (*self.short_factor, *self.long_factor)):
            raise ValueError(
                f"rope_scaling: short_factor has {count} numbers and long_factor {other}. Give one above 0 for each "
                "pair of rotated channels, in both."
            )
        if self.original_max_position_embeddings < 2 or self.attention_factor <= 0:
            raise ValueError(
                f"rope_scaling: original_max_position_embeddings is {self.original_max_position_embeddings} and "
                f"attention_factor is {self.attention_factor}. Give at least 2, and a number above 0."
            )


@dataclass(frozen=True)
class DynamicScaling:
    """Dynamic NTK scaling: rows longer than the context length of pretraining get a larger base.

    With N tokens in a row, L of them in pretraining and d rotated channels, the base grows by the factor
    (factor N / L - factor + 1) ** (d / (d - 2)) (Peng et al. 2023, arXiv:2309.00071, section 3.3).

    Raises:
        ValueError: ``factor`` is below 1.
    """

    factor: float = 2.0
    original_max_position_embeddings: int = 4096

    def __post_init__(self) -> None:
        if self.factor < 1.0 or self.original_max_position_embeddings < 1:
            raise ValueError(
                f"rope_scaling: factor is {self.factor} and original_max_position_embeddings is "
                f"{self.original_max_position_embeddings}. Give at least 1 for each."
            )


Scaling = RopeScaling | YarnScaling | LinearScaling | LongRopeScaling | DynamicScaling
