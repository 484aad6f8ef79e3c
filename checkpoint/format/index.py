"""The index of a checkpoint: its tensors, the file and range of bytes of each box, and checksums.

index.json              shapes, dtypes, boxes, ranges of bytes, checksums; the run's numbers; its own checksum
rank-00000.safetensors  the boxes that one rank wrote
"""

from __future__ import annotations

import json
import math
import re
import secrets
import zlib
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ...base.dtypes import SAFETENSORS_NAMES, TORCH_NAMES
from ...base.errors import CorruptError
from ...base.files import distinct_keys, read_bytes
from ...base.safetensors import ByteRange
from ...grid.ranges import Spans, everything, shape_of
from .head import LARGEST, check_head
from .mapped_files import MappedFiles
from .remote import Folder, RemotePath
from .remote_files import RemoteFiles

NAME = "index.json"
FORMAT, VERSION = "triax checkpoint", 1
_FILE, _CRC = re.compile(r"[\w-][\w.-]*\.safetensors"), re.compile(r"[0-9a-f]{8}")
_MOST_DIMS, _PRIME = 64, 2**61 - 1
_TAIL = re.compile(rb'"checksum": "([0-9a-f]{8})"\n\}\n\Z')


class StoredBox(NamedTuple):
    """Location of one box: the file, the box's key in that file, and the range of bytes."""

    box: Spans
    file: str
    key: str
    span: ByteRange


@dataclass
class StoredTensor:
    """Shape and dtype of an unsharded tensor, and the locations of its boxes in files."""

    shape: tuple[int, ...]
    dtype: str
    boxes: list[StoredBox] = field(default_factory=list)

    @property
    def bytes(self) -> int:
        """Bytes of the whole tensor."""
        return math.prod(self.shape) * TORCH_NAMES[self.dtype].itemsize


class StoredFile(NamedTuple):
    """Size of a safetensors file in bytes, and the range of bytes of its header."""

    size: int
    header: ByteRange


