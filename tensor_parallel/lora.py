"""LoRA: low-rank updates of frozen linear layers, sharded like the layers: the model's sets of adapters.

    plan_adapters  finds the layers that the targets name, and checks them
    add_adapters   freezes a model, quantizes its linear layers, and adds adapters to these layers
    activate       chooses the sets whose updates are added, and trained
    merge_adapters adds the updates to the weights, and removes the adapters

The update of one layer is in lora_adapter.py, the layouts of its factors in lora_layouts.py.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ..base.errors import ConfigError
from ..grid import Grid
from ..grid.agreement.agreement import agreed
from ..grid.comm.axis import Axis
from ..grid.layout import Layout, layout_of, set_layout
from .adaptable import Adaptable, is_linear, is_transposed, matrix_of
from .embedding import VocabParallelHead
from .lora_adapter import DEFAULT, Adapter, Adapters, named_in, set_of
from .lora_layouts import AdaptedLinear, FactorLayouts
from .quantized import code_layout, matrix_layout, quantize_layer

Names = Mapping[str, tuple[str, ...]]
MakeDropout = Callable[[float, Grid, bool, tuple[Tensor, int] | None], nn.Module]
ALL_LINEAR = "all-linear"
_HEAD = "lm_head"  # transformers' name of the output layer, which all-linear leaves out


@dataclass(frozen=True)
class LoraOptions:
    """Options of LoRA.

    Attributes:
        rank: r, the number of channels between A and B.
        alpha: the update is scaled by alpha / r, or by alpha / sqrt(r) with ``rslora``.
        targets: names of the layers to adapt, or the last parts of their names, such as ``q_proj``; or one regular
            expression for whole names; or ``all-linear``, all linear layers but the output layer.
        rslora: see ``alpha`` (Kalajdzievski 2023, arXiv:2312.03732).
        seed: seed of the initial weights.
        dropout: probability that training drops an element of the input of A.
        dora: train the norms of the rows of W + s B A too.
        base: format in which the weights of linear layers are kept, of nf4.py; None: as they are.
    """

    rank: int
    alpha: float
    targets: Sequence[str] | str = ALL_LINEAR
    rslora: bool = False
    seed: int = 0
    dropout: float = 0.0
    dora: bool = False
    base: str | None = None

    @property
    def scaling(self) -> float:
        """Factor of the update B A."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)

    def matching(self, name: str) -> set[str]:
        """Return the targets that match a layer's name."""
        if isinstance(self.targets, str):
            return {self.targets} if re.fullmatch(self.targets, name) else set()
        return {target for target in self.targets if name == target or name.endswith(f".{target}")}


def activate(module: nn.Module, names: Sequence[str], trains: bool) -> None:
    """Add the updates of some sets of adapters from now on, and of no others; train these alone if ``trains``."""
    for layer in module.modules():
        if isinstance(layer, Adapters):
            layer.active = tuple(names)
            for key, adapter in layer.named_children() if trains else ():
                adapter.requires_grad_(set_of(key) in names)


@torch.no_grad()
def merge_adapters(model: Any) -> None:
    """Merge the active adapters into the weights of a model, and remove all adapters. Collective.

    A weight in 4 or 8 bits becomes one in floating point. All parameters are trained from now on.
    """
    for layer in [*model.modules()]:
        numbers, adapters = layer._modules.pop("quantized", None), layer._modules.pop("lora", None)
        if numbers is None and adapters is None:
            continue
        seen = layer.weight
        value = seen.dense() if numbers is not None else seen.detach()
        if adapters is not None:
            value = adapters.merged(value.t() if is_transposed(layer) else value)
            value = value.t() if is_transposed(layer) else value
        if numbers is None:
            seen.data.copy_(value)
            continue
        parameter, name = nn.Parameter(value.contiguous()), layout_of(numbers.codes).name
        set_layout(parameter, replace(layout_of(seen), name=name.replace(".quantized.codes", ".weight")))
        del vars(layer)["weight"]
        layer._parameters["weight"] = parameter
    for parameter in model.parameters():
        parameter.requires_grad_(parameter.is_floating_point())
    del model.lora_options, model.lora_active


