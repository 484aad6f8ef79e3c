"""Weights of one bucket in a flat buffer, whole or sharded, and the master weights that the optimizer steps.

stage       weights             master weights, optimizer state
0           whole               whole
1, 2        whole               this rank's range
3           whole where used    this rank's range
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..base.torch_private import storage_id, storage_users
from ..grid import Grid, Pending
from ..grid.comm.pending import All, Done
from .axis_options import ZeroOptions
from .flat import FlatBucket, Slot
from .managed import BucketKey, ManagedParameter, set_released
from .offload import OffloadMemory
from .protocols import AllGather
from .released_parameter import ReleasedParameter
from .shard_groups import shard_group


class FlatWeights:
    """Flat weights of the parameters of one bucket. This rank owns a range of them.

    The parameters are moved: each becomes a view of ``weights``.

    Args:
        flat: the position of each parameter in the buffer.
        members: all parameters of this rank; ``flat.slots`` has the numbers of the parameters in this bucket.
        grid: the grid of the replicas.
        options: stage of ZeRO and dtypes.
        memory: where shards, masters, state and accumulated gradients are allocated.

    Attributes:
        flat, memory: as given.
        members: the parameters of this bucket, in the order of ``flat.slots``.
        stages, layers, tie, counted, group, state, replicas: of ``BucketKey``.
        axis: the axis over which the parameters are replicated.
        shard_axis, copies: the ranks of it that shard them, and those that hold the same shards; see ``ShardGroup``.
        weights: (numel,), padded with zeros. In stage 3 its storage is empty while it is released.
        owned: start and stop of the range whose optimizer state this rank holds; everything, in stage 0.
        shard: the owned weights, which are a view of ``weights``, or in stage 3 a separate tensor.
        master: the tensor that the optimizer steps: the shard itself, or a copy in ``accumulation_dtype``. None if
            the parameters are not trained.
        partitioned: True if the weights are gathered where they are used and released after (stage 3).
        released: True while this rank holds the shard only.
        release_hook: if set, called with a parameter and True when it is released, and False when it is whole again.
        lent: True if a user may hold views of ``weights``, so that ``release`` must not free memory that has others.
    """

    def __init__(
        self,
        flat: FlatBucket,
        members: Sequence[ManagedParameter],
        grid: Grid,
        options: ZeroOptions,
        memory: OffloadMemory,
    ) -> None:
        key = flat.key
        assert isinstance(key, BucketKey)
        self.flat, self.memory = flat, memory
        self.members = [members[slot.number] for slot in flat.slots]
        self.stages, self.layers, self.tie = key.stages, key.layers, key.tie
        self.counted, self.group, self.state, self.replicas = key.counted, key.group, key.state, key.replicas
        self.axis, self._device = grid.axis(key.replicas), grid.device
        self.shard_axis, self.copies = shard_group(grid, key.replicas, options.shard_size)
        self._allgather_partitions = options.allgather_partitions
        numbers = key.dtype.is_floating_point or key.dtype.is_complex
        dtype = options.weight_dtype if numbers and options.weight_dtype else key.dtype
        self._accumulation_dtype = options.accumulation_dtype if numbers and options.accumulation_dtype else dtype
        stage = options.sharding(self.shard_axis.size)
        self.owned = flat.owned(self.shard_axis.rank) if stage > 0 else (0, flat.numel)
        self.weights = torch.empty(flat.numel, dtype=dtype, device=grid.device)
        self.released = self.partitioned = stage == 3 and not key.persistent  # nothing is whole until it is gathered
        if self.released:
            self.weights.untyped_storage().resize_(0)
            self.shard = memory.parameters.zeros(self.owned_numel, dtype)
        else:
            self.shard = self.weights.zero_()[slice(*self.owned)]
        self.master: nn.Parameter | None = None
        if self.trained:
            states, device = memory.states, memory.parameters.device if self.released else grid.device
            same = self._accumulation_dtype == dtype and states.device.type == device.type
            master = self.shard if same else states.zeros(self.owned_numel, self._accumulation_dtype)
            self.master = nn.Parameter(master)
        self.lent = False
        self.release_hook: Callable[[nn.Parameter, bool], object] | None = None
        self._versions: list[int] = []  # of the parameters, when they were shown
        self._checks = 0
        self._slots: dict[Tensor, Slot] = {
            member.parameter: slot for slot, member in zip(flat.slots, self.members, strict=True)
        }
        for member in self.members:
            self.fill(member.parameter, member.parameter)
        # Made once (a storage that is emptied and filled again stays the same), when there is something to view.
        self._views = [] if self.released else self._views_of(self.weights)
        nothing = torch.full((), float("nan") if numbers else 0, dtype=dtype, device=grid.device)
        partitioned = self.members if self.partitioned else []
        self._placeholders = [nothing.expand(member.parameter.shape) for member in partitioned]
        self._point_parameters_at(self._placeholders if self.released else self._views)

    @property
    def trained(self) -> bool:
        """True if an optimizer steps the weights."""
        return self.group is not None

    @property
    def sharded(self) -> bool:
        """True if this rank owns a part of the bucket only."""
        return self.owned != (0, self.flat.numel)

    @property
    def counts(self) -> bool:
        """True if this rank, of those with equal owned ranges, counts them in norms and histograms."""
        ranks = self.copies if self.sharded else self.axis
        return ranks is None or ranks.is_first

    @property
    def owned_numel(self) -> int:
        """Number of elements that this rank owns."""
        return self.owned[1] - self.owned[0]

    @property
    def master_is_copy(self) -> bool:
        """True if there is a master here and it is not the shard itself."""
        if self.master is None or self.master_is_away:
            return False
        return storage_id(self.master.untyped_storage()) != storage_id(self.shard.untyped_storage())

    @property
    def master_is_away(self) -> bool:
        """True after ``put_master_away``."""
        return self.master is not None and self.master.stride() == (0,)

    def put_master_away(self) -> None:
        """Free the memory of the master: the caller holds parts of it, and steps them. Its elements read as NaN."""
        assert self.master is not None
        self.master.data = self.master.new_full((1,), float("nan")).expand(self.owned_numel)

    def values(self) -> tuple[Tensor, int]:
        """Return the tensor with the values at full precision, and the place of its first element in the bucket.

        While the master is away, these are the values in the dtype of the weights.
        """
        if self.master is not None and not self.master_is_away:
            return self.master.detach(), self.owned[0]
        return (self.shard, self.owned[0]) if self.partitioned else (self.weights, 0)

    def span(self, parameter: nn.Parameter) -> tuple[int, int]:
        """Return the first element of a parameter in ``weights``, and the one after its last."""
        return self._slots[parameter].start, self._slots[parameter].stop

    @torch.no_grad()
    def fill(self, parameter: nn.Parameter, value: Tensor) -> None:
        """Set the values of a parameter. If the weights are released, only the owned values are stored."""
        start, stop = self.span(parameter)
        targets = [] if self.released else [(self.weights, 0, self.flat.numel)]
        if self.partitioned:
            targets.append((self.shard, *self.owned))
        if self.master_is_copy:
            assert self.master is not None
            targets.append((self.master, *self.owned))
        value = value.detach()
        # A placeholder is one element, expanded: it is not copied out.
        values = value.reshape(-1) if any(value.stride()) else value.as_strided((value.numel(),), (0,))
        for target, first, last in targets:
            low, high = max(start, first), min(stop, last)
            if low < high:
                # Masters start from the values before rounding; weights are the masters, rounded.
                target[low - first : high - first] = values[low - start : high - start].to(self._accumulation_dtype)
            self.memory.evict(target)

    def update(self, start: int = 0, stop: int | None = None) -> None:
        """Copy elements ``start`` to ``stop`` of the owned range from the stepped master weights to ``shard``.

        No effect if the master is the shard itself.
        """
        assert self.master is not None
        if self.master_is_copy:
            # The host may read a shard in its memory at once.
            waits = self.shard.device.type == "cpu"
            self.shard[start:stop].copy_(self.master.detach()[start:stop], non_blocking=not waits)

    def publish(self) -> Pending | None:
        """Start sending the owned weights to all ranks that hold the unsharded weights, after ``update``. Collective.

        None if there is nothing to send: the bucket is not sharded, or its weights are released.
        """
        if self.partitioned and not self.released:  # gathered: the shard is no view of the weights
            self.weights[slice(*self.owned)].copy_(self.shard)
        if self.released or not self.sharded:
            return None
        if not self._allgather_partitions:
            ranges = self.weights.view(self.shard_axis.size, -1)
            return All([self.shard_axis.broadcast(part, source, async_op=True) for source, part in enumerate(ranges)])
        return self.shard_axis.all_gather(self.weights, self.shard.to(self._device), async_op=True)

    @torch.no_grad()
    def take_written(self, spans: Sequence[tuple[int, int]]) -> None:
        """Copy elements of the unsharded weights, written equally on every replica, to the shard and the master.

        A master of another dtype keeps its present value wherever this value rounds to the written weight.
        """
        start, stop = self.owned
        for low, high in ((max(a, start), min(b, stop)) for a, b in spans):
            if low >= high:
                continue
            written = self.weights[low:high]
            self.shard[low - start : high - start].copy_(written)
            if self.master is not None and self.master_is_copy:
                master = self.master.detach()[low - start : high - start]
                written = written.to(master.device)
                master.copy_(torch.where(master.to(written.dtype) == written, master, written.to(master.dtype)))
                self.memory.evict(master)
            self.memory.evict(self.shard)

    def frozen(self, without: Collection[Tensor] = ()) -> list[tuple[int, int]]:
        """Return the spans of the owned range that a step must not change.

        Args:
            without: parameters without a gradient in this step, besides those frozen since the bucket was made.
        """
        start, stop = self.owned
        slots = (self._slots[parameter] for parameter in self.standing(without))
        spans = [(max(slot.start, start) - start, min(slot.stop, stop) - start) for slot in slots]
        return sorted(span for span in spans if span[0] < span[1])

    def standing(self, without: Collection[Tensor] = ()) -> set[Tensor]:
        """Return the parameters that a step must not change: frozen ones, and those in ``without``."""
        parameters = [member.parameter for member in self.members]
        return {p for p in parameters if not p.requires_grad or (len(without) > 0 and p in without)}

    def displaced(self) -> str | None:
        """Return the name of a parameter that is no longer a view of ``weights``, if there is one."""
        if self.released:
            return None
        base, size = self.weights.data_ptr(), self.weights.element_size()
        for slot, member in zip(self.flat.slots, self.members, strict=True):
            if slot.stop > slot.start and member.parameter.data_ptr() != base + slot.start * size:
                return member.layout.name
        return None

    def release(self) -> None:
        """Free the gathered weights and keep the shard. Until ``show``, parameters read as NaN."""
        if not self.released:
            self._point_parameters_at(self._placeholders)
            # A storage that numpy has seen (``weight.numpy()`` on a CPU) can never be emptied.
            if (self.lent and self._has_other_views()) or not self.weights.untyped_storage().resizable():
                self.weights, self._views = torch.empty_like(self.weights), []
            # The storage is emptied, not dropped: tensors that autograd saved for backward are views of it.
            self.weights.untyped_storage().resize_(0)
            self.released, self.lent = True, False

    def restore(self, axis: AllGather) -> Pending:
        """Start gathering the released weights. Call ``show`` when the gather has ended."""
        self.weights.untyped_storage().resize_(self.flat.numel * self.weights.element_size())
        self.released = False
        if axis.size == 1:
            self.weights.copy_(self.shard)
            return Done()
        return axis.all_gather(self.weights, self.shard.to(self._device), async_op=True)

    def show(self) -> None:
        """Make the parameters views of the gathered weights."""
        self.memory.evict(self.shard)
        self._views = self._views or self._views_of(self.weights)
        self._point_parameters_at(self._views)
        self.note_versions()

    def note_versions(self) -> None:
        """Remember the versions of the gathered parameters, for ``written``."""
        self._versions = [member.parameter._version for member in self.members]

    def written(self, exact: bool) -> str | None:
        """Return the name of a parameter that was written in place since it was gathered, if there is one.

        A write through ``.data`` raises no version. It is found by its values, in the run number 1, 2, 4, 8, ...

        Args:
            exact: True if the gathered weights equal the shards bit by bit.
        """
        for member, version in zip(self.members, self._versions, strict=True):
            if member.parameter._version != version:
                return member.layout.name
        self._checks += 1
        comparable = exact and not self.weights.is_meta and self.memory.place(self.shard) == "none"
        if not comparable or self._checks & (self._checks - 1):
            return None
        return self._unlike(self.weights[slice(*self.owned)], self.shard)

    def differs_from_master(self) -> str | None:
        """Return the name of a parameter that is not its master, rounded, if there is one in the owned range."""
        if self.master is None or not self.master_is_copy or self.memory.place(self.master) != "none":
            return None
        return None if self.shard.is_meta else self._unlike(self.shard, self.master.detach().to(self.shard.dtype))

    def _unlike(self, values: Tensor, expected: Tensor) -> str | None:
        """Return the name of a parameter of the owned range whose values are not the expected ones, if there is one."""
        if torch.equal(values, expected):
            return None
        start, stop = self.owned
        for slot, member in zip(self.flat.slots, self.members, strict=True):
            low, high = max(slot.start, start) - start, min(slot.stop, stop) - start
            if low < high and not torch.equal(values[low:high], expected[low:high]):
                return member.layout.name if bool(expected[low:high].isfinite().all()) else None
        return None

    def _has_other_views(self) -> bool:
        """Return True if a tensor that is not this bucket's, such as one of a ``state_dict()``, views the weights."""
        storage = self.weights.untyped_storage()
        # Its own users: the variable ``storage``, ``weights`` and ``_views``.
        return storage_users(storage) > 2 + len(self._views)

    def _views_of(self, flat: Tensor) -> list[Tensor]:
        return [
            flat[slot.start : slot.stop].view(member.parameter.shape)
            for slot, member in zip(self.flat.slots, self.members, strict=True)
        ]

    def _point_parameters_at(self, views: Sequence[Tensor]) -> None:
        gone = self.partitioned and views is self._placeholders
        for member, view in zip(self.members, views, strict=True):
            parameter: Any = member.parameter
            if type(parameter) is ReleasedParameter:
                parameter.__class__ = nn.Parameter  # type: ignore[assignment]
            parameter.data = view  # keeps the Parameter object, and all that refers to it
            if gone and type(parameter) is nn.Parameter:
                parameter.__class__ = ReleasedParameter
        if self.partitioned:
            for member in self.members:
                set_released(member.parameter, gone)
                if self.release_hook is not None:
                    self.release_hook(member.parameter, gone)
