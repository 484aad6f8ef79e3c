"""Lock of a folder of checkpoints: one run at a time saves into it.

``.lock`` names the run, the host and the process that save into the folder. Its time of modification is the heartbeat,
which a thread renews. The lock of a process that has ended is taken over: on the same host at once, because the process
is looked up there; from another host, as over NFS, after a minute in which the heartbeat stood still. No clock is read:
clocks of two hosts differ, and may step back.

A run that was held up for longer than that may come back, and find its lock taken. It looks before it gives a
checkpoint its name, and each run writes under a name of its own, so that even then no checkpoint is of two runs.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import socket
import threading
import time
import weakref
from pathlib import Path
from typing import Any, NamedTuple

from ...base.errors import CheckpointError
from ...base.files import open_file, parse_json
from .remote import RemotePath

NAME = ".lock"
_BEAT = 10.0  # seconds between two heartbeats
_LOOKS, _PAUSE = 12, 5.0  # looks, and seconds before each, in which the heartbeat of an owner that lives moves


class _FoundLock(NamedTuple):
    """Content of a lock file, and the time of its last heartbeat."""

    content: bytes
    beat: int

    @property
    def owner(self) -> dict[str, Any]:
        """Run, host and process of the lock; empty if the file cannot be read."""
        try:
            owner = parse_json(self.content)
        except ValueError:
            return {}
        return owner if isinstance(owner, dict) else {}


class FolderLock:
    """Lock of one folder, for one run. Engines of one process share it. Released when it is dropped, and at exit.

    Args:
        folder: the folder of checkpoints.
        run: the run's identity.
    """

    def __init__(self, folder: Path, run: str) -> None:
        self._folder, self._path, self._run = folder, folder / NAME, run
        self._release: weakref.finalize[Any, FolderLock] | None = None

    def hold(self, wait: bool = True) -> bool:
        """Take the lock, or check that this process still has it.

        Args:
            wait: wait for a heartbeat where nothing else tells if the owner lives. If False, it counts as living.

        Returns:
            True if it was taken now: then nothing else in the folder is of a run that still saves.

        Raises:
            CheckpointError: if another run has it, with that run's host and process.
            OSError: if the folder cannot be written to.
        """
        while True:
            lock = self._read()
            if lock is None:
                if self._create():
                    return True
            elif {key: lock.owner.get(key) for key in ("machine", "pid", "started")} == _process():
                return False
            elif (alive := self._alive(lock, wait)) is False:
                self._remove(lock)
            elif alive:
                owner = lock.owner
                raise CheckpointError(
                    f"the run {owner.get('run', '?')} on host {owner.get('host', '?')}, process "
                    f"{owner.get('pid', '?')}, saves into {self._folder}, and two runs in one folder would replace "
                    "each other's checkpoints. End that run, or save this one into another folder"
                )

    def _read(self) -> _FoundLock | None:
        try:
            with open_file(self._path) as opened:  # NFS asks the server at each opening
                return _FoundLock(opened.read(4096), os.fstat(opened.fileno()).st_mtime_ns)
        except FileNotFoundError:
            if self._path.is_symlink():  # to nothing: no run has it
                self._path.unlink(missing_ok=True)
            return None

    def _create(self) -> bool:
        """Make the file with its content in one call, which fails if there is one. False: another run was first."""
        self._folder.mkdir(parents=True, exist_ok=True)
        token = secrets.token_hex(8)
        owner = {"run": self._run, "host": socket.gethostname(), **_process(), "folder": self._inode(), "token": token}
        content, beside = json.dumps(owner).encode(), self._path.with_name(f"{NAME}.{token}")
        try:
            beside.write_bytes(content)
            os.link(beside, self._path)
        except FileExistsError:
            return False
        except FileNotFoundError:  # a new owner has tidied up
            return False
        except PermissionError:
            if not beside.exists():
                raise  # the folder is read-only; else its file system has no links
            try:
                with self._path.open("xb") as file:
                    file.write(content)
            except FileExistsError:
                return False
        finally:
            beside.unlink(missing_ok=True)
        for left in self._folder.glob(f"{NAME}.*"):
            left.unlink(missing_ok=True)
        if self._release is not None:
            self._release()
        end = threading.Event()
        self._release = weakref.finalize(self, _unlock, self._path, content, end, os.getpid())
        threading.Thread(target=_beat, args=(self._path, content, end), name="triax lock", daemon=True).start()
        return True

    def _inode(self) -> int:
        return self._folder.stat().st_ino

    def _alive(self, found: _FoundLock, wait: bool) -> bool | None:
        """Return True if the owner lives, False if it has ended, None if the lock has changed hands meanwhile."""
        owner, process = found.owner, _process()
        if owner.get("machine") == process["machine"]:
            if _started(owner.get("pid")) != owner.get("started"):
                return False
            if owner.get("folder") == self._inode():
                return True  # in a copy of a folder the lock is a copy, which no heartbeat moves
        if not wait:
            return True
        logging.getLogger("triax").warning(
            "%s is locked by the run %s on host %s, process %s: waiting %g s to see if that run is alive",
            *(self._folder, *(owner.get(key, "?") for key in ("run", "host", "pid")), _LOOKS * _PAUSE),
        )
        for _ in range(_LOOKS):
            time.sleep(_PAUSE)
            now = self._read()
            if now is None or now.content != found.content:
                return None
            if now.beat != found.beat:
                return True
        return False

    def _remove(self, found: _FoundLock) -> None:
        """Remove the lock of a run that has ended. A lock that another run took meanwhile is put back."""
        taken = self._path.with_name(f"{NAME}.{secrets.token_hex(8)}")
        with contextlib.suppress(FileNotFoundError, FileExistsError):
            self._path.rename(taken)
            if taken.read_bytes() != found.content:
                os.link(taken, self._path)
        taken.unlink(missing_ok=True)


class RemoteLock:
    """Owner of a remote folder, for one run: the run that took it last. An older one then cannot save any more.

    An object store has no lock that ends with its process. So a new run takes the folder at its first save, or at its
    start if it saves automatically, and the one before, if it still runs, gets an error at its next save.

    Args:
        folder: the folder of checkpoints.
        run: the run's identity.
    """

    def __init__(self, folder: RemotePath, run: str) -> None:
        self._folder, self._run, self._taken = folder, run, False

    def hold(self, wait: bool = True) -> bool:
        """Take the folder, or check that this process still has it.

        Args:
            wait: not used: there is nothing to wait for.

        Returns:
            True if it was taken now.

        Raises:
            CheckpointError: another run has taken it since, or it cannot be read or written.
        """
        path, record = self._folder / NAME, {"run": self._run, "host": socket.gethostname(), **_process()}
        try:
            taker = parse_json(path.read_bytes())
        except (FileNotFoundError, ValueError):
            taker = {}
        if all(taker.get(key) == record[key] for key in ("machine", "pid", "started")):
            self._taken = True
            return False  # engines of one process share the folder
        if self._taken:
            raise CheckpointError(
                f"the run {taker.get('run', '?')} on host {taker.get('host', '?')}, process {taker.get('pid', '?')}, "
                f"has taken {self._folder} since, and two runs in one folder would replace each other's checkpoints. "
                "End one of them, or save into another folder"
            )
        path.write_bytes(json.dumps(record).encode())
        self._taken = True
        return True


def _beat(path: Path, content: bytes, end: threading.Event) -> None:
    while not end.wait(_BEAT):
        try:
            if path.read_bytes() != content:
                return
            os.utime(path)
        except FileNotFoundError:
            return
        except OSError:
            pass  # the server does not answer: it is asked again


def _unlock(path: Path, content: bytes, end: threading.Event, pid: int) -> None:
    end.set()
    if os.getpid() == pid:  # not in a fork of the process
        with contextlib.suppress(OSError):
            if path.read_bytes() == content:
                path.unlink()


def _process() -> dict[str, Any]:
    """Return what identifies this process: the machine with its start, the process number, and the process's start."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
        machine = f"{boot} {os.readlink('/proc/self/ns/pid')}"  # containers number their processes on their own
    except OSError:
        machine = socket.gethostname()
    return {"machine": machine, "pid": os.getpid(), "started": _started(os.getpid())}


def _started(pid: Any) -> str | None:
    """Return when a process of this machine started, as text; None if it has ended."""
    if not isinstance(pid, int) or pid <= 0:
        return None
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        return None if fields[0] in "ZX" else fields[19]
    except FileNotFoundError:
        if Path("/proc/self/stat").exists():
            return None
    except ProcessLookupError:
        return None
    try:  # a system without /proc
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except PermissionError:
        pass
    return "running"
