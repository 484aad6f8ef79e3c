"""Classes of ranks: ranks that run the same program on tensors of the same shapes.

Ranks are in one class if they have the same place on the pipe axis, shards of the same shapes, and the same outcome of
each comparison that the user's code makes with its rank. One rank of each class is run. The last rank of each stage is
run too, as a check of that.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ...grid.topology import Topology
from .traced_rank import Comparison

Signature = tuple[Any, ...]
_MOST = 16  # pipelines that are run because of comparisons in the user's code


class Classes:
    """Classes of the ranks of one grid, as far as the ranks that have run tell.

    Args:
        topology: the grid.

    Attributes:
        comparisons: comparisons of ranks in the user's code.
        unexplored: number of classes that were not run, because there were too many.
    """

    def __init__(self, topology: Topology) -> None:
        self.topology = topology
        self.comparisons: list[Comparison] = []
        self.unexplored = 0
        self._shards: dict[int, tuple[Any, ...]] = {}  # place on the tensor axis -> shapes, by place on the pipe axis

    def learn(self, records: Mapping[int, Mapping[str, Any] | None]) -> None:
        """Take what the records of ranks tell: shapes of shards, and comparisons with ranks."""
        by_pipe: dict[int, Sequence[Any]] = {}
        found = dict.fromkeys(self.comparisons)
        for rank, record in sorted(records.items()):
            if record is None:
                continue
            if "shards" in record:
                by_pipe.setdefault(self._at(rank, "pipe"), record["shards"])
            for axis, steps, compare, number in sorted(record["comparisons"]):
                found[Comparison(axis, tuple((name, n) for name, n in steps), compare, number)] = None
        self.comparisons = list(found)
        for place in range(self.topology.size("tensor")):
            self._shards[place] = tuple(by_pipe[pipe][place] for pipe in sorted(by_pipe))

    def signature(self, rank: int) -> Signature:
        """Return what distinguishes the class of a rank from other classes."""
        tensor = self._at(rank, "tensor")
        first = next((place for place, shapes in self._shards.items() if shapes == self._shards.get(tensor)), 0)
        return self._at(rank, "pipe"), first, tuple(self._holds(each, rank) for each in self.comparisons)

    def next_rank(self, run: Iterable[int]) -> int | None:
        """Return a rank of a class of which none has run; None if there is none.

        Args:
            run: the ranks that have run.
        """
        run = list(run)
        known = {self.signature(rank) for rank in run}
        pipelines = len(run) // self.topology.size("pipe")
        unknown: dict[Signature, int] = {}
        for rank in range(self.topology.world_size):
            if (signature := self.signature(rank)) not in known:
                unknown.setdefault(signature, rank)
        self.unexplored = len(unknown) if pipelines >= _MOST else 0
        return next(iter(unknown.values())) if unknown and not self.unexplored else None

    def members(self) -> dict[Signature, list[int]]:
        """Return the ranks of each class."""
        found: dict[Signature, list[int]] = {}
        for rank in range(self.topology.world_size):
            found.setdefault(self.signature(rank), []).append(rank)
        return found

    def describe(self, signature: Signature, members: Sequence[int]) -> str:
        """Return what the ranks of a class have in common, in words."""
        pipe, tensor, outcomes = signature
        words = [f"pipe {pipe}"] if self.topology.size("pipe") > 1 else []
        if len(set(self._shards.values())) > 1:
            words.append(f"shards as on tensor {tensor}")
        for comparison, holds in zip(self.comparisons, outcomes, strict=True):
            words.append(_in_words(comparison) if holds else f"not {_in_words(comparison)}")
        return ", ".join(words) or "all ranks"

    def _holds(self, comparison: Comparison, rank: int) -> bool:
        return comparison.holds(rank if comparison.axis == "world" else self._at(rank, comparison.axis))

    def _at(self, rank: int, axis: str) -> int:
        return int(getattr(self.topology.coordinate(rank), axis, 0))


def _in_words(comparison: Comparison) -> str:
    symbols = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">=", "mod": "%", "floordiv": "//"}
    symbols |= {"add": "+", "sub": "-", "mul": "*"}
    text = "rank" if comparison.axis == "world" else f"{comparison.axis}.rank"
    for name, number in comparison.steps:
        text += f" {symbols[name]} {number}"
    return f"{text} {symbols[comparison.compare]} {comparison.number}"
