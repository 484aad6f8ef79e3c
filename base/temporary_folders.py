"""Temporary folders, each with a locked file, by which the next process knows those of killed processes.

A lock ends with its process, however that ends. A process number in the name would say less: numbers are reused, and
another container has its own.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from multiprocessing import util
from pathlib import Path

# Of a launch; of the upload of a checkpoint; of multiprocessing, for its fork server's socket.
_PREFIXES = ("triax-launch-", "triax-checkpoint-", "pymp-")
_LOCKED = "triax-process-is-alive"


@contextlib.contextmanager
def temporary_folder(kind: str) -> Iterator[Path]:
    """Context with a temporary folder; at its beginning, folders of killed processes are removed.

    Args:
        kind: ``launch`` or ``checkpoint``.
    """
    _remove_dead()
    with tempfile.TemporaryDirectory(prefix=f"triax-{kind}-") as name:
        folder = Path(name)
        lock = _locked(folder)
        try:
            yield folder
        finally:
            os.close(lock)


def lock_process_folder() -> None:
    """Lock multiprocessing's temporary folder of this process, until this process ends."""
    folder = Path(util.get_temp_dir())
    if not (folder / _LOCKED).exists():
        _locked(folder)  # never closed: multiprocessing removes the folder when the process ends in order


def _locked(folder: Path) -> int:
    """Make a folder's locked file; return its open file descriptor, which no other program inherits."""
    new = folder / f"{_LOCKED}.new"
    lock = os.open(new, os.O_CREAT | os.O_RDWR, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        new.rename(folder / _LOCKED)  # locked before another process finds it under its name
    except OSError:  # a file system without locks: without this file nobody takes the folder for a dead one
        new.unlink()
    return lock


def _remove_dead() -> None:
    """Remove this user's folders that have a locked file whose lock has ended."""
    for folder in Path(tempfile.gettempdir()).iterdir():
        if not folder.name.startswith(_PREFIXES):
            continue
        try:
            lock = os.open(folder / _LOCKED, os.O_RDWR | os.O_NOFOLLOW)
        except OSError:  # without a locked file, or another user's
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if folder.lstat().st_uid == os.getuid() and not folder.is_symlink():
                shutil.rmtree(folder, ignore_errors=True)
        except OSError:  # its process is alive
            pass
        finally:
            os.close(lock)
