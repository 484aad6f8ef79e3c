"""``parallelize``: shards a plain ``nn.Module`` over the tensor axis, in place, by a plan of name patterns."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from itertools import chain
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from ..grid import Grid, layout_of
from ..grid.comm.axis import Axis
from ..grid.layout import Layout, set_layout
from ..grid.ranges import check_units, split
from .embedding import VocabSharded
from .plans import Column, FusedHeads, KeyValue, Local, OnAllHeads, OnEachHead, OnHeads, Row, Style, Vocab
from .sharded import (
    ColumnSharded,
    EmbeddingSharded,
    FusedWhole,
    KeyValueWhole,
    OnShards,
    RowSharded,
    ShardedRMSNorm,
    Together,
)

M = TypeVar("M", bound=nn.Module)

_EPSILONS = ("variance_epsilon", "eps")  # attributes of RMSNorms
_HOOKS = ("forward_hooks", "forward_pre_hooks", "backward_hooks", "backward_pre_hooks")  # nn.Module's, behind a "_"


def parallelize(module: M, grid: Grid, plan: Mapping[str, Any]) -> M:
    """Shard a plain module's linears and embeddings over ``grid.tensor`` (Shoeybi et al. 2019, arXiv:1909.08053).

    Every ``nn.Linear``, ``nn.Embedding`` and Hugging Face ``Conv1D`` that the plan names is replaced, in place, by a
    sharded layer that holds this rank's shard of the same ``Parameter``; names, ties and values do not change. Modules
    that the plan does not name stay replicated. Gradients equal those of a single process: a sharded weight's gradient
    is this rank's slice of the whole gradient, and a replicated weight's gradient is whole on every rank. Any optimizer
    may therefore step the parameters. ``triax.zero.ShardedOptimizer``, ``PipelineModule([module])`` and ``load_hf``
    read the ``Layout`` that each parameter gets. Collective over the tensor axis: the values of its first rank are
    broadcast to the other ranks.

    Args:
        module: the module, on the grid's device or on the meta device.
        grid: grid whose tensor axis shards the module. With tensor=1 the module is not changed, but the checks of the
            plan are made.
        plan: shell pattern of module names (``*`` matches dots too) -> style in which the matching modules are
            sharded. The first pattern that matches a module counts. The styles are ``"column"`` (outputs sharded),
            ``"row"`` (inputs sharded), ``"vocab"`` (an embedding's rows sharded), ``"column_gather"`` (outputs sharded
            and then gathered, for an output layer), ``("column", parts)`` (layers fused along the outputs, each of
            them sharded separately; ``parts`` is the list of their lengths, or the number of equal parts), or an
            instance of ``Column``, ``Row``, ``Vocab``, ``KeyValue``, ``FusedHeads``, ``OnHeads``, ``OnAllHeads``,
            ``OnEachHead`` or ``Local``. ``triax.parallelize`` also knows plans for Hugging Face's families.

    Returns:
        The module itself.

    Raises:
        ValueError: a pattern matches nothing, a size cannot be sharded, the plan shards tied weights in different
            ways, or it leaves out a norm or a parameter over heads that it shards. The message names the module and a
            plan or size that fits.
        TypeError: a pattern matches a module that its style cannot shard, or a linear or embedding layer with
            features that the sharded replacement would lose: its own ``forward``, a parametrization, hooks, or
            parameters or buffers other than weight and bias.
    """
    styles = {key: _style(key, value) for key, value in plan.items()}
    work = _assign(module, styles)  # so that a wrong plan is one on any grid
    axis = grid.tensor
    for refusal in axis.all_gather_json(_beyond_plain(module, work)):  # hooks may be on one rank alone
        if refusal is not None:
            raise TypeError(refusal)
    if axis.size == 1:
        return module
    for name, style in work:
        _check(module, name, style, axis)
    _check_ties(module, dict(work), axis)
    _check_over_heads(module, dict(work))
    _broadcast(module, grid)
    sharder = _Sharder(module, axis)
    for name, style in work:
        sharder.apply(name, style)
    for name, parameter in module.named_parameters():
        layout = layout_of(parameter)
        set_layout(parameter, Layout(layout.shape, name, layout.shard_dim, layout.parts, unit=layout.unit))
    return module


def _style(pattern: str, value: Any) -> Style:
    """Translate a plan's entry, such as ``"column"``, to the style object, such as ``Column()``."""
    plain: dict[Any, Style] = {
        "column": Column(),
        "column_gather": Column(gather_output=True),
        "row": Row(),
        "vocab": Vocab(),
    }
    if isinstance(value, Style):
        return value
    if isinstance(value, str) and value in plain:
        return plain[value]
    if isinstance(value, (tuple, list)) and len(value) == 2 and value[0] == "column":
        return Column(parts=value[1] if isinstance(value[1], int) else tuple(value[1]))
    raise ValueError(
        f"the plan has {pattern!r}: {value!r}, which is not a style. Give {', '.join(map(repr, plain))}, "
        "('column', parts), or an instance of Column, Row, Vocab, KeyValue, FusedHeads, OnHeads, OnAllHeads, "
        "OnEachHead or Local."
    )


