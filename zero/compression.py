"""What may stand in place of the plain sum of gradients over the replicas: one small interface.

A plain sum starts within the backward pass, bucket by bucket, and keeps nothing. What compresses keeps what it left
out, to send it later (error feedback), and so needs to know what a gradient counts for: the batch's weight and the
loss scale may change from step to step. It therefore acts once a step, when these are known, on every bucket's local
gradient times one over them. Its state is then in units of the mean gradient, whatever they do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from ..grid import Grid

if TYPE_CHECKING:
    from .buckets import Bucket


class Exchange(Protocol):
    """Brings the replicas' gradients together, once a step. Every replica of a grid makes it, and calls it, alike."""

    def gradients(self, buckets: Sequence[Bucket]) -> None:
        """Put the sum over the replicas, or what stands for it, in the place of each bucket's own gradient. Collective.

        Args:
            buckets: the trained ones, with ``gradients`` (numel,) finite on every rank of the grid: a step that
                overflowed is skipped, and nobody calls this. Their sum over the replicas is the mean gradient.
                Whatever is left there is the same on every replica.
        """

    def state(self) -> Mapping[str, Sequence[Tensor]]:
        """What it keeps from step to step: name -> a flat tensor for each bucket, this replica's own."""


MakeExchange = Callable[[Grid, Sequence["Bucket"]], Exchange]