def add_adapters(
    model: Any,
    options: LoraOptions,
    names: Names,
    grid: Grid,
    dropout: MakeDropout,
    name: str = DEFAULT,
    axis: Axis | None = None,
) -> None:
    """Freeze a model, and add adapters to the layers that the targets name. Collective.

    Args:
        model: a module, or a ``PipelineModule``, whose layers are changed one by one (``change_layers``).
        options: rank, scaling, targets and seed. They become an entry of the model's attribute ``lora_options``,
            and ``lora_active`` has the names of the active sets: at first the first one.
        names: as for ``adapt``.
        grid: the model's grid.
        dropout: as for ``adapt``.
        name: of the set of adapters.
        axis: the axis that shards the model's layers; None: ``grid.tensor``.

    Raises:
        ConfigError: on every rank, if a target matches no layer, or one that cannot be adapted; or if the model has
            adapters of this name with other options, or a second set that cannot be added to the first.
    """
    others: dict[str, LoraOptions] = getattr(model, "lora_options", {})
    before = others.get(name)
    if before is not None:
        if before != options:
            raise ConfigError(f"the model has adapters of {before}, but lora asks for {options}: give equal options")
        return
    plan_adapters(model, options, names, grid, name, axis)
    arguments = options, names, grid, dropout, name, not others, axis
    if hasattr(model, "change_layers"):
        model.change_layers(lambda prefix, layer: adapt(layer, prefix, *arguments))
    else:
        adapt(model, "", *arguments)
    model.lora_options = {**others, name: options}
    if not others:
        model.lora_active = (name,)


def plan_adapters(
    model: Any, options: LoraOptions, names: Names, grid: Grid, name: str = DEFAULT, axis: Axis | None = None
) -> list[LayerChange]:
    """Return what ``add_adapters`` will do to this rank's layers, and change nothing. Collective.

    Args:
        model, options, names, grid, name, axis: as for ``add_adapters``.

    Raises:
        ConfigError: as ``add_adapters`` does.
    """
    others: dict[str, LoraOptions] = getattr(model, "lora_options", {})
    if not re.fullmatch(r"[\w-]+", name):
        raise ConfigError(f"{name!r} is no name of adapters: give letters, digits, _ and -")
    base = next(iter(others.values())).base if others else None
    if others and options.base not in (None, base):
        raise ConfigError(
            f"base is {options.base} for the adapters {name!r}, but the model has the adapters {[*others]} over "
            f"{base or 'weights in floating point'}: give base only with the first adapters"
        )
    layers: dict[str, nn.Module] = {"": model}
    if hasattr(model, "change_layers"):
        layers = {f"layers.{key}": layer for key, layer in model.layers.items()}
    matched, changes = set[str](), list[LayerChange]()
    with agreed(grid, ConfigError):
        for prefix, module in layers.items():
            matching, own = _changes(module, prefix, options, names, name, axis or grid.tensor)
            matched |= matching
            changes += own
    matched_anywhere = set[str]().union(*grid.world.all_gather_json(sorted(matched)))
    targets = (options.targets,) if isinstance(options.targets, str) else options.targets
    missing = [target for target in targets if target not in matched_anywhere]
    if missing:
        linear = [name for name, layer in model.named_modules() if is_linear(layer)]
        ends = dict.fromkeys(own.rpartition(".")[2] for name in linear for own in names.get(name, (name,)))
        there = any(own.rpartition(".")[2] in missing for several in names.values() for own in several)
        kind = "linear layer of its own (a tied output layer is the embedding)" if there else "layer"
        raise ConfigError(
            f"lora.targets has {', '.join(map(repr, missing))}, but no {kind} has such a name. Name layers by the ends "
            f"of their names, such as {', '.join([*ends][:12])}, or write 'all-linear'"
        )
    return changes


