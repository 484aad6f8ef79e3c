"""State of a model that this rank holds, element by element: parameters' values and the optimizer's state.

Checkpoints read and write through it. A parameter's value is its master, if there is one: weights are masters, rounded.
The state is what torch's optimizer keeps: tensors of a parameter's shape, each under its key, and numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..grid import Grid
from ..grid.layout import FlatRange
from .data_axis import ZeroDataAxis
from .optimizer_state import is_number
from .shard_ranges import KeyedRanges, NamedParameter, ShardRanges

# In place of a parameter's numbers: steps have left it out, so that it has no state yet, and no ``step`` tells that.
_NO_STATE = {"no_state": True}


class StateShards:
    """The values and the optimizer's state of this rank's parameters.

    Args:
        data_axis: the data axis that manages the parameters.
        parameters: all parameters of this rank.
        grid: the grid of this rank.

    Attributes:
        data_axis, parameters, grid: as given.
        stepper: steps the optimizer of the data axis, and cuts the optimizer's state into ``ranges``.
        ranges: cuts flat tensors into ranges of the parameters.
    """

    def __init__(self, data_axis: ZeroDataAxis, parameters: Sequence[NamedParameter], grid: Grid) -> None:
        self.data_axis, self.grid = data_axis, grid
        self.parameters, self.ranges = list(parameters), ShardRanges(parameters, grid)
        self.stepper = data_axis.stepper
        self.trained = [bucket for bucket in data_axis.buckets if bucket.trained]
        managed = {member.parameter for bucket in data_axis.buckets for member in bucket.members}
        self.unmanaged = [named for named in parameters if named.parameter not in managed]  # frozen, below stage 3

    def gathered_parameter(self) -> str | None:
        """Return the name of a parameter that is gathered in stage 3, if there is one: nothing may be loaded then."""
        gathered = (bucket for bucket in self.data_axis.buckets if bucket.partitioned and not bucket.released)
        return next((bucket.members[0].layout.name for bucket in gathered), None)

    def values(self, mine: bool) -> Iterator[FlatRange]:
        """Yield the parameters' values.

        Args:
            mine: yield only the values that this rank writes to a checkpoint; if False, all values that it steps.
        """
        if mine:
            self.data_axis.written.take()
        for bucket in self.data_axis.buckets:
            values, first = bucket.values()
            if mine and bucket.trained:
                values = self.stepper.saved_value(bucket, values)
            yield from self.ranges.of_bucket(bucket, values, first, mine)
            self.data_axis.memory.evict(values)
        for named in self.unmanaged:
            own = named.parameter.detach()
            flat = own.contiguous().view(-1)
            yield from self.ranges.of_replicated(named, flat) if mine else [self.ranges.whole(named, flat)]
            if not mine and not own.is_contiguous():
                own.copy_(flat.view(own.shape))  # the caller wrote to ``flat``

    def states(self) -> KeyedRanges:
        """Yield (key, range) of the elementwise optimizer state that this rank writes to a checkpoint."""
        yield from self.stepper.states(self.ranges)

    def residuals(self) -> KeyedRanges:
        """Yield (key, range) of the state of gradient compression that this rank writes to a checkpoint.

        This state is the error-feedback residuals and, for top-k with momentum, the velocities. Each replica has its
        own. Nothing is yielded without gradient compression.
        """
        for key, part in self.residual_targets():
            if self.ranges.writes(self.ranges.of_name[part.name]):
                yield key, part

    def residual_targets(self) -> KeyedRanges:
        """Yield (key, range) of this replica's state of gradient compression, which the caller fills from a checkpoint.

        The ranges are views of the tensors that ``residuals`` describes.
        """
        exchange = self.data_axis.exchange
        for key, flats in ({} if exchange is None else exchange.state()).items():
            for bucket, flat in zip(self.trained, flats, strict=True):
                yield from ((key, part) for part in self.ranges.of_bucket(bucket, flat, 0, False) if flat.numel())

    def writes(self, name: str) -> bool:
        """Return True if this rank writes the unsharded state tensors of the named parameter to a checkpoint."""
        return self.grid.axis(self.ranges.of_name[name].layout.replicas).is_first and self.ranges.writes(
            self.ranges.of_name[name]
        )

    def scalars(self) -> dict[str, dict[str, Any]]:
        """Return, for each parameter, the entries of its state that are one number, also as a tensor, if there are any.

        A parameter that steps have left out, and that has no state yet, gets a ``step`` of 0, or ``_NO_STATE``.
        """
        numbers_of: dict[str, dict[str, Any]] = {}
        for master, members in self.stepper.masters():
            state = self.stepper.optimizer.state.get(master, {})
            scalars = {k: v for k, v in state.items() if is_number(v, master)}
            for name in members if scalars else ():
                numbers_of[name] = dict(scalars)
        for parameter, numbers in self._late.items():
            name = self.ranges.of_parameter[parameter].layout.name
            common = numbers_of.pop(name, {})
            if numbers is not None:
                numbers_of[name] = dict(numbers)
            else:
                numbers_of[name] = {"step": 0 * common["step"]} if "step" in common else dict(_NO_STATE)
        return {name: numbers for name, numbers in numbers_of.items() if numbers}

    @property
    def _late(self) -> dict[Tensor, dict[str, Any] | None]:
        return {} if self.stepper.late is None else self.stepper.late.numbers

    def reset_optimizer(self) -> None:
        """Clear the optimizer's state, before other state is loaded."""
        state, first = self.stepper.optimizer.state, self.stepper.first_state()
        self._late.clear()
        for master, _ in self.stepper.masters():
            state.pop(master, None)
            if master in first:
                state[master] = first[master]
        self.stepper.clear_sub_groups()

    def set_scalars(self, numbers: Mapping[str, Mapping[str, Any]]) -> list[str]:
        """Set the entries of the state that are one number, as ``scalars`` returned them.

        Returns:
            The name of one parameter of each bucket whose parameters had different numbers, which the optimizer cannot
            keep. Such a bucket gets the largest number.
        """
        unlike = []
        optimizer = self.stepper.optimizer
        group_of = {id(master): group for group in optimizer.param_groups for master in group["params"]}
        for master, members in self.stepper.masters():
            known = [numbers[name] for name in members if numbers.get(name)]
            saved = [entries for entries in known if entries != _NO_STATE]
            if not known:
                continue
            largest = {}
            for key in dict.fromkeys(key for entries in saved for key in entries):
                values = [entries[key] for entries in saved if key in entries]
                largest[key] = max(values, key=float) if isinstance(values[0], (int, float, Tensor)) else values[0]
            own = {name: numbers.get(name) for name in members if numbers.get(name, {}) != largest}
            if self.stepper.late is None:
                unlike += list(own)[:1]
                own = {}
            fresh = not self.stepper.made_at_once
            counts = {
                name: None
                if entries == _NO_STATE or (fresh and entries and [*entries] == ["step"] and not entries["step"])
                else entries
                for name, entries in own.items()
            }
            group = group_of.get(id(master), {})
            optimizer.state[master].update({k: state_number(k, v, master, group) for k, v in largest.items()})
            for name, count in counts.items():
                loaded = None if count is None else {k: state_number(k, v, master, group) for k, v in count.items()}
                self._late[self.ranges.of_name[name].parameter] = loaded
        return unlike

    @torch.no_grad()
    def publish(self) -> None:
        """Send written master values to the weights of every replica. Collective over the data axis."""
        self.data_axis.publish()


def state_number(key: str, value: Any, master: Tensor, group: Mapping[str, Any]) -> Any:
    """Convert a number to the form an optimizer keeps: fused and capturable kernels want ``step`` on the device."""
    if not isinstance(value, Tensor):
        return value
    if key == "step" and (group.get("fused") or group.get("capturable")):
        return value.to(master.device, torch.float32, copy=True)
    return value.clone()
