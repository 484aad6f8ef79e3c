"""Mamba2 (Dao and Gu 2024, arXiv:2405.21060) as a layer; as in Mamba2, Nemotron-H and Bamba of Hugging Face.

    z, x, b, c, dt = projections of the token;   x, b, c = silu(conv(x, b, c));   dt = softplus(dt + dt_bias)
    S_t = exp(-dt A) S_{t-1} + dt b x^T;         y = S^T c + skip x;              out(norm(y silu(z)))

The norm is an RMSNorm over the channels of a group. If a group's heads lie on several tensor-parallel ranks, its sums
of squares are summed over them.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...grid.comm.regions import all_reduce_copy, copy_all_reduce
from ...grid.layout import Layout
from ...grid.randomness.random import Constant, sharded_parameter
from ...grid.ranges import split
from .initial import LogUniform, StepBias
from .mixer import MixerSizes, RecurrentMixer
from .sizes import Mamba2Sizes
from .state_space import state_space


class Mamba2(RecurrentMixer):
    """Mamba2's layer, with the heads sharded over the tensor axis.

    Args:
        width: D, the width of the residual stream.
        sizes: sizes of the layer. The two vectors of a group are b and c, and the number of a head is its time step.
        eps: epsilon of the norm.
        place: grid, init, out_init and sequence_parallel, as for ``RecurrentMixer``.

    Attributes, beside those of ``RecurrentMixer``:
        skip: factor of x in the output, (H,), with initial value 1.
        norm: weight of the norm, (H P,), sharded by heads, with initial value 1.
    """

    def __init__(self, width: int, sizes: Mamba2Sizes, *, eps: float = 1e-5, **place: Any) -> None:
        heads, head_dim, groups = sizes.num_heads, sizes.head_dim, sizes.n_groups
        kernel = sizes.conv_kernel, sizes.use_conv_bias
        mixer = MixerSizes(heads, head_dim, groups, sizes.state_size, 1, *kernel, sizes.use_bias)
        super().__init__(width, mixer, decay=LogUniform(1.0, 16.0), step=StepBias(), **place)
        axis, one = self.axis, Constant(1.0)
        self.step_min, self.eps = sizes.time_step_min, eps
        self.skip = sharded_parameter(Layout((heads,), shard_dim=0), one, axis.rank, axis.size)
        channels = Layout((heads * head_dim,), shard_dim=0, unit=head_dim)
        self.norm = sharded_parameter(channels, one, axis.rank, axis.size)
        start, stop = split(heads, axis.size, axis.rank)
        self._group_width = heads // groups * head_dim
        group_of = [head * groups // heads for head in range(start, stop)]
        self._first_group, self._all_groups = group_of[0], groups
        self._group_of = [group - group_of[0] for group in group_of]  # of this rank's heads, of its groups

    def _rates(self, numbers: Tensor) -> tuple[Tensor, Tensor]:
        step = F.softplus(numbers + self.dt_bias)
        if self.step_min:
            step = step.clamp(min=self.step_min)
        return -step * self.a_log.to(step.dtype).exp(), step

    def _recur(
        self, value: Tensor, first: Tensor, second: Tensor, logarithms: Tensor, strengths: Tensor, **others: Any
    ) -> tuple[Tensor, Tensor]:
        y, state = state_space(value * strengths[..., None], logarithms, first, second, **others)
        return y + value * self.skip.to(value.dtype).view(value.shape[3:5])[..., None], state

    def _gated(self, y: Tensor, gate: Tensor) -> Tensor:
        y = y * F.silu(gate.to(y.dtype))
        squares = y.square().sum(-1)  # (B, T, H)
        shares = [self._group_of.count(group) for group in range(self._group_of[-1] + 1)]
        sums = torch.stack([group.sum(-1) for group in squares.split(shares, -1)], -1)  # (B, T, groups of this rank)
        if self._all_groups % self.axis.size:  # a group may have heads on other ranks
            first, count = self._first_group, len(shares)
            sums = F.pad(sums, (first, self._all_groups - first - count))
            sums = copy_all_reduce(all_reduce_copy(sums, self.axis), self.axis)[..., first : first + count]
        scale = (sums / self._group_width + self.eps).rsqrt()
        scale = scale.index_select(-1, torch.tensor(self._group_of, device=y.device))
        return (y * scale[..., None]).to(gate.dtype) * self.norm.view(y.shape[2:]).to(gate.dtype)
