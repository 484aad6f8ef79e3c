"""Nests of tensors: tuples, lists and dicts of tensors, as models take and return them."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

# Values that hold no tensors.
_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)


def map_tensors(function: Callable[[Tensor], Any], value: Any, exact: bool = False) -> Any:
    """Return a copy of a nest in which each tensor is replaced by ``function(tensor)``; other values stay as they are.

    Args:
        function: called with each tensor, in order.
        value: the nest.
        exact: do not look inside objects of subclasses of tuple, list and dict (a model's outputs, a KV cache), except
            named tuples. If False, the tensors of a copy of them are replaced too.
    """
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, PackedSequence):
        data, sizes, *indices = value  # the sizes stay on the CPU
        return PackedSequence(function(data), sizes, *map_tensors(function, indices))
    if isinstance(value, (tuple, list)):
        named = hasattr(value, "_fields")
        if exact and not named and type(value) not in (tuple, list):
            return value
        items = [map_tensors(function, item, exact) for item in value]
        return type(value)(*items) if named else type(value)(items)
    if type(value) is dict:
        return {key: map_tensors(function, item, exact) for key, item in value.items()}
    if isinstance(value, dict) and not exact:
        mapped = copy.copy(value)
        for key, item in value.items():
            mapped[key] = map_tensors(function, item, exact)
        return mapped
    return value


def tensors_of(value: Any, exact: bool = False) -> list[Tensor]:
    """Return the tensors of a nest, in the order of ``map_tensors``."""
    found: list[Tensor] = []

    def collect(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor  # some classes, such as PackedSequence, are made of nothing else

    map_tensors(collect, value, exact)
    return found


def visit_tensors(function: Callable[[Tensor], object], value: Any) -> bool:
    """Call a function with each tensor of a nest, also of mappings and dataclasses.

    Returns:
        True if the function was called with every tensor of the nest. False if the nest contains an object of another
        class, in which further tensors may be.
    """
    if isinstance(value, Tensor):
        function(value)
        return True
    inside: Iterable[Any]
    if isinstance(value, Mapping):
        inside = value.values()
    elif isinstance(value, (tuple, list)):
        inside = value
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        inside = [getattr(value, field.name) for field in dataclasses.fields(value)]
    else:
        return isinstance(value, _PLAIN)
    seen = [visit_tensors(function, item) for item in inside]  # visits all of them, also behind one that is unknown
    return all(seen)
