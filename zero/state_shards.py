"""State of a model that this rank holds, element by element: parameters' values and the optimizer's state.

Checkpoints read and write through it. A parameter's value is its master, if there is one: weights are masters, rounded.
The state is what torch's optimizer keeps: tensors of a parameter's shape, each under its key, and numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..grid import Grid
from ..grid.layout import FlatRange
from .data_axis import ZeroDataAxis
from .optimizer import publish
from .shard_ranges import DtypeOf, KeyedRanges, NamedParameter, ShardRanges


class StateShards:
    """The values and the optimizer's state of this rank's parameters.

    Args:
        data_axis: the data axis that manages the parameters.
        parameters: all parameters of this rank.
        grid: the grid of this rank.

    Attributes:
        parameters: as given.
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
        for bucket in self.data_axis.buckets:
            values, first = bucket.values()
            if mine and self.stepper is not None and bucket.trained:
                values = self.stepper.saved_value(bucket, values)
            yield from self.ranges.of_bucket(bucket, values, first, mine)
            self.evict(values)
        for named in self.unmanaged:
            own = named.parameter.detach()
            flat = own.contiguous().view(-1)
            yield from self.ranges.of_replicated(named, flat) if mine else [self.ranges.whole(named, flat)]
            if not mine and not own.is_contiguous():
                own.copy_(flat.view(own.shape))  # the caller wrote to ``flat``

    def states(self) -> KeyedRanges:
        """Yield the elementwise optimizer state that this rank writes, with its keys."""
        if self.stepper is not None:
            yield from self.stepper.states(self.ranges)

    def residuals(self) -> KeyedRanges:
        """Yield the state of this replica's gradient exchange that this rank writes, with its keys."""
        for key, part in self.residual_targets():
            if self.ranges.writes(self.ranges.of_name[part.name]):
                yield key, part

    def residual_targets(self) -> KeyedRanges:
        """Yield the state tensors of this replica's gradient exchange, into which a checkpoint is loaded."""
        exchange = self.data_axis.exchange
        for key, flats in ({} if exchange is None else exchange.state()).items():
            for bucket, flat in zip(self.trained, flats, strict=True):
                yield from ((key, part) for part in self.ranges.of_bucket(bucket, flat, 0, False) if flat.numel())

    def writes(self, name: str) -> bool:
        """Return True if this rank writes the unsharded state tensors of the named parameter to a checkpoint."""
        return self.grid.data.is_first and self.ranges.writes(self.ranges.of_name[name])

    def odd_shaped_state(self) -> Iterator[tuple[str, str, Tensor]]:
        """Yield state of another shape than its parameter's (Adafactor's rows and columns): name, key, whole tensor.

        Only an optimizer for whole tensors has such state. Every replica holds it, and the first one writes it.
        """
        if self.stepper is not None:
            yield from self.stepper.odd_shaped_state(self.ranges)

    def scalars(self) -> dict[str, dict[str, Any]]:
        """Return, for each parameter, the entries of its state that are one number, 0-dim tensors too."""
        found: dict[str, dict[str, Any]] = {}
        for master, members in self._masters():
            state = self._optimizer().state.get(master, {})
            scalars = {k: v for k, v in state.items() if not (isinstance(v, Tensor) and v.dim())}
            for name in members if scalars else ():
                found[name] = dict(scalars)
        return found

    def load_targets(self, dtype_of: DtypeOf, keys: Iterable[str]) -> KeyedRanges:
        """Yield the state tensors into which a checkpoint is loaded. A tensor that does not exist yet is allocated.

        The caller must fill each tensor before it takes the next one.

        Args:
            dtype_of: returns the dtype of a parameter's state under a key, or None if that state is not loaded.
            keys: the keys that the state may have, such as ``exp_avg``.
        """
        if self.stepper is not None:
            yield from self.stepper.load_targets(self.ranges, dtype_of, keys)

    def reset_optimizer(self) -> None:
        """Clear the optimizer's state, before other state is loaded."""
        for master, _ in self._masters():
            state = self._optimizer().state
            if isinstance(self._optimizer(), torch.optim.Adagrad):  # its state is made with it, and never again
                for value in state[master].values():
                    value.zero_()
            else:
                state.pop(master, None)
        for bucket in self.trained:
            for value in self.stepper.sub_group_state(bucket) if self.stepper is not None else ():
                value.zero_()
                self.evict(value)

    def set_scalars(self, numbers: Mapping[str, Mapping[str, Any]]) -> list[str]:
        """Set the entries of the state that are one number, as ``scalars`` returned them.

        Returns:
            The name of one parameter of each bucket whose parameters had different numbers. Such a bucket gets the
            largest number.
        """
        unlike = []
        groups = [] if self.data_axis.optimizer is None else self.data_axis.optimizer.param_groups
        group_of = {id(master): group for group in groups for master in group["params"]}
        for master, members in self._masters():
            found = [numbers[name] for name in members if name in numbers]
            if not found:
                continue
            state = self._optimizer().state[master]
            if len(found) < len(members):
                unlike.append(next(name for name in members if name not in numbers))
            for key in dict.fromkeys(key for each in found for key in each):
                values = [each[key] for each in found if key in each]
                best = max(values, key=float) if isinstance(values[0], (int, float, Tensor)) else values[0]
                if any(value != best for value in values):
                    unlike.append(members[0])
                state[key] = state_number(key, best, master, group_of.get(id(master), {}))
        return unlike

    def resume(self) -> None:
        """Prepare the optimizer for the next step after all optimizer state was loaded."""
        if self.stepper is not None:
            self.stepper.resume()

    def set_odd_shaped_state(self, name: str, key: str, value: Tensor) -> bool:
        """Set a state tensor of another shape than the parameter's; return False if this rank lacks the parameter."""
        return self.stepper is not None and self.stepper.set_odd_shaped_state(name, key, value)

    def evict(self, tensor: Tensor) -> None:
        """Drop the pages of a value or state that is kept on disk from memory; it is not needed for a while."""
        self.data_axis.evict(tensor)

    @torch.no_grad()
    def publish(self) -> None:
        """Send written master values to the weights of every replica. Collective over the data axis."""
        for bucket in self.trained:
            bucket.update()
            self.evict(bucket.shard)
        self.data_axis.changed()
        publish(self.trained, self.data_axis.options.allgather_bucket_size)

    def _masters(self) -> Iterator[tuple[Tensor, list[str]]]:
        if self.stepper is not None:
            yield from self.stepper.masters()

    def _optimizer(self) -> torch.optim.Optimizer:
        assert self.data_axis.optimizer is not None
        return self.data_axis.optimizer


def state_number(key: str, value: Any, master: Tensor, group: Mapping[str, Any]) -> Any:
    """Convert a number to the form an optimizer keeps: fused and capturable kernels want ``step`` on the device."""
    if not isinstance(value, Tensor):
        return value
    if key == "step" and (group.get("fused") or group.get("capturable")):
        return value.to(master.device, torch.float32, copy=True)
    return value.clone()
