"""Full state dict of an engine's module on rank 0, gathered from ZeRO shards and tensor shards, tensor by tensor.

Also the axes of the grid on which a checkpoint was written.
"""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ...checkpoint.format.folder import last, readable_path
from ...checkpoint.format.index import read_index
from ...grid import layout_of

if TYPE_CHECKING:
    from ...engine.module_engine import ModuleEngine


@torch.no_grad()
def full_state_dict(engine: ModuleEngine) -> dict[str, Any]:
    """Return the module's full state dict in CPU memory on rank 0, and an empty dict on other ranks. Collective.

    Other ranks never have more in memory than their own shards and one whole parameter. Tied parameters are one tensor
    under several names.
    """
    grid, on_rank_0 = engine.grid, engine.grid.rank == 0
    stage3 = engine.options.zero.stage == 3
    full: dict[str, Any] = {}
    gathered: dict[nn.Parameter, Tensor | None] = {}
    for name, value in engine.module.state_dict(keep_vars=True).items():
        if not isinstance(value, nn.Parameter):
            if on_rank_0:
                full[name] = value.detach().cpu().clone() if isinstance(value, Tensor) else value
            continue
        if value not in gathered:
            with engine.gathered([value]) if stage3 else nullcontext():
                layout = layout_of(value)
                if not grid.axis(layout.replicas).is_first:
                    gathered[value] = None
                    continue
                tensor = layout.gather(grid.tensor, value.detach(), grid.expert)
                gathered[value] = tensor.to("cpu", copy=True).contiguous() if on_rank_0 else None
        copy = gathered[value]
        if copy is not None:
            full[name] = copy
    return full


def saved_axes(folder: Path) -> dict[str, Any] | None:
    """Return the grid's axes of a folder's last checkpoint, as ``Topology.sizes``; None if there is no checkpoint.

    Raises:
        CorruptError: the checkpoint's index is damaged.
    """
    tag = last(folder)[0]
    if tag is None:
        return None
    axes: dict[str, Any] = read_index(readable_path(folder, tag)).head["grid"]
    return axes
