"""Auxiliary losses and expert loads of an engine's steps, for models with a mixture of experts.

begin of a step    sum of the batch's weight and samples over all ranks       ``begin``
while it runs      layers attach their losses, and count their experts' tokens
end of a step      sum of losses and loads over all ranks, in one all-reduce   ``end``

A model without such layers costs nothing here.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..base.errors import AgreedError
from ..grid import Grid
from ..grid.agreement.agreement import totals
from ..grid.auxiliary import AuxiliaryLayer, AuxiliaryLosses

_STARVED, _PATIENCE = 0.1, 100  # of the mean load, in so many steps in a row


class AuxiliarySteps:
    """Auxiliary losses and expert loads over the steps of one engine. Collective over the pipe axis when it is made.

    Args:
        module: the module, whose layers are bound to ``state``.
        grid: the grid.
        state: the state that the layers share.

    Attributes:
        losses: name -> value of each auxiliary loss in the last step: the mean over the batch's samples, without its
            coefficient. Equal on every rank.
        loads: layer -> tokens that each expert was given in the last step. Equal on every rank.
    """

    def __init__(self, module: nn.Module, grid: Grid, state: AuxiliaryLosses) -> None:
        self._layers = {layer.name: layer for layer in module.modules() if isinstance(layer, AuxiliaryLayer)}
        self._state = state
        own_layers = [(name, layer.experts, list(layer.loss_names)) for name, layer in self._layers.items()]
        with grid.pipe.traffic.uncounted():
            # (A tied layer may be on several ranks.)
            self._known = [*{each[0]: each for rank in grid.pipe.all_gather_json(own_layers) for each in rank}.values()]
        self._size = sum(experts + len(names) for _, experts, names in self._known)
        self.losses: dict[str, float] = {}
        self.loads: dict[str, list[int]] = {}
        self._starving: dict[str, list[int]] = {name: [0] * experts for name, experts, _ in self._known}
        self._weight: float | None = None
        self.clear()

    def __bool__(self) -> bool:
        """True if the model has such layers, on any rank."""
        return bool(self._known)

    def begin(
        self,
        grid: Grid,
        loss_fn: Any,
        labels: Sequence[Any],
        samples: int,
        counts: bool,
        scale: float,
        share: Callable[[Sequence[float]], list[float]],
    ) -> None:
        """Begin a step: set the weight of a sample. Collective.

        Args:
            grid: the grid whose ranks take the step together.
            loss_fn: the loss function. Its method ``weight(labels)``, if it has one, returns a microbatch's weight.
                Otherwise each microbatch weighs 1.
            labels: labels of this rank's microbatches.
            samples: number of samples of these microbatches.
            counts: True if this rank counts: one rank for each part of the batch.
            scale: factor of the loss.
            share: sums numbers over replicas outside of the grid.
        """
        weigh = getattr(loss_fn, "weight", None)  # of a torch loss it may be a tensor, the weights of the classes
        weights = [weigh(label) if callable(weigh) else 1.0 for label in labels] if counts else []
        # A microbatch of named losses weighs 1.
        weights = [1.0 / grid.context.size if isinstance(weight, Mapping) else weight for weight in weights]
        counted = samples if counts and grid.context.is_first else 0
        self._weight, number = share(totals(grid, [sum(weights, 0.0), float(counted)]))
        self._state.weight, self._state.scale = self._weight / max(number, 1.0), scale
        self.clear()

    def require_weight(self, weight: float) -> None:
        """Check the weight that ``begin`` found against the weight of the losses that were then computed.

        Raises:
            AgreedError: on every rank: they differ.
        """
        if self._weight is not None and abs(weight - self._weight) > 1e-6 * abs(weight):
            raise AgreedError(
                "the model has auxiliary losses, whose gradients need the weight of the batch before the first "
                f"backward pass. It was assumed to be {self._weight:g}, but the losses that loss_fn returned have the "
                f"weight {weight:g}: give loss_fn a method weight(labels) that returns the weight of the pair (sum, "
                "weight), as triax.models.NextTokenLoss has, or return a mean"
            )

    def clear(self) -> None:
        """Drop the values and loads that were counted so far."""
        self._state.values = {}
        for layer in self._layers.values():
            layer.loads = None
        self._passes = 0
        self._values_before: dict[str, Tensor] = {}
        self._loads_before: dict[str, Tensor] = {}

    def begin_forward(self, passes: int) -> None:
        """Note what was counted before a forward pass of a plain module.

        Args:
            passes: number of backward passes before it, in all steps.
        """
        if passes != self._passes:
            self._passes, self._values_before = passes, dict(self._state.values)
            self._loads_before = {name: layer.loads for name, layer in self._layers.items() if layer.loads is not None}

    def discard(self, passes: int) -> None:
        """Drop what was counted for backward passes of this step, because their gradients are discarded.

        Args:
            passes: number of backward passes so far. Forward passes after the last of them stay counted.
        """
        if passes != self._passes:
            self.clear()
        for name, value in self._values_before.items():
            self._state.values[name] = self._state.values[name] - value
        for name, before in self._loads_before.items():
            loads = self._layers[name].loads
            assert loads is not None  # they only grow, until ``clear``
            self._layers[name].loads = loads - before
        self._passes, self._values_before, self._loads_before = passes, {}, {}

    def local_sums(self, device: torch.device) -> Tensor:
        """Return this rank's loads and sums of losses in the step so far, in one tensor, float64, for ``end``."""
        sums = torch.zeros(self._size, dtype=torch.float64, device=device)
        start = 0
        for name, experts, names in self._known:
            layer = self._layers.get(name)
            if layer is not None and layer.loads is not None:
                sums[start : start + experts] = layer.loads
            start += experts
            for index, loss in enumerate(names):
                if loss in self._state.values:
                    sums[start + index] = self._state.values[loss]
            start += len(names)
        return sums

    def end(self, grid: Grid, sums: Tensor, weight: float, skipped: bool, report: bool) -> None:
        """End a step: sum its losses and loads, and let the layers move their biases. Collective.

        Args:
            grid: the grid whose ranks took the step together.
            sums: what ``local_sums`` returned, of all replicas outside of the grid too. It is overwritten.
            weight: weight of the batch, by which the losses are divided.
            skipped: the step was skipped: the layers then keep their biases and loads.
            report: this rank logs a warning if an expert starves.
        """
        grid.world.all_reduce(sums)
        values, start = sums.tolist(), 0
        for name, experts, names in self._known:
            own = sums[start : start + experts].long()
            self.loads[name] = [int(load) for load in values[start : start + experts]]
            start += experts
            self.losses |= {loss: value / weight for loss, value in zip(names, values[start:], strict=False)}
            start += len(names)
            if name in self._layers and not skipped:
                self._layers[name].end_step(own)
            self._warn(name, self.loads[name], report)
        self.clear()

    def _warn(self, name: str, loads: Sequence[int], report: bool) -> None:
        """Log a line for each expert that starves, once until it recovers."""
        steps, mean = self._starving[name], sum(loads) / len(loads)
        for expert, load in enumerate(loads):
            steps[expert] = steps[expert] + 1 if load < _STARVED * mean else 0
            if steps[expert] == _PATIENCE and report:
                logging.getLogger("triax").warning(
                    "expert %d of %s starves: in each of the last %d steps it was given less than %.0f %% of the mean "
                    "load (%d of %.0f tokens in the last one). Raise balance_coefficient, or use balance='bias'",
                    *(expert, name, _PATIENCE, 100 * _STARVED, load, mean),
                )


def bind_auxiliary(module: nn.Module) -> AuxiliaryLosses:
    """Bind a plain module's layers with auxiliary losses to one state, and return it."""
    state = AuxiliaryLosses()
    for name, layer in module.named_modules():
        if isinstance(layer, AuxiliaryLayer):
            layer.bind(name, state)
    return state
