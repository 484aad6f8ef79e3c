"""One file of tokens: a safetensors file with documents one after another, written at once and read by memory map.

| tensor | dtype | shape | |
|---|---|---|---|
| offsets | I64 | (N + 1,) | first token of each of the N documents, and the number of tokens |
| keys | U64 | (N,) | hash of each document's text, by which it is held out |
| origins | U32 | (N, 2) | source of each document (its number in the metadata's ``sources``), and its line there |
| tokens | U8, U16 or U32 | (T,) | |
| counted | U8 | (T,) | of conversations: 1 if the token counts in the loss, else 0 |
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..base.errors import CorruptError
from ..base.safetensors_header import make_header, read_header

Array = NDArray[Any]

DTYPES: Mapping[str, Any] = {"U8": np.uint8, "U16": np.uint16, "U32": np.uint32, "U64": np.uint64, "I64": np.int64}
_NAMES = {np.dtype(dtype): name for name, dtype in DTYPES.items()}


def token_dtype(vocab_size: int) -> str:
    """Return the name of the smallest dtype that holds every token of a vocabulary."""
    return "U8" if vocab_size <= 2**8 else "U16" if vocab_size <= 2**16 else "U32"


def write_tensors(path: Path, tensors: Mapping[str, Array], sources: list[list[str]]) -> tuple[int, str]:
    """Write a file under a temporary name, onto the disk, and rename it. Returns its bytes and its SHA-256.

    Args:
        path: the file's name.
        tensors: arrays, those of the widest dtypes first, so that each is aligned.
        sources: name and unit (line or row) of each source, for the metadata.
    """
    sizes = {name: (_NAMES[array.dtype], array.shape, array.nbytes) for name, array in tensors.items()}
    chunks = [make_header(sizes, {"format": "np", "sources": json.dumps(sources)})[0]]
    chunks += [np.ascontiguousarray(array).reshape(-1).view(np.uint8).data for array in tensors.values()]  # type: ignore[misc]
    digest = hashlib.sha256()
    for chunk in chunks:
        digest.update(chunk)
    write_atomically(path, *chunks)
    return sum(map(len, chunks)), digest.hexdigest()


def write_atomically(path: Path, *chunks: bytes, durable: bool = True) -> None:
    """Write a file whose name is there only when all of it is written, and on the disk if ``durable``."""
    temporary = path.with_name(f".{path.name}.part")
    with temporary.open("wb") as file:
        file.writelines(chunks)
        if durable:
            file.flush()
            os.fsync(file.fileno())
    temporary.replace(path)


class TokenFile:
    """Memory maps of one file of tokens. Nothing is read before it is used, but the header and the offsets.

    Args:
        path: the file.
        dtype: name of the tokens' dtype.
        documents, tokens: numbers that the index states.
        is_chat: the file has ``counted``.

    Attributes:
        offsets, keys, origins, tokens, counted: arrays, as the module's table has them; ``counted`` is None for text.

    Raises:
        CorruptError: the file is not one that was written with these numbers.
    """

    def __init__(self, path: Path, dtype: str, documents: int, tokens: int, is_chat: bool) -> None:
        self.path = path
        expected = {"offsets": ("I64", [documents + 1]), "keys": ("U64", [documents])}
        expected |= {"origins": ("U32", [documents, 2]), "tokens": (dtype, [tokens])}
        expected |= {"counted": ("U8", [tokens])} if is_chat else {}
        try:
            with path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise CorruptError(f"{path} cannot be read, because {_reason(error)}.") from error
        entries, start = self._header()
        tensors = {name: self._tensor(name, entries, start, *kind) for name, kind in expected.items()}
        self.offsets, self.keys, self.origins = tensors["offsets"], tensors["keys"], tensors["origins"]
        self.tokens: Array = tensors["tokens"]
        self.counted: Array | None = tensors.get("counted")
        lengths = np.diff(self.offsets)
        if self.offsets[0] != 0 or self.offsets[-1] != tokens or (lengths <= 0).any():
            raise self._damaged("the offsets of its documents do not increase from 0 to the number of tokens")

    def require_whole(self) -> None:
        """Check that the file has not been cut off meanwhile: reading what is gone would end the process.

        Raises:
            CorruptError: it was cut off.
        """
        if (size := self._map.size()) < len(self._map):
            raise self._damaged(f"it had {len(self._map)} bytes when it was opened, and has {size} now")

    def sources(self) -> list[list[str]]:
        """Return name and unit (line or row) of each source."""
        try:
            entries, _ = self._header()
            pairs = json.loads(entries["__metadata__"]["sources"])
            if all(isinstance(name, str) and unit in ("line", "row") for name, unit in pairs):
                return [list(pair) for pair in pairs]
        except (LookupError, TypeError, ValueError, RecursionError):
            pass
        raise self._damaged("its header does not name the sources")

    def _header(self) -> tuple[dict[str, Any], int]:
        try:
            return read_header(self._map)
        except ValueError as error:
            raise self._damaged(str(error)) from error

    def _tensor(self, name: str, entries: dict[str, Any], start: int, dtype: str, shape: list[int]) -> Array:
        kind = np.dtype(DTYPES[dtype])
        bytes_ = int(np.prod(shape, dtype=object)) * kind.itemsize
        entry = entries.get(name)
        wanted = {"dtype": dtype, "shape": shape}
        offsets = entry.get("data_offsets") if isinstance(entry, dict) else None
        if (
            not isinstance(entry, dict)
            or {key: entry.get(key) for key in wanted} != wanted
            or not (isinstance(offsets, list) and len(offsets) == 2 and all(type(offset) is int for offset in offsets))
            or offsets[1] - offsets[0] != bytes_
            or offsets[0] < 0
            or (start + offsets[0]) % kind.itemsize
        ):
            raise self._damaged(f"its header does not have {name} as {dtype} {shape}, as the index does")
        if start + offsets[1] > len(self._map):
            raise self._damaged(
                f"it has {len(self._map)} bytes, but {name} ends at byte {start + offsets[1]}: it was cut off"
            )
        return np.frombuffer(self._map, kind, bytes_ // kind.itemsize, start + offsets[0]).reshape(shape)

    def _damaged(self, why: str) -> CorruptError:
        return CorruptError(f"{self.path} is damaged: {why}. Run triax data tokenize again into an empty folder.")


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror[:1].lower() + error.strerror[1:]
    return "it is empty"
