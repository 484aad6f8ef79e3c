"""What the engine of a plain module begins with: its optimizer, what replicas have in common, dropout's key."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ..grid import Grid, layout_of
from ..grid.nest import map_tensors
from ..grid.random import Dropout, DropoutState
from ..zero.stepped import PassesOptimizer


class ModuleOptimizer(PassesOptimizer):
    """The engine's optimizer: for learning-rate schedules, for a look at its state, and for ``zero_grad``.

    Attributes:
        next: what the engine's next step multiplies gradients by, and which parameters stand still.
    """

    next: tuple[float, Iterable[Tensor]] | None = None

    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """The engine calls it.

        Raises:
            RuntimeError: somebody else does, so that gradients are neither reduced nor divided.
        """
        if self.next is None:
            raise RuntimeError("the engine reduces, clips and steps: call engine.step(), not optimizer.step()")
        scale, without = self.next
        self.next = None
        self.apply(scale, set(without))


def bind_dropout(module: nn.Module, seed: int) -> DropoutState | None:
    """The state that keys the masks of the module's ``triax`` dropouts; None where it has none."""
    found = [(name, part) for name, part in module.named_modules() if isinstance(part, Dropout)]
    state = DropoutState(seed)
    for name, part in found:
        part.bind(name, state)
    return state if found else None


def number_samples(state: DropoutState, inputs: Any, first: int, step: int) -> None:
    """Which samples of the global batch these inputs are, from ``first`` on: that keys the masks, on every grid."""
    tensors: list[Tensor] = []
    map_tensors(tensors.append, inputs)
    state.step = step
    state.samples = range(first, first + tensors[0].shape[0]) if tensors and tensors[0].dim() else None


@torch.no_grad()
def share(module: nn.Module, grid: Grid, laid_out: set[nn.Parameter]) -> None:
    """Every replica takes what the first one has, and every tensor rank what is whole of the first one's.

    Not the parameters that are laid out: those replicas take from each other when they are.
    """
    for tensor in dict.fromkeys([*module.parameters(), *module.buffers()]):
        if tensor.device != grid.device:
            continue  # an error, told on every rank where parameters are laid out
        axes = [] if layout_of(tensor).sharded else [grid.tensor]
        if not (isinstance(tensor, nn.Parameter) and tensor in laid_out):
            axes.append(grid.data)
        for axis in axes:
            if axis.size > 1:
                whole = tensor.detach().contiguous()
                axis.broadcast(whole)
                tensor.data.copy_(whole)


def describe(value: Any) -> str:
    """What is no loss, for messages."""
    if not isinstance(value, Tensor):
        return f"a {type(value).__name__}"
    return f"one of shape {tuple(value.shape)}{'' if value.requires_grad else ' without a graph'}"
