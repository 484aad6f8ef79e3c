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

import torch
from torch import Tensor

from ...grid import Axis
from ...grid.comm.pending import Pending, Then, started
from ..protocols import GradientBucket
from .blocks import pack, packed_bytes, unpack

BITS = 8


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
        # What is sent for one shard: its elements, or its packed row.
        self._sent, self._sent_dtype = self._numel, self._dtype
        if quantized:
            self._sent, self._sent_dtype = packed_bytes(self._numel, BITS, self._dtype), torch.uint8
        self.kept = None if within is None else self._empty(axis.size // within.size, bucket.weights.device)
        self.current = False

    @property
    def kept_bytes(self) -> int:
        """Bytes of the secondary shard."""
        return 0 if self.kept is None else self.kept.numel() * self.kept.element_size()

    def invalidate(self) -> None:
        """Discard the secondary shard: the weights have changed."""
        self.current = False

    def all_gather(self, output: Tensor, tensor: Tensor, async_op: bool = False) -> Pending:
        """Fill ``output`` (size * n,) with the shards ``tensor`` (n,) of all ranks, or with the secondary shards."""
        received = self._empty(self.size, output.device) if self._quantized else output
        if self._within is not None and self.kept is not None and self.current:
            pending = self._within.all_gather(received, self.kept, async_op=True)
        else:
            pending = self._axis.all_gather(received, pack(tensor, BITS) if self._quantized else tensor, async_op=True)

        def arrive() -> None:
            if self._within is not None and self.kept is not None and not self.current:
                self.kept.copy_(received.view(self._within.size, *self.kept.shape)[self._within.rank])
                self.current = True
            if self._quantized:
                rows = received.view(self.size, self._sent)
                unpack(rows, self._numel, BITS, self._dtype, output.view(self.size, self._numel))

        return started(Then(pending, arrive), async_op)

    def sent(self) -> tuple[dict[str, float], dict[str, float]]:
        """Return the bytes sent in a step's first gather and in each later one, as two dicts: axis name -> bytes."""
        size = self._sent * self._sent_dtype.itemsize
        first = {self._axis.name: float((self.size - 1) * size)}
        if self._within is None:
            return first, first
        return first, {self._within.name: float((self._within.size - 1) * self.size // self._within.size * size)}

    def _empty(self, shards: int, device: torch.device) -> Tensor:
        """Return an uninitialized tensor for what is sent for some shards, (shards * n,)."""
        return torch.empty(shards * self._sent, dtype=self._sent_dtype, device=device)
