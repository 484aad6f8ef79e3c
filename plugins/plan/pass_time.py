"""Seconds of one microbatch in the passes of a pipe rank: forward, input gradients, weight gradients, recomputation.

    LayerTime  --as the schedule runs its passes-->  PassTime  --sum of a rank's layers, messages-->  RankTime

| recompute | the forward pass that runs again | source |
|---|---|---|
| full, mlp, selective | the layer's, the MLP's, the core of attention's | Korthikanti et al. 2022 |
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...pipe.schedules.registry import RECIPES
from .additive import Additive
from .layer_time import LAYER_KINDS, LayerTime
from .parallel_layout import ParallelLayout


@dataclass(frozen=True)
class PassTime(Additive):
    """Seconds of one microbatch in some layers on one rank: of each pass, and the same time by kind.

    Attributes:
        forward, inputs, weights: seconds of the forward pass, of input gradients and of weight gradients.
        recompute: seconds of the forward pass that runs again, in addition.
        products, attention, elementwise, tensor, context, expert, overhead: seconds of forward, inputs and weights
            together.
    """

    forward: float = 0.0
    inputs: float = 0.0
    weights: float = 0.0
    recompute: float = 0.0
    products: float = 0.0
    attention: float = 0.0
    elementwise: float = 0.0
    tensor: float = 0.0
    context: float = 0.0
    expert: float = 0.0
    overhead: float = 0.0

    @classmethod
    def of(cls, layer: LayerTime, recompute: float, split: bool) -> PassTime:
        """Return the passes of a layer.

        Args:
            layer: its times.
            recompute: seconds of the forward pass that runs again.
            split: weight gradients are a pass of their own.
        """
        tensor = layer.tensor
        inputs, weights = (tensor.split_inputs, tensor.split_weights) if split else (0.0, 0.0)
        kinds = {kind: sum(getattr(layer, kind)) for kind in LAYER_KINDS}
        kinds["tensor"] = tensor.forward + tensor.backward + (inputs + weights)
        return cls(layer.forward, layer.backward + inputs, layer.products.weights + weights, recompute, **kinds)

    @property
    def busy(self) -> float:
        """Seconds of all passes."""
        return self.forward + self.inputs + self.weights + self.recompute

    def kinds(self, microbatches: float = 1.0) -> dict[str, float]:
        """Return the seconds of some microbatches by kind, without the recomputation."""
        return {kind: microbatches * getattr(self, kind) for kind in LAYER_KINDS}


@dataclass(frozen=True)
class RankTime:
    """Seconds of one microbatch on a pipe rank, all its chunks together, with the messages that it waits for.

    Attributes:
        count: number of ranks that have them.
        counts: layers of each kind.
        forward, inputs, weights: seconds of the passes; recomputation is part of ``inputs``.
        kinds: the same seconds by kind.
    """

    count: int
    counts: tuple[int, ...]
    forward: float
    inputs: float
    weights: float
    kinds: dict[str, float]

    @property
    def busy(self) -> float:
        """Seconds of a microbatch."""
        return self.forward + self.inputs + self.weights

    def idle(self, layout: ParallelLayout) -> float:
        """Return the seconds that other ranks wait for this one at the start and the end of a step."""
        closed = RECIPES[layout.schedule].closed
        assert closed is not None
        return closed.idle(self.forward, self.inputs, self.weights, layout.chunks)


def busiest(ranks: Sequence[RankTime]) -> RankTime:
    """Return the rank with most seconds of a microbatch."""
    return max(ranks, key=lambda rank: rank.busy)
