"""Show what some ranks print, while they print it, on the terminal of the launcher."""

from __future__ import annotations

import sys
import threading
from collections.abc import Collection
from pathlib import Path
from types import TracebackType
from typing import IO

from .worker import EVERY, log_file

_OFTEN = 0.1  # seconds between two looks


class Tail:
    """Within it the files of some ranks are shown as they grow; at the end, to their end.

    Args:
        folder: of the files.
        ranks: which; the lines of several begin with ``[rank 3]``.
        here: where ranks of this host leave a sign that they are; others' files may be in the folder too.
        to: where to; by default the standard output.
    """

    def __init__(self, folder: Path, ranks: Collection[int], here: Path, to: IO[str] | None = None) -> None:
        self._folder, self._ranks, self._here, self._to = folder, set(ranks), here, to
        self._read: dict[Path, int] = {}
        self._rest: dict[Path, bytes] = {}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True, name="shows what ranks print")

    def __enter__(self) -> Tail:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join(5)

    def _watch(self) -> None:
        while not self._over.wait(_OFTEN):
            self._show()
        self._show(last=True)

    def _show(self, last: bool = False) -> None:
        here = sorted(int(path.name.removeprefix("here-")) for path in self._here.glob("here-*"))
        paths = [log_file(self._folder, rank) for rank in here if rank in self._ranks or EVERY in self._ranks]
        to = sys.stdout if self._to is None else self._to
        for path in paths:
            try:
                with path.open("rb") as file:
                    file.seek(self._read.get(path, 0))
                    new = file.read()
            except FileNotFoundError:  # not yet
                continue
            self._read[path] = self._read.get(path, 0) + len(new)
            text = self._rest.pop(path, b"") + new
            if len(self._ranks) == 1 and EVERY not in self._ranks:
                end = len(text) if last else _whole(text)  # half a line is shown, half a character not
                to.write(text[:end].decode(errors="replace"))
                self._rest[path] = text[end:]
            else:
                end = len(text) if last else text.rfind(b"\n") + 1
                rank = path.stem.removeprefix("rank-")
                for line in text[:end].decode(errors="replace").splitlines():
                    to.write(f"[rank {rank}] {line}\n")
                self._rest[path] = text[end:]
        to.flush()


def _whole(text: bytes) -> int:
    """How many of the bytes are whole characters of UTF-8."""
    for back in range(1, min(4, len(text)) + 1):
        byte = text[-back]
        if byte >= 0xC0:  # the first of several
            return len(text) if back >= (2 if byte < 0xE0 else 3 if byte < 0xF0 else 4) else len(text) - back
        if byte < 0x80:
            break
    return len(text)
