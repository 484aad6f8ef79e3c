"""State of replicas that take local steps, as a checkpoint saves it: the mean over the replicas."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ...grid import Grid
from ...grid.layout import FlatRange
from ...zero.data_axis import ZeroDataAxis
from ...zero.shard_ranges import NamedParameter
from ...zero.state_shards import StateShards
from .outer_optimizer import agreed_steps


class MeanStateShards(StateShards):
    """``StateShards`` that save the mean of the values over the replicas. Collective over the data axis.

    Args:
        data_axis, parameters: the arguments of ``StateShards``. Each replica holds its weights unsharded.
        grid: the whole grid.
        since: number of steps since the last synchronization. If it is 0, all replicas have the same weights.
    """

    def __init__(self, data_axis: ZeroDataAxis, parameters: Sequence[NamedParameter], grid: Grid, since: int) -> None:
        super().__init__(data_axis, parameters, grid)
        self._since = since

    def values(self, mine: bool) -> Iterator[FlatRange]:
        """Yield the values of the parameters; with ``mine`` they are averaged over the replicas, to be saved.

        Raises:
            ValueError: ``mine`` is True, and replicas have taken different numbers of steps. Every rank raises it.
        """
        if not mine or agreed_steps(self.grid.data, self._since, self.grid.device) == 0:
            yield from super().values(mine)
            return
        self.data_axis.written.take()
        for bucket in self.data_axis.buckets:
            values, first = bucket.values()
            yield from self.ranges.of_bucket(bucket, self._mean(values) if bucket.trained else values, first, True)
        for named in self.unmanaged:
            yield from self.ranges.of_replicated(named, named.parameter.detach().contiguous().view(-1))

    def states(self) -> Iterator[tuple[str, FlatRange]]:
        """Yield the optimizer state that this rank writes, averaged over the replicas, with its keys."""
        mine = {(index, key): value for index, key, value in self.stepper.state_tensors()}
        # A replica that has skipped all its steps so far has no optimizer state. Then no mean can be computed.
        everyone = self.grid.data.all_gather_json([*mine])
        for index, key in everyone[0]:
            if all((index, key) in theirs for theirs in everyone):
                value = self._mean(mine[index, key])
                yield from ((key, part) for part in self.stepper.state_ranges(index, value, self.ranges))

    def flats(self, flats: Sequence[Tensor], mine: bool) -> Iterator[FlatRange]:
        """Cut flat tensors, one for each trained bucket, into ranges of parameters.

        Args:
            flats: one tensor, (numel,), for each trained bucket.
            mine: yield only the ranges that this rank writes to a checkpoint; if False, yield all ranges.
        """
        for bucket, flat in zip(self.trained, flats, strict=True):
            yield from self.ranges.of_bucket(bucket, flat, 0, mine)

    def _mean(self, value: Tensor) -> Tensor:
        """Return a tensor averaged over the replicas in at least fp32; integer tensors are returned unchanged."""
        if not value.is_floating_point():
            return value
        found = value.detach().to(torch.promote_types(value.dtype, torch.float32), copy=True)
        self.grid.data.all_reduce(found)
        return found.div_(self.grid.data.size).to(value.dtype)
