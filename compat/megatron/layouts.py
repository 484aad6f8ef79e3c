"""Layouts of the parameters that Megatron's layers have sharded and marked themselves."""

from __future__ import annotations

from torch import nn

from ...base.errors import ConfigError
from ...grid import Grid, layout_of
from ...grid.layout import Layout, set_layout


def lay_out_megatron(model: nn.Module, grid: Grid) -> None:
    """Give Megatron's sharded parameters a layout: those with ``tensor_model_parallel`` or ``model_parallel`` set.

    Raises:
        ConfigError: the dim that is sharded is not known.
    """
    size = grid.tensor.size
    for name, parameter in model.named_parameters() if size > 1 else ():
        marked = getattr(parameter, "tensor_model_parallel", False) or getattr(parameter, "model_parallel", False)
        if not marked or layout_of(parameter).sharded:
            continue
        dim = getattr(parameter, "partition_dim", 0 if parameter.dim() == 1 else -1)
        if dim < 0 or getattr(parameter, "partition_stride", 1) != 1:
            stride = getattr(parameter, "partition_stride", 1)
            raise ConfigError(
                f"{name} of shape {list(parameter.shape)} is a shard of one of {size} tensor ranks, with "
                f"partition_dim={dim} and partition_stride={stride}: set parameter.partition_dim to the dim that is "
                "sharded, in one contiguous part"
            )
        shape = list(parameter.shape)
        shape[dim] *= size
        set_layout(parameter, Layout(tuple(shape), shard_dim=dim))
