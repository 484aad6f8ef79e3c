"""Identity of a run in its checkpoints: which run wrote them, in which order, and from which checkpoint it came."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

from ..base.errors import CheckpointError
from .format import folder as folders
from .format.lock import FolderLock, RemoteLock
from .format.remote import Folder, RemotePath

_MOST_LOCKS = 4  # folders that a run keeps locked, those of its last saves


class Lineage:
    """A run's identity, its place in the order of checkpoints, and its locks.

    A run is one engine from ``initialize`` on. A run that resumes is a new one, whose first checkpoint names as its
    parent the checkpoint that was loaded.

    Args:
        run: the run's identity, which is equal on every rank.
    """

    def __init__(self, run: str) -> None:
        self.run = run
        self._saves = 0
        self._parent: dict[str, Any] | None = None
        self._orders: dict[Folder, int] = {}
        self._locks: dict[Folder, FolderLock | RemoteLock] = {}

    def next_save(self) -> dict[str, Any]:
        """Return the identity of the next checkpoint, for the header. ``begin`` adds its order."""
        self._saves += 1
        return {"run": self.run, "save": self._saves, "order": 0, "parent": self._parent}

    def lock(self, folder: Folder, wait: bool = True) -> bool:
        """Take the lock of a folder, and tidy up what an earlier owner left. Only rank 0 calls it.

        Args:
            folder: the folder of checkpoints.
            wait: wait for a heartbeat where nothing else tells if another owner lives.

        Returns:
            True if the lock was taken now, False if this process had it.

        Raises:
            CheckpointError: if another run saves into the folder.
            OSError: if the folder cannot be written to.
        """
        folder = folder.absolute()
        lock = self._locks.pop(folder, None)
        if lock is None:
            lock = RemoteLock(folder, self.run) if isinstance(folder, RemotePath) else FolderLock(folder, self.run)
        taken = lock.hold(wait)
        self._locks[folder] = lock
        if len(self._locks) > _MOST_LOCKS:  # a Trainer saves each checkpoint in another folder
            del self._locks[next(iter(self._locks))]
        if taken:
            folders.tidy_up(folder, self.run)
        return taken

    def tidy_up(self, folder: Folder) -> None:
        """Undo and remove what an interrupted run left, unless a run saves into the folder now, or it is read-only."""
        if not isinstance(folder, RemotePath) and folder.is_dir():
            with contextlib.suppress(CheckpointError, OSError):
                if self.lock(folder, wait=False):
                    self.unlock(folder)

    def unlock(self, folder: Folder) -> None:
        """Release the lock of a folder."""
        self._locks.pop(folder.absolute(), None)

    def begin(self, folder: Folder, tag: str, identity: dict[str, Any]) -> None:
        """Make the folder to write a checkpoint to, and set the checkpoint's order. Only rank 0 calls it."""
        taken = self.lock(folder)
        if taken or folder not in self._orders:
            self._orders[folder] = folders.last_order(folder)
        identity["order"] = self._orders[folder] + 1
        folders.begin(folder, tag, self.run)

    def written(self, folder: Folder, header: Mapping[str, Any], checksum: str) -> None:
        """Set the parent of the next checkpoint to the one that was written. Only rank 0 calls it."""
        self._orders[folder] = header["identity"]["order"]
        self._parent = {"run": self.run, "step": header["step"], "checksum": checksum}

    def loaded(self, header: Mapping[str, Any], checksum: str) -> None:
        """Set the parent of the next checkpoint to the one that was loaded."""
        run = (header.get("identity") or {}).get("run", "")
        self._parent = {"run": run, "step": header["step"], "checksum": checksum}
