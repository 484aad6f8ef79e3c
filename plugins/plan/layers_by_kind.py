"""Layers of each stage and of each pipe rank, by kind: equal layers of a model are one kind, numbered in its order.

    layers   embedding  block  block  block  block  norm  head        cuts of 2 stages: 0, 3, 7
    kind         0        1      1      1      1      2     3
    rank 0   [0, 1, 1]                    rank 1   [1, 1, 2, 3]

A weight that the embedding and the head share has buckets of its own on the ranks that hold it, unless one stage holds
both: then the stage's buckets have it once.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from ...pipe.partition import boundaries, by_speed
from .cached import cached_method
from .layer_shapes import LayerShape

TIED_KIND = 0  # of the embedding, which is the first layer


class TiedWeight(enum.Enum):
    """Buckets of a rank for a weight that embedding and head share."""

    NONE = enum.auto()  # it has no such weight, or holds it in a stage's buckets
    ALONE = enum.auto()  # no other rank holds it
    SHARED = enum.auto()  # another rank holds it too, and the two add up their gradients


@dataclass(frozen=True, eq=False)  # ``LayersByKind`` makes one object for equal ranks: it is a key with a fast hash
class RankLayers:
    """Layers of a pipe rank, by kind.

    Attributes:
        kinds: the layers of each of its stages.
        owned: the same without those whose weight is tied, and not in the stage's buckets.
        tied: its buckets for the tied weight.
    """

    kinds: tuple[tuple[int, ...], ...]
    owned: tuple[tuple[int, ...], ...]
    tied: TiedWeight

    @cached_property
    def counts(self) -> dict[int, int]:
        """Number of layers of each kind."""
        return Counter(kind for stage in self.kinds for kind in stage)

    @cached_property
    def owned_counts(self) -> dict[int, int]:
        """Number of layers of each kind in ``owned``."""
        return Counter(kind for stage in self.owned for kind in stage)


class LayersByKind:
    """Layers of the stages of a model.

    Args:
        layers: the model's layers.
        partition: how they are cut into stages, as for ``PipelineModule``.
        speeds: speed of each rank of the pipe axis, by which ``parameters`` then cuts; (): all have the same.

    Attributes:
        kinds: the different layers.
        kind_of: the number of each layer's kind.
    """

    def __init__(self, layers: Sequence[LayerShape], partition: str | Sequence[int], speeds: Sequence[float]) -> None:
        self.layers, self._partition, self._speeds = layers, partition, tuple(speeds)
        numbers: dict[LayerShape, int] = {}
        self.kind_of = [numbers.setdefault(layer, len(numbers)) for layer in layers]
        self.kinds = list(numbers)

    @cached_method
    def cuts(self, stages: int) -> list[int]:
        """Return the boundaries of the stages, as ``ModelMemory.cuts`` does."""
        parameters = [float(layer.parameters) for layer in self.layers]
        if self._speeds and stages == len(self._speeds) and self._partition == "parameters":
            return by_speed(parameters, self._speeds)
        return boundaries(self._partition, stages, [layer.name for layer in self.layers], lambda: parameters)

    def stages(self, placement: Sequence[int]) -> list[list[range]]:
        """Return for each pipe rank the layers of its stages, by a schedule's rank of each stage."""
        stages = [range(first, end) for first, end in pairwise(self.cuts(len(placement)))]
        ranks = range(max(placement) + 1)
        return [[layers for layers, home in zip(stages, placement, strict=True) if home == rank] for rank in ranks]

    @cached_method
    def ranks(self, placement: tuple[int, ...]) -> list[RankLayers]:
        """Return the layers of each pipe rank, by a schedule's rank of each stage."""
        last = len(self.layers) - 1
        ends = {0, last} if self.layers[0].tie is not None else set[int]()
        stages = self.stages(placement)
        holders = sum(any(not ends.isdisjoint(layers) for layers in own) for own in stages)
        return [self._rank(own, ends, holders) for own in stages]

    def _rank(self, stages: Sequence[range], ends: set[int], holders: int) -> RankLayers:
        """Return the layers of a rank.

        Args:
            stages: the layers of its stages.
            ends: the layers that share a weight.
            holders: number of ranks that hold it.
        """
        holds = any(not ends.isdisjoint(layers) for layers in stages)
        together = holds and any(ends.issubset(layers) for layers in stages)
        tied, apart = TiedWeight.NONE, ends
        if together:
            apart = {max(ends)}  # the embedding's weight stays
        elif holds:
            tied = TiedWeight.ALONE if holders == 1 else TiedWeight.SHARED
        return self._one(
            tuple(tuple(self.kind_of[i] for i in layers) for layers in stages),
            tuple(tuple(self.kind_of[i] for i in layers if i not in apart) for layers in stages),
            tied,
        )

    @cached_method
    def _one(
        self, kinds: tuple[tuple[int, ...], ...], owned: tuple[tuple[int, ...], ...], tied: TiedWeight
    ) -> RankLayers:
        """Return the one object for equal ranks."""
        return RankLayers(kinds, owned, tied)
