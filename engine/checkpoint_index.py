"""The index of a checkpoint: what is in it, where each box of each tensor lies, and what its bytes add up to.

index.json              shapes, dtypes, boxes, ranges of bytes, checksums; the run's numbers; its own checksum
rank-00000.safetensors  the boxes that one rank wrote
"""

from __future__ import annotations

import json
import math
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from .checkpoint_boxes import Spans, shape_of
from .checkpoint_file import DTYPES, CorruptError, Folder, Span

NAME = "index.json"
FORMAT, VERSION = "triax checkpoint", 1
_TAIL = re.compile(rb'"checksum": "([0-9a-f]{8})"\n\}\n\Z')


class Stored(NamedTuple):
    """A box of a tensor, and where it lies."""

    box: Spans
    file: str
    key: str
    span: Span


@dataclass
class Entry:
    """A whole tensor."""

    shape: tuple[int, ...]
    dtype: str
    boxes: list[Stored] = field(default_factory=list)

    @property
    def bytes(self) -> int:
        """Of all its elements."""
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


class File(NamedTuple):
    """A file, and its header."""

    size: int
    header: Span


@dataclass
class Index:
    """What a checkpoint holds.

    Attributes:
        head: the run's numbers, its configuration and grid, versions.
        tensors: by kind and name: ``weights/layers.0.weight``, ``optimizer/exp_avg/layers.0.weight``.
        files: the safetensors files.
    """

    head: dict[str, Any]
    tensors: dict[str, Entry]
    files: dict[str, File]

    def dump(self) -> bytes:
        """As a file holds it: a line for each tensor; and a checksum of all that stands before it."""
        lines = [f"{json.dumps(key)}: {json.dumps(value, indent=1)}" for key, value in self.head.items()]
        files = {
            name: {"bytes": size, "header": [*head[:2]], "crc32": head.crc32}
            for name, (size, head) in self.files.items()
        }
        tensors = {name: _plain(entry) for name, entry in self.tensors.items()}
        for title, entries in (("files", files), ("tensors", tensors)):
            inside = ",\n".join(f" {json.dumps(name)}: {json.dumps(entry)}" for name, entry in entries.items())
            lines.append(f'"{title}": {{\n{inside}\n}}')
        text = ("{\n" + ",\n".join(lines) + ",\n").encode()
        return text + f'"checksum": "{zlib.crc32(text):08x}"\n}}\n'.encode()

    def check(self, file: str, whole: bool = True) -> None:
        """What it says can be: files of the folder, ranges within them, boxes that make up (whole) tensors.

        Raises:
            CorruptError: it cannot.
        """
        for name in self.files:
            if Path(name).name != name:
                raise CorruptError(f"{file} names the file {name!r}, which is not in its folder")
        for name, entry in self.tensors.items():
            elements, width = 0, DTYPES[entry.dtype].itemsize
            for box, stored_in, _, span in entry.boxes:
                size = math.prod(shape_of(box))
                elements += size
                inside = len(box) == len(entry.shape) and all(0 <= a <= b <= n for (a, b), n in zip(box, entry.shape))
                held = self.files.get(stored_in)
                if held is None or not inside or not 0 <= span.start <= span.stop <= held.size:
                    raise CorruptError(f"{file}: {name} has a box {box} that is not in {stored_in}")
                if span.stop - span.start != size * width:
                    raise CorruptError(f"{file}: {name} has a box {box} of another size than its bytes")
            numel = math.prod(entry.shape)
            if whole and elements != numel:
                raise CorruptError(f"{file}: the boxes of {name} have {elements} of its {numel} elements")

    def folder(self, path: Path) -> Folder:
        """Its files, to be read."""
        return Folder(path, {name: file.size for name, file in self.files.items()})


def read_index(path: Path, name: str = NAME, whole: bool = True) -> Index:
    """The index of a checkpoint's folder.

    Args:
        path: of the folder.
        name: of the file.
        whole: its tensors must be: of one rank's alone they are not.

    Raises:
        FileNotFoundError: there is none.
        CorruptError: it is not what was written, or of a later version.
    """
    file = path / name
    data = file.read_bytes()
    tail = _TAIL.search(data)
    text = data[: tail.start()] if tail else data
    if tail is None or f"{zlib.crc32(text):08x}" != tail[1].decode():
        raise CorruptError(f"{file} is damaged: its bytes do not add up to the checksum at its end")
    try:
        content = json.loads(data)
        if content["format"] != FORMAT or content["version"] > VERSION:
            raise CorruptError(
                f"{file} is a {content['format']}, version {content['version']}, and this triax reads a {FORMAT} up to "
                f"version {VERSION}: use a later triax"
            )
        tensors, files = content.pop("tensors"), content.pop("files")
        del content["checksum"]
        index = Index(
            content,
            {name: _entry(entry) for name, entry in tensors.items()},
            {name: File(each["bytes"], _span(each["header"], each["crc32"])) for name, each in files.items()},
        )
    except CorruptError:
        raise
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptError(f"{file} is no index of a checkpoint: {type(error).__name__}: {error}") from error
    index.check(str(file), whole)
    return index


def _plain(entry: Entry) -> dict[str, Any]:
    boxes = [
        {"file": each.file, "key": each.key, "slices": each.box, "bytes": [*each.span[:2]], "crc32": each.span.crc32}
        for each in entry.boxes
    ]
    return {"shape": entry.shape, "dtype": entry.dtype, "boxes": boxes}


def _entry(entry: Mapping[str, Any]) -> Entry:
    if entry["dtype"] not in DTYPES:
        raise ValueError(f"there is no dtype {entry['dtype']!r}")
    boxes = [
        Stored(tuple((a, b) for a, b in each["slices"]), each["file"], each["key"], _span(each["bytes"], each["crc32"]))
        for each in entry["boxes"]
    ]
    return Entry(tuple(entry["shape"]), entry["dtype"], boxes)


def _span(place: list[int], crc32: str) -> Span:
    start, stop = place
    return Span(start, stop, crc32)
