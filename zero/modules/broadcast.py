"""Equal weights on all replicas of a plain module, at the start."""

from __future__ import annotations

import torch
from torch import nn

from ...grid import Grid, layout_of
from ..managed import is_released


@torch.no_grad()
def broadcast_weights(module: nn.Module, grid: Grid, laid_out: set[nn.Parameter]) -> None:
    """Broadcast parameters and buffers from the first replica; along the tensor axis, only unsharded ones. Collective.

    Args:
        module: the module.
        grid: the grid.
        laid_out: parameters that are not broadcast here, because ZeRO does it before it makes buckets.
    """
    for tensor in dict.fromkeys([*module.parameters(), *module.buffers()]):
        if tensor.device != grid.device or is_released(tensor):
            continue  # an error, told on every rank where parameters are laid out
        if isinstance(tensor, nn.Parameter) and tensor in laid_out:
            continue
        layout = layout_of(tensor)
        for axis in (*([] if layout.sharded else [grid.tensor]), grid.axis(layout.replicas)):
            if axis.size > 1:
                values = tensor.detach().contiguous()
                axis.broadcast(values)
                tensor.data.copy_(values)
