"""Cut of the optimizer state into parts, one for each replica, and the replicas that hold a part. No torch.

With three replicas a, b, c and one copy:

    part     0    1    2
    owner    a    b    c
    copy     b    c    a

A cut is a function of the names of the replicas that take shares in a step, so a replay cuts as the run did: kernels
may round an element by its place in a tensor.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

_BLOCK = 16  # elements to whose multiples a part is cut, as parameters in a bucket are

Span = tuple[int, int]  # start and stop


class Move(NamedTuple):
    """Elements ``start`` to ``stop`` of a flat tensor that ``source`` gives to ``target``; both may be the same."""

    source: str
    target: str
    start: int
    stop: int


@dataclass(frozen=True)
class ShardCut:
    """Cut of flat tensors into one part for each replica.

    Attributes:
        names: the owners of the parts, in the order of the parts.
        copies: number of further replicas that hold each part: those that follow its owner, in a ring.
    """

    names: tuple[str, ...]
    copies: int

    def span(self, part: int, numel: int) -> Span:
        """Return the elements of a part of a flat tensor of ``numel`` elements; there may be none."""
        blocks, parts = -(-numel // _BLOCK), len(self.names)
        start, stop = (min(numel, blocks * each // parts * _BLOCK) for each in (part, part + 1))
        return start, stop

    def holders(self, part: int) -> tuple[str, ...]:
        """Return the owner of a part, then the replicas that hold a copy."""
        count = len(self.names)
        return tuple(self.names[(part + place) % count] for place in range(min(count, 1 + self.copies)))

    def parts(self, name: str) -> list[int]:
        """Return the parts that a replica holds: first its own, then copies; none if it has no part."""
        count = len(self.names)
        if name not in self.names:
            return []
        return [(self.names.index(name) - place) % count for place in range(min(count, 1 + self.copies))]

    def held(self, name: str, numel: int) -> tuple[int, int]:
        """Return how many elements of a flat tensor a replica owns, and how many it holds as copies."""
        sizes = [stop - start for start, stop in (self.span(part, numel) for part in self.parts(name))]
        return sum(sizes[:1]), sum(sizes[1:])

    def lost(self, present: Collection[str]) -> list[int]:
        """Return the parts that no replica in ``present`` holds."""
        return [part for part in range(len(self.names)) if not set(self.holders(part)) & set(present)]

    def sources(self, present: Collection[str]) -> list[str]:
        """Return for each part the first replica in ``present`` that holds it. No part may be lost."""
        return [next(name for name in self.holders(part) if name in present) for part in range(len(self.names))]

    def moves(self, present: Collection[str], wanted: Mapping[str, Sequence[Span]], numel: int) -> Iterator[Move]:
        """Yield the moves that give each replica the elements that it wants.

        Args:
            present: the replicas that still hold their parts. No part may be lost.
            wanted: replica -> spans of elements.
            numel: elements of the flat tensor.
        """
        sources = self.sources(present)
        for target, spans in wanted.items():
            for first, last in spans:
                for part, source in enumerate(sources):
                    start, stop = self.span(part, numel)
                    low, high = max(first, start), min(last, stop)
                    if low < high:
                        here = target in present and target in self.holders(part)
                        yield Move(target if here else source, target, low, high)
