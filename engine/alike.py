"""Whether ranks have the same: facts by a hash of them, and what the ranks of a tensor group are given to train on."""

from __future__ import annotations

import hashlib
from typing import Any

import torch

from ..grid import Axis, Grid
from ..pipe.nest import flatten


def same(axis: Axis, facts: Any, device: torch.device) -> bool:
    """Whether every rank of an axis has the same facts, which have a ``repr``. Collective: 16 bytes."""
    digest = int.from_bytes(hashlib.sha256(repr(facts).encode()).digest()[:7], "big")
    both = torch.tensor([digest, -digest], device=device)
    with axis.traffic.aside():
        axis.all_reduce(both, op="max")
    return bool(both[0] == -both[1])


def unlike(grid: Grid, looks: list[str], over: Axis) -> str | None:
    """What tensor ranks were given that does not look alike, if anything.

    Args:
        grid: whose tensor groups each have one batch.
        looks: of this rank's inputs and labels, as ``look`` has them.
        over: the ranks that hear of it, and call this together: the tensor group, or the whole grid.
    """
    differs = torch.tensor([0 if same(grid.tensor, looks, grid.device) else 1], device=grid.device)
    if over is not grid.tensor:
        with over.traffic.aside():
            over.all_reduce(differs, op="max")
    if not int(differs):
        return None
    told = over.all_gather_object((grid.rank, grid.tensor.ranks, looks))
    everyone = {rank: (group, theirs) for rank, group, theirs in told}
    for rank, (group, theirs) in everyone.items():
        mine = everyone[group[0]][1]
        if theirs != mine:
            here, there = next(((a, b) for a, b in zip(mine, theirs) if a != b), (len(mine), len(theirs)))
            return (
                f"{grid.describe(rank)} was given {there}, and {grid.describe(group[0])} {here}: the ranks of a tensor "
                "group share each layer, and take the same samples"
            )
    return None


def require_alike(grid: Grid, inputs: Any) -> None:
    """Of a plain module's inputs, before tensor ranks exchange parts of them that would not fit. Off with one of them.

    Raises:
        ValueError: on the ranks of the tensor group.
    """
    if grid.tensor.size > 1 and (reason := unlike(grid, [look("inputs", inputs)], grid.tensor)) is not None:
        raise ValueError(f"unlike inputs: {reason}")


def look(what: str, value: Any) -> str:
    """The shapes and dtypes of a nest of tensors; of anything else, its type."""
    try:
        return f"{what} {flatten(value)[1]}"
    except TypeError:
        return f"{what} of type {type(value).__name__}"
