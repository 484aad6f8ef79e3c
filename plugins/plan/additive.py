"""Records of numbers that are added field by field, and multiplied by a number."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from operator import add
from typing import Any, Self


@dataclass(frozen=True)
class Additive:
    """Base of frozen dataclasses whose fields are numbers, or additive records, and have defaults that add nothing."""

    def values(self) -> tuple[Any, ...]:
        """Return the fields in their order."""
        return tuple(getattr(self, field.name) for field in fields(self))

    def __add__(self, other: Self) -> Self:
        """Return the sum, field by field."""
        return type(self)(*map(add, self.values(), other.values()))

    def __mul__(self, factor: float) -> Self:
        """Return the record with each field multiplied."""
        return type(self)(*(value * factor for value in self.values()))

    @classmethod
    def total(cls, records: Iterable[Self]) -> Self:
        """Return the sum of records, in their order."""
        return sum(records, start=cls())
