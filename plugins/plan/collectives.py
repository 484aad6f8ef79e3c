"""Times of collectives and messages on the levels of a machine's network: ring, tree, all-to-all, point to point.

A ``RankGroup`` is a size and a stride: the ranks of the tensor axis are neighbours (stride 1), those of the data axis
are as far apart as the axes inside it are large. From them follows how many of its members share a node, and
which link is the slowest.

Sources: Thakur, Rabenseifner and Gropp 2005 for ring and all-to-all; Sanders, Speck and Traeff 2009 for the two trees
of an all-reduce (NCCL's algorithms of these names).
"""

from __future__ import annotations

import math
from typing import NamedTuple

from .machine import Machine, NetworkLink


class RankGroup(NamedTuple):
    """Group of ``size`` ranks, ``stride`` ranks apart."""

    size: int
    stride: int = 1

    def within(self, ranks: int) -> int:
        """Return how many members share a unit of the network of this many ranks (0: all)."""
        return self.size if not ranks else max(1, min(self.size, ranks // self.stride))

    def link(self, machine: Machine) -> NetworkLink:
        """Return the link of the innermost level that connects all members."""
        return next(link for link in machine.links if self.within(link.ranks) == self.size)

    def ring_speed(self, machine: Machine) -> float:
        """Return the bytes a second of one rank's part of a ring.

        A ring that leaves a node does so through the network cards of all its members in the node, because a library
        with one ring for each card uses them all; it is no faster than the links inside the node.
        """
        speed = math.inf
        shared = 1  # members that share a unit of the level below
        for link in machine.links:
            members = self.within(link.ranks)
            if members > shared:
                speed = min(speed, shared * link.speed)
            shared = members
        return speed


def reduce_scatter(size: float, group: RankGroup, machine: Machine) -> float:
    """Return the seconds of a reduce-scatter of ``size`` bytes over a ring."""
    return _ring("reduce_scatter", size, group, machine)


def all_gather(size: float, group: RankGroup, machine: Machine) -> float:
    """Return the seconds of an all-gather of ``size`` bytes, of all ranks together, over a ring."""
    return _ring("all_gather", size, group, machine)


def _ring(name: str, size: float, group: RankGroup, machine: Machine) -> float:
    n = group.size
    if n == 1:
        return 0.0
    if (found := _measured(name, (n - 1) / n * size, group, machine)) is not None:
        return found
    return (n - 1) / n * size / group.ring_speed(machine) + _latency(group, machine)


def _measured(name: str, sent: float, group: RankGroup, machine: Machine) -> float | None:
    """Return the measured seconds of a collective in which each rank sends so many bytes, inside one machine."""
    measured = machine.measured
    if measured is None or name not in measured.collectives or group.link(machine) is not machine.links[0]:
        return None
    return measured.collective(name, group.size, sent)


def all_reduce(size: float, group: RankGroup, machine: Machine) -> float:
    """Return the seconds of an all-reduce: of a ring, or of a double binary tree if that is faster."""
    n = group.size
    if n == 1:
        return 0.0
    if (found := _measured("all_reduce", 2 * (n - 1) / n * size, group, machine)) is not None:
        return found
    ring = 2 * reduce_scatter(size, group, machine)
    tree = 2 * size / group.ring_speed(machine) + 2 * math.log2(n) * group.link(machine).latency
    return min(ring, tree)


def all_to_all(size: float, group: RankGroup, machine: Machine) -> float:
    """Return the seconds until each rank has sent ``size`` bytes, 1/n of them to each of the n ranks."""
    n, seconds, inside = group.size, 0.0, 1
    if n > 1 and (found := _measured("all_to_all", (n - 1) / n * size, group, machine)) is not None:
        return found
    for link in machine.links:  # what stays within a level and leaves the one below goes over this level's link
        members = group.within(link.ranks)
        if members > inside:
            seconds = max(seconds, (members - inside) / n * size / link.speed)
        inside = members
    return seconds + (group.link(machine).latency if n > 1 else 0.0)


def message(size: float, stride: int, machine: Machine) -> float:
    """Return the seconds of a message to the rank ``stride`` ranks on."""
    group = RankGroup(2, stride)
    if (found := _measured("message", size, group, machine)) is not None:
        return found
    link = group.link(machine)
    return link.latency + size / link.speed


def _latency(group: RankGroup, machine: Machine) -> float:
    """Return the latency of a ring's steps: one ring inside the node, and one over the nodes."""
    total, inside = 0.0, 1
    for link in machine.links:
        members = group.within(link.ranks)
        if members > inside:
            total += (math.ceil(members / inside) - 1) * link.latency / 4
        inside = members
    return total
