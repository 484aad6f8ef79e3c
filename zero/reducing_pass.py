"""Order of the reductions within one backward pass: that of the buckets, on every replica, whatever order autograd has.

autograd completes    2      1  3     0
reductions begin                      0 1 2 3
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor

from .bucket import Bucket


class ReducingPass:
    """Buckets of a stage that are reduced within one backward pass of it.

    Args:
        buckets: the buckets, in the order of their reductions.

    Attributes:
        left: those whose reduction has not begun.
        missing: id of each of ``buckets`` -> parameters whose gradients are not complete yet.
    """

    def __init__(self, buckets: Sequence[Bucket] = ()) -> None:
        self.left = list(buckets)
        self.missing: dict[int, set[Tensor]] = {id(b): {m.parameter for m in b.members} for b in buckets}
        self._runs_left: dict[int, int] = {}  # layer -> runs of it whose backward is still to come in this pass

    def complete(self) -> Iterator[Bucket]:
        """Yield the buckets whose turn it is, up to the first one that misses a gradient; they are then not left."""
        while self.left and not self.missing[id(self.left[0])]:
            yield self.left.pop(0)

    def layer_done(self, layer: int, runs: int) -> None:
        """Miss no gradient of a layer any more once the backward of the last of its ``runs`` has ended."""
        self._runs_left[layer] = self._runs_left.get(layer, runs) - 1
        for bucket in self.left:
            if layer in bucket.layers and all(self._runs_left.get(other, 1) <= 0 for other in bucket.layers):
                self.missing[id(bucket)].clear()
