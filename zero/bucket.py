"""Weights and gradients of one bucket: gradients accumulate in a flat buffer, whole or sharded, and are summed.

stage       gradients
0, 1        whole
2, 3        whole within a backward pass, then this rank's range
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from weakref import WeakMethod, ref

import torch
from torch import Tensor, nn

from ..grid import Axis, Grid
from ..grid.comm.pending import Done, Pending, Then
from .axis_options import ZeroOptions
from .flat import PARTIAL, RUNS, SHARDED, FlatBucket
from .flat_weights import FlatWeights
from .gradient_access import GradientAccess, GuardedGradient, HiddenGradient, guard
from .gradient_norm import square
from .managed import BucketKey, ManagedParameter
from .offload import OffloadMemory
from .protocols import ReduceScatter

# Elements of a gradient on disk that are squared at once: their pages are evicted after each piece.
_PIECE = 2**16


class Bucket(FlatWeights):
    """Flat weights and gradients of the parameters of one bucket.

    Gradients that autograd leaves in ``.grad`` are moved to ``gradients`` as soon as they are there, or at the end of
    the backward pass. If dtypes agree and nothing is reduced in between (``direct``), ``.grad`` then is a view of
    ``gradients``, and later gradients add up in place. If one parameter fills the bucket, its first ``.grad`` becomes
    ``gradients`` without a copy. Between backward passes, ``.grad`` is a guard if there is an ``access``.

    Takes the arguments of ``FlatWeights``.

    Attributes:
        gradients: (numel,), the unsharded gradients. None between steps if the bucket is ``transient``, and between
            backward passes if the bucket ``reduces_every_backward``.
        owned_gradient: the reduced gradients of the owned range, which are ``master.grad``.
        transient: True if unsharded gradients are freed after they are reduced (stages 2 and 3).
        reduces_every_backward: True if gradients are reduced after every backward pass, False if once a step.
        direct: True if ``.grad`` is a view of ``gradients``.
        communication_dtype: dtype in which gradients are summed over the replicas.
        reduction: the reduce-scatter of gradients: ``axis``, or one that sends fewer bytes.
        access: access of user code to ``.grad``, None if user code does not run between backward passes.
        dropped, assigned: parameters whose ``.grad`` user code has set to None, or to another tensor, in this step.
    """

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
        self.transient = options.sharding(self.axis.size) >= 2 and self.tie is None
        self.reduces_every_backward = self.transient and options.reduce_every_backward
        self.direct = not self.reduces_every_backward and dtype == self.weights.dtype
        self.communication_dtype = (options.communication_dtype if flat.key.low_precision else None) or dtype
        self.reduction: ReduceScatter = self.axis
        # Reduced once a step, the sum itself becomes the owned gradient. (Sub-groups have views of it, which must
        # stay.)
        self._keeps_sum = self.transient and not options.reduce_every_backward and not memory.offload.portions
        self._prescale, self._reduce_scatter = options.prescale, options.reduce_scatter
        self._sums_here = self.axis.size > 1 and options.exchange is None  # else a compressor does, or nothing is sent
        self._one_parameter = len(self.members) == 1 and self.trained
        self._accumulated = True  # False from a step's begin to its first sum, if gradients are transient
        self._targets: dict[Tensor, Tensor] = {}  # views of ``gradients``
        self._unwritten: set[Tensor] = set()  # parameters whose target holds nothing yet
        self._access: ref[GradientAccess] | None = None
        self._guards: dict[Tensor, GuardedGradient] = {}  # of ``_targets``
        self._hidden: dict[Tensor, HiddenGradient] = {}
        self._hides = False  # a ``.grad`` may be one of ``_hidden``
        self._shown: set[int] = set()  # ids of the parameters with a ``.grad`` that is set here
        self._absorbed: dict[int, Tensor] = {}  # gradients that autograd has added to one of ``_hidden``
        self.dropped: set[Tensor] = set()
        self.assigned: set[Tensor] = set()
        self._filled: set[Tensor] = set()  # parameters without a gradient on this rank
        self._zeroed: set[Tensor] = set()  # parameters whose gradient user code has set to zero
        self._cleared: set[Tensor] = set()  # parameters of ``_zeroed`` that no backward pass has added to since
        ends, starts = [slot.stop for slot in flat.slots], [slot.start for slot in flat.slots]
        padding = zip([0, *ends], [*starts, flat.numel], strict=True)
        self._padding = [slice(start, stop) for start, stop in padding if start < stop]
        self._counted = self._counted_spans(grid)

        self.gradients: Tensor | None = None
        self.owned_gradient = torch.zeros(0, dtype=dtype, device=grid.device)
        if self.master is not None:
            if self.transient:
                self.owned_gradient = memory.states.zeros(self.owned_numel, dtype)
            else:
                self.gradients = torch.zeros_like(self.weights, dtype=dtype)
                self.owned_gradient = self.gradients[slice(*self.owned)]
                self._make_targets(self.gradients)
            self._set_owned_gradient(self.owned_gradient)

    @property
    def is_copied(self) -> bool:
        """True if gradients that autograd makes are copied into the bucket, and do not become its own."""
        return not self._one_parameter

    @property
    def access(self) -> GradientAccess | None:
        """Access of user code to ``.grad``, which is not kept alive."""
        return None if self._access is None else self._access()

    @access.setter
    def access(self, access: GradientAccess) -> None:
        self._access = ref(access)

    def begin(self) -> None:
        """Begin a step with zero gradients. Gradients accumulate in the bucket again, even if ``.grad`` was set."""
        if not self.trained:
            return
        self._hides = False
        for each in (
            self._shown,
            self._absorbed,
            self.dropped,
            self.assigned,
            self._filled,
            self._zeroed,
            self._cleared,
        ):
            each.clear()
        self._accumulated = not self.transient
        if self._keeps_sum:
            self._set_owned_gradient(self.owned_gradient.new_empty(0))  # until the sum takes its place
        if self._one_parameter or self.transient:
            self.gradients, self._targets = None, {}
            if not self.transient:
                self._set_owned_gradient(self.owned_gradient.new_empty(0))
        self._unwritten = set(self._targets)
        if self.gradients is not None:
            self._clear_padding(self.gradients)
        for member in self.members:
            member.parameter.grad = None

    def target(self, parameter: Tensor, show: bool = True) -> Tensor:
        """Return the view of ``gradients`` in which a parameter's gradient accumulates; ``show`` it in ``.grad``."""
        self.take_gradient(parameter)
        target = self._target(parameter)
        if parameter in self._unwritten:
            self._unwritten.discard(parameter)
            target.zero_()
            if show:
                self._show(parameter)
        return target

    def take_gradient(self, parameter: Tensor) -> bool:
        """Move the gradient that autograd left in ``.grad`` to ``gradients``. Return True if there was one."""
        gradient = parameter.grad
        if self._absorbed and id(parameter) in self._absorbed:
            gradient = self._absorbed.pop(id(parameter))
        elif gradient is None:
            if self.direct and id(parameter) in self._shown and parameter in self._targets:
                self.drop(parameter)
            return False
        elif isinstance(gradient, GuardedGradient) or gradient is self._targets.get(parameter):
            return False
        if self.dropped:
            self.dropped.discard(parameter)
        if gradient.layout != torch.strided:  # of an embedding with sparse=True: the bucket is dense
            gradient = gradient.to_dense()
        if self._one_parameter and self.gradients is None and self._fits(gradient):
            self._set_gradients(gradient.detach().view(-1), [gradient] if self.direct else None)
            self._show(parameter)
            return True
        target, gradient = self._target(parameter), gradient.detach()
        # The first gradient overwrites the target. So does, if gradients add up in place, one that the user (or after
        # ``module.zero_grad()`` autograd) put into ``.grad``.
        if self.direct or parameter in self._unwritten:
            self._unwritten.discard(parameter)
            target.copy_(gradient)
        else:
            target.add_(gradient)
        self._show(parameter)
        return True

    def _show(self, parameter: nn.Parameter | Tensor) -> None:
        """Set ``.grad`` of a parameter whose gradient is in the bucket."""
        access = self.access
        if access is None:
            parameter.grad = self._targets[parameter] if self.direct else None
            return
        self._shown.add(id(parameter))
        if not self.direct:
            self._hide(parameter, access)
        elif access.plain:
            parameter.grad = self._targets[parameter]
        else:
            made = self._guards.get(parameter)
            if made is None:
                view = self._targets[parameter].as_subclass(GuardedGradient)
                made = self._guards[parameter] = guard(view, access, parameter)  # type: ignore[arg-type]
            parameter.grad = made

    def _hide(self, parameter: nn.Parameter | Tensor, access: GradientAccess) -> None:
        made = self._hidden.get(parameter)
        if made is None:
            made = self._hidden[parameter] = HiddenGradient(parameter)
            absorb, number = WeakMethod(self._absorb), id(parameter)
            made.absorb = lambda gradient: (absorb() or _gone)(number, gradient)
            guard(made, access, parameter)  # type: ignore[arg-type]
        parameter.grad = made
        self._hides = True

    def _absorb(self, parameter: int, gradient: Tensor) -> None:
        before = self._absorbed.get(parameter)
        self._absorbed[parameter] = gradient if before is None else before + gradient

    def hide(self, access: GradientAccess) -> None:
        """Hide the gradients of all parameters behind ``.grad``."""
        for member in self.members:
            self._hide(member.parameter, access)

    def open(self, settle: Callable[[], None], first: Tensor | None) -> None:
        """Let autograd accumulate in ``.grad`` again: a backward pass begins.

        Args:
            settle: waits for the reductions that have begun.
            first: a parameter to whose ``.grad`` the pass has added already, if it was first seen by that.

        Raises:
            RuntimeError: user code has assigned a gradient between two backward passes.
        """
        access = self.access
        if access is None or not self._shown:
            return
        self._hides = False
        for member in self.members:
            parameter, gradient = member.parameter, member.parameter.grad
            if isinstance(gradient, GuardedGradient):
                if isinstance(gradient, HiddenGradient):
                    parameter.grad = None
                    if self.direct and parameter in self._targets and parameter not in self._unwritten:
                        self._show(parameter)
            elif id(parameter) not in self._shown or id(parameter) in self._absorbed:
                continue
            elif gradient is None or parameter is first:  # user code has set it to None
                settle()
                self.drop(parameter)
            elif not (access.plain or gradient is self._targets.get(parameter)):
                raise RuntimeError(
                    f"p.grad of {member.layout.name} was assigned between two backward passes of a step, but the "
                    "gradient that the step takes lies elsewhere: change it after the last one"
                )
        self._cleared.clear()

    def kept(self) -> Iterator[bool]:
        """Yield True for each parameter that has a gradient, and False for each whose gradient user code discarded."""
        for parameter in (member.parameter for member in self.members if id(member.parameter) in self._shown):
            gradient = parameter.grad
            if gradient is None or isinstance(gradient, GuardedGradient):
                yield gradient is not None and parameter not in self._cleared
            else:
                yield bool(gradient.any())  # no guard has seen a zero_()

    def close(self, everything: bool) -> None:
        """Take gradients without a hook, after a backward pass: dropped before it, or ``everything``."""
        parameters = [m.parameter for m in self.members] if everything else list(self.dropped)
        for parameter in parameters:
            self.take_gradient(parameter)

    def lift(self, parameter: nn.Parameter) -> None:
        """Put back what ``.grad`` was before user code has replaced it, so that reductions can begin."""
        access = self.access
        assert access is not None
        if id(parameter) not in self._shown:
            parameter.grad = None
        elif self._hides or not self.direct:
            self._hide(parameter, access)
        else:
            self._targets[parameter] = self.gradient_of(parameter)  # its memory may have been exchanged
            self._show(parameter)

    def replaced(self) -> Iterator[tuple[nn.Parameter, Tensor | None]]:
        """Yield parameters whose ``.grad`` user code has replaced after the last backward pass, and what it is now."""
        gradients = self.gradients
        base, size = (0, 1) if gradients is None else (gradients.data_ptr(), gradients.element_size())
        for slot, member in zip(self.flat.slots, self.members, strict=True):
            gradient = member.parameter.grad
            if isinstance(gradient, GuardedGradient):
                continue
            if gradient is None:
                if id(member.parameter) in self._shown:
                    yield member.parameter, None
            elif (
                gradients is None
                or gradient.layout != torch.strided
                or (slot.stop > slot.start and gradient.data_ptr() != base + slot.start * size)
            ):
                yield member.parameter, gradient

    def drop(self, parameter: Tensor) -> None:
        """Discard the gradient of a parameter, as if it had none: user code has set ``.grad`` to None."""
        self.zero(parameter)
        self._shown.discard(id(parameter))
        self.dropped.add(parameter)
        self.assigned.discard(parameter)
        if parameter in self._targets:
            self._unwritten.add(parameter)

    def zero(self, parameter: Tensor) -> None:
        """Set the gradient of a parameter to zero. Its reduction must not be running."""
        self._zeroed.add(parameter)
        self._cleared.add(parameter)
        if (target := self._targets.get(parameter)) is not None:
            target.zero_()
        if self.transient and self._accumulated:
            start, stop = (min(max(place, self.owned[0]), self.owned[1]) for place in self.span(parameter))  # type: ignore[arg-type]
            self.owned_gradient[start - self.owned[0] : stop - self.owned[0]].zero_()

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
        mine = self.gradient_of(parameter).copy_(gradient.detach())
        if divisor != 1.0:
            mine.mul_(divisor)
        self.dropped.discard(parameter)
        self.assigned.add(parameter)
        self._shown.add(id(parameter))
        if self.direct and exposed:
            parameter.grad = mine
        else:
            self.lift(parameter)

    def expose(self, factor: float) -> None:
        """Multiply the reduced gradients by a factor, and make them whole, and ``.grad``. Collective if sharded."""
        gradients = self.gradients
        assert gradients is not None
        if factor != 1.0:
            self.owned_gradient.mul_(factor)
        if self.sharded:
            self.axis.all_gather(gradients, self.owned_gradient)
        for member in self.members if self.direct else ():
            if isinstance(member.parameter.grad, GuardedGradient):
                member.parameter.grad = self.gradient_of(member.parameter)
        for parameter in self._filled:
            if not self.gradient_of(parameter).any():  # type: ignore[arg-type]  # nor has another replica a gradient
                parameter.grad = None
                self._shown.discard(id(parameter))

    def conceal(self, factor: float) -> None:
        """Undo ``expose``: multiply the gradients by a factor."""
        if factor != 1.0:
            self.owned_gradient.mul_(factor)
        for member in self.members if self.direct else ():
            if member.parameter.grad is not None:
                self._show(member.parameter)

    def fingerprint(self, exposed: bool) -> list[float]:
        """Return numbers that tell if two replicas have changed the gradients differently."""
        codes = [(p in self.dropped) + 2 * (p in self._zeroed) for p in (m.parameter for m in self.members)]
        code = float(sum(number * code for number, code in enumerate(codes, start=1)))
        if self.gradients is None:
            return [0.0, 0.0, code]
        changed = [m.parameter for m in self.members if m.parameter in self.assigned]
        found = [self.gradients] if exposed else [self.gradient_of(p).flatten() for p in changed]
        real = [torch.view_as_real(each) if each.is_complex() else each for each in found]
        total = sum(float(each.sum(dtype=torch.float64)) for each in real)
        return [total / self.flat.numel**0.5, sum(float(square(each)) for each in found) ** 0.5, code]

    def unreduced(self, parameter: Tensor) -> Tensor | None:
        """Return this replica's own gradient of a parameter, between two backward passes. None if it has none yet."""
        return None if parameter in self._unwritten else self._targets.get(parameter)

    def fill_in(self) -> Tensor | None:
        """Return the unsharded gradients, with zeros for parameters without one.

        None if no parameter has a gradient and no other rank waits for one: on a single replica, without a tie.
        """
        for member in self.members:
            self.take_gradient(member.parameter)
        if self.gradients is None:
            if self.axis.size == 1 and self.tie is None:
                return None
            self.target(self.members[0].parameter)  # another rank may have had a gradient: take part, with zeros
        for parameter in list(self._unwritten):
            self.target(parameter, show=self.axis.size > 1)  # a single replica knows that it has none
            self._filled.add(parameter)
        return self.gradients

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
        if (access := self.access) is not None and self.axis.size > 1:
            self.hide(access)  # while they are being reduced, nothing may read or change them
        if not self.transient:
            return self.sum() if self._sums_here else Done()
        self.gradients = None
        self._targets, self._guards = {}, {}
        if self.direct and access is None:
            for member in self.members:
                member.parameter.grad = None  # a view of them, which would keep them
        part, pending = self._start_sum(gradients)
        return Then(pending, lambda: self.accumulate(part))

    def sum(self) -> Pending:
        """Start summing the unsharded gradients over the data axis in place, in full or only in the owned range."""
        gradients = self.gradients
        assert gradients is not None
        if self.communication_dtype != gradients.dtype or (self.sharded and not self._reduce_scatter):
            part, pending = self._start_sum(gradients)
            return Then(pending, lambda: self.owned_gradient.copy_(part))
        if not self.sharded:
            return self.axis.all_reduce(gradients, async_op=True)
        return self.reduction.reduce_scatter(self.owned_gradient, gradients, async_op=True)

    def reopen(self, tensor_axis: Axis) -> None:
        """Let another backward pass of the step add to gradients that are summed over the data axis already.

        One rank keeps the sum, and the others set theirs to zero, so that the next reduction gives the sum of all
        passes. Transient gradients need no change: the parts of their sums add up.
        """
        if self.transient or not self._sums_here or self.gradients is None:
            return
        start, stop = self.owned
        if not (self.sharded or self.axis.is_first):
            start = stop
        self.gradients[:start].zero_()
        self.gradients[stop:].zero_()
        if not tensor_axis.is_first:
            self.gradients[slice(*self.flat.runs[PARTIAL])].zero_()
        if self._prescale != 1.0:
            self.gradients.div_(self._prescale)

    def accumulate(self, part: Tensor) -> None:
        """Add a part of a sum over the data axis to ``owned_gradient``, after a backward pass of stages 2 and 3.

        Args:
            part: (owned_numel,), the owned range of the sum.
        """
        if not self._accumulated and self._keeps_sum:
            part = part.to(self._accumulation_dtype)
            alone = part.untyped_storage().nbytes() == part.numel() * part.element_size()
            self._set_owned_gradient(part if alone else part.clone())
        else:
            self.memory.states.accumulate(self.owned_gradient, part, first=not self._accumulated)
        self._accumulated = True
        self.memory.evict(self.owned_gradient)

    def complete(self) -> None:
        """End the reductions of a step, with zeros for parameters that had no gradient."""
        if self.trained and self.gradients is None and not self.transient:
            self.target(self.members[0].parameter, show=False)  # on one replica, without a gradient
        if not self._accumulated:
            device = self.owned_gradient.device
            self.accumulate(torch.zeros(self.owned_numel, dtype=self._accumulation_dtype, device=device))

    def squares(self) -> list[Tensor]:
        """Return sums of squares, float64, of the gradients that this rank counts; not finite after an overflow."""
        found = []
        for a, b, factor in self._counted:
            for piece in self.owned_gradient[a:b].split(_PIECE if self.memory.states.kind == "nvme" else b - a):
                found.append((square(piece) * factor).to(self._device, non_blocking=True))
                self.memory.evict(piece)
        return found

    def _counted_spans(self, grid: Grid) -> list[tuple[int, int, float]]:
        """Return (start, stop, factor) of spans of the owned range, by which its elements count in the gradient norm.

        The factor is 0 or 1. Each element counts once. A replicated element counts on the first rank of the tensor
        axis, a tied element on the first stage of the tie, and in stage 0 every element counts on the first replica.
        Elements that do not count are still read and multiplied by 0, so that an overflow on any rank is detected.
        """
        if not (self.trained and self.counted and (self.sharded or self.axis.is_first)):
            return []
        first = self.owned[0]
        spans = [(self.flat.span(run, *self.owned), run == SHARDED or grid.tensor.is_first) for run in RUNS]
        return [(a - first, b - first, float(counts)) for (a, b), counts in spans if a < b]

    def _start_sum(self, gradients: Tensor) -> tuple[Tensor, Pending]:
        """Start summing unsharded gradients over the data axis; return the owned range of the sum and a ``Pending``."""
        sent = gradients.to(self.communication_dtype)
        if self.sharded and self._reduce_scatter:
            own = torch.empty(self.owned_numel, dtype=self.communication_dtype, device=self._device)
            return own, self.reduction.reduce_scatter(own, sent, async_op=True)
        return sent[slice(*self.owned)], self.axis.all_reduce(sent, async_op=True)

    def _target(self, parameter: Tensor) -> Tensor:
        """Return a parameter's view of ``gradients``, with undefined values if the parameter is in ``_unwritten``."""
        if self.gradients is None:
            gradients = torch.empty(self.flat.numel, dtype=self._accumulation_dtype, device=self._device)
            self._clear_padding(gradients)
            self._set_gradients(gradients)
            self._unwritten = set(self._targets)
        return self._targets[parameter]

    def _set_gradients(self, gradients: Tensor, views: Sequence[Tensor] | None = None) -> None:
        self.gradients = gradients
        self._make_targets(gradients, views)
        if not self.transient:
            self._set_owned_gradient(gradients[slice(*self.owned)] if self.sharded else gradients)

    def _set_owned_gradient(self, gradient: Tensor) -> None:
        assert self.master is not None
        self.owned_gradient = gradient
        steps = gradient.numel() == self.master.numel() and not self.memory.offload.portions  # else sub-groups step it
        self.master.grad = gradient if steps else None

    def _make_targets(self, gradients: Tensor, views: Sequence[Tensor] | None = None) -> None:
        views = self._views_of(gradients) if views is None else views
        self._guards = {}
        self._targets = {member.parameter: view for member, view in zip(self.members, views, strict=True)}

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


def _gone(parameter: int, gradient: Tensor) -> None:
    raise RuntimeError(
        "p.grad belongs to an engine or optimizer that is gone: call module.zero_grad() before you train the module "
        "without it"
    )


def _owns_memory(tensor: Tensor) -> bool:
    """Return True if a tensor fills its storage and no other tensor refers to that.

    Autograd leaves in ``.grad`` the tensor that it computed. If a parameter was used through a view, that may be memory
    of other gradients too, which are still to be read.
    """
    storage = tensor.untyped_storage()
    users = torch._C._storage_Use_Count(storage._cdata)
    # Two users: the tensor itself, and the variable ``storage``.
    return users <= 2 and storage.nbytes() == tensor.numel() * tensor.element_size()
