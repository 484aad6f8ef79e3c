"""Records: files and lines in which a run tells about itself. An error of writing one never ends the run."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from pathlib import Path

_LOG = logging.getLogger("triax")


class Records:
    """Context in which a run writes a record, such as its metrics. An ``OSError`` is a warning, once for each kind.

    The run goes on, and the next record is tried again: the disk may have room by then.
    """

    def __init__(self) -> None:
        self._said: set[str] = set()

    @contextlib.contextmanager
    def writing(self, what: str) -> Iterator[None]:
        """Return the context in which a record is written; ``what``: its name in the warning."""
        try:
            yield
        except OSError as error:
            if what not in self._said:
                self._said.add(what)
                _LOG.warning(
                    "%s cannot be written: %s. The run continues without it and tries again, without another warning",
                    what,
                    error,
                )


def show(text: str) -> None:
    """Print lines about a run. They are lost where standard output is a file on a full disk, or nobody reads it."""
    with contextlib.suppress(OSError):
        print(text, flush=True)


def append(file: Path, text: str, anew: bool = False) -> None:
    """Append lines to a file: all of them, or none if the disk is full. ``anew``: remove its earlier lines.

    Raises:
        OSError: they cannot be written; the error names the file.
    """
    # Without O_NONBLOCK a FIFO would wait for a reader.
    how = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK | (os.O_TRUNC if anew else 0)
    data, opened = text.encode(), os.open(file, how, 0o666)
    try:
        size = os.fstat(opened).st_size
        try:
            while data:
                data = data[os.write(opened, data) :]
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(opened, size)  # else the next line would continue a part of this one
            raise OSError(error.errno, error.strerror, str(file)) from None
    finally:
        os.close(opened)
