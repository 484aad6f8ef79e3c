"""Texts that any rank posts alone, and rank 0 reads later, through the store: no collective. No torch."""

from __future__ import annotations

import contextlib
from typing import Any

from .hang_watch import with_timeout

_LIMIT = 5.0  # seconds in which the store must answer


class Mailbox:
    """Texts for rank 0.

    Args:
        store: a store of ``torch.distributed``; None on a single process, which posts nothing.
        name: name of this mailbox in the store, equal on all ranks.
    """

    def __init__(self, store: Any, name: str) -> None:
        self._store, self._name = store, name
        self._read = 0

    def post(self, text: str) -> None:
        """Send a text to rank 0."""
        if self._store is not None:
            with contextlib.suppress(RuntimeError, TimeoutError):  # as in ``read``; or it was stopped
                with_timeout(_LIMIT, lambda: self._post(text))

    def _post(self, text: str) -> None:
        number = self._store.add(f"{self._name}/posted", 1)
        self._store.set(f"{self._name}/{number}", text)

    def read(self) -> list[str]:
        """Return the texts that have arrived, in the order in which they were posted, and remove them."""
        texts: list[str] = []
        if self._store is None:
            return texts
        with contextlib.suppress(RuntimeError):  # the process that holds the store may have ended
            posted = self._store.add(f"{self._name}/posted", 0)
            while self._read < posted and self._store.check([key := f"{self._name}/{self._read + 1}"]):
                texts.append(self._store.get(key).decode())
                self._store.delete_key(key)
                self._read += 1
        return texts
