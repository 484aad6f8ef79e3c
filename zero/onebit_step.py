"""1-bit optimizers over the replicas: whose gradients are summed when, and how momenta meet, bucket by bucket."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ..grid import Grid
from .buckets import Bucket
from .flat import RUNS, SHARDED
from .gradients import add_up
from .mode import Mode
from .norm import square
from .onebit import OneBitMean
from .onebit_adam import OneBit, Outgoing
from .onebit_lamb import OneBitLamb
from .optimizer import MakeOptimizer
from .whole import WholeStepper, WholeTensors


class OneBitTensors(WholeTensors):
    """Says of what makes an optimizer that it makes one of those that compress their momentum."""


def stepped_by(kind: type[torch.optim.Optimizer], make: MakeOptimizer) -> MakeOptimizer:
    """A function that makes an optimizer of this class, marked if it is one of those."""
    return OneBitTensors(make) if issubclass(kind, OneBit) else make


def compressing(mode: Mode, grid: Grid) -> Mode:
    """A mode in which such an optimizer steps.

    Raises:
        ValueError: it is one in which none can.
    """
    if mode.stage or mode.offload.portions:
        raise ValueError(
            f"an optimizer that compresses its momentum has whole state on every replica, and errors that are each "
            f"one's own, so there is nothing to shard or to offload: set stage 0, not {mode.stage}, without offload"
        )
    if mode.exchange is not None:
        raise ValueError(
            "an optimizer that compresses its momentum needs gradients that nothing else compresses: leave out one of "
            "them"
        )
    return replace(mode, exchange=OneBitExchange)


class OneBitExchange:
    """Sums gradients plainly in the steps that want the sum, and leaves each replica its own in the others.

    Its own are then times the number of replicas: a mean over this replica's share of the batch.

    Attributes:
        summed: whether the coming step wants the sum.
        local: gradients are this replica's own.
    """

    def __init__(self, grid: Grid, buckets: Sequence[Bucket]) -> None:
        self._axis, self._first = grid.data, grid.tensor.is_first
        self.summed: Callable[[], bool] = lambda: True
        self.local = False

    def gradients(self, buckets: Sequence[Bucket]) -> None:
        """See ``Exchange``. (Where they stay local, they are not the same on every replica.)"""
        self.local = self._axis.size > 1 and not self.summed()
        if self._axis.size > 1 and not self.local:
            add_up(self._axis, buckets)
        for bucket in buckets if self.local else ():
            assert bucket.gradients is not None
            bucket.gradients.mul_(self._axis.size)

    def squares(self, buckets: Sequence[Bucket], device: torch.device) -> Tensor:
        """This rank's share of the mean, over replicas, of the square of the norm of each one's gradient."""
        total = torch.zeros((), dtype=torch.float64, device=device)
        for bucket in buckets:
            for run in RUNS if bucket.trained and bucket.counted else ():
                start, stop = bucket.flat.runs[run]
                if start < stop and (run == SHARDED or self._first) and bucket.gradients is not None:
                    total += square(bucket.gradients[start:stop])
        return total.div_(self._axis.size)

    def state(self) -> dict[str, list[Tensor]]:
        """Nothing: what is kept is in the optimizer's state."""
        return {}


