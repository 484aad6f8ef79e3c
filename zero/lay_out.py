"""Which parameters share a bucket."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..grid import Grid
from .buckets import Bucket
from .flat import PARTIAL, REPLICATED, SHARDED, Item, plan
from .mode import Key, Managed, Mode
from .offload import Memories

# Where nothing is sent, from so many elements on a parameter has a bucket of its own: the gradient that autograd makes
# is then the bucket's, and not copied. (A smaller one is copied in the time that another bucket would take.)
_LARGE = 2**16


def make_buckets(
    members: Sequence[Managed], grid: Grid, mode: Mode, capacity: int, memory: Memories | None = None
) -> list[Bucket]:
    """Lay out parameters in buckets and move them there.

    Parameters that are not trained are left alone below stage 3, which shards them too: but for integers (quantised
    weights, indices), which are no weights that a dtype or a placeholder could be given.

    Args:
        members: in the order of the model.
        grid: whose data axis the buckets are sharded over.
        mode: what ZeRO does.
        capacity: elements a bucket holds at the most, but for a single larger parameter.
        memory: of ``mode.offload``; None: made here.
    """
    memory = Memories(mode.offload, grid.device) if memory is None else memory
    items = []
    nothing_sent = grid.data.size == 1 and not mode.offload.portions
    for number, member in enumerate(members):
        dtype = member.parameter.dtype
        if member.group is None and (mode.stage < 3 or not (dtype.is_floating_point or dtype.is_complex)):
            continue
        layout = member.layout
        run = SHARDED if layout.sharded else PARTIAL if layout.partial else REPLICATED
        layers = member.layers if mode.stage == 3 else ()
        # Partial gradients are summed over the tensor axis, bucket by bucket: its ranks must lay out alike.
        size = max(math.prod(layout.local_shape(rank, grid.tensor.size)) for rank in range(grid.tensor.size))
        kind = (member.group, dtype, mode.stage == 3 and 0 < size <= mode.persistence)
        sole = number if nothing_sent and size >= _LARGE else None
        narrow = mode.narrow is None or member.parameter in mode.narrow
        key = Key(member.stages, layers, member.tie, member.counted, *kind, narrow, sole)
        items.append(Item(number, member.parameter.numel(), run, key, size))
    return [Bucket(flat, members, grid, mode, memory) for flat in plan(items, grid.data.size, capacity)]
