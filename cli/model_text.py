"""Text and tokens of a model's folder: prompts and chats to ids, and the text of ids as they are made."""

from __future__ import annotations

import codecs
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from ..base.errors import ConfigError
from ..base.files import read_object
from ..data.byte_tokenizer import ByteTokenizer
from ..inference.text import BYTES, Tokenizer

if TYPE_CHECKING:
    from ..data.chat import ChatTemplate


class Text(Protocol):
    """Protocol: conversion of text to token ids and back, also token by token.

    ``encode`` returns the ids of a prompt, ``chat`` those of messages with the beginning of the answer. ``follow``
    takes the next generated id and returns the text that is now complete. ``rest`` returns the text of the last ids.
    """

    ends: list[int]  # ids of the tokens that end a text
    tokenizer: Tokenizer

    def encode(self, prompt: str) -> list[int]: ...

    def chat(self, messages: list[dict[str, str]]) -> list[int]: ...

    def follow(self, token: int) -> str: ...

    def rest(self) -> str: ...


class ByteText:
    """Tokens that are UTF-8 bytes. A character is returned when all its bytes are there."""

    def __init__(self, ends: Iterable[int]) -> None:
        self.ends, self.tokenizer = list(ends), BYTES
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def encode(self, prompt: str) -> list[int]:
        return list(prompt.encode())

    def chat(self, messages: list[dict[str, str]]) -> list[int]:
        raise ConfigError("--chat needs a tokenizer with a chat template, but the model's tokens are bytes.")

    def follow(self, token: int) -> str:
        return self._decoder.decode(bytes([token]))

    def rest(self) -> str:
        return self._decoder.decode(b"", final=True)


class TokenizerText:
    """Text conversion with the Hugging Face tokenizer in the model's folder."""

    def __init__(self, folder: Path, ends: Iterable[int]) -> None:
        from ..data.tokenizer import load_transformers, within_limit  # needs numpy

        self.tokenizer: Any = load_transformers(folder)
        self._make = lambda prompt: within_limit(folder, lambda: self.tokenizer(prompt))["input_ids"]
        own = getattr(self.tokenizer, "eos_token_id", None)
        self.ends, self._folder = list(ends) or [token for token in (own,) if token is not None], folder
        self._template: ChatTemplate | None = None
        self._ids: list[int] = []
        self._shown = ""

    def encode(self, prompt: str) -> list[int]:
        return self._begin(self._make(prompt))

    def chat(self, messages: list[dict[str, str]]) -> list[int]:
        from ..data.chat import ChatTemplate  # needs numpy

        self._template = self._template or ChatTemplate(self._folder)
        return self._begin(self._template.tokens(messages, prompt=True))

    def _begin(self, ids: list[int]) -> list[int]:
        self._ids = list(ids)
        self._shown = self._text()
        return list(self._ids)

    def follow(self, token: int) -> str:
        self._ids.append(token)
        text = self._text()
        if text.endswith("\N{REPLACEMENT CHARACTER}"):  # in the middle of a character
            return ""
        new, self._shown = text[len(self._shown) :], text
        return new

    def rest(self) -> str:
        return self._text()[len(self._shown) :]

    def _text(self) -> str:
        return str(self.tokenizer.decode(self._ids, skip_special_tokens=self._template is not None))


def open_text(folder: Path) -> Text:
    """Return the text conversion of a model's folder: its tokenizer or, with 256 vocabulary entries, plain bytes.

    Raises:
        ValueError: there is no tokenizer, and the vocabulary does not have 256 entries.
    """
    config = read_object(folder / "config.json")
    further = folder / "generation_config.json"
    eos = (read_object(further) if further.is_file() else config).get("eos_token_id")  # None: the tokenizer's
    ends = [] if eos is None else [eos] if isinstance(eos, int) else eos
    if not isinstance(ends, list) or not all(type(token) is int for token in ends):
        file = further if further.is_file() else folder / "config.json"
        raise ConfigError(f"{file}: eos_token_id is {eos!r:.60}, but must be a whole number or a list of them.")
    return ByteText(ends) if has_bytes(folder) else TokenizerText(folder, ends)


def has_bytes(folder: Path) -> bool:
    """Return True if the tokens of a model's folder are plain bytes, False if it has a tokenizer.

    Raises:
        ValueError: there is no tokenizer, and the vocabulary does not have 256 entries.
    """
    if ByteTokenizer().is_in(folder):
        return True
    if any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json", "vocab.json")):
        return False
    size = read_object(folder / "config.json").get("vocab_size")
    if size == 256:
        return True
    raise ValueError(
        f"{folder} has no tokenizer.json, and its vocabulary has {size} entries. Only a vocabulary of the 256 bytes "
        "needs no tokenizer. Copy the model's tokenizer files there."
    )
