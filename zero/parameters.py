"""Stage 3: weights are gathered while their layer runs, the next layer's are prefetched, and released after."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch

from ..grid import Grid, Pending
from ..grid.autograd import mark
from .bucket import Bucket
from .options import ZeroOptions
from .protocols import AllGather, GatherRoute


class ParameterGatherer:
    """Gathers the weights of a layer before it runs, forward or backward, and releases them after.

    Gathers have a communicator of their own: a replica whose backward pass completes gradients in another order must
    not match a gather with a reduction.

    Args:
        buckets: the buckets of this rank.
        grid: the grid over whose data axis the weights are sharded.
        order: for each stage, its layers in the order they run.
        options: how much to prefetch and to keep, and how weights are sent.
        keep: keep weights from a stage's first forward of a step to its end: one gather a step and layer instead of one
            for each forward and backward pass, at the cost of the memory of the whole weights.
        backward_done: called within a backward pass when one of a layer's runs is over, with the layer and the number
            of its runs.

    Attributes:
        routes: how the weights of a bucket are gathered, if not over the data axis: ZeRO++.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        grid: Grid,
        order: Mapping[int, Sequence[int]],
        options: ZeroOptions,
        keep: bool,
        backward_done: Callable[[int, int], None],
    ) -> None:
        members = range(grid.data.size)
        axis = grid.subgroup("data", members, purpose=" gather")
        assert axis is not None  # every rank is a member
        self._axis, self._keep, self._options = axis, keep, options
        self._backward_done = backward_done
        self._buckets = list(buckets)
        self._buckets_of: dict[int, list[Bucket]] = {}
        for bucket in buckets:
            for layer in bucket.layers:
                self._buckets_of.setdefault(layer, []).append(bucket)
        self._next = {(a, b): c for a, b, c in _neighbours(order)}
        # Elements of the layers that run between a layer's forward and its backward, and between backward and forward.
        self._until = {key: self._elements(layers) for key, layers in _between(order)}
        self._stage_layers = order
        self._arriving: dict[int, Pending | None] = {}  # bucket -> its gather, until its parameters are shown
        self._borrowed: dict[Bucket, int] = {}  # number of borrowers: it stays gathered, whatever is dropped
        self._wanted: set[Bucket] = set()  # borrowed buckets that a layer uses too
        for bucket in buckets:
            bucket.release()
        self.routes: dict[Bucket, GatherRoute] = {}
        if options.zeropp is not None:
            self.routes.update(zip(self._buckets, options.zeropp.gather_routes(self._buckets, axis, grid), strict=True))

    def run(self, stage: int, layer: int, call: Callable[[Any], Any], x: Any) -> Any:
        """Return ``call(x)``, one layer of a stage, with its weights gathered now and in its backward pass."""
        if torch._C._current_graph_task_id() != -1:
            # Recomputation in a backward pass. The layer's own backward follows: the weights stay for that.
            self.fetch(layer)
            self.arrive(layer)
            return call(x)
        self._acquire(stage, layer, 1)
        if not torch.is_grad_enabled():
            y = call(x)
            self.drop(layer)
            return y
        x = mark(x, lambda: self._end(stage, layer))
        y = call(x)
        y = mark(y, lambda: self._acquire(stage, layer, -1))
        self._release(stage, layer, 1)
        return y

    def prefetch(self, layers: Iterable[int]) -> None:
        """Start gathering layers that a backward pass is about to recompute.

        All of them, whatever the limit, and even if this replica has nothing to recompute: another replica may have,
        and all replicas must gather the same layers.
        """
        for layer in layers:
            self.fetch(layer)
            if not self._options.overlap_comm:
                self.arrive(layer)

    def release(self, stage: int) -> None:
        """RELEASE: keep the shards only of the stage's layers, unless weights are kept to the end of the step."""
        for layer in self._stage_layers[stage]:
            if not self._keep or self._crowded(0):
                self.drop(layer)

    def finish(self) -> None:
        """Release everything at the end of a step."""
        for layers in self._stage_layers.values():
            for layer in layers:
                self.drop(layer)
        self.changed()

    @property
    def kept_bytes(self) -> int:
        """Bytes of the copies of weights (ZeRO++'s secondary shards) that this rank keeps between gathers."""
        return sum(route.kept_bytes for route in self.routes.values())

    def changed(self) -> None:
        """Discard the copies of weights (ZeRO++'s secondary shards), because the shards were written."""
        for route in self.routes.values():
            route.invalidate()

    def abandon(self) -> None:
        """Discard all pending gathers after a failure."""
        self._arriving.clear()
        self._wanted.clear()
        self.changed()

    def borrow(self, buckets: Iterable[Bucket]) -> list[Bucket]:
        """Gather the weights of buckets over all replicas, unquantized, until ``give_back``. Collective."""
        buckets = list(buckets)
        wanted = [bucket for bucket in buckets if not bucket.released and bucket not in self._borrowed]
        for bucket in buckets:
            self._start(bucket, self._axis)
        for bucket in buckets:
            self._await(bucket)
        self._wanted.update(wanted)
        for bucket in buckets:
            self._borrowed[bucket] = self._borrowed.get(bucket, 0) + 1
        return buckets

    def give_back(self, buckets: Iterable[Bucket]) -> None:
        """Release buckets gathered by ``borrow``, unless another ``borrow`` or a layer still uses their weights."""
        for bucket in buckets:
            self._borrowed[bucket] -= 1
            if not self._borrowed[bucket]:
                del self._borrowed[bucket]
                if bucket.partitioned and bucket not in self._wanted:
                    bucket.release()
                self._wanted.discard(bucket)

    def _acquire(self, stage: int, layer: int, step: int) -> None:
        """Gather a layer's weights, and start gathering those of the layer that runs next."""
        self.fetch(layer)
        if self._options.overlap_comm:
            self._prefetch(stage * 2 + (step > 0), layer)
        self.arrive(layer)

    def _prefetch(self, direction: int, layer: int) -> None:
        """Start gathering the layers that run next, within the options' limits."""
        budget, ahead = self._options.prefetch_bucket_size, self._next.get((direction, layer))
        for _ in self._next:  # at most all of them
            if ahead is None or self._crowded(self._elements([ahead])):
                return
            if budget is not None:
                budget -= self._elements([ahead])
                if budget < 0:
                    return
            self.fetch(ahead)
            if budget is None:
                return
            ahead = self._next.get((direction, ahead))

    def _elements(self, layers: Iterable[int]) -> int:
        return sum(bucket.flat.numel for layer in layers for bucket in self._buckets_of.get(layer, ()))

    def _crowded(self, more: int) -> bool:
        """Return True if the gathered elements plus ``more`` elements exceed ``max_live_parameters``."""
        limit = self._options.max_live_parameters
        if limit is None:
            return False
        return sum(bucket.flat.numel for bucket in self._buckets if not bucket.released) + more > limit

    def fetch(self, layer: int) -> None:
        """Start gathering a layer's weights."""
        for bucket in self._buckets_of.get(layer, ()):
            if bucket in self._borrowed:
                self._wanted.add(bucket)
            self._start(bucket, self.routes.get(bucket, self._axis))

    def arrive(self, layer: int) -> None:
        """Wait until a layer's weights are gathered."""
        for bucket in self._buckets_of.get(layer, ()):
            self._await(bucket)

    def drop(self, layer: int, users: Collection[int] = ()) -> None:
        """Release a layer's weights, except buckets that the layers ``users`` use too."""
        for bucket in self._buckets_of.get(layer, ()):
            if any(other in users for other in bucket.layers):
                continue
            if bucket in self._borrowed:
                self._wanted.discard(bucket)
                continue
            self._await(bucket)
            bucket.release()

    def _end(self, stage: int, layer: int) -> None:
        """Called when the backward of one of a layer's runs is over."""
        self._release(stage, layer, -1)
        self._backward_done(layer, self._stage_layers[stage].count(layer))

    def _start(self, bucket: Bucket, axis: AllGather) -> None:
        if bucket.released:
            self._arriving[id(bucket)] = bucket.restore(axis)

    def _await(self, bucket: Bucket) -> None:
        if id(bucket) in self._arriving:
            pending = self._arriving.pop(id(bucket))
            if pending is not None:
                pending.wait()
            bucket.show()

    def _release(self, stage: int, layer: int, step: int) -> None:
        soon = self._until.get((stage * 2 + (step > 0), layer), 0) < self._options.max_reuse_distance
        if not (self._keep or soon) or self._crowded(0):
            self.drop(layer)


def _neighbours(order: Mapping[int, Sequence[int]]) -> Iterator[tuple[int, int, int]]:
    """Yield (stage and direction, layer, the layer that runs after it)."""
    for stage, layers in order.items():
        for a, b in pairwise(layers):
            yield stage * 2 + 1, a, b
            yield stage * 2, b, a


def _between(order: Mapping[int, Sequence[int]]) -> Iterator[tuple[tuple[int, int], list[int]]]:
    """Yield (stage and direction, layer), and the layers that run until its next run, in the other direction."""
    for stage, layers in order.items():
        for i, layer in enumerate(layers):
            yield (stage * 2 + 1, layer), [*layers[i + 1 :]] * 2
            yield (stage * 2, layer), [*layers[:i]] * 2
