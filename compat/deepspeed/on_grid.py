"""A model that was built without a grid, cut into stages afterwards."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from ...grid import Grid, layout_of
from ...pipe.module import PipelineModule


def on_grid(
    model: PipelineModule, grid: Grid, parameters: Iterable[Any] | None = None
) -> tuple[PipelineModule, list[Any] | None]:
    """Build a model again, cut into the stages of another grid.

    Args:
        model: a model of one stage, as ``PipelineModule(layers)`` makes it without a grid.
        grid: the grid.
        parameters: parameters of the model, or parameter groups; None: not asked for.

    Returns:
        The new model, and those of its parameters, or the groups of those, that this rank holds.
    """
    made = PipelineModule(
        model.layer_specs,
        grid,
        model.loss_fn,
        model.partition,
        chunks=None if model.chunks_follow else model.chunks,
        seed=model.seed,
        dtype=model.dtype,
        device="meta" if model.has_placeholders else None,
        output_fn=model.output_fn,
        activation_checkpoint_interval=model.activation_checkpoint_interval,
        checkpointable_layers=model.checkpointable_layers,
    )
    held = {layout_of(parameter).name: parameter for parameter in made.parameters()}

    def here(given: Iterable[nn.Parameter]) -> list[nn.Parameter]:
        return [held[name] for name in (layout_of(p).name for p in given) if name in held]

    if parameters is None:
        return made, None
    groups = list(parameters)
    if not any(isinstance(group, Mapping) for group in groups):
        return made, here(groups)
    return made, [{**group, "params": here(group["params"])} for group in groups]