@dataclass
class Index:
    """The content of ``index.json``.

    Attributes:
        head: the run's header and numbers: see ``protocol.Snapshot``.
        tensors: by kind and name: ``weights/layers.0.weight``, ``optimizer/exp_avg/layers.0.weight``.
        files: the safetensors files.
        checksum: at the end of the file that was read; empty for an index that was not.
    """

    head: dict[str, Any]
    tensors: dict[str, StoredTensor]
    files: dict[str, StoredFile]
    checksum: str = ""

    @property
    def order(self) -> int:
        """Place of the checkpoint in the order of its folder; 0 if an older version wrote it."""
        return int((self.head.get("identity") or {}).get("order", 0))

    @property
    def save_name(self) -> str:
        """Name of the save, which each of its files has too; empty if an older version wrote it."""
        return save_name(self.head.get("identity"))

    def dump(self) -> bytes:
        """Return the bytes of the file: a line for each tensor, and at the end a checksum of all before it."""
        head = {"format": FORMAT, "version": VERSION, **self.head}
        lines = [f"{json.dumps(key)}: {json.dumps(value, indent=1)}" for key, value in head.items()]
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
        """Check that files are in the folder, ranges within files, boxes within tensors and, if ``whole``, complete.

        Raises:
            CorruptError: if one of these checks fails. The message contains ``file``, the name of the index.
        """
        for name, (size, header) in self.files.items():
            if _FILE.fullmatch(name) is None:
                raise CorruptError(f"{file} names the file {name!r}, which is not a safetensors file in its folder")
            if not header.start == 0 < header.stop <= size:
                raise CorruptError(f"{file}: the header of {name} is not in the file's {size} bytes")
        for name, entry in self.tensors.items():
            elements, width = 0, TORCH_NAMES[entry.dtype].itemsize
            for box, stored_in, key, span in entry.boxes:
                if key != (name if box == everything(entry.shape) else box_name(name, box)):
                    raise CorruptError(f"{file}: {name} has a box {box} under the key {key!r}")
                size = math.prod(shape_of(box))
                elements += size
                inside = len(box) == len(entry.shape) and all(0 <= a <= b <= n for (a, b), n in zip(box, entry.shape))
                held = self.files.get(stored_in)
                if held is None or not inside or not 0 <= span.start <= span.stop <= held.size:
                    raise CorruptError(f"{file}: {name} has a box {box} that is not in {stored_in}")
                stored = span.stop - span.start
                if stored != size * width:
                    raise CorruptError(
                        f"{file}: {name} has a box {box} of {size * width} bytes, stored in {stored} bytes"
                    )
            numel = math.prod(entry.shape)
            if whole and elements != numel:
                raise CorruptError(f"{file}: the boxes of {name} hold {elements} of its {numel} elements")
            if whole and not _tiles([box for box, *_ in entry.boxes], entry.shape):
                raise CorruptError(f"{file}: the boxes of {name} overlap, and do not hold all of it")
        if whole:
            try:
                check_head(self.head, lambda name: (self.tensors[f"client/{name}"], torch.empty(0))[1])
            except ValueError as error:
                raise CorruptError(f"{file} is malformed: {error}") from error

    def byte_ranges(self, kinds: Collection[str] = ()) -> list[tuple[str, ByteRange, str]]:
        """Return the ranges of bytes that have a checksum, in the order of the files: file, range, and what it holds.

        Args:
            kinds: kinds of tensors, such as ``weights``, which are the first part of a tensor's name. Empty: all kinds.
        """
        headers = [(name, file.header, "its header") for name, file in self.files.items()]
        boxes = [
            (stored.file, stored.span, box_name(name, stored.box))
            for name, tensor in self.tensors.items()
            if not kinds or name.partition("/")[0] in kinds
            for stored in tensor.boxes
        ]
        return sorted(headers + boxes, key=lambda item: (item[0], item[1].start))

    def check_range(self, folder: MappedFiles, file: str, span: ByteRange, name: str) -> None:
        """Compare a range that ``byte_ranges`` returned with its checksum, and a header's entries with the index.

        Raises:
            CorruptError: if they differ.
        """
        folder.check(file, span, name)
        if span != self.files[file].header:
            return
        header, wanted = folder.header(file, span), self._headers.get(file, {})
        save = (header.pop("__metadata__", None) or {}).get("save", "")
        if save != self.save_name:
            raise CorruptError(
                f"{folder.path / file} was written in the save {save or '(none)'}, but {NAME} in the save "
                f"{self.save_name or '(none)'}: the files of two runs are mixed"
            )
        for key in dict.fromkeys([*header, *wanted]):
            if header.get(key) != wanted.get(key):
                raise CorruptError(
                    f"{folder.path / file} has {key} as {header.get(key)}, but {NAME} has it as {wanted.get(key)}"
                )

    @cached_property
    def _headers(self) -> dict[str, dict[str, Any]]:
        """For each file the entries of its header, by key."""
        headers: dict[str, dict[str, Any]] = {}
        for tensor in self.tensors.values():
            dtype = SAFETENSORS_NAMES[TORCH_NAMES[tensor.dtype]]
            for box, file, key, (start, stop, _) in tensor.boxes:
                first = self.files[file].header.stop
                headers.setdefault(file, {})[key] = {
                    "dtype": dtype,
                    "shape": list(shape_of(box)),
                    "data_offsets": [start - first, stop - first],
                }
        return headers

    def folder(self, path: Folder) -> MappedFiles:
        """Return the checkpoint's files for reading. ``path`` is the checkpoint's folder."""
        sizes = {name: file.size for name, file in self.files.items()}
        return RemoteFiles(path, sizes) if isinstance(path, RemotePath) else MappedFiles(path, sizes)


