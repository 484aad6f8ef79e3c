"""Values of one parameter at full precision, whole or this rank's part: master weights, gradient, optimizer state."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ...grid import Axis
from ...zero.data_axis import data_axis_of

WEIGHTS, GRADIENT = "weights", "gradient"  # any other kind is a key of the optimizer's state


class ParameterValues:
    """Values of one kind of a parameter, of which this rank holds a part of the flattened tensor.

    Args:
        parameter: a parameter that an engine or a ``ShardedOptimizer`` trains.
        kind: ``WEIGHTS``, ``GRADIENT``, or a key of the optimizer's state, such as ``exp_avg``.

    Attributes:
        exists: False if the parameter is in no bucket, or the optimizer has no such state yet.
        local: (n,), a view of this rank's part of the values. Empty if another rank holds them all.
    """

    def __init__(self, parameter: nn.Parameter, kind: str = WEIGHTS) -> None:
        self._parameter, self._kind = parameter, kind
        self._data_axis = data_axis_of(parameter)
        bucket = None if self._data_axis is None else self._data_axis.bucket_of(parameter)
        self._bucket, self.local, self._start = bucket, torch.zeros(0), 0
        self.exists = bucket is not None
        if bucket is None or self._data_axis is None:
            return
        if kind == WEIGHTS:
            self._data_axis.written.take()
        start, stop = bucket.span(parameter)
        flat_values: tuple[Tensor, int] | None = bucket.values()
        if kind == GRADIENT:
            flat_values = (bucket.owned_gradient, bucket.owned[0]) if bucket.owned_gradient.numel() else None
        elif kind != WEIGHTS:
            flat_values = self._data_axis.stepper.state_of(bucket, parameter, kind)
        self.exists = flat_values is not None
        if flat_values is not None:
            flat, first = flat_values
            self._flat = flat
            low, high = max(start, first), min(stop, first + flat.numel())
            self.local, self._start = flat.detach()[low - first : max(high, low) - first], low - start

    def whole(self) -> Tensor:
        """Return a copy of the whole values in the parameter's shape. Collective over the axis that shards them."""
        shape, device = self._parameter.shape, self._device
        flat = torch.zeros(shape.numel(), dtype=self.local.dtype, device=device)
        flat[self._start : self._start + self.local.numel()] = self.local.to(device)
        if (axis := self._axis) is not None:
            axis.all_reduce(flat)  # each element is held by one rank
        return flat.view(shape)

    @torch.no_grad()
    def assign(self, value: Tensor) -> None:
        """Set the whole values, which are equal on every replica. Collective if they are weights."""
        flat = value.to(self.local.device, self.local.dtype).reshape(-1)
        self.local.copy_(flat[self._start : self._start + self.local.numel()])
        if self._kind == GRADIENT and self._bucket is not None and self._bucket.gradients is not None:
            self._bucket.gradient_of(self._parameter).copy_(flat.view(self._parameter.shape))  # ``.grad`` shows all
        self.written()

    @torch.no_grad()
    def assign_local(self, value: Tensor) -> None:
        """Set this rank's part. Collective if the values are weights."""
        self.local.copy_(value.reshape(-1))
        self.written()

    def written(self) -> None:
        """Copy written master weights to the weights that the model computes with; step with a written gradient.

        Collective if the values are weights.
        """
        if self._bucket is None or self._data_axis is None:
            return
        if self._kind == GRADIENT and not self._data_axis.stepped:
            self._data_axis.reducer.give(self._parameter)
        if self._kind != WEIGHTS:
            if self._kind != GRADIENT:
                self._data_axis.stepper.keep_state(self._bucket, self._kind, self._flat)
            return
        if self._bucket.trained:
            self._bucket.update()
        if (pending := self._bucket.publish()) is not None:
            pending.wait()
        self._data_axis.changed({self._bucket: [self._bucket.span(self._parameter)]})

    @property
    def _axis(self) -> Axis | None:
        """The axis over which the values are sharded."""
        assert self._bucket is not None
        holds_all = self._kind == WEIGHTS and not (self._bucket.trained or self._bucket.partitioned)
        return self._bucket.axis if self._bucket.sharded and not holds_all else None

    @property
    def _device(self) -> torch.device:
        assert self._data_axis is not None
        return self._data_axis.device
