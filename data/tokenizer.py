"""Tokenizers: bytes, a tokenizer.json, or a folder of transformers; their fingerprints; training one on text.

Two tokenizers have one fingerprint if they have the same vocabulary and make the same tokens of a text with many kinds
of characters. It does not depend on versions of ``tokenizers``, nor on how the tokenizer was saved.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from threading import Thread
from typing import Any, TypeVar

import numpy as np

from ..base.errors import ConfigError, to_install
from ..base.files import read_object
from ..base.folder_files import FolderFiles
from ..base.hub import local_folder
from .bad_document import BadDocument
from .byte_tokenizer import ByteTokenizer
from .sources import UNITS, Part, Reading, SourceFile, documents
from .token_file import Array
from .token_folder import TokenizerFacts

T = TypeVar("T")

BYTES = "bytes"
END = "<|endoftext|>"  # of the tokenizers that are trained here
# Classes of transformers that take tokenizer.json as it is, and keys of tokenizer_config.json that change no token.
_GENERIC = ("PreTrainedTokenizerFast", "TokenizersBackend")
_HARMLESS = {"tokenizer_class", "eos_token", "model_max_length", "chat_template"}
_PROBE = (
    "The quick brown fox can't jump 3.14159 times over  the lazy dog's 1,000,000 bones!?\n\n\tdef f(x_1: int) -> None:"
    "\n        return x_1 ** 2  # ÀÉÎõü ß Œ Ωμέγα Привет мир שלום مرحبا नमस्ते 你好，世界 こんにちは 안녕하세요 "
    "\U0001f642 <s> </s> [INST]"
)


class TextTokenizer:
    """Tokenizer of texts.

    Args:
        name: its name in messages: the path, or ``bytes``.
        vocab: token -> id.
        encode: makes lists of ids of a list of texts, with the special tokens that begin a text.
        plain: makes ids of one text, without special tokens.
        decode: makes a text of ids.
        end: id of the token that ends a document; None: nothing ends it.

    Attributes:
        facts: name, fingerprint, size of the vocabulary, and the token that ends a document.
    """

    def __init__(
        self,
        name: str,
        vocab: dict[str, int],
        encode: Callable[[list[str]], list[Sequence[int]]],
        plain: Callable[[str], Sequence[int]],
        decode: Callable[[list[int]], str],
        end: int | None,
    ) -> None:
        self.decode = decode
        self._encode, self._vocab = encode, vocab
        probe = [int(token) for token in plain(_PROBE)]
        known = sorted((number, token) for token, number in vocab.items())
        digest = hashlib.sha256(json.dumps([known, probe]).encode()).hexdigest()
        size = max(vocab.values(), default=0) + 1
        self.facts = TokenizerFacts(name=name, fingerprint=digest, vocab_size=size, end=end)

    def encode(self, texts: list[str]) -> list[Array]:
        """Return the tokens of each text, with the token that ends a document: integers (T,) each."""
        end = self.facts.end
        encoded = []
        for ids in self._encode(texts):
            tokens = np.asarray(ids, dtype=np.int64)
            encoded.append(tokens if end is None or (len(tokens) and tokens[-1] == end) else np.append(tokens, end))
        return encoded

    def end_with(self, token: str) -> None:
        """Set the token that ends a document; ``none``: nothing ends it.

        Raises:
            ConfigError: the vocabulary does not have it.
        """
        if token != "none" and token not in self._vocab:
            raise ConfigError(
                f"The tokenizer {self.facts.name} has no token {token!r}. Give --end with one that it has."
            )
        self.facts = self.facts.model_copy(update={"end": None if token == "none" else self._vocab[token]})


def open_tokenizer(name: str | Path, end: str | None = None) -> TextTokenizer:
    """Open a tokenizer.

    Args:
        name: ``bytes``, a tokenizer.json, a folder of transformers, or an id of the Hub, as ``Qwen/Qwen3-0.6B``.
        end: token that ends a document, or ``none``; by default the tokenizer's end of a text, byte 0 for ``bytes``.

    Raises:
        ConfigError: there is no such tokenizer, or its package is not installed.
    """
    if str(name) == BYTES or ((path := local_folder(name)).is_dir() and ByteTokenizer().is_in(path)):
        opened = _bytes()
    elif path.is_dir():
        opened = _folder(path, str(name))
    elif path.is_file():
        opened = _file(path, str(path), None)
    else:
        raise ConfigError(
            f"There is no tokenizer {name}. Give bytes, a tokenizer.json, a folder that has one, or an id of the Hub."
        )
    if end is not None:
        opened.end_with(end)
    return opened


def load_transformers(folder: Path) -> Any:
    """Return the tokenizer of a folder, as transformers loads it.

    Raises:
        ConfigError: transformers is not installed, or cannot load it.
    """
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise ConfigError(f"{folder} needs transformers. Type {to_install('hf')}") from error
    _check_files(folder)
    try:
        loaded = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except BaseException as error:  # transformers raises errors of any type
        raise unreadable(f"{folder} has no tokenizer that transformers can load", error) from error
    backend = getattr(loaded, "backend_tokenizer", None)
    if backend is not None:
        within_limit(folder, lambda: backend.encode_batch([_PROBE]))
    return loaded


def train_tokenizer(
    sources: Iterable[SourceFile], reading: Reading, vocab_size: int, out: Path, *, skip_bad: bool = False
) -> TextTokenizer:
    """Train a byte-level BPE tokenizer on documents, and write it to a folder that transformers can load too.

    Args:
        sources: files, from ``find_sources``.
        reading: rules by which documents are read.
        vocab_size: number of tokens: 256 bytes, one that ends a document, and the merges.
        out: the folder.
        skip_bad: leave out documents that are not valid.

    Raises:
        ConfigError: the vocabulary is too small, or a document is not valid.
    """
    tokenizers = _import_tokenizers("train-tokenizer")
    if vocab_size < 257:
        raise ConfigError(f"vocab_size is {vocab_size}, but 256 bytes and the token {END} need at least 257.")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(sources, reading, skip_bad), trainer)
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "model_max_length": 10**9}
    with FolderFiles(out) as folder:
        tokenizer.save(str(folder / "tokenizer.json"))
        (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1))
    return open_tokenizer(out)


def _texts(sources: Iterable[SourceFile], reading: Reading, skip_bad: bool) -> Iterator[str]:
    for source in sources:
        for line, value in documents(Part(source.name, source.format), reading):
            if isinstance(value, str):
                yield value
            elif isinstance(value, BadDocument) and not skip_bad:
                where = f"{source.name}, {UNITS[source.format]} {line + value.further}"
                raise ConfigError(f"{where}: {value}. Mend it, or add --skip-bad to leave out such documents.")


def _bytes() -> TextTokenizer:
    def encode(texts: list[str]) -> list[Any]:
        return [np.frombuffer(text.encode(), np.uint8) for text in texts]

    def decode(ids: list[int]) -> str:
        return bytes(ids).decode(errors="replace")

    vocab = {f"<0x{number:02X}>": number for number in range(256)}
    return TextTokenizer(BYTES, vocab, encode, lambda text: text.encode(), decode, 0)


def _folder(folder: Path, name: str) -> TextTokenizer:
    """Open a folder's tokenizer: by ``tokenizers`` alone if transformers would change nothing, else as it loads it."""
    file, settings = folder / "tokenizer.json", folder / "tokenizer_config.json"
    config = read_object(settings) if settings.is_file() else {}
    maps = [folder / name for name in ("special_tokens_map.json", "added_tokens.json")]
    generic = config.get("tokenizer_class", _GENERIC[0]) in _GENERIC and config.keys() <= _HARMLESS
    if file.is_file() and generic and not any(path.exists() for path in maps):
        end = config.get("eos_token")
        return _file(file, name, end.get("content") if isinstance(end, dict) else end)
    loaded = load_transformers(folder)
    end = loaded.eos_token_id
    backend = getattr(loaded, "backend_tokenizer", None)
    if backend is not None:
        return _from_tokenizers(backend, name, end)

    def encode(texts: list[str]) -> list[Any]:
        return [*loaded(texts)["input_ids"]]

    def plain(text: str) -> Any:
        return loaded(text, add_special_tokens=False)["input_ids"]

    return TextTokenizer(name, loaded.get_vocab(), encode, plain, lambda ids: str(loaded.decode(ids)), end)


