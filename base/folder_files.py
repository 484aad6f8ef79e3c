"""Files of a folder that take the place of an earlier write's together: all of them, or none.

    .new     the files while they are written
    .old     the earlier files, which are moved here when all new ones are on the disk
    .ready   the new files, while they are moved to their names

After a kill the folder has the earlier files as long as there is no ``.ready``. A kill between the renames leaves no
mixture with a name: the next ``FolderFiles`` of the folder undoes the first moves or ends the second ones.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType


class FolderFiles:
    """Files that are written to a folder together.

    A context: its end puts the files in their places, and an error discards them.

    Args:
        folder: the folder, which is created.
        replaced: patterns of names. Files of an earlier write that have one of them go, too.

    Attributes:
        path: the folder to write them to.

    Raises:
        OSError: the folder cannot be written.
    """

    def __init__(self, folder: Path, replaced: Sequence[str] = ()) -> None:
        self._folder, self._replaced = folder, replaced
        self.path, self._old, self._ready = (folder / name for name in (".new", ".old", ".ready"))
        self.end()  # a write that was killed
        folder.mkdir(parents=True, exist_ok=True)
        self.path.mkdir()

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        try:
            if kind is None:
                self._commit()
        finally:
            self.end()

    def end(self) -> None:
        """End the moves of new files that are ready; discard others, in whose place the earlier files stay."""
        if self._ready.exists():
            self._put()
        elif self._old.exists():
            for path in self._old.iterdir():
                path.rename(self._folder / path.name)
            self._old.rmdir()
        shutil.rmtree(self.path, ignore_errors=True)

    def _commit(self) -> None:
        for path in (*self.path.rglob("*"), self.path):
            sync(path, strict=True)
        self._old.mkdir()
        names = {path.name for path in self.path.iterdir()}
        names |= {path.name for pattern in self._replaced for path in self._folder.glob(pattern)}
        for name in names:
            if (self._folder / name).exists():
                (self._folder / name).rename(self._old / name)
        self.path.rename(self._ready)
        self._put()

    def _put(self) -> None:
        """Move the new files to their names, and remove the earlier ones."""
        for path in self._ready.iterdir():
            path.rename(self._folder / path.name)
        sync(self._folder)
        shutil.rmtree(self._old, ignore_errors=True)
        self._ready.rmdir()


def sync(path: Path, strict: bool = False) -> None:
    """Write a file, or the names of a folder's files, onto the disk (``fsync``).

    Args:
        path: the file or the folder.
        strict: raise the disk's errors, except if the file system has no fsync of folders.

    Raises:
        OSError: if the disk reports an error and ``strict`` is set.
    """
    try:
        opened = os.open(path, os.O_RDONLY)
        try:
            os.fsync(opened)
        finally:
            os.close(opened)
    except OSError as error:
        if strict and error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EBADF, errno.EACCES):
            raise
