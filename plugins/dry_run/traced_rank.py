"""Rank whose comparisons in the user's code are noted: they tell which ranks the script treats differently.

``if grid.rank == 517:`` is true on one rank of a thousand. A dry run runs a few ranks; it learns from the comparison
that rank 517 is a class of its own, and runs it too.
"""

from __future__ import annotations

import operator
import os
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

from .places import owner, user_place

_COMPARE: dict[str, Callable[[Any, Any], bool]] = {
    name: getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")
}
_ARITHMETIC: dict[str, Callable[[int, int], int]] = {
    name: getattr(operator, name) for name in ("add", "sub", "mul", "mod", "floordiv")
}


class Comparison(NamedTuple):
    """A comparison of a coordinate with a number, in the user's code.

    Attributes:
        axis: name of the axis, or ``world`` for the rank itself.
        steps: arithmetic before the comparison: pairs (name of the operator, number).
        compare: name of the operator.
        number: what it was compared with.
    """

    axis: str
    steps: tuple[tuple[str, int], ...]
    compare: str
    number: int

    def holds(self, at: int) -> bool:
        """Return the outcome on a rank at this place on the axis."""
        for name, number in self.steps:
            at = _ARITHMETIC[name](at, number)
        return _COMPARE[self.compare](at, self.number)


class TracedRank(int):
    """An int that notes comparisons with it in the user's code.

    Attributes:
        axis, steps: see ``Comparison``.
        noted: receives the comparisons.
    """

    axis: str
    steps: tuple[tuple[str, int], ...]
    noted: set[Comparison]

    __hash__ = int.__hash__

    def __bool__(self) -> bool:
        self._note("ne", 0)
        return int(self) != 0

    def _note(self, compare: str, number: Any) -> None:
        frame = sys._getframe(2)
        while frame.f_back is not None and frame.f_code.co_filename == __file__:
            frame = frame.f_back
        if isinstance(number, int) and owner(frame.f_code.co_filename) == "user":
            self.noted.add(Comparison(self.axis, self.steps, compare, int(number)))


def traced(value: int, axis: str, noted: set[Comparison], steps: tuple[tuple[str, int], ...] = ()) -> TracedRank:
    """Return a traced place on an axis."""
    made = TracedRank(value)
    made.axis, made.steps, made.noted = axis, steps, noted
    return made


class TracedText(str):
    """Text of a rank in an environment variable. Comparisons with texts are noted.

    Attributes:
        rank: the rank.
        untraced: receives the places at which the user's code makes an int of it, whose comparisons are not seen.
    """

    rank: TracedRank
    untraced: set[str]

    __hash__ = str.__hash__

    def __int__(self) -> int:
        if (place := user_place()) is not None:
            self.untraced.add(place)
        return int(str(self))

    def __str__(self) -> str:
        return str.__str__(self)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, str) and other.isdecimal():
            self.rank._note("eq", int(other))
        return str.__eq__(self, other)

    def __ne__(self, other: object) -> bool:
        return not self == other


class TracedEnvironment(os._Environ[str]):
    """Class of ``os.environ`` in a dry run, in which the variables of the rank are traced."""

    traced: dict[str, TracedText]

    def __getitem__(self, key: str) -> str:
        found = super().__getitem__(key)
        return self.traced[key] if key in self.traced and str.__eq__(self.traced[key], found) else found


def trace_environment(ranks: dict[str, TracedRank], untraced: set[str]) -> None:
    """Trace the ranks in variables of ``os.environ``, which have been set.

    Args:
        ranks: name of the variable -> its traced rank.
        untraced: see ``TracedText``; of the variable RANK.
    """
    texts = {}
    for name, rank in ranks.items():
        texts[name] = TracedText(os.environ[name])
        texts[name].rank, texts[name].untraced = rank, untraced if name == "RANK" else set()
    vars(os.environ)["traced"] = texts
    os.environ.__class__ = TracedEnvironment


def _comparison(name: str) -> Callable[[TracedRank, Any], Any]:
    plain = getattr(int, f"__{name}__")

    def compare(self: TracedRank, other: Any) -> Any:
        self._note(name, other)
        return plain(self, other)

    return compare


def _arithmetic(name: str) -> Callable[[TracedRank, Any], Any]:
    plain = getattr(int, f"__{name}__")

    def compute(self: TracedRank, other: Any) -> Any:
        found = plain(self, other)
        if type(other) is not int or found is NotImplemented or not hasattr(self, "noted"):
            return found
        return traced(found, self.axis, self.noted, (*self.steps, (name, other)))

    return compute


for _name in _COMPARE:
    setattr(TracedRank, f"__{_name}__", _comparison(_name))
for _name in _ARITHMETIC:
    setattr(TracedRank, f"__{_name}__", _arithmetic(_name))
