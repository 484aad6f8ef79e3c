"""Placeholders for parameters of a model that was built on the meta device: filled later, one layer at a time.

A placeholder is a parameter of the right shape that holds one element, NaN. So reads are visible in results, and
writes are detected. It stays the same Python object when it gets its values, so that parameter groups made before
remain valid.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ..grid import layout_of

Put = Callable[[nn.Parameter, Tensor], bool]


class Placeholders:
    """Parameters of this rank that have no values yet.

    Layers are named by their ``source``: their first index in the model's list of layers.

    Args:
        build: function from a source to the layer, built with its initial values.
    """

    def __init__(self, build: Callable[[int], nn.Module]) -> None:
        self._build = build
        self._elements: dict[nn.Parameter, Tensor] = {}  # parameter -> its one element
        self._sources: set[int] = set()

    def __bool__(self) -> bool:
        return bool(self._sources)

    def replace(self, source: int, layer: nn.Module, device: torch.device) -> None:
        """Replace the meta parameters of a layer by placeholders on ``device``."""
        self._sources.add(source)
        memo: dict[nn.Parameter, nn.Parameter] = {}  # a parameter may occur several times in its layer
        for module in layer.modules():
            for name, old in module._parameters.items():
                if old is not None and old.is_meta and old not in self._elements:
                    if old not in memo:
                        element = torch.full((), _placeholder_value(old.dtype), dtype=old.dtype, device=device)
                        memo[old] = nn.Parameter(element.expand(old.shape), requires_grad=old.requires_grad)
                        memo[old].__dict__.update(old.__dict__)
                        self._elements[memo[old]] = element
                    module._parameters[name] = memo[old]

    def keep(self, parameters: Iterable[nn.Parameter], sources: Iterable[int]) -> None:
        """Drop the placeholders of all parameters and layers but the given ones: the others moved to other ranks."""
        kept = set(parameters)
        self._elements = {p: element for p, element in self._elements.items() if p in kept}
        self._sources &= set(sources)

    def changed(self, parameters: Iterable[nn.Parameter]) -> str | None:
        """Return the name of a placeholder that was replaced or given values; None if there is none."""
        present = set(parameters)
        for parameter, element in self._elements.items():
            same = not parameter.numel() or parameter.data_ptr() == element.data_ptr()
            value = _placeholder_value(element.dtype) if element.is_meta else element.item()  # meta: of a dry run
            written = value == value and value != _placeholder_value(element.dtype)  # (NaN differs from itself)
            if parameter not in present or not same or written:
                return layout_of(parameter).name
        return None

    def fill(self, layers: nn.ModuleDict, put: Put) -> None:
        """Build one layer after the other, pass its values to ``put``, and free it before the next is built.

        Args:
            layers: source -> layer with placeholders, which get the values.
            put: as in ``PipelineModule.fill``.
        """
        wanted: dict[int, dict[str, nn.Parameter]] = {source: {} for source in sorted(self._sources)}
        for parameter in self._elements:
            # A tied parameter is built by the layer that owns it, which may run on another rank only.
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
                _adopt_meta_tensors(layers[str(source)], layer)
            del layer
        self._elements, self._sources = {}, set()


def _placeholder_value(dtype: torch.dtype) -> float:
    """Return the element that a placeholder of a dtype holds: NaN, or another value if the dtype has no NaN."""
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return 0 if dtype == torch.bool else torch.iinfo(dtype).min


def _adopt_meta_tensors(layer_on_meta: nn.Module, layer: nn.Module) -> None:
    """Move a built layer's buffers and tensor attributes into its twin, if the twin has them on the meta device."""
    twins = dict(layer.named_modules())
    for name, module in layer_on_meta.named_modules():
        if name not in twins:  # added to the layer after it was built, with values
            continue
        for own_tensors, theirs in ((module._buffers, twins[name]._buffers), (vars(module), vars(twins[name]))):
            for key, value in own_tensors.items():
                if key not in ("_parameters", "_buffers", "_modules") and _on_meta(value):
                    own_tensors[key] = theirs[key]


def _on_meta(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.is_meta
    if isinstance(value, (tuple, list)):
        return any(map(_on_meta, value))
    return isinstance(value, dict) and any(map(_on_meta, value.values()))
