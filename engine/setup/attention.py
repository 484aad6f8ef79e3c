"""Sparse attention, from the configuration to the model's layers."""

from __future__ import annotations

import torch
from torch import nn

from ...config.config import Config
from ...context.sparsity import make_sparsity
from ...grid import Grid
from ...grid.errors import ConfigError


def set_sparse_attention(model: nn.Module, grid: Grid, config: Config) -> None:
    """Give each attention layer the block mask of section ``sparse_attention``. Collective if the section has a mode.

    An attention layer is a module with an attribute ``sparsity``, as the layers of ``triax.models`` have.

    Raises:
        ConfigError: on every rank: a key does not fit the mode, or no layer of the model has such an attribute.
    """
    section = config.sparse_attention
    if section.mode is None:
        return
    try:
        pattern = make_sparsity(section.given)
    except ValueError as error:
        raise ConfigError(f"sparse_attention: {error}") from error
    layers = [module for module in model.modules() if hasattr(module, "sparsity")]
    found = torch.tensor([len(layers)])
    grid.world.all_reduce(found, op="max")
    if not int(found):
        raise ConfigError(
            f"sparse_attention.mode is {section.mode}, but no layer of the model has an attribute sparsity: call "
            "triax.context.attention(..., sparsity=self.sparsity) in the model's attention and set self.sparsity to "
            "None in its constructor, or leave the section out"
        )
    for layer in layers:
        layer.sparsity = pattern  # type: ignore[assignment]
