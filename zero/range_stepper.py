"""The optimizer's step on shards: each rank steps the range it owns, then every rank gets the new weights (ZeRO)."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..base.errors import CheckpointError
from ..base.torch_private import multiply_all
from ..grid import Grid, Pending
from ..grid.layout import FlatRange
from .axis_options import ZeroOptions
from .bucket import Bucket
from .late_parameters import LateParameters
from .optimizer_state import is_elementwise, is_number
from .protocols import Exchange, MakeOptimizer
from .shard_ranges import DtypeOf, KeyedRanges, ShardRanges
from .sharded_layers import ShardedLayers
from .sub_groups import SubGroups

_PACKAGE = __name__.partition(".")[0]
_AT_ONCE = 2**22  # elements of new weights in flight, by default: what is sent and not received takes memory

# A shard is a flat range that starts and ends anywhere: only optimizers that work element by element can step it.
# (Adafactor and LBFGS need whole tensors. LAMB and Muon combine the shards of each: engine/optim/layerwise.py.)
ELEMENTWISE = (
    "Adadelta",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "ASGD",
    "NAdam",
    "RAdam",
    "RMSprop",
    "Rprop",
    "SGD",
)


def needs_whole_tensors(kind: type[torch.optim.Optimizer]) -> bool:
    """Return True if a class is, or derives from, an optimizer of torch that does not work element by element."""
    bases = [base.__name__ for base in kind.__mro__ if base.__module__.startswith("torch.optim.")]
    return bool(bases) and bases[0] != "Optimizer" and bases[0] not in ELEMENTWISE


class RangeStepper:
    """Stepper of one of torch's own optimizers: steps the owned range of each bucket, on flat tensors.

    The optimizer must work element by element (Adam, AdamW, SGD, ...): a flat range is then stepped exactly as its
    parameters would be, and holds 1/N of the state. Rajbhandari et al. 2020, section 5.1.

    Subclasses step other tensors (``WholeStepper``) or other optimizers (``OneBitStepper``). They override ``adapt``,
    ``connect`` and the methods below ``step``.

    Args:
        make: makes the optimizer from parameter groups.
        buckets: the buckets of this rank.
        groups: the options of each parameter group, in the order of ``ManagedParameter.group``.
        allgather_bucket_size: elements of new weights in flight at once; None: 2**22.

    Attributes:
        optimizer: torch's, over the owned ranges, for learning-rate schedulers and for reading its state.
        late: step counts of parameters that some steps left out; None if they have no counts of their own.
        elsewhere: steps the owned ranges in place of this object, with gradients that are already scaled, except
            parameters without a gradient; None: this object steps them.
        made_at_once: True if the optimizer makes its state when it is made, as Adagrad does, and not in its first step.
        whole_tensors: True if it steps tensors of the parameters' shapes.
        equal_weights: True if all replicas have equal weights between two steps.
    """

    whole_tensors = False
    equal_weights = True

    @classmethod
    def adapt(cls, options: ZeroOptions) -> ZeroOptions:
        """Return the ZeRO options, changed as this class of optimizer needs them.

        Raises:
            ValueError: the optimizer does not support an option.
        """
        return options

    def __init__(
        self,
        make: MakeOptimizer,
        buckets: Sequence[Bucket],
        groups: Sequence[dict[str, Any]],
        allgather_bucket_size: int | None,
    ) -> None:
        self._allgather_bucket_size = allgather_bucket_size
        self._buckets = [bucket for bucket in buckets if bucket.trained]
        self._sub_groups: SubGroups | None = None
        self.elsewhere: Callable[[Collection[Tensor]], None] | None = None
        self.optimizer = self._make(make, groups)
        self._make_again = make
        self.made_at_once = bool(self.optimizer.state) and self._sub_groups is None
        self.late = LateParameters(self.optimizer) if self._keeps_counts() else None
        if self._sub_groups is not None:
            self._sub_groups.late = self.late

    def _make(self, make: MakeOptimizer, groups: Sequence[dict[str, Any]]) -> torch.optim.Optimizer:
        """Make the optimizer over the tensors that are stepped."""
        if self._buckets and self._buckets[0].memory.offload.portions:
            self._sub_groups = SubGroups(make, self._buckets, groups)
            return self._sub_groups.optimizer
        owned = [[bucket.master for bucket in self._buckets if bucket.group == i] for i in range(len(groups))]
        return make([{**options, "params": masters} for options, masters in zip(groups, owned, strict=True)])

    def connect(self, exchange: Exchange | None, grid: Grid) -> None:
        """Connect the optimizer to the gradient exchange, once, after that was made. Collective over the grid.

        LAMB and Muon get the layers that lie, whole or in part, in this rank's ranges.
        """
        if not getattr(self.optimizer, "layerwise", False):
            return
        setattr(self.optimizer, "layers", ShardedLayers(self._buckets, grid))  # noqa: B010  # no attribute of torch's

    def step(self, scale: float, without: Collection[Tensor] = ()) -> None:
        """Scale the owned gradients in place, step, and send the new weights to every replica.

        Args:
            scale: one over the batch's weight, times the clipping coefficient.
            without: parameters that had no gradient on any replica; they do not change, as with torch's ``None``.
        """
        with torch.no_grad():
            if self.elsewhere is not None:
                self._scale(scale)
                self.elsewhere(without)
            elif self._sub_groups is not None:
                self._sub_groups.step(scale, without)
            else:
                self._step(scale, without)
            publish(self._buckets, self._allgather_bucket_size)

    def _step(self, scale: float, without: Collection[Tensor]) -> None:
        """Scale the gradients and step all buckets at once, without sub-groups."""
        pieces = {} if self.late is None else self.late.find(self._buckets, without)
        fused = not pieces and self._scales_by(scale)
        if not fused:
            self._scale(scale)
        if self.late is not None and pieces:
            self._step_pieces(self.late, pieces)
            return
        # Without a gradient, decay and momentum would move a parameter all the same.
        frozen = [part for bucket in self._buckets for part in self._frozen(bucket, without)]
        kept = [(part, part.clone()) for masters in frozen for part in masters]
        for master, *_ in frozen:
            master.zero_()  # so that decay makes nothing of state that this step makes
        with _gradients_divided(self.optimizer, 1.0 / scale) if fused else nullcontext():
            self.optimizer.step()
        for part, before in kept:
            part.copy_(before)
        for bucket in self._buckets:
            bucket.update()

    def _step_pieces(self, late: LateParameters, pieces: Mapping[Bucket, set[Tensor]]) -> None:
        """Step some buckets in pieces, and the others at once."""
        masters = [bucket.master for bucket in pieces if bucket.master is not None]
        gradients = [master.grad for master in masters]
        for master in masters:
            master.grad = None
        self.optimizer.step()
        for master, gradient in zip(masters, gradients, strict=True):
            master.grad = gradient
        late.step(pieces)
        for bucket in self._buckets:
            bucket.update()

    def _keeps_counts(self) -> bool:
        """Return True if parameters that a step leaves out have step counts of their own.

        This is False for LAMB and Muon, which step whole layers, and for optimizers of other libraries, which may keep
        numbers elsewhere: there all parameters of a bucket have one count.
        """
        bases = [base.__module__ for base in type(self.optimizer).__mro__[:-2]]
        known = any(base.startswith(("torch.optim.", f"{_PACKAGE}.optim.")) for base in bases)
        return known and not getattr(self.optimizer, "layerwise", False)

    def _scales_by(self, scale: float) -> bool:
        """Return True if the optimizer's fused kernel can scale the gradients, bit by bit as ``_scale`` does.

        It divides them by the scale of ``torch.amp.GradScaler``, an fp32 number, and stores them.
        """
        power_of_two = scale != 1.0 and abs(math.frexp(scale)[1]) < 120 and math.frexp(scale)[0] == 0.5
        fused = all(group.get("fused") for group in self.optimizer.param_groups)
        return power_of_two and fused and isinstance(self.optimizer, (torch.optim.Adam, torch.optim.SGD))

    def _scale(self, scale: float) -> None:
        if self._buckets and scale != 1.0:
            multiply_all([bucket.owned_gradient for bucket in self._buckets], scale)

    def _frozen(self, bucket: Bucket, without: Collection[Tensor]) -> list[list[Tensor]]:
        """Return a list of views for each span that a step must not change: of the master and of each state tensor."""
        master = bucket.master
        if master is None or not (spans := bucket.frozen(without)):
            return []
        flat = [master.detach(), *(value for _, value in self._elementwise_state(master))]
        return [[tensor[start:stop] for tensor in flat] for start, stop in spans]

    def gradient_squares(self, buckets: Sequence[Bucket], device: torch.device) -> Tensor | None:
        """Return this rank's share of the squared gradient norm, or None to compute it from the buckets' gradients."""
        return None

    def saved_value(self, bucket: Bucket, values: Tensor) -> Tensor:
        """Return the weights of a bucket to save in a checkpoint: ``values``, the present weights, by default."""
        return values

    def resume(self, at_synchronization: bool = True) -> None:
        """Restore this replica's own weights after the optimizer state was loaded.

        No effect, except for 1-bit optimizers whose replicas have different weights between two synchronizations.

        Args:
            at_synchronization: True if the loaded weights were saved right after a synchronization, when all replicas
                had equal weights.
        """

    def rejoin(self, written: Mapping[Bucket, Sequence[tuple[int, int]]] | None = None) -> None:
        """Drop the local updates of weights that were written, equal on every replica; no effect by default.

        Args:
            written: for each bucket, the (start, stop) of the written ranges; None means that all weights were written.
        """

    def masters(self) -> Iterator[tuple[Tensor, list[str]]]:
        """Yield each tensor that the optimizer steps, and the names of the parameters in it."""
        for bucket in self._buckets:
            assert bucket.master is not None
            yield bucket.master, [member.layout.name for member in bucket.members]

    def sub_group_state(self, bucket: Bucket) -> list[Tensor]:
        """Return the tensors that hold the state of a bucket that is stepped in sub-groups."""
        return [] if self._sub_groups is None or not bucket.trained else self._sub_groups.tensors_of(bucket)

    def clear_sub_groups(self) -> None:
        """Set the state of sub-groups to zero, as before the first step."""
        if self._sub_groups is not None:
            self._sub_groups.clear()

    def state_of(self, bucket: Bucket, parameter: Tensor, key: str) -> tuple[Tensor, int] | None:
        """Return a flat state tensor that has a parameter's part, and the place of its first element in the bucket.

        None if the optimizer has no elementwise state of that key. After a change of it, call ``keep_state``.
        """
        if bucket.master is None:
            return None
        value = next((value for name, value in self._elementwise_state(bucket.master) if name == key), None)
        return None if value is None else (value, bucket.owned[0])

    def keep_state(self, bucket: Bucket, key: str, value: Tensor) -> None:
        """Store a flat state tensor that ``state_of`` or ``load_targets`` has given, and that was changed."""
        if self._sub_groups is not None:
            self._sub_groups.keep(bucket, key, value)

    def state_tensors(self) -> Iterator[tuple[int, str, Tensor]]:
        """Yield the elementwise optimizer state: the index in ``masters``, the key, and the state tensor."""
        for index, (master, _) in enumerate(self.masters()):
            yield from ((index, key, value) for key, value in self._elementwise_state(master))

    def state_ranges(self, index: int, value: Tensor, ranges: ShardRanges) -> Iterator[FlatRange]:
        """Cut a tensor of ``state_tensors`` into the ranges that this rank writes."""
        bucket = self._buckets[index]
        yield from ranges.of_bucket(bucket, value, bucket.owned[0], True)
        bucket.memory.evict(value)

    def states(self, ranges: ShardRanges) -> KeyedRanges:
        """Yield (key, range) of the elementwise optimizer state that this rank writes to a checkpoint."""
        for index, key, value in self.state_tensors():
            yield from ((key, part) for part in self.state_ranges(index, value, ranges))

    def load_targets(self, ranges: ShardRanges, dtype_of: DtypeOf, keys: Iterable[str]) -> KeyedRanges:
        """Yield the state tensors into which a checkpoint is loaded. A tensor that does not exist yet is allocated.

        The caller must fill each tensor before it takes the next one.

        Args:
            ranges: the ranges of the parameters on this rank.
            dtype_of: returns the dtype that a parameter's state under a key gets, or None if that state is not loaded.
            keys: the keys that the state may have, such as ``exp_avg``.
        """
        for key in keys:
            for bucket in self._buckets:
                dtypes = [d for m in bucket.members if (d := dtype_of(m.layout.name, key)) is not None]
                if dtypes:
                    flat = self._loaded(bucket, key, dtypes[0])
                    for part in ranges.of_bucket(bucket, flat, bucket.owned[0], False):
                        if dtype_of(part.name, key) is not None:
                            yield key, part
                    self.keep_state(bucket, key, flat)
                    bucket.memory.evict(flat)

    def first_state(self) -> Mapping[Any, dict[str, Any]]:
        """Return the state that the optimizer has before its first step: none, unless it is made with the optimizer."""
        groups = [{**group} for group in self.optimizer.param_groups]
        return self._make_again(groups).state if self.made_at_once else {}

    def renew_first_state(self) -> None:
        """Make the state of before the first step again: weights have got their values after the optimizer was made."""
        self.optimizer.state.update(self.first_state())

    def odd_shaped_state(self, ranges: ShardRanges) -> Iterator[tuple[str, str, Tensor]]:
        """Yield state of another shape than its parameter's (Adafactor's rows and columns): name, key, whole tensor.

        Only an optimizer for whole tensors has such state. Every replica holds it, and the first one writes it.

        Raises:
            CheckpointError: this optimizer has such state, of flat shards, whose elements belong to no parameter.
        """
        for master, members in self.masters():
            for key, value in self.optimizer.state.get(master, {}).items():
                if not (is_number(value, master) or is_elementwise(value, master)):
                    raise CheckpointError(
                        f"{type(self.optimizer).__name__} keeps {key!r} of shape {tuple(value.shape)} for a flat shard "
                        f"of {master.numel()} elements (of {', '.join(members[:3])}), which cannot be saved by "
                        "parameter: keep one number, or a tensor of the shard's shape"
                    )
        return iter(())

    def set_odd_shaped_state(self, name: str, key: str, value: Tensor) -> bool:
        """Set a state tensor of another shape than the parameter's; return False if this rank lacks the parameter."""
        return False

    def _loaded(self, bucket: Bucket, key: str, dtype: torch.dtype) -> Tensor:
        assert bucket.master is not None
        state = self.optimizer.state[bucket.master]
        if self._sub_groups is None:
            return elementwise_target(state, key, bucket.master, dtype)
        return self._sub_groups.loaded(bucket, key, dtype, state)

    def _elementwise_state(self, master: Tensor) -> Iterator[tuple[str, Tensor]]:
        for key, value in self.optimizer.state.get(master, {}).items():
            if is_elementwise(value, master):
                yield key, value
        if self._sub_groups is not None:
            yield from self._sub_groups.unpacked(master)


