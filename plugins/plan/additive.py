"""Records of numbers that are added field by field, and multiplied by a number."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from operator import add
from typing import Any, Self


@dataclass(frozen=True)
class Additive:
    """Base of frozen dataclasses whose fields are numbers, with defaults that add nothing."""

    def values(self) -> tuple[Any, ...]:
        """Return the fields in their order."""
        return tuple(vars(self).values())

    def __add__(self, other: Self) -> Self:
        """Return the sum, field by field."""
        return type(self)(*map(add, self.values(), other.values()))

    def __mul__(self, factor: float) -> Self:
        """Return the record with each field multiplied."""
        return type(self)(*(value * factor for value in self.values()))

    def __truediv__(self, divisor: float) -> Self:
        """Return the record with each field divided."""
        return type(self)(*(value / divisor for value in self.values()))

    @classmethod
    def total(cls, records: Iterable[Self]) -> Self:
        """Return the sum of records, in their order."""
        return sum(records, start=cls())
