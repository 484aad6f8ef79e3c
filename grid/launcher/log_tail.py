"""Tail of log files: shows on the launcher's terminal what some ranks print, while they print it."""

from __future__ import annotations

import codecs
import sys
import threading
from collections import defaultdict
from collections.abc import Collection
from functools import partial
from pathlib import Path
from typing import IO

from .worker import EVERY, log_file

_INTERVAL = 0.1  # seconds between two reads


class LogTail:
    """Context that shows the log files of some ranks while they grow, and their last lines at its end.

    Args:
        folder: the folder of the log files. It may have log files of other hosts too.
        ranks: the ranks whose log files are shown. With several ranks, each line begins with ``[rank 3]``.
        started: folder in which each rank of this host leaves a mark when it starts. Only these ranks are shown.
        to: output stream; by default the standard output.
    """

    def __init__(self, folder: Path, ranks: Collection[int], started: Path, to: IO[str] | None = None) -> None:
        self._folder, self._ranks, self._started, self._to = folder, set(ranks), started, to
        self._read: dict[Path, int] = {}
        # An incomplete character stays in a file's decoder until its last bytes come.
        self._decoders = defaultdict[Path, codecs.IncrementalDecoder](
            partial(codecs.getincrementaldecoder("utf-8"), "replace")
        )
        self._partial: dict[Path, str] = {}  # incomplete lines
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True, name="shows what ranks print")

    def __enter__(self) -> LogTail:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join(5)

    def _watch(self) -> None:
        while not self._ended.wait(_INTERVAL):
            self._show()
        self._show(last=True)

    def _show(self, last: bool = False) -> None:
        started = sorted(int(path.name.removeprefix("here-")) for path in self._started.glob("here-*"))
        paths = [log_file(self._folder, rank) for rank in started if rank in self._ranks or EVERY in self._ranks]
        to = sys.stdout if self._to is None else self._to
        for path in paths:
            try:
                with path.open("rb") as file:
                    file.seek(self._read.get(path, 0))
                    new = file.read()
            except FileNotFoundError:  # the rank has not made it yet
                continue
            self._read[path] = self._read.get(path, 0) + len(new)
            text = self._partial.pop(path, "") + self._decoders[path].decode(new, last)
            if len(self._ranks) == 1 and EVERY not in self._ranks:
                to.write(text)
                continue
            end = len(text) if last else text.rfind("\n") + 1
            for line in text[:end].splitlines():
                to.write(f"[rank {path.stem.removeprefix('rank-')}] {line}\n")
            self._partial[path] = text[end:]
        to.flush()
