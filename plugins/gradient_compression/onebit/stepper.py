"""1-bit optimizers over the replicas: the compressed mean of momenta, bucket by bucket, and the checkpoint state.

Checkpoint state fits any number of replicas. Common state is saved as any optimizer's. State that each replica has of
its own is saved whole, under the key and the replica's number. On the same number of replicas each loads its own; on
another number all load the mean, so that what the errors will add to the mean of the momenta does not change. The
servers' errors, end to end, are one whole tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ....grid import Grid
from ....grid.layout import FlatRange
from ....zero.axis_options import ZeroOptions
from ....zero.bucket import Bucket
from ....zero.protocols import Exchange
from ....zero.shard_ranges import DtypeOf, KeyedRanges, ShardRanges
from ....zero.whole_tensors import MasterView, WholeStepper
from .allreduce import OneBitMean
from .exchange import OneBitExchange
from .optimizer import LocalValue, OneBit


class OneBitStepper(WholeStepper):
    """Stepper of a 1-bit optimizer, which also computes the means over replicas that the optimizer asks for.

    Arguments and attributes are those of ``WholeStepper``. ``connect`` must be called before the first step, and sets
    the attributes below.

    Attributes:
        rank, replicas: this replica's number, and the number of replicas.
    """

    optimizer: OneBit
    equal_weights = False

    @classmethod
    def adapt(cls, options: ZeroOptions) -> ZeroOptions:
        """Return the options with an exchange that sums gradients in some steps only.

        Raises:
            ValueError: the options shard or offload state, or compress gradients.
        """
        if options.stage or options.offload.portions:
            raise ValueError(
                f"a 1-bit optimizer keeps whole state and its own compression errors on every replica, so there is "
                f"nothing to shard or to offload. The stage is {options.stage}: set it to 0, and leave offload out"
            )
        if options.exchange is not None:
            raise ValueError(
                "a 1-bit optimizer compresses momenta itself and needs uncompressed gradients: leave out the gradient "
                "compression, or use another optimizer"
            )
        return replace(options, exchange=OneBitExchange)

    def connect(self, exchange: Exchange | None, grid: Grid) -> None:
        """Step over the replicas of a grid. Collective over the grid.

        Raises:
            ValueError: on every rank: tensor-parallel ranks hold shards of different sizes, or the optimizer needs
                whole tensors.
        """
        assert isinstance(exchange, OneBitExchange)
        self.rank, self.replicas = grid.data_context.rank, grid.data_context.size
        self._axis, self._exchange = grid.data_context, exchange
        self._view_of: dict[Tensor, MasterView] = {view.master: view for view in self.views}
        exchange.summed = self.optimizer.summed
        self.optimizer.replicas = grid.data_context.size
        if grid.tensor.size > 1:
            self._require_equal_shards(grid)
        self._means: dict[Bucket, OneBitMean] = {}
        for bucket in self._buckets if grid.data_context.size > 1 else ():
            self.optimizer.average = self._average
            if bucket.flat.numel:
                spans = [(slot.start, slot.stop) for slot in bucket.flat.slots]
                self._means[bucket] = OneBitMean(
                    grid.data_context, bucket.flat.numel, spans, grid.device, self.optimizer.means
                )

    def _require_equal_shards(self, grid: Grid) -> None:
        """Check that all ranks of the tensor axis hold shards of equal size. Collective over the grid.

        They must compute the same signs and scales for the parameters that all of them hold.

        Raises:
            ValueError: on every rank: shards differ in size, or the optimizer needs whole tensors.
        """
        mine = [(bucket.flat.slots, bucket.flat.numel) for bucket in self._buckets]
        told = grid.world.all_gather_json((tuple(grid.coordinate._replace(tensor=0)), mine))
        uneven = any(a[0] == b[0] and a[1] != b[1] for a in told for b in told)
        name = type(self.optimizer).__name__
        if self.optimizer.needs_whole_tensors:
            raise ValueError(
                f"{name} computes a coefficient of each whole tensor, but the grid's tensor axis of {grid.tensor.size} "
                "ranks shards tensors: use OneBitAdam, or a grid without a tensor axis"
            )
        if uneven:
            raise ValueError(
                f"{name} needs shards of equal size on all {grid.tensor.size} tensor ranks, but some sizes differ: pad "
                "the sharded dims to a multiple (for example the vocabulary), or use a grid without a tensor axis"
            )

    def gradient_squares(self, buckets: Sequence[Bucket], device: torch.device) -> Tensor | None:
        """Return this rank's share of the squared gradient norm, averaged over replicas; None for summed gradients."""
        return self._exchange.squares(buckets, device) if self._exchange.local else None

    def served(self, master: Tensor) -> tuple[int, int]:
        """Return start and stop of the elements of a master for which this rank is the server."""
        _, _, bucket, span = self._view_of[master]
        start, stop = bucket.flat.owned(self._axis.rank)
        low, high = max(span.start, start), min(span.stop, stop)
        return (low - span.start, high - span.start) if low < high else (0, 0)

    @torch.no_grad()
    def resume(self, at_synchronization: bool = True) -> None:
        """Restore this replica's own weights, if replicas had different weights when the state was saved.

        ``at_synchronization`` is explained in ``OneBit.resume``.
        """
        for view in self.views:
            self.optimizer.resume(view.master, at_synchronization)
        for bucket in self._buckets:
            bucket.update()

    def rejoin(self, written: Mapping[Bucket, Sequence[tuple[int, int]]] | None = None) -> None:
        """Drop the local updates of parameters that were written: replicas now have the same values."""
        for _, master, bucket, span in self.views:
            parts = [(span.start, span.stop)] if written is None else written.get(bucket, ())
            if any(start < span.stop and span.start < stop for start, stop in parts):
                self.optimizer.rejoin(master)

    def saved_value(self, bucket: Bucket, values: Tensor) -> Tensor:
        """Return the weights of a bucket at the last synchronization, (numel,), to be saved in a checkpoint.

        Args:
            bucket: the bucket.
            values: (numel,), its present weights. They are returned if replicas have equal weights.
        """
        there = [(self.optimizer.synchronized_value(view.master), view) for view in self.views if view.bucket is bucket]
        local = [(value, view) for value, view in there if value is not view.master]
        if local:
            values = values.clone()
            for value, view in local:
                values[view.span] = value.reshape(-1)
        return values

    def states(self, ranges: ShardRanges) -> KeyedRanges:
        """Yield (key, range) of the optimizer state that this rank writes to a checkpoint."""
        for view in self.views:
            named, layout = ranges.of_parameter[view.member.parameter], view.member.layout
            for key, value in self.optimizer.state.get(view.master, {}).items():
                if not isinstance(value, Tensor) or value.dim() == 0 or key == "anchor":
                    continue  # the anchor is saved as the parameter's value
                if key in self.optimizer.OWN:
                    if ranges.writes(named):
                        flat = value.reshape(-1)
                        yield f"{key}.{self.rank}", FlatRange(layout.name, layout, 0, flat.numel(), flat)
                elif key == self.optimizer.SERVER:
                    if ranges.writes(named):
                        yield key, FlatRange(layout.name, layout, *self.served(view.master), value)
                elif value.shape == view.master.shape:
                    yield from ((key, part) for part in ranges.of_replicated(named, value.reshape(-1)))

    def load_targets(self, ranges: ShardRanges, dtype_of: DtypeOf, keys: Iterable[str]) -> KeyedRanges:
        """Yield (key, range) of the state tensors that the caller fills from a checkpoint."""
        own, server, known = self.optimizer.OWN, self.optimizer.SERVER, list(keys)
        for view in self.views:
            master, layout = view.master, view.member.layout
            state = self.optimizer.state[master]
            saved = [key for key in known if dtype_of(layout.name, key) is not None]
            for key in saved:
                if key.rpartition(".")[0] in own:
                    continue
                if key == server:
                    start, stop = self.served(master)
                    state[key] = master.new_zeros(stop - start)
                    yield key, FlatRange(layout.name, layout, start, stop, state[key])
                else:
                    state[key] = torch.zeros_like(master)
                    yield key, FlatRange(layout.name, layout, 0, master.numel(), state[key].view(-1))
            for base in own:
                of_replicas = [key for key in saved if key.rpartition(".")[0] == base]
                mine = f"{base}.{self.rank}"
                wanted = [mine] if len(of_replicas) == self.replicas and mine in of_replicas else of_replicas
                if wanted:
                    total = torch.zeros_like(master)
                    for key in wanted:
                        value = torch.zeros_like(master)
                        yield key, FlatRange(layout.name, layout, 0, master.numel(), value.view(-1))
                        total += value / len(wanted) if len(wanted) > 1 else value
                    state[base] = total

    def odd_shaped_state(self, ranges: ShardRanges) -> Iterator[tuple[str, str, Tensor]]:
        """Yield state that is neither of the parameter's shape nor a server's part: the coefficients of experts."""
        known = (*self.optimizer.OWN, self.optimizer.SERVER)
        return (each for each in super().odd_shaped_state(ranges) if each[1] not in known)

    def _average(self, values: Sequence[LocalValue]) -> None:
        """Replace each value by its mean over the replicas, bucket by bucket, in the order of buckets. Collective."""
        for bucket in self._means:
            here = [each for each in values if self._view_of[each.parameter].bucket is bucket]
            if exact := [each for each in here if each.exact]:
                self._plain(exact)
            if inexact := [each for each in here if not each.exact]:
                self._compressed(bucket, inexact)

    def _plain(self, values: Sequence[LocalValue]) -> None:
        flat = torch.cat([each.value.reshape(-1) for each in values])
        self._axis.all_reduce(flat)
        parts = flat.div_(self._axis.size).split([each.value.numel() for each in values])
        for each, part in zip(values, parts, strict=True):
            each.value.copy_(part.view(each.value.shape))

    def _compressed(self, bucket: Bucket, values: Sequence[LocalValue]) -> None:
        """Replace values of one bucket by their compressed mean over the replicas.

        The mean of elements that take no part is 0, and their compression errors do not change.
        """
        mean = self._means[bucket]
        first = mean.part[0]
        own = bucket.owned_gradient.new_zeros(bucket.flat.numel)
        alive, server = torch.zeros_like(own), own.new_zeros(mean.part[1] - first)
        parts = []
        for each in values:
            span, kept = self._view_of[each.parameter].span, self.optimizer.state[each.parameter]
            shape = each.value.shape
            low, high = self.served(each.parameter)
            if "worker_error" not in kept:
                kept["worker_error"] = torch.zeros_like(each.value)
                kept["server_error"] = each.value.new_zeros(high - low)
            torch.add(each.value, kept["worker_error"], out=own[span].view(shape))
            alive[span] = each.alive.reshape(-1)
            left = server[span.start + low - first : span.start + high - first] if low < high else server[:0]
            left.copy_(kept["server_error"])
            parts.append((each, span, kept, left))
        found = mean(own, server, alive)
        for each, span, kept, left in parts:
            each.value.copy_(found[span].view(each.value.shape))
            kept["worker_error"].copy_(own[span].view(each.value.shape))
            kept["server_error"].copy_(left)
