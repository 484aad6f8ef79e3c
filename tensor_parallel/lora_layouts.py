"""Layouts of the factors A (r, K) and B (N, r) of an adapter: they follow the layout of the layer's weight.

    layer               A                              B                      gradients that are partial
    column-parallel     replicated                     sharded, dim 0         A, under sequence parallelism
    row-parallel        sharded, dim 1                 replicated             B, under sequence parallelism
    replicated          replicated                     replicated             A and B where the weight's is
    keys and values     replicated                     replicated             B

Of keys and values with fewer heads than ranks, a rank multiplies the rows of some heads.

Under sequence parallelism a replicated factor sees this rank's tokens only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from ..grid.comm.axis import Axis
from ..grid.layout import Layout, layout_of
from .adaptable import Adaptable, is_transposed


class FactorLayouts(NamedTuple):
    """Layouts of A and B."""

    a: Layout
    b: Layout


@dataclass(frozen=True)
class AdaptedLinear:
    """Linear layer whose outputs consist of fused parts. Each part may have an adapter.

    Attributes:
        layer: the layer.
        name: its name in the whole model.
        parts: number of layers that are fused along its outputs.
        axis: the axis that shards it.
    """

    layer: Any
    name: str
    parts: int
    axis: Axis

    @property
    def layout(self) -> Layout:
        """Layout of the weight."""
        return layout_of(self.layer.weight)

    @property
    def shape(self) -> tuple[int, ...]:
        """(N, K) over all ranks."""
        return self.layout.shape[::-1] if is_transposed(self.layer) else self.layout.shape

    @property
    def column_parallel(self) -> bool:
        """The outputs are sharded."""
        return self.layout.shard_dim == (1 if is_transposed(self.layer) else 0)

    @property
    def row_parallel(self) -> bool:
        """The inputs are sharded."""
        return self.layout.sharded and not self.column_parallel

    @property
    def rows(self) -> slice | None:
        """Rows of each part that this rank multiplies by, of a weight that it holds whole; None: all."""
        return self.layer.rows if isinstance(self.layer, Adaptable) else None

    @property
    def sequence_parallel(self) -> bool:
        """The layer takes or returns this rank's shard of the sequence."""
        return isinstance(self.layer, Adaptable) and self.layer.sequence_parallel and self.axis.size > 1

    def part_lengths(self) -> tuple[int, ...]:
        """Return the number of outputs of each part, over all ranks.

        Raises:
            ValueError: the weight is sharded in other parts than those that are fused.
        """
        outputs = self.shape[0]
        if self.parts == 1:
            return (outputs,)
        lengths = self.layout.parts if self.column_parallel and self.layout.parts is not None else (outputs,)
        if self.rows is not None:  # fused, of equal lengths
            lengths = (outputs // self.parts,) * self.parts
        if self.parts != len(lengths):
            raise ValueError(
                f"{self.name} has {self.parts} layers fused along its outputs, but its weight is sharded in "
                f"{len(lengths)} parts, so that an adapter of one of them has no shard of its own. Leave it out of "
                "lora.targets."
            )
        return lengths

    def factor_layouts(self, rank: int) -> list[FactorLayouts]:
        """Return the layouts of the factors of each part, of adapters of this rank: the table of this file."""
        a = self._a(rank)
        return [FactorLayouts(a, self._b(length, a)) for length in self.part_lengths()]

    def _a(self, rank: int) -> Layout:
        shape = (rank, self.shape[1])
        if self.row_parallel:
            return Layout(shape, shard_dim=1, unit=self.layout.unit)
        return Layout(shape, partial=self.sequence_parallel or (self.layout.partial and self.rows is None))

    def _b(self, length: int, a: Layout) -> Layout:
        shape = (length, a.shape[0])
        if self.column_parallel:
            parts = self.layout.parts if self.parts == 1 else None
            return replace(self.layout, shape=shape, name="", shard_dim=0, parts=parts)
        if self.row_parallel:
            return Layout(shape, partial=self.sequence_parallel)
        return Layout(shape, partial=a.partial or (self.rows is not None and self.axis.size > 1))

    def held(self, layouts: Sequence[FactorLayouts]) -> list[int]:
        """Return the number of outputs of each part that this rank holds."""
        return [b.local_shape(self.axis.rank, self.axis.size)[0] for _, b in layouts]

    def computed(self, layouts: Sequence[FactorLayouts]) -> list[int]:
        """Return the number of outputs of each part that this rank computes."""
        rows = self.rows
        return self.held(layouts) if rows is None else [rows.stop - rows.start] * self.parts
