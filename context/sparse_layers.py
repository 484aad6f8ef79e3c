"""Sparse attention for the layers of a model, from a configuration file's section."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ..base.errors import ConfigError
from ..grid import Grid
from .sparsity import make_sparsity


def set_sparse_attention(model: nn.Module, grid: Grid, section: Mapping[str, Any]) -> None:
    """Give each attention layer of a model the block mask of a section ``sparse_attention``. Collective.

    An attention layer is a module with an attribute ``sparsity``, as the layers of ``triax.models`` have.

    Args:
        model: this rank's part of the model.
        grid: the grid.
        section: ``mode``, and the parameters of the mode.

    Raises:
        ConfigError: on every rank: a key does not fit the mode, or no layer of the model has such an attribute.
    """
    try:
        pattern = make_sparsity(section)
    except ValueError as error:
        raise ConfigError(f"sparse_attention: {error}") from error
    layers = [module for module in model.modules() if hasattr(module, "sparsity")]
    layer_count = torch.tensor([len(layers)])
    grid.world.all_reduce(layer_count, op="max")
    if not int(layer_count):
        raise ConfigError(
            f"sparse_attention.mode is {section['mode']}, but no layer of the model has an attribute sparsity: call "
            "triax.context.attention(..., sparsity=self.sparsity) in the model's attention and set self.sparsity to "
            "None in its constructor, or leave the section out"
        )
    for layer in layers:
        layer.sparsity = pattern  # type: ignore[assignment]
