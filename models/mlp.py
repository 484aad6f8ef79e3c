"""Token-wise parts of a block: MLP, gated MLP, mixture of experts.

All are sharded over the tensor axis (Shoeybi et al. 2019, arXiv:1909.08053, section 3): the first layer by columns, the
second by rows. Experts are sharded over the expert axis (``moe/``).

Shapes: B sequences of T tokens, D the width, t the tensor axis's size.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ..grid import Grid
from ..grid.randomness.random import Constant, Distribution, Normal
from ..moe.experts import clamped_swiglu
from ..moe.layer import MoE
from ..tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear
from .config import AnyDecoderConfig, DeepseekConfig, EncoderConfig, T5Config, WhisperConfig
from .layers import ACTIVATIONS

_ZERO = Constant(0.0)
# Options of ``MoE`` that are no part of a configuration, because they belong to the training.
MOE_OPTIONS = ("balance", "bias_rate", "z_loss", "capacity", "shard_tensor", "lend")


class MLP(nn.Module):
    """MLP ``down(act(up(x)))``, its hidden width sharded over the tensor axis: (B, T, D) -> (B, T, D).

    Args:
        config: the model's configuration.
        grid, sequence_parallel: as for ``ResidualBlock``.
        activation: name in ``ACTIVATIONS``.
        bias: add biases, with initial value 0.
        init, out_init: distributions of the initial weights, and of those of ``down``; None: the configuration's.

    Attributes:
        in_tiles: if set, called as ``in_tiles(run, x)`` in place of ``run(x)``: the option ``recompute.mlp_tile``.
    """

    in_tiles: Any = None

    def __init__(
        self,
        config: AnyDecoderConfig | DeepseekConfig | EncoderConfig | T5Config | WhisperConfig,
        *,
        grid: Grid,
        sequence_parallel: bool = False,
        activation: str = "silu",
        bias: bool = False,
        init: Distribution | None = None,
        out_init: Distribution | None = None,
    ) -> None:
        super().__init__()
        width, hidden, self.activation = config.hidden_size, config.intermediate_size, ACTIVATIONS[activation]
        common: dict[str, Any] = {"grid": grid, "unit": 1, "sequence_parallel": sequence_parallel, "bias": bias}
        common["bias_init"] = _ZERO
        self._make_first(width, hidden, init=init or Normal(config.initializer_range), **common)
        self.down = RowParallelLinear(hidden, width, init=out_init or Normal(config.residual_std), **common)

    def _make_first(self, width: int, hidden: int, **how: Any) -> None:
        self.up = ColumnParallelLinear(width, hidden, **how)

    def forward(self, x: Tensor) -> Tensor:
        """Run the MLP: (B, T, D) -> (B, T, D)."""
        y: Tensor = self._run(x) if self.in_tiles is None else self.in_tiles(self._run, x)
        return y

    def _run(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(self._hidden(x))
        return y

    def _hidden(self, x: Tensor) -> Tensor:
        """Return the input of ``down``: (B, T, hidden / t)."""
        return self.activation(self.up(x))


class GatedMLP(MLP):
    """MLP ``down(act(gate(x)) * up(x))``, such as SwiGLU (Shazeer 2020, arXiv:2002.05202); otherwise as ``MLP``.

    ``gate_up`` is (2 hidden, D), the rows of gate followed by the rows of up. Gate and up are sharded by the same
    channels, so that a rank multiplies only channels that it holds.
    """

    def _make_first(self, width: int, hidden: int, **how: Any) -> None:
        self.gate_up = ColumnParallelLinear(width, 2 * hidden, parts=(hidden, hidden), **how)

    def _hidden(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)  # (B, T, hidden / t) each
        return self.activation(gate) * up


def make_moe(config: Any, *, grid: Grid, sequence_parallel: bool = False, **options: Any) -> nn.Module:
    """Make the mixture of experts of a configuration with ``moe_arguments``, such as a ``MixtralConfig``.

    ``options`` are those of ``MOE_OPTIONS``.
    """
    arguments = {"init": Normal(config.initializer_range), **config.moe_arguments(), **options}
    if clamp := arguments.pop("clamp", None):
        arguments["expert"] = clamped_swiglu(*clamp)
    return MoE(config.hidden_size, grid=grid, sequence_parallel=sequence_parallel, **arguments)


def check_moe_options(function: str, options: dict[str, Any]) -> None:
    """Raise TypeError if an option is none of ``MOE_OPTIONS``."""
    if unknown := [name for name in options if name not in MOE_OPTIONS]:
        raise TypeError(f"{function} has no option {unknown[0]}. Its options are {', '.join(MOE_OPTIONS)}.")