def _file(file: Path, name: str, end: Any) -> TextTokenizer:
    tokenizers = _import_tokenizers(name)
    _check_patterns(file)
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(file))
    except BaseException as error:  # tokenizers raises plain Exceptions
        raise unreadable(f"{file} is not a tokenizer of the package tokenizers", error) from error
    within_limit(file, lambda: tokenizer.encode_batch([_PROBE]))
    number = tokenizer.token_to_id(end) if isinstance(end, str) else None
    return _from_tokenizers(tokenizer, name, number)


def _from_tokenizers(tokenizer: Any, name: str, end: int | None) -> TextTokenizer:
    tokenizer.no_truncation()
    tokenizer.no_padding()

    def encode(texts: list[str]) -> list[Any]:
        seconds = 60.0 + sum(map(len, texts)) / 10_000
        return [encoding.ids for encoding in within_limit(name, lambda: tokenizer.encode_batch_fast(texts), seconds)]

    def plain(text: str) -> Any:
        return tokenizer.encode(text, add_special_tokens=False).ids

    def decode(ids: list[int]) -> str:
        return str(tokenizer.decode(ids, skip_special_tokens=False))

    return TextTokenizer(name, tokenizer.get_vocab(), encode, plain, decode, end)


def _import_tokenizers(name: str) -> Any:
    try:
        import tokenizers
        import tokenizers.decoders
        import tokenizers.models
        import tokenizers.pre_tokenizers
        import tokenizers.trainers
    except ImportError as error:
        raise ConfigError(f"{name} needs the package tokenizers. Type {to_install('hf')}") from error
    return tokenizers


