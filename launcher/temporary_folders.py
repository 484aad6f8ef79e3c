"""Temporary folders of launchers, each with a locked file, by which the next launch knows those of killed launchers.

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

_PREFIXES = ("triax-launch-", "pymp-")  # of a launch; of multiprocessing, for its fork server's socket
_LOCKED = "triax-launcher-is-alive"


@contextlib.contextmanager
def launch_folder() -> Iterator[str]:
    """Context with a temporary folder of one launch; at its beginning, folders of killed launchers are removed."""
    _remove_dead()
    _lock_process_folder()
    with tempfile.TemporaryDirectory(prefix=_PREFIXES[0]) as folder:
        lock = _locked(Path(folder))
        try:
            yield folder
        finally:
            os.close(lock)


def _lock_process_folder() -> None:
    """Lock multiprocessing's temporary folder of this process, until this process ends."""
    folder = Path(util.get_temp_dir())
    if not (folder / _LOCKED).exists():
        _locked(folder)  # never closed: multiprocessing removes the folder when the process ends in order


def _locked(folder: Path) -> int:
    """Make a folder's locked file; return its open file descriptor, which no other program inherits."""
    lock = os.open(folder / _LOCKED, os.O_CREAT | os.O_RDWR, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # a file system without locks: without this file nobody takes the folder for a dead one
        (folder / _LOCKED).unlink()
    return lock


def _remove_dead() -> None:
    """Remove this user's folders that have a locked file whose lock has ended."""
    for folder in Path(tempfile.gettempdir()).iterdir():
        if not folder.name.startswith(_PREFIXES):
            continue
        try:
            lock = os.open(folder / _LOCKED, os.O_RDWR | os.O_NOFOLLOW)
        except OSError:  # not of a launcher, or another user's
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if folder.lstat().st_uid == os.getuid() and not folder.is_symlink():
                shutil.rmtree(folder, ignore_errors=True)
        except OSError:  # its launcher is alive
            pass
        finally:
            os.close(lock)
