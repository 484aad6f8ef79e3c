"""Top-k sparsification with error feedback: the largest elements are sent, the others add up in a residual.

Lin et al. 2018, Deep Gradient Compression (arXiv:1712.01887): momentum correction (section 3.1), local gradient
clipping (3.2), momentum factor masking and warm-up (3.3). For each tensor of two dims and more, on replica k of N:

    g <- g * min(1, clip / sqrt(N) / |g|)       |g| over all tensors of the replica
    u <- m u + g,   v <- v + u
    the k elements of v of largest magnitude are sent; there u and v become 0
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ...base.dtypes import SHORT_NAMES
from ...base.errors import require_at_least
from ...base.torch_private import multiply_all
from ...grid.comm.axis import Axis
from ...grid.grid import Grid
from ...zero.gradient_norm import clip_coefficient, counted_squares
from ...zero.protocols import GradientBucket
from .compressor import Compressor, message_bytes, zeros_like_buckets
from .uncompressed_sum import MessageKind, concatenate, copy_back, count_elements, parameter_slices

_FIRST_DENSITY = 0.25  # density at the start of a warm-up: 75 % sparse


@dataclass(frozen=True)
class TopK:
    """Options of top-k: the fraction ``ratio`` of each tensor is sent, with its indices; the rest adds up locally.

    Attributes:
        ratio: fraction of a tensor's elements, above 0 and at most 1; at least one element is sent.
        momentum: m of momentum correction, for SGD, whose own momentum must then be 0.
        clip: limit of the gradient norm; each replica's own gradient is clipped to 1/sqrt(N) of it. 0: no limit.
        warmup_steps: steps in which the fraction falls from 0.25 to ``ratio``, by the same factor each step.
        start_step: number of first steps, before the warm-up, in which everything is summed.
        values: dtype in which values are sent, or its name; None: the gradients' dtype. Rounding errors stay in
            the residual.

    Raises:
        ValueError: a value is out of range.
    """

    ratio: float = 0.01
    momentum: float = 0.0
    clip: float = 0.0
    warmup_steps: int = 0
    start_step: int = 0
    values: torch.dtype | str | None = None

    own_dtype: ClassVar = True

    def __post_init__(self) -> None:
        if isinstance(self.values, str):
            object.__setattr__(self, "values", SHORT_NAMES.get(self.values, self.values))
        if not 0 < self.ratio <= 1:
            raise ValueError(f"ratio is {self.ratio}: give the fraction of elements to send, above 0 and at most 1")
        if not 0 <= self.momentum < 1:
            raise ValueError(f"momentum is {self.momentum}: give a number from 0 to below 1")
        if not 0 <= self.clip < math.inf:
            raise ValueError(f"clip is {self.clip}: give a positive limit of the gradient norm, or 0 for no limit")
        require_at_least(0, warmup_steps=self.warmup_steps, start_step=self.start_step)
        if self.values not in (None, torch.float32, torch.float16, torch.bfloat16):
            raise ValueError(f"values is {self.values}: give torch.float32, torch.float16, torch.bfloat16 or None")

    def density(self, step: int) -> float | None:
        """Return the fraction that is sent in a step, counted from 0; None: everything is summed."""
        done = step - self.start_step
        if done < 0:
            return None
        if done >= self.warmup_steps or self.ratio >= _FIRST_DENSITY:
            return self.ratio
        return float(_FIRST_DENSITY * (self.ratio / _FIRST_DENSITY) ** (done / self.warmup_steps))

    def require_fitting(self, optimizer: torch.optim.Optimizer) -> None:
        """Refuse an optimizer with a momentum of its own beside momentum correction.

        Raises:
            ValueError: the optimizer is not SGD, or has a momentum.
        """
        own = max((float(group.get("momentum", 0.0)) for group in optimizer.param_groups), default=0.0)
        if self.momentum and (not isinstance(optimizer, torch.optim.SGD) or own):
            raise ValueError(
                f"momentum {self.momentum} of top-k replaces SGD's own momentum, but the optimizer is "
                f"{type(optimizer).__name__}{f' with momentum {own}' if own else ''}: use torch.optim.SGD without "
                "momentum, or set the momentum of top-k to 0"
            )

    def __call__(self, grid: Grid, buckets: Sequence[GradientBucket]) -> TopKExchange:
        """Make the ``Exchange`` of these buckets."""
        return TopKExchange(self, grid, buckets)


class TopKExchange(Compressor):
    """Exchange of ``TopK``. It selects by tensor, as the paper does: alike on every grid, except for tensor shards.

    Bytes sent: N - 1 messages with 4 bytes and a value for each selected element, and the plain sum of the rest.
    """

    def __init__(self, options: TopK, grid: Grid, buckets: Sequence[GradientBucket]) -> None:
        every = parameter_slices(buckets)
        self._slices = [p for p in every if p.member.parameter.dim() > 1 and p.start < p.stop]
        super().__init__(grid, buckets, self._slices, options.start_step)
        self._options, self._tensor, self._device = options, grid.tensor, grid.device
        assert not isinstance(options.values, str)
        self._values = options.values
        compressed = set(self._slices)
        self._others = [place for place in every if place not in compressed]
        self._kinds = [MessageKind.of(buckets, number) for number in range(len(buckets))]  # a message for each kind
        self._velocity = zeros_like_buckets(buckets, every) if options.momentum else []
        # The ranks of one replica, over which the norm for clipping is summed.
        self._replica: Axis | None = grid.joint("pipe", "tensor") if options.clip else None

    def _prepare(self, buckets: Sequence[GradientBucket], own: Sequence[Tensor], compresses: bool) -> None:
        """Clip this replica's gradients, and add momentum to those that are summed."""
        if self._replica is not None:
            self._clip(buckets, own, self._replica)
        summed = self._others if compresses else [*self._others, *self._slices]
        for place in summed if self._velocity else ():
            gradient = place.of(own)
            gradient.copy_(place.of(self._velocity).mul_(self._options.momentum).add_(gradient))

    def _compress(self, own: Sequence[Tensor]) -> None:
        density = self._options.density(self.steps - 1)
        assert density is not None
        chosen = self._select(own, density)
        for kind in dict.fromkeys(self._kinds[number] for number in chosen):
            self._exchange(own, {n: indices for n, indices in chosen.items() if self._kinds[n] == kind}, kind.dtype)

    def state(self) -> Mapping[str, Sequence[Tensor]]:
        """Return the state ``residual`` (v in the paper) and, with momentum, ``velocity`` (u in the paper)."""
        return {**super().state(), **({"velocity": self._velocity} if self._velocity else {})}

    def _clip(self, buckets: Sequence[GradientBucket], own: Sequence[Tensor], replica: Axis) -> None:
        """Clip this replica's gradients in place to the norm ``clip`` / sqrt(N) for N replicas (Lin et al. 2018, 3.2).

        The norm is over the replica's ranks, and an element that several ranks have counts once.
        """
        pairs = zip(buckets, own, strict=True)
        parts = [part for bucket, flat in pairs for part in counted_squares(bucket, flat, self._tensor.is_first)]
        total = torch.stack(parts).sum() if parts else torch.zeros((), dtype=torch.float64, device=self._device)
        replica.all_reduce(total)
        if own:
            multiply_all(list(own), clip_coefficient(total.sqrt(), self._options.clip / self.axis.size**0.5))

    def _select(self, own: Sequence[Tensor], density: float) -> dict[int, Tensor]:
        """Add this step's gradients to the residuals; return the indices to send, for each bucket."""
        picked: list[Tensor] = []
        for place in self._slices:
            gradient, residual = place.of(own), place.of(self._residual)
            if self._velocity:
                residual.add_(place.of(self._velocity).mul_(self._options.momentum).add_(gradient))
            else:
                residual.add_(gradient)
            gradient.zero_()
            count = max(1, round(density * residual.numel()))
            picked.append(torch.topk(residual.abs(), count, sorted=False).indices)
        self._broadcast_shared(picked)
        found: dict[int, list[Tensor]] = {}
        for place, indices in zip(self._slices, picked, strict=True):
            found.setdefault(place.bucket, []).append(indices + place.start)
        return {number: torch.cat(parts) for number, parts in found.items()}

    def _broadcast_shared(self, picked: list[Tensor]) -> None:
        """Broadcast the first tensor-parallel rank's selection of replicated parameters, which must stay equal."""
        shared = [i for i, place in enumerate(self._slices) if not place.member.layout.sharded]
        if self._tensor.size == 1 or not shared:
            return
        indices = torch.cat([picked[i] for i in shared]).to(torch.int32)
        self._tensor.broadcast(indices)
        for i, part in zip(shared, indices.split([picked[i].numel() for i in shared]), strict=True):
            picked[i] = part.long()

    def _exchange(self, own: Sequence[Tensor], chosen: Mapping[int, Tensor], dtype: torch.dtype) -> None:
        """Send the chosen elements of buckets of one dtype, and add up those of all replicas."""
        sent_dtype = self._values or dtype
        sent = {number: self._take(number, indices, sent_dtype) for number, indices in chosen.items()}
        sizes = [indices.numel() for indices in chosen.values()]
        slices, size = [place for place in self._slices if place.bucket in chosen], self.axis.size
        dense = 2 * count_elements(slices) * dtype.itemsize
        if message_bytes(sum(sizes), sum(sizes), sent_dtype) * size > dense:
            # Early in a warm-up the plain sum, with zeros between the chosen elements, takes fewer bytes.
            for number, indices in chosen.items():
                own[number][indices] = sent[number].to(dtype)
            flat = concatenate(slices, own)
            self.axis.all_reduce(flat)
            copy_back(flat, slices, own)
            self._sent += dense * (size - 1) / size
            return
        indices = torch.cat([i.to(torch.int32) for i in chosen.values()])
        for received, values in self._gather(indices, torch.cat(list(sent.values()))):
            parts = zip(chosen, received.split(sizes), values.split(sizes), strict=True)
            for number, where, part in parts:
                own[number].index_add_(0, where, part.to(dtype))

    def _take(self, number: int, indices: Tensor, dtype: torch.dtype) -> Tensor:
        """Remove the chosen elements from a residual, and return them in the sent dtype.

        The error of rounding to this dtype stays in the residual.
        """
        residual = self._residual[number]
        exact, limit = residual[indices], torch.finfo(dtype).max
        values = exact.clamp(-limit, limit).to(dtype)
        residual[indices] = exact - values.to(residual.dtype)
        if self._velocity:
            self._velocity[number][indices] = 0.0
        return values
