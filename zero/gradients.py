"""Gradients summed over the data axis, bucket by bucket, while the backward pass still runs.

A bucket's reduction starts

    in each backward pass    if it ``reduces_every_backward``
    in the last one          if the gradients of one stage add up in it, and none is tied
    at REDUCE                if it is tied (TIED comes before), or several stages of this rank add to it
    in ``finish``            on one replica, in a plain loop

Within a backward pass it starts as soon as the bucket's gradients are complete and the buckets before it have started
(``ReducingPass``). ``GradientHooks`` tells which gradients autograd has completed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

from torch import Tensor, nn

from ..base.autograd import WeakHook
from ..grid import Axis, Grid
from ..grid.agreement.failure import wait_for
from ..grid.comm.pending import Pending
from .axis_options import ZeroOptions
from .bucket import Bucket
from .gradient_hooks import GradientHooks
from .managed import ManagedParameter
from .protocols import GradientBucket
from .shown_gradients import ASSIGNED, DROPPED

# Reductions in flight at once: one is sent while the next bucket fills. More would hold memory without a gain.
_IN_FLIGHT = 2


def all_reduce_gradients(axis: Axis, buckets: Sequence[GradientBucket]) -> None:
    """Sum unsharded gradients over an axis. Collective."""
    for bucket in buckets:
        assert bucket.gradients is not None
        sent = bucket.gradients.to(bucket.communication_dtype)
        axis.all_reduce(sent)
        if sent is not bucket.gradients:
            bucket.gradients.copy_(sent)


class ReducingPass:
    """Buckets of a stage that are reduced within one backward pass of it, in their order on every replica.

    autograd completes    2      1  3     0
    reductions begin                      0 1 2 3

    Args:
        buckets: the buckets, in the order of their reductions.
        last: it is the stage's last pass in the step.

    Attributes:
        last: as given.
        left: those whose reduction has not begun.
        missing: id of each of ``buckets`` -> parameters whose gradients are not complete yet.
    """

    def __init__(self, buckets: Sequence[Bucket] = (), last: bool = False) -> None:
        self.last = last
        self.left = list(buckets)
        self.missing: dict[int, set[Tensor]] = {id(b): {m.parameter for m in b.members} for b in buckets}
        self._runs_left: dict[int, int] = {}  # layer -> runs of it whose backward is still to come in this pass

    def complete(self) -> Iterator[Bucket]:
        """Yield the buckets whose turn it is, up to the first one that misses a gradient; they are then not left."""
        while self.left and not self.missing[id(self.left[0])]:
            yield self.left.pop(0)

    def layer_done(self, layer: int, runs: int) -> bool:
        """Miss no gradient of a layer any more once the backward of the last of its ``runs`` has ended.

        Returns:
            True if it has.
        """
        self._runs_left[layer] = left = self._runs_left.get(layer, runs) - 1
        for bucket in self.left:
            if layer in bucket.layers and all(self._runs_left.get(other, 1) <= 0 for other in bucket.layers):
                self.missing[id(bucket)].clear()
        return left <= 0


class GradientReducer:
    """Sums gradients over the data axis, at the points of a step that a program names.

    Args:
        buckets: of this rank.
        grid: the grid of the replicas that are summed over.
        tie_axes: for each tie, the ranks that hold it; None for ties that need no message here.
        options: what ZeRO does.

    A step's state, from ``begin``: reductions in flight, each with its bucket if it is the bucket's last one of the
    step (``_pending``); of each bucket that is reduced once a step, the stages whose REDUCE is still to come
    (``_stages_left``); the backward pass that reduces (``_running``); of each stage, parameters of direct buckets whose
    first gradient is not in its bucket yet (``_waiting``); parameters without a gradient so far (``_unused``).
    """

    def __init__(
        self, buckets: Sequence[Bucket], grid: Grid, tie_axes: Sequence[Axis | None], options: ZeroOptions
    ) -> None:
        self._buckets = [bucket for bucket in buckets if bucket.trained]
        self._grid, self._tie_axes = grid, tie_axes
        self._pending: deque[tuple[Pending, Bucket | None]] = deque()
        self._in_flight = _IN_FLIGHT if options.overlap_comm else 0
        # On one replica nothing is sent, and gradients are complete at the end.
        self._overlapped = [bucket for bucket in self._buckets if bucket.axis.size > 1 or bucket.transient]
        self._running = ReducingPass()
        self._stages_left: dict[int, set[int]] = {}
        # By id, here and in ``_unused``: the hash of a tensor is a call into Python, for each parameter and microbatch.
        self._bucket_of = {id(member.parameter): bucket for bucket in self._buckets for member in bucket.members}
        self._strict = not options.ignore_unused_parameters
        self._members = [member for bucket in self._buckets for member in bucket.members]
        self._unused: dict[int, ManagedParameter] = {}
        direct: list[tuple[Bucket, Tensor]] = [
            (bucket, m.parameter) for bucket in self._buckets if bucket.direct for m in bucket.members
        ]
        stages = {stage for bucket, _ in direct for stage in bucket.stages}
        self._direct = {stage: [pair for pair in direct if stage in pair[0].stages] for stage in stages}
        self._waiting = dict(self._direct)
        self._before: Callable[[Tensor], None] | None = None
        self._hooks = GradientHooks(self._buckets, WeakHook(self._visited))

    def watch(self, before: Callable[[Tensor], None]) -> None:
        """Call a hook with each parameter whose gradient autograd has accumulated, before it is taken.

        The hook may be the first sign of a backward pass: its caller then enters ``backward`` within the pass.
        """
        self._before = before
        self._hooks.watch(before, self._overlapped)

    def give_up(self, parameter: Tensor) -> None:
        """Leave a parameter's gradients to another engine or optimizer, which manages it from now on."""
        self._bucket_of.pop(id(parameter), None)

    def begin(self) -> None:
        """Begin a step with zero gradients."""
        for bucket in self._buckets:
            bucket.begin()
        self._set_stages_left()
        self._running, self._waiting = ReducingPass(), dict(self._direct)
        self._unused = {id(m.parameter): m for m in self._members if m.parameter.requires_grad}

    def reopen(self) -> None:
        """Let further backward passes add to the step's gradients, after the step's last pass has reduced them."""
        self.settle()
        for bucket in self._buckets:
            if not self._stages_left.get(id(bucket)):  # on one replica, only ``finish`` reduces it
                bucket.reopen(self._grid.tensor)
        self._set_stages_left()

    def settle(self) -> None:
        """Wait for the reductions that have begun, and for the copies of their sums to host memory."""
        self._wait(0)
        for bucket in self._buckets[:1]:  # all buckets have one memory
            bucket.memory.states.settle()

    @property
    def discarded(self) -> bool:
        """True if user code has discarded all gradients since the last backward pass, by ``module.zero_grad()``."""
        kept = (is_kept for bucket in self._buckets for is_kept in bucket.shown.kept())
        return not next(kept, True) and not any(kept)

    def begin_pass(self, first: Tensor | None) -> None:
        """Let autograd accumulate in ``.grad``: a backward pass begins. It may have added to ``first.grad`` already."""
        for bucket in self._buckets:
            bucket.begin_pass(self.settle, first)

    def end_pass(self, everything: bool) -> None:
        """End what ``begin_pass`` began; take gradients without a hook: dropped before the pass, or ``everything``."""
        for bucket in self._buckets:
            bucket.end_pass(everything)

    def backward(self, stage: int, last: bool) -> AbstractContextManager[None]:
        """Reduce each bucket as soon as it is complete, in a backward pass of the stage that runs within.

        Buckets that another stage of this rank adds to, or whose tie must be summed first, are left to
        ``reduce_gradients``. A bucket without a gradient by the end is reduced too: another replica may have had one.
        """
        due = [bucket for bucket in self._overlapped if stage in bucket.stages and self._due(bucket, last)]
        parameters: Iterator[Tensor] = (m.parameter for bucket in due if bucket.direct for m in bucket.members)
        waiting = self._waiting.get(stage)
        if waiting and not due:  # their first gradients are copied before autograd adds to them
            parameters = (parameter for bucket, parameter in waiting if bucket.is_copied)
        return self._reducing(stage, due, parameters, last) if due or waiting else nullcontext()

    def accumulated(self, parameter: Tensor) -> None:
        """Hook that a deferred computation calls when a parameter's gradient of this pass is complete."""
        self._unused.pop(id(parameter), None)
        self._complete(parameter)

    def take_first_gradients(self, stage: int) -> None:
        """Take the first gradients of a stage that a backward pass outside of ``backward`` has left in ``.grad``."""
        if waiting := self._waiting.get(stage):
            self._waiting[stage] = self._take_first(waiting)

    def _visited(self, parameter: Tensor) -> None:
        """Autograd's hook: it is also called for a parameter on whose path no gradient arrived."""
        if self._before is not None:
            self._before(parameter)
        if parameter.grad is not None:
            self._unused.pop(id(parameter), None)
        self._complete(parameter)

    def _complete(self, parameter: Tensor) -> None:
        """Take the gradient of a parameter, and start the reductions that waited for it."""
        bucket = self._bucket_of.get(id(parameter))
        if bucket is None:
            return
        running = self._running
        reduces = id(bucket) in running.missing
        if reduces and bucket not in running.left and (bucket.transient or bucket.axis.size > 1):
            name = next(member.layout.name for member in bucket.members if member.parameter is parameter)
            raise RuntimeError(
                f"{name} got a part of its gradient after the rest was reduced, because the model uses it in several "
                "places, one of them in a reentrant checkpoint: use torch.utils.checkpoint with use_reentrant=False"
            )
        if reduces or not bucket.reduces_every_backward:
            bucket.take_gradient(parameter)
        if reduces:
            missing = running.missing[id(bucket)]
            missing.discard(parameter)
            if not missing:
                self._start_complete()

    def layer_backward_done(self, layer: int, runs: int) -> None:
        """Hook that is called after the backward of one of a layer's ``runs``.

        After the backward of the last run, gradients of the layer that are still missing will not come.

        Stage 3 needs this. If such a gradient were waited for to the end of the pass, this replica would wait in the
        next gather, and another one, which has that gradient, in the reductions that come before it.
        """
        if self._running.left and self._running.layer_done(layer, runs):
            self._start_complete()

    def target(self, parameter: Tensor) -> Tensor | None:
        """Return where to add a deferred gradient of this parameter; None if it is in no trained bucket."""
        bucket = self._bucket_of.get(id(parameter))
        return None if bucket is None else bucket.target(parameter)

    def reduce_gradients(self, stage: int, microbatch: int) -> None:
        """REDUCE: sum over the data axis those gradients of the stage that are complete and not reduced yet."""
        for bucket in self._buckets if microbatch < 0 else ():
            left = self._stages_left.get(id(bucket), set())
            if stage in left:
                left.discard(stage)
                if not left:
                    self._start(bucket)

    def reduce_tied_gradients(self, tie: int) -> None:
        """TIED: sum a tie's gradients over the stages that hold it, before any other reduction of them."""
        axis = self._tie_axes[tie]
        assert axis is not None  # a program gives TIED only to ranks that share the tie
        for bucket in self._buckets:
            if bucket.tie == tie:
                self._take_gradients(bucket)
                gradients = bucket.fill_in()
                assert gradients is not None  # a tie's gradients are whole until here, on all its stages
                axis.all_reduce(gradients)

    def finish(self) -> None:
        """Wait until every gradient is reduced.

        Raises:
            RuntimeError: a parameter got no gradient, and ``ignore_unused_parameters`` is False.
        """
        for bucket in self._buckets:
            if self._stages_left.get(id(bucket)):  # on one replica, in a plain loop
                self._start(bucket)
        self.settle()
        for bucket in self._buckets:
            bucket.complete()
            if bucket.copies is not None:
                self._pending.append((bucket.sum_copies(), None))
        self.settle()
        if self._strict and self._unused:
            names = [member.layout.name for member in self._unused.values()]
            raise RuntimeError(
                f"{len(names)} parameters got no gradient in this step: {', '.join(names[:8])}"
                f"{', ...' if len(names) > 8 else ''}. Freeze them, or set "
                "allow_unused of triax.Zero to True"
            )

    def unused(self) -> set[Tensor]:
        """Return the parameters without a gradient in this step.

        A tied parameter counts as having a gradient on all of its stages if it has one on any of them.
        """
        own = {number: self._bucket_of[number] for number in self._unused if number in self._bucket_of}
        unused: set[Tensor] = {self._unused[number].parameter for number, bucket in own.items() if bucket.tie is None}
        for bucket in self._buckets:
            unused = (unused - bucket.shown.having(ASSIGNED)) | bucket.shown.having(DROPPED)
        return unused

    def give(self, parameter: nn.Parameter) -> None:
        """Count a parameter as having a gradient in this step: the caller writes one to its bucket, after the sums."""
        self._unused.pop(id(parameter), None)
        bucket = self._bucket_of[id(parameter)]
        if bucket.shown.state(parameter) is DROPPED:
            bucket.shown.note(parameter, "add")
            bucket.put_back(parameter)

    def leave_out(self, stages: Collection[int]) -> None:
        """Count as unused, in this step, the parameters of stages, except tied ones."""
        for bucket in self._buckets:
            if bucket.tie is None and all(stage in stages for stage in bucket.stages):
                self._unused |= {id(m.parameter): m for m in bucket.members if m.parameter.requires_grad}

    def drain(self) -> None:
        """Wait for the reductions that have begun. Collective."""
        self._wait(0)

    def abandon(self) -> None:
        """Discard all pending reductions after a failure, because other ranks may have left."""
        self._pending.clear()

    @contextmanager
    def _reducing(self, stage: int, due: list[Bucket], parameters: Iterator[Tensor], last: bool) -> Iterator[None]:
        """Context of a backward pass of a stage: reduce the buckets that are due, and take first gradients.

        ``parameters`` have a hook in the pass. ``last``: it is the stage's last pass in the step.
        """
        self._running = running = ReducingPass(due, last)
        with self._hooks.within(parameters):
            yield
        for bucket in running.left:
            self._start(bucket)
        self._running = ReducingPass()
        self.take_first_gradients(stage)

    def _take_first(self, parameters: Iterable[tuple[Bucket, Tensor]]) -> list[tuple[Bucket, Tensor]]:
        """Take the first gradients of parameters, and return the parameters without one. Later ones add up."""
        left = []
        for bucket, parameter in parameters:
            if bucket.take_gradient(parameter):
                self._unused.pop(id(parameter), None)
            elif id(parameter) in self._unused:
                left.append((bucket, parameter))
        return left

    def _take_gradients(self, bucket: Bucket) -> None:
        """Take all gradients of a bucket, before zeros take the place of missing gradients."""
        self._take_first((bucket, member.parameter) for member in bucket.members)

    def _set_stages_left(self) -> None:
        # Reduced by REDUCE at a stage's end: gradients that a tie or several stages add up.
        self._stages_left = {
            id(bucket): set(bucket.stages) for bucket in self._buckets if not bucket.reduces_every_backward
        }

    def _start_complete(self) -> None:
        for bucket in self._running.complete():
            self._start(bucket)

    def _due(self, bucket: Bucket, last: bool) -> bool:
        return bucket.reduces_every_backward or (last and len(bucket.stages) == 1 and bucket.tie is None)

    def _start(self, bucket: Bucket) -> None:
        """Start the reduction of one bucket's gradients over the data axis."""
        self._stages_left.get(id(bucket), set()).clear()
        self._take_gradients(bucket)
        ends = not bucket.reduces_every_backward or (self._running.last and len(bucket.stages) == 1)
        self._pending.append((bucket.start_reduction(self._grid.tensor), bucket if ends else None))
        self._wait(self._in_flight)

    def _wait(self, most: int) -> None:
        """Wait for the oldest reductions until at most so many are in flight."""
        while len(self._pending) > most:
            pending, ended = self._pending.popleft()
            wait_for(pending, self._grid, "reduces gradients")
            if ended is not None and ended.copies is not None:
                self._pending.append((ended.sum_copies(), None))
