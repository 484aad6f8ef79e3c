"""Tied layers and weights of a list of layers: entries that are one layer, and weights that several stages hold."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from ..grid import layout_of
from .spec import LayerSpec, TiedLayerSpec

Layer = LayerSpec | nn.Module | Callable[[Any], Any]


@dataclass(frozen=True)
class Tie:
    """Weights that several stages hold.

    Attributes:
        key: name of the tie.
        stages: the stages that hold them, ascending.
    """

    key: str
    stages: tuple[int, ...]


def sources(layers: Sequence[Layer]) -> list[int]:
    """Return for each entry the index of the first entry that is the same layer: its own, unless tied or listed twice.

    Raises:
        TypeError: an entry is not a layer.
        ValueError: the list is empty, specs of one key differ, or a module has no values.
    """
    indices = []
    seen: dict[Any, int] = {}
    for index, entry in enumerate(layers):
        if not callable(entry) and not isinstance(entry, LayerSpec):
            raise TypeError(f"layer {index} is a {type(entry).__name__}: give a LayerSpec, an nn.Module or a function")
        identity: Any = index
        if isinstance(entry, TiedLayerSpec):
            identity = (entry.key, entry.cls)
            home = layers[seen.get(identity, index)]
            assert isinstance(home, TiedLayerSpec)
            if (home.args, home.kwargs) != (entry.args, entry.kwargs):
                raise ValueError(
                    f"layers {seen[identity]} and {index} have the key {entry.key!r} and are one layer, but their "
                    f"arguments differ: {home} and {entry}. Give them equal arguments, or different keys"
                )
        elif isinstance(entry, nn.Module):
            identity = ("module", id(entry))
            if any(tensor.is_meta for tensor in (*entry.parameters(), *entry.buffers())):
                raise ValueError(
                    f"layer {index}, a {type(entry).__name__}, was built on the meta device and has no values: list "
                    "LayerSpec(cls, ...) and pass device='meta' to PipelineModule"
                )
        indices.append(seen.setdefault(identity, index))
    if not indices:
        raise ValueError("the list of layers is empty: give PipelineModule at least one layer")
    return indices


def find_ties(
    layers: Sequence[Layer], sources: Sequence[int], stages: Sequence[int]
) -> tuple[list[Tie], dict[tuple[int, str], tuple[str, str]]]:
    """Return the ties between stages, and for each shared parameter (source, attribute) its name and its tie's key.

    Args:
        layers: the list of layers.
        sources: for each entry, the first index of its layer (see the function ``sources``).
        stages: for each entry, its stage.
    """
    holders: dict[str, set[int]] = {}  # key -> stages
    shared: dict[tuple[int, str], tuple[str, str]] = {}
    first: dict[str, int] = {}  # TiedLayerSpec's key -> the first source
    owner: dict[int, tuple[int, str]] = {}  # id of a built module's parameter -> its first (source, attribute)
    for entry, source, stage in zip(layers, sources, stages, strict=True):
        if isinstance(entry, (LayerSpec, nn.Module)):
            holders.setdefault(f"layers.{source}", set()).add(stage)
        if isinstance(entry, TiedLayerSpec):
            home = first.setdefault(entry.key, source)
            holding = (i for i, e in enumerate(layers) if isinstance(e, TiedLayerSpec) and e.key == entry.key)
            if any(sources[i] != home for i in holding):
                for attribute in entry.tied_weight_attr:
                    name = f"layers.{home}.{attribute}"
                    shared[source, attribute] = shared[home, attribute] = (name, name)
        elif isinstance(entry, nn.Module):
            for attribute, parameter in entry.named_parameters():
                home, original = owner.setdefault(id(parameter), (source, attribute))
                if home != source:
                    name = f"layers.{home}.{original}"
                    shared[source, attribute] = shared[home, original] = (name, name)
    # A shared parameter is held by all stages of all its layers, and each layer may be listed several times.
    for (source, _), (name, _) in shared.items():
        holders.setdefault(name, set()).update(holders[f"layers.{source}"])
    return [Tie(key, tuple(sorted(held))) for key, held in holders.items() if len(held) > 1], shared


def share(owner: nn.Module, layer: nn.Module, attribute: str, home: Layer, entry: Layer) -> None:
    """Make ``layer.attribute`` the same parameter as ``owner.attribute``.

    Args:
        owner: the layer that keeps its parameter.
        layer: the layer whose parameter is replaced.
        attribute: name of the parameter in both.
        home, entry: the entries of the list from which owner and layer were built, for error messages.

    Raises:
        ValueError: one of them has no such parameter, or the shapes differ.
    """
    for module, what in ((owner, home), (layer, entry)):
        if not isinstance(getattr(module, attribute, None), Tensor):
            raise ValueError(
                f"{what} has no parameter {attribute!r} that it could share: pass tied_weight_attr= with the name of a "
                "parameter that both layers have"
            )
    theirs, ours = getattr(owner, attribute), getattr(layer, attribute)
    if layout_of(theirs).shape != layout_of(ours).shape or theirs.shape != ours.shape:
        raise ValueError(
            f"{home} and {entry} share {attribute!r}, but its shape is {tuple(theirs.shape)} in one and "
            f"{tuple(ours.shape)} in the other: give them equal shapes"
        )
    setattr(layer, attribute, theirs)


def typename(layer: Layer) -> str:
    """Return the name of the class or function, which ``partition="type:REGEX"`` matches."""
    if isinstance(layer, LayerSpec):
        return layer.typename
    return type(layer).__name__ if isinstance(layer, nn.Module) else getattr(layer, "__name__", type(layer).__name__)
