"""Checkpoints on a file system of fsspec, by a URI such as ``s3://bucket/run``.

s3://bucket/run/                                save_dir of save_checkpoint
  latest                                        the tag of the last checkpoint
  .lock                                         the run that took the folder last
  .saved.json                                   for each tag, the save that wrote the checkpoint
  global_step10/index.json                      written last: a checkpoint is complete if it is there
  global_step10/rank-00000.RUN-3.safetensors    the boxes of one rank; the name has the run and the number of the save
  global_step10/rank-00000.RUN-3.json           a rank's part of the index, until the index is written

An object store has no renaming of folders. So files have names of their own save, and nothing that an index names is
ever replaced; index.json alone is, in one step. Reading is by ranges of bytes.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

from ...base.checks import check_path
from ...base.errors import CheckpointError, ConfigError, to_install

_URI, _ONE_SLASH = re.compile(r"([a-z][a-z0-9+.-]+)://."), re.compile(r"([a-z][a-z0-9+.-]+):/[^/]")
# Stores without folders, where writing an object replaces it in one step. In others a file is renamed.
_STORES = {"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "adl", "oss", "oci"}


class RemotePath:
    """Folder or file on a file system of fsspec. It has the methods of ``Path`` that checkpoints use.

    Args:
        uri: the URI.

    Raises:
        ConfigError: fsspec, or the package for the URI's protocol, is not installed; or there is no such protocol.
    """

    def __init__(self, uri: str) -> None:
        self._uri = uri.rstrip("/")
        _ = self._place

    @cached_property
    def _place(self) -> tuple[Any, str]:
        try:
            from fsspec.core import url_to_fs
        except ImportError as error:
            raise ConfigError(
                f"{self._uri} needs the package fsspec, which is not installed. Type {to_install('remote')}"
            ) from error
        try:
            system, path = url_to_fs(self._uri)
        except ImportError as error:
            raise ConfigError(f"{self._uri} needs another package: {error}. Type pip install with its name") from error
        except Exception as error:  # each file system has its own
            raise ConfigError(f"{self._uri} is not a folder that fsspec can open: {_reason(error)}") from error
        return system, str(path).rstrip("/")

    def __str__(self) -> str:
        return self._uri

    def __repr__(self) -> str:
        return f"RemotePath({self._uri!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RemotePath) and self._uri == other._uri

    def __hash__(self) -> int:
        return hash(self._uri)

    def __truediv__(self, name: str) -> RemotePath:
        return RemotePath(f"{self._uri}/{name}")

    @property
    def parent(self) -> RemotePath:
        """Folder that contains this one."""
        return RemotePath(self._uri.rpartition("/")[0])

    def absolute(self) -> RemotePath:
        """Return this path: a URI is absolute."""
        return self

    def is_file(self) -> bool:
        """Return True if there is a file of this name."""
        with self._calling("looked up"):
            return bool(self._system.isfile(self._path))

    def size(self) -> int:
        """Return the bytes of the file.

        Raises:
            FileNotFoundError: there is no such file.
        """
        with self._calling("looked up"):
            return int(self._system.size(self._path))

    def read_bytes(self, start: int | None = None, stop: int | None = None) -> bytes:
        """Return the bytes of the file, or a range of them.

        Raises:
            FileNotFoundError: there is no such file.
            CheckpointError: the file cannot be read.
        """
        with self._calling("read"):
            data = bytes(self._system.cat_file(self._path, start=start, end=stop))
        if start is not None and stop is not None and len(data) != stop - start:
            raise CheckpointError(
                f"{self} was read in part: {len(data)} of the bytes {start} to {stop} arrived. Check the network, and "
                "load again"
            )
        return data

    def write_bytes(self, data: bytes) -> None:
        """Write a small file in one step: a reader finds the old content or the new.

        Raises:
            CheckpointError: the file cannot be written.
        """
        with self._calling("written"):
            if self._is_store:
                self._system.pipe_file(self._path, data)
                return
            self._make_parent()
            beside = f"{self._path}.part"
            self._system.pipe_file(beside, data)
            self._require_size(int(self._system.size(beside)), len(data))
            self._system.mv(beside, self._path)

    def upload(self, file: Path) -> None:
        """Copy a local file to this path.

        Raises:
            CheckpointError: the file cannot be written, or has fewer bytes there.
        """
        with self._calling("written"):
            if not self._is_store:
                self._make_parent()
            self._system.put_file(str(file), self._path)
        self._require_size(self.size(), file.stat().st_size)

    def remove(self) -> None:
        """Remove this file, or this folder: its index first, so that the rest never looks complete."""
        with self._calling("removed"), contextlib.suppress(FileNotFoundError):
            index = f"{self._path}/index.json"
            if self._system.exists(index):
                self._system.rm(index)
            self._system.rm(self._path, recursive=True)

    def files(self) -> list[str]:
        """Return the names of the files in this folder."""
        return self.listing(1).get("", [])

    def listing(self, depth: int = 2) -> dict[str, list[str]]:
        """Return the names of the files in each folder of this folder; under "" those of the folder itself."""
        with self._calling("listed"):
            self._system.invalidate_cache()
            try:
                names = self._system.find(self._path, maxdepth=depth)
            except FileNotFoundError:
                names = []
        files: dict[str, list[str]] = {}
        for name in sorted(names):
            folder, _, file = name.removeprefix(self._path).lstrip("/").rpartition("/")
            files.setdefault(folder, []).append(file)
        return files

    @property
    def _system(self) -> Any:
        return self._place[0]

    @property
    def _path(self) -> str:
        return self._place[1]

    @property
    def _is_store(self) -> bool:
        names = self._system.protocol
        return not _STORES.isdisjoint([names] if isinstance(names, str) else names)

    def _make_parent(self) -> None:
        self._system.makedirs(self._path.rpartition("/")[0], exist_ok=True)

    def _require_size(self, there: int, sent: int) -> None:
        if there != sent:
            raise CheckpointError(
                f"{self} was written in part: {there} of {sent} bytes are there. Check the network and the space there"
            )

    @contextlib.contextmanager
    def _calling(self, done: str) -> Iterator[None]:
        """Return a context in which each error of the file system becomes one that says what to check.

        Args:
            done: what is done to the file, as "read".
        """
        try:
            yield
        except (FileNotFoundError, CheckpointError):
            raise
        except PermissionError as error:
            raise CheckpointError(
                f"{self} cannot be {done}, because permission is denied ({_reason(error)}). Give this process "
                "credentials for it, as the documentation of fsspec's file system says"
            ) from error
        except Exception as error:  # each file system has classes of its own
            raise CheckpointError(
                f"{self} cannot be {done}, because of {_reason(error)}. Check the address, the network and the "
                "credentials"
            ) from error


Folder = Path | RemotePath


def folder_at(folder: str | Path | RemotePath) -> Folder:
    """Return the folder of checkpoints for a path or a URI.

    Raises:
        ConfigError: no path, a URI of which a slash is missing, or one that fsspec cannot open.
    """
    if isinstance(folder, RemotePath):
        return folder
    check_path("the folder of checkpoints", folder=folder)
    text = str(folder)
    if _URI.match(text):
        return RemotePath(text)
    match = _ONE_SLASH.match(text)
    if match is not None and match[1] in _protocols():
        raise ConfigError(
            f"{text} has one slash after {match[1]}:, but a URI has two. Write {match[1]}://, as text and not as a "
            "pathlib.Path, which drops one"
        )
    return Path(folder)


def local_folder(folder: str | Path) -> Path:
    """Return a folder of this host's file systems.

    Raises:
        ConfigError: a URI.
    """
    path = folder_at(folder)
    if isinstance(path, RemotePath):
        raise ConfigError(f"{folder} is a URI, but this is written to a local folder: give a path, and copy it there")
    return path


def _protocols() -> list[str]:
    try:
        from fsspec import available_protocols
    except ImportError:
        return ["s3", "gs", "file", "memory"]
    return [*available_protocols()]


def _reason(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:200]}" if text else type(error).__name__
