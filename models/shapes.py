"""Layers of a model on the meta device: shapes and layouts of its parameters, without memory, processes or a device."""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from ..grid import Axis
from ..pipe.spec import LayerSpec, TiedLayerSpec
from .config_base import ModelConfig


def built_on_meta(
    config: ModelConfig, *, tensor: tuple[int, int] = (0, 1), expert: tuple[int, int] = (0, 1), **options: Any
) -> list[tuple[LayerSpec, nn.Module]]:
    """Build the layers of a model on the meta device, as one rank of a grid does.

    Args:
        config: the model's configuration.
        tensor, expert: rank on, and size of, the tensor axis and the expert axis.
        options: options of the layers, as for ``decoder_layers``.

    Returns:
        The spec and the module of each layer.
    """
    places = {"pipe": (0, 1), "data": (0, 1), "context": (0, 1), "tensor": tensor, "expert": expert}
    axes = {name: Axis(name, range(size), rank, None) for name, (rank, size) in places.items()}
    grid: Any = SimpleNamespace(**axes, data_context=axes["data"], device=torch.device("meta"))
    with torch.device("meta"):
        return [(spec, spec.build(grid)) for spec in config.layers(**options)]


@cache
def parameter_count(config: ModelConfig) -> int:
    """Return the number of parameters of a model, a tied one counted once."""
    counts: dict[Any, int] = {}
    for index, (spec, module) in enumerate(built_on_meta(config)):
        for name, parameter in module.named_parameters():
            place: Any = index
            if isinstance(spec, TiedLayerSpec):  # layers of different classes share some parameters
                place = (spec.key, None if name in spec.tied_weight_attr else spec.cls)
            counts[place, name] = parameter.numel()
    return sum(counts.values())
