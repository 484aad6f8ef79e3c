"""Rotary positions: each pair of a head's channels is turned by an angle that grows with the position.

Su et al. 2021, arXiv:2104.09864. Channel i of the first half is paired with channel i of the second, as in the
weights that Hugging Face publishes (the paper, and Meta's own files, pair neighbours: the same model with its rows
permuted). In DeepSeek's, neighbours are paired. Angles are computed in float32 for every dtype of the model, as in the
training of the published weights.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .rope_scaling import DynamicScaling, LinearScaling, LongRopeScaling, Scaling, YarnScaling

_ATTRIBUTE = "triax_rotations"


class Rope:
    """Rotary position embedding of queries and keys.

    Args:
        head_dim: number of channels of a head that are rotated, an even number. A wider head has others before them.
        leading: a wider head has the others behind them.
        theta: base of the wavelengths. Pair i of n is rotated by ``theta ** (-i / n)`` radians per token.
        scaling: scaling of the wavelengths, or None.
        interleaved: neighbouring channels are a pair. The result then has the first channels of all pairs before the
            second ones, for queries and keys alike, which does not change their products.
        reversed: rotate by the negative angles.
    """

    def __init__(
        self,
        head_dim: int,
        theta: float = 1e4,
        scaling: Scaling | None = None,
        interleaved: bool = False,
        leading: bool = False,
        reversed: bool = False,
    ) -> None:
        self.head_dim, self.theta, self.scaling, self.interleaved = head_dim, theta, scaling, interleaved
        self.leading, self.sign = leading, -1.0 if reversed else 1.0
        self.magnitude = 1.0
        if isinstance(scaling, YarnScaling):
            self.magnitude = scaling.magnitude()
        elif isinstance(scaling, LongRopeScaling):
            self.magnitude = scaling.attention_factor
            if len(scaling.short_factor) != head_dim // 2:
                raise ValueError(
                    f"rope_scaling: short_factor and long_factor have {len(scaling.short_factor)} numbers, but "
                    f"{head_dim} channels are rotated. Give {head_dim // 2}, one for each pair."
                )

    def angles(self, positions: Tensor, length: int = 0) -> Tensor:
        """Return the rotation angle of each channel pair at each position.

        Args:
            positions: integers (...).
            length: number of tokens of the whole row, on which LongRoPE and dynamic scaling depend.

        Returns:
            float32 (..., head_dim / 2), in radians.
        """
        return positions[..., None].float() * self.frequencies(positions.device, length) * self.sign

    def stretch(self, length: int) -> float:
        """Return the number on which the frequencies depend in a row of ``length`` tokens.

        LongRoPE: 1.0 in a long row, else 0. Dynamic scaling: the factor of the base. Other scalings: 0.
        """
        s = self.scaling
        if isinstance(s, LongRopeScaling):
            return float(length > s.original_max_position_embeddings)
        if isinstance(s, DynamicScaling) and length > s.original_max_position_embeddings:
            grown = s.factor * length / s.original_max_position_embeddings - (s.factor - 1)
            return float(grown ** (self.head_dim / (self.head_dim - 2)))
        return 0.0

    def frequencies(self, device: torch.device | str | None = None, length: int = 0) -> Tensor:
        """Return the rotation of each channel pair per token, in radians: float32 (head_dim / 2)."""
        exponents = torch.arange(0, self.head_dim, 2, device=device).float() / self.head_dim
        plain = 1.0 / self.theta**exponents
        if self.scaling is None:
            return plain
        if isinstance(self.scaling, LinearScaling):
            return plain / self.scaling.factor
        if isinstance(self.scaling, YarnScaling):
            return self._yarn(self.scaling, exponents)
        stretch = self.stretch(length)
        if isinstance(self.scaling, LongRopeScaling):
            factors = self.scaling.long_factor if stretch else self.scaling.short_factor
            return 1.0 / (torch.tensor(factors, dtype=torch.float32, device=device) * self.theta**exponents)
        if isinstance(self.scaling, DynamicScaling):
            return 1.0 / (self.theta * stretch) ** exponents if stretch else plain
        s = self.scaling
        # The number of full rotations of each pair over a sequence of pretraining.
        turns = s.original_max_position_embeddings / (2 * math.pi / plain)
        keep = ((turns - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor)).clamp(0.0, 1.0)
        return (1.0 - keep) * plain / s.factor + keep * plain

    def _yarn(self, s: YarnScaling, exponents: Tensor) -> Tensor:
        def pair_of(turns: float) -> float:
            """Return the number of the pair that makes so many rotations over a sequence of pretraining."""
            length = s.original_max_position_embeddings / (turns * 2 * math.pi)
            return self.head_dim * math.log(length) / (2 * math.log(self.theta))

        low, high = pair_of(s.beta_fast), pair_of(s.beta_slow)
        if s.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, self.head_dim - 1)
        pairs = torch.arange(self.head_dim // 2, device=exponents.device).float()
        keep = 1.0 - ((pairs - low) / (high - low if high != low else 0.001)).clamp(0.0, 1.0)
        wavelengths = self.theta**exponents
        return 1.0 / (s.factor * wavelengths) * (1.0 - keep) + 1.0 / wavelengths * keep

    def __call__(self, q: Tensor, k: Tensor, positions: Tensor | None = None, length: int = 0) -> tuple[Tensor, Tensor]:
        """Rotate queries and keys by the angles of their positions.

        Args:
            q, k: (B, heads, T, head_dim). The number of heads may differ between q and k.
            positions: integers (B, T). If None, the positions are 0 to T - 1.
            length: as for ``angles``.

        Returns:
            The rotated q and k, with unchanged shapes.
        """
        if isinstance(self.scaling, YarnScaling) and self.scaling.llama_4_scaling_beta:
            places = torch.arange(q.shape[2], device=q.device)[None] if positions is None else positions
            past = torch.floor(places / self.scaling.original_max_position_embeddings)
            grown = 1 + self.scaling.llama_4_scaling_beta * torch.log(1 + past)  # (B or 1, T), in float32
            q = q * grown[:, None, :, None].to(q.dtype)  # which commutes with the rotation
        if positions is None:
            cos, sin = self._rotations(torch.arange(q.shape[2], device=q.device), q.dtype, length)  # (T, dim / 2)
        elif torch.compiler.is_compiling():  # the compiler cannot trace attributes of a tensor that it makes itself
            cos, sin = self._rotations(positions[:, None], q.dtype, length)  # (B, 1, T, dim / 2)
        else:
            # On the tensor of positions itself, so that the layers of a decode step compute them once.
            known = vars(positions).setdefault(_ATTRIBUTE, {})
            mode = torch.is_inference_mode_enabled()  # what is made in it cannot be trained with
            key = self.head_dim, self.theta, self.scaling, self.sign, self.stretch(length), q.dtype, mode
            if key not in known:
                known[key] = self._rotations(positions[:, None], q.dtype, length)
            cos, sin = known[key]  # (B, 1, T, dim / 2)
        return self._turn(q, cos, sin), self._turn(k, cos, sin)

    def _rotations(self, positions: Tensor, dtype: torch.dtype, length: int) -> tuple[Tensor, Tensor]:
        angles = self.angles(positions, length)
        cos, sin = angles.cos(), angles.sin()
        if self.magnitude != 1.0:
            cos, sin = cos * self.magnitude, sin * self.magnitude
        return cos.to(dtype), sin.to(dtype)

    def _turn(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        if x.shape[-1] == self.head_dim:
            kept = x[..., :0]
        elif self.leading:
            x, kept = x[..., : self.head_dim], x[..., self.head_dim :]
        else:
            kept, x = x[..., : -self.head_dim], x[..., -self.head_dim :]
        a, b = (x[..., ::2], x[..., 1::2]) if self.interleaved else x.chunk(2, dim=-1)
        turned = [a * cos - b * sin, b * cos + a * sin]
        if kept.shape[-1]:
            turned = [*turned, kept] if self.leading else [kept, *turned]
        return torch.cat(turned, dim=-1)
