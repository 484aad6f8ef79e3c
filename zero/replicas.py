"""The data axis of one rank: buckets, their reduction, their gathering, their optimizer, behind one object.

It is what a program's ops on the data axis reach: GATHER, RELEASE, REDUCE, TIED. The stages of ZeRO differ in
how buckets are laid out and in where a program puts these ops; nothing here asks for the stage again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..grid import Axis, Grid
from .buckets import Bucket
from .compressor import moved
from .gradients import GradientReducer, add_up
from .lay_out import make_buckets
from .lend import settle
from .mode import Managed, Mode
from .norm import square, squares
from .offload import Memories, agreed
from .onebit_step import OneBitExchange, OneBitStepper, OneBitTensors, compressing
from .optimizer import MakeOptimizer, RangeStepper
from .parameters import ParameterGatherer
from .secondary import PlusGatherer, equip
from .whole import WholeStepper, WholeTensors


class Replicas:
    """What this rank holds of the replicas of its stages.

    Args:
        members: this rank's parameters, in the order of the model.
        grid: whose data axis the replicas lie on.
        tie_axes: for each tie, the ranks that hold it; None for ties that need no message here.
        order: for each stage of this rank, its layers in the order they run.
        mode: what ZeRO does.
        capacity: elements of a bucket.
        keep: in stage 3, hold weights whole from a stage's first forward of a step to the step's end.
        make: makes the optimizer; None: nothing is stepped.
        groups: the options of its parameter groups.

    Attributes:
        buckets: of this rank.
        gatherer: what makes weights whole in stage 3; None where they always are.
        axis, device: over which the replicas lie, and where this one is.
        stepped: the gradients that are here are those of the last step, scaled.
        exchanges: what brings gradients together in place of their sum; None: they are summed.
        joined: over which a step's gradients are summed too, of grids that each hold all that this one does; or None.
    """

    def __init__(
        self,
        members: Sequence[Managed],
        grid: Grid,
        tie_axes: Sequence[Axis | None],
        order: Mapping[int, Sequence[int]],
        mode: Mode,
        capacity: int,
        keep: bool = False,
        make: MakeOptimizer | None = None,
        groups: Sequence[dict[str, Any]] = (),
    ) -> None:
        if isinstance(make, OneBitTensors):
            mode = compressing(mode, grid)
        self.mode, self.axis, self.device = mode, grid.data, grid.device
        self.stepped = self._exchanged = False
        self.joined: Axis | None = None
        self._tensor_axis = grid.tensor
        self._stepper: RangeStepper | None = None
        with agreed(grid, mode.offload):
            self._memory = Memories(mode.offload, grid.device)
            self.buckets = make_buckets(members, grid, mode, capacity, self._memory)
            if make is not None:
                together = mode.together if mode.overlap else 0
                stepper = WholeStepper if isinstance(make, WholeTensors) else RangeStepper
                stepper = OneBitStepper if isinstance(make, OneBitTensors) else stepper
                self._stepper = stepper(make, self.buckets, groups, together)
        self._bucket_of = {member.parameter: bucket for bucket in self.buckets for member in bucket.members}
        self._reducer = GradientReducer(self.buckets, grid, tie_axes, mode)
        trained = [bucket for bucket in self.buckets if bucket.trained]
        self.exchanges = None if mode.exchange is None else mode.exchange(grid, trained)
        if isinstance(self._stepper, OneBitStepper) and isinstance(self.exchanges, OneBitExchange):
            self._stepper.connect(self.exchanges, grid)
        over = self._reducer.over  # tells it which gradients will not come
        parted = [bucket for bucket in self.buckets if bucket.gathered]
        gatherer: type[ParameterGatherer] = ParameterGatherer if mode.plus is None else PlusGatherer
        self.gatherer = gatherer(parted, grid, order, mode, keep, over) if parted else None
        if mode.plus is not None:
            equip(mode, grid, self.buckets, self.gatherer, self.optimizer)
        settle((member.parameter for member in members), self)

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """Torch's, over the ranges that this rank owns."""
        return None if self._stepper is None else self._stepper.optimizer

    @property
    def around(self) -> Callable[[int, int, Callable[[Any], Any], Any], Any] | None:
        """What to run layers in; None where weights are always whole."""
        return None if self.gatherer is None else self.gatherer.run

    @property
    def ahead(self) -> Callable[[Sequence[int]], None] | None:
        """What to tell of layers that a recomputation will run; None where weights are always whole."""
        return None if self.gatherer is None else self.gatherer.ahead

    def fill(self, parameter: nn.Parameter, value: Tensor) -> bool:
        """Give a parameter its initial values, of which this rank keeps what it owns; False if it is not held here."""
        bucket = self._bucket_of.get(parameter)
        if bucket is not None:
            bucket.fill(parameter, value)
        return bucket is not None

    def begin(self) -> None:
        """A new step: gradients are zero."""
        self.stepped = self._exchanged = False
        self._reducer.begin()

    def backward(self, stage: int, last: bool) -> AbstractContextManager[None]:
        """Within it a backward of the stage runs: reduce what becomes complete."""
        return self._reducer.backward(stage, last)

    def target(self, parameter: Tensor) -> Tensor | None:
        """Where to add a deferred gradient of this parameter; None if it is not trained."""
        return self._reducer.target(parameter)

    def accumulated(self, parameter: Tensor) -> None:
        """A parameter's gradient is whole, of one backward."""
        self._reducer.accumulated(parameter)

    def over(self, layer: int, runs: int) -> None:
        """In stage 3, the backward of one of a layer's runs is over; ``runs`` is how many it has in this pass."""
        self._reducer.over(layer, runs)

    def reduce(self, stage: int, microbatch: int) -> None:
        """REDUCE: the stage's gradients are final; reduce what was not yet."""
        self._reducer.reduce(stage, microbatch)

    def tied(self, tie: int) -> None:
        """TIED: sum a tie's gradients over its stages."""
        self._reducer.tied(tie)

    def gather(self, stage: int) -> None:
        """GATHER: a run of the stage begins. Each of its layers is gathered where it runs, the next one ahead."""

    def release(self, stage: int) -> None:
        """RELEASE: the run ends; keep the shards only."""
        if self.gatherer is not None:
            self.gatherer.release(stage)

    def finish(self) -> None:
        """The program ends: every gradient is reduced, and no weight is whole that need not be."""
        self._reducer.finish()
        if self.joined is not None:
            add_up(self.joined, [bucket for bucket in self.buckets if bucket.trained])
        if self.gatherer is not None:
            self.gatherer.finish()

    def abandon(self) -> None:
        """After a failure: let go of everything under way."""
        self._reducer.abandon()
        if self.gatherer is not None:
            self.gatherer.abandon()

    def changed(self, written: Mapping[Bucket, Sequence[tuple[int, int]]] | None = None) -> None:
        """Somebody wrote shards, alike on every replica: what is kept of weights besides them is old. Collective.

        Args:
            written: of each bucket the ranges, start to stop; None: everything.
        """
        if isinstance(self._stepper, OneBitStepper):
            self._stepper.rejoin(written)
        if self.gatherer is not None:
            self.gatherer.changed()

    def resume(self) -> None:
        """State was loaded that says where this replica was, if it was elsewhere than the others."""
        if isinstance(self._stepper, OneBitStepper):
            self._stepper.resume(met=False)

    def displaced(self) -> str | None:
        """The name of a parameter that went elsewhere, so that a step would not move it."""
        return next((name for bucket in self.buckets if (name := bucket.displaced()) is not None), None)

    def place(self, tensor: Tensor) -> str:
        """Where a shard, master, gradient or state is kept: ``cpu``, ``nvme``, or ``none``: with the model."""
        return self._memory.place(tensor)

    def offloaded(self) -> dict[str, dict[str, int]]:
        """Bytes that this rank keeps elsewhere: place (``cpu``, ``nvme``) -> what they are for -> bytes."""
        found: dict[str, dict[str, int]] = {}
        for bucket in self.buckets:
            rooms = [] if self._stepper is None else self._stepper.rooms(bucket)
            held = [("parameters", bucket.shard), ("gradients", bucket.owned_gradient)]
            if bucket.master is not None and bucket.master.data_ptr() != bucket.shard.data_ptr():
                held.append(("masters", bucket.master))
            for what, tensor in (*held, *(("optimizer", room) for room in rooms)):
                if (place := self.place(tensor)) != "none":
                    sizes = found.setdefault(place, {})
                    sizes[what] = sizes.get(what, 0) + tensor.numel() * tensor.element_size()
        return found

    def squares(self) -> Tensor:
        """This rank's share of the square of the global gradient norm.

        Before an ``exchange`` it is that of this rank's own gradients: of use to see whether they are all finite.
        """
        if self.exchanges is None or self._exchanged:
            if isinstance(self.exchanges, OneBitExchange) and self.exchanges.local:
                return self.exchanges.squares(self.buckets, self.device)
            found = squares(self.buckets, self.device)
            return found if self.joined is None else found.div_(self.joined.size)  # each of these counts all of it
        parts = [square(bucket.gradients) for bucket in self.buckets if bucket.gradients is not None]
        return torch.stack(parts).sum() if parts else torch.zeros((), dtype=torch.float64, device=self.device)

    @torch.no_grad()
    def exchange(self, scale: float) -> None:
        """Bring the gradients of the replicas together, each times ``scale``, where they were not summed. Collective.

        Args:
            scale: what makes their sum over the replicas the mean gradient.
        """
        assert self.exchanges is not None
        trained = [bucket for bucket in self.buckets if bucket.trained]
        own = [bucket.gradients for bucket in trained if bucket.gradients is not None]
        if own and scale != 1.0:
            torch._foreach_mul_(own, scale)
        self.exchanges.gradients(trained)
        self._exchanged = True

    @torch.no_grad()
    def spoil(self) -> None:
        """In place of an ``exchange`` of what is not finite somewhere: the mean is not, and nothing is kept of it."""
        for bucket in self.buckets:
            if bucket.trained and bucket.gradients is not None:
                bucket.gradients.fill_(torch.nan)
        self._exchanged = True

    def unused(self) -> int:
        """How many parameters had no gradient on this rank in this step."""
        return len(self._reducer.unused())

    def without_gradient(self) -> set[Tensor]:
        """The parameters that had none on any replica. Collective over the data (or ``joined``) and tensor axes."""
        members = [m.parameter for bucket in self.buckets if bucket.trained for m in bucket.members]
        unused = self._reducer.unused()
        if self.exchanges is not None:  # a residual of steps before may be all that moves a parameter
            unused = unused - moved([bucket for bucket in self.buckets if bucket.trained])
        used = torch.tensor([p not in unused for p in members], dtype=torch.uint8, device=self.device)
        for axis in (self.joined or self.axis, self._tensor_axis):
            axis.all_reduce(used, op="max")
        return {parameter for parameter, flag in zip(members, used.tolist(), strict=True) if not flag}

    def step(self, scale: float, without: Collection[Tensor] = ()) -> None:
        """Scale the gradients, step the optimizer, bring the new weights to every replica: ``RangeStepper.step``."""
        assert self._stepper is not None
        self._stepper.step(scale, without)
        self.stepped = True

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Within it all weights are whole. Collective over the data axis."""
        borrowed = [] if self.gatherer is None else self.gatherer.borrow(self.buckets)
        try:
            yield
        finally:
            if self.gatherer is not None:
                self.gatherer.give_back(borrowed)

    def gradients(self) -> Iterator[tuple[Managed, Tensor]]:
        """The whole gradient of each trained parameter, after a step. Collective over the data axis."""
        for bucket in self.buckets:
            if bucket.trained:
                owned = bucket.owned_gradient.to(self.device)
                if not owned.numel():  # a step has begun: it has none yet
                    owned = owned.new_zeros(bucket.owned[1] - bucket.owned[0])
                whole = gather_owned(bucket, owned, self.axis)
                self._memory.behind(bucket.owned_gradient)
                for slot, member in zip(bucket.flat.slots, bucket.members, strict=True):
                    yield member, whole[slot.start : slot.stop].view(member.parameter.shape)


def gather_owned(bucket: Bucket, owned: Tensor, axis: Axis) -> Tensor:
    """A whole flat tensor from the ranges that the ranks own; itself, where a rank owns everything."""
    if bucket.owned == (0, bucket.flat.numel):
        return owned
    whole = owned.new_empty(bucket.flat.numel)
    axis.all_gather(whole, owned.contiguous())
    return whole