def read_index(path: Folder, name: str = NAME, whole: bool = True) -> Index:
    """Read the index of a checkpoint.

    Args:
        path: the checkpoint's folder.
        name: the index's file in it.
        whole: require that the boxes cover every tensor completely. The boxes of a single rank do not.

    Raises:
        FileNotFoundError: if there is no such file.
        CorruptError: if the file is damaged, or if a later version of triax wrote it.
    """
    file = path / name
    data = read_bytes(file) if isinstance(file, Path) else file.read_bytes()
    tail = _TAIL.search(data)
    text = data[: tail.start()] if tail else data
    if tail is None or f"{zlib.crc32(text):08x}" != tail[1].decode():
        raise CorruptError(f"{file} is damaged: its bytes do not have the checksum at its end")
    try:
        content = json.loads(data, object_pairs_hook=distinct_keys)
        if content["format"] != FORMAT or not _natural(content["version"]) <= VERSION:
            raise CorruptError(
                f"{file} is a {content['format']} of version {content['version']}, but this triax reads a {FORMAT} up "
                f"to version {VERSION}. Install a later triax"
            )
        tensors, files = content.pop("tensors"), content.pop("files")
        del content["checksum"]
        index = Index(
            content,
            {name: _entry(entry) for name, entry in tensors.items()},
            {
                name: StoredFile(_natural(stored["bytes"]), _span(stored["header"], stored["crc32"]))
                for name, stored in files.items()
            },
            tail[1].decode(),
        )
        index.check(str(file), whole)
    except CorruptError:
        raise
    except Exception as error:  # whatever malformed content leads to
        raise CorruptError(f"{file} is not the index of a checkpoint ({type(error).__name__}: {error})") from error
    return index


def save_name(identity: Mapping[str, Any] | None) -> str:
    """Return the name of a save: its run, and its number in that run. Empty if an older version wrote it."""
    return f"{identity['run']}-{identity['save']}" if identity else ""


def checksum(data: bytes) -> str:
    """Return the checksum at the end of an index's bytes."""
    tail = _TAIL.search(data)
    return "" if tail is None else tail[1].decode()


def box_name(name: str, box: Spans) -> str:
    """Return a box of a tensor as text: ``weights/w[0:2, 4:8]``."""
    return f"{name}[{', '.join(f'{a}:{b}' for a, b in box)}]" if box else name


def _plain(entry: StoredTensor) -> dict[str, Any]:
    boxes = [
        {"file": box.file, "key": box.key, "slices": box.box, "bytes": [*box.span[:2]], "crc32": box.span.crc32}
        for box in entry.boxes
    ]
    return {"shape": entry.shape, "dtype": entry.dtype, "boxes": boxes}


def _entry(entry: Mapping[str, Any]) -> StoredTensor:
    if TORCH_NAMES.get(entry["dtype"]) not in SAFETENSORS_NAMES:
        raise ValueError(f"there is no dtype {entry['dtype']!r}")
    boxes = [
        StoredBox(
            tuple((_natural(a), _natural(b)) for a, b in e["slices"]),
            e["file"],
            e["key"],
            _span(e["bytes"], e["crc32"]),
        )
        for e in entry["boxes"]
    ]
    shape = tuple(_natural(length) for length in entry["shape"])
    if math.prod(max(length, 1) for length in shape) > LARGEST or len(shape) > _MOST_DIMS:
        raise ValueError(f"there is no tensor of shape {shape}")
    return StoredTensor(shape, entry["dtype"], boxes)


def _span(place: list[int], crc32: str) -> ByteRange:
    start, stop = place
    if not isinstance(crc32, str) or _CRC.fullmatch(crc32) is None:
        raise ValueError(f"{crc32!r} is not a checksum")
    return ByteRange(_natural(start), _natural(stop), crc32)


def _natural(value: Any) -> int:
    if type(value) is not int or not 0 <= value <= LARGEST:
        raise ValueError(f"{str(value)[:40]} is not a number from 0 to {LARGEST}")
    return value


def _tiles(boxes: Sequence[Spans], shape: Sequence[int]) -> bool:
    """Return True if the boxes, whose volumes add up to that of the tensor, do not overlap.

    Each dim is measured with random positions in place of its indices: the volumes add up again only if each element
    is in one box. That takes time in proportion to the boxes, and not to their pairs.
    """
    if len(boxes) < 2:
        return True
    places: list[defaultdict[int, int]] = [defaultdict(lambda: secrets.randbelow(_PRIME)) for _ in shape]

    def volume(box: Spans) -> int:
        return math.prod(offsets[high] - offsets[low] for offsets, (low, high) in zip(places, box, strict=True))

    return (sum(map(volume, boxes)) - volume(everything(shape))) % _PRIME == 0