def unreadable(what: str, error: BaseException) -> BaseException:
    """Return the error to raise for one of a foreign library: of any type, also a panic of Rust, but no interrupt."""
    if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
        return error
    return ConfigError(f"{what}: {' '.join(str(error).split())[:300] or type(error).__name__}")


def within_limit(
    name: Path | str, call: Callable[[], T], seconds: float = 60.0, why: str = "a pattern of its tokenizer is bad"
) -> T:
    """Return the result of a call of a tokenizer, if it comes within a time that no fair tokenizer needs.

    A pattern may need centuries for a line of text. The call runs in a thread, which nothing can end before the
    process ends; tokenizers releases the interpreter meanwhile.

    Raises:
        ConfigError: the call fails, or the time is over.
    """
    results: list[T] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            results.append(call())
        except BaseException as error:  # raised by the thread that waits
            failed.append(error)

    thread = Thread(target=run, name="tokenizer", daemon=True)
    thread.start()
    thread.join(seconds)
    if failed:
        raise unreadable(f"{name} fails on a text", failed[0])
    if not results:
        raise ConfigError(f"{name} needs more than {seconds:g} s for a line of text: {why}.")
    return results[0]


def _check_files(folder: Path) -> None:
    """Raise ConfigError if a JSON file of a tokenizer's folder is damaged, or has a pattern that would not end."""
    for name in ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json", "config.json"):
        if (folder / name).is_file():
            read_object(folder / name)
    if (folder / "tokenizer.json").is_file():
        _check_patterns(folder / "tokenizer.json")


def _check_patterns(file: Path) -> None:
    """Raise ConfigError if a regular expression of a tokenizer.json repeats a group without limit that itself repeats.

    The time that such an expression needs doubles with each character of a text that it does not match.
    """
    left: list[Any] = [read_object(file)]
    while left:
        value = left.pop()
        if isinstance(value, dict):
            pattern = value.get("Regex")
            if isinstance(pattern, str) and _nested(pattern):
                raise ConfigError(
                    f"{file} has the pattern {pattern[:60]!r}, which repeats a group that itself repeats. Such a "
                    "pattern may need centuries for a line of text."
                )
            left += value.values()
        elif isinstance(value, list) and not (value and isinstance(value[0], str)):  # merges are long lists of text
            left += value


def _nested(pattern: str) -> bool:
    """Return True if a group that has a repetition without limit (``*``, ``+``, ``{2,}``) is repeated so, too."""
    plain = re.sub(r"\\.|\[(?:\\.|\[:\w+:\]|[^\]\\])*\]", "x", pattern, flags=re.DOTALL)  # no escapes, no classes
    repeats, depth = [False], 0
    for position, character in enumerate(plain):
        if character == "(":
            depth += 1
            repeats.append(False)
        unlimited = bool(re.match(r"[*+]|\{\d*,\}|\{\d*,?\d{4,}\}", plain[position:]))
        if character == ")" and depth:
            inside = repeats.pop()
            depth -= 1
            if inside and re.match(r"[*+]|\{\d*,\d*\}|\{\d{2,}\}", plain[position + 1 :]):
                return True
            repeats[-1] = repeats[-1] or inside
        elif unlimited and not (position and plain[position - 1] in "*+?}("):
            repeats[-1] = True
    return False
