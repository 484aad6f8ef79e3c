"""Gradients summed over the data axis, bucket by bucket, while the backward pass still runs."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from weakref import WeakMethod

from torch import Tensor

from ..grid import Axis, Grid, Pending
from .buckets import Bucket
from .mode import Mode

# Buckets that may be on their way at once: one travels while the next one fills. More would hold memory for nothing.
_UNDER_WAY = 2


def weak(method: Callable[[Tensor], None]) -> Callable[[Tensor], None]:
    """A parameter's hook that does not keep the method's owner alive, and does nothing once that is gone.

    Python's collector does not see through the hooks of a tensor that C++ refers to as well: an owner that they hold
    would never go, nor would its grid's sockets and threads.
    """
    reference = WeakMethod(method)

    def hook(parameter: Tensor) -> None:
        if (method := reference()) is not None:
            method(parameter)

    return hook


def add_up(axis: Axis, buckets: Sequence[Bucket]) -> None:
    """Sum whole gradients over an axis of ranks that each have all of them. Collective."""
    under_way: deque[tuple[Tensor, Tensor, Pending]] = deque()

    def take(gradients: Tensor, sent: Tensor, pending: Pending) -> None:
        pending.wait()
        if sent is not gradients:
            gradients.copy_(sent)

    for bucket in buckets:
        assert bucket.gradients is not None
        sent = bucket.gradients.to(bucket.communicate)
        under_way.append((bucket.gradients, sent, axis.all_reduce(sent, async_op=True)))
        if len(under_way) > _UNDER_WAY:
            take(*under_way.popleft())
    for each in under_way:
        take(*each)


class GradientReducer:
    """Sums gradients over the data axis, at the points of a step where a program says so.

    The collectives of a stage start within a backward pass, each as soon as the gradients of its bucket are
    complete, and always in the order of the buckets: the same on every replica, whatever its autograd engine
    does. That pass is the stage's last one, or, where the mode says ``each``, every one.

    Args:
        buckets: of this rank.
        grid: whose data axis is summed over.
        tie_axes: for each tie, the ranks that hold it; None for ties that need no message here.
        mode: what ZeRO does.
    """

    def __init__(
        self, buckets: Sequence[Bucket], grid: Grid, tie_axes: Sequence[Axis | None], mode: Mode | None = None
    ) -> None:
        self._buckets = [bucket for bucket in buckets if bucket.trained]
        self._grid, self._tie_axes = grid, tie_axes
        self._pending: deque[Pending] = deque()
        self._under_way = _UNDER_WAY if mode is None or mode.overlap else 0
        # On one replica nothing travels, and what is there at the end will do.
        self._overlapped = [bucket for bucket in self._buckets if grid.data.size > 1 or bucket.transient]
        self._armed: list[Bucket] = []  # buckets of the stage whose backward runs, next to reduce first
        self._missing: dict[int, set[Tensor]] = {}  # bucket -> the parameters whose gradients are not complete yet
        self._runs_left: dict[int, int] = {}  # layer -> those of its runs whose backward is to come in this pass
        self._stages_left: dict[int, set[int]] = {}
        self._bucket_of: dict[Tensor, Bucket] = {}
        self._strict = mode is not None and not mode.unused
        self._unused: dict[Tensor, str] = {}  # parameters without a gradient in this step, so far
        for bucket in self._buckets:
            for member in bucket.members:
                self._bucket_of[member.parameter] = bucket
                if member.parameter.requires_grad:
                    member.parameter.register_post_accumulate_grad_hook(weak(self.accumulated))

    def begin(self) -> None:
        """A new step: gradients are zero."""
        for bucket in self._buckets:
            bucket.begin()
        # What REDUCE at a stage's end must still see to: gradients that a tie or several stages add up.
        self._stages_left = {id(bucket): set(bucket.stages) for bucket in self._buckets if not bucket.each}
        self._armed, self._missing = [], {}
        members = [member for bucket in self._buckets for member in bucket.members]
        self._unused = {m.parameter: m.layout.name for m in members if m.parameter.requires_grad}

    def backward(self, stage: int, last: bool) -> AbstractContextManager[None]:
        """A backward pass of the stage runs within: reduce each bucket as soon as it is complete.

        Buckets that another stage of this rank adds to, or that a tie must be summed for first, are left to
        ``reduce``. What got no gradient by the end is reduced all the same: another replica may have had one.
        """
        due = [bucket for bucket in self._overlapped if stage in bucket.stages and self._due(bucket, last)]
        return self._reducing(due) if due else nullcontext()

    def accumulated(self, parameter: Tensor) -> None:
        """Autograd, or a deferred weight gradient, has added to a parameter's gradient all that this pass adds."""
        bucket = self._bucket_of.get(parameter)
        if bucket is None:
            return
        self._used(parameter)
        armed = id(bucket) in self._missing
        if armed and bucket not in self._armed and (bucket.transient or self._grid.data.size > 1):
            name = next(member.layout.name for member in bucket.members if member.parameter is parameter)
            raise RuntimeError(
                f"{name} got a part of its gradient after the rest was reduced: it is used in several places of a "
                "stage, one of them a reentrant checkpoint; use torch.utils.checkpoint with use_reentrant=False"
            )
        if armed or not bucket.each:
            bucket.collect(parameter)
        if armed:
            self._missing[id(bucket)].discard(parameter)
            self._start_complete()

    def over(self, layer: int, runs: int) -> None:
        """The backward of one of a layer's runs is over; after all of them, what has no gradient yet gets none.

        Stage 3 needs this: were such a gradient waited for to the pass's end, this replica would stand at the next
        gather, and another one, which has that gradient, at the reductions that come before it.
        """
        if not self._armed:
            return
        self._runs_left[layer] = self._runs_left.get(layer, runs) - 1
        for bucket in self._armed:
            if layer in bucket.layers and all(self._runs_left.get(each, 1) <= 0 for each in bucket.layers):
                self._missing[id(bucket)].clear()
        self._start_complete()

    def target(self, parameter: Tensor) -> Tensor | None:
        """Where to add a deferred gradient of this parameter; None if it is not ours."""
        bucket = self._bucket_of.get(parameter)
        return None if bucket is None else bucket.target(parameter)

    def reduce(self, stage: int, microbatch: int) -> None:
        """REDUCE: the stage's gradients are final; reduce what was not yet."""
        for bucket in self._buckets:
            left = self._stages_left.get(id(bucket), set())
            if microbatch < 0 and stage in left:
                left.discard(stage)
                if not left:
                    self._start(bucket)

    def tied(self, tie: int) -> None:
        """TIED: sum a tie's gradients over the stages that hold it, before any other reduction of them."""
        axis = self._tie_axes[tie]
        assert axis is not None  # a program names a tie only to the ranks that share it
        for bucket in self._buckets:
            if bucket.tie == tie:
                gradients = bucket.fill_in()
                assert gradients is not None  # a tie's stay whole until here, and are there on all its stages
                axis.all_reduce(gradients)

    def finish(self) -> None:
        """Wait until every gradient is reduced.

        Raises:
            RuntimeError: a parameter got none in this step, and that was to be an error.
        """
        for bucket in self._buckets:
            if self._stages_left.get(id(bucket)):  # of one replica, in a plain loop
                self._start(bucket)
        while self._pending:
            self._pending.popleft().wait()
        for bucket in self._buckets:
            bucket.complete()
        if self._strict and self._unused:
            names = list(self._unused.values())
            raise RuntimeError(
                f"{len(names)} parameters got no gradient in this step: {', '.join(names[:8])}"
                f"{', ...' if len(names) > 8 else ''}. Freeze them, or let "
                "zero_optimization.ignore_unused_parameters be true"
            )

    def unused(self) -> set[Tensor]:
        """The parameters without a gradient in this step. A tie's is there on all its stages if it is on one."""
        return {parameter for parameter in self._unused if self._bucket_of[parameter].tie is None}

    def _used(self, parameter: Tensor) -> None:
        self._unused.pop(parameter, None)

    def abandon(self) -> None:
        """After a failure: let go of every reduction under way."""
        self._pending.clear()

    @contextmanager
    def _reducing(self, due: list[Bucket]) -> Iterator[None]:
        self._armed, self._missing = due, {id(bucket): {m.parameter for m in bucket.members} for bucket in due}
        self._runs_left = {}
        yield
        for bucket in self._armed:
            self._start(bucket)
        self._armed, self._missing = [], {}

    def _start_complete(self) -> None:
        while self._armed and not self._missing[id(self._armed[0])]:
            self._start(self._armed.pop(0))

    def _due(self, bucket: Bucket, last: bool) -> bool:
        return bucket.each or (last and len(bucket.stages) == 1 and bucket.tie is None)

    def _start(self, bucket: Bucket) -> None:
        """Start one bucket's reduction."""
        self._stages_left.get(id(bucket), set()).clear()
        pending = bucket.reduce(self._grid.tensor)
        if pending is not None:
            self._pending.append(pending)
        while len(self._pending) > self._under_way:
            self._pending.popleft().wait()
