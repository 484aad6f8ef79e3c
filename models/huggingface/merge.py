"""Names of adapters' factors, and their products B A, which are added to weights when a model is written merged."""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import Tensor

from .names import Entry

_FACTOR = re.compile(r"(?P<layer>.+)\.lora\.(?P<part>[^.]+)\.(?P<factor>[AB])")


def is_factor(name: str) -> bool:
    """Return True for the name of an adapter's factor, such as ``layers.1.attention.kv.lora.v_proj.A``."""
    return _FACTOR.fullmatch(name) is not None


def layer_of(name: str, layers: Mapping[str, tuple[str, ...]]) -> tuple[str, str]:
    """Return transformers' name of the layer that a factor adapts, and which factor it is: "A" or "B".

    Args:
        name: triax's name of the factor.
        layers: triax's name of a layer -> transformers' names of the layers that it is. Others keep their name.
    """
    match = _FACTOR.fullmatch(name)
    assert match is not None
    own, part = match["layer"], match["part"]
    return next((each for each in layers.get(own, ()) if _last(each) == part), own), match["factor"]


def updates(
    name: str, entry: Entry, factors: Mapping[str, Tensor], scaling: float, transposed: set[str]
) -> list[Tensor | None]:
    """Return the updates of the tensors of transformers' model that one parameter is, in the parameter's orientation.

    Args:
        name: triax's name of the parameter.
        entry: transformers' tensors of it.
        factors: triax's name -> whole factor.
        scaling: factor of the products.
        transposed: names of transformers' layers that keep their weight as (inputs, outputs).

    Returns:
        For each tensor, s B A, or None if no adapter changes it.
    """
    own, found = name.removesuffix(".weight"), list[Tensor | None]()
    for theirs in entry.theirs:
        layer = theirs.removesuffix(".weight")
        keys = [f"{own}.lora.{part}" for part in (_last(layer), _last(own))]
        key = next((key for key in keys if f"{key}.A" in factors), None) if name.endswith(".weight") else None
        if key is None:
            found.append(None)
            continue
        a, b = factors[f"{key}.A"], factors[f"{key}.B"]
        wide = torch.promote_types(a.dtype, torch.float32)
        product = b.to(wide) @ a.to(wide) * scaling
        found.append(product.t() if layer in transposed and not entry.transposed else product)
    return found


def _last(name: str) -> str:
    return name.rpartition(".")[2]
