"""Stage 3: weights are gathered while their layer runs, the next layer's are prefetched, and released after."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch

from ..base.autograd import mark
from ..base.torch_private import backward_task
from ..grid import Axis, Grid, Pending
from ..grid.agreement.call_order import CallOrder, NewCall
from ..grid.agreement.failure import wait_for
from .axis_options import ZeroOptions
from .bucket import Bucket
from .gradients import GradientReducer
from .protocols import AllGather, GatherRoute
from .shard_groups import inner, shards

_ADVICE = (
    "in stage 3 of ZeRO all replicas run the same units or layers in the same order and equally often, because each "
    "holds a part of their weights. If a batch does not need a unit, run it all the same and add 0.0 * output.sum() to "
    "the loss, or use stage 2. What one rank does alone (generate, evaluate) it does within "
    "triax.zero.gathered(module), which every rank enters"
)


def gather_axes(grid: Grid, shard_size: int | None) -> tuple[dict[str, Axis], CallOrder | None]:
    """Make the axes over which weights are gathered, and the check that all replicas gather the same weights.

    Collective over the grid: a rank makes the groups of experts, too, if its stages have none.

    Returns:
        Name of the replicas' axis -> axis with a communicator of its own; the check, None on one replica.
    """
    axes: dict[str, Axis] = {}
    for replicas in ("data_context", "expert_data"):
        axis, size = grid.axis(replicas), shards(grid, replicas, shard_size)
        whole = grid.subgroup(replicas, range(size), " gather") if size == axis.size else None
        axes[axis.name] = inner(grid, size, " gather", replicas) if whole is None else whole
    return axes, grid.call_order(grid.data_context, _ADVICE)


class ParameterGatherer:
    """Gathers the weights of a layer before it runs, forward or backward, and releases them after.

    Gathers have a communicator of their own: a replica whose backward pass completes gradients in another order must
    not match a gather with a reduction.

    Args:
        buckets: the buckets of this rank.
        grid: the grid of the replicas over which the weights are sharded.
        order: for each stage, its layers in the order they run.
        options: how much to prefetch and to keep, and how weights are sent.
        keep: keep weights from a stage's first forward of a step to its end: one gather a step and layer instead of one
            for each forward and backward pass, at the cost of the memory of the whole weights.
        reducer: sums the gradients; within a backward pass it is called at the end of each run of a layer.
        names: layer -> its name in messages; by default "layer 3".

    Attributes:
        routes: how the weights of a bucket are gathered, if not over its axis: ZeRO++.
        gathers: number of buckets gathered so far.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        grid: Grid,
        order: Mapping[int, Sequence[int]],
        options: ZeroOptions,
        keep: bool,
        reducer: GradientReducer,
        names: Mapping[int, str],
    ) -> None:
        self._axes, self._order = gather_axes(grid, options.shard_size)
        self._grid, self._keep, self._options = grid, keep, options
        self._reducer = reducer
        self._buckets = list(buckets)
        self._buckets_of: dict[int, list[Bucket]] = {}
        for bucket in buckets:
            for layer in bucket.layers:
                self._buckets_of.setdefault(layer, []).append(bucket)
        self._calls = {} if self._order is None else self._name_gathers(names, self._order.new_user())
        # For (stage and direction, layer): the layer that runs next, and the elements of the layers that run until the
        # layer's next run, in the other direction.
        self._next: dict[tuple[int, int], int] = {}
        self._until: dict[tuple[int, int], int] = {}
        for stage, layers in order.items():
            for i, layer in enumerate(layers):
                self._until[stage * 2 + 1, layer] = 2 * self._elements(layers[i + 1 :])
                self._until[stage * 2, layer] = 2 * self._elements(layers[:i])
            for a, b in pairwise(layers):
                self._next[stage * 2 + 1, a], self._next[stage * 2, b] = b, a
        self._stage_layers = order
        # Bucket -> its gather, until its parameters are shown, what the replicas must agree on, its number.
        self._gathering: dict[int, tuple[Pending, NewCall | None, int]] = {}
        self._contexts: Counter[Bucket] = Counter()  # number of ``gathered`` contexts that need each bucket
        self._wanted: set[Bucket] = set()  # buckets of such contexts that a layer uses too
        for bucket in buckets:
            bucket.release()
        self.gathers = 0
        self.routes: dict[Bucket, GatherRoute] = {}
        if options.zeropp is not None:
            axis = self._axes[grid.data_context.name]
            self.routes.update(zip(self._buckets, options.zeropp.gather_routes(self._buckets, axis, grid), strict=True))

    def run(self, stage: int, layer: int, call: Callable[[Any], Any], x: Any) -> Any:
        """Return ``call(x)``, one layer of a stage, with its weights gathered now and in its backward pass."""
        if backward_task() != -1:
            # Recomputation in a backward pass. The layer's own backward follows: the weights stay for that.
            self.start_gather(layer)
            self.wait(layer)
            return call(x)
        self._acquire(stage, layer, 1)
        if not torch.is_grad_enabled():
            y = call(x)
            self.require_unwritten(layer)
            self.release_layer(layer)
            return y
        x = mark(x, lambda: self._end(stage, layer))
        y = call(x)
        self.require_unwritten(layer)
        y = mark(y, lambda: self._acquire(stage, layer, -1))
        self._release(stage, layer, 1)
        return y

    def prefetch(self, layers: Iterable[int]) -> None:
        """Start gathering layers that a backward pass is about to recompute.

        All of them, whatever the limit, and even if this replica has nothing to recompute: another replica may have,
        and all replicas must gather the same layers.
        """
        for layer in layers:
            self.start_gather(layer)
            if not self._options.overlap_comm:
                self.wait(layer)

    def release(self, stage: int) -> None:
        """RELEASE: keep the shards only of the stage's layers, unless weights are kept to the end of the step."""
        for layer in self._stage_layers[stage]:
            if not self._keep or self._crowded(0):
                self.release_layer(layer)

    def finish(self) -> None:
        """Release everything at the end of a step."""
        for layer in self._buckets_of:
            self.release_layer(layer)
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
        """Discard all pending gathers after a failure, because other ranks may have left."""
        self._gathering.clear()
        self._wanted.clear()
        self.changed()

    @contextmanager
    def gathered(self, buckets: Sequence[Bucket]) -> Iterator[None]:
        """Context in which the weights of buckets are gathered over all replicas, unquantized. Collective.

        At its end a bucket is released, unless an outer context or a layer still uses its weights.
        """
        wanted = [bucket for bucket in buckets if not bucket.released and not self._contexts.get(bucket)]
        for i, bucket in enumerate(buckets):
            self._start(bucket)
            if i > 0:  # what is sent and not yet received takes memory
                self._wait(buckets[i - 1])
        for bucket in buckets[-1:]:
            self._wait(bucket)
        self._wanted.update(wanted)
        self._contexts.update(buckets)
        for bucket in buckets:
            bucket.lent = True
        try:
            yield
        finally:
            self._contexts.subtract(buckets)
            for bucket in buckets:
                if not self._contexts[bucket]:
                    if bucket.partitioned and bucket not in self._wanted:
                        bucket.release()
                    elif bucket.partitioned:
                        bucket.note_versions()
                    self._wanted.discard(bucket)

    def is_gathered(self, layer: int) -> bool:
        """Return True if ``gathered`` contexts hold a layer's weights."""
        return all(self._contexts.get(bucket) for bucket in self._buckets_of.get(layer, ()))

    def _acquire(self, stage: int, layer: int, step: int) -> None:
        """Gather a layer's weights, and start to gather the weights of the layer that runs next."""
        self.start_gather(layer)
        if self._options.overlap_comm:
            self._prefetch(stage * 2 + (step > 0), layer)
        self.wait(layer)

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
            self.start_gather(ahead)
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

    def start_gather(self, layer: int) -> None:
        """Start gathering a layer's weights."""
        for bucket in self._buckets_of.get(layer, ()):
            if self._contexts.get(bucket):
                self._wanted.add(bucket)
            self._start(bucket, self.routes.get(bucket))

    def wait(self, layer: int) -> None:
        """Wait until a layer's weights are gathered."""
        for bucket in self._buckets_of.get(layer, ()):
            self._wait(bucket)

    def require_unwritten(self, layer: int) -> None:
        """Refuse a layer that has written to its weights in its run: they are a copy of the shards, which is released.

        Raises:
            RuntimeError: a weight was written in place.
        """
        for bucket in self._buckets_of.get(layer, ()):
            if self._contexts.get(bucket) or id(bucket) in self._gathering:
                continue
            if (name := bucket.written(exact=bucket not in self.routes)) is not None:
                raise RuntimeError(
                    f"{name} was written in place while its module ran (by the forward pass, a hook, or max_norm of an "
                    "nn.Embedding). Stage 3 of ZeRO gathers a copy of it for the run, so the write would be lost. "
                    "Write it between two steps, on every rank within triax.zero.gathered(parameters, "
                    "modifier_rank=0), or compute another tensor from it in the forward pass "
                    "(torch.nn.utils.parametrize)"
                )

    def release_layer(self, layer: int, users: Collection[int] = ()) -> None:
        """Release a layer's weights, except buckets that the layers ``users`` use too."""
        for bucket in self._buckets_of.get(layer, ()):
            if any(other in users for other in bucket.layers):
                continue
            if self._contexts.get(bucket):
                self._wanted.discard(bucket)
                continue
            self._wait(bucket)
            bucket.release()

    def _end(self, stage: int, layer: int) -> None:
        """End the backward of one of a layer's runs: release its weights, and tell the reducer."""
        self._release(stage, layer, -1)
        self._reducer.layer_backward_done(layer, self._stage_layers[stage].count(layer))

    def _name_gathers(self, names: Mapping[int, str], user: int) -> dict[Bucket, str]:
        """Return the calls in which the buckets are gathered, each as a different phrase for messages."""
        calls: dict[Bucket, str] = {}
        seen: Counter[tuple[int, ...]] = Counter()
        for bucket in self._buckets:
            seen[bucket.layers] += 1
            layers = " and ".join(names.get(layer, f"layer {layer}") for layer in bucket.layers)
            part = f" (bucket {seen[bucket.layers]} of it)" if seen[bucket.layers] > 1 else ""
            calls[bucket] = f"gathers {layers}{part}{f' of model {user + 1}' if user else ''}"
        return calls

    def enter(self, call: str, ends: bool = False, limit: float | None = None) -> None:
        """Check that all replicas make a collective call now, and none gathers weights.

        Args:
            call: the call as a phrase, for example "ends the step".
            ends: True for the end of a step.
            limit: argument of ``CallOrder.agree``.

        Raises:
            RuntimeError: another replica makes another call.
        """
        if self._order is not None:
            self._agree(self._order.begin(call, ends), limit)

    def _agree(self, new: NewCall | None, limit: float | None = None) -> None:
        """Wait until all replicas have begun a call that was not the expected one."""
        if new is None or self._order is None:
            return
        try:
            self._order.agree(new, limit)
        except RuntimeError:
            # The other replicas wait for what will not come. They stop once this rank has left the process group.
            self._reducer.abandon()
            self.abandon()
            self._grid.close()
            raise

    def _start(self, bucket: Bucket, route: AllGather | None = None) -> None:
        if bucket.released:
            new, axis = None, self._axes[bucket.axis.name]
            if self._order is not None and (new := self._order.begin(self._calls[bucket])) is not None:
                axis.tag = new.tag
            number = 0 if self._order is None else self._order.last
            self._gathering[id(bucket)] = bucket.restore(route or axis), new, number
            axis.tag = None

    def _wait(self, bucket: Bucket) -> None:
        if id(bucket) in self._gathering:
            # No local variable for the pending operation: it would keep the connection open after a failure.
            new, number = self._gathering[id(bucket)][1:]
            self._agree(new)
            if self._order is not None:
                self._order.waits = number, self._calls[bucket]
            wait_for(self._gathering.pop(id(bucket))[0], self._grid, self._calls.get(bucket, "gathers weights"))
            if self._order is not None:
                self._order.waits = None
            bucket.show()
            self.gathers += 1

    def _release(self, stage: int, layer: int, step: int) -> None:
        soon = self._until.get((stage * 2 + (step > 0), layer), 0) < self._options.max_reuse_distance
        if not (self._keep or soon) or self._crowded(0):
            self.release_layer(layer)
