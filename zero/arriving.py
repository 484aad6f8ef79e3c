"""What is under way over the data axis, and what to do with it where it arrives."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..grid import Pending

if TYPE_CHECKING:
    from .buckets import Bucket


class Accumulation:
    """A transient gradient on its way: summed over the data axis, then added to the owned range."""

    def __init__(self, bucket: Bucket, gradients: Tensor) -> None:
        self._bucket = bucket
        self._part, self._work = bucket.summed(gradients)

    def wait(self) -> None:
        self._work.wait()
        self._bucket.accumulate(self._part)


class Moved:
    """A whole gradient summed over the data axis in another dtype, or elsewhere."""

    def __init__(self, bucket: Bucket, gradients: Tensor) -> None:
        self._bucket = bucket
        self._part, self._work = bucket.summed(gradients)

    def wait(self) -> None:
        self._work.wait()
        self._bucket.owned_gradient.copy_(self._part)


class All:
    """Several under way, waited for together."""

    def __init__(self, works: Sequence[Pending]) -> None:
        self._works = works

    def wait(self) -> None:
        for work in self._works:
            work.wait()


def alone(tensor: Tensor) -> bool:
    """Whether nothing but this tensor is in its memory, and no other tensor refers to that.

    Autograd leaves in ``.grad`` what it has computed, and where a parameter was used through a view that may be memory
    of other gradients too, which are still to be read.
    """
    storage = tensor.untyped_storage()
    users = torch._C._storage_Use_Count(storage._cdata)
    # The tensor itself, and what has just been asked for its storage.
    return users <= 2 and storage.nbytes() == tensor.numel() * tensor.element_size()


def publish(buckets: Sequence[Bucket], together: int | None) -> None:
    """Bring new weights to every replica: all buckets at once, or no more elements at a time than ``together``.

    (One bucket at a time is the least.)
    """
    under_way: deque[tuple[int, Pending]] = deque()
    elements = 0
    for bucket in buckets:
        while under_way and together is not None and elements + bucket.flat.numel > together:
            size, pending = under_way.popleft()
            pending.wait()
            elements -= size
        started = bucket.publish()
        if started is not None:
            under_way.append((bucket.flat.numel, started))
            elements += bucket.flat.numel
    for _, pending in under_way:
        pending.wait()
