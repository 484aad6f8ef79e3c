"""The optimizer's step in sub-groups: only one of them is in memory, while the next is prefetched.

A sub-group is a number of elements, of one or several buckets. Rajbhandari et al. 2021 (ZeRO-Infinity), section 5.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .bucket import Bucket
from .protocols import MakeOptimizer

Groups = list[dict[str, Any]]


class BucketPiece(NamedTuple):
    """Elements ``start`` to ``stop`` of the range that this rank owns of a bucket."""

    bucket: Bucket
    start: int
    stop: int


def sub_groups(buckets: Sequence[Bucket], size: int) -> Iterator[list[BucketPiece]]:
    """Cut and join the owned ranges to sub-groups of ``size`` elements; the last one may be smaller.

    A tied bucket has sub-groups of its own, which are cut equally on each of its stages: kernels round an element by
    its place in a tensor, and ties must stay equal bit by bit.
    """
    pieces: list[BucketPiece] = []
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

    Args:
        make: makes the optimizer from parameter groups.
        buckets: the trained buckets of this rank.
        groups: the options of each parameter group.

    Attributes:
        optimizer: the optimizer that schedulers and users see. It has all fp32 master weights of this rank and their
            state. Its own ``step`` runs after all sub-groups, without gradients: it updates no weight, but counts the
            step and runs the optimizer's hooks.
        state_of: the elementwise state of each bucket by key, each a tensor of the bucket's elements on this rank.
    """

    def __init__(self, make: MakeOptimizer, buckets: Sequence[Bucket], groups: Sequence[dict[str, Any]]) -> None:
        self._make, self._buckets = make, buckets
        memory = buckets[0].memory
        self._groups = list(sub_groups(buckets, memory.offload.sub_group_size))
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
        for bucket, master in masters.items():
            master.data = values[bucket]
        samples = {bucket: nn.Parameter(master.new_ones(2)) for bucket, master in masters.items()}
        for sample in samples.values():
            sample.grad = torch.zeros_like(sample)
        trial = in_training(_fused(make(grouped(samples))))
        trial.step()
        self.state_of: dict[Bucket, dict[str, Tensor]] = {
            bucket: {
                key: bucket.memory.states.zeros(masters[bucket].numel(), value.dtype)
                for key, value in trial.state[sample].items()
                if is_elementwise(value, sample)
            }
            for bucket, sample in samples.items()
        }

    def step(self, scale: float, without: Collection[Tensor]) -> None:
        """Scale the gradients, and step the masters and shards. The new weights are not sent to other replicas."""
        frozen = {bucket: bucket.frozen(without) for bucket in self._buckets}
        rest: dict[Bucket, dict[str, Any]] = {}  # state that is not elementwise
        for index, pieces in enumerate(self._groups):
            for piece in self._groups[index + 1] if index + 1 < len(self._groups) else ():
                piece.bucket.memory.prefetch(*self._tensors(piece))
            self._step(pieces, scale, frozen, rest)
            for piece in pieces:
                piece.bucket.memory.evict(*self._tensors(piece))
        for bucket, values in rest.items():
            assert bucket.master is not None
            self.optimizer.state[bucket.master] = {**values, **self.state_of[bucket]}
        self.optimizer.step()

    def _step(
        self,
        pieces: Sequence[BucketPiece],
        scale: float,
        frozen: dict[Bucket, list[tuple[int, int]]],
        rest: dict[Bucket, dict[str, Any]],
    ) -> None:
        chosen: list[list[nn.Parameter]] = [[] for _ in self.optimizer.param_groups]
        parts: list[nn.Parameter] = []
        state: dict[Tensor, dict[str, Any]] = defaultdict(dict)
        kept: list[tuple[Tensor, Tensor]] = []
        for bucket, start, stop in pieces:
            assert bucket.master is not None and bucket.group is not None
            gradient = bucket.owned_gradient[start:stop]
            if scale != 1.0:
                gradient.mul_(scale)
            part = nn.Parameter(bucket.master.detach()[start:stop])
            part.grad = gradient.to(part.device)
            for key, value in self.optimizer.state.get(bucket.master, {}).items():
                whole = is_elementwise(value, bucket.master)
                # A step counter is copied: it must not count the pieces of one step.
                state[part][key] = value[start:stop] if whole else copied(value)
            chosen[bucket.group].append(part)
            parts.append(part)
        groups = [{**g, "params": some} for g, some in zip(self.optimizer.param_groups, chosen, strict=True)]
        if not state:
            state.update(self._make(groups).state)  # state that some optimizers make at once
        for (bucket, start, stop), part in zip(pieces, parts, strict=True):
            elements = [part.detach(), *(v for v in state[part].values() if is_elementwise(v, part))]
            for a, b in frozen[bucket]:
                low, high = max(a, start) - start, min(b, stop) - start
                kept += [(tensor[low:high], tensor[low:high].clone()) for tensor in elements if low < high]
                if low < high:
                    part.detach()[low:high].zero_()  # so that decay makes nothing of state that this step makes
        worker = worker_of(self.optimizer, groups, state)
        worker.step()
        for tensor, before in kept:
            tensor.copy_(before)
        for (bucket, start, stop), part in zip(pieces, parts, strict=True):
            rest[bucket] = {}
            for key, value in worker.state[part].items():
                if is_elementwise(value, part) and (key in self.state_of[bucket] or part.numel() > 1):
                    self._keep(bucket, key, value, start, stop)
                else:
                    rest[bucket][key] = value
            bucket.update(start, stop)

    def _keep(self, bucket: Bucket, key: str, value: Tensor, start: int, stop: int) -> None:
        """Copy a piece of an optimizer state to ``state_of``, unless the optimizer has updated that memory in place.

        Args:
            bucket: the bucket of the piece.
            key: key of the state.
            value: (stop - start,), the state after the step.
            start, stop: the piece's range in the owned range.
        """
        made = self.state_of[bucket]
        if key not in made:
            made[key] = bucket.memory.states.zeros(bucket.owned[1] - bucket.owned[0], value.dtype)
        target = made[key][start:stop]
        if target.data_ptr() != value.data_ptr():
            target.copy_(value)

    def _tensors(self, piece: BucketPiece) -> list[Tensor]:
        """Return the tensors that the update of a piece reads or writes."""
        bucket, start, stop = piece
        assert bucket.master is not None
        flat = [bucket.owned_gradient, bucket.master.detach(), bucket.shard, *self.state_of[bucket].values()]
        return [tensor[start:stop] for tensor in flat]


