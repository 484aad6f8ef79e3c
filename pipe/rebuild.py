"""A PipelineModule built again from its list: cut into the stages of another grid, or as a copy to try steps with."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from ..grid import Grid, layout_of
from ..grid.layout import set_layout
from .module import PipelineModule


def rebuilt(
    model: PipelineModule, grid: Grid, parameters: Iterable[Any] | None = None, apart: bool = False
) -> tuple[PipelineModule, list[Any] | None]:
    """Build a model again.

    Args:
        model: the model, of one stage if the grid is another one than its own.
        grid: the grid.
        parameters: parameters of the model, or parameter groups; None: not asked for.
        apart: copy the modules of the list that are built already; else the new model has them.

    Returns:
        The new model, and those of its parameters, or the groups of those, that this rank holds.
    """
    memo: dict[int, Any] = {}
    layers, loss_fn = model.layer_specs, model.loss_fn
    if apart:
        layers, loss_fn = [_copied(layer, memo) for layer in layers], _copied(loss_fn, memo)
    made = PipelineModule(
        layers,
        grid,
        loss_fn,
        model.partition,
        chunks=None if model.chunks_follow else model.chunks,
        placement="loop" if model.chunks_follow or grid is not model.grid else model.placement,
        seed=model.seed,
        dtype=model.dtype,
        device="meta" if model.has_placeholders else None,
        output_fn=model.output_fn,
        activation_checkpoint_interval=model.activation_checkpoint_interval,
        checkpointable_layers=model.checkpointable_layers,
    )
    held = {layout_of(parameter).name: parameter for parameter in made.parameters()}

    def here(given: Any) -> list[nn.Parameter]:
        given = [given] if isinstance(given, nn.Parameter) else given
        return [held[name] for name in (layout_of(p).name for p in given) if name in held]

    if parameters is None:
        return made, None
    groups = list(parameters)
    if not any(isinstance(group, Mapping) for group in groups):
        return made, here(groups)
    return made, [{**group, "params": here(group["params"])} for group in groups]


def _copied(part: Any, memo: dict[int, Any]) -> Any:
    """Return a copy of a module that is built already, with its layouts; other parts of a list are not copied."""
    if not isinstance(part, nn.Module):
        return part
    made = copy.deepcopy(part, memo)
    for parameter, own in zip(part.parameters(), made.parameters(), strict=True):
        set_layout(own, layout_of(parameter))
    return made
