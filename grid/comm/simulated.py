"""Process groups that send nothing, for a dry run: one process stands for a rank of a grid of any size. No torch."""

from __future__ import annotations

from typing import Any, Protocol

from ..topology import Topology


class SimulatedGroup(Protocol):
    """Protocol: what a ``Grid`` tells the process group of a dry run. Any other process group lacks these methods."""

    def announce(self, topology: Topology) -> None:
        """Take the grid that this rank asks for, before its first collective."""

    def gather_texts(self, text: bytes) -> list[bytes]:
        """Return the texts of all ranks, in rank order."""

    def made(self, grid: Any) -> None:
        """Take the finished ``Grid`` of this rank."""


def is_simulated(group: Any) -> bool:
    """Return True if a process group, or None, is one of a dry run."""
    return hasattr(group, "announce")
