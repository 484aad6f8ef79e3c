"""Gradients of one bucket on this rank: taken from ``.grad`` into a flat buffer, read and changed by user code.

    .grad -> take_gradient -> gradients (a GradientBuffer) -> start_reduction -> owned_gradient (= master.grad)
               deferred: target ^

How the sums over the replicas are kept differs between ``WholeBucket`` and ``TransientBucket`` (``summed_buckets.py``).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from ..base.torch_private import storage_users
from ..grid import Axis, Grid
from ..grid.comm.pending import Done, Pending, Then
from .axis_options import ZeroOptions
from .flat import PARTIAL, RUNS, SHARDED, FlatBucket
from .flat_weights import FlatWeights
from .gradient_buffer import GradientBuffer
from .gradient_norm import square
from .guarded_gradient import GuardedGradient
from .managed import BucketKey, ManagedParameter
from .offload import OffloadMemory
from .protocols import ReduceScatter
from .shown_gradients import ASSIGNED, DROPPED, ShownGradients


class Bucket(FlatWeights, ABC):
    """Flat weights and gradients of the parameters of one bucket.

    Gradients that autograd leaves in ``.grad`` are moved to ``gradients`` as soon as they are there, or at the end of
    the backward pass. If dtypes agree and nothing is reduced in between (``direct``), ``.grad`` then is a view of
    ``gradients``, and later gradients add up in place. If one parameter fills the bucket, its first ``.grad`` becomes
    ``gradients`` without a copy.

    A step calls, in time:

    begin           no parameter has a gradient
    begin_pass      a backward pass begins
    take_gradient   autograd has left a gradient in ``.grad``: it is moved
    start_reduction after a pass, or after the step's last one: zeros replace missing gradients, and the sum starts
    sum_copies      after the step's last sum: the sums of other groups of replicas are added (``shard_size``)
    complete        all sums have ended

    Between two passes, and after the last one, ``GradientAccess`` calls ``discard``, ``put_back``, ``assign_gradient``,
    ``expose`` and ``conceal`` for user code.

    Takes the arguments of ``FlatWeights``.

    Attributes:
        gradients: (numel,), the unsharded gradients of this rank; None if there are none at present.
        owned_gradient: the reduced gradients of the owned range, which are ``master.grad``.
        transient: True if unsharded gradients are freed after they are reduced (``TransientBucket``).
        reduces_every_backward: True if gradients are reduced after every backward pass, False if once a step.
        direct: True if ``.grad`` is a view of ``gradients``.
        is_copied: True if the bucket copies the tensors that autograd makes; False if it takes the first one as its own
            memory, because one parameter fills it.
        communication_dtype: dtype in which gradients are summed over the replicas.
        reduction: the reduce-scatter of gradients: ``shard_axis``, or one that sends fewer bytes.
        shown: the ``.grad`` of the parameters, and what user code has done to them.
    """

    transient: ClassVar[bool]

    def __init__(
        self,
        flat: FlatBucket,
        members: Sequence[ManagedParameter],
        grid: Grid,
        options: ZeroOptions,
        memory: OffloadMemory,
    ) -> None:
        super().__init__(flat, members, grid, options, memory)
        assert isinstance(flat.key, BucketKey)
        dtype = self._accumulation_dtype
        self.reduces_every_backward = self.transient and options.reduce_every_backward
        self.direct = not self.reduces_every_backward and dtype == self.weights.dtype
        self.communication_dtype = (options.communication_dtype if flat.key.low_precision else None) or dtype
        self.reduction: ReduceScatter = self.shard_axis
        self._copies_summed = False
        self._prescale, self._reduce_scatter = options.prescale, options.reduce_scatter
        self._sums_here = self.axis.size > 1 and options.exchange is None  # else a compressor does, or nothing is sent
        self.is_copied = len(self.members) > 1 or not self.trained
        self._buffer: GradientBuffer | None = None  # of ``gradients``
        self.shown = ShownGradients(self.members, flat.slots, self.direct)
        ends, starts = [slot.stop for slot in flat.slots], [slot.start for slot in flat.slots]
        padding = zip([0, *ends], [*starts, flat.numel], strict=True)
        self._padding = [slice(start, stop) for start, stop in padding if start < stop]
        self._counted = self._counted_spans(grid)

        self.owned_gradient = torch.zeros(0, dtype=dtype, device=grid.device)
        if self.trained:
            self._make_owned_gradient()

    @abstractmethod
    def _make_owned_gradient(self) -> None:
        """Allocate the gradients that this rank holds between two steps."""

    @property
    def gradients(self) -> Tensor | None:
        """Unsharded gradients, (numel,), if there are any at present."""
        return None if self._buffer is None else self._buffer.flat

    def begin(self) -> None:
        """Begin a step with zero gradients. Gradients accumulate in the bucket again, even if ``.grad`` was set."""
        self.shown.begin()
        self._copies_summed = False

    def target(self, parameter: Tensor) -> Tensor:
        """Return the view of ``gradients`` to which the caller adds a gradient of this parameter."""
        self.take_gradient(parameter)
        buffer = self._made_buffer()
        target = buffer.views[parameter]
        if parameter in buffer.empty:
            buffer.empty.discard(parameter)
            target.zero_()
            self.shown.show(parameter, buffer)
        return target

    def take_gradient(self, parameter: Tensor) -> bool:
        """Move the gradient that autograd left in ``.grad`` to ``gradients``. Return True if there was one."""
        if type(parameter.grad) is GuardedGradient:  # the bucket's own memory, to which autograd adds
            return False
        gradient = self.shown.take(parameter, self._buffer)
        if gradient is None:
            if self.direct and self._buffer is not None and self.shown.is_unset(parameter):
                self.discard(parameter, "drop")
            return False
        if gradient.layout != torch.strided:  # of an embedding with sparse=True: the bucket is dense
            gradient = gradient.to_dense()
        if self._buffer is None and not self.is_copied and self._fits(gradient):
            buffer = self._set_gradients(gradient.detach().view(-1), [gradient] if self.direct else None)
            self.shown.show(parameter, buffer)
            return True
        buffer = self._made_buffer()
        target, gradient = buffer.views[parameter], gradient.detach()
        # The first gradient overwrites the target. So does, if gradients add up in place, one that the user (or after
        # ``module.zero_grad()`` autograd) put into ``.grad``.
        if self.direct or parameter in buffer.empty:
            buffer.empty.discard(parameter)
            target.copy_(gradient)
        else:
            target.add_(gradient)
        self.shown.show(parameter, buffer)
        return True

    def begin_pass(self, settle: Callable[[], None], first: Tensor | None) -> None:
        """Let autograd add to ``.grad`` again: a backward pass begins. ``settle`` waits for the reductions begun.

        Takes ``first`` as ``ShownGradients.begin_pass`` does, and raises its errors.
        """
        for parameter in self.shown.begin_pass(self._buffer, first):
            settle()
            self.discard(parameter, "drop")

    def end_pass(self, everything: bool) -> None:
        """End what ``begin_pass`` began; take gradients without a hook: dropped before the pass, or ``everything``."""
        for parameter in [m.parameter for m in self.members] if everything else self.shown.having(DROPPED):
            self.take_gradient(parameter)
        self.shown.end_pass()

    def replaced(self) -> Iterator[tuple[nn.Parameter, Tensor | None]]:
        """Yield parameters whose ``.grad`` user code has replaced after the last backward pass, and what it is now."""
        return self.shown.replaced(self._buffer)

    def put_back(self, parameter: nn.Parameter) -> None:
        """Put back what ``.grad`` was before user code has replaced it, so that reductions can begin."""
        if self._buffer is not None:
            self._buffer.views[parameter] = self.gradient_of(parameter)  # user code may have exchanged its memory
        self.shown.put_back(parameter, self._buffer)

    def discard(self, parameter: Tensor, event: Literal["zero", "drop"]) -> None:
        """Set the gradient of a parameter to zero, as user code has done; after ``drop``, it counts as missing.

        Its reduction must not be running.
        """
        self.shown.note(parameter, event)
        if self._buffer is not None:
            self._buffer.views[parameter].zero_()
            if event == "drop":
                self._buffer.empty.add(parameter)

    def gradient_of(self, parameter: nn.Parameter) -> Tensor:
        """Return the view of ``gradients`` that belongs to a parameter."""
        assert self.gradients is not None
        start, stop = self.span(parameter)
        return self.gradients[start:stop].view(parameter.shape)

    def reduced_gradient(self, exposed: bool) -> Tensor:
        """Return the gradients of the owned range, or all if user code may read all of them."""
        return self.gradients if exposed and self.gradients is not None else self.owned_gradient

    def assign_gradient(self, parameter: nn.Parameter, gradient: Tensor, divisor: float, exposed: bool) -> None:
        """Set the gradient of a parameter to a mean gradient, times ``divisor``."""
        if gradient.layout != torch.strided:
            gradient = gradient.to_dense()
        own = self.gradient_of(parameter).copy_(gradient.detach())
        if divisor != 1.0:
            own.mul_(divisor)
        self.shown.note(parameter, "assign")
        if self.direct and exposed:
            parameter.grad = own
        else:
            self.put_back(parameter)

    def expose(self, factor: float) -> None:
        """Multiply the reduced gradients by a factor, and make them whole, and ``.grad``. Collective if sharded.

        A parameter without a gradient here whose sum is exactly 0 is shown without one, as in plain PyTorch if no
        replica has one. If another replica had a gradient of exactly 0, that one shows zeros. To tell the two apart
        would take a message, but in stage 0 a rank may read alone. The step is right in both cases, because
        ``UsedParameters.agree`` asks all replicas; and ``GradientAccess.require_equal`` refuses what user code does to
        zeros on one replica and skips on another.
        """
        buffer = self._buffer
        assert buffer is not None
        if factor != 1.0:
            self.owned_gradient.mul_(factor)
        if self.sharded:
            self.shard_axis.all_gather(buffer.flat, self.owned_gradient)
        self.shown.expose(self.gradient_of)
        for parameter in buffer.filled:
            if not buffer.views[parameter].any():  # nor has another replica a gradient
                self.shown.vanish(parameter)

    def conceal(self, factor: float) -> None:
        """Undo ``expose``: multiply the gradients by a factor."""
        if factor != 1.0:
            self.owned_gradient.mul_(factor)
        assert self._buffer is not None
        self.shown.conceal(self._buffer)

    def fingerprint(self, exposed: bool) -> list[float]:
        """Return numbers that tell if two replicas have changed the gradients differently."""
        if self.gradients is None:
            return [0.0, 0.0, self.shown.changes()]
        assigned = [m.parameter for m in self.members if self.shown.state(m.parameter) is ASSIGNED]
        flats = [self.gradients] if exposed else [self.gradient_of(p).flatten() for p in assigned]
        real = [torch.view_as_real(flat) if flat.is_complex() else flat for flat in flats]
        total = sum(float(flat.sum(dtype=torch.float64)) for flat in real)
        norm = sum(float(square(flat)) for flat in flats) ** 0.5
        return [total / self.flat.numel**0.5, norm, self.shown.changes()]

    def unreduced(self, parameter: Tensor) -> Tensor | None:
        """Return this replica's own gradient of a parameter, between two backward passes. None if it has none yet."""
        return None if self._buffer is None or parameter in self._buffer.empty else self._buffer.views[parameter]

    def fill_in(self) -> Tensor | None:
        """Return the unsharded gradients, with zeros for parameters without one.

        None if no parameter has a gradient and no other rank waits for one: on a single replica, without a tie.
        """
        for member in self.members:
            self.take_gradient(member.parameter)
        if self._buffer is None and self.axis.size == 1 and self.tie is None:
            return None
        buffer = self._made_buffer()  # another rank may have had a gradient: take part, with zeros
        for parameter in buffer.fill():
            if self.axis.size > 1:  # a single replica knows that it has none
                self.shown.show(parameter, buffer, "fill")
        return buffer.flat

    def start_reduction(self, tensor_axis: Axis) -> Pending:
        """Start summing over the data axis the gradients that one backward pass, or all passes of a step, added up.

        Partial gradients (of norms on sequence shards) are summed over ``tensor_axis`` first. Collective over both
        axes.
        """
        gradients = self.fill_in()
        if gradients is None:
            return Done()
        partial = gradients[slice(*self.flat.runs[PARTIAL])]
        if partial.numel():
            tensor_axis.all_reduce(partial)
        if self._prescale != 1.0:
            gradients.mul_(self._prescale)
        if (access := self.shown.access) is not None and self.axis.size > 1:
            self.shown.hide(access)  # while they are being reduced, nothing may read or change them
        return self._start_sum(gradients)

    @abstractmethod
    def _start_sum(self, gradients: Tensor) -> Pending:
        """Start summing over the data axis what ``start_reduction`` has prepared."""

    def sum(self) -> Pending:
        """Start summing the unsharded gradients over the data axis in place, in full or only in the owned range."""
        gradients = self.gradients
        assert gradients is not None
        if self.communication_dtype != gradients.dtype or (self.sharded and not self._reduce_scatter):
            part, pending = self._start_part(gradients)
            return Then(pending, lambda: self.owned_gradient.copy_(part))
        if not self.sharded:
            return self.axis.all_reduce(gradients, async_op=True)
        return self.reduction.reduce_scatter(self.owned_gradient, gradients, async_op=True)

    def reopen(self, tensor_axis: Axis) -> None:
        """Let another backward pass of the step add to gradients that ``start_reduction`` has summed already."""

    def sum_copies(self) -> Pending:
        """Start summing the owned gradients of a step over the other groups of replicas. Collective over ``copies``.

        Each group has summed its own. No effect if there is one group, or if it is done.
        """
        if self.copies is None or not self.sharded or not self._sums_here or self._copies_summed:
            return Done()
        self._copies_summed = True
        own = self.owned_gradient
        sent = own.to(self._device, self.communication_dtype)
        pending = self.copies.all_reduce(sent, async_op=True)
        if sent is own:
            return pending
        return Then(pending, lambda: self.memory.states.accumulate(own, sent, first=True))

    @abstractmethod
    def complete(self) -> None:
        """End the reductions of a step, with zeros for parameters that had no gradient."""

    def squares(self) -> list[Tensor]:
        """Return sums of squares, float64, of the gradients that this rank counts; not finite after an overflow."""
        squares = []
        for start, stop, factor in self._counted:
            # On disk, as many at once as the step updates at once: their pages are evicted after each piece.
            size = self.memory.offload.sub_group_size if self.memory.states.kind == "nvme" else stop - start
            for piece in self.owned_gradient[start:stop].split(size):
                squares.append((square(piece) * factor).to(self._device, non_blocking=True))
                self.memory.evict(piece)
        return squares

    def _counted_spans(self, grid: Grid) -> list[tuple[int, int, float]]:
        """Return (start, stop, factor) of spans of the owned range, by which its elements count in the gradient norm.

        The factor is 0 or 1. Each element counts once. A replicated element counts on the first rank of the tensor
        axis, a tied element on the first stage of the tie, and an element that several replicas own on the first one.
        Elements that do not count are still read and multiplied by 0, so that an overflow on any rank is detected.
        """
        if not (self.trained and self.counted and self.counts):
            return []
        first = self.owned[0]
        spans = [(self.flat.span(run, *self.owned), run == SHARDED or grid.tensor.is_first) for run in RUNS]
        return [(a - first, b - first, float(counts)) for (a, b), counts in spans if a < b]

    def _start_part(self, gradients: Tensor) -> tuple[Tensor, Pending]:
        """Start summing unsharded gradients over the data axis; return the owned range of the sum and a ``Pending``."""
        sent = gradients.to(self.communication_dtype)
        if self.sharded and self._reduce_scatter:
            own = torch.empty(self.owned_numel, dtype=self.communication_dtype, device=self._device)
            return own, self.reduction.reduce_scatter(own, sent, async_op=True)
        ranks = self.shard_axis if self.sharded else self.axis
        return sent[slice(*self.owned)], ranks.all_reduce(sent, async_op=True)

    def _made_buffer(self) -> GradientBuffer:
        """Return the buffer of ``gradients``; make it if there is none."""
        if self._buffer is None:
            gradients = torch.empty(self.flat.numel, dtype=self._accumulation_dtype, device=self._device)
            self._clear_padding(gradients)
            self._set_gradients(gradients).clear()
        assert self._buffer is not None
        return self._buffer

    def _set_gradients(self, gradients: Tensor, views: Sequence[Tensor] | None = None) -> GradientBuffer:
        views = self._views_of(gradients) if views is None else views
        self._buffer = GradientBuffer(gradients, dict(zip(self._slots, views, strict=True)))
        return self._buffer

    def _set_owned_gradient(self, gradient: Tensor) -> None:
        assert self.master is not None
        self.owned_gradient = gradient
        steps = gradient.numel() == self.master.numel() and not self.memory.offload.portions  # else sub-groups step it
        self.master.grad = gradient if steps else None

    def _clear_padding(self, gradients: Tensor) -> None:
        for span in self._padding:
            gradients[span].zero_()

    def _fits(self, gradient: Tensor) -> bool:
        """Return True if a gradient can become ``gradients``, because it has the same size and unshared memory."""
        return (
            gradient.numel() == self.flat.numel
            and gradient.dtype == self._accumulation_dtype
            and gradient.is_contiguous()
            and not gradient.is_conj()  # its memory holds the conjugate
            and _owns_memory(gradient)
        )


def _owns_memory(tensor: Tensor) -> bool:
    """Return True if a tensor fills its storage and no other tensor refers to that.

    Autograd leaves in ``.grad`` the tensor that it computed. If a parameter was used through a view, that may be memory
    of other gradients too, which are still to be read.
    """
    storage = tensor.untyped_storage()
    users = storage_users(storage)
    # Two users: the tensor itself, and the variable ``storage``.
    return users <= 2 and storage.nbytes() == tensor.numel() * tensor.element_size()
