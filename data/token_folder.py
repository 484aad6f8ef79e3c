"""Tokens on disk: a folder with index.json and files of tokens, and the checks of both.

tokens/
  index.json          the tokenizer, and size, checksum and numbers of each file; written last
  00000.safetensors   documents one after another (token_file.py)
  00001.safetensors
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ..base.errors import ConfigError, CorruptError
from ..base.files import open_file, parse_json, read_bytes
from .token_file import Array, TokenFile, write_atomically

NAME = "index.json"
FORMAT, VERSION = "triax tokens", 1

_Count = Annotated[int, Field(ge=1, lt=2**62)]
_Sha256 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class TokenizerFacts(_Strict):
    """Facts about a tokenizer: its name, its fingerprint, and the token that ends a document."""

    name: str
    fingerprint: _Sha256
    vocab_size: Annotated[int, Field(ge=1, le=2**32)]
    end: Annotated[int, Field(ge=0, lt=2**32)] | None


class FileEntry(_Strict):
    """Entry of one file of tokens in the index."""

    name: Annotated[str, Field(pattern=r"^[0-9]{5,9}\.safetensors$")]
    bytes: _Count
    sha256: _Sha256
    documents: _Count
    tokens: _Count
    largest: Annotated[int, Field(ge=0, lt=2**32)]  # token
    line: Annotated[int, Field(ge=0)]  # lines of its first source that are in files before it


class PieceRecord(_Strict):
    """Record of a piece of the sources that is tokenized, beside its file until the index is written.

    Attributes:
        file: the file; None if no document of the piece is valid.
        lines: lines of the piece.
        bad, first_bad: number of documents that were left out, and the first of them.
    """

    file: FileEntry | None
    lines: Annotated[int, Field(ge=0)]
    bad: Annotated[int, Field(ge=0)]
    first_bad: str


class TokenIndex(_Strict):
    """Content of index.json.

    Attributes:
        kind: ``chat`` if the files have ``counted``.
        plan: hash of the sources, the tokenizer and the options.
        dtype: dtype of the tokens.
        documents, tokens: numbers of all files together.
        checksum: SHA-256 of the other entries.
    """

    format: Literal["triax tokens"]
    version: Literal[1]
    kind: Literal["text", "chat"]
    plan: _Sha256
    tokenizer: TokenizerFacts
    dtype: Literal["U8", "U16", "U32"]
    documents: _Count
    tokens: _Count
    files: Annotated[list[FileEntry], Field(min_length=1)]
    checksum: str = ""


def write_index(folder: Path, index: TokenIndex) -> None:
    """Write index.json with its checksum."""
    write_atomically(folder / NAME, with_checksum(index.model_dump(exclude={"checksum"})))


def with_checksum(values: dict[str, Any]) -> bytes:
    """Return values as JSON, with the SHA-256 of them as another one."""
    return json.dumps({**values, "checksum": _checksum(values)}, indent=1).encode()


def write_record(path: Path, record: PieceRecord) -> None:
    """Write the record of a piece. One that a crash cuts off is no record, so nothing waits for the disk."""
    write_atomically(path, with_checksum(record.model_dump()), durable=False)


def read_record(path: Path) -> PieceRecord | None:
    """Return the record of a piece whose file is there as it was written; else None."""
    try:
        values = parse_json(read_bytes(path))
        if values.pop("checksum") != _checksum(values):
            return None
        record = PieceRecord.model_validate(values)
        if record.file is not None and _sha256(path.parent / record.file.name) != record.file.sha256:
            return None
        return record
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None


def read_index(folder: Path) -> TokenIndex:
    """Read index.json.

    Raises:
        ConfigError: the folder has no index.
        CorruptError: the index is not one that was written.
    """
    path = folder / NAME
    try:
        values = parse_json(read_bytes(path))
        if not isinstance(values, dict):
            raise ValueError("it is not a JSON object")
    except OSError as error:
        if os.path.isfile(folder):
            raise ConfigError(
                f"{folder} is a file, but tokens are a folder, which triax data tokenize writes."
            ) from error
        reason = "it does not exist" if not os.path.exists(folder) else f"it has no {NAME}"
        advice = "Give a folder that triax data tokenize wrote"
        if os.path.isfile(folder / "plan.json"):
            advice = "triax data tokenize has not finished there: give that command again"
        raise ConfigError(f"{folder} has no tokens: {reason}. {advice}.") from error
    except (ValueError, RecursionError) as error:
        raise CorruptError(f"{path} is damaged: it is not a JSON object. Run triax data tokenize again.") from error
    if values.get("format") == FORMAT and type(values.get("version")) is int and values["version"] > VERSION:
        raise ConfigError(f"{path} has version {values['version']}, but this triax reads version {VERSION}. Update it.")
    stated = values.pop("checksum", None)
    if stated != _checksum(values):
        raise CorruptError(f"{path} is damaged: its checksum is wrong. Run triax data tokenize again.")
    try:
        index = TokenIndex.model_validate({**values, "checksum": stated}, strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        raise CorruptError(f"{path} is not valid: {'.'.join(map(str, first['loc']))}: {first['msg']}.") from error
    for name in ("documents", "tokens"):
        if getattr(index, name) != (total := sum(getattr(file, name) for file in index.files)):
            raise CorruptError(f"{path} is not valid: it states {getattr(index, name)} {name}, its files {total}.")
    return index


class TokenFolder:
    """Tokenized documents of a folder, memory-mapped.

    Documents are numbered from 0, through all files; tokens too.

    Args:
        path: the folder.

    Attributes:
        index: content of index.json.
        files: the files of tokens.
        first_document, first_token: (files + 1,), the first of each file, and the number of all.

    Raises:
        ConfigError: the folder has no tokens.
        CorruptError: a file is damaged, as far as sizes, headers and offsets tell. ``verify`` reads every byte.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.index = index = read_index(self.path)
        self.files: list[TokenFile] = []
        for entry in index.files:
            file = self.path / entry.name
            size = file.stat().st_size if file.is_file() else None
            if size != entry.bytes:
                fault = "is missing" if size is None else f"has {size} bytes, but {entry.bytes} were written"
                raise CorruptError(f"{file} {fault}. Copy it again, or run triax data tokenize again.")
            self.files.append(TokenFile(file, index.dtype, entry.documents, entry.tokens, index.kind == "chat"))
        self.first_document = np.cumsum([0, *(entry.documents for entry in index.files)])
        self.first_token = np.cumsum([0, *(entry.tokens for entry in index.files)])

    @property
    def largest(self) -> int:
        """Largest token."""
        return max(entry.largest for entry in self.index.files)

    @cached_property
    def starts(self) -> Array:
        """First token of each document, and the number of tokens: int64 (documents + 1,)."""
        parts = [file.offsets[:-1] + first for file, first in zip(self.files, self.first_token, strict=False)]
        return np.concatenate([*parts, self.first_token[-1:]])

    @cached_property
    def keys(self) -> Array:
        """Hash of each document's text: uint64 (documents,)."""
        return np.concatenate([file.keys for file in self.files])

    def document(self, number: int) -> Array:
        """Return the tokens of a document, a view of the file.

        Raises:
            ConfigError: there is no document of this number.
        """
        file, row = self._locate(number)
        return file.tokens[file.offsets[row] : file.offsets[row + 1]]

    def counted(self, number: int) -> Array | None:
        """Return for each token of a document 1 if it counts in the loss, else 0; None if all count."""
        file, row = self._locate(number)
        return None if file.counted is None else file.counted[file.offsets[row] : file.offsets[row + 1]]

    def origin(self, number: int) -> str:
        """Return the source of a document and its line there, for a message."""
        file, row = self._locate(number)
        source, line = map(int, file.origins[row])
        sources = file.sources()
        if source >= len(sources):
            raise CorruptError(f"{file.path} is damaged: document {number} has a source that the header does not name.")
        name, unit = sources[source]
        before = self.index.files[self.files.index(file)].line if source == 0 else 0
        return f"{name}, {unit} {before + line}"

    def document_of(self, token: int) -> int:
        """Return the document to which a token belongs."""
        return int(np.searchsorted(self.starts, token, "right")) - 1

    def check_vocabulary(self, vocab_size: int) -> None:
        """Check that a model's vocabulary has every token.

        Raises:
            ConfigError: a token is too large. The message names it and the line that it came from.
        """
        if self.largest < vocab_size:
            return
        number = next(i for i, entry in enumerate(self.index.files) if entry.largest >= vocab_size)
        beyond = self.files[number].tokens >= vocab_size
        at = int(np.argmax(beyond))
        document = self.document_of(int(self.first_token[number]) + at)
        made = self.index.tokenizer
        raise ConfigError(
            f"{self.path} has tokens up to {self.largest}, but the model's vocabulary has {vocab_size} entries. The "
            f"first that is too large is {int(self.files[number].tokens[at])}, of {self.origin(document)}. The "
            f"tokenizer is {made.name}, with {made.vocab_size} entries. Give the model vocab_size={made.vocab_size}, "
            "or tokenize with the model's tokenizer."
        )

    def check_tokenizer(self, facts: TokenizerFacts) -> None:
        """Check that the tokens were made by a tokenizer.

        Raises:
            ConfigError: they were made by another one.
        """
        tokenizer = self.index.tokenizer
        if tokenizer.fingerprint != facts.fingerprint:
            raise ConfigError(
                f"{self.path} was tokenized with {tokenizer.name} ({tokenizer.vocab_size} entries, fingerprint "
                f"{tokenizer.fingerprint[:12]}), but you gave {facts.name} ({facts.vocab_size} entries, fingerprint "
                f"{facts.fingerprint[:12]}). Give the former, or run triax data tokenize with the latter."
            )

    def verify(self) -> Iterator[str]:
        """Compare every byte with its checksum, and every token with the index. Yields a line for each problem."""
        for entry, file in zip(self.index.files, self.files, strict=True):
            digest = _sha256(file.path)
            if digest != entry.sha256:
                yield f"{file.path} is damaged: its SHA-256 is {digest[:12]}..., but {entry.sha256[:12]}... was written"
            elif (largest := int(file.tokens.max())) != entry.largest:
                yield f"{file.path} is not valid: its largest token is {largest}, but the index states {entry.largest}"
            elif int(file.origins[:, 0].max()) >= len(file.sources()):
                yield f"{file.path} is not valid: a document has a source that the header does not name"

    def _locate(self, number: int) -> tuple[TokenFile, int]:
        if not 0 <= number < self.index.documents:
            last = self.index.documents - 1
            raise ConfigError(f"There is no document {number}: {self.path} has documents 0 to {last}.")
        file = int(np.searchsorted(self.first_document, number, "right")) - 1
        self.files[file].require_whole()
        return self.files[file], number - int(self.first_document[file])


def _sha256(path: Path) -> str:
    with open_file(path) as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()  # type: ignore[arg-type]  # a file has readinto


def _checksum(values: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
