"""Weights of units under ZeRO stage 3: gathered as long as a pass uses a unit, and released after.

use         begins                                          ends
forward     its forward begins                              its forward ends
backward    the backward pass reaches one of its outputs    the gradients of its inputs are there, or the pass ends
held        its forward ends, and one of                    the backward pass ends
            - the options keep weights gathered
            - it is the module itself
            - its outputs are of unknown types, so that nothing marks the begin of its backward
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from ...base.torch_private import in_transform
from ..layer_gather import ParameterGatherer
from ..managed import is_released
from .units import unit_names


class UnitWeights:
    """Weights of the units of a module, and the passes that use them.

    Args:
        units: the units and their names, as ``find_units`` returns them.
        gatherer: gathers the weights of the units; it treats each unit as a layer.
        keep: keep weights gathered from the first forward pass of a step until ``release_all``.

    Attributes:
        gatherer, keep: as given.
        modules, names: the units, and their names in messages.
        running: units whose forward runs, the outermost first; pushed by the caller, popped by ``end_forward``.
        in_backward: units whose backward runs; added by the caller, removed by ``end_backward`` or ``release_all``.
    """

    def __init__(self, units: Sequence[tuple[str, nn.Module]], gatherer: ParameterGatherer, keep: bool) -> None:
        self.gatherer, self.keep = gatherer, keep
        self.modules, self.names = [module for _, module in units], unit_names(units)
        self.running: list[int] = []
        self.in_backward: set[int] = set()
        self._held: set[int] = set()
        # Of each unit, with all that is in it: names of its parameters, and the module dicts that hold them.
        self._parameters = [
            [
                (f"{path}.{key}".lstrip("."), part._parameters, key, parameter)
                for path, part in unit.named_modules(prefix=name)
                for key, parameter in part._parameters.items()
                if parameter is not None
            ]
            for name, unit in units
        ]

    def gather(self, unit: int) -> None:
        """Gather a unit's weights, and wait for them."""
        self.gatherer.start_gather(unit)
        self.gatherer.wait(unit)

    def end_forward(self, hold: bool) -> None:
        """Note that the innermost forward has ended; ``hold``: its unit stays gathered until ``release_all``."""
        unit = self.running.pop()
        if hold:
            self._held.add(unit)
        self.release_unused(unit)

    def end_backward(self, unit: int) -> None:
        """Note that a unit's backward has ended."""
        self.in_backward.discard(unit)
        self.release_unused(unit)

    def release_unused(self, unit: int) -> None:
        """Release a unit's weights, except weights that another unit still uses."""
        using = {*self._held, *self.running, *self.in_backward}
        if unit not in using:
            self.gatherer.release_layer(unit, using)

    def release_all(self) -> None:
        """Release the weights of all units."""
        for unit in range(len(self.names)):
            self.gatherer.release_layer(unit)
        self._held.clear()
        self.in_backward.clear()

    def transform(self, unit: int) -> str | None:
        """Return the function of ``torch.func`` under which a unit runs. Marks in the graph do not work there."""
        if in_transform():
            return "a transform of torch.func (grad, vmap, jacrev, ...) ran"
        if not self.running and any(owner.get(key) is not p for _, owner, key, p in self._parameters[unit]):
            return "torch.func.functional_call replaced parameters of"
        return None

    def require_whole(self, unit: int, transform: str) -> None:
        """Refuse to do something with a unit whose parameters are released.

        Args:
            unit: number of the unit.
            transform: what is done with it: the beginning of the message.
        """
        released = next((name for name, _, _, p in self._parameters[unit] if is_released(p)), None)
        if released is not None:
            raise RuntimeError(
                f"{transform} {self.names[unit]} while stage 3 of ZeRO has released its parameters ({released}, ...), "
                "so that they and all that is computed from them would be NaN: do it, and the backward pass of its "
                "result, on every rank within triax.zero.gathered(module)"
            )
