"""Warning of replicas that train on the same rows, as with a torch ``DataLoader`` without a sampler."""

from __future__ import annotations

import hashlib
import logging
from typing import Any

import torch

from ..base.nest import tensors_of
from ..grid import Grid


class ReplicaRows:
    """Comparison of the replicas' first inputs, once for an engine.

    Args:
        grid: the grid whose replicas take steps together.
    """

    def __init__(self, grid: Grid) -> None:
        self._grid = grid
        self._digest: str | None = None  # of this replica's first inputs
        self._left = grid.data.size > 1  # to compare

    def see(self, inputs: Any) -> None:
        """Keep a digest of the first inputs that this rank trains on."""
        tensors = tensors_of(inputs) if self._left and self._digest is None else []
        if tensors:
            bits = hashlib.blake2b(digest_size=16)
            for tensor in tensors:
                if tensor.layout == torch.strided and not tensor.is_meta:
                    bits.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
            self._digest = bits.hexdigest()

    def compare(self) -> None:
        """Log a warning if two replicas began with the same inputs. Collective over the data axis, once."""
        if not self._left:
            return
        self._left, grid = False, self._grid
        with grid.world.traffic.uncounted():
            digests = grid.data.all_gather_json(self._digest)
        equal = [(a, b) for b, digest in enumerate(digests) if digest and (a := digests.index(digest)) < b]
        if equal and grid.data.is_first and grid.tensor.is_first and grid.context.is_first:
            logging.getLogger("triax").warning(
                "replicas %d and %d began with the same inputs, so they train on the same rows: give each replica rows "
                "of its own, by training_data=..., or with torch's DataLoader by sampler=DistributedSampler(dataset, "
                "num_replicas=grid.data.size, rank=grid.data.rank)",
                *equal[0],
            )