def worker_of(optimizer: torch.optim.Optimizer, groups: Groups, state: Any) -> torch.optim.Optimizer:
    """Return a copy of an optimizer over other parameters, without its step hooks and its step counter."""
    worker: torch.optim.Optimizer = object.__new__(type(optimizer))
    vars(worker).update({key: value for key, value in vars(optimizer).items() if key != "step"})
    worker._optimizer_step_pre_hooks, worker._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
    worker.param_groups, worker.state = groups, state
    return worker


def _fused(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Choose torch's fused kernel (one pass over memory, no temporaries) if there is one and the user chose none."""
    for group in optimizer.param_groups:
        chosen = group.get("foreach") is not None or group.get("capturable") or group.get("differentiable")
        complex_numbers = any(parameter.is_complex() for parameter in group["params"])  # no fused kernel takes them
        if "fused" in group and group["fused"] is None and not chosen and not complex_numbers:
            group["fused"] = True
    return optimizer


def in_training(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Switch an optimizer to its train mode, if it has modes, as schedule-free ones do; return it."""
    if callable(train := getattr(optimizer, "train", None)):
        train()
    return optimizer


def is_elementwise(value: Any, master: Tensor) -> bool:
    """Return True if a state value has one number for each element of a stepped tensor."""
    return isinstance(value, Tensor) and value.dim() > 0 and value.shape == master.shape


def is_number(value: Any, master: Tensor) -> bool:
    """Return True if a state value is one number for the whole stepped tensor, such as a count of steps."""
    return not isinstance(value, Tensor) or (value.numel() == 1 and not is_elementwise(value, master))


def copied(value: Any) -> Any:
    """Return a copy of a number of an optimizer's state."""
    return value.clone() if isinstance(value, Tensor) else value