def _assign(module: nn.Module, plan: Mapping[str, Style]) -> list[tuple[str, Style]]:
    """List the modules that the plan's patterns match, each module once, with the style that the plan gives it."""
    unused = set(plan)
    work = []
    for name, _ in module.named_modules(remove_duplicate=False):
        matching = [pattern for pattern in plan if fnmatchcase(name, pattern)]
        unused.difference_update(matching)
        if matching:
            work.append((name, plan[matching[0]]))
    if unused:
        leaves = [name for name, layer in module.named_modules() if _known(layer)]
        raise ValueError(
            f"the plan has {', '.join(map(repr, sorted(unused)))}, but no module of this {type(module).__name__} has a "
            f"name that matches. Its linear and embedding layers are {', '.join(leaves[:12])}"
            f"{', ...' if len(leaves) > 12 else ''}."
        )
    return work


@torch.no_grad()
def _broadcast(module: nn.Module, grid: Grid) -> None:
    """Broadcast the module's values from the first rank of the tensor axis: processes may have drawn other values."""
    for tensor in dict.fromkeys([*module.parameters(), *module.buffers()]):
        if not tensor.is_meta:
            data = _bytes(tensor, grid.device)
            grid.tensor.broadcast(data)
            if not torch.equal(
                data, _bytes(tensor, grid.device)
            ):  # an equal tensor may be an expanded view: not written
                tensor.copy_(data.view(tensor.dtype).view(tensor.shape))


