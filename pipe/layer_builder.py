"""Layers built from the entries of a list. Their values depend on the seed and the index alone, not on the grid."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from ..base.accelerators import move_module
from ..grid import Grid, layout_of
from ..grid.randomness.random import seeded
from .spec import LayerSpec
from .ties import Layer


class LayerBuilder:
    """Builds layers of a list.

    Args:
        entries: the list of layers of the whole model.
        grid: the grid; layers are built on its device.
        seed: seed of the initial weights.
        dtype: dtype of the parameters; None leaves what the layers make.

    Attributes:
        entries, grid: as given.
    """

    def __init__(self, entries: Sequence[Layer], grid: Grid, seed: int, dtype: torch.dtype | None) -> None:
        self.entries, self.grid, self._seed, self._dtype = entries, grid, seed, dtype

    def build(self, source: int) -> nn.Module:
        """Build one layer with its initial values. A module that the caller has built is only moved."""
        entry = self.entries[source]
        if isinstance(entry, LayerSpec):
            # In a dry run, on the meta device: no layer has values.
            device = "meta" if self.grid.device.type == "meta" else "cpu"
            with seeded(self._seed, f"layers.{source}"), torch.device(device):
                entry = entry.build(self.grid)
        assert isinstance(entry, nn.Module)
        return move_module(entry, self.grid.device, self._dtype)

    def build_on_meta(self, source: int, otherwise: str) -> nn.Module:
        """Build a layer on the meta device, without values.

        ``otherwise`` is the advice in the error message if the layer cannot be built on the meta device.
        """
        spec = self.entries[source]
        assert isinstance(spec, LayerSpec)
        try:
            with seeded(self._seed), torch.device("meta"):
                return spec.build(self.grid).to(dtype=self._dtype)
        except Exception as error:
            if "meta" not in str(error).lower():
                raise
            what = f"layer {source}, {spec}, cannot be built on the meta device"
            raise ValueError(f"{what} ({error}): {otherwise}") from error

    def parameter_counts(self) -> list[float]:
        """Count the parameters of each layer (of the whole layer, not of this rank's shard), on the meta device."""
        counts: dict[int, float] = {}
        for index, entry in enumerate(self.entries):
            if id(entry) not in counts:
                layer: Layer = entry
                if isinstance(entry, LayerSpec):
                    layer = self.build_on_meta(index, "pass partition='uniform' or boundaries")
                parameters = layer.parameters() if isinstance(layer, nn.Module) else ()
                counts[id(entry)] = float(sum(torch.Size(layout_of(p).shape).numel() for p in parameters))
        return [counts[id(entry)] for entry in self.entries]


def broadcast(module: nn.Module, grid: Grid) -> None:
    """Broadcast the weights and buffers of a module that each process built itself from rank 0. Collective."""
    for tensor in [*module.parameters(), *module.buffers()] if grid.size > 1 else ():
        layout, axes = layout_of(tensor), [grid.world]
        if layout.sharded or layout.expert_dim is not None:
            # Shards are taken from a rank that holds the same one, along one axis after the other.
            axes = [grid.pipe, grid.axis(layout.replicas), *([] if layout.sharded else [grid.tensor])]
        data = tensor.detach().to(grid.device).contiguous()
        for axis in axes:
            if axis.size > 1:
                axis.broadcast(data)
        tensor.data.copy_(data)
