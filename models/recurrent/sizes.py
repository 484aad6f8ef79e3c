"""Sizes of the recurrent layers of a model, as a part of its configuration; without torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True)
class _Sizes:
    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if type(value) is int and value < 1:
                raise ValueError(f"{field.name} of {type(self).__name__} is {value}. Give at least 1.")
        if self.heads % self.groups:
            raise ValueError(
                f"{type(self).__name__} has {self.heads} heads, which {self.groups} does not divide: {self!r}. Give a "
                f"divisor of {self.heads}."
            )

    @property
    def heads(self) -> int:
        """Number of heads of the value, which the tensor axis shards."""
        raise NotImplementedError

    @property
    def groups(self) -> int:
        """Number of groups of heads."""
        raise NotImplementedError


@dataclass(frozen=True)
class Mamba2Sizes(_Sizes):
    """Sizes of a Mamba2 layer.

    Attributes:
        num_heads: number of heads. The tensor axis has at most as many ranks.
        head_dim: width of a head.
        state_size: width of b and c, and number of rows of a head's state.
        n_groups: number of groups of heads with common b and c, a divisor of ``num_heads``.
        conv_kernel: width of the convolution.
        use_conv_bias, use_bias: add biases to the convolution and to the projections.
        time_step_min: least time step, to which smaller ones are raised.

    Raises:
        ValueError: a size below 1, or ``n_groups`` does not divide ``num_heads``.
    """

    num_heads: int
    head_dim: int
    state_size: int
    n_groups: int = 1
    conv_kernel: int = 4
    use_conv_bias: bool = True
    use_bias: bool = False
    time_step_min: float = 0.0

    @property
    def heads(self) -> int:
        """Number of heads."""
        return self.num_heads

    @property
    def groups(self) -> int:
        """Number of groups of heads."""
        return self.n_groups


@dataclass(frozen=True)
class DeltaNetSizes(_Sizes):
    """Sizes of a layer of Gated DeltaNet.

    Attributes:
        num_value_heads: number of heads of the values. The tensor axis has at most as many ranks.
        value_head_dim: width of a value's head.
        num_key_heads: number of heads of queries and keys, a divisor of ``num_value_heads``.
        key_head_dim: width of a key's head.
        conv_kernel: width of the convolution.
        allow_neg_eigval: beta is from 0 to 2, not to 1, so that a state's transition may have negative eigenvalues
            (Grazzi et al. 2024, arXiv:2411.12537).
        norm_eps: epsilon of the layer's norm; None: of the model's norms.

    Raises:
        ValueError: a size below 1, or ``num_key_heads`` does not divide ``num_value_heads``.
    """

    num_value_heads: int
    value_head_dim: int
    num_key_heads: int
    key_head_dim: int
    conv_kernel: int = 4
    allow_neg_eigval: bool = False
    norm_eps: float | None = None

    @property
    def heads(self) -> int:
        """Number of heads of the values."""
        return self.num_value_heads

    @property
    def groups(self) -> int:
        """Number of heads of the keys."""
        return self.num_key_heads


RecurrentSizes = Mamba2Sizes | DeltaNetSizes


def sizes_from_fields(saved: Mapping[str, Any]) -> RecurrentSizes:
    """Rebuild the sizes from their fields, such as a checkpoint's index stores."""
    kind = DeltaNetSizes if "num_key_heads" in saved else Mamba2Sizes
    return kind(**saved)
