"""Recurrent layer of a model, from its sizes."""

from __future__ import annotations

from typing import Any

from .delta_net import GatedDeltaNet
from .mamba2 import Mamba2
from .mixer import RecurrentMixer
from .sizes import Mamba2Sizes, RecurrentSizes


def make_recurrent(
    sizes: RecurrentSizes, eps: float, width: int, heads: int, *, kind: str, window: int | None, **place: Any
) -> RecurrentMixer:
    """Make the layer that stands in a block in place of attention.

    Args:
        sizes: the layer's sizes.
        eps: epsilon of its norm.
        width: D, the width of the residual stream.
        heads, kind, window: arguments of attention, which do not concern it.
        place: grid, init, out_init and sequence_parallel, as for ``RecurrentMixer``.
    """
    if isinstance(sizes, Mamba2Sizes):
        return Mamba2(
            width,
            heads=sizes.num_heads,
            head_dim=sizes.head_dim,
            groups=sizes.n_groups,
            state=sizes.state_size,
            kernel=sizes.conv_kernel,
            conv_bias=sizes.use_conv_bias,
            bias=sizes.use_bias,
            step_min=sizes.time_step_min,
            eps=eps,
            **place,
        )
    return GatedDeltaNet(
        width,
        heads=sizes.num_value_heads,
        head_dim=sizes.value_head_dim,
        key_heads=sizes.num_key_heads,
        key_dim=sizes.key_head_dim,
        kernel=sizes.conv_kernel,
        largest_beta=2.0 if sizes.allow_neg_eigval else 1.0,
        eps=eps if sizes.norm_eps is None else sizes.norm_eps,
        **place,
    )
