"""Numbers of tokens and times as a training file writes them: 1.5B, 90m."""

from __future__ import annotations

import re
from typing import Any

_COUNT = re.compile(r"(\d+(?:\.\d+)?(?:e\d+)?)([KMBT]?)", re.IGNORECASE)
_DURATION = re.compile(r"(?:(\d+(?:\.\d+)?)d)?(?:(\d+(?:\.\d+)?)h)?(?:(\d+(?:\.\d+)?)m)?(?:(\d+(?:\.\d+)?)s)?")
_POWERS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


def count(value: Any) -> int | None:
    """Return a number of tokens: 500000, 1e9, "1.5B" (K, M, B and T are powers of 1000); None for None.

    Raises:
        ValueError: another value, or less than one token.
    """
    if value is None:
        return None
    found = _COUNT.fullmatch(str(value).replace("_", "").strip()) if not isinstance(value, bool) else None
    number = 0.0 if found is None else float(found[1]) * _POWERS[found[2].upper()]
    if number < 1 or number != int(number):
        raise ValueError("give a whole number of tokens of at least 1, such as 500000, 1e9 or 1.5B")
    return int(number)


def seconds(value: Any) -> float | None:
    """Return a time in seconds: "90m", "1h30m", "45s", "2d"; None for None.

    Raises:
        ValueError: a time without a unit, or no time at all.
    """
    if value is None:
        return None
    found = _DURATION.fullmatch(value.strip()) if isinstance(value, str) else None
    total = 0.0 if found is None else sum(float(n or 0) * s for n, s in zip(found.groups(), (86400, 3600, 60, 1)))
    if total <= 0:
        raise ValueError("give a time with its unit, such as 90m, 1h30m, 45s or 2d")
    return total
