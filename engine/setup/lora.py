"""LoRA: adapters on the layers of a model that the options name, and nothing else trained."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from ...base.errors import ConfigError
from ...checkpoint.convert.formats import module_names
from ...grid import Grid
from ...models.layers import dropout
from ...options.lora import Lora
from ...tensor_parallel.lora import LoraOptions, add_adapters
from .arguments import Groups


def add_lora(model: nn.Module, options: Lora | Mapping[str, Any], grid: Grid | None = None) -> None:
    """Freeze a model, and add low-rank adapters to its linear layers (docs/lora.md). Collective.

    An engine calls it for its option ``lora``. Call it before, if you make the optimizer or
    parameter groups yourself, or for a model without an engine.

    Args:
        model: a ``PipelineModule``, or any other module on its device.
        options: ``Lora(...)``, or a mapping of rank, alpha, targets and rslora.
        grid: the grid of a module that is not a ``PipelineModule``; by default every process is a replica.

    Raises:
        ConfigError: on every rank, if a target names no layer, or a layer that cannot be adapted.
    """
    grid = getattr(model, "grid", None) or grid or Grid()
    given = Lora.of(options)
    targets = given.targets if isinstance(given.targets, str) else list(given.targets)
    seed = getattr(model, "seed", 0)
    made = LoraOptions(given.rank, given.alpha, targets, given.rslora, seed, given.dropout, given.dora, given.base)
    add_adapters(model, made, module_names(model), grid, dropout)


def require_adapters(groups: Groups, model: nn.Module) -> None:
    """Check that the parameters to train contain the adapters, which are the model's only trained parameters."""
    given = {parameter for _, listed in groups for parameter in listed}
    if any(parameter.requires_grad and parameter not in given for parameter in model.parameters()):
        raise ConfigError(
            "the parameters to train were taken from the model before the engine added the adapters of lora: call "
            "triax.add_lora(model, ...) first, or leave the parameters and the optimizer's instance out"
        )
