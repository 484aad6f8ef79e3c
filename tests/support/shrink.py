"""Shrinking of a failing case: drop features one at a time while it still fails."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any


def smaller(case: Mapping[str, Any], default: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield cases with one feature less: a key at its default, a list with an entry less, a smaller number."""
    for key, value in case.items():
        if key in default and value != default[key]:
            yield {other: each for other, each in case.items() if other != key}
    for key, value in case.items():
        for less in _less(value):
            if less != value:
                yield {**case, key: less}


def _less(value: Any) -> Iterator[Any]:
    if isinstance(value, bool) or value is None or isinstance(value, str):
        return
    if isinstance(value, int) and value > 1:
        yield from sorted({1, value // 2, value - 1})
    elif isinstance(value, dict):
        for key in value:
            yield {other: each for other, each in value.items() if other != key}
        for key, inner in value.items():
            for less in _less(inner):
                yield {**value, key: less}
    elif isinstance(value, (list, tuple)):
        if all(isinstance(each, int) and not isinstance(each, bool) for each in value):  # sizes stay as many
            for at, each in enumerate(value):
                for less in _less(each):
                    yield [*value[:at], less, *value[at + 1 :]]
        else:
            for at in range(len(value)):
                if len(value) > 1:
                    yield [*value[:at], *value[at + 1 :]]


def shrink(
    case: dict[str, Any],
    default: Mapping[str, Any],
    fails: Callable[[dict[str, Any]], bool],
    tries: int = 80,
    seconds: float = 60.0,
) -> dict[str, Any]:
    """Return the smallest case found that still fails, after at most so many attempts and about so many seconds."""
    deadline = time.monotonic() + seconds
    changed = True
    while changed:
        changed = False
        for less in smaller(case, default):
            if tries == 0 or time.monotonic() > deadline:
                return case
            tries -= 1
            if fails(less):
                case, changed = less, True
                break
    return case
