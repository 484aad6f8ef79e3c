"""The optimizer's step in portions, so that no more than one of them is in memory, and the next on its way.

A sub-group is a number of elements, whatever buckets they lie in. Rajbhandari et al. 2021 (ZeRO-Infinity), section 5.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from .buckets import Bucket

if TYPE_CHECKING:
    from .optimizer import MakeOptimizer

Groups = list[dict[str, Any]]


class Piece(NamedTuple):
    """Elements ``start`` to ``stop`` of the range that this rank owns of a bucket."""

    bucket: Bucket
    start: int
    stop: int


def sub_groups(buckets: Sequence[Bucket], size: int) -> Iterator[list[Piece]]:
    """The owned ranges cut and put together to ``size`` elements each; the last one may be smaller."""
    pieces: list[Piece] = []
    room = size
    for bucket in buckets:
        start, end = 0, bucket.owned[1] - bucket.owned[0]
        while start < end:
            stop = min(end, start + room)
            pieces.append(Piece(bucket, start, stop))
            room -= stop - start
            start = stop
            if not room:
                yield pieces
                pieces, room = [], size
    if pieces:
        yield pieces


class SubGroups:
    """Steps one sub-group after the other, with an optimizer's own ``step``, on views of masters and state.

    ``optimizer`` is what schedulers and users see: over the whole masters, with the whole state. Its own ``step`` is
    called once a step, when there is nothing left to do: it counts, and runs its hooks.

    Args:
        make: makes the optimizer from parameter groups.
        buckets: of this rank, those that are trained.
        groups: the options of each parameter group.
    """

    def __init__(self, make: MakeOptimizer, buckets: Sequence[Bucket], groups: Sequence[dict[str, Any]]) -> None:
        self._make, self._buckets = make, buckets
        memory = buckets[0].memory
        self._groups = list(sub_groups(buckets, memory.offload.sub_group))
        masters = {bucket: bucket.master for bucket in buckets if bucket.master is not None}

        def grouped(parameters: dict[Bucket, Any]) -> Groups:
            chosen = [[parameters[b] for b in buckets if b.group == i] for i in range(len(groups))]
            return [{**options, "params": some} for options, some in zip(groups, chosen, strict=True)]

        # Some optimizers make their state at once: they see masters without elements, and two elements of each
        # tell which tensors the state will have, so that there is room for them before the first step.
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
        trial = _fused(make(grouped(samples)))
        trial.step()
        self.rooms: dict[Bucket, dict[str, Tensor]] = {
            bucket: {
                key: bucket.memory.states.zeros(masters[bucket].numel(), value.dtype)
                for key, value in trial.state[sample].items()
                if isinstance(value, Tensor) and value.shape == sample.shape
            }
            for bucket, sample in samples.items()
        }

    def step(self, scale: float, without: Collection[Tensor]) -> None:
        """See ``RangeStepper.step``, but for the sharing of the result."""
        still = {bucket: bucket.frozen(without) for bucket in self._buckets}
        rest: dict[Bucket, dict[str, Any]] = {}  # of the state, what is not one number an element
        for index, pieces in enumerate(self._groups):
            for piece in self._groups[index + 1] if index + 1 < len(self._groups) else ():
                piece.bucket.memory.ahead(*self._tensors(piece))
            self._step(pieces, scale, still, rest)
            for piece in pieces:
                piece.bucket.memory.behind(*self._tensors(piece))
        for bucket, values in rest.items():
            assert bucket.master is not None
            self.optimizer.state[bucket.master] = {**values, **self.rooms[bucket]}
        self.optimizer.step()

    def _step(
        self,
        pieces: Sequence[Piece],
        scale: float,
        still: dict[Bucket, list[tuple[int, int]]],
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
                whole = isinstance(value, Tensor) and value.shape == bucket.master.shape
                # What counts steps must not count the pieces of one.
                state[part][key] = value[start:stop] if whole else _copy(value)
            elements = [part.detach(), *(v for v in state[part].values() if _alike(v, part))]
            for a, b in still[bucket]:
                low, high = max(a, start) - start, min(b, stop) - start
                kept += [(tensor[low:high], tensor[low:high].clone()) for tensor in elements if low < high]
                if low < high:
                    part.detach()[low:high].zero_()  # so that decay makes nothing of state that this step makes
            chosen[bucket.group].append(part)
            parts.append(part)
        groups = [{**g, "params": some} for g, some in zip(self.optimizer.param_groups, chosen, strict=True)]
        if not state:
            state.update(self._make(groups).state)  # what some optimizers make at once, of these elements
        worker = _worker(self.optimizer, groups, state)
        worker.step()
        for tensor, before in kept:
            tensor.copy_(before)
        for (bucket, start, stop), part in zip(pieces, parts, strict=True):
            rest[bucket] = {}
            for key, value in worker.state[part].items():
                if _alike(value, part) and (key in self.rooms[bucket] or part.numel() > 1):
                    self._keep(bucket, key, value, start, stop)
                else:
                    rest[bucket][key] = value
            bucket.update(start, stop)

    def _keep(self, bucket: Bucket, key: str, value: Tensor, start: int, stop: int) -> None:
        """Put a piece of the state where it belongs, if it is not there: it is new, or was loaded, or replaced."""
        rooms = self.rooms[bucket]
        if key not in rooms:
            rooms[key] = bucket.memory.states.zeros(bucket.owned[1] - bucket.owned[0], value.dtype)
        home = rooms[key][start:stop]
        if home.data_ptr() != value.data_ptr():
            home.copy_(value)

    def _tensors(self, piece: Piece) -> list[Tensor]:
        """What a piece's update touches."""
        bucket, start, stop = piece
        assert bucket.master is not None
        flat = [bucket.owned_gradient, bucket.master.detach(), bucket.shard, *self.rooms[bucket].values()]
        return [tensor[start:stop] for tensor in flat]


def _worker(optimizer: torch.optim.Optimizer, groups: Groups, state: Any) -> torch.optim.Optimizer:
    """The same optimizer, over other parameters: without what counts and listens to the first one's steps."""
    worker: torch.optim.Optimizer = object.__new__(type(optimizer))
    vars(worker).update({key: value for key, value in vars(optimizer).items() if key != "step"})
    worker._optimizer_step_pre_hooks, worker._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
    worker.param_groups, worker.state = groups, state
    return worker


def _fused(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Take torch's fused kernel (one pass over memory, no temporaries) where there is one and nobody chose."""
    for group in optimizer.param_groups:
        chosen = group.get("foreach") is not None or group.get("capturable") or group.get("differentiable")
        if "fused" in group and group["fused"] is None and not chosen:
            group["fused"] = True
    return optimizer


def _alike(value: Any, part: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == part.shape


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value
