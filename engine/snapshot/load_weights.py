"""Loading of a checkpoint's weights into a model without an engine, for inference, conversion or inspection."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from ...base.checks import check_path
from ...checkpoint.format import folder as folders
from ...checkpoint.format.index import NAME
from ...checkpoint.matching import listed
from ...checkpoint.reader import LoadOptions, open_checkpoint
from ...checkpoint.snapshot import BUFFERS, WEIGHTS
from ...grid import Grid, Layout, layout_of
from ...grid.agreement.agreement import agreed
from ...pipe.module import PipelineModule
from ..named_parameters import named_parameters
from .adapted import require_same_base
from .capture import buffers


@torch.no_grad()
def load_weights(
    module: nn.Module, path: str | Path, *, grid: Grid | None = None, strict: bool = True, verify: bool = True
) -> None:
    """Load a checkpoint's weights and buffers into a model. Any grid may have written the checkpoint. Collective.

    Each rank reads its own part. Weights are cast to the model's dtype.

    >>> trained, other = nn.Linear(4, 1), nn.Linear(4, 1)
    >>> triax.Engine(trained, optimizer=triax.Optimizer("Adam"), batch=1).save_checkpoint("runs/linear")
    True
    >>> triax.load_weights(other, "runs/linear")
    >>> torch.equal(trained.weight, other.weight)
    True

    Args:
        module: a ``PipelineModule`` or any other module. For a module with an engine use ``engine.load_checkpoint``.
        path: a checkpoint, or a folder of checkpoints, also as a URI. In a folder the checkpoint that ``latest`` names
            is loaded.
        grid: the grid over which a module is sharded that is not a ``PipelineModule``. None if every rank has the
            complete module.
        strict: require every parameter and buffer to be in the checkpoint with the same shape. If False, only the
            tensors whose names and shapes match are loaded.
        verify: compare the bytes that are read with their checksums before anything is loaded.

    Raises:
        CheckpointError: on every rank, with nothing changed, if there is no such checkpoint, if it is damaged, or if
            it is of another model.
        ConfigError: ``path`` is no path.
        ValueError: if an engine trains the model in stage 3 of ZeRO, because the weights are then sharded.
    """
    check_path("load_weights", path=path)
    if isinstance(module, PipelineModule):
        grid = module.grid
        if module.run_hook is not None:
            raise ValueError(
                "an engine trains this model, and its weights may be sharded: call "
                "engine.load_checkpoint(..., load_module_only=True)"
            )
        module.fill()
    grid = grid or Grid()
    with agreed(grid):
        folder = folders.folder_at(path)
        if not (folder / NAME).is_file() and (last := folders.last(folder))[0] is not None:
            folder = folders.readable_path(folder, last[0])
            if last[1] and grid.rank == 0:
                logging.getLogger("triax").warning("%s", last[1])
    tensors = open_checkpoint(grid, folder, LoadOptions(weights_only=True, verify=verify)).tensors
    targets = {
        name: (layout, tensor)
        for name, layout, tensor in _targets(module, grid)
        if name in tensors or not name.startswith(f"{BUFFERS}/loss_fn.")  # older checkpoints do not have them
    }
    away = next((name for name, (_, tensor) in targets.items() if tensor.is_meta), None)
    if away is not None:
        raise ValueError(
            f"{away.partition('/')[2]} is on the meta device, which has no memory for values: call "
            "model.to_empty(device=...) before, or list the layers in a "
            'PipelineModule(..., device="meta"), which is built shard by shard'
        )
    with agreed(grid):
        if not hasattr(module, "lora_options") and any(".lora." in name for name in tensors):
            raise ValueError(
                f"{folder} has LoRA adapters, but the model has none: call triax.add_lora(model, ...) with the lora "
                "options of that run, or merge them by triax checkpoint export --format hf --merge-lora"
            )
        require_same_base({name: tensor.dtype for name, (_, tensor) in targets.items()}, tensors, folder)
        unfit = [n for n, (layout, _) in targets.items() if n not in tensors or tensors[n].shape != layout.shape]
        if unfit and strict:
            raise ValueError(
                f"{folder} does not have {listed([f'{name} {targets[name][0].shape}' for name in unfit])}. Build the "
                "model that was saved, or pass strict=False to load only the tensors that fit"
            )
    for name, (layout, tensor) in targets.items():
        if name not in unfit:
            tensors[name].read_shard(tensor.data, layout, grid)


def _targets(module: nn.Module, grid: Grid) -> Iterator[tuple[str, Layout, Tensor]]:
    """Yield the name in a checkpoint, the layout and the tensor of each weight and buffer on this rank."""
    for entry in named_parameters(module):
        yield f"{WEIGHTS}/{entry.layout.name}", entry.layout, entry.parameter
    for name, buffer, _ in buffers(module, grid.pipe.rank):
        yield f"{BUFFERS}/{name}", layout_of(buffer), buffer
