"""An engine's weights, one by one: for whoever writes a model to files, or reads one from them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn

from ..grid import Grid, Layout, Topology
from ..zero.lend import gathered
from ..zero.replicas import Replicas

__all__ = ["Part", "Weights", "assembled", "joined"]

Part = tuple[Layout, Tensor]  # of a parameter: where its elements live, and those of this rank


class Weights:
    """What ``Engine`` can do with single parameters of its model."""

    _replicas: Replicas

    def gathered(self, parameters: Iterable[nn.Parameter]) -> AbstractContextManager[None]:
        """Within it these parameters are whole, in stage 3 of ZeRO too: ``zero.gathered``. Collective over the data
        axis."""
        return gathered(parameters)

    @torch.no_grad()
    def assign(self, parameter: nn.Parameter, value: Tensor) -> None:
        """Give a parameter new values, of which this rank keeps what it owns; its master takes them unrounded.

        Every replica assigns the same. What the optimizer remembers of the parameter stays.

        Args:
            parameter: of this rank's module.
            value: this tensor rank's part of it, of any dtype.

        Raises:
            ValueError: another shape than the parameter's.
        """
        if value.shape != parameter.shape:
            raise ValueError(f"values {tuple(value.shape)} for a parameter {tuple(parameter.shape)}")
        if not self._replicas.fill(parameter, value.to(self._replicas.device)):
            parameter.data.copy_(value)  # frozen, and whole on every replica


def assembled(grid: Grid, mine: Mapping[str, Part]) -> dict[str, Tensor]:
    """Whole tensors under their names, on every rank, from each rank's parts. Collective over the grid."""
    # One replica is enough, and values must not drag along the flat buffers they are views of.
    local = {name: (layout, tensor.clone().cpu()) for name, (layout, tensor) in mine.items()}
    return joined(grid.topology, grid.world.all_gather_object(local if grid.data.is_first else {}))


def joined(topology: Topology, everyone: Sequence[Mapping[str, Part]]) -> dict[str, Tensor]:
    """Whole tensors under their names, from the parts that each rank of a grid holds."""
    whole_tensors: dict[str, Tensor] = {}
    for rank, held in enumerate(everyone):
        place = topology.coordinate(rank)
        for name, (layout, _) in held.items():
            if name not in whole_tensors:
                ranks = [topology.rank(**{**place._asdict(), "tensor": t}) for t in range(topology.size("tensor"))]
                whole_tensors[name] = layout.assemble([everyone[r][name][1] for r in ranks])
    return whole_tensors
