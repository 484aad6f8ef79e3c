"""Weights that user code writes in place between two steps: ``p.clamp_()``, ``max_norm`` of an ``nn.Embedding``."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..base.checksum import checksum
from .bucket import Bucket


class WrittenWeights:
    """Trained weights that are whole on every replica, and what user code has written to them since the last step.

    Args:
        buckets: the buckets of the weights.
    """

    def __init__(self, buckets: Sequence[Bucket]) -> None:
        self._buckets = buckets
        self._weights = [member.parameter for bucket in buckets for member in bucket.members]
        self._steps = 0
        self.forget()

    def __bool__(self) -> bool:
        """Return True if user code has written to weights."""
        return [parameter._version for parameter in self._weights] != self._versions

    def forget(self) -> None:
        """Count the present weights as not written."""
        self._versions = [parameter._version for parameter in self._weights]

    def take(self) -> None:
        """Copy weights that were written to their masters, which are saved and stepped."""
        for bucket in self._buckets if self else ():
            if bucket.master_is_copy:
                bucket.take_written([(0, bucket.flat.numel)])

    def require_equal(self) -> None:
        """Check that all replicas have made the same writes. Collective over the data axes.

        Raises:
            RuntimeError: on every replica, if they differ.
        """
        for axis in dict.fromkeys(bucket.axis for bucket in self._buckets):
            members = [member for bucket in self._buckets if bucket.axis is axis for member in bucket.members]
            sums = torch.stack([checksum(member.parameter) for member in members])
            most = torch.cat([sums, -sums])
            axis.all_reduce(most, op="max")
            differs = most.view(2, -1).sum(dim=0).nonzero().flatten().tolist()
            if differs:
                names = [members[index].layout.name for index in differs]
                raise RuntimeError(
                    f"{', '.join(names[:3])}{', ...' if len(names) > 3 else ''} was written in place, and differently "
                    "on different replicas: max_norm of an nn.Embedding, for example, writes the rows that a rank's "
                    "own batch reads. Write the same on every rank between two steps, under torch.no_grad() "
                    "(weight.renorm_(2, 0, max_norm) for all rows), or compute another tensor from the weight in the "
                    "forward pass"
                )

    def require_seen(self) -> None:
        """Check, in the steps 1, 2, 4, ..., that no weight was written in a way that raises no version.

        Raises:
            RuntimeError: a weight that has a master was written through ``.data``.
        """
        self._steps += 1
        for bucket in self._buckets if not self._steps & (self._steps - 1) else ():
            if (name := bucket.differs_from_master()) is not None:
                raise RuntimeError(
                    f"{name} was written through .data, which nothing can see, so that the next step would undo it: "
                    "the step is taken by a master copy in another dtype. Write the parameter itself: with "
                    "torch.no_grad(): parameter.clamp_(...)"
                )
