"""Documents of text files, JSON lines, Parquet and Arrow files, each with the line from which it comes.

| format | files | documents |
|---|---|---|
| text | all others that hold text | the file, or each of its lines, or its paragraphs between blank lines |
| jsonl | .jsonl, .ndjson, also with .gz | each line: an object whose value at ``key`` is the text, or the messages |
| parquet | .parquet | each row, at the column ``key`` |
| arrow | .arrow, .feather: the file format or the stream format, as ``datasets`` saves | each row |
"""

from __future__ import annotations

import gzip
import json
import os
import re
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from ..base.errors import ConfigError, nearest, to_install
from ..base.hub import DATA_URI, data_path
from .bad_document import BadDocument
from .conversations import is_conversation, messages_of

FORMATS = ("text", "jsonl", "parquet", "arrow")
UNITS = {"text": "line", "jsonl": "line", "parquet": "row", "arrow": "row"}
SPLITS = ("file", "line", "paragraph")
_SUFFIXES = {".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet", ".arrow": "arrow", ".feather": "arrow"}
# Of a data set of the Hub, whose other files are about it: README.md and the like.
_HUB_ENDINGS = (*_SUFFIXES, ".jsonl.gz", ".ndjson.gz", ".txt", ".txt.gz")
_SKIPPED = {"__pycache__", "node_modules", "site-packages", "dist-packages"}
_BLANK = re.compile(rb"\n(?:[ \t\r]*\n)+")


class SourceFile(NamedTuple):
    """File with documents."""

    name: str  # as the user typed it, or below the folder that the user typed
    format: str
    size: int
    modified: int  # nanoseconds


class Part(NamedTuple):
    """Part of a file: bytes of text and of JSON lines, row groups of Parquet, or the whole (stop 0)."""

    name: str
    format: str
    start: int = 0
    stop: int = 0


class Reading(NamedTuple):
    """Rules by which documents are read.

    Attributes:
        key: name of the value in JSON lines, or of the column.
        is_chat: the values are lists of messages.
        split: text files: the file is a document, or each of its lines, or each paragraph.
    """

    key: str = "text"
    is_chat: bool = False
    split: str = "file"


def find_sources(paths: Iterable[str | Path], format: str | None = None) -> tuple[list[SourceFile], Counter[str]]:
    """Find the files with documents, in a fixed order.

    A folder gives its JSON lines, Parquet and Arrow files, or else its text files, sub-folders included. Hidden files
    and folders are not read.

    Args:
        paths: files and folders, and ``hf://datasets/ORG/NAME[@REVISION][/FILE-OR-FOLDER]`` of the Hub.
        format: format of all files; None: by their names.

    Returns:
        The files, and a count of the files in folders that are left out, by reason.

    Raises:
        ConfigError: a path that does not exist, an unknown format, or no documents at all.
    """
    if format is not None and format not in FORMATS:
        raise ConfigError(f"The format {format} is unknown: {nearest(format, FORMATS)}.")
    sources: dict[Path, SourceFile] = {}
    left: Counter[str] = Counter()
    given = [*map(str, paths)]
    endings = (*_HUB_ENDINGS, *((".json", ".json.gz") if format == "jsonl" else ()))
    for name in given:
        path, of_hub = data_path(name, endings), name.startswith(DATA_URI)
        if path.is_dir():
            files = [file for file in _walk(path) if not of_hub or file.name.endswith(endings)]
            kinds = [format or _format(file) for file in files]
            if any(file_kind != "text" for file_kind in kinds):
                left["text beside data files"] += sum(file_kind == "text" for file_kind in kinds)
                files, kinds = map(list, zip(*(pair for pair in zip(files, kinds) if pair[1] != "text")))
        elif path.is_file():
            if format is None and ".json" in path.suffixes:
                raise ConfigError(f"{path} may be a text or JSON lines. Add --format text, or --format jsonl.")
            files, kinds = [path], [format or _format(path)]
        else:
            raise ConfigError(
                f"{path} does not exist. Give text, .jsonl, .parquet or .arrow files, or folders; a data set of the "
                "Hub is hf://datasets/ORG/NAME."
            )
        for file, kind in zip(files, kinds, strict=True):
            with _named(str(file)):
                stat = file.stat()
                if path.is_dir() and (not stat.st_size or (kind == "text" and _is_binary(file))):
                    left["binary" if stat.st_size else "empty"] += 1
                    continue
                source = SourceFile(str(file), kind, stat.st_size, stat.st_mtime_ns)
                # In the Hub's cache equal files are links to one.
                sources.setdefault(file.absolute() if of_hub else file.resolve(), source)
    if not sources:
        which = ", ".join(f"{count} {reason}" for reason, count in left.items())
        raise ConfigError(f"There are no documents in {', '.join(given)}{f' ({which})' if which else ''}.")
    return list(sources.values()), +left


