"""Relation of the tensors of the ranks of a context x tensor group to the whole tensor of one process.

The relation is found by trying: each rank has the whole; a part of it, by its place on the context axis (in triax's
order or in consecutive parts) or on the tensor axis (consecutive, or rows of fused parts, found by their values); or a
term of a sum over the tensor axis.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from ..context.order import positions
from ..grid.ranges import split

Place = tuple[int, int]  # rank on the context axis, rank on the tensor axis
Pieces = Mapping[Place, Tensor]
RTOL = 1e-9
_MOST_ROWS = 4096  # rows of a dim in which fused parts are searched


class Relation(NamedTuple):
    """How the ranks' tensors make up the whole.

    Attributes:
        kind: ``whole``, ``parts`` or ``terms`` on the tensor axis.
        expected: the tensor that each rank should have under this relation; of terms, their sum.
        context: True if each rank of the context axis has a part.
        dim: the dim that the tensor axis shards; -1: none.
    """

    kind: str
    expected: dict[Place, Tensor]
    context: bool = False
    dim: int = -1


def close(found: Tensor, wanted: Tensor, rtol: float = RTOL) -> bool:
    """Return True if two tensors of one shape are equal up to rounding."""
    if found.shape != wanted.shape:
        return False
    if not wanted.numel():
        return True
    found, wanted = found.double(), wanted.double()
    same = (found == wanted) | (found.isnan() & wanted.isnan())  # infinities of masks
    finite = wanted[wanted.isfinite()]
    largest = finite.abs().max().item() if finite.numel() else 0.0
    return bool((same | ((found - wanted).abs() <= rtol * largest + 1e-13)).all())


def relation(pieces: Pieces, whole: Tensor, sizes: Mapping[str, int]) -> Relation | None:
    """Return the relation of the ranks' tensors to the whole; None if none holds.

    Args:
        pieces: (context rank, tensor rank) -> tensor.
        whole: the tensor of one process.
        sizes: sizes of the axes.
    """
    for candidate in candidates(pieces, whole, sizes):
        if all(close(piece, candidate.expected[place]) for place, piece in pieces.items()):
            return candidate
    for context, parts in _context_parts(pieces, whole, sizes):
        if found := _fused(pieces, parts, context):
            return found
        if found := _terms(pieces, parts, context, sizes):
            return found
    return None


def candidates(pieces: Pieces, whole: Tensor, sizes: Mapping[str, int]) -> Iterator[Relation]:
    """Yield the relations under which each rank's tensor has the right shape, whatever its values."""
    tensor = sizes.get("tensor", 1)
    for context, parts in _context_parts(pieces, whole, sizes):
        shapes = {place: piece.shape for place, piece in pieces.items()}
        if all(parts[c].shape == shape for (c, _), shape in shapes.items()):
            yield Relation("whole", {place: parts[place[0]] for place in pieces}, context)
        if tensor == 1:
            continue
        for dim in range(whole.dim()):
            expected = {(c, t): _slice(parts[c], dim, tensor, t) for c, t in pieces}
            if all(expected[place].shape == shape for place, shape in shapes.items()):
                yield Relation("parts", expected, context, dim)


def _slice(whole: Tensor, dim: int, size: int, rank: int) -> Tensor:
    start, stop = split(whole.shape[dim], size, rank)
    return whole.narrow(dim, start, stop - start)


def _context_parts(pieces: Pieces, whole: Tensor, sizes: Mapping[str, int]) -> Iterator[tuple[bool, dict[int, Tensor]]]:
    """Yield (True if cut, context rank -> its part of the whole), for each way to cut a sequence."""
    ranks = sorted({c for c, _ in pieces})
    yield False, dict.fromkeys(ranks, whole)
    size = sizes.get("context", 1)
    if size == 1:
        return
    for dim in range(whole.dim()):
        length = whole.shape[dim]
        if length < 2 * size or length % (2 * size):
            continue
        order = {c: positions(length, size, c) for c in ranks}
        yield True, {c: whole.index_select(dim, order[c]) for c in ranks}
        yield True, {c: _slice(whole, dim, size, c) for c in ranks}


def _fused(pieces: Pieces, parts: Mapping[int, Tensor], context: bool) -> Relation | None:
    """Find each rank's rows of a dim among those of the whole; together the ranks must have all of them."""
    first = next(iter(pieces.values()))
    whole = next(iter(parts.values()))
    if first.dim() != whole.dim() or len(pieces) == 1:
        return None
    uneven = [d for d in range(whole.dim()) if first.shape[d] != whole.shape[d]]
    if len(uneven) != 1 or whole.shape[uneven[0]] > _MOST_ROWS or not first.shape[uneven[0]]:
        return None
    dim, seen = uneven[0], dict[int, set[int]]()
    expected = {}
    for (c, t), piece in pieces.items():
        rows, own = _rows(parts[c], dim).double(), _rows(piece, dim).double()
        if rows.shape[1] != own.shape[1]:
            return None
        at = torch.cdist(own, rows, p=1.0, compute_mode="donot_use_mm_for_euclid_dist").argmin(1)
        expected[c, t] = parts[c].index_select(dim, at)
        if not close(piece, expected[c, t]):
            return None
        seen.setdefault(c, set()).update(at.tolist())
    distinct = {c: torch.unique(_rows(parts[c], dim), dim=0).shape[0] for c in seen}
    if any(len(seen[c]) < distinct[c] for c in seen):
        return None
    return Relation("parts", expected, context, dim)


def _rows(tensor: Tensor, dim: int) -> Tensor:
    return tensor.movedim(dim, 0).reshape(tensor.shape[dim], -1)


def _terms(pieces: Pieces, parts: Mapping[int, Tensor], context: bool, sizes: Mapping[str, int]) -> Relation | None:
    """Return the relation of terms of a sum over the tensor axis."""
    size = sizes.get("tensor", 1)
    if size == 1:
        return None
    for c, part in parts.items():
        ours = [piece for (at, _), piece in pieces.items() if at == c]
        if len(ours) < size or any(each.shape != part.shape for each in ours) or not close(sum_of(ours), part):
            return None
    return Relation("terms", {(c, t): parts[c] for c, t in pieces}, context)


def sum_of(tensors: list[Tensor]) -> Tensor:
    """Return the sum of tensors of one shape."""
    total = tensors[0].clone()
    for each in tensors[1:]:
        total += each
    return total