def _bytes(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor's bytes: backends lack some dtypes. They share its memory if it lies there, contiguous."""
    return tensor.detach().to(device).contiguous().view(-1).view(torch.uint8)


class _Sharder:
    """Replacement of a module's layers by sharded layers, for ``parallelize``. It shards a tied parameter only once."""

    def __init__(self, module: nn.Module, axis: Axis) -> None:
        self.module, self.axis = module, axis
        self.cut = set[nn.Parameter]()
        self.done: dict[nn.Module, Any] = {}  # a module may hang in several places too
        self.groups: dict[tuple[str, str], Together] = {}

    def apply(self, name: str, style: Style) -> None:
        """Replace the module of this name by a sharded layer of the given style."""
        parent, _, key = name.rpartition(".")
        layer = self.module.get_submodule(name)
        if isinstance(style, Local):
            if layer not in self.done:
                self.done[layer] = layer
                for attribute, unit in style.attributes.items():
                    holder, key = _holder(layer, attribute)
                    start, stop = split(getattr(holder, key), self.axis.size, self.axis.rank, unit)
                    if holder is not layer:  # a configuration, which other modules read too
                        holder = layer.config = copy.copy(holder)
                    setattr(holder, key, stop - start)
            return
        if layer not in self.done:
            self.done[layer] = self._replacement(name, layer, style).train(layer.training)
            if isinstance(style, (Column, KeyValue)) and style.group:
                together = self.groups.setdefault((_parent(name), style.group), Together(self.axis))
                together.members.append(self.done[layer])
                self.done[layer].together = together
        setattr(self.module.get_submodule(parent), key, self.done[layer])

    def _replacement(self, name: str, layer: Any, style: Style) -> Any:
        axis, transposed = self.axis, _conv1d(layer)
        if isinstance(style, OnHeads):
            return OnShards(layer, axis)
        if isinstance(style, OnAllHeads):
            eps = next(value for key in _EPSILONS if (value := getattr(layer, key, None)) is not None)
        length = layout_of(layer.weight).shape[1 if transposed else 0]  # whole, though a tied weight is cut already
        for key, layout in _layouts(layer, style, axis).items():
            self._cut(getattr(layer, key), layout)
        weight, bias = layer.weight, getattr(layer, "bias", None)
        if isinstance(style, OnEachHead):
            return layer
        if isinstance(style, OnAllHeads):
            return ShardedRMSNorm(weight, style.heads * style.head_dim, eps, axis)
        if isinstance(style, Vocab):
            return VocabSharded(weight, axis, layer.num_embeddings, layer.padding_idx, scale=style.scale)
        if isinstance(layer, nn.Embedding):
            return EmbeddingSharded(weight, axis, layer.padding_idx)
        if isinstance(style, FusedHeads):
            if style.kv_heads == 1 and style.heads > 1:
                return FusedWhole(weight, bias, axis, split(style.heads, axis.size, axis.rank), style.head_dim)
            style = _fused(style)
        if isinstance(style, KeyValue) and style.kv_heads % axis.size:
            used, repeat, groups = _queries(style, axis)
            self._tell(name, num_key_value_groups=groups, num_key_value_heads=len(repeat or range(*used)))
            return KeyValueWhole(weight, bias, axis, transposed, used, style.head_dim, repeat)
        if isinstance(style, Row):
            return RowSharded(weight, bias, axis, transposed)
        assert not isinstance(style, Local)
        if isinstance(style, KeyValue):
            self._tell(name, num_key_value_heads=style.kv_heads // axis.size)
        column = _column(style)
        return ColumnSharded(weight, bias, axis, transposed, length if column.gather_output else None, column.unit)

    def _tell(self, name: str, **numbers: int) -> None:
        """Set the numbers of this rank's heads that the module of a projection has as attributes."""
        attention = self.module.get_submodule(_parent(name))
        for key, number in numbers.items():
            if hasattr(attention, key):
                setattr(attention, key, number)

    def _cut(self, parameter: nn.Parameter, layout: Layout) -> None:
        """Shard a parameter in place: only this rank's slice of it remains."""
        if layout.sharded and parameter not in self.cut:
            self.cut.add(parameter)
            parameter.data = layout.shard(parameter.detach(), self.axis.rank, self.axis.size).clone()
            parameter.grad = None
            set_layout(parameter, layout)


def _layouts(layer: Any, style: Style | None, axis: Axis) -> dict[str, Layout]:
    """Return the layouts that a layer's weight and bias get; without a style they stay whole."""
    tensors = {key: tensor for key in ("weight", "bias") if (tensor := getattr(layer, key, None)) is not None}
    whole = {key: Layout(layout_of(tensor).shape) for key, tensor in tensors.items()}
    if isinstance(style, FusedHeads) and not (style.kv_heads == 1 and style.heads > 1):
        style = _fused(style)
    if style is None or isinstance(style, (Local, OnHeads, FusedHeads)):
        return whole
    if isinstance(style, KeyValue) and style.kv_heads % axis.size:
        return whole
    outputs, weight = 1 if _conv1d(layer) else 0, whole["weight"]
    if isinstance(style, (Vocab, OnEachHead)):
        return whole | {"weight": replace(weight, shard_dim=0)}
    if isinstance(style, OnAllHeads):
        return whole | {"weight": replace(weight, shard_dim=0, unit=style.head_dim)}
    if isinstance(layer, nn.Embedding):
        return whole | {"weight": replace(weight, shard_dim=1)}
    if isinstance(style, Row):
        return whole | {"weight": replace(weight, shard_dim=1 - outputs, unit=style.unit)}
    column = _column(style)
    parts = _parts(column, weight.shape[outputs])
    dims = {"weight": outputs, "bias": 0}
    return {key: replace(each, shard_dim=dims[key], parts=parts, unit=column.unit) for key, each in whole.items()}


def _column(style: Column | KeyValue) -> Column:
    """Return the style of a projection whose outputs are sharded."""
    return style if isinstance(style, Column) else Column(unit=style.head_dim)


def _parent(name: str) -> str:
    """Return the name of the module that calls a layer. PEFT puts a layer, as ``base_layer``, into one of its own."""
    return name.removesuffix(".base_layer").rpartition(".")[0]


def _fused(style: FusedHeads) -> Column:
    """Return the style that shards a fused projection by the heads of keys and values."""
    group, dim = style.heads // style.kv_heads, style.head_dim
    if style.grouped:
        return Column(unit=(group + 2) * dim)
    return Column(parts=(style.heads * dim, style.kv_heads * dim, style.kv_heads * dim), unit=dim)


def _holder(layer: nn.Module, attribute: str) -> tuple[Any, str]:
    """Return the object that has an attribute of ``Local``, the module or its configuration, and the last name."""
    path, _, key = attribute.rpartition(".")
    return getattr(layer, path) if path else layer, key


def _beyond_plain(module: nn.Module, work: list[tuple[str, Style]]) -> str | None:
    """Return an error message for the first layer with features that torch's plain layer does not have.

    A sharded layer would lose them: an own ``forward``, a parametrization, hooks or further tensors. None if no layer
    has any.

    Args:
        module: the module to shard.
        work: (name, style) of each layer to replace.
    """
    for name, style in work:
        layer = module.get_submodule(name)
        parametrized = is_parametrized(layer)
        scaled = isinstance(style, Vocab) and style.scale != 1.0  # the plan knows what the own forward does
        if not name or isinstance(style, (Local, OnHeads, OnAllHeads, OnEachHead)) or scaled:
            continue
        if not (parametrized or _known(layer)):
            continue
        # transformers' Conv1D and FalconLinear are linear layers by another order of operations.
        plain = _conv1d(layer) or type(layer).__name__ == "FalconLinear"
        forwards = () if plain else (nn.Linear.forward, nn.Embedding.forward)
        held = chain(layer.named_parameters(), layer.named_buffers())
        own = [key for key, _ in held if key not in ("weight", "bias")]
        hooks = [kind for kind in _HOOKS if getattr(layer, f"_{kind}")]
        if parametrized:
            why = "is parametrized"
        elif "forward" in vars(layer) or (forwards and type(layer).forward not in forwards):
            why = "has its own forward method"
        elif own:
            why = f"has the additional tensors {', '.join(own)}"
        elif hooks:
            why = f"has {hooks[0].replace('_', ' ')}"
        else:
            continue
        return (
            f"{name}, a {type(layer).__name__}, {why}, which the sharded layer that replaces it would lose. Call "
            "parallelize before the layer is changed in this way, or leave the layer out of the plan."
        )
    return None


def _check(module: nn.Module, name: str, style: Style, axis: Axis) -> None:
    """Raise an error if a module cannot be sharded in the given style, before any module is changed."""
    layer: Any = module.get_submodule(name)
    if isinstance(style, Local):
        for attribute, unit in style.attributes.items():
            value = getattr(*_holder(layer, attribute), None)
            if not isinstance(value, int):
                raise ValueError(f"{name}.{attribute} is {value!r}, not an integer. Leave it out of Local.")
            check_units(f"{name}.{attribute}", value, unit, axis.size)
        return
    parent = module.get_submodule(name.rpartition(".")[0])
    if isinstance(parent, (nn.MultiheadAttention, nn.TransformerEncoderLayer)):
        raise TypeError(
            f"{name} is part of a {type(parent).__name__}, which uses the weights without calling {name}, so the sum "
            "over the tensor axis would be missing. Write this layer with nn.Linear layers that it calls."
        )
    if not name:
        raise TypeError(f"the plan's pattern matches the whole {type(module).__name__}. Put it into an nn.Sequential.")
    if isinstance(style, OnHeads):
        return
    if isinstance(style, (OnAllHeads, OnEachHead, FusedHeads)):
        heads = style.kv_heads if isinstance(style, FusedHeads) else style.heads
        if heads % axis.size and not (isinstance(style, FusedHeads) and heads in (1, style.heads)):
            raise ValueError(
                f"{name} has {heads} heads, but the style {type(style).__name__} needs a multiple of "
                f"tensor={axis.size}. Use a tensor axis whose size divides {heads}."
            )
    if isinstance(style, OnAllHeads):
        if getattr(layer, "bias", None) is not None or layer.weight.numel() != style.heads * style.head_dim:
            raise ValueError(
                f"{name} is a {type(layer).__name__} with {layer.weight.numel()} weights, but the style OnAllHeads "
                f"needs an RMSNorm without a bias and with {style.heads} x {style.head_dim} weights. Change the plan."
            )
        return
    if isinstance(style, OnEachHead):
        if getattr(layer, "bias", None) is not None or layer.weight.shape[0] != style.heads:
            raise ValueError(
                f"{name} is a {type(layer).__name__} with the weight {tuple(layer.weight.shape)}, but the style "
                f"OnEachHead needs a weight ({style.heads}, ...) and no bias. Change the plan."
            )
        return
    embeds = isinstance(layer, nn.Embedding) and isinstance(style, (Vocab, Column))
    wanted = "an nn.Embedding" if isinstance(style, Vocab) else "an nn.Linear or a Conv1D"
    if not (embeds or (not isinstance(style, Vocab) and (isinstance(layer, nn.Linear) or _conv1d(layer)))):
        if hasattr(layer, "base_layer"):
            raise TypeError(
                f"{name} is a layer of PEFT around another one. Leave the plan out, if the model is of a family that "
                f"triax knows: triax.parallelize then shards the adapters too. Or name {name}.base_layer, "
                f"{name}.lora_A.* and {name}.lora_B.* in the plan."
            )
        raise TypeError(
            f"{name} is a {type(layer).__name__}, but the style {type(style).__name__} needs {wanted}. Change the "
            "plan's pattern so that it does not match this module."
        )
    if layout_of(layer.weight).sharded:
        raise ValueError(f"{name} is already sharded. Call parallelize only once for a module.")
    if embeds:
        odd = [option for option in ("max_norm", "scale_grad_by_freq", "sparse") if getattr(layer, option)]
        if odd:
            option = f"{odd[0]}={getattr(layer, odd[0])}"
            raise ValueError(f"{name} has {option}, which a sharded embedding lacks. Leave {name} out of the plan.")
        if isinstance(style, Column) and style != Column():
            raise ValueError(f"{name} is an embedding, which is sharded by 'column' or 'vocab', not by {style}.")
        key = "num_embeddings" if isinstance(style, Vocab) else "embedding_dim"
        check_units(f"{name}: {key}", getattr(layer, key), 1, axis.size)
        return
    if isinstance(style, FusedHeads):
        if layer.weight.shape[0] != (style.heads + 2 * style.kv_heads) * style.head_dim:
            raise ValueError(
                f"{name} has {layer.weight.shape[0]} outputs, but the plan gives it heads={style.heads} and "
                f"kv_heads={style.kv_heads} of head_dim={style.head_dim}. The outputs must be (heads + 2 x kv_heads) x "
                "head_dim."
            )
        return
    sizes = tuple(layer.weight.shape)
    out, into = (sizes[1], sizes[0]) if _conv1d(layer) else sizes
    if isinstance(style, KeyValue):
        if out != style.kv_heads * style.head_dim or style.heads % style.kv_heads:
            raise ValueError(
                f"{name} has {out} outputs, but the plan gives it kv_heads={style.kv_heads} of "
                f"head_dim={style.head_dim} for heads={style.heads}. The outputs must be kv_heads x head_dim, and "
                "kv_heads must divide heads."
            )
        check_units(f"{name}: the number of query heads", style.heads, 1, axis.size)
    elif isinstance(style, Row):
        check_units(f"{name}: the number of inputs", into, style.unit, axis.size)
    elif isinstance(style, Column):
        parts = _parts(style, out)
        if style.gather_output and (parts is not None or style.group):
            raise ValueError(f"{name}: gather_output cannot be combined with parts or group. Leave out gather_output.")
        if parts is not None and sum(parts) != out:
            raise ValueError(f"{name} has {out} outputs, but its parts {parts} add up to {sum(parts)}. Change parts.")
        for length in parts or (out,):
            check_units(f"{name}: the number of outputs", length, style.unit, axis.size)


def _check_ties(module: nn.Module, work: Mapping[str, Style], axis: Axis) -> None:
    """Raise ValueError for a tied parameter to which two layers would give different layouts."""
    seen: dict[nn.Parameter, tuple[str, str, Layout]] = {}
    named = [(name, layer) for name, layer in module.named_modules(remove_duplicate=False) if _known(layer)]
    for name, layer in sorted(named, key=lambda pair: pair[0] not in work):  # those of the plan first
        for key, layout in _layouts(layer, work.get(name), axis).items():
            other, other_key, before = seen.setdefault(getattr(layer, key), (name, key, layout))
            if before == layout:
                continue
            if name not in work:
                raise ValueError(
                    f"{name} shares its {key} with {other}, which the plan shards. Add {name} to the plan too, with "
                    "the style 'column_gather' if it is an output layer."
                )
            raise ValueError(
                f"{name}.{key} and {other}.{other_key} are tied, but the plan shards them differently. Give both one "
                "style."
            )


def _check_over_heads(module: nn.Module, work: Mapping[str, Style]) -> None:
    """Raise ValueError for a norm or a parameter over all heads whose layer the plan shards, but not itself.

    Its size would not fit this rank's heads, which only a forward would show.
    """
    projection: Any
    for name, style in work.items():
        if not isinstance(style, (Column, KeyValue)) or style.unit_of_heads <= 1:
            continue
        parent = _parent(name)
        attention, projection = module.get_submodule(parent), module.get_submodule(name)
        outputs = (projection.bias if _conv1d(projection) else projection.weight).shape[0]
        for key, parameter in attention.named_parameters(recurse=False):
            if parameter.shape[:1] == (outputs // style.unit_of_heads,):
                raise ValueError(
                    f"{parent}.{key} has a number for each of {len(parameter)} heads, which the plan shards with "
                    f"{name}, but parallelize cannot shard it. Leave that attention out of the plan, or use tensor=1."
                )
        for key, layer in attention.named_children():
            weight = getattr(layer, "weight", None)
            if f"{parent}.{key}" not in work and isinstance(weight, Tensor) and weight.shape == (outputs,):
                raise ValueError(
                    f"{parent}.{key} is a {type(layer).__name__} over all {outputs} outputs of {name}, which the plan "
                    f"shards. Add {f'{parent}.{key}'!r}: OnAllHeads(heads, head_dim) to the plan."
                )


def _parts(style: Column, length: int) -> tuple[int, ...] | None:
    """Return the lengths of the parts that are fused along the outputs of a layer of ``length`` outputs."""
    if isinstance(style.parts, int):
        return (length // style.parts,) * style.parts
    return style.parts


def _queries(style: KeyValue, axis: Axis) -> tuple[tuple[int, int], list[int] | None, int]:
    """Return how this rank's query heads use key/value heads, if the tensor axis does not divide the key/value heads.

    Returns:
        (first and last + 1 key/value head that this rank needs; index of the key/value head of each of this rank's
        query heads within these, or None if every key/value head serves equally many on each rank; query heads per
        returned key/value head).
    """
    group = style.heads // style.kv_heads

    def used(rank: int) -> list[int]:
        first, last = split(style.heads, axis.size, rank)
        return [head // group for head in range(first, last)]

    def share(heads: list[int]) -> set[int]:
        return {heads.count(head) for head in heads}

    owned = used(axis.rank)
    bounds = owned[0], owned[-1] + 1
    if all(len(share(used(rank))) == 1 for rank in range(axis.size)):
        return bounds, None, share(owned).pop()
    return bounds, [head - owned[0] for head in owned], 1  # alike on every rank, so that all run the same operations


def _known(layer: nn.Module) -> bool:
    return isinstance(layer, (nn.Linear, nn.Embedding)) or _conv1d(layer)


def _conv1d(layer: nn.Module) -> bool:
    """True for Hugging Face's ``Conv1D``: a linear layer of nf outputs that keeps its weight as (nx, nf)."""
    sizes = getattr(layer, "nx", None), getattr(layer, "nf", None)
    weight = getattr(layer, "weight", None)  # a tied one may be cut already
    return type(layer).__name__ == "Conv1D" and isinstance(weight, nn.Parameter) and layout_of(weight).shape == sizes