def cut(sources: Iterable[SourceFile], reading: Reading, piece_bytes: int) -> list[list[Part]]:
    """Cut files into pieces of about ``piece_bytes``, each to become one file of tokens.

    Small files share a piece. A part of a large file is a piece of its own.
    """
    pieces: list[list[Part]] = []
    shared: list[Part] = []
    held = 0
    for source in sources:
        parts = [*_parts(source, reading, piece_bytes)]
        if len(parts) > 1:
            pieces += [*([shared] if shared else []), *([part] for part in parts)]
            shared, held = [], 0
            continue
        if shared and held + source.size > piece_bytes:
            pieces.append(shared)
            shared, held = [], 0
        shared.append(Part(source.name, source.format))
        held += source.size
    return [*pieces, *([shared] if shared else [])]


def documents(part: Part, reading: Reading) -> Iterator[tuple[int, Any]]:
    """Yield number of the line, or row, within the part, and the document: text, or messages, or a ``BadDocument``.

    The last yield is (number of lines, None).

    Raises:
        ConfigError: the file cannot be read.
    """
    with _named(part.name):
        if part.format in ("parquet", "arrow"):
            yield from _rows(part, reading)
        elif part.format == "jsonl":
            yield from _json_lines(part, reading)
        else:
            yield from _texts(part, reading)


def records(source: SourceFile) -> Iterator[tuple[int, Any]]:
    """Yield number of the line, or row, and all its columns: a dict, or a ``BadDocument``.

    Raises:
        ConfigError: the file cannot be read, or is a text.
    """
    part = Part(source.name, source.format)
    with _named(part.name):
        if part.format == "jsonl":
            yield from (record for record in _json_objects(part) if record[1] is not None)
            return
        if part.format == "text":
            raise ConfigError(
                f"{part.name} is a text, but rows with columns are needed: give .jsonl, .parquet or .arrow"
            )
        import_pyarrow()
        yield from (record for record in _all_columns(part) if record[1] is not None)


def lines_before(part: Part) -> int:
    """Return the number of lines, or rows, of the file before a part."""
    if not part.start:
        return 0
    if part.format == "parquet":
        import pyarrow.parquet

        metadata = pyarrow.parquet.ParquetFile(part.name).metadata
        return sum(metadata.row_group(group).num_rows for group in range(part.start))
    count, left, last = 0, part.start, b""
    with open(part.name, "rb") as file:
        while left > 0 and (chunk := file.read(min(left, 2**24))):
            count, left, last = count + chunk.count(b"\n"), left - len(chunk), chunk[-1:]
    return count + (last != b"\n")  # a line that began before belongs to the part before


def _walk(folder: Path) -> Iterator[Path]:
    for root, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if name not in _SKIPPED and not name.startswith("."))
        yield from (Path(root) / file for file in sorted(files) if not file.startswith("."))


def _format(file: Path) -> str:
    suffixes = [suffix.lower() for suffix in file.suffixes if suffix.lower() != ".gz"]
    return _SUFFIXES.get(suffixes[-1], "text") if suffixes else "text"


def _is_binary(file: Path) -> bool:
    """Return True if a file has a zero byte near its beginning, which is git's test."""
    with _opened(str(file)) as opened:
        return b"\0" in opened.read(8000)


