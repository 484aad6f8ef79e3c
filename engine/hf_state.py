"""A module's whole ``state_dict`` on rank 0, one tensor at a time, whatever the grid and the stage of ZeRO.

And what grid a checkpoint was written on.
"""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..grid import Axis, Layout, layout_of
from .checkpoint_folder import latest, place
from .checkpoint_index import read_index

if TYPE_CHECKING:
    from .module_engine import ModuleEngine


@torch.no_grad()
def whole_state(engine: ModuleEngine) -> dict[str, Tensor]:
    """Names and whole tensors, in the host's memory, of an engine's module; empty but on rank 0. Collective.

    No rank but the first ever holds more than its own and one whole parameter. What is tied stays so: one tensor under
    several names.
    """
    grid, first = engine.grid, engine.grid.rank == 0
    released = engine.zero_optimization_stage() == 3
    whole: dict[str, Tensor] = {}
    seen: dict[nn.Parameter, Tensor | None] = {}
    for name, value in engine.module.state_dict(keep_vars=True).items():
        if not isinstance(value, nn.Parameter):
            if first:
                whole[name] = value.detach().cpu().clone()
            continue
        if value not in seen:
            with engine.gathered([value]) if released else nullcontext():
                if not grid.data.is_first:
                    seen[value] = None
                    continue
                tensor = _over(grid.tensor, value.detach(), layout_of(value))
                seen[value] = tensor.to("cpu", copy=True).contiguous() if first else None
        kept = seen[value]
        if kept is not None:
            whole[name] = kept
    return whole


def saved_axes(folder: Path) -> dict[str, Any] | None:
    """The axes of the grid that a folder's last checkpoint was written on, as ``Topology.axes``; None: there is none.

    Raises:
        CorruptError: its index is damaged.
    """
    tag = latest(folder)
    if tag is None:
        return None
    axes: dict[str, Any] = read_index(place(folder, tag)).head["grid"]
    return axes


def _over(axis: Axis, mine: Tensor, layout: Layout) -> Tensor:
    """A whole tensor from the parts of the tensor ranks, on each of them. Collective over the axis."""
    if not layout.sharded or axis.size == 1:
        return mine
    shapes = [torch.Size(layout.local_shape(rank, axis.size)) for rank in range(axis.size)]
    most = max(shape.numel() for shape in shapes)  # heads may be shared out unevenly
    padded = F.pad(mine.reshape(-1), [0, most - mine.numel()]).contiguous()
    gathered = padded.new_empty(axis.size * most)
    axis.all_gather(gathered, padded)
    flats = gathered.split(most)
    return layout.assemble([flat[: shape.numel()].view(shape) for flat, shape in zip(flats, shapes, strict=True)])
