"""Covering arrays: few rows in which every combination of a few factors' values occurs that can occur at all."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations, product
from typing import Any

Row = dict[str, Any]
Pair = tuple[str, Any]  # a factor and its value
Combination = frozenset[Pair]


def covering_array(
    factors: Mapping[str, Sequence[Any]], allowed: Callable[[Row], bool], strength: int = 3, seed: int = 0
) -> list[Row]:
    """Return rows that have every possible combination of the values of ``strength`` factors, by a greedy search.

    Each row begins with a combination that no row has yet. The other factors follow in random order, each with the
    value that adds most new combinations.

    Args:
        factors: name -> values.
        allowed: returns False if no row may have these values; it is called with some of the factors, or with all.
        strength: number of factors in a combination.
        seed: seed of the random order.
    """
    random_ = random.Random(seed)
    missing = dict.fromkeys(possible(factors, allowed, strength))  # an ordered set
    rows: list[Row] = []
    while missing:
        row = dict(next(iter(missing)))
        for name in random_.sample([name for name in factors if name not in row], len(factors) - len(row)):
            values = [value for value in factors[name] if completed({**row, name: value}, factors, allowed)]
            random_.shuffle(values)
            pairs = list(row.items())
            gain = {value: sum(c in missing for c in _with((name, value), pairs, strength)) for value in values}
            row[name] = max(values, key=lambda value: gain[value])
        for chosen in combinations(row.items(), strength):
            missing.pop(frozenset(chosen), None)
        rows.append({name: row[name] for name in factors})
    return rows


def possible(
    factors: Mapping[str, Sequence[Any]], allowed: Callable[[Row], bool], strength: int = 3
) -> list[Combination]:
    """Return the combinations of the values of ``strength`` factors that some allowed row has."""
    chosen_sets = []
    for names in combinations(factors, strength):
        for values in product(*(factors[name] for name in names)):
            row = dict(zip(names, values, strict=True))
            if completed(row, factors, allowed):
                chosen_sets.append(frozenset(row.items()))
    return chosen_sets


def completed(row: Row, factors: Mapping[str, Sequence[Any]], allowed: Callable[[Row], bool]) -> Row | None:
    """Return an allowed row with these values and some of the other factors; None if there is none."""
    if not allowed(row):
        return None
    name = next((name for name in factors if name not in row), None)
    if name is None:
        return row
    return next(
        (full_row for value in factors[name] if (full_row := completed({**row, name: value}, factors, allowed))), None
    )


def _with(pair: Pair, others: Sequence[Pair], strength: int) -> list[Combination]:
    return [frozenset((pair, *chosen)) for chosen in combinations(others, strength - 1)]