def _opened(name: str) -> Any:
    return gzip.open(name, "rb") if name.endswith(".gz") else open(name, "rb")


def _parts(source: SourceFile, reading: Reading, piece_bytes: int) -> Iterator[Part]:
    by_line = source.format == "jsonl" or (source.format == "text" and reading.split == "line")
    name, format = source.name, source.format
    if format == "parquet" and source.size > piece_bytes:
        import_pyarrow()
        import pyarrow.parquet

        with _named(name):
            metadata = pyarrow.parquet.ParquetFile(name).metadata
            start, held = 0, 0
            for group in range(metadata.num_row_groups):
                held += metadata.row_group(group).total_byte_size
                if held >= piece_bytes or group == metadata.num_row_groups - 1:
                    yield Part(name, format, start, group + 1)
                    start, held = group + 1, 0
    elif by_line and source.size > piece_bytes and not name.endswith(".gz"):
        for start in range(0, source.size, piece_bytes):
            yield Part(name, format, start, min(start + piece_bytes, source.size))
    else:
        yield Part(name, format)


def _lines(part: Part) -> Iterator[bytes]:
    """Yield the lines that begin in a part, without their ends."""
    with _opened(part.name) as file:
        at = part.start
        if at:
            file.seek(at - 1)
            at += len(file.readline()) - 1  # the rest of a line that began before
        while not part.stop or at < part.stop:
            line = file.readline()
            if not line:
                return
            at += len(line)
            yield line.removesuffix(b"\n").removesuffix(b"\r")


def _texts(part: Part, reading: Reading) -> Iterator[tuple[int, Any]]:
    if reading.is_chat:
        raise ConfigError(f"{part.name} is a text file, but conversations are JSON lines, Parquet or Arrow files.")
    number = 0
    if reading.split == "line":
        for number, line in enumerate(_lines(part), 1):
            yield number, _text(line, "the line is empty")
    else:
        with _opened(part.name) as file:
            content = file.read()
        number = content.count(b"\n") + 1
        if reading.split == "file":
            yield 1, _text(content, "the file is empty")
        else:
            yield from _paragraphs(content)
    yield number, None


def _paragraphs(content: bytes) -> Iterator[tuple[int, Any]]:
    line, start = 1, 0
    for stop, after in [*(match.span() for match in _BLANK.finditer(content)), (len(content), len(content))]:
        if content[start:stop].strip():
            yield line, _text(content[start:stop], "")
        line, start = line + content.count(b"\n", start, after), after


def _text(content: bytes, empty: str) -> str | BadDocument:
    if not content:
        return BadDocument(empty)
    if (zero := content.find(b"\0")) >= 0:
        return BadDocument("byte 0 is not text", content.count(b"\n", 0, zero))
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        byte, further = content[error.start], content.count(b"\n", 0, error.start)
        return BadDocument(f"byte 0x{byte:02x} is not UTF-8 text", further)


def _json_objects(part: Part) -> Iterator[tuple[int, Any]]:
    """Yield number of the line, and the object or a ``BadDocument``; last (number of lines, None)."""
    number = 0
    for number, line in enumerate(_lines(part), 1):
        try:
            value = json.loads(line) if line.strip() else BadDocument("the line is empty")
        except (ValueError, RecursionError) as error:
            what = str(error) if isinstance(error, json.JSONDecodeError) else "it cannot be decoded"
            value = BadDocument(f"the line is not JSON ({what.partition(': line')[0]})")
        if not isinstance(value, (dict, BadDocument)):
            value = BadDocument(f"the line is a JSON {type(value).__name__}, but an object is required")
        yield number, value
    yield number, None


def _json_lines(part: Part, reading: Reading) -> Iterator[tuple[int, Any]]:
    for number, value in _json_objects(part):
        if isinstance(value, dict):
            if reading.key in value:
                value = _checked(value[reading.key], reading)
            elif reading.is_chat and is_conversation(value):
                value = _messages(value)
            else:
                hint = "; add --chat" if "messages" in value and not reading.is_chat else ""
                keys = ", ".join(map(repr, [*value][:8])) or "none"
                value = BadDocument(f"there is no {reading.key!r}; its keys are {keys}{hint or '; give --key'}")
        yield number, value


