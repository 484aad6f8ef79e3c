"""The safetensors files of a checkpoint on a file system of fsspec, read by ranges of bytes."""

from __future__ import annotations

import contextlib
import mmap
import os
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from typing import IO

import torch
from torch import Tensor

from ...base.errors import CheckpointError, CorruptError
from ...base.safetensors import ByteRange
from .mapped_files import MappedFiles
from .remote import RemotePath

BLOCK = 4 * 2**20  # bytes: what is read of a file is whole blocks
_REQUEST = 16  # blocks in one request


class RemoteFiles(MappedFiles):
    """The files of a remote checkpoint: only the blocks that are used are read, each once.

    They are kept in temporary files, which have no name and are as large on the disk as what was read. The blocks are
    written to the files and read through their maps: a write to a map would end the process if there is no room.

    Args:
        path: of the folder.
        files: the size of each file in bytes.
    """

    def __init__(self, path: RemotePath, files: Mapping[str, int]) -> None:
        super().__init__(path, files)
        self._folder = path
        self._blocks: dict[str, set[int]] = {}
        self._rooms: dict[str, IO[bytes]] = {}  # the temporary files

    def _map(self, file: str, span: ByteRange) -> tuple[mmap.mmap, Tensor]:
        if file not in self._maps:
            self._maps[file] = self._reserve(file)
        here, size = self._blocks.setdefault(file, set()), self._files[file]
        missing = [block for block in range(span.start // BLOCK, -(-span.stop // BLOCK)) if block not in here]
        while missing:
            count = next((i for i in range(1, len(missing)) if missing[i] != missing[0] + i), len(missing))
            count = min(count, _REQUEST)
            start, stop = missing[0] * BLOCK, min((missing[0] + count) * BLOCK, size)
            try:
                data = (self._folder / file).read_bytes(start, stop)
            except FileNotFoundError as error:
                raise CorruptError(f"{self._folder / file} is damaged: it is missing") from error
            with self._keeping(file):
                while data:
                    written = os.pwrite(self._rooms[file].fileno(), data, start)
                    data, start = data[written:], start + written
            here.update(missing[:count])
            del missing[:count]
        return self._maps[file]

    def _reserve(self, file: str) -> tuple[mmap.mmap, Tensor]:
        """Return a map of an empty temporary file of the size of a remote one."""
        wanted, path = self._files[file], self._folder / file
        try:
            size = path.size()
        except FileNotFoundError as error:
            raise CorruptError(f"{path} is damaged: it is missing") from error
        if size != wanted:
            raise CorruptError(f"{path} is damaged: it has {size} bytes now, and {wanted} were written")
        with self._keeping(file):
            self._rooms[file] = room = tempfile.TemporaryFile()  # noqa: SIM115
            room.truncate(size)
            mapped = mmap.mmap(room.fileno(), size)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            return mapped, torch.frombuffer(mapped, dtype=torch.uint8)

    @contextlib.contextmanager
    def _keeping(self, file: str) -> Iterator[None]:
        """Return a context in which a part of a file is written to its temporary file.

        Raises:
            CheckpointError: there is no room for it.
        """
        try:
            yield
        except OSError as error:
            raise CheckpointError(
                f"{self._folder / file} has {self._files[file]} bytes, and what is read of it cannot be kept in the "
                f"temporary folder {tempfile.gettempdir()} ({error.strerror}): make room there, or set TMPDIR to a "
                "folder with room"
            ) from error
