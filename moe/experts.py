"""Experts: MLPs of equal shape, whose weights are whole tensors (E, ...) sharded over the expert axis.

Also the shared experts, one dense MLP for all tokens (DeepSeekMoE, arXiv:2401.06066).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..grid import Grid
from ..grid.layout import Layout
from ..grid.randomness.random import Constant, Distribution, Uniform, sharded_parameter
from .grouped import Groups, grouped_linear, grouped_mlp


@dataclass(frozen=True)
class Activation:
    """Kind of an expert's MLP: ``down(f(up x))``, or gated ``down(f(gate x) * up x)`` (Shazeer 2020, arXiv:2002.05202).

    Attributes:
        name: name in configurations.
        function: f.
        gated: have a gate.
        derivative: derivative of f: ``derivative(gradient, x, into)`` writes ``gradient * f'(x)`` to ``into``. With it
            the experts hold nothing but the output of their first product for the backward pass.
        up: function of what f is multiplied with, which then have no ``derivative``; None: as it is.
        interleaved: the rows of gate and up lie by turns, not those of up behind those of gate.
    """

    name: str
    function: Callable[[Tensor], Tensor]
    gated: bool = False
    derivative: Callable[[Tensor, Tensor, Tensor], object] | None = None
    up: Callable[[Tensor], Tensor] | None = None
    interleaved: bool = False

    def __call__(self, y: Tensor) -> Tensor:
        """Apply f to the first product's output: (..., W) from (..., W), or from (..., 2 W) if gated."""
        if not self.gated:
            return self.function(y)
        gate, up = (y[..., ::2], y[..., 1::2]) if self.interleaved else y.chunk(2, dim=-1)
        return self.function(gate) * (up if self.up is None else self.up(up))

    def backward(self, gradient: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return the output for y again, and the gradient of y. Needs ``derivative``; overwrites ``gradient``."""
        assert self.derivative is not None
        dy = torch.empty_like(y)
        if not self.gated:
            self.derivative(gradient, y, dy)
            return self.function(y), dy
        (gate, up), (dgate, dup) = y.chunk(2, dim=-1), dy.chunk(2, dim=-1)
        value = self.function(gate)
        torch.mul(gradient, value, out=dup)
        self.derivative(gradient.mul_(up), gate, dgate)
        return value * up, dy


def _silu_derivative(gradient: Tensor, x: Tensor, into: Tensor) -> None:
    torch.ops.aten.silu_backward(gradient, x, grad_input=into)


def _gelu_derivative(gradient: Tensor, x: Tensor, into: Tensor) -> None:
    torch.ops.aten.gelu_backward(gradient, x, grad_input=into)


def _relu_derivative(gradient: Tensor, x: Tensor, into: Tensor) -> None:
    torch.ops.aten.threshold_backward(gradient, x, 0, grad_input=into)


SwiGLU = Activation("swiglu", F.silu, True, _silu_derivative)
GEGLU = Activation("geglu", F.gelu, True, _gelu_derivative)
GELU = Activation("gelu", F.gelu, False, _gelu_derivative)
ReLU = Activation("relu", F.relu, False, _relu_derivative)


def clamped_swiglu(limit: float, alpha: float) -> Activation:
    """Return gpt-oss's ``(up + 1) * gate * sigmoid(alpha * gate)``, where neither gate nor up exceeds ``limit``."""

    def gate(x: Tensor) -> Tensor:
        x = x.clamp(max=limit)
        return x * torch.sigmoid(alpha * x)

    return Activation("clamped_swiglu", gate, True, up=lambda x: x.clamp(-limit, limit) + 1, interleaved=True)


ACTIVATIONS = {kind.name: kind for kind in (SwiGLU, GEGLU, GELU, ReLU)}


class Experts(nn.Module):
    """E experts, of which this rank holds E / (size of the expert axis), one after the other.

    Args:
        hidden: D.
        width: W, the hidden dim of one expert.
        experts: E.
        grid: the grid.
        activation: kind of the MLP.
        shard_tensor: shard W over the tensor axis. The outputs are then partial sums over that axis.
        partial: each tensor-parallel rank has other tokens, so that gradients are summed over the tensor axis.
        bias: add biases, with initial value 0.
        init: distribution of the weights; by default ``nn.Linear``'s.
        device, dtype: of the weights.

    Attributes:
        gate_up: (E, 2 W, D), the rows of gate before the rows of up; ``up``, (E, W, D), if the MLP is not gated.
        down: (E, D, W).
        gate_up_bias or up_bias, down_bias: (E, 2 W) or (E, W), and (E, D); only with ``bias``.
    """

    def __init__(
        self,
        hidden: int,
        width: int,
        experts: int,
        *,
        grid: Grid,
        activation: Activation,
        shard_tensor: bool = False,
        partial: bool = False,
        bias: bool = False,
        init: Distribution | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.activation = activation
        make = _Maker(grid, shard_tensor, partial, (experts,), init, device, dtype)
        self.register_parameter(_first(activation), make.first(width, hidden, activation))
        self.down = make.last(hidden, width)
        self.down_bias: nn.Parameter | None = None
        if bias:
            self.register_parameter(f"{_first(activation)}_bias", make.first_bias(width, activation))
            self.down_bias = make.last_bias(hidden)
        self._adds = not shard_tensor or grid.tensor.is_first  # the last bias, to a sum over the tensor axis

    def forward(self, x: Tensor, groups: Groups) -> Tensor:
        """Compute the outputs of the experts here: (N, D) from (N, D), rows sorted by expert, borrowed ones last."""
        first = _first(self.activation)
        weight: Tensor = getattr(self, first)
        if self.down_bias is None:
            return grouped_mlp(x, weight, self.down, groups, self.activation)
        y = self.activation(grouped_linear(x, weight, groups) + _of_rows(getattr(self, f"{first}_bias"), groups, x))
        return grouped_linear(y, self.down, groups) + _of_rows(self.down_bias, groups, x) * self._adds


class SharedExperts(nn.Module):
    """Dense MLP for all tokens, with the arguments of ``Experts``.

    Attributes:
        gate_up: (2 W, D), the rows of gate before the rows of up; ``up``, (W, D), if the MLP is not gated.
        down: (D, W).
    """

    def __init__(
        self,
        hidden: int,
        width: int,
        *,
        grid: Grid,
        activation: Activation,
        shard_tensor: bool = False,
        partial: bool = False,
        init: Distribution | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.activation = activation
        make = _Maker(grid, shard_tensor, partial, (), init, device, dtype)
        self.register_parameter(_first(activation), make.first(width, hidden, activation))
        self.down = make.last(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        """Compute the output: (..., D) from (..., D)."""
        return F.linear(self.activation(F.linear(x, getattr(self, _first(self.activation)))), self.down)


def _first(activation: Activation) -> str:
    """Return the name of the first weight."""
    return "gate_up" if activation.gated else "up"


def _of_rows(bias: Tensor, groups: Groups, x: Tensor) -> Tensor:
    """Return for each row of x, (N, ...), the bias of its expert: (N, M) from (E, M)."""
    bias = bias if groups.loan is None else groups.loan.join(bias)
    return torch.repeat_interleave(bias, groups.counts, dim=0, output_size=x.shape[0]).to(x.dtype)


class _Maker:
    """Makes weights and biases of an MLP, with this rank's slice of the whole weights' initial values."""

    def __init__(
        self,
        grid: Grid,
        shard_tensor: bool,
        partial: bool,
        experts: tuple[int, ...],
        init: Distribution | None,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        self._grid, self._shards, self._experts, self._init = grid, shard_tensor, experts, init
        self._options: dict[str, Any] = {"device": device, "dtype": dtype}
        self._common: dict[str, Any] = {"partial": partial, "expert_dim": 0 if experts else None}

    def first(self, width: int, hidden: int, kind: Activation) -> nn.Parameter:
        """Make (E, W, D), or (E, 2 W, D) of two parts if gated."""
        return self._make((*self._experts, width * (1 + kind.gated), hidden), hidden, self._rows(width, kind))

    def first_bias(self, width: int, kind: Activation) -> nn.Parameter:
        """Make (E, W), or (E, 2 W) if gated."""
        return self._make((*self._experts, width * (1 + kind.gated)), None, self._rows(width, kind))

    def last_bias(self, hidden: int) -> nn.Parameter:
        """Make (E, D)."""
        return self._make((*self._experts, hidden), None, {"partial": True} if self._shards else {})

    def _rows(self, width: int, kind: Activation) -> dict[str, Any]:
        """Return how the rows of the first weight are sharded: a row of gate with its row of up."""
        if not self._shards:
            return {}
        parts, unit = ((2 * width,), 2) if kind.interleaved else ((width,) * (1 + kind.gated), 1)
        return {"shard_dim": len(self._experts), "parts": parts, "unit": unit}

    def last(self, hidden: int, width: int) -> nn.Parameter:
        """Make (E, D, W)."""
        shard = {"shard_dim": len(self._experts) + 1} if self._shards else {}
        return self._make((*self._experts, hidden, width), width, shard)

    def _make(self, shape: tuple[int, ...], inputs: int | None, shard: dict[str, Any]) -> nn.Parameter:
        """Make a weight, or a bias, which has no inputs."""
        layout, tensor, expert = Layout(shape, **{**self._common, **shard}), self._grid.tensor, self._grid.expert
        init: Distribution = Constant(0.0) if inputs is None else self._init or Uniform(1 / math.sqrt(inputs))
        coordinates = (expert.rank, expert.size)
        return sharded_parameter(layout, init, tensor.rank, tensor.size, **self._options, expert=coordinates)
