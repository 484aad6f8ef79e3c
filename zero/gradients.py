"""Stages 0 and 1: gradients summed over the data axis, bucket by bucket, while the last backward still runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor

from ..grid import Axis, Grid, Pending
from .buckets import Bucket


class GradientReducer:
    """Sums gradients over the data axis, at the points of a step where a program says so.

    Stage 0 leaves every replica with the whole sum (all-reduce), stage 1 with the range it owns (reduce-scatter).
    The collectives of a stage start within its last backward pass, each as soon as the gradients of its bucket are
    final, and always in the order of the buckets: the same on every replica, whatever its autograd engine does.

    Args:
        buckets: of this rank.
        grid: whose data axis is summed over.
        tie_axes: for each tie, the ranks that hold it; None for ties that need no message here.
        sharded: stage 1.
    """

    def __init__(self, buckets: Sequence[Bucket], grid: Grid, tie_axes: Sequence[Axis | None], sharded: bool) -> None:
        self._buckets, self._grid, self._tie_axes, self._sharded = list(buckets), grid, tie_axes, sharded
        self._pending: list[Pending] = []
        self._armed: list[Bucket] = []  # buckets of the stage whose last backward runs, next to reduce first
        self._missing: dict[int, int] = {}  # bucket -> its gradients that are not final yet
        self._stages_left: dict[int, set[int]] = {}
        self._bucket_of: dict[Tensor, Bucket] = {}
        for bucket in self._buckets:
            for member in bucket.members:
                self._bucket_of[member.parameter] = bucket
                member.parameter.register_post_accumulate_grad_hook(self.accumulated)

    def begin(self) -> None:
        """A new step: gradients are zero."""
        for bucket in self._buckets:
            bucket.clear()
        self._stages_left = {id(bucket): set(bucket.stages) for bucket in self._buckets}
        self._pending, self._armed, self._missing = [], [], {}

    @contextmanager
    def last_backward(self, stage: int) -> Iterator[None]:
        """The stage's gradients become final within: reduce each bucket as soon as it is.

        Buckets that another stage of this rank adds to, or that a tie must be summed for first, are left to
        ``reduce``. What got no gradient by the end is reduced all the same: another replica may have had one.
        """
        self._armed = [bucket for bucket in self._buckets if bucket.stages == (stage,) and bucket.tie is None]
        self._missing = {id(bucket): len(bucket.members) for bucket in self._armed}
        yield
        for bucket in self._armed:
            self._start(bucket)
        self._armed, self._missing = [], {}

    def accumulated(self, parameter: Tensor) -> None:
        """A parameter's gradient is complete, of one microbatch; in the last backward, for good."""
        bucket = self._bucket_of.get(parameter)
        if bucket is None or id(bucket) not in self._missing:
            return
        self._missing[id(bucket)] -= 1
        while self._armed and not self._missing[id(self._armed[0])]:
            self._start(self._armed.pop(0))

    def reduce(self, stage: int, microbatch: int) -> None:
        """REDUCE: the stage's gradients are final; reduce what was not yet."""
        for bucket in self._buckets:
            left = self._stages_left[id(bucket)]
            if stage in left:
                left.discard(stage)
                if not left:
                    self._start(bucket)

    def tied(self, tie: int) -> None:
        """TIED: sum a tie's gradients over the stages that hold it, before any other reduction of them."""
        axis = self._tie_axes[tie]
        assert axis is not None  # a program names a tie only to the ranks that share it
        for bucket in self._buckets:
            if bucket.tie == tie:
                axis.all_reduce(bucket.gradients)

    def gather(self, stage: int) -> None:
        """GATHER: the parameters of stages 0 and 1 of ZeRO are always whole."""

    def release(self, stage: int) -> None:
        """RELEASE: they stay so."""

    def finish(self) -> None:
        """Wait until every gradient is reduced."""
        while self._pending:
            self._pending.pop(0).wait()

    def abandon(self) -> None:
        """After a failure: let go of every reduction under way."""
        self._pending = []

    def _start(self, bucket: Bucket) -> None:
        """Start one bucket's reduction; its gradients are final."""
        self._stages_left[id(bucket)].clear()
        if bucket.partial.numel():
            self._grid.tensor.all_reduce(bucket.partial)
        axis = self._grid.data
        if axis.size == 1:
            return
        if self._sharded:
            owned = bucket.gradients[slice(*bucket.owned)]
            self._pending.append(axis.reduce_scatter(owned, bucket.gradients, async_op=True))
        else:
            self._pending.append(axis.all_reduce(bucket.gradients, async_op=True))
