"""qwZ and hpZ: stage 3's weights gathered as blocks of 8 bits, and from within a host. Wang et al. 2023, ZeRO++.

Every rank has its shard of 1/N, as ever; that alone is stepped and saved. What a step's first gather of some weights
brings is kept: of a group of p ranks each has 1/p of it, its secondary shard. The step's other gathers of them, all
backward ones among these, are from these p ranks. (The paper gathers anew for each forward pass. Weights are the same
from one step to the next, so here microbatches share one.)

With blocks of 8 bits a rank's own range goes through them too: weights are bitwise the same on every replica. What is
kept for the group are the very bytes that came, so a backward pass sees what its forward pass saw.

    a step of 2 microbatches     over all N        within p
    hpZ                          M                 3 M          of 4 M over all N without
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from ..grid import Axis, Grid, Pending
from .blocks import pack, packed_bytes, unpack
from .buckets import Bucket
from .mode import Mode
from .parameters import ParameterGatherer
from .plus import inner
from .quantized import Then, quantize_reductions

BITS = 8


class PlusGatherer(ParameterGatherer):
    """A gatherer whose gathers are quantised, or come from secondary shards, as ``mode.plus`` says.

    What is lent, saved or looked at (``borrow``) is gathered as it is, over all replicas.

    Arguments are those of ``ParameterGatherer``.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        grid: Grid,
        order: Mapping[int, Sequence[int]],
        mode: Mode,
        keep: bool,
        over: Callable[[int, int], None],
    ) -> None:
        super().__init__(buckets, grid, order, mode, keep, over)
        plus = mode.plus
        assert plus is not None
        within = inner(grid, plus.secondary, " gather") if plus.secondary > 1 else None
        self._exact = False
        self._ways = {
            id(bucket): _Way(bucket, self._axis, within, plus.quantizes(bucket.weights.dtype, bucket.trained))
            for bucket in buckets
        }

    @property
    def secondary(self) -> int:
        """See ``ParameterGatherer``."""
        kept = [way.kept for way in self._ways.values() if way.kept is not None]
        return sum(each.numel() * each.element_size() for each in kept)

    def sent(self, bucket: Bucket) -> tuple[dict[str, float], dict[str, float]]:
        """Bytes that this rank sends in a step's first gather of a bucket, and in each further one: by axis."""
        return self._ways[id(bucket)].sent()

    def changed(self) -> None:
        """See ``ParameterGatherer``."""
        for way in self._ways.values():
            way.holds = False

    def finish(self) -> None:
        """See ``ParameterGatherer``."""
        super().finish()
        self.changed()

    def abandon(self) -> None:
        """See ``ParameterGatherer``."""
        super().abandon()
        self.changed()

    def borrow(self, buckets: Iterable[Bucket]) -> list[Bucket]:
        """See ``ParameterGatherer``."""
        self._exact = True
        try:
            return super().borrow(buckets)
        finally:
            self._exact = False

    def _start(self, bucket: Bucket) -> None:
        if bucket.released:
            way = self._axis if self._exact else cast(Axis, self._ways[id(bucket)])
            self._arriving[id(bucket)] = bucket.restore(way)


class _Way:
    """How the weights of one bucket come: an axis to ``Bucket.restore``.

    Attributes:
        kept: the secondary shard: a range of the weights, or of the ranks' bytes; None: there is none.
        holds: whether it has the weights of now.
    """

    def __init__(self, bucket: Bucket, axis: Axis, within: Axis | None, quantized: bool) -> None:
        self._axis, self._within, self._quantized = axis, within, quantized
        self.size = axis.size
        self._numel, self._dtype = bucket.flat.numel // axis.size, bucket.weights.dtype  # of a shard
        self.kept: Tensor | None = None
        self.holds = False
        if within is not None:
            held = axis.size // within.size  # shards
            if quantized:
                self.kept = self._rows(held, bucket.weights.device)
            else:
                self.kept = torch.empty(held * self._numel, dtype=self._dtype, device=bucket.weights.device)

    def all_gather(self, output: Tensor, tensor: Tensor, async_op: bool = False) -> Pending:
        """Fill ``output``, (size * n,), from what every rank has: its shard, ``tensor``, or its secondary one."""
        pending = self._packed(output, tensor) if self._quantized else self._plain(output, tensor)
        if not async_op:
            pending.wait()
        return pending

    def sent(self) -> tuple[dict[str, float], dict[str, float]]:
        """See ``PlusGatherer.sent``."""
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
        if self.holds:
            return self._within.all_gather(output, self.kept, async_op=True)
        return Then(self._axis.all_gather(output, tensor, async_op=True), lambda: self._keep(output))

    def _packed(self, output: Tensor, tensor: Tensor) -> Pending:
        rows = self._rows(self.size, output.device)
        if self._within is not None and self.kept is not None and self.holds:
            pending = self._within.all_gather(rows.view(-1), self.kept.view(-1), async_op=True)
        else:
            pending = self._axis.all_gather(rows.view(-1), pack(tensor, BITS), async_op=True)

        def arrive() -> None:
            self._keep(rows)
            unpack(rows, self._numel, BITS, self._dtype, output.view(self.size, -1))

        return Then(pending, arrive)

    def _keep(self, whole: Tensor) -> None:
        if self._within is not None and self.kept is not None and not self.holds:
            self.kept.copy_(whole.view(self._within.size, *self.kept.shape)[self._within.rank])
            self.holds = True

    def _rows(self, count: int, device: torch.device) -> Tensor:
        return torch.empty(count, packed_bytes(self._numel, BITS, self._dtype), dtype=torch.uint8, device=device)


def equip(
    mode: Mode,
    grid: Grid,
    buckets: Sequence[Bucket],
    gatherer: ParameterGatherer | None,
    optimizer: torch.optim.Optimizer | None,
) -> None:
    """What ``mode.plus`` asks of gradients, and of secondary shards when the optimizer has stepped. Collective.

    Raises:
        ValueError: gradients are to travel in another way too.
    """
    plus = mode.plus
    assert plus is not None
    if plus.gradients and (mode.exchange is not None or mode.communicate is not None):
        raise ValueError(
            "quantised gradients (zero_quantized_gradients) travel in 4 bits, and another dtype or compression is said "
            "for them too: give one of them"
        )
    if plus.gradients:
        real = [bucket for bucket in buckets if bucket.trained and bucket.communicate.is_floating_point]
        quantize_reductions(real, grid, plus.host)
    if gatherer is None or optimizer is None or not gatherer.secondary:
        return
    reference = weakref.ref(gatherer)

    def changed(*_: Any) -> None:
        # Whoever stepped it: what was kept of the weights is old.
        if (there := reference()) is not None:
            there.changed()

    optimizer.register_step_post_hook(changed)
