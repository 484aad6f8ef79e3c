"""The safetensors files of a checkpoint on a file system of fsspec, read by ranges of bytes."""

from __future__ import annotations

import mmap
import tempfile
import warnings
from collections.abc import Mapping

import torch
from torch import Tensor

from ...base.errors import CorruptError
from ...base.safetensors import ByteRange
from .mapped_files import MappedFiles
from .remote import RemotePath

BLOCK = 4 * 2**20  # bytes: what is read of a file is whole blocks
_REQUEST = 16  # blocks in one request


class RemoteFiles(MappedFiles):
    """The files of a remote checkpoint: only the blocks that are used are read, each once.

    They are kept in temporary files, which have no name and are as large on the disk as what was read.

    Args:
        path: of the folder.
        files: the size of each file in bytes.
    """

    def __init__(self, path: RemotePath, files: Mapping[str, int]) -> None:
        super().__init__(path, files)
        self._folder = path
        self._blocks: dict[str, set[int]] = {}

    def _map(self, file: str, span: ByteRange) -> tuple[mmap.mmap, Tensor]:
        if file not in self._maps:
            self._maps[file] = self._reserve(file)
        mapped, _ = self._maps[file]
        here, size = self._blocks.setdefault(file, set()), self._files[file]
        missing = [block for block in range(span.start // BLOCK, -(-span.stop // BLOCK)) if block not in here]
        while missing:
            count = next((i for i in range(1, len(missing)) if missing[i] != missing[0] + i), len(missing))
            count = min(count, _REQUEST)
            start, stop = missing[0] * BLOCK, min((missing[0] + count) * BLOCK, size)
            try:
                mapped[start:stop] = (self._folder / file).read_bytes(start, stop)
            except FileNotFoundError as error:
                raise CorruptError(f"{self._folder / file} is damaged: it is missing") from error
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
        with tempfile.TemporaryFile() as room:
            room.truncate(size)
            mapped = mmap.mmap(room.fileno(), size)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            return mapped, torch.frombuffer(mapped, dtype=torch.uint8)
