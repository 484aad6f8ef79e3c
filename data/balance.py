"""Microbatches of equal work: the documents of a step are dealt out to replicas and microbatches by their cost.

A document of L tokens costs L + L^2 / ``scale``: at L = ``scale`` attention takes as much time as everything else. The
documents of a step are those of its rows, whole, so loss and gradients are those of the rows. They are dealt out from
the most expensive to the cheapest, each to the replica with the least work so far, and then likewise to the
microbatches of a replica (longest processing time first: Graham 1969). A microbatch is one row, whose length is the sum
of its documents.
"""

from __future__ import annotations

import heapq
import math
import threading
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from .mixture import Rows
from .packing import IGNORED, Pieces
from .token_file import Array

MOST = 1.25  # most tokens of a replica's step, and of a microbatch, over the mean
LENGTHS = 128  # different lengths of microbatches, up to the mean: a pipeline tells all stages of each new one


class Balance(NamedTuple):
    """Rule by which the documents of a step are dealt out.

    Attributes:
        scale: tokens at which a document's attention costs as much as its other work.
        multiple: number that divides the tokens of a microbatch.
    """

    scale: float
    multiple: int = 1


class BalancedRows:
    """Microbatches of equal work, of the documents of some rows.

    Args:
        rows: the rows.
        train: rows of a step.
        replicas, microbatches: numbers of replicas, and of microbatches of each.
        balance: rule by which documents are dealt out.
    """

    def __init__(self, rows: Rows, train: int, replicas: int, microbatches: int, balance: Balance) -> None:
        self._rows, self._replicas, self._microbatches, self._balance = rows, replicas, microbatches, balance
        mean = train * rows.members[0].length / (replicas * microbatches)
        self._unit = math.ceil(mean / LENGTHS / balance.multiple) * balance.multiple
        self._steps: dict[tuple[int, int], _DealtStep] = {}
        self._lock = threading.Lock()

    def read(self, first: int, count: int, microbatch: int) -> tuple[Array, Array, Array]:
        """Return tokens, document numbers and labels of a microbatch, int64 (1, L) each.

        Args:
            first, count: the rows of the step.
            microbatch: its number in the step, replica by replica.
        """
        step = self._step(first, count)
        parts, sizes, offset = [], [], 0
        for member, pieces in step.members:
            numbers = step.microbatches[microbatch] - offset
            own = Pieces(*(column[numbers[(numbers >= 0) & (numbers < len(pieces.file))]] for column in pieces))
            offset += len(pieces.file)
            if len(own.file):
                parts.append(self._rows.members[member].read(own))
                sizes.append(own.sizes)
        tokens = sum(len(ids) for ids, _ in parts)
        padding = (-tokens % self._unit) if tokens else self._unit
        parts.append((np.zeros(padding, np.int64), np.full(padding, IGNORED)))
        ids, labels = (np.concatenate(column).astype(np.int64) for column in zip(*parts, strict=True))
        lengths = np.concatenate([*sizes, [padding]])
        return ids[None], np.repeat(np.arange(len(lengths)), lengths)[None], labels[None]

    def _step(self, first: int, count: int) -> _DealtStep:
        with self._lock:
            if (first, count) not in self._steps:
                found = self._rows.pieces(first, count) if count else []
                members = [(member, _without_padding(pieces)) for member, pieces in found]
                sizes = np.concatenate([np.empty(0, np.int64), *(pieces.sizes for _, pieces in members)])
                dealt = deal(sizes, self._balance.scale, self._replicas, self._microbatches)
                last = [*self._steps.items()][-1:]  # other threads may read the step before
                self._steps = {**dict(last), (first, count): _DealtStep(members, dealt)}
            return self._steps[first, count]


class _DealtStep(NamedTuple):
    """Documents of a step: those of each member of a mixture, and the numbers of those of each microbatch."""

    members: list[tuple[int, Pieces]]
    microbatches: list[Array]


def deal(sizes: Array, scale: float, replicas: int, microbatches: int) -> list[Array]:
    """Return the documents of each microbatch: replicas x microbatches arrays, replica by replica.

    Args:
        sizes: tokens of each document of a step: (n,).
        scale: tokens at which a document's attention costs as much as its other work.
        replicas, microbatches: numbers of replicas, and of microbatches of each.
    """
    costs = sizes + sizes.astype(np.float64) ** 2 / scale
    most = MOST * sizes.sum() / replicas
    found: list[Array] = []
    for documents in _shares(np.arange(len(sizes)), sizes, costs, replicas, most):
        found += _shares(documents, sizes, costs, microbatches, most / microbatches)
    return found


def _shares(documents: Array, sizes: Array, costs: Array, count: int, most: float) -> Iterator[Array]:
    """Yield the documents of each of ``count`` shares of about equal cost, in increasing order.

    A share takes no document that would give it more than ``most`` tokens, as long as another share can take it.
    """
    shares: list[list[int]] = [[] for _ in range(count)]
    heap = [(0.0, 0, number) for number in range(count)]  # cost, tokens, number of the share
    for document in documents[np.argsort(-costs[documents], kind="stable")].tolist():
        full = []
        while heap and heap[0][1] + sizes[document] > most:
            full.append(heapq.heappop(heap))
        if not heap:  # the share with the fewest tokens takes it
            heap.append(min(full, key=lambda share: share[1]))
            full.remove(heap[0])
        cost, tokens, number = heapq.heappop(heap)
        shares[number].append(document)
        for share in (*full, (cost + costs[document], tokens + sizes[document], number)):
            heapq.heappush(heap, share)
    yield from (np.array(sorted(share), np.int64) for share in shares)


def _without_padding(pieces: Pieces) -> Pieces:
    return Pieces(*(column[pieces.last > 0] for column in pieces))
