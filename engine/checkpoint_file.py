"""A safetensors file of a checkpoint: written tensor by tensor with its checksums, read through a memory map.

8 bytes with the length of a JSON header, the header (name -> dtype, shape, range of bytes), the tensors' bytes. Written
here and not by the format's own library, which takes a dictionary of everything and tells neither ranges nor
checksums; what is written, that library reads.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import warnings
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in NAMES}
_CHUNK = 2**22  # bytes that are written, and summed, at once


class CorruptError(ValueError):
    """What a checkpoint holds is not what was written; the message names the file and the place."""


class Span(NamedTuple):
    """A range of a file's bytes, and what they add up to."""

    start: int
    stop: int
    crc32: str


class Planned(NamedTuple):
    """A tensor to be written. ``value`` is called when it comes to that."""

    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    value: Callable[[], Tensor]


def write_tensors(
    path: Path, planned: Sequence[Planned], after: Callable[[Tensor], None] | None = None
) -> tuple[Span, list[Span]]:
    """Write a file and have it reach the disk.

    Args:
        path: of the file.
        planned: what it holds, in order.
        after: told of each tensor when it is written.

    Returns:
        Where its header is (from the file's first byte), and each tensor.

    Raises:
        OSError: no room, say.
        ValueError: a dtype that the format has not.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for key, shape, dtype, _ in planned:
        if dtype not in NAMES:
            raise ValueError(f"{key} is of {dtype}, which safetensors does not hold")
        stop = at + math.prod(shape) * dtype.itemsize
        header[key] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [at, stop]}
        at = stop
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # tensors begin at a multiple of 8 bytes
    with path.open("wb", buffering=0) as file:
        top = len(text).to_bytes(8, "little") + text
        head = Span(0, len(top), _write(file.fileno(), memoryview(top)))
        spans, at = [], len(top)
        for key, shape, dtype, value in planned:
            tensor = value()
            if tuple(tensor.shape) != shape or tensor.dtype != dtype:
                raise ValueError(f"{key} was to be {shape} of {dtype} and is {tuple(tensor.shape)} of {tensor.dtype}")
            crc = _write(file.fileno(), memoryview(raw(tensor)))
            spans.append(Span(at, at + math.prod(shape) * dtype.itemsize, crc))
            at = spans[-1].stop
            if after is not None:
                after(tensor)
        os.fsync(file.fileno())
    return head, spans


def raw(tensor: Tensor) -> Any:
    """A tensor's bytes, as an array of numpy's: those themselves where they lie in one run of the host's memory."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()


def _write(file: int, data: memoryview) -> str:
    crc = 0
    for start in range(0, len(data), _CHUNK):
        chunk = data[start : start + _CHUNK]
        crc = zlib.crc32(chunk, crc)
        while len(chunk):
            chunk = chunk[os.write(file, chunk) :]
    return f"{crc:08x}"


class Folder:
    """The files of a checkpoint, mapped into memory as they are asked for: only what is looked at is read.

    Args:
        path: of the folder.
        files: of each file its size, for a look before anything is read from it.
    """

    def __init__(self, path: Path, files: Mapping[str, int]) -> None:
        self.path = path
        self._files = files
        self._maps: dict[str, tuple[mmap.mmap, Tensor]] = {}

    def tensor(self, file: str, start: int, stop: int, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
        """A tensor of a file, for reading only.

        Raises:
            CorruptError: the file is not there, or not as long as it was.
        """
        if start == stop:
            return torch.empty(tuple(shape), dtype=dtype)
        _, flat = self._map(file)
        part = flat[start:stop]
        if part.data_ptr() % dtype.itemsize:
            part = part.clone()
        return part.view(dtype).view(tuple(shape))

    def check(self, file: str, span: Span, what: str) -> None:
        """Hold a range of bytes against its checksum.

        Raises:
            CorruptError: they are not those that were written.
        """
        mapped, _ = self._map(file)
        crc = 0
        with memoryview(mapped) as view:
            for start in range(span.start, span.stop, _CHUNK):
                crc = zlib.crc32(view[start : min(start + _CHUNK, span.stop)], crc)
        if f"{crc:08x}" != span.crc32:
            raise CorruptError(
                f"{self.path / file} is damaged: {what}, bytes {span.start} to {span.stop}, has the checksum "
                f"{crc:08x}, and {span.crc32} was written"
            )

    def _map(self, file: str) -> tuple[mmap.mmap, Tensor]:
        if file not in self._maps:
            path = self.path / file
            try:
                with path.open("rb") as opened:
                    size = os.fstat(opened.fileno()).st_size
                    if size != self._files[file]:
                        raise CorruptError(
                            f"{path} is damaged: it has {size} bytes, and {self._files[file]} were written"
                        )
                    mapped = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
            except OSError as error:
                raise CorruptError(f"{path} is damaged: it cannot be read ({error.strerror})") from error
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # that it must not be written to: it is not
                self._maps[file] = mapped, torch.frombuffer(mapped, dtype=torch.uint8)
        return self._maps[file]
