"""LoRA: low-rank updates of frozen linear layers (Hu et al. 2021, arXiv:2106.09685), sharded like the layers.

A layer y = x W^T computes y + s (x A^T) B^T, with A (r, inputs), B (outputs, r) and s = alpha / r. Only A and B are
trained. Both factors follow the weight's layout:

    layer               A                           B                           reduced over the tensor axis
    column-parallel     replicated                  sharded like W's outputs    backward: the gradient of x A^T
    row-parallel        sharded like W's inputs     replicated                  forward: x A^T
    replicated          replicated                  replicated                  nothing

So each message has r channels. Under sequence parallelism a replicated factor sees this rank's tokens only, and its
gradient is partial.

DoRA (Liu et al. 2024, arXiv:2402.09353) computes y = m (W + s B A) x / |W + s B A| with the norms of the rows, which
are constants for the gradient (section 4.3), and trains m (outputs,) too. A rank of a row-parallel layer has a part of
each row: the squares are summed over the tensor axis.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..base.errors import ConfigError
from ..base.uncompiled import uncompiled
from ..grid import Grid
from ..grid.agreement.agreement import agreed
from ..grid.comm.axis import Axis
from ..grid.layout import Layout, layout_of, set_layout
from ..grid.randomness.random import Constant, Uniform, seeded, sharded_parameter
from .column import column_linear
from .embedding import VocabParallelHead
from .linear import reduced
from .quantized import quantize_layer

MakeDropout = Callable[[float, Grid, bool, tuple[Tensor, int] | None], nn.Module]
ALL_LINEAR = "all-linear"
DEFAULT = "default"  # name of a model's adapters, as PEFT's
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


class Adapter(nn.Module):
    """Factors A and B of the update of one linear layer, or of one of several layers that are fused along the outputs.

    Args:
        a, b: layouts of the factors.
        axis: the tensor axis.
        scaling: s, the factor of the update.
        sequence_parallel: the layer takes or returns this rank's shard of the sequence.
        select: returns the rows of B that this rank multiplies by, if B is replicated and the layer computes only
            these. None: all that it holds.
        seed: keys of the initial A. B starts at 0, so that the model starts as it was.
        like: the layer's weight, whose device and dtype the factors take.
        dropout: drops elements of the input of A, on this rank; None: none.
        rows: the rows of the layer's weight, (N, K), (N / t, K) or (N, K / t), whose norms DoRA trains; None: plain
            LoRA.

    Attributes:
        A: (r, K), or (r, K / t) in a row-parallel layer.
        B: (N, r), or (N / t, r) in a column-parallel layer.
        magnitude: m, (N,), or (N / t,) in a column-parallel layer; only of DoRA. It starts as the norms of W's rows.

    Shape:
        the layer's output and input on this rank -> the output with the update.
    """

    magnitude: nn.Parameter | None

    def __init__(
        self,
        a: Layout,
        b: Layout,
        axis: Axis,
        scaling: float,
        sequence_parallel: bool,
        select: Callable[[Tensor], Tensor] | None,
        seed: tuple[int, str],
        like: Tensor,
        dropout: nn.Module | None,
        rows: Tensor | None,
    ) -> None:
        super().__init__()
        self.axis, self.scaling, self.sequence_parallel, self.select = axis, scaling, sequence_parallel, select
        self.dropout = dropout
        self._row, self._column = a.sharded, b.sharded or select is not None
        make = partial(sharded_parameter, rank=axis.rank, size=axis.size, device=like.device, dtype=like.dtype)
        with seeded(*seed):
            self.A = make(a, Uniform(1 / math.sqrt(a.shape[1])))
            self.B = make(b, Constant(0.0))
        self.magnitude = None
        if rows is not None:
            # A placeholder has no values: the layer that is built in its place later has m.
            known = rows.numel() < 2 or any(rows.stride())
            self.magnitude = nn.Parameter(self._norms(rows) if known else rows.new_empty(len(rows), device="meta"))
            set_layout(self.magnitude, replace(b, shape=b.shape[:1]))

    def forward(self, y: Tensor, x: Tensor, rows: Tensor | None, bias: Tensor | None) -> Tensor:
        """Return y + s (x A^T) B^T, or with DoRA b + m / |W + s B A| (y - b + s (x A^T) B^T).

        Args:
            y: the layer's output (..., n) on this rank.
            x: the layer's input on this rank.
            rows: the rows of the layer's weight that this rank multiplies by, for DoRA.
            bias: b (n,) of these rows, if y has it already.
        """
        dropped = x if self.dropout is None else self.dropout(x)
        inner = self._into(dropped, self.A) * self.scaling  # (..., r)
        b = self.B if self.select is None else self.select(self.B)
        update = self._out_of(inner, b)
        if self.magnitude is None:
            return y + update
        assert rows is not None
        m = self.magnitude if self.select is None else self.select(self.magnitude)
        with torch.no_grad():
            norms = self._norms(rows + (b @ self.A * self.scaling).to(rows.dtype))
        scale = (m / norms).to(y.dtype)
        base = y if bias is None else y - bias
        if dropped is not x:
            rows = rows.to(dropped.dtype)
            base = self._into(dropped, rows) if self._row else self._out_of(dropped, rows)
        return y + (scale - 1) * base + scale * update

    @torch.no_grad()
    def merged(self, rows: Tensor) -> Tensor:
        """Return the layer's rows with the update: W + s B A, or with DoRA m (W + s B A) / |W + s B A|."""
        wide = torch.promote_types(rows.dtype, torch.float32)
        weight = rows.to(wide) + self.B.to(wide) @ self.A.to(wide) * self.scaling
        if self.magnitude is not None:
            weight = (self.magnitude.to(wide) / self._norms(weight))[:, None] * weight
        return weight.to(rows.dtype)

    def _into(self, x: Tensor, weight: Tensor) -> Tensor:
        """Return the product of the input with a weight whose inputs are sharded like the layer's."""
        y = F.linear(x, weight)
        return reduced(y, self.axis, self.sequence_parallel) if self._row and self.axis.size > 1 else y

    def _out_of(self, x: Tensor, weight: Tensor) -> Tensor:
        """Return the product with a weight whose outputs are sharded like the layer's."""
        if self._column:
            return column_linear(x, weight, None, self.axis, self.sequence_parallel)
        return F.linear(x, weight)

    @uncompiled  # a collective, and nothing for autograd
    @torch.no_grad()
    def _norms(self, rows: Tensor) -> Tensor:
        """Return the norms of rows, of which this rank has all or, in a row-parallel layer, a part of each: (N,)."""
        squares = rows.to(torch.promote_types(rows.dtype, torch.float32)).square().sum(1)
        if self._row and self.axis.size > 1:
            self.axis.all_reduce(squares)
        return squares.sqrt_().to(rows.dtype)

    def extra_repr(self) -> str:
        """Text that ``print`` shows: whole sizes, and the number of shards."""
        a, b = layout_of(self.A).shape, layout_of(self.B).shape
        return f"{a[1]} -> {a[0]} -> {b[0]}, scaling={self.scaling:g}, tensor={self.axis.size}"


