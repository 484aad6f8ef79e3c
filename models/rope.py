"""Rotary positions: each pair of a head's channels is turned by an angle that grows with the position.

Su et al. 2021, arXiv:2104.09864. Channel i of the first half is paired with channel i of the second, as in the
weights that Hugging Face publishes (the paper, and Meta's own files, pair neighbours: the same model with its rows
permuted). Angles are computed in float32 for every dtype of the model, as in the training of the published weights.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .config import RopeScaling


class Rope:
    """Rotary position embedding of queries and keys.

    Args:
        head_dim: width of one head, an even number.
        theta: base of the wavelengths. Pair i of n is rotated by ``theta ** (-i / n)`` radians per token.
        scaling: Llama 3.1's scaling of the long wavelengths, or None.
    """

    def __init__(self, head_dim: int, theta: float = 1e4, scaling: RopeScaling | None = None) -> None:
        self.head_dim, self.theta, self.scaling = head_dim, theta, scaling

    def angles(self, positions: Tensor) -> Tensor:
        """Return the rotation angle of each channel pair at each position.

        Args:
            positions: integers (...).

        Returns:
            float32 (..., head_dim / 2), in radians.
        """
        return positions[..., None].float() * self.frequencies(positions.device)

    def frequencies(self, device: torch.device | str | None = None) -> Tensor:
        """Return the rotation of each channel pair per token, in radians: float32 (head_dim / 2)."""
        exponents = torch.arange(0, self.head_dim, 2, device=device).float() / self.head_dim
        plain = 1.0 / self.theta**exponents
        if self.scaling is None:
            return plain
        s = self.scaling
        # The number of full rotations of each pair over a sequence of pretraining.
        turns = s.original_max_position_embeddings / (2 * math.pi / plain)
        keep = ((turns - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor)).clamp(0.0, 1.0)
        return (1.0 - keep) * plain / s.factor + keep * plain

    def __call__(self, q: Tensor, k: Tensor, positions: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Rotate queries and keys by the angles of their positions.

        Args:
            q, k: (B, heads, T, head_dim). The number of heads may differ between q and k.
            positions: integers (B, T). If None, the positions are 0 to T - 1.

        Returns:
            The rotated q and k, with unchanged shapes.
        """
        if positions is None:
            angles = self.angles(torch.arange(q.shape[2], device=q.device))  # (T, dim / 2)
        else:
            angles = self.angles(positions)[:, None]  # (B, 1, T, dim / 2)
        cos, sin = angles.cos().to(q.dtype), angles.sin().to(q.dtype)
        return _turn(q, cos, sin), _turn(k, cos, sin)


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)
