"""Tokenized folders as training data: packed rows of a length, of one folder, of several, or of a mixture by weight."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..base.errors import ConfigError, nearest
from .balance import Balance
from .mixture import Mixture, Rows
from .packing import PACKINGS, DocumentRows
from .token_file import Array
from .token_folder import TokenFolder
from .token_loader import TokenLoader
from .tokenizer import open_tokenizer

PARTS = ("training", "held_out")

Folders = str | Path | Sequence[str | Path] | Mapping[str, float]


class TokenData:
    """Tokenized documents as packed rows, for ``triax.Engine(training_data=...)`` or a loader of one's own.

        data = TokenData("tokens", length=1024, held_out=0.01)
        data = TokenData(["books", "news"], length=1024)             # one set of documents
        data = TokenData({"books": 0.7, "code": 0.3}, length=1024)   # of each 10 rows, 7 of books

    A row depends on its number, the seed and these arguments alone. Members of a mixture have epochs of their own.

    >>> with open("text.txt", "w") as file:
    ...     length = file.write("to be or not to be")
    >>> tokenized = triax.data.tokenize(["text.txt"], "bytes", "tokens")
    >>> data = triax.data.TokenData("tokens", length=8, document_mask=False, shuffle=False)
    >>> inputs, labels = next(iter(data.loader(train=2, micro=2)))
    >>> inputs.shape, bytes(inputs[0].tolist())
    (torch.Size([2, 8]), b'to be or')

    Args:
        folders: a folder that ``triax data tokenize`` wrote, several as one set, or several with their weights.
        length: T, the number of tokens in a row.
        held_out: share of the documents that is not trained on. Which ones depends on their texts alone: a text that
            occurs twice is on one side, whatever the tokenizer. At least one text is held out, and one is not.
        part: ``training``, or ``held_out``.
        packing: ``cut``: documents go on in the next row. ``whole``: no document is cut that fits in a row; rows are
            padded. Conversations need ``whole``, or the assistant's answer may be in another row than its question.
        document_mask: rows come with document numbers, so that tokens attend within their document only. False: inputs
            are ids alone.
        shuffle: draw an order of documents and of rows for each epoch; False: the documents' own order.
        tokenizer: the model's tokenizer, which must be the one that made the tokens.
        vocab_size: number of entries in the model's vocabulary, which must have every token.
        threads: threads that make batches ahead, in the loader of an engine; 0: none.

    Attributes:
        folders: the opened folders.

    Raises:
        ConfigError: a wrong tokenizer, a vocabulary that is too small, or other arguments that cannot be used.
        CorruptError: a file of tokens is damaged.
    """

    def __init__(
        self,
        folders: Folders,
        length: int,
        *,
        held_out: float = 0.0,
        part: str = "training",
        packing: str | None = None,
        document_mask: bool = True,
        shuffle: bool = True,
        tokenizer: str | Path | None = None,
        vocab_size: int | None = None,
        threads: int = 1,
    ) -> None:
        weighted = isinstance(folders, Mapping)
        paths = [folders] if isinstance(folders, (str, Path)) else [*folders]
        if length < 1 or not paths:
            raise ConfigError(f"length is {length} and folders are {paths}. Give at least 1 token and 1 folder.")
        if part not in PARTS:
            raise ConfigError(f"part is {part!r}: {nearest(part, PARTS)}.")
        if not 0 <= held_out < 1 or (part == "held_out" and not held_out):
            least = "above 0" if part == "held_out" else "at least 0"
            raise ConfigError(f"held_out is {held_out} for part={part!r}, but it must be {least} and below 1.")
        self.folders = [TokenFolder(path) for path in paths]
        self.length, self.document_mask, self._shuffle = length, document_mask, shuffle
        self.threads = threads
        kinds = {folder.index.kind for folder in self.folders}
        self._packing = packing or ("whole" if "chat" in kinds else "cut")
        if self._packing not in PACKINGS:
            raise ConfigError(f"packing is {packing!r}: {nearest(self._packing, PACKINGS)}.")
        for folder in self.folders[1:]:
            folder.check_tokenizer(self.folders[0].index.tokenizer)
        if tokenizer is not None:
            facts = open_tokenizer(tokenizer).facts
            for folder in self.folders:
                folder.check_tokenizer(facts)
        if vocab_size is not None:
            for folder in self.folders:
                folder.check_vocabulary(vocab_size)
        self._chosen = [_choose(folder, held_out, part) for folder in self.folders]
        self._mixture = (
            Mixture([float(weight) for weight in folders.values()]) if isinstance(folders, Mapping) else None
        )
        members = [[number] for number in range(len(paths))] if weighted else [[*range(len(paths))]]
        self._members = members
        self._facts: dict[str, Any] = {
            "length": length,
            "part": part,
            "held_out": held_out,
            "packing": self._packing,
            "shuffle": "rows" if shuffle and self._packing == "cut" else shuffle,  # True: before rows were shuffled too
            "folders": [folder.index.checksum[:16] for folder in self.folders],
            "weights": [float(weight) for weight in folders.values()] if isinstance(folders, Mapping) else None,
        }

    @property
    def facts(self) -> dict[str, Any]:
        """Facts on which the rows depend, beside the seed: the checksums of the folders, and the arguments."""
        return {**self._facts}

    def rows(self, seed: int) -> Rows:
        """Return the rows for a seed."""
        made = []
        for numbers in self._members:
            folders, chosen = [self.folders[n] for n in numbers], [self._chosen[n] for n in numbers]
            made.append(DocumentRows(folders, chosen, self.length, seed if self._shuffle else None, self._packing))
        return Rows(made, self._mixture)

    def loader(
        self,
        train: int,
        micro: int,
        replica: int = 0,
        replicas: int = 1,
        seed: int = 0,
        *,
        threads: int = 1,
        epochs: int | None = None,
        pin_memory: bool = False,
        balance: Balance | None = None,
    ) -> TokenLoader:
        """Return a loader of one replica's microbatches, as ``TokenLoader``."""
        options: dict[str, Any] = {"threads": threads, "epochs": epochs, "pin_memory": pin_memory, "balance": balance}
        return TokenLoader(self, train, micro, replica, replicas, seed, **options)


def _choose(folder: TokenFolder, held_out: float, part: str) -> Array:
    """Return the numbers of the documents that belong to a part."""
    keys = folder.keys
    if not held_out:
        return np.arange(len(keys))
    low, high = int(keys.min()), int(keys.max())
    if low == high:
        raise ConfigError(
            f"held_out is {held_out}, but {folder.path} has one document, or the same text in all. Give held_out=0, or "
            "tokenize with --split line or --split paragraph, which makes more documents of a text file."
        )
    limit = min(max(int(held_out * 2**64), low + 1), high)  # at least one on each side
    below = keys < np.uint64(limit)
    return np.flatnonzero(below if part == "held_out" else ~below)
