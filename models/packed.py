"""Packed sequences: several documents one after another in a row of tokens, without attention across documents.

A model's input is then ``(ids, documents)``, and the layers pass ``(x, documents)`` on. ``documents``, integers (B, T),
holds the document number of each token and does not decrease along a row. A token attends only within its document, and
positions start at 0 in each document, so a packed row gives the same outputs as its documents give one by one.

On a grid with a context axis, ids and ``documents`` are those of the whole sequence on every rank, and each layer takes
this rank's part. Where the sequence must be padded for that, the token embedding adds ``documents`` itself, one
document a row, so that every layer knows the length T.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..base.uncompiled import uncompiled
from ..context.documents import positions_within
from ..context.order import positions, shard
from ..grid import Axis


def pack(texts: Iterable[Sequence[int]], length: int, ignore_index: int = -100) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Pack tokenized texts into rows of equal length, and make the labels.

    Texts follow one another without a gap. A text that reaches the end of a row continues in the next row, as another
    document. A token's label is the next token of its text, even if that token is in the next row. The last token of a
    text has the label ``ignore_index``. The last row is padded with a document of zeros, whose labels are
    ``ignore_index`` too.

    Args:
        texts: the tokens of each text.
        length: T, the number of tokens in a row.
        ignore_index: the label of tokens that no token follows.

    Returns:
        ((ids, documents), labels), int64 (rows, T) each.

    Raises:
        ValueError: there are no tokens, or the length is below 1.
    """
    ids: list[int] = []
    labels: list[int] = []
    documents: list[int] = []
    number = -1
    for number, text in enumerate(texts):
        tokens = list(text)
        ids += tokens
        labels += [*tokens[1:], ignore_index][: len(tokens)]
        documents += [number] * len(tokens)
    if not ids or length < 1:
        raise ValueError(f"the texts have {len(ids)} tokens, and a row has length={length}. Give at least 1 of each.")
    missing = -len(ids) % length
    ids += [0] * missing
    labels += [ignore_index] * missing
    documents += [number + 1] * missing
    rows, numbers, follow = (torch.tensor(values).view(-1, length) for values in (ids, documents, labels))
    return (rows, numbers), follow


def detach(x: Any) -> tuple[Tensor, Tensor | None]:
    """Split ``(x, documents)`` into x and documents; for a tensor x alone, return x and None."""
    if isinstance(x, Tensor):
        return x, None
    x, documents = x
    return x, documents


def attach(x: Tensor, documents: Tensor | None) -> Tensor | tuple[Tensor, Tensor]:
    """Join x and documents to ``(x, documents)``, or return x alone if documents is None; inverse of ``detach``."""
    return x if documents is None else (x, documents)


@uncompiled
def check_documents(ids: Tensor, documents: Tensor | None) -> None:
    """Check that ``documents`` has one document number for each token.

    Raises:
        ValueError: the shape differs from that of the ids, the dtype is no integer dtype, or the numbers decrease
            along a row (checked only on the CPU).
    """
    if documents is None:
        return
    if documents.shape != ids.shape or documents.is_floating_point():
        raise ValueError(
            f"documents are {documents.dtype} {tuple(documents.shape)}, but must be integers of the shape "
            f"{tuple(ids.shape)}, because each token id needs the number of its document."
        )
    if documents.device.type == "cpu" and bool((documents[:, 1:] < documents[:, :-1]).any()):
        raise ValueError(
            "the numbers of documents decrease along a row. Number the documents 0, 1, 2, ... in order, "
            "or pad rows of an attention_mask on the right."
        )


def token_positions(
    local: int, axis: Axis, documents: Tensor | None, device: torch.device | None = None
) -> Tensor | None:
    """Return the positions of this rank's tokens, within their documents if there are any. Padding has any position.

    Args:
        local: number of tokens that this rank holds, padding included.
        axis: the context axis.
        documents: document number of each token of the whole sequence, integers (B, T), or None.
        device: device of the result.

    Returns:
        int64 (B, local), or (1, local) without documents. None if the positions are 0 to ``local`` - 1.
    """
    if documents is not None:
        return shard(positions_within(documents), axis, multiple=local)
    return None if axis.size == 1 else positions(local * axis.size, axis.size, axis.rank, local).to(device)[None]


def valid_and_positions(
    x: Tensor, context: Axis, tensor: Axis | None, documents: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """Return which of this rank's tokens are no padding, and their positions in the whole row.

    Args:
        x: (B, T_local, ...), this rank's tokens.
        context: the context axis.
        tensor: the tensor axis, if it shards the tokens further (sequence parallelism), else None.
        documents: document number of each token of the whole row, integers (B, T), or None.

    Returns:
        bool (B, T_local), or None if there is no padding; and int64 (T_local,), or None if the row is not sharded over
        the context axis.
    """
    if context.size == 1:
        return None, None
    local = x.shape[1] * (1 if tensor is None else tensor.size)
    places = positions(local * context.size, context.size, context.rank, local)
    if tensor is not None:
        places = places.chunk(tensor.size)[tensor.rank]
    places = places.to(x.device)
    length = local * context.size if documents is None else documents.shape[1]
    valid = None if length == local * context.size else (places < length).expand(x.shape[:2])
    return valid, places