def _rows(part: Part, reading: Reading) -> Iterator[tuple[int, Any]]:
    import_pyarrow()
    number = 0
    for batch in _batches(part, reading.key):
        if reading.is_chat and reading.key not in batch.schema.names and is_conversation(batch.schema.names):
            yield from ((at, row if row is None else _messages(row)) for at, row in _all_columns(part))
            return
        if reading.key not in batch.schema.names:
            names = ", ".join(batch.schema.names[:8])
            raise ConfigError(f"{part.name} has no column {reading.key!r}, but {names}. Give --key, or --chat.")
        column = batch.column(reading.key)
        column.validate(full=True)  # a damaged file could make pyarrow read beyond its memory
        for value in column.to_pylist():
            number += 1
            yield number, _checked(value, reading)
    yield number, None


def _all_columns(part: Part) -> Iterator[tuple[int, Any]]:
    """Yield number of the row, and all its columns; last (number of rows, None)."""
    number = 0
    for batch in _batches(part, None):
        batch.validate(full=True)  # a damaged file could make pyarrow read beyond its memory
        for value in batch.to_pylist():
            number += 1
            yield number, value
    yield number, None


def _batches(part: Part, key: str | None) -> Iterator[Any]:
    """Yield batches of rows, with the column ``key``, or with all columns."""
    import pyarrow
    import pyarrow.parquet

    if part.format == "parquet":
        file = pyarrow.parquet.ParquetFile(part.name)
        if key is not None and key not in file.schema_arrow.names:
            yield pyarrow.record_batch({name: [] for name in file.schema_arrow.names})
        groups = [*range(part.start, part.stop)] if part.stop else None
        yield from file.iter_batches(batch_size=1024, row_groups=groups, columns=None if key is None else [key])
        return
    with pyarrow.memory_map(part.name) as mapped:
        try:
            reader = pyarrow.ipc.open_file(mapped)
        except pyarrow.ArrowInvalid:
            yield from pyarrow.ipc.open_stream(mapped)
            return
        yield from (reader.get_batch(number) for number in range(reader.num_record_batches))


def _checked(value: Any, reading: Reading) -> Any:
    """Return a value if it is a text, or messages, else a ``BadDocument``."""
    if not reading.is_chat:
        if not isinstance(value, str):
            return BadDocument(f"{reading.key!r} is {_kind(value)}, but a text is required")
        if not value:
            return BadDocument("the text is empty")
        if not value.isascii() and any("\ud800" <= letter <= "\udfff" for letter in value):
            return BadDocument("the text has half of a surrogate pair, which is no character")
        return value
    if not isinstance(value, list) or not value:
        return BadDocument(f"{reading.key!r} is {_kind(value)}, but a list of messages is required")
    for number, message in enumerate(value, 1):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            return BadDocument(f"message {number} is not an object with a 'role' and a 'content'")
    return value


def _messages(row: Any) -> Any:
    try:
        return messages_of(row)
    except BadDocument as error:
        return error


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "an empty list" if not value else "a list", str: "a text", bool: "true or false"}
    return "null" if value is None else names.get(type(value), f"the number {str(value)[:20]}")


def import_pyarrow() -> None:
    """Import pyarrow.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        import pyarrow  # noqa: F401
    except ImportError as error:
        raise ConfigError(f"Parquet and Arrow files need pyarrow. Type {to_install('data')}") from error


@contextmanager
def _named(name: str) -> Iterator[None]:
    """Turn errors of reading a file into a ConfigError of one line with the file's name."""
    try:
        yield
    except (ConfigError, BadDocument):
        raise
    except (OSError, EOFError, zlib.error, ValueError, TypeError, LookupError, RuntimeError, MemoryError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ConfigError(
            f"{name} cannot be read, because {' '.join(reason.split())[:300] or 'it is damaged'}."
        ) from error
