"""PowerSGD: low-rank approximation of gradients with error feedback. Each matrix is sent as two thin ones, P and Q.

Vogels et al. 2019 (arXiv:1905.13727), algorithms 1 and 2. For each matrix (rows, columns) that is compressed, on
replica k:

    M_k <- g_k + e_k
    P   <- sum over k of M_k Q,      P <- orthogonalised
    Q_k <- M_k^T P,                  e_k <- M_k - P Q_k^T
    Q   <- sum over k of Q_k;        the gradient is P Q^T, and the next step starts from Q

``torch.distributed.algorithms.ddp_comm_hooks`` has a hook of this name, which does not fit here. It takes DDP's buckets
and calls torch's collectives itself, so that its bytes are not counted. It draws one Q for each bucket, so that another
grid starts from other matrices. And it computes errors relative to the mean, so that the differences between the
replicas' errors grow. (The sum of the errors, and so the steps, are equal: a test compares both.)
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from ...base.errors import require_at_least
from ...base.seeds import derive
from ...grid.grid import Grid
from ...zero.protocols import GradientBucket, ReplicatedTensor
from .compressor import Compressor
from .uncompressed_sum import MessageKind, ParameterSlice, parameter_slices


@dataclass(frozen=True)
class PowerSGD:
    """Options of PowerSGD: each matrix is sent as an approximation of rank ``rank``.

    Attributes:
        rank: r, number of columns of P and Q.
        start_step: number of first steps in which everything is summed.
        min_compression: a matrix is compressed if that makes it at least so many times smaller:
            rows * columns >= min_compression * rank * (rows + columns). Below 1 it would send more than the plain sum.
        warm_start: start from the Q of the previous step, as power iteration does; else draw a new one in each step.
        seed: seed from which, together with the parameter's name, the first Q is drawn.

    Raises:
        ValueError: a value is out of range.
    """

    rank: int = 4
    start_step: int = 0
    min_compression: float = 2.0
    warm_start: bool = True
    seed: int = 0

    own_dtype: ClassVar = True

    def __post_init__(self) -> None:
        require_at_least(1, rank=self.rank, min_compression=self.min_compression)
        require_at_least(0, start_step=self.start_step)

    def __call__(self, grid: Grid, buckets: Sequence[GradientBucket]) -> PowerSGDExchange:
        """Make the ``Exchange`` of these buckets."""
        return PowerSGDExchange(self, grid, buckets)


class MatrixBatch(NamedTuple):
    """Matrices of one shape in one bucket, which are multiplied together; N of them."""

    slices: list[ParameterSlice]
    p: Tensor  # (N, rows, r), a view of the message with every P
    q: Tensor  # (N, columns, r), a view of the message with every Q

    def matrices(self, flats: Sequence[Tensor]) -> Tensor:
        """Return (N, rows, columns): a view of a single matrix, a copy of several."""
        found = [place.of(flats).view(place.matrix) for place in self.slices]
        return found[0].unsqueeze(0) if len(found) == 1 else torch.stack(found)

    def copy_back(self, values: Tensor, flats: Sequence[Tensor]) -> None:
        """Write matrices, (N, rows, columns), to the flat tensors."""
        for place, value in zip(self.slices, values, strict=True):
            place.of(flats).view(place.matrix).copy_(value)


class PowerSGDExchange(Compressor):
    """Exchange of ``PowerSGD``. With a tensor axis, the matrices are the shards of each tensor-parallel rank.

    Bytes sent: the sums of every P and Q, 2 (N-1)/N r (rows + columns) values a matrix, and the plain sum of the rest.
    """

    def __init__(self, options: PowerSGD, grid: Grid, buckets: Sequence[GradientBucket]) -> None:
        self._options, self._tensor_rank = options, grid.tensor.rank
        chosen = [place for place in parameter_slices(buckets) if self._is_worth(place)]
        super().__init__(grid, buckets, chosen, options.start_step)
        self._messages_p: dict[MessageKind, Tensor] = {}
        self._messages_q: dict[MessageKind, Tensor] = {}
        self._batches = self._make_batches(buckets, chosen)
        self._draw()

    def _compress(self, own: Sequence[Tensor]) -> None:
        if not self._options.warm_start:
            self._draw()
        errors = []
        for batch in self._batches:
            for place in batch.slices:
                place.of(self._residual).add_(place.of(own))
            matrices = batch.matrices(self._residual)
            # Orthogonal columns that span those of Q, whatever the size of the gradients that Q was computed from.
            torch.bmm(matrices, torch.linalg.qr(batch.q).Q, out=batch.p)
            errors.append(matrices)
        for message in self._messages_p.values():
            self.axis.all_reduce(message)
        for batch, matrices in zip(self._batches, errors, strict=True):
            batch.p.copy_(torch.linalg.qr(batch.p).Q)
            torch.bmm(matrices.mT, batch.p, out=batch.q)
            matrices.baddbmm_(batch.p, batch.q.mT, alpha=-1)
            if len(batch.slices) > 1:
                batch.copy_back(matrices, self._residual)
        for message in self._messages_q.values():
            self.axis.all_reduce(message)
        for batch in self._batches:
            batch.copy_back(batch.p @ batch.q.mT, own)
        sent = sum(m.numel() * m.element_size() for m in (*self._messages_p.values(), *self._messages_q.values()))
        self._sent += 2 * sent * (self.axis.size - 1) / self.axis.size

    def replicated(self) -> Iterator[ReplicatedTensor]:
        """Yield the factor Q, (columns, r), of each compressed matrix, under the key ``q``."""
        for batch in self._batches if self._options.warm_start else ():
            for place, q in zip(batch.slices, batch.q, strict=True):
                yield ReplicatedTensor("q", place.member, q)

    def _is_worth(self, place: ParameterSlice) -> bool:
        if place.member.parameter.dim() < 2 or place.start == place.stop:
            return False
        rows, columns = place.matrix
        rank = min(self._options.rank, rows, columns)
        return rows * columns >= self._options.min_compression * rank * (rows + columns)

    def _make_batches(self, buckets: Sequence[GradientBucket], chosen: Sequence[ParameterSlice]) -> list[MatrixBatch]:
        """Group matrices by bucket and shape. (A tie's bucket, and so its products, are equal on all its stages.)"""
        by_shape: dict[tuple[int, tuple[int, int]], list[ParameterSlice]] = {}
        for place in chosen:
            by_shape.setdefault((place.bucket, place.matrix), []).append(place)
        by_kind: dict[MessageKind, list[list[ParameterSlice]]] = {}
        for (bucket, _), slices in by_shape.items():
            by_kind.setdefault(MessageKind.of(buckets, bucket), []).append(slices)
        made: list[MatrixBatch] = []
        for kind, batches in by_kind.items():
            shapes_p, shapes_q = [], []
            for slices in batches:
                rows, columns = slices[0].matrix
                rank = min(self._options.rank, rows, columns)
                shapes_p.append((len(slices), rows, rank))
                shapes_q.append((len(slices), columns, rank))
            like = self._residual[batches[0][0].bucket]
            self._messages_p[kind], p = _zeros(like, shapes_p)
            self._messages_q[kind], q = _zeros(like, shapes_q)
            made += map(MatrixBatch, batches, p, q)
        return made

    def _draw(self) -> None:
        """Draw every Q from a normal distribution, by the parameter's name: alike on every replica and every grid."""
        generator, step = torch.Generator(), 0 if self._options.warm_start else self.steps
        for batch in self._batches:
            for place, q in zip(batch.slices, batch.q, strict=True):
                shard = self._tensor_rank if place.member.layout.sharded else 0
                seed = derive(self._options.seed, "PowerSGD", place.member.layout.name, shard, step)
                drawn = torch.randn(q.shape, generator=generator.manual_seed(seed), dtype=torch.float64)
                q.copy_(drawn)


def _zeros(like: Tensor, shapes: Sequence[tuple[int, int, int]]) -> tuple[Tensor, list[Tensor]]:
    """Return a flat tensor of zeros, and views of it with these shapes."""
    sizes = [math.prod(shape) for shape in shapes]
    flat = like.new_zeros(sum(sizes))
    return flat, [part.view(shape) for part, shape in zip(flat.split(sizes), shapes, strict=True)]
