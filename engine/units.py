"""Numbers as reports have them."""

from __future__ import annotations


def count(number: float, unit: str = "") -> str:
    """In powers of 1000: ``3.14 M``, ``6.28 GMACs``; below 1000 as it is."""
    value, step = float(number), 0
    while abs(value) >= 1000 and step < 5:
        value, step = value / 1000, step + 1
    text = f"{value:.2f}" if step or value != int(value) else f"{int(value)}"
    return f"{text} {('', 'K', 'M', 'G', 'T', 'P')[step]}{unit}".rstrip()


def size(number: float) -> str:
    """Bytes, in powers of 1024: ``2.0 KB``."""
    value, step = float(number), 0
    while abs(value) >= 1024 and step < 4:
        value, step = value / 1024, step + 1
    return f"{value:.1f} {('B', 'KB', 'MB', 'GB', 'TB')[step]}" if step else f"{int(number)} B"


def duration(seconds: float) -> str:
    """``1.25 s``, ``3.10 ms``, ``42.00 us``."""
    for unit, part in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= part:
            return f"{seconds / part:.2f} {unit}"
    return f"{seconds * 1e6:.2f} us"


def rate(number: float, seconds: float | None, unit: str = "FLOPS") -> str:
    """A count by the time it took; ``-`` where that is not known."""
    return count(number / seconds, unit) if seconds else "-"
