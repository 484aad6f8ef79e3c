"""Optimizers that need whole tensors (Adafactor), in stage 0: they step views of the flat master weights."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..grid.layout import FlatRange, set_layout
from .bucket import Bucket
from .managed import ManagedParameter
from .optimizer_state import is_elementwise, is_number
from .protocols import MakeOptimizer
from .range_stepper import RangeStepper, elementwise_target
from .shard_ranges import DtypeOf, KeyedRanges, ShardRanges


class MasterView(NamedTuple):
    """A stepped tensor: a view, in the parameter's shape, of elements ``span`` of its bucket's master."""

    member: ManagedParameter
    master: nn.Parameter
    bucket: Bucket
    span: slice


class WholeStepper(RangeStepper):
    """Steps each unsharded parameter on every replica, for stage 0, in which every replica holds all weights and state.

    Takes the arguments, and has the attributes, of ``RangeStepper``. The optimizer steps tensors of the parameters'
    shapes.

    Attributes:
        views: the tensors that the optimizer steps, which are views of the flat master weights.
    """

    whole_tensors = True

    def _make(self, make: MakeOptimizer, groups: Sequence[dict[str, Any]]) -> torch.optim.Optimizer:
        slots = [(slot, bucket) for bucket in self._buckets for slot in bucket.flat.slots]
        self.views: list[MasterView] = []
        params: list[list[nn.Parameter]] = [[] for _ in groups]
        for slot, bucket in sorted(slots, key=lambda pair: pair[0].number):  # as in plain PyTorch
            assert bucket.master is not None and bucket.group is not None
            member = bucket.members[bucket.flat.slots.index(slot)]
            span = slice(slot.start, slot.stop)
            master = nn.Parameter(bucket.master.detach()[span].view(member.parameter.shape))
            set_layout(master, member.layout)
            self.views.append(MasterView(member, master, bucket, span))
            params[bucket.group].append(master)
        return make([{**options, "params": some} for options, some in zip(groups, params, strict=True)])

    def _step(self, scale: float, without: Collection[Tensor]) -> None:
        self._scale(scale)
        for (parameter, *_), master, bucket, span in self.views:
            stands = not parameter.requires_grad or (len(without) > 0 and parameter in without)
            master.grad = None if stands else bucket.owned_gradient[span].view(master.shape)
        self.optimizer.step()
        for bucket in self._buckets:
            bucket.update()

    def masters(self) -> Iterator[tuple[Tensor, list[str]]]:
        """Yield each tensor that the optimizer steps, and a list with one name, the parameter's."""
        for view in self.views:
            yield view.master, [view.member.layout.name]

    def state_of(self, bucket: Bucket, parameter: Tensor, key: str) -> tuple[Tensor, int] | None:
        """Return the flat state tensor of a parameter, and the place of its first element in the bucket."""
        for view in self.views:
            if view.member.parameter is parameter:
                value = self.optimizer.state.get(view.master, {}).get(key)
                return (value.view(-1), view.span.start) if is_elementwise(value, view.master) else None
        return None

    def state_ranges(self, index: int, value: Tensor, ranges: ShardRanges) -> Iterator[FlatRange]:
        """Yield the rows of a state tensor that this replica writes to a checkpoint."""
        yield from ranges.of_replicated(ranges.of_parameter[self.views[index].member.parameter], value.view(-1))

    def load_targets(self, ranges: ShardRanges, dtype_of: DtypeOf, keys: Iterable[str]) -> KeyedRanges:
        """Yield the unsharded state tensors into which a checkpoint is loaded, with their keys."""
        for key in keys:
            for view in self.views:
                if (dtype := dtype_of(view.member.layout.name, key)) is not None:
                    flat = elementwise_target(self.optimizer.state[view.master], key, view.master, dtype).view(-1)
                    yield key, ranges.whole(ranges.of_parameter[view.member.parameter], flat)

    def odd_shaped_state(self, ranges: ShardRanges) -> Iterator[tuple[str, str, Tensor]]:
        """Yield state of other shapes (Adafactor's rows and columns). The first replica writes it."""
        for view in self.views if ranges.grid.data_context.is_first else ():
            named = ranges.of_parameter[view.member.parameter]
            for key, value in self.optimizer.state.get(view.master, {}).items() if ranges.writes(named) else ():
                if not (is_number(value, view.master) or is_elementwise(value, view.master)):
                    yield named.layout.name, key, value

    def set_odd_shaped_state(self, name: str, key: str, value: Tensor) -> bool:
        """Set a state tensor of another shape than the parameter's; return False if this rank lacks the parameter."""
        for view in self.views:
            if view.member.layout.name == name:
                self.optimizer.state[view.master][key] = value.to(view.master.device)
                return True
        return False
