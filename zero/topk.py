"""Top-k sparsification with error feedback: the largest elements travel now, the others add up until they do.

Lin et al. 2018, Deep Gradient Compression (arXiv:1712.01887): momentum correction (section 3.1), local gradient
clipping (3.2), momentum factor masking and warm-up (3.3). For each tensor of two dims and more, on replica k of N:

    g <- g * min(1, clip / sqrt(N) / |g|)       |g| over all tensors of the replica
    u <- m u + g,   v <- v + u
    the k elements of v that are largest in magnitude are sent; there u and v become 0
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..grid import Axis, Grid
from .compressor import Compressor, Kind, Rest, flats, packed, packed_bytes, places, rooms, unpacked
from .flat import RUNS, SHARDED
from .norm import clip_coefficient, square

if TYPE_CHECKING:
    from .buckets import Bucket

_FIRST = 0.25  # the density that a warm-up begins with: 75 % sparse


@dataclass(frozen=True)
class TopK:
    """Sends the share ``ratio`` of each tensor, with its places; the rest stays in a residual and adds up.

    Attributes:
        ratio: of the elements of a tensor, above 0 and at most 1; one element at the least.
        momentum: m of momentum correction, for SGD, whose own momentum is then 0.
        clip: the longest gradient, of which each replica's may be 1/sqrt(N); 0: no limit.
        warmup_steps: in which the share falls from 0.25 to ``ratio``, by the same factor each step.
        start_step: steps before that in which everything is summed.
        values: dtype in which values travel; None: the gradients'. What rounding loses stays in the residual.

    Raises:
        ValueError: one of them cannot be.
    """

    ratio: float = 0.01
    momentum: float = 0.0
    clip: float = 0.0
    warmup_steps: int = 0
    start_step: int = 0
    values: torch.dtype | None = None

    def __post_init__(self) -> None:
        if not 0 < self.ratio <= 1:
            raise ValueError(f"ratio is the share of elements that travel, above 0 and at most 1, not {self.ratio}")
        if not 0 <= self.momentum < 1:
            raise ValueError(f"momentum is at least 0 and below 1, not {self.momentum}")
        if not 0 <= self.clip < math.inf:
            raise ValueError(f"clip is the longest gradient, or 0 for no limit, not {self.clip}")
        if self.warmup_steps < 0 or self.start_step < 0:
            raise ValueError(
                f"warmup_steps and start_step are numbers of steps, not {self.warmup_steps}, {self.start_step}"
            )
        if self.values not in (None, torch.float32, torch.float16, torch.bfloat16):
            raise ValueError(f"values travel in float32, float16 or bfloat16, not {self.values}")

    def density(self, step: int) -> float | None:
        """The share that is sent in a step, counted from 0; None: everything is summed."""
        done = step - self.start_step
        if done < 0:
            return None
        if done >= self.warmup_steps or self.ratio >= _FIRST:
            return self.ratio
        return float(_FIRST * (self.ratio / _FIRST) ** (done / self.warmup_steps))

    def __call__(self, grid: Grid, buckets: Sequence[Bucket]) -> TopKExchange:
        """The ``Exchange`` of these buckets."""
        return TopKExchange(self, grid, buckets)


def require_no_momentum(momentum: float, optimizer: torch.optim.Optimizer) -> None:
    """Momentum correction is SGD's momentum: the optimizer's own, on top of it, would be a second one.

    Raises:
        ValueError: it has one.
    """
    own = max((float(group.get("momentum", 0.0)) for group in optimizer.param_groups), default=0.0)
    if not isinstance(optimizer, torch.optim.SGD) or own:
        raise ValueError(
            f"momentum {momentum} of top-k takes the place of SGD's own, and the optimizer is "
            f"{type(optimizer).__name__}{f' with momentum {own}' if own else ''}: use torch.optim.SGD without "
            "momentum, or leave top-k's out"
        )


class TopKExchange(Compressor):
    """What ``TopK`` makes. Selection is by tensor, as in the paper: the same on every grid but for tensor shards."""

    def __init__(self, options: TopK, grid: Grid, buckets: Sequence[Bucket]) -> None:
        super().__init__(grid, buckets)
        self._options, self._tensor = options, grid.tensor
        every = places(buckets)
        self._places = [p for p in every if p.member.parameter.dim() > 1 and p.start < p.stop]
        compressed = set(self._places)
        self._others = [place for place in every if place not in compressed]
        self._kinds = [Kind.of(buckets, number) for number in range(len(buckets))]  # a message for each that differs
        self._rest, self._all = Rest(grid.data, buckets, self._places), Rest(grid.data, buckets, ())
        self._residual = rooms(buckets, self._places)
        self._velocity = rooms(buckets, every) if options.momentum else []
        self._replica: Axis | None = None  # the ranks of one replica, whose gradients have one norm
        if options.clip:
            self._replica = grid.joint("pipe", "tensor")
        self._sent = 0.0

    def gradients(self, buckets: Sequence[Bucket]) -> None:
        """See ``Exchange``."""
        own = flats(buckets)
        density = self._options.density(self.steps)
        self.steps += 1
        if self._replica is not None:
            self._clip(buckets, own, self._replica)
        summed = self._others if density is not None else [*self._others, *self._places]
        for place in summed if self._velocity else ():
            here = place.of(own)
            here.copy_(place.of(self._velocity).mul_(self._options.momentum).add_(here))
        if density is None:
            self._all.start(own)
            self._all.finish(own)
            self._sent = self._all.formula()
            return
        self._rest.start(own)
        chosen = self._select(own, density)
        self._sent = self._rest.formula()
        for kind in dict.fromkeys(self._kinds[number] for number in chosen):
            mine = {number: indices for number, indices in chosen.items() if self._kinds[number] == kind}
            self._exchange(own, mine, kind.dtype)
        self._rest.finish(own)

    def state(self) -> Mapping[str, Sequence[Tensor]]:
        """``residual``, v of the paper; and with momentum ``velocity``, its u."""
        return {"residual": self._residual, **({"velocity": self._velocity} if self._velocity else {})}

    def formula(self) -> float:
        """N - 1 messages of 4 bytes and a value for each element that is sent; and the sum of the rest."""
        return self._sent

    def _clip(self, buckets: Sequence[Bucket], own: Sequence[Tensor], replica: Axis) -> None:
        """This replica's share of the norm's limit: section 3.2. An element counts once of those that hold it."""
        parts = [
            square(flat[slice(*bucket.flat.runs[run])])
            for bucket, flat in zip(buckets, own, strict=True)
            for run in RUNS
            if bucket.counted and (run == SHARDED or self._tensor.is_first)
        ]
        total = torch.stack(parts).sum() if parts else torch.zeros((), dtype=torch.float64, device=self.device)
        replica.all_reduce(total)
        if own:
            torch._foreach_mul_(list(own), clip_coefficient(total.sqrt(), self._options.clip / self.axis.size**0.5))

    def _select(self, own: Sequence[Tensor], density: float) -> dict[int, Tensor]:
        """Add this step's gradients to what is left of the ones before; each bucket's elements to send."""
        picked: list[Tensor] = []
        for place in self._places:
            gradient, residual = place.of(own), place.of(self._residual)
            if self._velocity:
                residual.add_(place.of(self._velocity).mul_(self._options.momentum).add_(gradient))
            else:
                residual.add_(gradient)
            gradient.zero_()
            count = max(1, round(density * residual.numel()))
            picked.append(torch.topk(residual.abs(), count, sorted=False).indices)
        self._agree(picked)
        found: dict[int, list[Tensor]] = {}
        for place, indices in zip(self._places, picked, strict=True):
            found.setdefault(place.bucket, []).append(indices + place.start)
        return {number: torch.cat(parts) for number, parts in found.items()}

    def _agree(self, picked: list[Tensor]) -> None:
        """Tensor ranks send the same elements of what they all hold: else it would not stay the same."""
        shared = [i for i, place in enumerate(self._places) if place.whole]
        if self._tensor.size == 1 or not shared:
            return
        told = torch.cat([picked[i] for i in shared]).to(torch.int32)
        self._tensor.broadcast(told)
        for i, indices in zip(shared, told.split([picked[i].numel() for i in shared]), strict=True):
            picked[i] = indices.long()

    def _exchange(self, own: Sequence[Tensor], chosen: Mapping[int, Tensor], dtype: torch.dtype) -> None:
        """Send the chosen elements of buckets of one dtype, and add up everybody's."""
        kind = self._options.values or dtype
        sent = {number: self._taken(number, indices, kind) for number, indices in chosen.items()}
        sizes = [indices.numel() for indices in chosen.values()]
        count, size = sum(sizes), self.axis.size
        message = packed_bytes(count, count, kind)
        elements = sum(place.stop - place.start for place in self._places if place.bucket in chosen)
        if message * size > 2 * elements * dtype.itemsize:  # early in a warm-up: zeros between them take less
            for number, indices in chosen.items():
                own[number][indices] = sent[number].to(dtype)
            spans = [place for place in self._places if place.bucket in chosen]
            flat = torch.cat([place.of(own) for place in spans])
            self.axis.all_reduce(flat)
            for place, summed in zip(spans, flat.split([p.stop - p.start for p in spans]), strict=True):
                place.of(own).copy_(summed)
            self._sent += 2 * elements * dtype.itemsize * (size - 1) / size
            return
        mine = packed(torch.cat([i.to(torch.int32) for i in chosen.values()]), torch.cat(list(sent.values())))
        every = mine.new_empty(size * mine.numel())
        self.axis.all_gather(every, mine)
        self._sent += message * (size - 1)
        # Replica by replica, so that each of them adds up in the same order.
        for theirs in every.view(size, -1):
            indices, values = unpacked(theirs, count, count, kind)
            parts = zip(chosen, indices.split(sizes), values.split(sizes), strict=True)
            for number, where, what in parts:
                own[number].index_add_(0, where, what.to(dtype))

    def _taken(self, number: int, indices: Tensor, kind: torch.dtype) -> Tensor:
        """The chosen elements of a residual, as they travel; what is left there is what rounding lost."""
        residual = self._residual[number]
        exact, limit = residual[indices], torch.finfo(kind).max
        values = exact.clamp(-limit, limit).to(kind)
        residual[indices] = exact - values.to(residual.dtype)
        if self._velocity:
            self._velocity[number][indices] = 0.0
        return values