class OneBitStepper(WholeStepper):
    """Steps each tensor with one of the optimizers that compress their momentum, and has momenta meet.

    Arguments and attributes are those of ``WholeStepper``; ``connect`` follows, and makes these.

    Attributes:
        rank, replicas: this replica's number, and theirs.
        layouts: of the parameters that are stepped, in their order.
    """

    optimizer: OneBit

    def connect(self, exchange: OneBitExchange, grid: Grid) -> None:
        """Step over the replicas of a grid. Collective over the grid.

        Raises:
            ValueError: on every rank: tensor ranks hold unlike parts, or of whole tensors only parts.
        """
        self.rank, self.replicas = grid.data.rank, grid.data.size
        self.layouts = [b.members[at].layout for b in self._buckets for at in range(len(b.members))]
        self._axis = grid.data
        self._where: dict[Tensor, tuple[Bucket, slice]] = {m: (bucket, span) for _, m, bucket, span in self._views}
        exchange.summed = self.optimizer.summed
        self.optimizer.replicas = grid.data.size
        if grid.tensor.size > 1:
            self._require_alike(grid)
        self._means: dict[Bucket, OneBitMean] = {}
        for bucket in self._buckets if grid.data.size > 1 else ():
            self.optimizer.meet = self._meet
            if bucket.flat.numel:
                spans = [(slot.start, slot.stop) for slot in bucket.flat.slots]
                self._means[bucket] = OneBitMean(grid.data, bucket.flat.numel, spans, grid.device)

    def _require_alike(self, grid: Grid) -> None:
        """What tensor ranks hold alike must come to the same signs and scales on each of them."""
        mine = [(bucket.flat.slots, bucket.flat.numel) for bucket in self._buckets]
        told = grid.world.all_gather_object((tuple(grid.coordinate._replace(tensor=0)), mine))
        uneven = any(a[0] == b[0] and a[1] != b[1] for a in told for b in told)
        name = type(self.optimizer).__name__
        if isinstance(self.optimizer, OneBitLamb):
            raise ValueError(
                f"{name}'s coefficients are of whole tensors, which the grid's tensor axis of {grid.tensor.size} "
                "shards: use OneBitAdam, or a grid without a tensor axis"
            )
        if uneven:
            raise ValueError(
                f"{name} needs shards of one size on all {grid.tensor.size} tensor ranks: pad what does not divide "
                "(a vocabulary, say), or use a grid without a tensor axis"
            )

    def served(self, master: Tensor) -> tuple[int, int]:
        """The elements, start to stop of a master's own, of which this rank is the server."""
        bucket, span = self._where[master]
        start, stop = bucket.flat.owned(self._axis.rank)
        low, high = max(span.start, start), min(span.stop, stop)
        return (low - span.start, high - span.start) if low < high else (0, 0)

    @torch.no_grad()
    def resume(self, met: bool = True) -> None:
        """State was loaded. Where replicas had moved apart, this one goes to where it was.

        Args:
            met: weights are those of the last meeting; False: the state knows that too.
        """
        for _, master, *_ in self._views:
            self.optimizer.resume(master, met)
        for bucket in self._buckets:
            bucket.update()

    def rejoin(self, written: Mapping[Bucket, Sequence[tuple[int, int]]] | None = None) -> None:
        """Weights were written, alike on every replica: whatever moved these apart is over.

        Args:
            written: of each bucket the ranges, start to stop; None: everything.
        """
        for _, master, bucket, span in self._views:
            parts = [(span.start, span.stop)] if written is None else written.get(bucket, ())
            if any(start < span.stop and span.start < stop for start, stop in parts):
                self.optimizer.rejoin(master)

    def met(self, bucket: Bucket, values: Tensor) -> Tensor:
        """A bucket's values when all replicas had the same the last time: ``values`` themselves, if they do now."""
        there = [(master, span) for _, master, home, span in self._views if home is bucket]
        apart = [
            (self.optimizer.met(master), span) for master, span in there if self.optimizer.met(master) is not master
        ]
        if apart:
            values = values.clone()
            for value, span in apart:
                values[span] = value.reshape(-1)
        return values

    def _meet(self, outgoing: Sequence[Outgoing]) -> None:
        """Give each value its mean over the replicas, bucket by bucket, in the order of buckets. Collective."""
        where = self._where
        for bucket in self._means:
            here = [each for each in outgoing if where[each.parameter][0] is bucket]
            exact = [each for each in here if each.exact]
            if exact:
                self._plain(exact)
            if len(exact) < len(here):
                self._compressed(bucket, [(each, where[each.parameter][1]) for each in here if not each.exact])

    def _plain(self, outgoing: Sequence[Outgoing]) -> None:
        flat = torch.cat([each.value.reshape(-1) for each in outgoing])
        self._axis.all_reduce(flat)
        parts = flat.div_(self._axis.size).split([each.value.numel() for each in outgoing])
        for each, part in zip(outgoing, parts, strict=True):
            each.value.copy_(part.view(each.value.shape))

    def _compressed(self, bucket: Bucket, outgoing: Sequence[tuple[Outgoing, slice]]) -> None:
        """What takes no part is 0, and what it had left out stays as it is."""
        mean = self._means[bucket]
        first = mean.part[0]
        own = bucket.owned_gradient.new_zeros(bucket.flat.numel)
        alive, server = torch.zeros_like(own), own.new_zeros(mean.part[1] - first)
        parts = []
        for each, span in outgoing:
            state, shape = self.optimizer.state[each.parameter], each.value.shape
            low, high = self.served(each.parameter)
            if "worker_error" not in state:
                state["worker_error"] = torch.zeros_like(each.value)
                state["server_error"] = each.value.new_zeros(high - low)
            torch.add(each.value, state["worker_error"], out=own[span].view(shape))
            alive[span] = each.alive.reshape(-1)
            left = server[span.start + low - first : span.start + high - first] if low < high else server[:0]
            left.copy_(state["server_error"])
            parts.append((each, span, state, left))
        found = mean(own, server, alive)
        for each, span, state, left in parts:
            each.value.copy_(found[span].view(each.value.shape))
            state["worker_error"].copy_(own[span].view(each.value.shape))
            state["server_error"].copy_(left)
