"""Time of the day that does not jump when the clock of the machine is set."""

from __future__ import annotations

import time

_START = time.time() - time.monotonic()


def steady_time() -> float:
    """Return seconds since 1970, as the clock said them when this process began, and evenly from then on."""
    return _START + time.monotonic()
