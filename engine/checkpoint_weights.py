"""``load_weights``: a checkpoint's weights for a model that no engine trains: to generate, to convert, to look at."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from ..grid import Grid, Layout, layout_of
from ..pipe.module import PipelineModule
from ..zero.held import Range
from . import checkpoint_folder as folders
from .checkpoint_index import NAME
from .checkpoint_read import Wanted, agreed, open_checkpoint
from .checkpoint_state import BUFFERS, WEIGHTS, buffers

__all__ = ["load_weights"]


@torch.no_grad()
def load_weights(
    module: nn.Module, path: str | Path, *, grid: Grid | None = None, strict: bool = True, verify: bool = True
) -> None:
    """Give a model the weights and buffers of a checkpoint, which any grid may have written. Collective.

    Each rank reads its own part. Weights take the model's dtype.

    Args:
        module: a ``PipelineModule``, or any other module; an engine's own has ``engine.load_checkpoint``.
        path: a checkpoint, or the folder it was saved in: then the one that ``latest`` names.
        grid: of a module that is no ``PipelineModule``, if it is sharded; None: it is whole on every rank.
        strict: every parameter and buffer must be there, in its shape; else what fits is loaded.
        verify: hold what is read against its checksums first.

    Raises:
        CheckpointError: on every rank, and nothing was changed: there is no such checkpoint, or it is damaged or not of
            this model.
        ValueError: an engine trains the model in stage 3 of ZeRO, and holds its weights.
    """
    if isinstance(module, PipelineModule):
        grid = module.grid
        if module.around is not None:
            raise ValueError("an engine holds these weights in shards: call its load_checkpoint(load_module_only=True)")
        module.fill()
    grid = grid or Grid()
    with agreed(grid):
        folder = Path(path)
        if not (folder / NAME).is_file() and (tag := folders.latest(folder)) is not None:
            folder = folders.place(folder, tag)
    reader = open_checkpoint(grid, folder, Wanted(weights_only=True, verify=verify))
    targets = {name: (layout, tensor) for name, layout, tensor in _targets(module, grid)}
    away = next((name for name, (_, tensor) in targets.items() if tensor.is_meta), None)
    if away is not None:
        raise ValueError(
            f"{away.partition('/')[2]} is on the meta device, without values: model.to_empty(device=...) before; or "
            'list the layers in a PipelineModule(..., device="meta"), which is built shard by shard'
        )
    entries = reader.index.tensors
    with agreed(grid):
        unfit = [n for n, (layout, _) in targets.items() if n not in entries or entries[n].shape != layout.shape]
        if unfit and strict:
            shown = ", ".join(f"{name} {targets[name][0].shape}" for name in unfit[:8])
            raise ValueError(
                f"{folder} does not have {shown}{' and more' if len(unfit) > 8 else ''}: build the model that was "
                "saved, or pass strict=False for what fits"
            )
    for name, (layout, tensor) in targets.items():
        if name not in unfit:
            value = torch.empty_like(tensor, memory_format=torch.contiguous_format)
            part = Range(name, layout, 0, value.numel(), value.view(-1))
            reader.fill(name, part, grid.tensor.rank, grid.tensor.size)
            tensor.data.copy_(value)


def _targets(module: nn.Module, grid: Grid) -> Iterator[tuple[str, Layout, Tensor]]:
    if isinstance(module, PipelineModule):
        yield from ((f"{WEIGHTS}/{each.layout.name}", each.layout, each.parameter) for each in module.placed())
    else:
        for name, parameter in module.named_parameters():
            layout = layout_of(parameter)
            yield f"{WEIGHTS}/{layout.name or name}", replace(layout, name=layout.name or name), parameter
    for name, buffer, _ in buffers(module, grid.pipe.rank):
        yield f"{BUFFERS}/{name}", layout_of(buffer), buffer
