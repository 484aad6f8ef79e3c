"""Messages between stages: nests of tuples, lists and dicts of tensors <-> a flat list of tensors and its schema.

A schema is plain data with all that a receiver needs: the nest, and each tensor's shape, dtype and requires_grad.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

Node = tuple[str, Any]


class TensorSpec(NamedTuple):
    """Shape and dtype of one tensor of a message. ``grad`` is True if the receiver sends back a gradient for it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    grad: bool

    def __repr__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}"


@dataclass(frozen=True)
class Schema:
    """Structure of a message: the nest, in which each tensor is its index, and the specs of the tensors."""

    nest: Node
    tensors: tuple[TensorSpec, ...]

    @property
    def gradients(self) -> tuple[TensorSpec, ...]:
        """Specs of the tensors for which a gradient is sent back."""
        return tuple(spec for spec in self.tensors if spec.grad)

    def encode(self) -> bytes:
        """Return the schema as bytes, to be sent."""
        rows = [[list(spec.shape), str(spec.dtype).removeprefix("torch."), spec.grad] for spec in self.tensors]
        return json.dumps([self.nest, rows]).encode()

    @classmethod
    def decode(cls, data: bytes | str) -> Schema:
        """Read what ``encode`` returns."""
        nest, rows = json.loads(data)
        specs = tuple(TensorSpec(tuple(shape), getattr(torch, dtype), grad) for shape, dtype, grad in rows)
        return cls(_frozen(nest), specs)

    def __str__(self) -> str:
        return repr(_decode(self.nest, self.tensors))


Flat = tuple[list[Tensor], Schema]


def flatten(value: Any) -> Flat:
    """Return the tensors of a nest in order, and the schema with which ``unflatten`` rebuilds it.

    Raises:
        TypeError: it contains something other than tensors, tuples, lists, dicts (with str keys) and constants of
            JSON.
    """
    tensors: list[Tensor] = []
    nest = _encode(value, tensors)
    specs = tuple(TensorSpec(tuple(t.shape), t.dtype, t.requires_grad) for t in tensors)
    return tensors, Schema(nest, specs)


def unflatten(schema: Schema, tensors: list[Tensor]) -> Any:
    """Rebuild the nest from its tensors."""
    return _decode(schema.nest, tensors)


def _encode(value: Any, tensors: list[Tensor]) -> Node:
    # A node is (kind, content), so that no content can be taken for a kind.
    if isinstance(value, Tensor):
        tensors.append(value)
        return "tensor", len(tensors) - 1
    if isinstance(value, (tuple, list)):
        kind = "list" if isinstance(value, list) else "tuple"
        return kind, tuple(_encode(item, tensors) for item in value)
    if isinstance(value, dict):
        if not all(isinstance(key, str) for key in value):
            others = [key for key in value if not isinstance(key, str)]
            raise TypeError(f"a dict that is sent between stages has the keys {others}: use keys of type str")
        return "dict", tuple((key, _encode(item, tensors)) for key, item in value.items())
    if value is None or isinstance(value, (bool, int, float, str)):
        return "constant", json.dumps(value)  # as text 1, 1.0 and True differ, and nan is itself
    raise TypeError(
        f"a {type(value).__name__} cannot be sent between stages: return tensors, or tuples, lists and dicts of them"
    )


def _decode(node: Node, tensors: Sequence[Any]) -> Any:
    """Return the nest of a node, in which each tensor is replaced by the element of ``tensors`` with its index."""
    kind, content = node
    if kind == "tensor":
        return tensors[content]
    if kind == "dict":
        return {key: _decode(item, tensors) for key, item in content}
    if kind == "constant":
        return json.loads(content)
    items = [_decode(item, tensors) for item in content]
    return items if kind == "list" else tuple(items)


def _frozen(value: Any) -> Any:
    """Convert JSON's lists to tuples."""
    return tuple(map(_frozen, value)) if isinstance(value, list) else value
