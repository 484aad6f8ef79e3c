"""ZeRO on one rank behind one object: buckets, their reduction and gathering, and their optimizer.

    make_buckets -> buckets -+- stepper, optimizer      step the ranges that this rank owns
                             +- reducer, exchange       sum gradients over the replicas
                             +- gatherer                stage 3: gathers weights while a layer runs
                             +- access, written, used   what user code has changed by hand

The ops of a program on the data axis are methods of two of these: REDUCE and TIED of ``reducer``, RELEASE of
``gatherer``. The stages of ZeRO differ in how buckets are laid out and in where a program has these ops; nothing here
depends on the stage again. A step calls, in time:

    begin | forward and backward passes | finish | squares, exchange_gradients or poison | without_gradient | step
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from ..base.autograd import sees_sums
from ..base.torch_private import multiply_all
from ..grid import Axis
from ..grid.grid import Grid
from .axis_options import ZeroOptions
from .bucket import Bucket
from .bucketing import make_buckets
from .gradient_access import GradientAccess
from .gradient_norm import square
from .gradients import GradientReducer, all_reduce_gradients
from .layer_gather import ParameterGatherer, gather_axes
from .managed import ManagedParameter, is_released, set_released
from .offload import OffloadMemory, placed_on_all_ranks
from .optimizer_kinds import choose_stepper
from .range_stepper import OptimizerFactory, publish
from .released_parameter import pickle_error
from .shard_groups import shard_group
from .used_parameters import UsedParameters
from .written_weights import WrittenWeights

_ATTRIBUTE = "triax_data_axis"


class ZeroDataAxis:
    """This rank's shards of the replicas' weights, gradients and optimizer state.

    Args:
        members: this rank's parameters, in the order of the model.
        grid: the grid whose data axis the replicas lie on.
        tie_axes: for each tie, the ranks that hold it; None for ties that need no message here.
        order: for each stage of this rank, its layers in the order they run.
        options: options of ZeRO.
        capacity: maximum number of elements of a bucket.
        keep: in stage 3, keep weights gathered from a stage's first forward of a step to the step's end.
        factory: makes the optimizer, and names its stepper; None means that no parameter is trained.
        groups: the options of each parameter group of the optimizer, in the order of ``ManagedParameter.group``.
        names: layer -> its name in messages; None: "layer 3".

    Attributes:
        options: the options of ZeRO that are in effect.
        buckets: the buckets of this rank.
        memory: allocates the tensors of this rank, offloaded or not.
        optimizer: torch's optimizer, over the ranges that this rank owns; None if no parameter is trained.
        stepper: steps the optimizer.
        reducer: sums gradients over the data axis.
        gatherer: gathers weights in stage 3; None if weights are always whole.
        axis, device: the axis of all replicas (data x context), and the device of this rank.
        access: access of user code to the gradients, through ``.grad``; it knows by what they are multiplied.
        written: weights that user code has written in place.
        used: which parameters have a gradient in the step.
        exchange: combines gradients in place of a plain sum; None means a plain sum.
        extra_axis: a second axis over which a step's gradients are summed, if there are several grids that each hold
            the whole model; else None.

    The only state of its own is ``_exchanged``, True from ``exchange_gradients`` or ``poison`` to the next ``begin``:
    the gradients are then those of all replicas. The rest of a step's state is in ``reducer`` and ``access``.
    """

    def __init__(
        self,
        members: Sequence[ManagedParameter],
        grid: Grid,
        tie_axes: Sequence[Axis | None],
        order: Mapping[int, Sequence[int]],
        options: ZeroOptions,
        capacity: int,
        keep: bool = False,
        factory: OptimizerFactory | None = None,
        groups: Sequence[dict[str, Any]] = (),
        names: Mapping[int, str] | None = None,
    ) -> None:
        making = factory or OptimizerFactory(_no_optimizer)
        kind = making.stepper if factory is None else choose_stepper(making, members, groups, grid, options)
        self.options = options = making.stepper.adapt(options)
        self.axis, self.device, self._tensor_axis = grid.data_context, grid.device, grid.tensor
        self.extra_axis: Axis | None = None
        for member in members if options.stage == 3 else ():
            parameter: Any = member.parameter
            parameter.triax_name = f"{member.layout.name or 'a parameter'} of {tuple(parameter.shape)}"  # for errors
            set_released(parameter, False)

        for replicas in ("data_context", "expert_data"):  # on all ranks, whatever their stages hold
            shard_group(grid, replicas, options.shard_size)
        with placed_on_all_ranks(grid, options.offload):
            self.memory = OffloadMemory(options.offload, grid.device)
            self.buckets = make_buckets(members, grid, options, capacity, self.memory)
            in_flight = options.allgather_bucket_size if options.overlap_comm else 0
            self.stepper = kind(making.make, self.buckets, groups, in_flight)
        self.optimizer = None if factory is None else self.stepper.optimizer
        self._trained = trained = [bucket for bucket in self.buckets if bucket.trained]
        self._bucket_of = {member.parameter: bucket for bucket in self.buckets for member in bucket.members}

        self.reducer = GradientReducer(self.buckets, grid, tie_axes, options)
        self.exchange = None if options.exchange is None else options.exchange(grid, trained)
        self._exchanged = False  # ``exchange`` has combined the gradients of this step
        self.stepper.connect(self.exchange, grid)
        compressed = self.exchange is not None
        self.access = GradientAccess(trained, grid, self.reducer.settle, compressed)
        self.written = WrittenWeights([b for b in trained if not b.partitioned and self.stepper.equal_weights])
        self.used = UsedParameters(trained, grid, self.reducer, self.access, self.written, compressed)

        self.gatherer = self._make_gatherer(grid, order, keep, names or {})
        if options.zeropp is not None:
            plain = options.exchange is None and options.communication_dtype is None
            options.zeropp.replace_reductions(self.buckets, grid, plain)
        for member in members:
            _take_over(member.parameter, self)

    def _make_gatherer(
        self, grid: Grid, order: Mapping[int, Sequence[int]], keep: bool, names: Mapping[int, str]
    ) -> ParameterGatherer | None:
        """Make the gatherer of the weights in stage 3. Collective: every rank makes the groups of the gathers."""
        partitioned = [bucket for bucket in self.buckets if bucket.partitioned]
        if partitioned:
            return ParameterGatherer(partitioned, grid, order, self.options, keep, self.reducer, names)
        if self.options.stage == 3:
            axes, _ = gather_axes(grid, self.options.shard_size)
            if self.options.zeropp is not None:
                self.options.zeropp.gather_routes([], axes[grid.data_context.name], grid)
        return None

    def bucket_of(self, parameter: nn.Parameter) -> Bucket | None:
        """Return the bucket that holds a parameter; None if no bucket does."""
        return self._bucket_of.get(parameter)

    def fill(self, parameter: nn.Parameter, value: Tensor) -> bool:
        """Set a parameter's initial values; this rank keeps its shard of them. Return False if no bucket has it."""
        bucket = self._bucket_of.get(parameter)
        if bucket is not None:
            bucket.fill(parameter, value)
        return bucket is not None

    def assign(self, parameter: nn.Parameter, value: Tensor) -> bool:
        """Set a parameter's values after steps, equal on every replica; return False if no bucket has it."""
        filled = self.fill(parameter, value)
        if filled:
            bucket = self._bucket_of[parameter]
            self.changed({bucket: [bucket.span(parameter)]})
        return filled

    def begin(self) -> None:
        """Begin a step with zero gradients."""
        self._exchanged = False
        self.access.begin()
        self.reducer.begin()

    @property
    def stepped(self) -> bool:
        """True if the optimizer has already stepped with the present gradients, which are then scaled."""
        return self.access.stepped

    def enter(self, call: str, ends: bool = False) -> None:
        """In stage 3, check that all replicas make a collective call now; see ``ParameterGatherer.enter``."""
        if self.gatherer is not None:
            self.gatherer.enter(call, ends)

    def finish(self) -> None:
        """End a program: wait for all reductions, and release gathered weights."""
        self.enter("ends the step", ends=True)
        self.reducer.finish()
        if self.extra_axis is not None:
            all_reduce_gradients(self.extra_axis, self._trained)
        if self.gatherer is not None:
            self.gatherer.finish()

    def drain(self) -> None:
        """Wait for all communication that has begun, and release the weights. Collective.

        A message that nobody receives would be taken for the next one between the same ranks.
        """
        self.reducer.drain()
        if self.gatherer is not None:
            self.gatherer.finish()

    def abandon(self) -> None:
        """Discard all pending communication after a failure, because other ranks may have left."""
        self.reducer.abandon()
        if self.gatherer is not None:
            self.gatherer.abandon()

    def changed(self, written: Mapping[Bucket, Sequence[tuple[int, int]]] | None = None) -> None:
        """Discard other copies of the weights after shards were written, equal on every replica. Collective.

        Args:
            written: for each bucket, the (start, stop) of the written ranges; None means that all weights were written.
        """
        self.stepper.rejoin(written)
        if self.gatherer is not None:
            self.gatherer.changed()

    def displaced(self) -> str | None:
        """Return the name of a parameter that is no longer a view of its bucket, so that a step would not change it."""
        return next((name for bucket in self.buckets if (name := bucket.displaced()) is not None), None)

    def misled_hook(self) -> str | None:
        """Return what is wrong if a user's hook would read ``.grad`` where it never has the sum of a step's passes."""
        for bucket in self.buckets:
            for member in () if bucket.direct else bucket.members:
                if sees_sums(member.parameter):
                    return (
                        f"{member.layout.name} has a hook of register_post_accumulate_grad_hook, but its p.grad never "
                        "holds the sum of the step's backward passes: stages 2 and 3 of ZeRO reduce the gradient of "
                        "each pass, and gradients of another dtype than the weight's are summed elsewhere. For a "
                        "linear change, such as a mask, use p.register_hook, whose function returns the changed "
                        "gradient; or use stage 1"
                    )
        return None

    def squares(self) -> Tensor:
        """Return this rank's share of the square of the global gradient norm, 0-dim float64.

        The sum of the shares of all ranks of the grid is that square: a sharded element counts on its own rank, a
        replicated one on the first of its replicas, a tied one on the first stage that holds it.

        Before ``exchange_gradients`` this is the square of the norm of this rank's own gradients, which shows if they
        are all finite.
        """
        if self.exchange is None or self._exchanged:
            if (share := self.stepper.gradient_squares(self.buckets, self.device)) is not None:
                return share
            squares = [part for bucket in self.buckets for part in bucket.squares()]
        else:
            squares = [square(bucket.gradients) for bucket in self.buckets if bucket.gradients is not None]
        share = torch.stack(squares).sum() if squares else torch.zeros((), dtype=torch.float64, device=self.device)
        if self.access.applied != 1.0:  # as on ranks whose gradients user code has not read
            share = share / self.access.applied**2
        # Each rank of the extra axis counts all of it. There is no exchange then.
        return share if self.extra_axis is None else share.div_(self.extra_axis.size)

    @torch.no_grad()
    def exchange_gradients(self, scale: float) -> None:
        """Combine the gradients of all replicas through ``exchange``, which must not be None. Collective.

        Each replica's gradients are first multiplied by ``scale``.

        Args:
            scale: factor that makes the sum of the gradients over the replicas the mean gradient.
        """
        assert self.exchange is not None
        own = [bucket.gradients for bucket in self._trained if bucket.gradients is not None]
        if own and scale != 1.0:
            multiply_all(own, scale)
        self.exchange.gradients(self._trained)
        self._exchanged = True

    @torch.no_grad()
    def poison(self) -> None:
        """Fill all gradients with NaN. It replaces ``exchange_gradients`` if gradients are not finite on some rank."""
        for bucket in self._trained:
            if bucket.gradients is not None:
                bucket.gradients.fill_(torch.nan)
        self._exchanged = True

    def without_gradient(self) -> set[Tensor]:
        """Return the parameters without a gradient on any replica, after checks of what user code has changed by hand.

        Collective over the data axis (or ``extra_axis``) and the tensor axis. See ``UsedParameters.agree``.
        """
        return self.used.agree((self.extra_axis or self.axis, self._tensor_axis))

    def step(self, scale: float, without: Collection[Tensor] = ()) -> None:
        """Scale the gradients, step the optimizer, and send the new weights to every replica. Collective.

        Takes the arguments of ``RangeStepper.step``.

        Raises:
            RuntimeError: a weight that has a master was written through ``.data``; looked for in the steps 1, 2, 4, ...
        """
        self.written.require_seen()
        self.stepper.step(scale / self.access.applied, without)
        self.access.applied, self.access.stepped = 1.0, True
        if self.gatherer is not None:
            self.gatherer.changed()

    def publish(self) -> None:
        """Send masters that were written to the weights of every replica. Collective over the data axis."""
        for bucket in self._trained:
            bucket.update()
            self.memory.evict(bucket.shard)
        self.changed()
        publish(self._trained, self.options.allgather_bucket_size)

    @torch.no_grad()
    def switch_mode(self, mode: str) -> None:
        """Call the optimizer's ``train()`` or ``eval()``, if it has modes, and send the weights. Collective."""
        if callable(switch := getattr(self.optimizer, mode, None)):
            written = bool(self.written)
            self.written.take()
            switch()
            self.publish()
            if not written:  # by user code
                self.written.forget()

    def gathered(self, buckets: Iterable[Bucket]) -> AbstractContextManager[None]:
        """Context in which the weights of buckets are gathered. Collective over the data axis."""
        return nullcontext() if self.gatherer is None else self.gatherer.gathered(list(buckets))

    def gradients(self) -> Iterator[tuple[ManagedParameter, Tensor]]:
        """Yield the whole gradient of each trained parameter, after a step. Collective over the data axis."""
        for bucket in self._trained:
            owned = bucket.owned_gradient.to(self.device)
            if not owned.numel():  # a step has begun: it has none yet
                owned = owned.new_zeros(bucket.owned_numel)
            whole = owned
            if bucket.sharded:
                whole = owned.new_empty(bucket.flat.numel)
                bucket.shard_axis.all_gather(whole, owned.contiguous())
            self.memory.evict(bucket.owned_gradient)
            for slot, member in zip(bucket.flat.slots, bucket.members, strict=True):
                yield member, whole[slot.start : slot.stop].view(member.parameter.shape)


def _no_optimizer(groups: Sequence[dict[str, Any]]) -> torch.optim.Optimizer:
    """Make an optimizer without parameters, for a model without trained parameters."""
    return torch.optim.Optimizer([{"params": []}], {})


def _take_over(parameter: nn.Parameter, data_axis: ZeroDataAxis) -> None:
    """Let a data axis manage a parameter from now on, in place of the one that did."""
    if (before := data_axis_of(parameter)) is not None:
        before.reducer.give_up(parameter)
    link = _Link(data_axis)
    link.parameter = weakref.ref(parameter)
    setattr(parameter, _ATTRIBUTE, link)


class _Link(weakref.ref[ZeroDataAxis]):
    """A weak reference from a parameter to its data axis. A copied or pickled parameter has None in its place."""

    parameter: weakref.ref[nn.Parameter]

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        parameter = self.parameter()
        if parameter is not None and is_released(parameter):
            raise pickle_error(parameter)
        return type(None), ()


def data_axis_of(parameter: nn.Parameter) -> ZeroDataAxis | None:
    """Return the data axis that manages a parameter, or None if no data axis does or it was deleted."""
    link = getattr(parameter, _ATTRIBUTE, None)
    return link() if isinstance(link, _Link) else None
