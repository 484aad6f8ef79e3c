"""The optimizer's step in sub-groups: only one of them is in memory, while the next is prefetched.

A sub-group is a number of elements, of one or several buckets. Rajbhandari et al. 2021 (ZeRO-Infinity), section 5.
State in fewer bits (``stored_state.py``) has full precision within the step of its sub-group only.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .bucket import Bucket
from .flat import BLOCK
from .late_parameters import LateParameters, Numbers
from .optimizer_state import Groups, copied, in_training, is_elementwise, worker_of
from .protocols import MakeOptimizer
from .stored_state import StoredState, stored_state


class BucketPiece(NamedTuple):
    """Elements ``start`` to ``stop`` of the range that this rank owns of a bucket.

    ``parameter``: the parameter that the piece is of, if it has numbers of its own (``LateParameters``).
    """

    bucket: Bucket
    start: int
    stop: int
    parameter: Tensor | None = None


def sub_groups(buckets: Sequence[Bucket], size: int) -> Iterator[list[BucketPiece]]:
    """Cut and join the owned ranges to sub-groups of ``size`` elements; the last one may be smaller.

    If state is kept in fewer bits, sub-groups are whole blocks: of codes, and for kernels, which round the elements
    behind the last full vector otherwise.
    A tied bucket has sub-groups of its own, which are cut equally on each of its stages: kernels round an element by
    its place in a tensor, and ties must stay equal bit by bit.
    """
    pieces: list[BucketPiece] = []
    if any(bucket.state is not None for bucket in buckets):
        size = max(BLOCK, size // BLOCK * BLOCK)
    room = size
    before: Bucket | None = None
    for bucket in buckets:
        if pieces and before is not None and (before.tie, bucket.tie) != (None, None):
            yield pieces
            pieces, room = [], size
        before = bucket
        start, end = 0, bucket.owned[1] - bucket.owned[0]
        while start < end:
            stop = min(end, start + room)
            pieces.append(BucketPiece(bucket, start, stop))
            room -= stop - start
            start = stop
            if not room:
                yield pieces
                pieces, room = [], size
    if pieces:
        yield pieces


class SubGroups:
    """Steps one sub-group after the other with an optimizer's own ``step``, on views of masters and state.

    LAMB and Muon combine the shards of a layer, so that all replicas step the same layers together: for them a
    sub-group is a bucket.

    Args:
        make: makes the optimizer from parameter groups.
        buckets: the trained buckets of this rank.
        groups: the options of each parameter group.

    Attributes:
        optimizer: the optimizer that schedulers and users see. It has all fp32 master weights of this rank and their
            state. Its own ``step`` runs after all sub-groups, without gradients: it updates no weight, but counts the
            step and runs the optimizer's hooks.
        state_of: the elementwise state of each bucket by key, each a tensor of the bucket's elements on this rank.
        stored: in place of that, state in fewer bits.
        late: step counts of parameters that some steps left out; None if they have no counts of their own.
    """

    def __init__(self, make: MakeOptimizer, buckets: Sequence[Bucket], groups: Sequence[dict[str, Any]]) -> None:
        self._make, self._buckets = make, buckets
        memory = buckets[0].memory
        self.late: LateParameters | None = None
        masters = {bucket: bucket.master for bucket in buckets if bucket.master is not None}

        def grouped(parameters: dict[Bucket, Any]) -> Groups:
            chosen = [[parameters[b] for b in buckets if b.group == i] for i in range(len(groups))]
            return [{**options, "params": some} for options, some in zip(groups, chosen, strict=True)]

        # Some optimizers allocate their state at once: they are made over masters without elements. A trial step on two
        # elements of each master tells which tensors the state will have; these are allocated before the first step.
        values = {bucket: master.data for bucket, master in masters.items()}
        for master in masters.values():
            master.grad, master.data = None, master.data[:0]
        self.optimizer = _fused(make(grouped(masters)))
        self.optimizer.state.clear()
        self._layerwise = getattr(self.optimizer, "layerwise", False)
        if self._layerwise:
            self._groups = [[BucketPiece(bucket, 0, bucket.owned_numel)] for bucket in buckets]
        else:
            self._groups = list(sub_groups(buckets, memory.offload.sub_group_size))
        for bucket, master in masters.items():
            master.data = values[bucket]
        self.state_of: dict[Bucket, dict[str, Tensor]] = {bucket: {} for bucket in masters}
        self.stored: dict[Bucket, dict[str, StoredState]] = {bucket: {} for bucket in masters}
        if self._layerwise:  # no two elements are a layer: state is allocated in the first step
            return
        samples = {bucket: nn.Parameter(master.new_ones(2)) for bucket, master in masters.items()}
        for sample in samples.values():
            sample.grad = torch.zeros_like(sample)
        trial = in_training(_fused(make(grouped(samples))))
        trial.step()
        for bucket, sample in samples.items():
            for key, value in trial.state[sample].items():
                if is_elementwise(value, sample):
                    self._allocate(bucket, key, value.dtype)

    def clear(self) -> None:
        """Set all state to zero, as before the first step."""
        for stored in (each for of_bucket in self.stored.values() for each in of_bucket.values()):
            stored.clear()
        for bucket, tensors in self.state_of.items():
            for tensor in tensors.values():
                tensor.zero_()
                bucket.memory.evict(tensor)

    def unpacked(self, master: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield key and value, at full precision, of the state in fewer bits of a master, if it has any."""
        for bucket, of_bucket in self.stored.items():
            for key, stored in of_bucket.items() if bucket.master is master else ():
                if stored.filled:
                    yield key, stored.read(0, bucket.owned_numel)

    def loaded(self, bucket: Bucket, key: str, dtype: torch.dtype, state: dict[str, Any]) -> Tensor:
        """Return a tensor for a bucket's state under a key, to be filled and then given to ``keep``.

        Args:
            bucket: the bucket.
            key: key of the state.
            dtype: dtype of the tensor, if it is made here.
            state: the optimizer's state of the master, which gets the tensor, but no state in fewer bits.
        """
        self._allocate(bucket, key, dtype)
        if (stored := self.stored[bucket].get(key)) is not None:
            return stored.read(0, bucket.owned_numel)
        state[key] = self.state_of[bucket][key]
        return self.state_of[bucket][key]

    def tensors_of(self, bucket: Bucket) -> list[Tensor]:
        """Return the tensors that hold the state of a bucket."""
        packed = [tensor for stored in self.stored[bucket].values() for tensor in stored.tensors()]
        return [*self.state_of[bucket].values(), *packed]

    def step(self, scale: float, without: Collection[Tensor]) -> None:
        """Scale the gradients, and step the masters and shards. The new weights are not sent to other replicas."""
        standing_in = {} if self.late is None else self.late.find(self._buckets, without)
        frozen = {bucket: bucket.frozen(without) for bucket in self._buckets}
        numbers: dict[tuple[Bucket, Tensor | None], Numbers] = {}  # state that is not elementwise, after the step
        for index, pieces in enumerate(self._groups):
            for piece in self._groups[index + 1] if index + 1 < len(self._groups) else ():
                piece.bucket.memory.prefetch(*self._tensors(piece))
            self._step([part for piece in pieces for part in self._cut(piece, standing_in)], scale, frozen, numbers)
            for piece in pieces:
                piece.bucket.memory.evict(*self._tensors(piece))
        for (bucket, parameter), values in numbers.items():
            assert bucket.master is not None
            flat = self.optimizer.state[bucket.master]
            flat.update(self.state_of[bucket])
            if parameter is None:
                flat.update(values)
                continue
            assert self.late is not None
            self.late.numbers[parameter] = values
            for key, value in values.items():
                flat.setdefault(key, copied(value))  # no parameter of this bucket has the common number
        self.optimizer.step()

    def _cut(self, piece: BucketPiece, standing_in: Mapping[Bucket, set[Tensor]]) -> Iterator[BucketPiece]:
        """Cut a piece where parameters have numbers of their own, and leave out those that the step leaves out.

        A rank that owns no element of such a parameter has an empty piece, with the bucket's first: numbers are equal
        on all ranks.
        """
        bucket, first, last, _ = piece
        if self.late is None or bucket not in standing_in:
            yield piece
            return
        for parameter, start, stop in self.late.cut(bucket, standing_in[bucket]):
            if bucket.state is not None:  # with the padding behind it, whole blocks
                stop = start + -(-(stop - start) // BLOCK) * BLOCK
            low, high = max(start, first), min(stop, last)
            if low < high or (start == stop and first == 0):
                yield BucketPiece(bucket, low, max(low, high), parameter)

    def _step(
        self,
        pieces: Sequence[BucketPiece],
        scale: float,
        frozen: dict[Bucket, list[tuple[int, int]]],
        numbers: dict[tuple[Bucket, Tensor | None], Numbers],
    ) -> None:
        # Fused kernels do not take tensors with and without state together.
        before = [(piece, self._numbers(piece)) for piece in pieces]
        for begun in (False, True):
            alike = [pair for pair in before if (pair[1] is not None) is begun]
            if alike:
                self._step_alike(alike, scale, frozen, numbers)

    def _numbers(self, piece: BucketPiece) -> Numbers | None:
        """Return a copy of the state of a piece that is one number; None if the piece has no state yet.

        A step counter must not count the pieces of one step.
        """
        master, state = piece.bucket.master, self.optimizer.state
        assert master is not None
        if self.late is not None:
            numbers = self.late.numbers_of(piece.bucket, piece.parameter)
        else:
            numbers = state.get(master)
        if numbers is None:
            return None
        return {key: copied(value) for key, value in numbers.items() if not is_elementwise(value, master)}

    def _step_alike(
        self,
        before: Sequence[tuple[BucketPiece, Numbers | None]],
        scale: float,
        frozen: dict[Bucket, list[tuple[int, int]]],
        numbers: dict[tuple[Bucket, Tensor | None], Numbers],
    ) -> None:
        """Step pieces that all have state, or all have none; ``before`` has each with its numbers before the step."""
        pieces = [piece for piece, _ in before]
        chosen: list[list[nn.Parameter]] = [[] for _ in self.optimizer.param_groups]
        parts: list[nn.Parameter] = []
        state: dict[Tensor, dict[str, Any]] = defaultdict(dict)
        kept: list[tuple[Tensor, Tensor]] = []
        for (bucket, start, stop, _), own_numbers in before:
            assert bucket.master is not None and bucket.group is not None
            gradient = bucket.owned_gradient[start:stop]
            if scale != 1.0:
                gradient.mul_(scale)
            part = nn.Parameter(bucket.master.detach()[start:stop])
            part.grad = gradient.to(part.device)
            if own_numbers is not None:
                flat = self.optimizer.state[bucket.master]
                tensors = {k: v[start:stop] for k, v in flat.items() if is_elementwise(v, bucket.master)}
                state[part] = {**own_numbers, **tensors}
                for key, stored in self.stored[bucket].items():
                    if stored.filled:
                        state[part][key] = stored.read(start, stop)
            chosen[bucket.group].append(part)
            parts.append(part)
        groups = [{**g, "params": some} for g, some in zip(self.optimizer.param_groups, chosen, strict=True)]
        if not state:
            state.update(self._make(groups).state)  # state that some optimizers make at once
        for (bucket, start, stop, _), part in zip(pieces, parts, strict=True):
            elements = [part.detach(), *(v for v in state[part].values() if is_elementwise(v, part))]
            for a, b in frozen[bucket]:
                low, high = max(a, start) - start, min(b, stop) - start
                kept += [(tensor[low:high], tensor[low:high].clone()) for tensor in elements if low < high]
                if low < high:
                    part.detach()[low:high].zero_()  # so that decay makes nothing of state that this step makes
        worker: Any = worker_of(self.optimizer, groups, state)
        if self._layerwise:
            worker.layers = worker.layers.under_names({p: piece.bucket for piece, p in zip(pieces, parts, strict=True)})
        worker.step()
        for tensor, values in kept:
            tensor.copy_(values)
        for (bucket, start, stop, parameter), part in zip(pieces, parts, strict=True):
            own = numbers[bucket, parameter] = {}
            for key, value in worker.state[part].items():
                known = key in self.state_of[bucket] or key in self.stored[bucket]
                if is_elementwise(value, part) and (known or part.numel() != 1):
                    self.keep(bucket, key, value, start)
                else:
                    own[key] = value
            bucket.update(start, stop)

    def keep(self, bucket: Bucket, key: str, value: Tensor, start: int = 0) -> None:
        """Store a piece of an optimizer state, unless the optimizer has updated the stored memory in place.

        Args:
            bucket: the bucket of the piece.
            key: key of the state.
            value: (n,), the state after the step.
            start: first element of the piece in the owned range.
        """
        self._allocate(bucket, key, value.dtype)
        if (stored := self.stored[bucket].get(key)) is not None:
            stored.write(start, value)
            return
        target = self.state_of[bucket][key][start : start + value.numel()]
        if target.data_ptr() != value.data_ptr():
            target.copy_(value)

    def _allocate(self, bucket: Bucket, key: str, dtype: torch.dtype) -> None:
        """Allocate the state of a key, if there is none."""
        memory = bucket.memory.states
        if bucket.state is not None and dtype.is_floating_point:
            if key not in self.stored[bucket]:
                self.stored[bucket][key] = stored_state(bucket.state, key, bucket.owned_numel, dtype, memory)
        elif key not in self.state_of[bucket]:
            self.state_of[bucket][key] = memory.zeros(bucket.owned_numel, dtype)

    def _tensors(self, piece: BucketPiece) -> list[Tensor]:
        """Return the tensors that the update of a piece reads or writes."""
        bucket, start, stop, _ = piece
        assert bucket.master is not None
        flat = [bucket.owned_gradient, bucket.master.detach(), bucket.shard, *self.state_of[bucket].values()]
        packed = [tensor for stored in self.stored[bucket].values() for tensor in stored.tensors()]
        return [*(tensor[start:stop] for tensor in flat), *packed]


def _fused(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Choose torch's fused kernel (one pass over memory, no temporaries) if there is one and the user chose none."""
    for group in optimizer.param_groups:
        chosen = group.get("foreach") is not None or group.get("capturable") or group.get("differentiable")
        complex_numbers = any(parameter.is_complex() for parameter in group["params"])  # no fused kernel takes them
        if "fused" in group and group["fused"] is None and not chosen and not complex_numbers:
            group["fused"] = True
    return optimizer
