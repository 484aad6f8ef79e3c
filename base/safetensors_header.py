"""Header of a safetensors file: 8 bytes with its length, then JSON, name -> dtype, shape, range of bytes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from mmap import mmap
from typing import Any

_LONGEST = 2**30


def make_header(
    tensors: Mapping[str, tuple[str, Sequence[int], int]], metadata: Mapping[str, str]
) -> tuple[bytes, dict[str, int]]:
    """Make the header of a file.

    Args:
        tensors: name -> (the format's name of the dtype, shape, bytes) of all tensors, in their order in the file.
        metadata: the entry ``__metadata__``.

    Returns:
        The header's bytes, and for each tensor the byte of the file at which it begins.
    """
    entries: dict[str, Any] = {"__metadata__": dict(metadata)}
    starts, at = {}, 0
    for name, (dtype, shape, size) in tensors.items():
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + size]}
        starts[name], at = at, at + size
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # tensors begin at a multiple of 8 bytes
    top = len(text).to_bytes(8, "little") + text
    return top, {name: start + len(top) for name, start in starts.items()}


def read_header(data: bytes | mmap) -> tuple[dict[str, Any], int]:
    """Return the entries of the header at the start of a file's bytes, and the byte at which the first tensor begins.

    Raises:
        ValueError: the bytes do not begin with a header. The message goes on after "the file is damaged: ".
    """
    size = len(data)
    length = int.from_bytes(data[:8], "little") if size >= 8 else size
    if not 2 <= length <= min(size - 8, _LONGEST):
        raise ValueError(f"its header would have {length} bytes, but the file has {size}")
    try:
        entries = json.loads(data[8 : 8 + length])
    except (ValueError, RecursionError) as error:
        raise ValueError("its header is not JSON") from error
    if not isinstance(entries, dict):
        raise ValueError("its header is not a JSON object")
    return entries, 8 + length
