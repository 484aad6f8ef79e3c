"""Seconds of the data axis and of the optimizer: ZeRO's collectives, in the passes and behind the last one.

| stage | each microbatch | behind the last backward pass |
|---|---|---|
| 0 | - | all-reduce of gradients, step |
| 1 | - | reduce-scatter of gradients, step of the shard, all-gather of weights |
| 2 | reduce-scatter of gradients | step of the shard, all-gather of weights |
| 3 | two all-gathers of weights, reduce-scatter of gradients | step of the shard |

Passes hide the collectives of each microbatch, where these are shorter (Rajbhandari et al. 2020, section 7). Adam reads
and writes 34 bytes a parameter in mixed precision. With offload, gradients go to the CPU and weights back, and Adam
runs at the speed of its memory (arXiv:2101.06840).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from .cached import cached_method
from .collectives import RankGroup, all_reduce, reduce_scatter
from .device_time import DeviceTime
from .layer_shapes import LayerShape
from .parallel_layout import ParallelLayout, Replicas
from .pass_time import RankTime

ADAM_BYTES = 34.0  # gradient twice (norm, update), master and two moments read and written, weight written


class HeldParameters(NamedTuple):
    """Parameters that a rank holds before ZeRO shards them.

    Attributes:
        numel: their number.
        group: the replicas that ZeRO shards them over, or in stage 0 all of them.
        copies: the replicas that hold the same shards.
    """

    numel: float
    group: RankGroup
    copies: RankGroup


class FinishTime(NamedTuple):
    """Seconds behind the last backward pass."""

    data: float = 0.0
    optimizer: float = 0.0
    offload: float = 0.0


class ZeroTime:
    """Seconds of ZeRO and of the optimizer.

    Args:
        device: times of kernels.
        types: the different layers of the model.
    """

    def __init__(self, device: DeviceTime, types: Sequence[LayerShape]) -> None:
        self.device, self.machine, self.types = device, device.machine, types

    @cached_method
    def parameters(self, kind: int, tensor: int, expert: int) -> tuple[float, float]:
        """Return the parameters of a layer that a rank holds: replicated over the experts' axis, and not."""
        dense = experts = 0.0
        for weight in self.types[kind].weights:
            count = weight.numel / (tensor if weight.shards_over(tensor) else 1)
            if weight.expert_dim is None:
                dense += count
            else:
                experts += count / expert
        return dense, experts

    def held(self, counts: tuple[int, ...], layout: ParallelLayout) -> list[HeldParameters]:
        """Return the parameters of so many layers of each kind: dense ones, and experts' if there are any."""
        shards = layout.shards if layout.zero else layout.replicas
        return self._held(counts, layout.tensor, layout.expert, layout.replicas, shards)

    @cached_method
    def _held(
        self, counts: tuple[int, ...], tensor: int, expert: int, replicas: Replicas, shards: Replicas
    ) -> list[HeldParameters]:
        dense = experts = 0.0
        for kind, count in enumerate(counts):
            if count:
                of_layer = self.parameters(kind, tensor, expert)
                dense, experts = dense + count * of_layer[0], experts + count * of_layer[1]
        kinds = [(dense, replicas.dense, shards.dense, tensor)]
        if experts:
            kinds.append((experts, replicas.expert, shards.expert, tensor * expert))
        return [
            HeldParameters(numel, RankGroup(size, stride), RankGroup(ranks // size, stride * size))
            for numel, ranks, size, stride in kinds
        ]

    @cached_method
    def _scatter(self, size: float, group: RankGroup) -> float:
        """Return the seconds of a reduce-scatter or an all-gather."""
        return reduce_scatter(size, group, self.machine)

    def in_each_pass(self, rank: RankTime, layout: ParallelLayout) -> RankTime:
        """Return a rank's times with those collectives of stages 2 and 3 that the passes do not hide."""
        gather = scatter = 0.0
        for numel, group, _ in self.held(rank.counts, layout):
            gather += self._scatter(numel * self.device.bytes, group) if layout.zero == 3 else 0.0
            scatter += self._scatter(numel * self.device.wide, group)
        forward = max(rank.forward, gather)
        shown = max(0.0, gather + scatter - rank.inputs - rank.weights)
        kinds = {**rank.kinds, "data": forward - rank.forward + shown}
        return replace(rank, forward=forward, inputs=rank.inputs + shown, kinds=kinds)

    def behind_the_passes(self, ranks: Sequence[RankTime], layout: ParallelLayout) -> FinishTime:
        """Return the seconds behind the last backward pass, of the slowest rank."""
        return max((self._finish(rank, layout) for rank in ranks), key=sum)

    def _finish(self, rank: RankTime, layout: ParallelLayout) -> FinishTime:
        machine, size, wide = self.machine, self.device.bytes, self.device.wide
        gradients = weights = step = moved = 0.0
        for numel, group, copies in self.held(rank.counts, layout):
            share = numel / (group.size if layout.zero else 1)
            if layout.zero == 0:
                gradients += all_reduce(numel * wide, group, machine)
            elif layout.zero == 1:
                gradients += self._scatter(numel * wide, group)
            gradients += all_reduce(share * wide, copies, machine)
            weights += self._scatter(numel * size, group) if layout.zero in (1, 2) else 0.0
            if layout.offload:
                moved += share * ((wide + size) / machine.host_bandwidth)
                step += share * ADAM_BYTES / machine.host_memory_bandwidth
            else:
                step += share * ADAM_BYTES / machine.elementwise_speed
        if machine.overlap_gradients and (layout.pipe == 1 or machine.overlap_pipelined_gradients):
            gradients = max(0.0, gradients - (rank.inputs + rank.weights))
        if machine.overlap_weights:
            weights = max(0.0, weights - rank.forward)
        return FinishTime(gradients + weights, step, moved)
