"""Encoding of plain Python values in JSON, and decoding: also tuples, sets, keys that are no text, tensors. No pickle.

A value of a type that JSON does not have becomes a dict with one key that begins with "$": {"$tuple": [1, 2]}.
"""

from __future__ import annotations

import json
import math
from collections import Counter, deque
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .files import parse_json

_DTYPES = {str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)}
# How to make the value of a key that begins with "$": from text, or from a list of values.
_FROM_TEXT: dict[str, Callable[[str], Any]] = {"$float": float, "$dtype": _DTYPES.__getitem__, "$device": torch.device}
_PLAIN = frozenset({str, int, bool, type(None)})  # types of most values of a list: JSON has them
_FROM_LIST: dict[str, Callable[[list[Any]], Any]] = {"$tuple": tuple, "$set": set, "$deque": deque}


def encode(value: Any, put: Callable[[Tensor], str] | None = None, where: str = "client_state") -> Any:
    """Return a value as JSON can hold it.

    Args:
        value: None, numbers, text, and lists, tuples, sets and dicts of these; tensors and arrays.
        put: stores a tensor and returns its name; None: only tensors of one number are allowed.
        where: the name of the value, for messages.

    Raises:
        TypeError: a value of another type.
    """
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, np.generic):
        return encode(value.item(), put, where)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"$float": repr(float(value))}
    if isinstance(value, (Tensor, np.ndarray)):
        return _array(value, put, where)
    if isinstance(value, (torch.dtype, torch.device)):
        return {"$dtype" if isinstance(value, torch.dtype) else "$device": str(value)}
    if isinstance(value, dict):
        pairs = [(key, encode(each, put, f"{where}[{key!r}]")) for key, each in value.items()]
        if isinstance(value, Counter) or not all(isinstance(key, str) and key[:1] != "$" for key in value):
            title = "$counter" if isinstance(value, Counter) else "$dict"
            return {title: [[encode(key, None, f"a key of {where}"), each] for key, each in pairs]}
        return dict(pairs)
    kinds = {tuple: "$tuple", set: "$set", frozenset: "$set", deque: "$deque"}
    if isinstance(value, (list, tuple, set, frozenset, deque)):
        items = [each if type(each) in _PLAIN else encode(each, put, f"{where}[{i}]") for i, each in enumerate(value)]
        kind = next((name for cls, name in kinds.items() if isinstance(value, cls)), None)
        return items if kind is None else {kind: items}
    raise TypeError(
        f"{where} is a {type(value).__name__}, which JSON cannot hold, and nothing is pickled, because "
        "reading a pickle could run code. "
        "Give numbers, text, tensors, and lists, tuples, sets and dicts of these"
    )


def decode(value: Any, get: Callable[[str], Tensor] | None = None) -> Any:
    """Return the value that ``encode`` was given.

    Args:
        value: read from JSON.
        get: returns the tensor of a name.

    Raises:
        ValueError: ``encode`` makes no such value.
    """
    if isinstance(value, list):
        return [each if type(each) in _PLAIN else decode(each, get) for each in value]
    if not isinstance(value, dict):
        return value
    first: tuple[str, Any] = next(iter(value.items())) if len(value) == 1 else ("", None)
    kind, inside = first
    if kind[:1] != "$":
        return {key: decode(each, get) for key, each in value.items()}
    if kind in _FROM_TEXT:
        return _FROM_TEXT[kind](inside)
    if kind in ("$tensor", "$array"):
        if get is None:
            raise ValueError(f"{inside} is a tensor, but these values are stored as JSON without tensors")
        return get(inside) if kind == "$tensor" else get(inside).numpy()
    if kind == "$number":
        number = torch.tensor(decode(inside[1]), dtype=_DTYPES[inside[0]])
        return number.reshape(inside[2]) if len(inside) > 2 else number
    if kind in ("$dict", "$counter"):
        pairs = {decode(key): decode(each, get) for key, each in inside}
        return Counter(pairs) if kind == "$counter" else pairs
    if kind not in _FROM_LIST:
        raise ValueError(f"a value has the unknown kind {kind}: a later triax wrote the file, or it is damaged")
    return _FROM_LIST[kind](decode(inside, get))


def dumps(value: Any, where: str) -> bytes:
    """Return a value as JSON text; ``where`` is its name in the error about a value of another type."""
    return json.dumps(encode(value, None, where), separators=(",", ":"), allow_nan=False).encode()


def loads(text: bytes) -> Any:
    """Return the value of which ``dumps`` made a text. A named tuple comes back as a tuple."""
    return decode(parse_json(text))


def _array(value: Any, put: Callable[[Tensor], str] | None, where: str) -> Any:
    if isinstance(value, np.ndarray):
        if value.dtype.kind not in "biuf":
            raise TypeError(f"{where} is an array of {value.dtype}, which JSON cannot hold: convert it to numbers")
        return {"$array": _put(torch.from_numpy(np.ascontiguousarray(value)), put, where)}
    if (value.dim() == 0 or (put is None and value.numel() == 1)) and not value.is_complex():
        number = [str(value.dtype), encode(value.item(), None, where)]
        return {"$number": [*number, list(value.shape)] if value.dim() else number}
    return {"$tensor": _put(value, put, where)}


def _put(tensor: Tensor, put: Callable[[Tensor], str] | None, where: str) -> str:
    if put is None:
        raise TypeError(f"{where} is a tensor of shape {tuple(tensor.shape)}, but JSON holds only single numbers")
    return put(tensor.detach())
