"""A bucket in memory: parameters and gradients as views of two flat buffers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..grid import Grid, Layout
from .flat import PARTIAL, REPLICATED, RUNS, SHARDED, FlatBucket, Item, plan


class Managed(NamedTuple):
    """A parameter handed to the data axis, and what must be known of it."""

    parameter: nn.Parameter
    layout: Layout
    stages: tuple[int, ...]  # the stages of this rank that use it
    tie: int | None  # the tie it belongs to, where other pipe ranks hold it too
    counted: bool  # whether this pipe rank counts it in the norm
    group: int  # its parameter group in the optimizer


class _Key(NamedTuple):
    stages: tuple[int, ...]
    tie: int | None
    counted: bool
    group: int
    dtype: torch.dtype


class Bucket:
    """Flat parameters and flat gradients, of which one rank of the data axis owns a range.

    The parameters are moved: each becomes a view of ``weights``, and its ``.grad`` a view of ``gradients``.

    Attributes:
        weights, gradients: (numel,), padded with zeros.
        owned: the range of both whose optimizer state this rank holds; everything, in stage 0.
        master: the owned weights, as the parameter that the optimizer steps; its ``.grad`` the owned gradients.
    """

    def __init__(self, flat: FlatBucket, members: Sequence[Managed], grid: Grid, sharded: bool) -> None:
        assert isinstance(flat.key, _Key)
        self.stages, self.tie, self.counted, self.group, dtype = flat.key
        self.flat = flat
        self.members = [members[slot.number] for slot in flat.slots]
        self.weights = torch.zeros(flat.numel, dtype=dtype, device=grid.device)
        self.gradients = torch.zeros_like(self.weights)
        self.owned = flat.owned(grid.data.rank) if sharded else (0, flat.numel)
        self._views: list[Tensor] = []
        for slot, member in zip(flat.slots, self.members, strict=True):
            parameter = member.parameter
            view = self.weights[slot.start : slot.stop].view(parameter.shape)
            view.copy_(parameter.detach())
            parameter.data = view  # keeps the Parameter itself, and all that refers to it
            self._views.append(self.gradients[slot.start : slot.stop].view(parameter.shape))
        self.master = nn.Parameter(self.weights[slice(*self.owned)])
        self.master.grad = self.gradients[slice(*self.owned)]
        # An element counts once: a replicated one on the first tensor rank, a tied one on its first stage, and
        # what every replica holds on the first replica.
        replicated = grid.tensor.is_first
        here = self.counted and (sharded or grid.data.is_first)
        runs = [run for run in RUNS if here and (run == SHARDED or replicated)]
        self._counted = [span for run in runs if (span := flat.span(run, *self.owned))[0] < span[1]]

    @property
    def partial(self) -> Tensor:
        """The gradients that are partial sums over the tensor axis; often empty."""
        return self.gradients[slice(*self.flat.runs[PARTIAL])]

    def clear(self) -> None:
        """Zero the gradients, and make every parameter accumulate here again, whatever was done to its ``.grad``."""
        self.gradients.zero_()
        for member, view in zip(self.members, self._views, strict=True):
            if member.parameter.grad is not view:
                member.parameter.grad = view

    def squares(self) -> list[Tensor]:
        """The sums of squares, in float64, of the gradients that this rank counts."""
        norms = (torch.linalg.vector_norm(self.gradients[a:b], dtype=torch.float64) for a, b in self._counted)
        return [norm.square() for norm in norms]


def make_buckets(members: Sequence[Managed], grid: Grid, sharded: bool, capacity: int) -> list[Bucket]:
    """Lay out parameters in buckets and move them there. Frozen ones are left alone.

    Args:
        members: in the order of the model.
        grid: whose data axis the buckets are sharded over.
        sharded: whether a rank owns its range only (ZeRO), or everything (plain data parallelism).
        capacity: elements a bucket holds at the most, but for a single larger parameter.
    """
    items = []
    for index, member in enumerate(members):
        if member.parameter.requires_grad:
            layout = member.layout
            run = SHARDED if layout.sharded else PARTIAL if layout.partial else REPLICATED
            key = _Key(member.stages, member.tie, member.counted, member.group, member.parameter.dtype)
            items.append(Item(index, member.parameter.numel(), run, key))
    return [Bucket(flat, members, grid, sharded) for flat in plan(items, grid.data.size, capacity)]
