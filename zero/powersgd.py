"""PowerSGD: a gradient's matrix is sent as two thin ones, and what they miss is added to the next gradient.

Vogels et al. 2019 (arXiv:1905.13727), algorithms 1 and 2. For each matrix (rows, columns) worth it, on replica k:

    M_k <- g_k + e_k
    P   <- sum over k of M_k Q,      P <- orthogonalised
    Q_k <- M_k^T P,                  e_k <- M_k - P Q_k^T
    Q   <- sum over k of Q_k;        the gradient is P Q^T, and the next step starts from Q

``torch.distributed.algorithms.ddp_comm_hooks`` has a hook of this name. It takes DDP's buckets and calls torch's
collectives itself, so that its bytes are not counted here; it draws one Q a bucket, so that another grid would start
from another; and it takes errors against the mean, so that what sets the replicas' errors apart only ever adds up.
(Their sum, and with it the steps, are the same: tests hold one against the other.)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..grid import Grid
from ..grid.random import derive
from .compressor import Compressor, Kept, Kind, Place, Rest, flats, places, rooms

if TYPE_CHECKING:
    from .buckets import Bucket


@dataclass(frozen=True)
class PowerSGD:
    """Sends each matrix as its best guess of rank ``rank``.

    Attributes:
        rank: r, columns of P and Q.
        start_step: steps before the first one that compresses; until then everything is summed.
        min_compression: a matrix is compressed where that makes it so many times smaller:
            rows * columns >= min_compression * rank * (rows + columns).
        warm_start: begin with the Q of the step before, as power iteration does; else draw a new one each step.
        seed: of the first Q, which depends on the parameter's name too.

    Raises:
        ValueError: one of them cannot be.
    """

    rank: int = 4
    start_step: int = 0
    min_compression: float = 2.0
    warm_start: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ValueError(f"rank is the number of columns of P and Q, at least 1, not {self.rank}")
        if self.start_step < 0:
            raise ValueError(f"start_step is a number of steps, not {self.start_step}")
        if not self.min_compression >= 1:
            raise ValueError(f"min_compression is at least 1, not {self.min_compression}: below, it sends more")

    def __call__(self, grid: Grid, buckets: Sequence[Bucket]) -> PowerSGDExchange:
        """The ``Exchange`` of these buckets."""
        return PowerSGDExchange(self, grid, buckets)


class _Batch:
    """Matrices of one shape in one bucket, which are multiplied together.

    Args:
        batch: their places.
        p, q: rooms for P (matrices, rows, r) and Q (matrices, columns, r) in what is sent.
    """

    def __init__(self, batch: Sequence[Place], p: Tensor, q: Tensor) -> None:
        self.places, self.p, self.q = batch, p, q
        self.shape = batch[0].matrix

    def matrices(self, flats: Sequence[Tensor]) -> Tensor:
        """(matrices, rows, columns): a view of one, a copy of several."""
        found = [place.of(flats).view(self.shape) for place in self.places]
        return found[0].unsqueeze(0) if len(found) == 1 else torch.stack(found)

    def put(self, values: Tensor, flats: Sequence[Tensor]) -> None:
        """Write them back."""
        for place, value in zip(self.places, values, strict=True):
            place.of(flats).view(self.shape).copy_(value)


class PowerSGDExchange(Compressor):
    """What ``PowerSGD`` makes. A tensor rank compresses its shards: with a tensor axis, matrices are these."""

    def __init__(self, options: PowerSGD, grid: Grid, buckets: Sequence[Bucket]) -> None:
        super().__init__(grid, buckets)
        self._options, self._tensor_rank = options, grid.tensor.rank
        chosen = [place for place in places(buckets) if self._worth(place)]
        self._rest, self._all = Rest(grid.data, buckets, chosen), Rest(grid.data, buckets, ())
        self._residual = rooms(buckets, chosen)
        self._p: dict[Kind, Tensor] = {}
        self._q: dict[Kind, Tensor] = {}
        self._batches = self._laid_out(buckets, chosen)
        self._draw()
        self._sent = 0.0

    def gradients(self, buckets: Sequence[Bucket]) -> None:
        """See ``Exchange``."""
        own = flats(buckets)
        self.steps += 1
        if self.steps <= self._options.start_step:
            self._all.start(own)
            self._all.finish(own)
            self._sent = self._all.formula()
            return
        self._rest.start(own)
        if not self._options.warm_start:
            self._draw()
        errors = []
        for batch in self._batches:
            for place in batch.places:
                place.of(self._residual).add_(place.of(own))
            matrices = batch.matrices(self._residual)
            # The same span of columns as Q itself has, without the size of the gradients it was made of.
            torch.bmm(matrices, torch.linalg.qr(batch.q).Q, out=batch.p)
            errors.append(matrices)
        for sent in self._p.values():
            self.axis.all_reduce(sent)
        for batch, matrices in zip(self._batches, errors, strict=True):
            batch.p.copy_(torch.linalg.qr(batch.p).Q)
            torch.bmm(matrices.mT, batch.p, out=batch.q)
            matrices.baddbmm_(batch.p, batch.q.mT, alpha=-1)
            if len(batch.places) > 1:
                batch.put(matrices, self._residual)
        for sent in self._q.values():
            self.axis.all_reduce(sent)
        for batch in self._batches:
            batch.put(batch.p @ batch.q.mT, own)
        self._rest.finish(own)
        sizes = sum(sent.numel() * sent.element_size() for sent in (*self._p.values(), *self._q.values()))
        self._sent = self._rest.formula() + 2 * sizes * (self.axis.size - 1) / self.axis.size

    def state(self) -> Mapping[str, Sequence[Tensor]]:
        """``residual``: e of the paper."""
        return {"residual": self._residual}

    def kept(self) -> Iterator[Kept]:
        """``q``, (columns, r), of each matrix."""
        for batch in self._batches if self._options.warm_start else ():
            for place, q in zip(batch.places, batch.q, strict=True):
                yield Kept("q", place.member, q)

    def formula(self) -> float:
        """Two sums, of P and of Q: 2 (N-1)/N r (rows + columns) values a matrix; and the sum of the rest."""
        return self._sent

    def _worth(self, place: Place) -> bool:
        if place.member.parameter.dim() < 2 or place.start == place.stop:
            return False
        rows, columns = place.matrix
        rank = min(self._options.rank, rows, columns)
        return rows * columns >= self._options.min_compression * rank * (rows + columns)

    def _laid_out(self, buckets: Sequence[Bucket], chosen: Sequence[Place]) -> list[_Batch]:
        """The matrices by bucket and shape. (A tie's bucket is alike on all its stages, and so are its products.)"""
        alike: dict[tuple[int, tuple[int, int]], list[Place]] = {}
        for place in chosen:
            alike.setdefault((place.bucket, place.matrix), []).append(place)
        wanted: dict[Kind, list[list[Place]]] = {}
        for (bucket, _), batch in alike.items():
            wanted.setdefault(Kind.of(buckets, bucket), []).append(batch)
        made = []
        for kind, batches in wanted.items():
            shapes = [(len(batch), *batch[0].matrix) for batch in batches]
            ranks = [min(self._options.rank, rows, columns) for _, rows, columns in shapes]
            sizes_p = [n * rows * r for (n, rows, _), r in zip(shapes, ranks, strict=True)]
            sizes_q = [n * columns * r for (n, _, columns), r in zip(shapes, ranks, strict=True)]
            like = self._residual[batches[0][0].bucket]
            self._p[kind], self._q[kind] = like.new_zeros(sum(sizes_p)), like.new_zeros(sum(sizes_q))
            flats_p, flats_q = self._p[kind].split(sizes_p), self._q[kind].split(sizes_q)
            for batch, (n, rows, columns), r, p, q in zip(batches, shapes, ranks, flats_p, flats_q, strict=True):
                made.append(_Batch(batch, p.view(n, rows, r), q.view(n, columns, r)))
        return made

    def _draw(self) -> None:
        """A Q from a normal distribution, by name: alike on every replica, whatever the buckets and stages."""
        generator, step = torch.Generator(), 0 if self._options.warm_start else self.steps
        for batch in self._batches:
            for place, q in zip(batch.places, batch.q, strict=True):
                shard = self._tensor_rank if place.member.layout.sharded else 0
                seed = derive(self._options.seed, "PowerSGD", place.member.layout.name, shard, step)
                drawn = torch.randn(q.shape, generator=generator.manual_seed(seed), dtype=torch.float64)
                q.copy_(drawn)