def adapt(
    module: nn.Module,
    prefix: str,
    options: LoraOptions,
    names: Names,
    grid: Grid,
    dropout: MakeDropout,
    name: str = DEFAULT,
    active: bool = True,
    axis: Axis | None = None,
) -> None:
    """Freeze a module's parameters, quantize its linear layers, and add adapters to those that the targets name.

    Args:
        module: a model, or one layer of a ``PipelineModule``.
        prefix: the module's name in the whole model; empty for the whole model itself.
        options: rank, scaling, targets and seed.
        names: name of a linear layer in the whole model -> its names in another library's model, one for each part
            that is fused along the outputs. A target may match these too. An adapter has the last word of such a name.
        grid: the grid.
        dropout: makes the dropout of an adapter's input: ``dropout(p, grid, tokens are sharded over the tensor axis,
            columns)``, with the columns of ``Dropout``.
        name: of the set of adapters.
        active: train it, and add its updates.
        axis: the axis that shards the layers; None: ``grid.tensor``.
    """
    axis = axis or grid.tensor
    _, changes = _changes(module, prefix, options, names, name, axis)
    for parameter_name, parameter in module.named_parameters():
        parameter.requires_grad_(parameter.requires_grad and ".lora." in f".{parameter_name}")
    for change in changes:
        if change.quantized and options.base is not None:
            quantize_layer(change.layer, change.name, options.base, axis, is_transposed(change.layer))
        if change.layouts:
            _add_set(change, options, grid, dropout, name, active, axis)


@dataclass(frozen=True)
class LayerChange:
    """Change of one layer by ``adapt``.

    Attributes:
        layer: the layer.
        name: its name in the whole model.
        quantized: its weight becomes integers.
        chosen: for each fused part of its outputs, the name of the adapter or None.
        layouts: of the factors of each part; empty: no adapter is added.
    """

    layer: Any
    name: str
    quantized: bool
    chosen: Sequence[str | None]
    layouts: Sequence[FactorLayouts]

    def factor_shapes(self, name: str, dora: bool) -> dict[str, tuple[int, ...]]:
        """Return the name and the whole shape of each factor that a set of this name adds."""
        shapes: dict[str, tuple[int, ...]] = {}
        for part, (a, b) in zip(self.chosen, self.layouts, strict=True) if self.layouts else ():
            if part is not None:
                key = f"{self.name}.lora.{named_in(name, part)}"
                shapes |= {f"{key}.A": a.shape, f"{key}.B": b.shape}
                shapes |= {f"{key}.magnitude": b.shape[:1]} if dora else {}
        return shapes