@contextmanager
def _gradients_divided(optimizer: Any, divisor: float) -> Iterator[None]:
    """Context in which the steps of a fused optimizer of torch divide the gradients first."""
    device = next((p.device for group in optimizer.param_groups for p in group["params"]), None)
    optimizer.grad_scale = torch.full((), divisor, dtype=torch.float32, device=device)
    try:
        yield
    finally:
        del optimizer.grad_scale


def publish(buckets: Sequence[Bucket], allgather_bucket_size: int | None) -> None:
    """Send the new weights of all buckets to every replica.

    At most ``allgather_bucket_size`` elements are sent at once, by default 2**22, but at least one bucket.
    """
    in_flight: deque[tuple[int, Pending]] = deque()
    elements, limit = 0, _AT_ONCE if allgather_bucket_size is None else allgather_bucket_size
    for bucket in buckets:
        while in_flight and elements + bucket.flat.numel > limit:
            size, pending = in_flight.popleft()
            pending.wait()
            elements -= size
        started = bucket.publish()
        if started is not None:
            in_flight.append((bucket.flat.numel, started))
            elements += bucket.flat.numel
    for _, pending in in_flight:
        pending.wait()


def elementwise_target(state: dict[str, Any], key: str, master: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the state tensor under ``key``, in the master's shape, to be filled; allocate it if it does not exist."""
    target = state.get(key)
    if not is_elementwise(target, master):
        target = state[key] = torch.zeros_like(master, dtype=dtype, requires_grad=False)
    assert isinstance(target, Tensor)
    return target.detach()


@dataclass(frozen=True)
class OptimizerFactory:
    """Function that makes an optimizer, and the class that steps it.

    Attributes:
        make: makes the optimizer from parameter groups.
        stepper: ``RangeStepper`` or a subclass.
        kind: class of the optimizer; None if a function of the user chooses it.
    """

    make: MakeOptimizer
    stepper: type[RangeStepper] = RangeStepper
    kind: type[torch.optim.Optimizer] | None = None


def with_own_stepper(kind: type[torch.optim.Optimizer], make: MakeOptimizer) -> OptimizerFactory:
    """Return the factory of an optimizer class, which may name its stepper in a class attribute ``stepper``."""
    return OptimizerFactory(make, getattr(kind, "stepper", RangeStepper), kind)
