"""Safetensors files written tensor by tensor: no more than one tensor is in memory.

The format: the header (safetensors_header.py), the bytes of the tensors. The format's own library takes a dictionary of
all tensors, and returns neither ranges nor checksums. It reads what is written here.
"""

from __future__ import annotations

import math
import os
import zlib
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .dtypes import SAFETENSORS_NAMES
from .safetensors_header import make_header

Announced = Mapping[str, tuple[tuple[int, ...], torch.dtype]]  # name -> shape and dtype, in the order in the file
CHUNK = 2**22  # bytes that are written, and checksummed, at once


class ByteRange(NamedTuple):
    """A range of a file's bytes, and its checksum."""

    start: int
    stop: int
    crc32: str  # 8 hexadecimal digits; empty where none was computed


def header(tensors: Announced, metadata: Mapping[str, str] | None = None) -> tuple[bytes, dict[str, int]]:
    """Make the header of a safetensors file.

    Args:
        tensors: name -> (shape, dtype) of all tensors, in the order in which the file has them.
        metadata: further entries of the file's metadata.

    Returns:
        The header's bytes, and for each tensor the byte of the file at which it begins.

    Raises:
        ValueError: a dtype that the format does not have.
    """
    sizes = {}
    for name, (shape, dtype) in tensors.items():
        if dtype not in SAFETENSORS_NAMES:
            raise ValueError(
                f"{name} has the dtype {dtype}, which the safetensors format does not have: convert it to one of "
                f"{', '.join(SAFETENSORS_NAMES.values())}"
            )
        sizes[name] = SAFETENSORS_NAMES[dtype], shape, math.prod(shape) * dtype.itemsize
    return make_header(sizes, {"format": "pt", **(metadata or {})})


def raw(tensor: Tensor) -> Any:
    """Return a tensor's bytes as a numpy array; a view where the tensor is contiguous in the host's memory."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()


class TensorStream:
    """Writer of one safetensors file, tensor by tensor.

    Args:
        path: path of the file.
        tensors: name -> (shape, dtype) of all tensors, in the order in which ``write`` will be called.
        checksums: compute a CRC-32 of each range of bytes that is written.
        metadata: further entries of the file's metadata.

    Attributes:
        head: range of the bytes before the first tensor.

    Raises:
        OSError: the file cannot be written, for instance because the disk is full.
        ValueError: a dtype that the format does not have.
    """

    def __init__(
        self, path: Path, tensors: Announced, checksums: bool, metadata: Mapping[str, str] | None = None
    ) -> None:
        top, self._starts = header(tensors, metadata)
        self._tensors, self._checksums = tensors, checksums
        self._names = iter(tensors)
        self._file = path.open("wb", buffering=0)
        self.head = self._write(0, memoryview(top))

    def write(self, name: str, tensor: Tensor) -> ByteRange:
        """Write the next tensor; return its range of bytes in the file.

        Raises:
            ValueError: name, shape or dtype are not those of the next entry of ``tensors``.
        """
        wanted = next(self._names, None)
        if wanted != name:
            raise ValueError(
                f"{name} was written where {wanted or 'the end of the file'} was announced: write the tensors in the "
                "announced order"
            )
        shape, dtype = self._tensors[name]
        if tuple(tensor.shape) != tuple(shape) or tensor.dtype != dtype:
            raise ValueError(
                f"{name} was announced with the shape {tuple(shape)} and {dtype}, but has the shape "
                f"{tuple(tensor.shape)} and {tensor.dtype}: announce what is written"
            )
        return self._write(self._starts[name], memoryview(raw(tensor)))

    def sync(self) -> None:
        """Wait until the disk has the bytes written so far (``fsync``)."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _write(self, start: int, data: memoryview) -> ByteRange:
        crc = 0
        for at in range(0, len(data), CHUNK):
            chunk = data[at : at + CHUNK]
            crc = zlib.crc32(chunk, crc) if self._checksums else 0
            while len(chunk):
                chunk = chunk[os.write(self._file.fileno(), chunk) :]
        return ByteRange(start, start + len(data), f"{crc:08x}" if self._checksums else "")


def write_file(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors to one file.

    Raises:
        OSError, ValueError: as ``TensorStream``.
    """
    announced = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
    with closing(TensorStream(path, announced, checksums=False)) as stream:
        for name, tensor in tensors.items():
            stream.write(name, tensor)
