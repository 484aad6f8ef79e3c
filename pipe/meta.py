"""A model from the meta device: placeholders first, then its values, one layer at a time.

A placeholder is a parameter of the right shape that holds one element, NaN: what reads it is seen, and so is what
wrote to it. It is the same Python object when its values have come, so that parameter groups made before still
mean it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ..grid import layout_of

Put = Callable[[nn.Parameter, Tensor], bool]


class Placeholders:
    """The parameters of this rank whose values are still to come.

    Args:
        build: makes the layer at a place of the list, whole and with its initial values.
    """

    def __init__(self, build: Callable[[int], nn.Module]) -> None:
        self._build = build
        self._nothing: dict[nn.Parameter, Tensor] = {}  # the one element that each of them shows
        self._sources: set[int] = set()

    def __bool__(self) -> bool:
        return bool(self._sources)

    def replace(self, source: int, layer: nn.Module, device: torch.device) -> None:
        """Put placeholders into a layer that was built on the meta device."""
        self._sources.add(source)
        memo: dict[nn.Parameter, nn.Parameter] = {}  # a parameter may hang in several places of its layer
        for module in layer.modules():
            for name, old in module._parameters.items():
                if old is not None and old.is_meta:
                    if old not in memo:
                        nothing = torch.full((), _nothing(old.dtype), dtype=old.dtype, device=device)
                        memo[old] = nn.Parameter(nothing.expand(old.shape), requires_grad=old.requires_grad)
                        memo[old].__dict__.update(old.__dict__)
                        self._nothing[memo[old]] = nothing
                    module._parameters[name] = memo[old]

    def keep(self, parameters: Iterable[nn.Parameter], sources: Iterable[int]) -> None:
        """Forget those of layers that went to another rank."""
        kept = set(parameters)
        self._nothing = {p: nothing for p, nothing in self._nothing.items() if p in kept}
        self._sources &= set(sources)

    def disturbed(self, parameters: Iterable[nn.Parameter]) -> str | None:
        """The name of a placeholder that somebody gave values, or replaced: they would be lost; None if none was."""
        present = set(parameters)
        for parameter, nothing in self._nothing.items():
            same = not parameter.numel() or parameter.data_ptr() == nothing.data_ptr()
            written = nothing.item() == nothing.item() and nothing.item() != _nothing(nothing.dtype)  # NaN is not NaN
            if parameter not in present or not same or written:
                return layout_of(parameter).name
        return None

    def fill(self, layers: nn.ModuleDict, put: Put) -> None:
        """Build one layer after the other, hand its values out, and drop it before the next is built."""
        wanted: dict[int, dict[str, nn.Parameter]] = {source: {} for source in sorted(self._sources)}
        for parameter in self._nothing:
            # A tied parameter goes by the layer that owns it, which need not run on this rank.
            _, home, attribute = layout_of(parameter).name.split(".", 2)
            wanted.setdefault(int(home), {})[attribute] = parameter
        for source, parameters in wanted.items():
            layer = self._build(source)
            with torch.no_grad():
                for attribute, parameter in parameters.items():
                    value = layer.get_parameter(attribute).detach()
                    if not put(parameter, value):
                        parameter.data = value
                    del value
            if source in self._sources:
                _adopt(layers[str(source)], layer)
            del layer
        self._nothing, self._sources = {}, set()


def _nothing(dtype: torch.dtype) -> float:
    """What a parameter without values shows."""
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return 0 if dtype == torch.bool else torch.iinfo(dtype).min


def _adopt(hollow: nn.Module, layer: nn.Module) -> None:
    """Take from a built layer what is on the meta device in its twin: buffers, and tensors kept as plain attributes."""
    twins = dict(layer.named_modules())
    for name, module in hollow.named_modules():
        for mine, theirs in ((module._buffers, twins[name]._buffers), (vars(module), vars(twins[name]))):
            for key, value in mine.items():
                if key not in ("_parameters", "_buffers", "_modules") and _on_meta(value):
                    mine[key] = theirs[key]


def _on_meta(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.is_meta
    if isinstance(value, (tuple, list)):
        return any(map(_on_meta, value))
    return isinstance(value, dict) and any(map(_on_meta, value.values()))
