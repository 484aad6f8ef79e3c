"""Barrier with a time limit, in which ranks exchange texts through the store: it finds out which ranks are missing.

A collective waits for a missing rank until its group's time limit, and blocks its group meanwhile. This barrier has a
time limit of its own, names the missing ranks, and may run in a thread beside the training. No torch.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

_FIRST, _LONGEST = 0.0005, 0.02  # seconds between two checks of the store: the first pause, and the longest
_HERE, _LEFT = "+", "-"  # first character of a key's value: the rank waits or has gone on, or it has given up


def store_barrier(
    store: Any,
    key: str,
    rank: int,
    size: int,
    text: str,
    seconds: float,
    abort: Callable[[], bool] = lambda: False,
) -> list[str | None]:
    """Return the text of each rank; None for ranks that did not arrive within ``seconds``, or gave up before.

    Args:
        store: a store of ``torch.distributed``.
        key: the name of this barrier. Each barrier needs a different name.
        rank, size: this rank, and the number of ranks.
        text: the text that this rank sends to the others.
        seconds: the time limit of the wait for the other ranks.
        abort: called about once a second. If it returns True, the wait ends.
    """
    keys = [f"{key}/{other}" for other in range(size)]
    store.set(keys[rank], _HERE + text)
    now = time.monotonic()
    deadline, ask, pause = now + seconds, now + 1.0, _FIRST
    while not store.check(keys):
        now = time.monotonic()
        if now > ask:
            ask = now + 1.0
            deadline = now - 1.0 if abort() else deadline
        if now > deadline:
            arrived = [store.check([rank_key]) for rank_key in keys]
            if all(arrived):
                break
            answers = [_read(store, rank_key) if here else None for rank_key, here in zip(keys, arrived, strict=True)]
            # For ranks that arrive later, this rank is missing too. The key stays: another may be about to read it.
            store.set(keys[rank], _LEFT)
            return answers
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST)
    return [_read(store, rank_key) for rank_key in keys]


def _read(store: Any, key: str) -> str | None:
    text: str = store.get(key).decode()
    return text[1:] if text.startswith(_HERE) else None
