"""Interfaces through which the core of ZeRO uses an optimizer, gradient compression and ZeRO++.

The core asks only for what is written here. It names no compressor, no 1-bit optimizer and no part of ZeRO++.

A plain sum of gradients starts within the backward pass, bucket by bucket, and keeps nothing. A compressor keeps what
it did not send, to send it later (error feedback), so the weight of a gradient matters: the batch's weight and the loss
scale may change from step to step. It therefore acts once a step, when both are known, on every bucket's local gradient
divided by them. Its state is then in units of the mean gradient, whatever the weights are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from ..grid import Axis, Grid
from ..grid.comm.pending import Pending
from .flat import FlatBucket
from .managed import ManagedParameter

# Makes an optimizer from parameter groups.
MakeOptimizer = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]


class ReduceScatter(Protocol):
    """A reduce-scatter over the data axis: the axis itself, or a quantized one."""

    def reduce_scatter(self, output: Tensor, tensor: Tensor, async_op: bool = False) -> Pending:
        """Sum ``tensor`` (size * n,) over the ranks; ``output`` (n,) takes this rank's part."""


class GradientBucket(Protocol):
    """One flat buffer of unsharded gradients, and its layout: the attributes that an ``Exchange`` reads.

    Attributes:
        flat: where each parameter lies in the buffer.
        members: the parameters, in the order of ``flat.slots``.
        tie: number of the tie to which the parameters belong; None if they are not tied.
        counted: True if this pipe rank counts the parameters in the gradient norm.
        weights: (numel,), the weights of the parameters.
        gradients: (numel,), the local gradients of this rank.
        owned: start and stop of the range that this rank's optimizer steps.
        owned_gradient: the part of ``gradients`` in that range.
        communication_dtype: dtype in which a plain sum is sent.
        reduction: the reduce-scatter of gradients.
    """

    flat: FlatBucket
    members: list[ManagedParameter]
    tie: int | None
    counted: bool
    weights: Tensor
    owned: tuple[int, int]
    owned_gradient: Tensor
    communication_dtype: torch.dtype
    reduction: ReduceScatter

    @property
    def gradients(self) -> Tensor | None: ...

    @property
    def trained(self) -> bool:
        """True if an optimizer steps the parameters."""

    def sum(self) -> Pending:
        """Start summing ``gradients`` over the data axis, in place."""


class Exchange(Protocol):
    """Combines the gradients of the replicas once a step. All replicas must make and call it in the same order."""

    def gradients(self, buckets: Sequence[GradientBucket]) -> None:
        """Replace each bucket's own gradient by the sum over the replicas, or by an approximation. Collective.

        Args:
            buckets: the trained buckets. Their ``gradients`` (numel,) are finite on every rank of the grid, because a
                step that overflowed is skipped without this call. The sum of the gradients over the replicas is the
                mean gradient. The result must be bitwise equal on every replica.
        """

    def state(self) -> Mapping[str, Sequence[Tensor]]:
        """Return the state that this replica keeps between steps: name -> a list of one flat tensor for each bucket."""


# Makes an exchange of buckets. Two attributes are optional: ``own_dtype``, True if it sends values in a dtype of its
# own, so that a communication dtype would do nothing; and ``require_fitting(optimizer)``, which raises a ValueError if
# the optimizer cannot be used with it.
MakeExchange = Callable[[Grid, Sequence[GradientBucket]], Exchange]


class ReplicatedTensor(NamedTuple):
    """A tensor of an exchange that is equal on every replica; ``key`` tells a parameter's tensors apart."""

    key: str
    member: ManagedParameter
    value: Tensor


@runtime_checkable
class Compressing(Exchange, Protocol):
    """An exchange that compresses gradients and counts its steps.

    Attributes:
        steps: number of exchanges so far.
    """

    steps: int

    def replicated(self) -> Iterator[ReplicatedTensor]:
        """Yield the state tensors that are equal on every replica. Checkpoints save and load them in place."""

    def formula(self) -> float:
        """Return the bytes that this rank sent over the data axis in the last step, by the method's formula."""


class AllGather(Protocol):
    """An all-gather over the data axis: the axis itself, or a quantized or hierarchical one."""

    size: int

    def all_gather(self, output: Tensor, tensor: Tensor, async_op: bool = False) -> Pending:
        """Fill ``output`` (size * n,) with every rank's ``tensor`` (n,)."""


class GatherRoute(AllGather, Protocol):
    """An all-gather of one bucket's weights that may keep a copy of them between gathers."""

    @property
    def kept_bytes(self) -> int:
        """Bytes of the second shard of the weights that the route keeps on this rank (hpZ); 0 if it keeps none."""

    def invalidate(self) -> None:
        """Discard the kept copy, because the weights have changed."""


class CommunicationSavings(Protocol):
    """Replacements of ZeRO's all-gathers and reduce-scatters that send fewer bytes, such as those of ZeRO++."""

    def gather_routes(self, buckets: Sequence[GradientBucket], axis: Axis, grid: Grid) -> list[GatherRoute]:
        """Make the all-gather of each bucket's weights in stage 3. Collective.

        Args:
            buckets: the buckets whose weights are sharded.
            axis: the axis of all replicas, with a separate communicator for these gathers.
            grid: the grid of this rank.
        """

    def replace_reductions(self, buckets: Sequence[GradientBucket], grid: Grid, plain: bool) -> None:
        """Set the buckets' ``reduction``. Collective.

        Args:
            buckets: the buckets of this rank.
            grid: the grid of this rank.
            plain: True if gradients are summed in their own dtype and no compressor acts on them.

        Raises:
            ValueError: ``plain`` is False, but quantized reductions need a plain sum.
        """
