"""qwZ and hpZ: all-gather of stage 3's weights quantized to 8 bits, or within a host. Wang et al. 2023, ZeRO++.

Every rank has a primary shard of 1/N of the weights, which the optimizer steps and a checkpoint saves. In a group of p
ranks, each rank also stores 1/p of the weights after the first gather of a step, as its secondary shard. The other
gathers of the step, which include all gathers of the backward pass, are over the p ranks only. (The paper gathers over
all N ranks again in each forward pass. Weights do not change within a step, so here all microbatches share one gather
over the N ranks.)

With 8 bits, a rank also uses its own range after quantization, so that weights are bitwise equal on every replica. The
secondary shards store the received bytes unchanged, so that a backward pass uses the weights of its forward pass.

    a step of 2 microbatches     over all N        within p
    hpZ                          M                 3 M          of 4 M over all N without
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ...grid import Axis, Grid
from ...grid.comm.pending import Pending, Then
from ..protocols import GradientBucket
from .blocks import pack, packed_bytes, unpack
from .hosts import inner

BITS = 8


def make_routes(
    buckets: Sequence[GradientBucket], axis: Axis, grid: Grid, secondary: int, quantized: Sequence[bool]
) -> Iterator[WeightRoute]:
    """Make the all-gather of each bucket's weights. Collective.

    Args:
        buckets: the buckets whose weights are sharded.
        axis: the axis of all replicas.
        grid: the grid of this rank.
        secondary: number of replicas over which the second copy of the weights is sharded; 1 means no second copy.
        quantized: for each bucket, True if its weights are sent quantized to 8 bits.
    """
    within = inner(grid, secondary, " gather") if secondary > 1 else None
    return (WeightRoute(bucket, axis, within, packed) for bucket, packed in zip(buckets, quantized, strict=True))


class WeightRoute:
    """All-gather of one bucket's weights, which quantizes them to 8 bits (qwZ), reads secondary shards (hpZ), or both.

    Args:
        bucket: the bucket whose weights are gathered.
        axis: the axis of all replicas.
        within: the axis of the replicas over which the second copy of the weights is sharded; None means no second
            copy.
        quantized: send the weights quantized to 8 bits.

    Attributes:
        size: number of replicas.
        kept: the secondary shard, which is a range of the weights, or of the ranks' packed rows if the weights are
            quantized; None if there is no second copy.
        current: True if ``kept`` holds the weights of this step.
    """

    def __init__(self, bucket: GradientBucket, axis: Axis, within: Axis | None, quantized: bool) -> None:
        self._axis, self._within, self._quantized = axis, within, quantized
        self.size = axis.size
        self._numel, self._dtype = bucket.flat.numel // axis.size, bucket.weights.dtype  # of a shard
        self.kept: Tensor | None = None
        self.current = False
        if within is not None:
            shards = axis.size // within.size
            if quantized:
                self.kept = self._rows(shards, bucket.weights.device)
            else:
                self.kept = torch.empty(shards * self._numel, dtype=self._dtype, device=bucket.weights.device)

    @property
    def kept_bytes(self) -> int:
        """Bytes of the secondary shard."""
        return 0 if self.kept is None else self.kept.numel() * self.kept.element_size()

    def invalidate(self) -> None:
        """Discard the secondary shard: the weights have changed."""
        self.current = False

    def all_gather(self, output: Tensor, tensor: Tensor, async_op: bool = False) -> Pending:
        """Fill ``output`` (size * n,) with the shards ``tensor`` (n,) of all ranks, or with the secondary shards."""
        pending = self._packed(output, tensor) if self._quantized else self._plain(output, tensor)
        if not async_op:
            pending.wait()
        return pending

    def sent(self) -> tuple[dict[str, float], dict[str, float]]:
        """Return the bytes sent in a step's first gather and in each later one, as two dicts: axis name -> bytes."""
        size = self._dtype.itemsize * self._numel
        if self._quantized:
            size = packed_bytes(self._numel, BITS, self._dtype)
        first = {self._axis.name: float((self.size - 1) * size)}
        if self._within is None:
            return first, first
        return first, {self._within.name: float((self._within.size - 1) * self.size // self._within.size * size)}

    def _plain(self, output: Tensor, tensor: Tensor) -> Pending:
        if self._within is None or self.kept is None:
            return self._axis.all_gather(output, tensor, async_op=True)
        if self.current:
            return self._within.all_gather(output, self.kept, async_op=True)
        return Then(self._axis.all_gather(output, tensor, async_op=True), lambda: self._keep(output))

    def _packed(self, output: Tensor, tensor: Tensor) -> Pending:
        rows = self._rows(self.size, output.device)
        if self._within is not None and self.kept is not None and self.current:
            pending = self._within.all_gather(rows.view(-1), self.kept.view(-1), async_op=True)
        else:
            pending = self._axis.all_gather(rows.view(-1), pack(tensor, BITS), async_op=True)

        def arrive() -> None:
            self._keep(rows)
            unpack(rows, self._numel, BITS, self._dtype, output.view(self.size, -1))

        return Then(pending, arrive)

    def _keep(self, whole: Tensor) -> None:
        if self._within is not None and self.kept is not None and not self.current:
            self.kept.copy_(whole.view(self._within.size, *self.kept.shape)[self._within.rank])
            self.current = True

    def _rows(self, count: int, device: torch.device) -> Tensor:
        return torch.empty(count, packed_bytes(self._numel, BITS, self._dtype), dtype=torch.uint8, device=device)
