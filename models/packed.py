"""Packed sequences: several documents behind one another in a row, none of which sees another.

A model's input is then ``(ids, documents)``, and what travels from layer to layer is ``(x, documents)``: documents
(B, T) are integers that say which document each token is of. They do not decrease along a row. Tokens attend within
their document only, and positions start anew in each, so a packed row gives what its documents give alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = ["Packing", "attach", "check_documents", "detach", "pack", "packing", "positions_within"]

# On the tensor of documents itself, so that the blocks of one stage build a microbatch's mask once, and it goes with
# the microbatch.
_ATTRIBUTE = "triax_packing"


def pack(texts: Iterable[Sequence[int]], length: int, ignore_index: int = -100) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Texts as packed rows, and their labels: all that a model and its loss want.

    Texts follow one another without a gap. One that reaches beyond its row goes on in the next, as a document of its
    own. A token's label is the token that follows it in its text, also where that is in the next row; the last token
    of a text has none. The last row is filled up with a document of zeros, whose labels do not count.

    Args:
        texts: the tokens of each.
        length: T, of a row.
        ignore_index: the label where nothing follows.

    Returns:
        ((ids, documents), labels), int64 (rows, T) each.

    Raises:
        ValueError: no tokens, or a length below 1.
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
        raise ValueError(f"{len(ids)} tokens in rows of {length}: give at least one of each")
    missing = -len(ids) % length
    ids += [0] * missing
    labels += [ignore_index] * missing
    documents += [number + 1] * missing
    rows, numbers, follow = (torch.tensor(values).view(-1, length) for values in (ids, documents, labels))
    return (rows, numbers), follow


class Packing(NamedTuple):
    """What attention needs to know of packed rows."""

    positions: Tensor  # int64 (B, T): the place of each token in its document
    mask: Tensor  # (B, 1, T, T): 0 where a token may look, -inf where not; of the model's dtype


def detach(x: Any) -> tuple[Tensor, Tensor | None]:
    """What travels, apart: ``x`` or ``(x, documents)`` -> x, and documents or None."""
    if isinstance(x, Tensor):
        return x, None
    x, documents = x
    return x, documents


def attach(x: Tensor, documents: Tensor | None) -> Tensor | tuple[Tensor, Tensor]:
    """The inverse of ``detach``."""
    return x if documents is None else (x, documents)


def check_documents(ids: Tensor, documents: Tensor | None) -> None:
    """Refuse documents that do not number the tokens.

    Raises:
        ValueError: another shape than the ids', no integers, or (on the CPU) numbers that decrease along a row.
    """
    if documents is None:
        return
    if documents.shape != ids.shape or documents.is_floating_point():
        raise ValueError(
            f"documents number the tokens: integers {tuple(ids.shape)} as the ids, not {documents.dtype} "
            f"{tuple(documents.shape)}"
        )
    if documents.device.type == "cpu" and bool((documents[:, 1:] < documents[:, :-1]).any()):
        raise ValueError("the numbers of documents decrease along a row: number them 0, 1, 2, ... in their order")


def packing(documents: Tensor, dtype: torch.dtype) -> Packing:
    """Positions and mask of packed rows, built once for a tensor of documents and kept with it.

    Args:
        documents: integers (B, T), not decreasing along T.
        dtype: of the mask: that of the queries.
    """
    key = (documents._version, dtype)
    kept = getattr(documents, _ATTRIBUTE, None)
    if kept is not None and kept[0] == key:
        found: Packing = kept[1]
        return found
    built = Packing(positions_within(documents), _mask(documents, dtype))
    setattr(documents, _ATTRIBUTE, (key, built))
    return built


def positions_within(documents: Tensor) -> Tensor:
    """int64 (B, T): how many tokens of its own document stand before each token."""
    places = torch.arange(documents.shape[1], device=documents.device).expand(documents.shape)
    begins = torch.ones_like(documents, dtype=torch.bool)
    begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
    return places - places.masked_fill(~begins, 0).cummax(dim=1).values


def _mask(documents: Tensor, dtype: torch.dtype) -> Tensor:
    # Added to the scores, and not True or False: torch would turn that into this, once for each layer.
    length = documents.shape[1]
    seen = (documents[:, None, :, None] == documents[:, None, None, :]).tril()  # (B, 1, T, T)
    mask = torch.zeros((documents.shape[0], 1, length, length), dtype=dtype, device=documents.device)
    return mask.masked_fill_(~seen, -torch.inf)
