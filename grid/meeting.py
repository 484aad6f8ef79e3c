"""Ranks that tell each other something through the store, and not through a collective: who does not come is known.

A collective waits for a missing rank until its time limit, and nothing else may run in its group meanwhile. Here a
rank may wait for seconds and name those that did not come, and a thread beside the training can do it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

_FIRST, _LONGEST = 0.0005, 0.02  # seconds between two looks


def meet(
    store: Any,
    key: str,
    rank: int,
    size: int,
    text: str,
    seconds: float,
    over: Callable[[], bool] = lambda: False,
) -> list[str | None]:
    """What each rank says; None for those that did not come within ``seconds``.

    Args:
        store: torch's.
        key: of this meeting: another one for each.
        rank, size: this one, of how many.
        text: what this one says.
        seconds: how long to wait for the others.
        over: asked about once a second; where it says so, nobody else is waited for.
    """
    keys = [f"{key}/{other}" for other in range(size)]
    store.set(keys[rank], text)
    now = time.monotonic()
    deadline, ask, pause = now + seconds, now + 1.0, _FIRST
    while not store.check(keys):
        now = time.monotonic()
        if now > ask:
            ask = now + 1.0
            deadline = now - 1.0 if over() else deadline
        if now > deadline:
            came = [store.check([each]) for each in keys]
            if all(came):
                break
            found = [_read(store, each) if here else None for each, here in zip(keys, came, strict=True)]
            store.delete_key(keys[rank])  # it was not here for whoever comes later
            return found
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST)
    return [_read(store, each) for each in keys]


def _read(store: Any, key: str) -> str:
    found: bytes = store.get(key)
    return found.decode()
