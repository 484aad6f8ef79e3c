"""Tokenizers: bytes, a tokenizer.json, or a folder of transformers; their fingerprints; training one on text.

Two tokenizers have one fingerprint if they have the same vocabulary and make the same tokens of a text with many kinds
of characters. It does not depend on versions of ``tokenizers``, nor on how the tokenizer was saved.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..grid.errors import ConfigError, to_install
from .sources import UNITS, BadDocument, Part, Reading, SourceFile, documents
from .token_file import Array
from .token_folder import TokenizerFacts

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
        found = []
        for ids in self._encode(texts):
            tokens = np.asarray(ids, dtype=np.int64)
            found.append(tokens if end is None or (len(tokens) and tokens[-1] == end) else np.append(tokens, end))
        return found

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
        name: ``bytes``, a tokenizer.json, or a folder of transformers.
        end: token that ends a document, or ``none``; by default the tokenizer's end of a text, byte 0 for ``bytes``.

    Raises:
        ConfigError: there is no such tokenizer, or its package is not installed.
    """
    path = Path(name)
    if str(name) == BYTES:
        opened = _bytes()
    elif path.is_dir():
        opened = _folder(path)
    elif path.is_file():
        opened = _file(path, str(path), None)
    else:
        raise ConfigError(f"There is no tokenizer {name}. Give bytes, a tokenizer.json, or a folder that contains one.")
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
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # transformers raises errors of any type
        raise ConfigError(f"{folder} has no tokenizer that transformers can load: {_one_line(error)}") from error


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
    out.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(out / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "model_max_length": 10**9}
    (out / "tokenizer_config.json").write_text(json.dumps(config, indent=1))
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


def _folder(folder: Path) -> TextTokenizer:
    """Open a folder's tokenizer: by ``tokenizers`` alone if transformers would change nothing, else as it loads it."""
    file, config = folder / "tokenizer.json", _read_json(folder / "tokenizer_config.json")
    maps = [folder / name for name in ("special_tokens_map.json", "added_tokens.json")]
    generic = config.get("tokenizer_class", _GENERIC[0]) in _GENERIC and config.keys() <= _HARMLESS
    if file.is_file() and generic and not any(path.exists() for path in maps):
        end = config.get("eos_token")
        return _file(file, str(folder), end.get("content") if isinstance(end, dict) else end)
    loaded = load_transformers(folder)
    end = loaded.eos_token_id
    backend = getattr(loaded, "backend_tokenizer", None)
    if backend is not None:
        return _from_tokenizers(backend, str(folder), end)

    def encode(texts: list[str]) -> list[Any]:
        return [*loaded(texts)["input_ids"]]

    def plain(text: str) -> Any:
        return loaded(text, add_special_tokens=False)["input_ids"]

    return TextTokenizer(str(folder), loaded.get_vocab(), encode, plain, lambda ids: str(loaded.decode(ids)), end)


def _file(file: Path, name: str, end: Any) -> TextTokenizer:
    tokenizers = _import_tokenizers(name)
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # tokenizers raises plain Exceptions
        raise ConfigError(f"{file} is not a tokenizer of the package tokenizers: {_one_line(error)}") from error
    number = tokenizer.token_to_id(end) if isinstance(end, str) else None
    return _from_tokenizers(tokenizer, name, number)


def _from_tokenizers(tokenizer: Any, name: str, end: int | None) -> TextTokenizer:
    tokenizer.no_truncation()
    tokenizer.no_padding()

    def encode(texts: list[str]) -> list[Any]:
        return [each.ids for each in tokenizer.encode_batch_fast(texts)]

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


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
