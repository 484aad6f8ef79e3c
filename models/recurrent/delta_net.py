"""Gated DeltaNet (Yang et al. 2024, arXiv:2412.06464) as a layer; as in Qwen3-Next and Qwen3.5 of Hugging Face.

    q, k, v, z, b, a = projections of the token;   q, k, v = silu(conv(q, k, v));   q, k = q / |q| K^-0.5, k / |k|
    S_t = exp(g) (I - beta k k^T) S_{t-1} + beta k v^T,   g = -A softplus(a + dt_bias),   beta = sigmoid(b)
    out(norm(S^T q) silu(z))

The norm is an RMSNorm over each head, with one weight for all heads.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...tensor_parallel.norm import RMSNorm
from .delta_rule import delta_rule
from .initial import LogUniform, StepBias
from .mixer import MixerSizes, RecurrentMixer
from .sizes import DeltaNetSizes

_EPS = 1e-6  # of the lengths of q and k


class GatedDeltaNet(RecurrentMixer):
    """Gated DeltaNet's layer, with the heads sharded over the tensor axis.

    Args:
        width: D, the width of the residual stream.
        sizes: sizes of the layer. The two vectors of a group are q and k, and the numbers of a head are b and a.
        eps: epsilon of the norm, unless ``sizes`` has one.
        place: grid, init, out_init and sequence_parallel, as for ``RecurrentMixer``.

    Attributes, beside those of ``RecurrentMixer``:
        norm: the norm, with a weight (V,).
    """

    def __init__(self, width: int, sizes: DeltaNetSizes, *, eps: float = 1e-6, **place: Any) -> None:
        heads, head_dim, state = sizes.num_value_heads, sizes.value_head_dim, sizes.key_head_dim
        mixer = MixerSizes(heads, head_dim, sizes.num_key_heads, state, 2, sizes.conv_kernel)
        super().__init__(width, mixer, decay=LogUniform(0.01, 16.0), step=StepBias(), **place)
        self.largest_beta = 2.0 if sizes.allow_neg_eigval else 1.0
        eps = eps if sizes.norm_eps is None else sizes.norm_eps
        # A rank's gradient comes from its own heads alone: partial, as a norm's on sequence shards.
        self.norm = RMSNorm(head_dim, eps, grid=self.grid, sequence_parallel=True)

    def _rates(self, numbers: Tensor) -> tuple[Tensor, Tensor]:
        b, a = numbers.chunk(2, -1)
        return -F.softplus(a + self.dt_bias) * self.a_log.to(a.dtype).exp(), self.largest_beta * b.sigmoid()

    def _recur(
        self, value: Tensor, first: Tensor, second: Tensor, logarithms: Tensor, strengths: Tensor, **others: Any
    ) -> tuple[Tensor, Tensor]:
        q, k = (x * (x.square().sum(-1, keepdim=True) + _EPS).rsqrt() for x in (first, second))
        return delta_rule(q * self.state**-0.5, k, value, logarithms, strengths, **others)

    def _gated(self, y: Tensor, gate: Tensor) -> Tensor:
        normed = self.norm(y.to(gate.dtype))
        return (normed * F.silu(gate.to(torch.promote_types(gate.dtype, torch.float32)))).to(gate.dtype)