def _changes(
    module: nn.Module, prefix: str, options: LoraOptions, names: Names, name: str, axis: Axis
) -> tuple[set[str], list[LayerChange]]:
    """Return the targets that match, and what ``adapt`` will do to the layers; arguments as for ``adapt``.

    Raises:
        ValueError: a target names a layer that has no adapters, or a layer whose fused parts cannot be told apart; or
            a weight cannot be quantized.
    """
    uses = Counter(id(p) for layer in module.modules() for p in layer._parameters.values() if p is not None)
    head = getattr(module, "get_output_embeddings", lambda: None)()
    adapters = {inner for layer in module.modules() if isinstance(layer, Adapters) for inner in layer.modules()}
    matched, changes = set[str](), list[LayerChange]()
    for path, layer in module.named_modules():
        if layer in adapters:
            continue
        own = ".".join(filter(None, (prefix, path)))
        parts = names.get(own, (own,))
        last = layer is head or isinstance(layer, VocabParallelHead) or parts[0].rpartition(".")[2] == _HEAD
        quantized = False
        if options.base is not None and is_linear(layer) and not last:
            weight = layer._parameters.get("weight")
            quantized = weight is not None and uses[id(weight)] == 1 and layout_of(weight).tie is None
            if weight is not None and quantized:
                code_layout(options.base, matrix_layout(weight, own, is_transposed(layer)), axis)
        chosen: list[str | None] = []
        for part in parts:
            if options.targets == ALL_LINEAR:
                hits = {ALL_LINEAR} if is_linear(layer) and not last else set()
            else:
                hits = options.matching(own) | options.matching(part)
            chosen.append(part.rpartition(".")[2] if hits else None)
            matched |= hits
        present, layouts = layer._modules.get("lora"), list[FactorLayouts]()
        if any(chosen) and (present is None or not any(set_of(key) == name for key in present._modules)):
            if not is_linear(layer):
                raise ValueError(
                    f"lora.targets names {own}, a {type(layer).__name__}, which has no adapters: LoRA adapts linear "
                    "layers that are sharded or replicated as a whole. Name other layers by the ends of their names."
                )
            layouts = AdaptedLinear(layer, own, len(chosen), axis).factor_layouts(options.rank)
        if quantized or layouts:
            changes.append(LayerChange(layer, own, quantized, chosen, layouts))
    return matched, changes


def _add_update(layer: nn.Module, args: tuple[Any, ...], y: Tensor) -> Tensor:
    adapters: Any = layer._modules.get("lora")
    updated: Tensor = y if adapters is None else adapters(layer, y, args[0], layer.bias)
    return updated


def _add_set(
    change: LayerChange, options: LoraOptions, grid: Grid, dropout: MakeDropout, name: str, active: bool, axis: Axis
) -> None:
    """Add a set of adapters to one layer.

    Args:
        change: the layer, and the parts of its outputs to adapt.
        options: rank, scaling and seed.
        grid, dropout, name, active, axis: as for ``adapt``.
    """
    layer, chosen, layouts = change.layer, change.chosen, change.layouts
    linear = AdaptedLinear(layer, change.name, len(chosen), axis)
    if "lora" not in layer._modules:
        layer.add_module("lora", Adapters(linear.computed(layouts)))
        if not isinstance(layer, Adaptable):
            layer.register_forward_hook(_add_update)
    rows = matrix_of(layer).split(linear.held(layouts)) if options.dora else [None] * len(chosen)
    adapters = [
        None
        if part is None
        else (
            part,
            Adapter(
                layouts=factors,
                axis=axis,
                scaling=options.scaling,
                sequence_parallel=linear.sequence_parallel,
                select=_select(linear),
                seed=(options.seed, f"{change.name}.lora.{named_in(name, part)}"),
                like=layer.weight,
                dropout=_dropout(linear, factors.a, options.dropout, grid, dropout),
                rows=rows_of_part,
            ),
        )
        for part, factors, rows_of_part in zip(chosen, layouts, rows, strict=True)
    ]
    layer.lora.add(name, adapters, active)


def _select(linear: AdaptedLinear) -> Callable[[Tensor], Tensor] | None:
    """Return the function that selects the rows of B that a rank multiplies by; None: all that it holds."""
    rows, layer = linear.rows, linear.layer
    if rows is None:
        return None
    assert isinstance(layer, Adaptable)
    return layer.selected if linear.parts == 1 else lambda b: b[rows]


def _dropout(linear: AdaptedLinear, a: Layout, p: float, grid: Grid, make: MakeDropout) -> nn.Module | None:
    """Return the dropout of an adapter's input, which has the columns of A on this rank."""
    if not p:
        return None
    columns: tuple[Tensor, int] | None = None
    if a.sharded and linear.axis.size > 1:
        inputs = a.shape[1]
        columns = a.shard(torch.arange(inputs).expand(a.shape), linear.axis.rank, linear.axis.size)[0], inputs
    return make(p, grid, a.partial, columns)
