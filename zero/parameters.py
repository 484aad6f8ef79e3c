"""Stage 3: weights are whole only while their layer runs, and the next layer's are on their way by then."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch

from ..grid import Grid, Pending
from ..grid.mark import mark
from .buckets import Bucket
from .mode import Mode


class ParameterGatherer:
    """Gathers the weights of a layer before it runs, forward or backward, and releases them after.

    Gathers have a communicator of their own: a replica whose backward pass makes its gradients final in another
    order must not meet a gather with a reduction.

    Args:
        buckets: of this rank.
        grid: whose data axis shards them.
        order: for each stage, its layers in the order they run: what to fetch next.
        mode: how far to fetch ahead, and what to keep.
        keep: hold weights from a stage's first forward of a step to its end: one gather a step and layer instead
            of one each forward and backward pass, for the memory of the whole weights.
        over: told, within a backward pass, that one of a layer's runs is over, and of how many.
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
        members = range(grid.data.size)
        axis = grid.subgroup("data", members, purpose=" gather")
        assert axis is not None  # every rank is a member
        self._axis, self._keep, self._over, self._mode = axis, keep, over, mode
        self._buckets = list(buckets)
        self._buckets_of: dict[int, list[Bucket]] = {}
        for bucket in buckets:
            for layer in bucket.layers:
                self._buckets_of.setdefault(layer, []).append(bucket)
        self._next = {(a, b): c for a, b, c in _neighbours(order)}
        # What runs between a layer's forward and its backward, where these follow each other; and the other way.
        self._until = {key: self._elements(layers) for key, layers in _between(order)}
        self._stage_layers = order
        self._arriving: dict[int, Pending | None] = {}  # bucket -> its gather, until its parameters are shown
        self._lent: dict[Bucket, int] = {}  # how many borrowed it: it stays whole, whatever is dropped
        self._wanted: set[Bucket] = set()  # those of them that would be whole if nobody had
        for bucket in buckets:
            bucket.release()

    def run(self, stage: int, layer: int, call: Callable[[Any], Any], x: Any) -> Any:
        """``call(x)``, one layer of a stage, with its weights whole: now, and when its backward pass comes."""
        if torch._C._current_graph_task_id() != -1:
            # A backward pass has it computed once more. Its own backward comes soon: the weights stay for that.
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

    def ahead(self, layers: Iterable[int]) -> None:
        """Start gathering layers that a backward pass is about to compute once more.

        All of them, whatever the limit, and whether or not anything there is to compute: on another replica there may
        be, and all must gather alike.
        """
        for layer in layers:
            self.fetch(layer)
            if not self._mode.overlap:
                self.arrive(layer)

    def release(self, stage: int) -> None:
        """RELEASE: keep the shards only of whatever the stage still has whole."""
        for layer in self._stage_layers[stage]:
            if not self._keep or self._crowded(0):
                self.drop(layer)

    def finish(self) -> None:
        """The step ends: nothing is kept."""
        for layers in self._stage_layers.values():
            for layer in layers:
                self.drop(layer)

    @property
    def secondary(self) -> int:
        """Bytes of weights that are kept besides shards, between gathers."""
        return 0

    def changed(self) -> None:
        """Shards were written: weights that are kept besides them are old."""

    def abandon(self) -> None:
        """After a failure: let go of every gather under way."""
        self._arriving.clear()
        self._wanted.clear()

    def borrow(self, buckets: Iterable[Bucket]) -> list[Bucket]:
        """Gather these: they stay whole until the caller gives back what this returns. Collective."""
        buckets = list(buckets)
        wanted = [bucket for bucket in buckets if not bucket.released and bucket not in self._lent]
        for bucket in buckets:
            self._start(bucket)
        for bucket in buckets:
            self._await(bucket)
        self._wanted.update(wanted)
        for bucket in buckets:
            self._lent[bucket] = self._lent.get(bucket, 0) + 1
        return buckets

    def give_back(self, buckets: Iterable[Bucket]) -> None:
        """What was borrowed is whole no longer, but where somebody else borrowed it or a layer uses it."""
        for bucket in buckets:
            self._lent[bucket] -= 1
            if not self._lent[bucket]:
                del self._lent[bucket]
                if bucket.gathered and bucket not in self._wanted:
                    bucket.release()
                self._wanted.discard(bucket)

    def _acquire(self, stage: int, layer: int, step: int) -> None:
        """Have the layer's weights whole, and start fetching those of the layer that runs after it."""
        self.fetch(layer)
        if self._mode.overlap:
            self._prefetch(stage * 2 + (step > 0), layer)
        self.arrive(layer)

    def _prefetch(self, way: int, layer: int) -> None:
        """Start gathering what runs next, as far as the mode says."""
        budget, ahead = self._mode.prefetch, self._next.get((way, layer))
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
            ahead = self._next.get((way, ahead))

    def _elements(self, layers: Iterable[int]) -> int:
        return sum(bucket.flat.numel for layer in layers for bucket in self._buckets_of.get(layer, ()))

    def _crowded(self, more: int) -> bool:
        """Whether what is whole, and so many elements more, is beyond the limit."""
        if self._mode.live is None:
            return False
        return sum(bucket.flat.numel for bucket in self._buckets if not bucket.released) + more > self._mode.live

    def fetch(self, layer: int) -> None:
        """Start gathering a layer's weights."""
        for bucket in self._buckets_of.get(layer, ()):
            if bucket in self._lent:
                self._wanted.add(bucket)
            self._start(bucket)

    def arrive(self, layer: int) -> None:
        """Wait for them."""
        for bucket in self._buckets_of.get(layer, ()):
            self._await(bucket)

    def drop(self, layer: int, users: Collection[int] = ()) -> None:
        """Keep the shards only, but of what these layers use too."""
        for bucket in self._buckets_of.get(layer, ()):
            if any(other in users for other in bucket.layers):
                continue
            if bucket in self._lent:
                self._wanted.discard(bucket)
                continue
            self._await(bucket)
            bucket.release()

    def _end(self, stage: int, layer: int) -> None:
        """The backward of one of a layer's runs is over."""
        self._release(stage, layer, -1)
        self._over(layer, self._stage_layers[stage].count(layer))

    def _start(self, bucket: Bucket) -> None:
        if bucket.released:
            self._arriving[id(bucket)] = bucket.restore(self._axis)

    def _await(self, bucket: Bucket) -> None:
        if id(bucket) in self._arriving:
            pending = self._arriving.pop(id(bucket))
            if pending is not None:
                pending.wait()
            bucket.show()

    def _release(self, stage: int, layer: int, step: int) -> None:
        soon = self._until.get((stage * 2 + (step > 0), layer), 0) < self._mode.reuse
        if not (self._keep or soon) or self._crowded(0):
            self.drop(layer)


def _neighbours(order: Mapping[int, Sequence[int]]) -> Iterator[tuple[int, int, int]]:
    """(stage and direction, layer, the layer after it)."""
    for stage, layers in order.items():
        for a, b in pairwise(layers):
            yield stage * 2 + 1, a, b
            yield stage * 2, b, a


def _between(order: Mapping[int, Sequence[int]]) -> Iterator[tuple[tuple[int, int], list[int]]]:
    """(stage and direction, layer), and the layers that run from there to its next run, the other way."""
    for stage, layers in order.items():
        for i, layer in enumerate(layers):
            yield (stage * 2 + 1, layer), [*layers[i + 1 :]] * 2
            yield (stage * 2, layer), [*layers[:i]] * 2