class Adapters(nn.Module):
    """Adapters of one layer: one for the whole layer, or one for each adapted part of its outputs.

    A model may have several sets of adapters. Those of the set ``default`` have the names of the parts, those of
    another set these names with ``@`` and its name.

    Args:
        lengths: length of each part of the layer's outputs on this rank.

    Attributes:
        active: names of the sets whose updates are added.
    """

    def __init__(self, lengths: Sequence[int]) -> None:
        super().__init__()
        self.lengths = list(lengths)
        self._of_part: list[list[str]] = [[] for _ in lengths]
        self.active: tuple[str, ...] = ()

    def add(self, name: str, found: Sequence[tuple[str, Adapter] | None], active: bool) -> None:
        """Add a set of adapters: for each part its name and adapter, or None."""
        for names, pair in zip(self._of_part, found, strict=True):
            if pair is not None:
                key = named_in(name, pair[0])
                self.add_module(key, pair[1].requires_grad_(active))
                names.append(key)
        self.active = (*self.active, name) if active else self.active

    def forward(self, layer: Any, y: Tensor, x: Tensor, bias: Tensor | None) -> Tensor:
        """Return the layer's output y with the updates that belong to the input x.

        ``bias`` is that of this rank's outputs, if y has it already.
        """
        lengths, adapters = self.lengths, self._active()
        pieces = list(y.split(lengths, dim=-1)) if len(lengths) > 1 else [y]
        rows: Sequence[Tensor | None] = [None] * len(lengths)
        biases = rows
        if any(member.magnitude is not None for several in adapters for member in several):
            weight = _rows(layer)
            rows = weight.split(lengths) if len(lengths) > 1 else [weight]
            biases = biases if bias is None else bias.split(lengths) if len(lengths) > 1 else [bias]
        for number, several in enumerate(adapters):
            for adapter in several:
                pieces[number] = adapter(pieces[number], x, rows[number], biases[number])
        return torch.cat(pieces, dim=-1) if len(pieces) > 1 else pieces[0]

    def merged(self, matrix: Tensor) -> Tensor:
        """Return the layer's weight, (N, K) of this rank, with the updates."""
        lengths = self.lengths
        if sum(lengths) != len(matrix):  # keys and values of which this rank computes some heads
            lengths = [len(matrix) // len(lengths)] * len(lengths)
        pieces = list(matrix.split(lengths))
        for number, several in enumerate(self._active()):
            for adapter in several:
                pieces[number] = adapter.merged(pieces[number])
        return torch.cat(pieces)

    def _active(self) -> list[list[Adapter]]:
        """Return the active adapters of each part.

        Raises:
            RuntimeError: in training, an adapter is trained that is not active.
        """
        modules: Any = self._modules
        if self.training and torch.is_grad_enabled():
            for key, adapter in modules.items():
                if set_of(key) not in self.active and adapter.A.requires_grad:
                    raise RuntimeError(
                        f"the adapters {set_of(key)!r} are trained, but not active: call triax.use_lora with the names "
                        "that were active when the engine was made"
                    )
        return [[modules[key] for key in keys if set_of(key) in self.active] for keys in self._of_part]


def named_in(name: str, part: str) -> str:
    """Return the name in a layer of the adapter of a part, of the set of this name."""
    return part if name == DEFAULT else f"{part}@{name}"


def set_of(key: str) -> str:
    """Return the name of the set of an adapter with this name in its layer."""
    return key.partition("@")[2] or DEFAULT


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
            value = adapters.merged(value.t() if _transposed(layer) else value)
            value = value.t() if _transposed(layer) else value
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
    names: Mapping[str, tuple[str, ...]],
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
    if not re.fullmatch(r"[\w-]+", name):
        raise ConfigError(f"{name!r} is no name of adapters: give letters, digits, _ and -")
    base = next(iter(others.values())).base if others else None
    if others and options.base not in (None, base):
        raise ConfigError(
            f"base is {options.base} for the adapters {name!r}, but the model has the adapters {[*others]} over "
            f"{base or 'weights in floating point'}: give base only with the first adapters"
        )
    matched, first, axis = set[str](), not others, axis or grid.tensor
    with agreed(grid, ConfigError):
        if hasattr(model, "change_layers"):
            model.change_layers(
                lambda prefix, layer: matched.update(
                    adapt(layer, prefix, options, names, grid, dropout, name, first, axis)
                )
            )
        else:
            matched.update(adapt(model, "", options, names, grid, dropout, name, first, axis))
    matched_anywhere = set[str]().union(*grid.world.all_gather_json(sorted(matched)))
    targets = (options.targets,) if isinstance(options.targets, str) else options.targets
    missing = [target for target in targets if target not in matched_anywhere]
    if missing:
        linear = [name for name, layer in model.named_modules() if _linear(layer)]
        ends = dict.fromkeys(own.rpartition(".")[2] for name in linear for own in names.get(name, (name,)))
        there = any(own.rpartition(".")[2] in missing for several in names.values() for own in several)
        kind = "linear layer of its own (a tied output layer is the embedding)" if there else "layer"
        raise ConfigError(
            f"lora.targets has {', '.join(map(repr, missing))}, but no {kind} has such a name. Name layers by the ends "
            f"of their names, such as {', '.join([*ends][:12])}, or write 'all-linear'"
        )
    model.lora_options = {**others, name: options}
    if first:
        model.lora_active = (name,)


def adapt(
    module: nn.Module,
    prefix: str,
    options: LoraOptions,
    names: Mapping[str, tuple[str, ...]],
    grid: Grid,
    dropout: MakeDropout,
    name: str = DEFAULT,
    active: bool = True,
    axis: Axis | None = None,
) -> set[str]:
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

    Returns:
        The targets that matched.

    Raises:
        ValueError: a target names a layer that has no adapters, or a layer whose fused parts cannot be told apart.
    """
    for parameter_name, parameter in module.named_parameters():
        parameter.requires_grad_(parameter.requires_grad and ".lora." in f".{parameter_name}")
    axis = axis or grid.tensor
    uses = Counter(id(p) for layer in module.modules() for p in layer._parameters.values() if p is not None)
    head = getattr(module, "get_output_embeddings", lambda: None)()
    matched: set[str] = set()
    for path, layer in [*module.named_modules()]:
        own = ".".join(filter(None, (prefix, path)))
        parts = names.get(own, (own,))
        last = layer is head or isinstance(layer, VocabParallelHead) or parts[0].rpartition(".")[2] == _HEAD
        if options.base is not None and _linear(layer) and not last:
            weight = layer._parameters.get("weight")
            if weight is not None and uses[id(weight)] == 1 and layout_of(weight).tie is None:
                quantize_layer(layer, own, options.base, axis, _transposed(layer))
        chosen: list[str | None] = []
        for part in parts:
            if options.targets == ALL_LINEAR:
                hits = {ALL_LINEAR} if _linear(layer) and not last else set()
            else:
                hits = options.matching(own) | options.matching(part)
            chosen.append(part.rpartition(".")[2] if hits else None)
            matched |= hits
        present = layer._modules.get("lora")
        if any(chosen) and (present is None or not any(set_of(key) == name for key in present._modules)):
            if not _linear(layer) or not getattr(layer, "adaptable", True):
                raise ValueError(
                    f"lora.targets names {own}, a {type(layer).__name__}, which has no adapters: LoRA adapts linear "
                    "layers that are sharded or replicated as a whole. Name other layers by the ends of their names."
                )
            lengths, adapters = _adapters(layer, own, chosen, options, grid, dropout, name, axis)
            if present is None:
                layer.add_module("lora", Adapters(lengths))
                if not hasattr(layer, "adaptable"):
                    layer.register_forward_hook(_add_update)
            layer.lora.add(name, adapters, active)
    return matched


def _linear(layer: nn.Module) -> bool:
    return bool(getattr(layer, "adaptable", isinstance(layer, nn.Linear) or _conv1d(layer)))


def _transposed(layer: nn.Module) -> bool:
    return _conv1d(layer) or bool(getattr(layer, "transposed", False))


def _conv1d(layer: nn.Module) -> bool:
    return type(layer).__name__ == "Conv1D" and hasattr(layer, "nf")


def _add_update(layer: nn.Module, args: tuple[Any, ...], y: Tensor) -> Tensor:
    adapters: Any = layer._modules.get("lora")
    updated: Tensor = y if adapters is None else adapters(layer, y, args[0], layer.bias)
    return updated


def _rows(layer: Any) -> Tensor:
    """Return the weight (n, K) of the outputs that a layer computes on this rank."""
    weight = layer.weight.detach()
    if _transposed(layer):
        weight = weight.t()
    rows: Tensor = layer.selected(weight) if hasattr(layer, "selected") else weight
    return rows[layer.rows] if hasattr(layer, "rows") and not hasattr(layer, "selected") else rows


def _adapters(
    layer: Any,
    own: str,
    chosen: Sequence[str | None],
    options: LoraOptions,
    grid: Grid,
    dropout: MakeDropout,
    name: str,
    axis: Axis,
) -> tuple[list[int], list[tuple[str, Adapter] | None]]:
    """Return the lengths of the parts of one layer's outputs on this rank, and the adapter of each part or None.

    Layouts of the adapters follow that of the layer's weight.

    Args:
        layer: the layer.
        own: its name in the whole model.
        chosen: for each fused part of its outputs, the name of the adapter or None.
        options: rank, scaling and seed.
        grid, dropout, name, axis: as for ``adapt``.
    """
    layout, rows = layout_of(layer.weight), getattr(layer, "rows", None)
    transposed = _transposed(layer)
    outputs, inputs = layout.shape[::-1] if transposed else layout.shape
    column = layout.shard_dim == (1 if transposed else 0)
    lengths = layout.parts if column and layout.parts is not None else (outputs,)
    if rows is not None and len(chosen) > 1:  # fused, of equal lengths
        lengths = (outputs // len(chosen),) * len(chosen)
    if len(chosen) > 1 and len(chosen) != len(lengths):
        raise ValueError(
            f"{own} has {len(chosen)} layers fused along its outputs, but its weight is sharded in {len(lengths)} "
            "parts, so that an adapter of one of them has no shard of its own. Leave it out of lora.targets."
        )
    sequence = bool(getattr(layer, "sequence_parallel", False)) and axis.size > 1
    select: Callable[[Tensor], Tensor] | None = None
    if rows is not None:  # a layer of keys and values has them twice
        select = layer.selected if len(chosen) == 1 and hasattr(layer, "selected") else lambda b: b[rows]
    a = Layout((options.rank, inputs), partial=sequence or (layout.partial and rows is None))
    if layout.sharded and not column:
        a = Layout((options.rank, inputs), shard_dim=1, unit=layout.unit)
    here = (axis.rank, axis.size)
    columns: tuple[Tensor, int] | None = None
    if a.sharded and axis.size > 1:
        columns = a.shard(torch.arange(inputs).expand(a.shape), *here)[0], inputs
    matrix, taken = layer.weight.detach().t() if transposed else layer.weight.detach(), 0
    chosen_adapters: list[tuple[str, Adapter] | None] = []
    sizes: list[int] = []
    fused = [(sum(lengths), layout.parts)] if len(chosen) == 1 else [(length, None) for length in lengths]
    for part, (length, inner) in zip(chosen, fused, strict=True):
        b = Layout((length, options.rank), partial=a.partial or (rows is not None and axis.size > 1))
        if column:
            b = replace(layout, shape=(length, options.rank), name="", shard_dim=0, parts=inner)
        elif a.sharded:
            b = Layout((length, options.rank), partial=sequence)
        if part is None:
            chosen_adapters.append(None)
        else:
            seed = (options.seed, f"{own}.lora.{named_in(name, part)}")
            drops = dropout(options.dropout, grid, a.partial, columns) if options.dropout else None
            norms = matrix[taken : taken + b.local_shape(*here)[0]] if options.dora else None
            adapter = Adapter(a, b, axis, options.scaling, sequence, select, seed, layer.weight, drops, norms)
            chosen_adapters.append((part, adapter))
        taken += b.local_shape(*here)[0]
        sizes.append(b.local_shape(*here)[0] if rows is None else rows.stop - rows.start)
    return sizes, chosen_adapters
