"""Setup of a plain module's engine: its optimizer, and equal weights on all replicas."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor, nn

from ...grid import Grid, layout_of
from ...zero.managed import is_released
from ...zero.modules.module_optimizer import ZeroModuleOptimizer


class ModuleOptimizer(ZeroModuleOptimizer):
    """Optimizer of a ``ModuleEngine``, over ZeRO's shards, with the interface of a torch optimizer.

    Users and learning-rate schedules read and set its parameter groups and state, and call ``zero_grad``. Only the
    engine may call ``step``.
    """

    _next: tuple[float, Collection[Tensor]] | None = None  # arguments of the engine's ``update``

    def update(self, factor: float, without: Collection[Tensor]) -> None:
        """Run the optimizer with the reduced gradients times ``factor``. Collective.

        The parameters in ``without`` are not updated. This method calls ``step``, because learning-rate schedules and
        other libraries wrap ``step``.
        """
        self._next = factor, without
        self.step()

    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Run the optimizer. Only ``update`` calls this method.

        Raises:
            RuntimeError: if other code calls it, because the gradients would be neither reduced nor divided.
        """
        if self._next is None:
            raise RuntimeError(
                "the engine has to reduce and clip the gradients before the optimizer steps: call engine.step(), not "
                "optimizer.step()"
            )
        factor, without = self._next
        self._next = None
        self.apply(factor, set(without))


@torch.no_grad()
def broadcast_weights(module: nn.Module, grid: Grid, laid_out: set[nn.Parameter]) -> None:
    """Broadcast parameters and buffers from the first replica; along the tensor axis, only unsharded ones. Collective.

    Args:
        module: the module.
        grid: the grid.
        laid_out: parameters that are not broadcast over the replicas here, because ZeRO does it when it makes buckets.
    """
    for tensor in dict.fromkeys([*module.parameters(), *module.buffers()]):
        if tensor.device != grid.device or is_released(tensor):
            continue  # an error, told on every rank where parameters are laid out
        layout = layout_of(tensor)
        axes = [] if layout.sharded else [grid.tensor]
        if not (isinstance(tensor, nn.Parameter) and tensor in laid_out):
            axes.append(grid.axis(layout.replicas))
        for axis in axes:
            if axis.size > 1:
                whole = tensor.detach().contiguous()
                axis.broadcast(whole)
                tensor.data.copy_(whole)


def describe_loss(value: Any) -> str:
    """Describe a value that is not a loss, for messages."""
    if not isinstance(value, Tensor):
        return f"a {type(value).__name__}"
    return f"one of shape {tuple(value.shape)}{'' if value.requires_grad else ' without a graph'}"
