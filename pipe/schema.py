"""Messages between stages: nests of tuples, lists and dicts of tensors <-> a flat list of tensors and its schema.

A schema is plain data with all that a receiver needs: the nest, and each tensor's shape, dtype and requires_grad.
Named tuples and transformers' outputs arrive as what they are: a schema has the names of their classes.
"""

from __future__ import annotations

import dataclasses
import enum
import importlib
import json
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

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
        return _text(self.nest, self.tensors)


Flat = tuple[list[Tensor], Schema]


def flatten(value: Any, sent: bool = True) -> Flat:
    """Return the tensors of a nest in order, and the schema with which ``unflatten`` rebuilds it.

    Args:
        value: the nest.
        sent: the nest is sent to another rank, so that each class in it must be one that can be made there.

    Raises:
        TypeError: it contains something other than tensors, tuples, named tuples, lists, dicts (with str keys),
            transformers' outputs, and constants of JSON.
    """
    tensors: list[Tensor] = []
    nest = _encode(value, tensors, sent)
    specs = tuple(TensorSpec(tuple(t.shape), t.dtype, t.requires_grad) for t in tensors)
    return tensors, Schema(nest, specs)


def unflatten(schema: Schema, tensors: list[Tensor]) -> Any:
    """Rebuild the nest from its tensors."""
    return _decode(schema.nest, tensors)


def _encode(value: Any, tensors: list[Tensor], sent: bool) -> Node:
    # A node is (kind, content), so that no content can be taken for a kind.
    if isinstance(value, Tensor):
        if sent and not _plain(value):
            raise TypeError(
                f"a {_kind(value)} cannot be sent between stages, as it would arrive as a plain tensor: return "
                "x.as_subclass(torch.Tensor), x.to_dense(), or the tensors that it consists of"
            )
        tensors.append(value)
        return "tensor", len(tensors) - 1
    if isinstance(value, (tuple, list)):
        kind = "list" if isinstance(value, list) else "tuple"
        node = kind, tuple(_encode(item, tensors, sent) for item in value)
        return node if type(value) in (tuple, list) else ("made", (_class_of(value, sent), node))
    if isinstance(value, dict):
        if not all(isinstance(key, str) for key in value):
            others = [key for key in value if not isinstance(key, str)]
            raise TypeError(f"a dict that is sent between stages has the keys {others}: use keys of type str")
        node = "dict", tuple((key, _encode(item, tensors, sent)) for key, item in value.items())
        return node if type(value) is dict else ("made", (_class_of(value, sent), node))
    if value is None or (isinstance(value, (bool, int, float, str)) and not isinstance(value, enum.Enum)):
        return "constant", json.dumps(value)  # as text 1, 1.0 and True differ, and nan is itself
    raise _unsendable(value)


def _plain(tensor: Tensor) -> bool:
    """True for a tensor that its shape, dtype and values describe."""
    usual = type(tensor) in (Tensor, nn.Parameter) or type(tensor).__module__.startswith("torch._subclasses")
    return usual and tensor.layout is torch.strided and not tensor.is_nested and not tensor.is_quantized


def _kind(tensor: Tensor) -> str:
    special = "nested " if tensor.is_nested else "quantized " if tensor.is_quantized else ""
    return f"{special or ('' if tensor.layout is torch.strided else 'sparse ')}{type(tensor).__name__}"


def _class_of(value: Any, sent: bool) -> str:
    """Return the name under which another rank finds the class of a tuple, list or dict.

    Raises:
        TypeError: the class is not one that can be made there from its elements alone.
    """
    cls = type(value)
    name = f"{cls.__module__}:{cls.__qualname__}"
    if sent and not (_makes(cls) and "<locals>" not in name and _find(name) is cls):
        raise _unsendable(value)
    return name


def _makes(cls: type) -> bool:
    """Return True for named tuples, torch's return types and sizes, ordered dicts, and outputs of transformers."""
    if issubclass(cls, tuple):
        return hasattr(cls, "_fields") or hasattr(cls, "n_fields") or cls is torch.Size
    return cls is OrderedDict or (issubclass(cls, OrderedDict) and dataclasses.is_dataclass(cls))


@cache
def _find(name: str) -> Any:
    """Return the class of this name; None if there is none."""
    module, _, path = name.partition(":")
    try:
        return reduce(getattr, path.split("."), importlib.import_module(module))
    except (ImportError, AttributeError):
        return None


def _make(name: str, items: Any) -> Any:
    """Return an object of a class, of the tuple or dict of its elements."""
    cls = _find(name)
    if not (isinstance(cls, type) and _makes(cls)):
        raise TypeError(
            f"another stage sent a {name}, and this rank has no such class: import its module on every rank"
        )
    if isinstance(items, dict):
        return cls(**items) if dataclasses.is_dataclass(cls) else cls(items)
    return cls(*items) if hasattr(cls, "_fields") else cls(items)


def _unsendable(value: Any) -> TypeError:
    return TypeError(
        f"a {type(value).__name__} cannot be sent between stages: return tensors, or tuples, lists and dicts of them. "
        "(Named tuples of a module's top level and transformers' outputs keep their class; other subclasses of tuple, "
        "list and dict would lose it)"
    )


def _decode(node: Node, tensors: Sequence[Any]) -> Any:
    """Return the nest of a node, in which each tensor is replaced by the element of ``tensors`` with its index."""
    kind, content = node
    if kind == "tensor":
        return tensors[content]
    if kind == "made":
        return _make(content[0], _decode(content[1], tensors))
    if kind == "dict":
        return {key: _decode(item, tensors) for key, item in content}
    if kind == "constant":
        return json.loads(content)
    items = [_decode(item, tensors) for item in content]
    return items if kind == "list" else tuple(items)


def _text(node: Node, tensors: Sequence[TensorSpec]) -> str:
    """Return a nest as text; a class of its own stands before its elements."""
    kind, content = node
    if kind == "made":
        return f"{content[0].rpartition('.')[2].rpartition(':')[2]}{_text(content[1], tensors)}"
    if kind == "dict":
        return "{" + ", ".join(f"{key!r}: {_text(item, tensors)}" for key, item in content) + "}"
    if kind in ("tensor", "constant"):
        return repr(_decode(node, tensors))
    inside = ", ".join(_text(item, tensors) for item in content)
    if kind == "list":
        return f"[{inside}]"
    return f"({inside},)" if len(content) == 1 else f"({inside})"


def _frozen(value: Any) -> Any:
    """Convert JSON's lists to tuples."""
    return tuple(map(_frozen, value)) if isinstance(value, list) else value
