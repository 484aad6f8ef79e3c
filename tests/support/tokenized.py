"""Small tokenized folders for tests: documents that differ in every token, their texts, and what rows have of them."""

from __future__ import annotations

import json
import random
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from triax import LlamaConfig
from triax.data import TokenData
from triax.data.tokenization import tokenize


def texts(count: int, seed: int = 0, longest: int = 40) -> list[str]:
    """Return texts of 1 to ``longest`` letters, no two equal."""
    drawn = random.Random(seed)
    return [
        f"{number}:" + "".join(chr(drawn.randrange(97, 123)) for _ in range(drawn.randint(0, longest)))
        for number in range(count)
    ]


def byte_llama(length: int) -> LlamaConfig:
    """Return the configuration of a Llama of four layers over bytes, for rows of so many tokens."""
    return LlamaConfig(
        vocab_size=256,
        hidden_size=16,
        num_hidden_layers=4,
        num_attention_heads=2,
        intermediate_size=24,
        max_position_embeddings=length,
    )


def write_json_lines(path: Path, values: list[Any], key: str = "text") -> Path:
    path.write_text("".join(json.dumps({key: value}) + "\n" for value in values))
    return path


def folder(
    root: Path, count: int, seed: int = 0, name: str = "tokens", piece_bytes: int = 500, longest: int = 40
) -> Path:
    """Tokenize texts as bytes into several files, and return the folder."""
    source = write_json_lines(root / f"{name}.jsonl", texts(count, seed, longest))
    tokenize([source], "bytes", root / name, piece_bytes=piece_bytes)
    return root / name


def rows_of(batches: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return ids, documents and labels of all rows of microbatches."""
    parts = [(ids, documents, labels) for (ids, documents), labels in batches]
    return tuple(torch.cat(part) for part in zip(*parts, strict=True))  # type: ignore[return-value]


def as_filled(data: TokenData, seed: int, epoch: int, rows: Any) -> tuple[Tensor, ...]:
    """Return the rows of an epoch, (ids, documents, labels), in the order in which documents were cut into them."""
    (member,) = data.rows(seed).members
    order = np.argsort(member.places(epoch, np.arange(member.count)))
    return tuple(part[torch.from_numpy(order)] for part in rows)


def documents_in(ids: Tensor, documents: Tensor, labels: Tensor) -> Counter[str]:
    """Put the documents of rows, in the order in which they were cut, together again by their labels; count them.

    Byte 0 ends a document. A document that goes on in another row has a label at the end of its first part.
    """
    pieces: list[tuple[bytes, int]] = []
    for row, numbers, follow in zip(ids.numpy(), documents.numpy(), labels.numpy(), strict=True):
        edges = [0, *(np.flatnonzero(np.diff(numbers)) + 1), len(row)]
        for start, stop in pairwise(edges):
            piece = row[start:stop]
            assert (follow[start : stop - 1] == piece[1:]).all() or (not piece.any() and (follow[start:stop] < 0).all())
            if (follow[start:stop] < 0).all() and not piece.any() and (stop == len(row) and stop - start > 1):
                continue  # padding
            pieces.append((piece.astype(np.uint8).tobytes(), int(follow[stop - 1])))
    found: Counter[str] = Counter()
    held = b""
    for piece, follow in pieces:
        held += piece
        if follow == -100:
            found[held.rstrip(b"\0").decode()] += 1
            held = b""
        else:
            assert follow >= 0
    found.pop("", None)  # a single token of padding
    assert not held
    return found
