"""Tokenization of files on several processes, into a folder of tokens; resumed after an interruption.

The sources are cut into pieces, each of which becomes one file of tokens. A piece that is done has a record beside its
file. Which pieces there are depends on the sources alone, so any number of processes writes the same bytes, and a run
that was interrupted goes on with the pieces that are missing. At the end the records become index.json.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from ..base.errors import ConfigError, nearest
from ..base.files import parse_json
from .bad_document import BadDocument
from .chat import ChatTemplate
from .sources import SPLITS, UNITS, Part, Reading, cut, documents, find_sources, lines_before
from .token_file import DTYPES, Array, token_dtype, write_atomically, write_tensors
from .token_folder import (
    FORMAT,
    NAME,
    VERSION,
    FileEntry,
    PieceRecord,
    TokenFolder,
    TokenIndex,
    read_record,
    write_index,
    write_record,
)
from .tokenizer import TextTokenizer, open_tokenizer

PIECE_BYTES = 2**25
_PLAN = "plan.json"
_BATCH = 2**20  # characters that are tokenized at once


@dataclass(frozen=True)
class _TokenizationJob:
    """Tokenization, as every process has to know it."""

    out: Path
    tokenizer: str
    end: str | None
    reading: Reading
    skip_bad: bool


@dataclass(frozen=True)
class Tokenized:
    """Result of ``tokenize``.

    Attributes:
        folder: the folder of tokens.
        bad: number of documents that were left out.
        first_bad: the first of them, and why.
        pieces: number of pieces that this call tokenized; the others were there already.
    """

    folder: TokenFolder
    bad: int
    first_bad: str
    pieces: int


def tokenize(
    sources: Sequence[str | Path],
    tokenizer: str | Path,
    out: str | Path,
    *,
    processes: int = 1,
    key: str | None = None,
    chat: bool = False,
    split: str = "file",
    format: str | None = None,
    end: str | None = None,
    skip_bad: bool = False,
    piece_bytes: int = PIECE_BYTES,
    progress: Callable[[int, int], None] | None = None,
    wait: bool = False,
) -> Tokenized:
    """Tokenize files into a folder. A call that was interrupted is repeated to go on.

    Args:
        sources: files and folders, and data sets of the Hub, as ``find_sources`` reads them.
        tokenizer: ``bytes``, a tokenizer.json, a folder of transformers, or an id of the Hub.
        out: the folder, which is made.
        processes: number of processes. Above 1, a script needs ``if __name__ == "__main__"``.
        key: name of the text in JSON lines, Parquet and Arrow; by default ``text``, or ``messages``.
        chat: the documents are conversations; loss counts on the assistant's tokens only.
        split: a document of a text file is the ``file``, each ``line``, or each ``paragraph``.
        format: format of all files; None: by their names.
        end: token that ends a document, or ``none``; by default the tokenizer's own.
        skip_bad: leave out documents that are empty or not valid, and count them.
        piece_bytes: bytes of the sources that become one file of tokens.
        progress: called with the number of pieces that are done, and of all.
        wait: wait for another process that tokenizes into ``out``, as long as it lives; False: that is an error.

    Raises:
        ConfigError: a document is empty or not valid, with its file and line; or ``out`` has other tokens.
    """
    if split not in SPLITS:
        raise ConfigError(f"split is {split!r}: {nearest(split, SPLITS)}.")
    if processes < 1 or piece_bytes < 1:
        raise ConfigError(f"processes={processes} and piece_bytes={piece_bytes} must be at least 1.")
    reading = Reading(key or ("messages" if chat else "text"), chat, split)
    folder = Path(out)
    job = _TokenizationJob(folder, str(tokenizer), end, reading, skip_bad)
    _tokenizer.cache_clear()  # the files of a tokenizer may have changed since an earlier call
    _template.cache_clear()
    opened = _tokenizer(job)
    source_files, _ = find_sources(sources, format)
    pieces = cut(source_files, reading, piece_bytes)
    facts = opened.facts
    template = _template(job).text if chat else ""
    kept = [FORMAT, VERSION, [*source_files], [*reading], facts.fingerprint, facts.end, template, skip_bad, piece_bytes]
    plan = hashlib.sha256(json.dumps(kept).encode()).hexdigest()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{folder} cannot be made, because {error.strerror}. Give another --out.") from error
    with _locked(folder, wait):
        if (folder / NAME).exists():
            there = TokenFolder(folder)
            if there.index.plan != plan:
                raise ConfigError(f"{folder} has tokens of other sources, options or tokenizer. Give another --out.")
            return Tokenized(there, 0, "", 0)
        _begin(folder, plan, len(pieces))
        records, done = _run(job, pieces, processes, progress or (lambda done, of: None))
        files = [*_entries(pieces, records)]
        if not files:
            bad = next((f": {record.first_bad}" for record in records if record.bad), "")
            raise ConfigError(f"There is no document to tokenize in {', '.join(map(str, sources))}{bad}.")
        index = TokenIndex(
            format=FORMAT,  # type: ignore[arg-type]
            version=VERSION,  # type: ignore[arg-type]
            kind="chat" if chat else "text",
            plan=plan,
            tokenizer=facts,
            dtype=token_dtype(facts.vocab_size),  # type: ignore[arg-type]
            documents=sum(file.documents for file in files),
            tokens=sum(file.tokens for file in files),
            files=files,
        )
        write_index(folder, index)
        for path in [folder / _PLAN, *(folder / f"{number:05d}.json" for number in range(len(pieces)))]:
            path.unlink(missing_ok=True)
    first = next((record.first_bad for record in records if record.bad), "")
    return Tokenized(TokenFolder(folder), sum(record.bad for record in records), first, done)


def _begin(folder: Path, plan: str, pieces: int) -> None:
    """Write the plan, or check that the folder was begun with the same one."""
    path = folder / _PLAN
    if path.exists():
        try:
            begun = parse_json(path.read_bytes())["plan"]
        except (ValueError, LookupError, TypeError):
            begun = None
        if begun != plan:
            raise ConfigError(
                f"{folder} was begun with other sources, options or tokenizer. Remove it, or give another --out."
            )
        return
    others = sorted(file.name for file in folder.iterdir() if not file.name.startswith("."))
    if others:
        raise ConfigError(f"{folder} has other files, such as {others[0]}. Give an empty or a new folder as --out.")
    write_atomically(path, json.dumps({"plan": plan, "pieces": pieces}).encode())


def _run(
    job: _TokenizationJob, pieces: list[list[Part]], processes: int, progress: Callable[[int, int], None]
) -> tuple[list[PieceRecord], int]:
    """Tokenize the pieces that have no record. Returns all records, and the number of pieces tokenized."""
    records = [read_record(job.out / f"{number:05d}.json") for number in range(len(pieces))]
    missing = [number for number, record in enumerate(records) if record is None]
    count = len(pieces) - len(missing)
    progress(count, len(pieces))
    if processes == 1 or len(missing) <= 1:
        for number in missing:
            records[number] = _tokenize_piece(job, number, pieces[number])
            count += 1
            progress(count, len(pieces))
        return [record for record in records if record], len(missing)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(processes, len(missing)), context) as pool:
        try:
            waiting: dict[Future[PieceRecord], int] = {}
            ahead = iter(missing)
            while True:
                for number in ahead:
                    waiting[pool.submit(_tokenize_piece, job, number, pieces[number])] = number
                    if len(waiting) >= 2 * processes:
                        break
                if not waiting:
                    break
                for future in wait(waiting, return_when=FIRST_COMPLETED).done:
                    records[waiting.pop(future)] = future.result()
                    count += 1
                    progress(count, len(pieces))
        except BrokenProcessPool as error:
            raise ConfigError(
                "A process of the tokenization ended without an error, perhaps because memory ran out. Run the same "
                "command again, with fewer --processes."
            ) from error
        finally:
            pool.shutdown(cancel_futures=True)
    return [record for record in records if record], len(missing)


def _entries(pieces: list[list[Part]], records: list[PieceRecord]) -> Iterator[FileEntry]:
    """Yield the index's entries of the files, with the lines that each file's first source has before it."""
    lines = 0
    for parts, record in zip(pieces, records, strict=True):
        lines = lines if parts[0].start else 0
        if record.file is not None:
            yield record.file.model_copy(update={"line": lines})
        lines += record.lines


@lru_cache(maxsize=1)
def _tokenizer(job: _TokenizationJob) -> TextTokenizer:
    return open_tokenizer(job.tokenizer, job.end)


@lru_cache(maxsize=1)
def _template(job: _TokenizationJob) -> ChatTemplate:
    return ChatTemplate(job.tokenizer)


def _tokenize_piece(job: _TokenizationJob, number: int, parts: list[Part]) -> PieceRecord:
    """Tokenize one piece, write its file and then its record. Returns the record."""
    vocab_size = _tokenizer(job).facts.vocab_size
    dtype = DTYPES[token_dtype(vocab_size)]
    tokens: list[Array] = []
    counted: list[Array] = []
    origins: list[tuple[int, int]] = []
    keys: list[int] = []
    bad, first_bad, lines = 0, "", 0
    for batch in _batches(job, parts):
        if isinstance(batch, int):
            lines = batch
            continue
        made = _encode(job, [value for _, _, value in batch])
        for (source, line, value), encoded in zip(batch, made, strict=True):
            if isinstance(encoded, tuple) and len(encoded[0]):
                if (largest := int(encoded[0].max())) >= vocab_size:
                    raise ConfigError(
                        f"The tokenizer {job.tokenizer} made the token {largest}, but its vocabulary has {vocab_size} "
                        "entries. Save it again with transformers, with all its added tokens."
                    )
                tokens.append(encoded[0].astype(dtype))
                counted.append(encoded[1])
                origins.append((source, line))
                keys.append(_key(value))
                continue
            part = parts[source]
            why = encoded if isinstance(encoded, BadDocument) else "the tokenizer makes no token of it"
            line += lines_before(part) + (encoded.further if isinstance(encoded, BadDocument) else 0)
            where = f"{part.name}, {UNITS[part.format]} {line}: {why}"
            if not job.skip_bad:
                raise ConfigError(f"{where}. Mend it, or add --skip-bad to leave out such documents.")
            bad, first_bad = bad + 1, first_bad or where
    file = None
    if tokens:
        joined = np.concatenate(tokens)
        tensors: dict[str, Array] = {
            "offsets": np.cumsum([0, *map(len, tokens)], dtype=np.int64),
            "keys": np.asarray(keys, np.uint64),
            "origins": np.asarray(origins, np.uint32).reshape(-1, 2),
            "tokens": joined,
            **({"counted": np.concatenate(counted)} if job.reading.is_chat else {}),
        }
        sources = [[part.name, UNITS[part.format]] for part in parts]
        name = f"{number:05d}.safetensors"
        size, sha256 = write_tensors(job.out / name, tensors, sources)
        numbers = {"documents": len(tokens), "tokens": len(joined), "largest": int(joined.max())}
        file = FileEntry(name=name, bytes=size, sha256=sha256, **numbers, line=0)
    record = PieceRecord(file=file, lines=lines, bad=bad, first_bad=first_bad)
    write_record(job.out / f"{number:05d}.json", record)
    return record


def _batches(job: _TokenizationJob, parts: list[Part]) -> Iterator[list[tuple[int, int, Any]] | int]:
    """Yield lists of (source, line, document), and at the end of each part its number of lines."""
    batch: list[tuple[int, int, Any]] = []
    held = 0
    for source, part in enumerate(parts):
        for line, value in documents(part, job.reading):
            if value is None:
                yield line
                continue
            batch.append((source, line, value))
            held += len(value) if isinstance(value, str) else 1000
            if held >= _BATCH:
                yield batch
                batch, held = [], 0
    if batch:
        yield batch


def _encode(job: _TokenizationJob, values: list[Any]) -> list[tuple[Array, Array] | BadDocument]:
    """Return tokens, and which of them count in the loss, of each document."""
    if job.reading.is_chat:
        template = _template(job)
        return [value if isinstance(value, BadDocument) else template.encode(value) for value in values]
    texts = _tokenizer(job).encode([value for value in values if isinstance(value, str)])
    made = iter(texts)
    none = np.empty(0, np.uint8)  # text: all count
    return [value if isinstance(value, BadDocument) else (next(made), none) for value in values]


def _key(value: Any) -> int:
    """Return the hash of a document's text, which does not depend on the tokenizer."""
    text = value if isinstance(value, str) else json.dumps(value, sort_keys=True, default=str)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


@contextmanager
def _locked(folder: Path, wait: bool) -> Iterator[None]:
    """Hold the folder's lock, so that one call at a time writes into it."""
    with (folder / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except OSError as error:
            raise ConfigError(
                f"Another process is tokenizing into {folder}. Wait for it, or give another --out."
            ) from error
        yield
