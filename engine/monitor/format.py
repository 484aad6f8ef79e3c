"""Numbers as text, for reports: counts, bytes, durations, rates."""

from __future__ import annotations

from collections.abc import Mapping


def count(number: float, unit: str = "") -> str:
    """Return a count in powers of 1000, ``3.14 M``, ``6.28 GMACs``; unchanged below 1000."""
    value, step = float(number), 0
    while abs(value) >= 1000 and step < 5:
        value, step = value / 1000, step + 1
    text = f"{value:.2f}" if step or value != int(value) else f"{int(value)}"
    return f"{text} {('', 'K', 'M', 'G', 'T', 'P')[step]}{unit}".rstrip()


def size(number: float) -> str:
    """Return bytes in powers of 1024: ``2.0 KB``."""
    value, step = float(number), 0
    while abs(value) >= 1024 and step < 4:
        value, step = value / 1024, step + 1
    return f"{value:.1f} {('B', 'KB', 'MB', 'GB', 'TB')[step]}" if step else f"{int(number)} B"


def duration(seconds: float) -> str:
    """Return seconds as ``1.25 s``, ``3.10 ms`` or ``42.00 us``."""
    for unit, length in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= length:
            return f"{seconds / length:.2f} {unit}"
    return f"{seconds * 1e6:.2f} us"


def rate(number: float, seconds: float | None, unit: str = "FLOPS") -> str:
    """Return a count per second; ``-`` if the seconds are not known."""
    return count(number / seconds, unit) if seconds else "-"


def numbers_in_words(numbers: Mapping[str, float | list[float]]) -> list[str]:
    """Return ``name value`` for each single number, for a line on the terminal; lists are left out."""
    return [f"{name} {value:.4f}" for name, value in numbers.items() if not isinstance(value, list)]
