"""Names of adapters' factors, and weights merged with them: W + s B A, or m (W + s B A) / |W + s B A| with DoRA."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor

from ...tensor_parallel.lora_adapter import named_in, set_of
from .names import Entry

_FACTOR = re.compile(r"(?P<layer>.+)\.lora\.(?P<part>[^.]+)\.(?P<factor>A|B|magnitude)")
Merge = Callable[[Tensor], Tensor]


def is_factor(name: str) -> bool:
    """Return True for the name of an adapter's factor, such as ``layers.1.attention.kv.lora.v_proj.A``."""
    return _FACTOR.fullmatch(name) is not None


def set_of_factor(name: str) -> str:
    """Return the name of the set of adapters to which a factor belongs."""
    match = _FACTOR.fullmatch(name)
    assert match is not None
    return set_of(match["part"])


def layer_of(name: str, layers: Mapping[str, tuple[str, ...]]) -> tuple[str, str]:
    """Return transformers' name of the layer that a factor adapts, and which factor it is: "A", "B" or "magnitude".

    Args:
        name: triax's name of the factor.
        layers: triax's name of a layer -> transformers' names of the layers that it is. Others keep their name.
    """
    match = _FACTOR.fullmatch(name)
    assert match is not None
    own, part = match["layer"], match["part"].partition("@")[0]
    return next((layer for layer in layers.get(own, ()) if _last(layer) == part), own), match["factor"]


def merges(
    name: str, entry: Entry, factors: Mapping[str, Tensor], scalings: Mapping[str, float], transposed: set[str]
) -> list[Merge | None]:
    """Return functions that merge the tensors of transformers' model that one parameter is with their adapters.

    Args:
        name: triax's name of the parameter.
        entry: transformers' tensors of it.
        factors: triax's name -> whole factor.
        scalings: name of each set of adapters to merge -> factor of its products.
        transposed: names of transformers' layers that keep their weight as (inputs, outputs).

    Returns:
        For each tensor, a function from it, in the parameter's orientation, to the merged one; or None if no adapter
        changes it.
    """
    own, merge_steps = name.removesuffix(".weight"), list[Merge | None]()
    for theirs in entry.theirs:
        layer = theirs.removesuffix(".weight")
        flipped, steps = layer in transposed and not entry.transposed, list[Merge]()
        for adapters, scaling in scalings.items() if name.endswith(".weight") else ():
            keys = [f"{own}.lora.{named_in(adapters, part)}" for part in (_last(layer), _last(own))]
            key = next((key for key in keys if f"{key}.A" in factors), None)
            if key is not None:
                a, b, magnitude = factors[f"{key}.A"], factors[f"{key}.B"], factors.get(f"{key}.magnitude")
                steps.append(partial(merged, a, b, magnitude, scaling, flipped))
        merge_steps.append(partial(_one_by_one, steps) if steps else None)
    return merge_steps


def _one_by_one(steps: list[Merge], weight: Tensor) -> Tensor:
    for step in steps:
        weight = step(weight)
    return weight


def merged(a: Tensor, b: Tensor, magnitude: Tensor | None, scaling: float, transposed: bool, weight: Tensor) -> Tensor:
    """Return a weight (N, K), or (K, N) if ``transposed``, merged with an adapter: computed in fp32 at least."""
    wide = torch.promote_types(a.dtype, torch.float32)
    product = b.to(wide) @ a.to(wide) * scaling
    if magnitude is None:
        return (weight + (product.t() if transposed else product)).to(weight.dtype)
    weight_sum = (weight.t() if transposed else weight) + product
    weight_sum = (magnitude / torch.linalg.vector_norm(weight_sum, dim=1))[:, None] * weight_sum
    return (weight_sum.t() if transposed else weight_sum).to(weight.dtype)


def _last(name: str) -> str:
    return name.rpartition(".")[2]
