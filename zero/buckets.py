"""A bucket in memory: parameters and gradients in flat buffers, whole or sharded as the stage of ZeRO says.

stage       weights             gradients                           optimizer's state
0           whole               whole                               whole
1           whole               whole                               this rank's range
2           whole               whole within a backward, then range this rank's range
3           whole where used    whole within a backward, then range this rank's range
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor, nn

from ..grid import Axis, Grid, Pending
from .arriving import Accumulation, All, Moved, alone
from .flat import PARTIAL, RUNS, SHARDED, FlatBucket
from .mode import Key, Managed, Mode
from .norm import square
from .offload import Memories

# Elements of a gradient on disk that are squared at once: what is read of the file is handed back after each.
_PIECE = 2**16


class Bucket:
    """Flat weights and gradients of some parameters, of which this rank owns a range.

    The parameters are moved: each becomes a view of ``weights``. What autograd leaves in ``.grad`` is taken to
    ``gradients`` as soon as it is there; where nothing stands between (``direct``), ``.grad`` is a view of these then,
    and what comes after adds up in place. Where a parameter fills the bucket, its first ``.grad`` is ``gradients``.

    Attributes:
        weights: (numel,), padded with zeros. In stage 3 its storage is empty while it is released.
        owned: the range of elements whose optimizer state this rank holds; everything, in stage 0.
        shard: the owned weights: a view of ``weights``, or in stage 3 a tensor of their own.
        master: what the optimizer steps: the shard itself, or a copy of it in the dtype of accumulation. None
            for parameters that are not trained.
        memory: where shards, masters, state and accumulated gradients are made.
        gradients: (numel,); None between steps where they are ``transient`` (stages 2 and 3), and between backward
            passes where ``each`` of these reduces them.
        owned_gradient: the reduced gradients of the owned range, which are ``master.grad``.
    """

    def __init__(self, flat: FlatBucket, members: Sequence[Managed], grid: Grid, mode: Mode, memory: Memories) -> None:
        assert isinstance(flat.key, Key)
        self.memory = memory
        self.stages, self.layers, self.tie, self.counted, self.group, dtype, persistent, narrow, _ = flat.key
        self.flat, self.members = flat, [members[slot.number] for slot in flat.slots]
        self._axis, self._device = grid.data, grid.device
        dtype = mode.weights or dtype
        accumulate = mode.accumulate or dtype
        stage = mode.sharding(grid.data.size)
        sharded = stage > 0
        self.transient = stage >= 2 and self.tie is None
        self.each = self.transient and mode.each
        # Reduced once a step, the sum itself is the gradient: nothing is held for it before. (Sub-groups have views.)
        self._adopts = self.transient and not mode.each and not memory.offload.portions
        self._prescale = mode.prescale
        self._summed = grid.data.size > 1 and mode.exchange is None  # over the replicas, here
        self._scatter, self._gather = mode.scatter, mode.gather
        self.owned = flat.owned(grid.data.rank) if sharded else (0, flat.numel)
        self.communicate = (mode.communicate if narrow else None) or accumulate

        self.weights = torch.empty(flat.numel, dtype=dtype, device=grid.device)
        self.released = self.gathered = stage == 3 and not persistent  # nothing is whole until it is gathered
        if self.released:
            self.weights.untyped_storage().resize_(0)
            self.shard = memory.parameters.zeros(self.owned[1] - self.owned[0], dtype)
        else:
            self.shard = self.weights.zero_()[slice(*self.owned)]
        self.gradients: Tensor | None = None
        self.owned_gradient = torch.zeros(0, dtype=accumulate, device=grid.device)
        self.master: nn.Parameter | None = None
        self.direct = not self.each and accumulate == dtype
        self._accumulate = accumulate
        if self.trained:
            numel, states = self.owned[1] - self.owned[0], memory.states
            own = accumulate == dtype and states.device.type == self.shard.device.type
            self.master = nn.Parameter(self.shard if own else states.zeros(numel, accumulate))
            if self.transient:
                self.owned_gradient = states.zeros(numel, accumulate)
            else:
                self.gradients = torch.zeros_like(self.weights, dtype=accumulate)
                self.owned_gradient = self.gradients[slice(*self.owned)]
            self.master.grad = self.owned_gradient
        self._slots = {member.parameter: slot for slot, member in zip(flat.slots, self.members, strict=True)}
        for member in self.members:
            self.fill(member.parameter, member.parameter)
        # Made once (a storage that is emptied and filled again stays the same), where there is something to view.
        self._whole = [] if self.released else self._views(self.weights)
        self._hidden = self._nothing() if self.gathered else []
        self._show(self._hidden if self.released else self._whole)
        self._sole = len(self.members) == 1 and self.trained
        self._targets: dict[Tensor, Tensor] = {}
        self._empty: set[Tensor] = set()  # parameters whose target holds nothing yet
        if self.gradients is not None:
            self._aim(self.gradients)
        ends, starts = [slot.stop for slot in flat.slots], [slot.start for slot in flat.slots]
        padding = zip([0, *ends], [*starts, flat.numel], strict=True)
        self._padding = [slice(start, stop) for start, stop in padding if start < stop]

        # An element counts once: a replicated one on the first tensor rank, a tied one on its first stage, and
        # what every replica holds on the first replica.
        # Those that do not count are looked at all the same, times 0: an overflow on any rank must be seen.
        here = self.trained and self.counted and (sharded or grid.data.is_first)
        spans = [(flat.span(run, *self.owned), run == SHARDED or grid.tensor.is_first) for run in RUNS if here]
        self._counted = [(a - self.owned[0], b - self.owned[0], float(c)) for (a, b), c in spans if a < b]

    @property
    def trained(self) -> bool:
        """Whether an optimizer steps it."""
        return self.group is not None

    @torch.no_grad()
    def fill(self, parameter: nn.Parameter, value: Tensor) -> None:
        """Give a parameter its initial values: everywhere, or where they are released those of the owned range."""
        _, start, stop = self._slots[parameter]
        homes = [(self.shard, *self.owned) if self.released else (self.weights, 0, self.flat.numel)]
        if self.master is not None and self.master.data_ptr() != self.shard.data_ptr():
            homes.append((self.master, *self.owned))
        value = value.detach()
        # A placeholder is one element, seen many times: it is not copied out.
        values = value.reshape(-1) if any(value.stride()) else value.as_strided((value.numel(),), (0,))
        for home, first, last in homes:
            low, high = max(start, first), min(stop, last)
            if low < high:
                # Masters start from the values before they are rounded; weights are the masters, rounded.
                home[low - first : high - first] = values[low - start : high - start].to(self._accumulate)
            self.memory.behind(home)

    def begin(self) -> None:
        """A new step: gradients are zero, and every parameter accumulates here, whatever was done to its ``.grad``."""
        if not self.trained:
            return
        self._fresh = self.transient
        if self._adopts:
            self._own(self.owned_gradient.new_empty(0))  # until the sum comes, which takes its place
        if self._sole or self.transient:
            self.gradients, self._targets = None, {}
            if not self.transient:
                self._own(self.owned_gradient.new_empty(0))
        self._empty = set(self._targets)
        if self.gradients is not None:
            self._clear_padding(self.gradients)
        for member in self.members:
            member.parameter.grad = None

    def target(self, parameter: Tensor) -> Tensor:
        """Where a parameter's gradient accumulates: a view of ``gradients``."""
        target = self._room(parameter)
        if parameter in self._empty:
            self._empty.discard(parameter)
            target.zero_()
            if self.direct:
                parameter.grad = target
        return target

    def _room(self, parameter: Tensor) -> Tensor:
        """The same, and zero only if it is not ``_empty``: what was just made need not be, to be written over."""
        if self.gradients is None:
            gradients = torch.empty(self.flat.numel, dtype=self._accumulate, device=self._device)
            self._clear_padding(gradients)
            self._take(gradients)
            self._empty = set(self._targets)
        return self._targets[parameter]

    def _take(self, gradients: Tensor) -> None:
        """Let these be the bucket's."""
        self.gradients = gradients
        self._aim(gradients)
        if not self.transient:
            self._own(gradients[slice(*self.owned)])

    def _clear_padding(self, gradients: Tensor) -> None:
        for span in self._padding:
            gradients[span].zero_()

    def accumulate(self, part: Tensor) -> None:
        """Add a sum over the data axis to the owned range of a transient gradient."""
        part = part.to(self.owned_gradient.device)
        if self._fresh and self._adopts:
            part = part.to(self._accumulate)
            alone = part.untyped_storage().nbytes() == part.numel() * part.element_size()
            self._own(part if alone else part.clone())
        elif self._fresh:
            self.owned_gradient.copy_(part)
        else:
            self.owned_gradient.add_(part)
        self._fresh = False
        self.memory.behind(self.owned_gradient)

    def complete(self) -> None:
        """Nothing more comes in this step."""
        if self.trained and self.gradients is None and not self.transient:
            self.target(self.members[0].parameter)  # on one replica, where it had none
        if self._fresh:
            owned = self.owned[1] - self.owned[0]
            self.accumulate(torch.zeros(owned, dtype=self._accumulate, device=self.owned_gradient.device))

    def _own(self, gradient: Tensor) -> None:
        assert self.master is not None
        self.owned_gradient = gradient
        steps = gradient.numel() == self.master.numel() and not self.memory.offload.portions  # else sub-groups step it
        self.master.grad = gradient if steps else None

    def collect(self, parameter: Tensor) -> None:
        """Move what autograd left in ``.grad`` to where it accumulates."""
        gradient = parameter.grad
        if gradient is None or gradient is self._targets.get(parameter):
            return
        if self._sole and self.gradients is None and self._fits(gradient):
            self._take(gradient.detach().view(-1))
            parameter.grad = self._targets[parameter] if self.direct else None
            return
        target, gradient = self._room(parameter), gradient.detach()
        # The first one is written; so is, where they add up in place, what somebody else put there (or after
        # ``module.zero_grad()`` autograd): that counts.
        if self.direct or parameter in self._empty:
            self._empty.discard(parameter)
            target.copy_(gradient)
        else:
            target.add_(gradient)
        parameter.grad = target if self.direct else None

    def _fits(self, gradient: Tensor) -> bool:
        """Whether a gradient can be the bucket's own: as large, and of nobody else (a view of it, say)."""
        return (
            gradient.numel() == self.flat.numel
            and gradient.dtype == self._accumulate
            and gradient.is_contiguous()
            and alone(gradient)
        )

    def fill_in(self) -> Tensor | None:
        """The gradients of what came, and zeros where none did; None where none is wanted."""
        for member in self.members:
            self.collect(member.parameter)
        if self.gradients is None:
            if self._axis.size == 1 and self.tie is None:
                return None
            self.target(self.members[0].parameter)  # another rank may have had a gradient: take part, with zeros
        for parameter in list(self._empty):
            self.target(parameter)
        return self.gradients

    def reduce(self, tensor_axis: Axis) -> Pending | None:
        """Start summing the gradients over the data axis; they are final (of a microbatch, where transient)."""
        gradients = self.fill_in()
        if gradients is None:
            return None
        partial = gradients[slice(*self.flat.runs[PARTIAL])]
        if partial.numel():
            tensor_axis.all_reduce(partial)
        if self._prescale != 1.0:
            gradients.mul_(self._prescale)
        if self.transient:
            self.gradients = None
            self._targets = {}
            if self.direct:
                for member in self.members:
                    member.parameter.grad = None  # a view of them, which would keep them
            return Accumulation(self, gradients)
        return self.sum() if self._summed else None

    def sum(self) -> Pending:
        """Start summing whole gradients over the data axis, in their place: all of them, or the owned range alone."""
        gradients = self.gradients
        assert gradients is not None
        if self.communicate != gradients.dtype or not (self._scatter or self.owned == (0, self.flat.numel)):
            return Moved(self, gradients)
        if self.owned == (0, self.flat.numel):
            return self._axis.all_reduce(gradients, async_op=True)
        return self._axis.reduce_scatter(self.owned_gradient, gradients, async_op=True)

    def update(self, start: int = 0, stop: int | None = None) -> None:
        """After the optimizer's step: the shard takes what the masters of a part of the owned range are now."""
        assert self.master is not None
        if self.master.data_ptr() != self.shard.data_ptr():
            self.shard[start:stop].copy_(self.master.detach()[start:stop], non_blocking=True)

    def publish(self) -> Pending | None:
        """After ``update``: bring the new weights to the parameters, on every rank that holds them."""
        assert self.master is not None
        if self.gathered and not self.released:  # lent: the shard is no view of them
            self.weights[slice(*self.owned)].copy_(self.shard)
        if self.released or self._axis.size == 1 or self.owned == (0, self.flat.numel):
            return None
        if not self._gather:
            ranges = self.weights.view(self._axis.size, -1)
            return All([self._axis.broadcast(part, source, async_op=True) for source, part in enumerate(ranges)])
        return self._axis.all_gather(self.weights, self.shard.to(self._device), async_op=True)

    def summed(self, gradients: Tensor) -> tuple[Tensor, Pending]:
        """Start summing whole gradients over the data axis: this rank's range of the sum, and what to wait for."""
        sent = gradients.to(self.communicate)
        if self._axis.size > 1 and self._scatter and self.owned != (0, self.flat.numel):
            own = torch.empty(self.owned[1] - self.owned[0], dtype=self.communicate, device=self._device)
            return own, self._axis.reduce_scatter(own, sent, async_op=True)
        return sent[slice(*self.owned)], self._axis.all_reduce(sent, async_op=True)

    @torch.no_grad()
    def adopt(self, spans: Sequence[tuple[int, int]]) -> None:
        """These elements of the whole weights were written, alike on every replica: shard and master take them.

        A master of another dtype keeps its own value where it rounds to what is there.
        """
        start, stop = self.owned
        for low, high in ((max(a, start), min(b, stop)) for a, b in spans):
            if low >= high:
                continue
            written = self.weights[low:high]
            self.shard[low - start : high - start].copy_(written)
            if self.master is not None and self.master.data_ptr() != self.shard.data_ptr():
                master = self.master.detach()[low - start : high - start]
                written = written.to(master.device)
                master.copy_(torch.where(master.to(written.dtype) == written, master, written.to(master.dtype)))
                self.memory.behind(master)
            self.memory.behind(self.shard)

    def frozen(self, without: Collection[Tensor] = ()) -> list[tuple[int, int]]:
        """The spans of the owned range that stand still: frozen since they were laid out, or without a gradient."""
        start, stop = self.owned
        spans = []
        for slot, member in zip(self.flat.slots, self.members, strict=True):
            low, high = max(slot.start, start), min(slot.stop, stop)
            stands = not member.parameter.requires_grad or (len(without) > 0 and member.parameter in without)
            if stands and low < high:
                spans.append((low - start, high - start))
        return spans

    def displaced(self) -> str | None:
        """The name of a parameter that is no view of ``weights`` any more, if one is not."""
        if self.released:
            return None
        base, size = self.weights.data_ptr(), self.weights.element_size()
        for slot, member in zip(self.flat.slots, self.members, strict=True):
            if slot.stop > slot.start and member.parameter.data_ptr() != base + slot.start * size:
                return member.layout.name
        return None

    def squares(self) -> list[Tensor]:
        """The sums of squares, in float64, of the gradients that this rank counts; not finite if any of its are not."""
        found = []
        for a, b, factor in self._counted:
            for piece in self.owned_gradient[a:b].split(_PIECE if self.memory.states.kind == "nvme" else b - a):
                found.append((square(piece) * factor).to(self._device))
                self.memory.behind(piece)
        return found

    def release(self) -> None:
        """Keep the shard only. The parameters show NaN until ``restore``: a read too early is seen, not silent."""
        if not self.released:
            self._show(self._hidden)
            # The storage is emptied, not dropped: what autograd saved for backward are views of it.
            self.weights.untyped_storage().resize_(0)
            self.released = True

    def restore(self, axis: Axis) -> Pending | None:
        """Start gathering the whole weights; None if they are here. ``show`` follows once they have come."""
        if not self.released:
            return None
        self.weights.untyped_storage().resize_(self.flat.numel * self.weights.element_size())
        self.released = False
        if axis.size == 1:
            self.weights.copy_(self.shard)
            return None
        return axis.all_gather(self.weights, self.shard.to(self._device), async_op=True)

    def show(self) -> None:
        """Let the parameters be views of the whole weights again."""
        self.memory.behind(self.shard)
        self._whole = self._whole or self._views(self.weights)
        self._show(self._whole)

    def _nothing(self) -> list[Tensor]:
        nothing = torch.full((), float("nan"), dtype=self.weights.dtype, device=self._device)
        return [nothing.expand(member.parameter.shape) for member in self.members]

    def _views(self, flat: Tensor) -> list[Tensor]:
        return [
            flat[slot.start : slot.stop].view(member.parameter.shape)
            for slot, member in zip(self.flat.slots, self.members, strict=True)
        ]

    def _show(self, views: Sequence[Tensor]) -> None:
        for member, view in zip(self.members, views, strict=True):
            member.parameter.data = view  # keeps the Parameter itself, and all that refers to it

    def _aim(self, gradients: Tensor) -> None:
        for slot, member in zip(self.flat.slots, self.members, strict=True):
            self._targets[member.parameter] = gradients[slot.start : slot.stop].view(member.parameter.shape)
