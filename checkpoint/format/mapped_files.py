"""The safetensors files of a checkpoint, read through memory maps, and their checksums."""

from __future__ import annotations

import mmap
import os
import warnings
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...base.errors import CorruptError
from ...base.files import open_file
from ...base.safetensors import CHUNK, ByteRange
from ...base.safetensors_header import read_header
from .remote import Folder


class MappedFiles:
    """The files of a checkpoint, mapped into memory when they are first used: only the tensors used are read.

    Args:
        path: of the folder.
        files: the size of each file in bytes, which is checked before anything is read from it.
    """

    def __init__(self, path: Folder, files: Mapping[str, int]) -> None:
        self.path = path
        self._files = files
        self._maps: dict[str, tuple[mmap.mmap, Tensor]] = {}

    def tensor(self, file: str, span: ByteRange, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
        """Return the tensor in a range of a file's bytes. Do not write to it.

        Raises:
            CorruptError: the file is missing, or has another size than it was written with.
        """
        if span.start == span.stop:
            return torch.empty(tuple(shape), dtype=dtype)
        _, flat = self._map(file, span)
        values = flat[span.start : span.stop]
        if values.data_ptr() % dtype.itemsize:
            values = values.clone()
        return values.view(dtype).view(tuple(shape))

    def check(self, file: str, span: ByteRange, what: str) -> None:
        """Compare a range of bytes with its checksum. ``what``: its name, for the message.

        Raises:
            CorruptError: the bytes are not those that were written.
        """
        mapped, _ = self._map(file, span)
        crc = 0
        with memoryview(mapped) as view:
            for start in range(span.start, span.stop, CHUNK):
                crc = zlib.crc32(view[start : min(start + CHUNK, span.stop)], crc)
        if f"{crc:08x}" != span.crc32:
            raise CorruptError(
                f"{self.path / file} is damaged: {what}, bytes {span.start} to {span.stop}, has the checksum "
                f"{crc:08x} now, and had {span.crc32} when it was written"
            )

    def header(self, file: str, span: ByteRange) -> dict[str, Any]:
        """Return the header of a file: for each tensor's key its dtype, shape and range of bytes, and ``__metadata__``.

        Raises:
            CorruptError: the bytes are not the header of a safetensors file.
        """
        mapped, _ = self._map(file, span)
        try:
            entries, stop = read_header(mapped[: span.stop])
            if stop != span.stop:
                raise ValueError("another length")
        except ValueError as error:
            raise CorruptError(f"{self.path / file} is damaged: its header is not that of safetensors") from error
        return entries

    def _map(self, file: str, span: ByteRange) -> tuple[mmap.mmap, Tensor]:
        """Return the map of a file, in which at least a range of its bytes can be read."""
        if file not in self._maps:
            path = Path(str(self.path / file))
            try:
                with open_file(path) as opened:
                    size = os.fstat(opened.fileno()).st_size
                    if size != self._files[file]:
                        raise CorruptError(
                            f"{path} is damaged: it has {size} bytes now, and {self._files[file]} were written"
                        )
                    mapped = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
            except OSError as error:
                raise CorruptError(f"{path} is damaged: it cannot be read ({error.strerror})") from error
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # the warning that the map is read-only
                self._maps[file] = mapped, torch.frombuffer(mapped, dtype=torch.uint8)
        if self._maps[file][0].size() < self._files[file]:  # reading what is gone would end the process
            raise CorruptError(f"{self.path / file} is damaged: it was cut off after it was opened")
        return self._maps[file]
