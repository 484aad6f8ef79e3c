"""ZeRO++: which of its three means are chosen. Wang et al. 2023 (arXiv:2306.10209), with their names."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import torch

from ..grid import Axis, Grid
from .blocks import BLOCK, scale_dtype


@dataclass(frozen=True)
class Plus:
    """What saves bytes on the data axis.

    Attributes:
        weights: stage 3 gathers weights as blocks of 8 bits (qwZ).
        frozen: it gathers those so that are not trained, whether or not ``weights`` is set.
        gradients: stages 1 to 3 reduce gradients as blocks of 4 bits (qgZ).
        secondary: in stage 3, every so many consecutive replicas (those of a host) keep the weights once more among
            them, from a step's first gather on, and gather from there (hpZ); 1: none do.
        host: how many consecutive replicas are on a host, for reductions in two hops; 1: find out.
    """

    weights: bool = False
    frozen: bool = False
    gradients: bool = False
    secondary: int = 1
    host: int = 1

    def check(self, replicas: int) -> None:
        """Refuse groups that do not divide the replicas.

        Raises:
            ValueError: the message names the sizes that do.
        """
        for size in (self.secondary, self.host):
            if size < 1 or replicas % size:
                fitting = ", ".join(str(each) for each in range(1, replicas + 1) if replicas % each == 0)
                raise ValueError(
                    f"{replicas} replicas do not fall into groups of {size}: give one of {fitting}, best the number of "
                    "them on a host"
                )

    def fitting(self, stage: int, replicas: int, communicate: torch.dtype | None, keep: bool) -> Plus | None:
        """Itself, if that makes sense of so many replicas; None where there is nothing to do.

        Raises:
            ValueError: it asks for what another stage does, or for two ways to send gradients, or see ``check``.
        """
        if stage < 3 and (self.weights or self.secondary != 1):
            raise ValueError(
                f"quantized_weights and hpz_partition_size are about gathering weights, and in stage {stage} they are "
                "whole: set stage=3, or leave them out"
            )
        if keep and self.secondary != 1:
            raise ValueError("keep_gathered gathers weights once a step, so hpz_partition_size saves nothing: give one")
        if stage == 0 and self.gradients:
            raise ValueError("quantized_gradients reduce-scatters them, and stage 0 shards nothing: set stage=1")
        if self.gradients and communicate is not None:
            raise ValueError("quantized_gradients and communication_dtype both say how gradients travel: give one")
        if self == Plus() or replicas == 1:
            return None
        self.check(replicas)
        return self

    def quantizes(self, dtype: torch.dtype, trained: bool) -> bool:
        """Whether such weights are gathered as blocks of 8 bits: integers, complex numbers and floats of 8 never."""
        wanted = self.weights or (self.frozen and not trained)
        return wanted and dtype.is_floating_point and dtype.itemsize > 1

    def kept(self, numel: int, dtype: torch.dtype, trained: bool) -> float:
        """Bytes that a rank's secondary shard of so many elements takes, but for padding."""
        size = float(dtype.itemsize)
        if self.quantizes(dtype, trained):
            size = 1 + scale_dtype(dtype).itemsize / BLOCK
        return numel * size / self.secondary


def ranks_per_host(grid: Grid) -> int:
    """How many consecutive replicas lie on one host; 1 where that is not the same everywhere. Collective."""
    hosts = grid.world.all_gather_object(socket.gethostname())
    return alike_runs(hosts, grid.topology.groups("data"))


def alike_runs(hosts: Sequence[str], groups: Sequence[Sequence[int]]) -> int:
    """The length of all runs of neighbours of the groups that have one host; 1 where it is not one length.

    >>> alike_runs(["a", "a", "b", "b"], [[0, 1, 2, 3]]), alike_runs(["a", "a", "a", "b"], [[0, 1, 2, 3]])
    (2, 1)
    """
    lengths = {len([*run]) for group in groups for _, run in groupby(group, key=lambda rank: hosts[rank])}
    return lengths.pop() if len(lengths) == 1 else 1


def inner(grid: Grid, size: int, purpose: str) -> Axis:
    """This rank and those beside it that fill a group of ``size`` replicas; named ``data within``. Collective."""
    replicas = grid.data.size
    return _one_of(grid, [range(first, first + size) for first in range(0, replicas, size)], purpose, "within")


def outer(grid: Grid, size: int, purpose: str) -> Axis:
    """This rank and those at its place in the other groups of ``size``; named ``data between``. Collective."""
    return _one_of(grid, [range(at, grid.data.size, size) for at in range(size)], purpose, "between")


def _one_of(grid: Grid, members: Sequence[range], purpose: str, name: str) -> Axis:
    made = [grid.subgroup("data", each, f"{purpose} {name}") for each in members]
    mine = next(axis for axis in made if axis is not None)
    mine.name = f"data {name}"  # what stays within a group is counted apart from what leaves it
    return mine
