"""Weights of linear layers in 8 bits, for inference: int8 numbers in groups, each group with a scale of its own.

A group is a run of neighbouring inputs of one output. With w = q s + z the numbers q are integers of 8 bits; s, and z
if the groups are asymmetric, are fp32 numbers of the group. A layer's weight is made again from them, in the layer's
dtype, each time the layer runs, and dropped after that: no more than one weight is there in floating point at a time.
(Dettmers et al. 2022, arXiv:2208.07339, quantize by rows; groups as in Yao et al. 2022, arXiv:2206.01861.)

Groups are those of the whole weight: where the tensor axis shards the inputs, a group's largest value is taken over the
ranks that share it, so that the quantized model is the same on every grid.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..grid import Axis, Grid, layout_of
from ..grid.layout import Layout
from ..models.head_groups import WholeKV
from ..tensor_parallel.embedding import VocabParallelHead
from ..tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear
from ..tensor_parallel.sharded import ColumnSharded, FusedWhole, KeyValueWhole, RowSharded

_LINEAR = (
    nn.Linear,
    ColumnParallelLinear,
    RowParallelLinear,
    WholeKV,
    ColumnSharded,
    RowSharded,
    KeyValueWhole,
    FusedWhole,
)


@dataclass(frozen=True)
class Int8:
    """Options of weight-only quantization.

    Attributes:
        group: number of neighbouring inputs of an output that have one scale.
        groups: in place of ``group``, the number of groups of each output.
        symmetric: the range of a group is [-max, max]; False: [min, max].

    Raises:
        ValueError: a number below 1.
    """

    group: int = 64
    groups: int | None = None
    symmetric: bool = True

    def __post_init__(self) -> None:
        for name, value in (("group", self.group), ("groups", self.groups)):
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}. Give at least 1.")

    def size(self, inputs: int) -> int:
        """Return the number of inputs of a group, for a weight of so many inputs."""
        return min(self.group if self.groups is None else -(-inputs // self.groups), inputs)


class _QuantizedWeight:
    """Mixin of a layer whose ``weight`` is made from int8 numbers at each use.

    Attributes:
        weight_int8: int8, of the weight's shape.
        weight_scale, weight_zero: fp32 (outputs, groups), of this rank's groups; no ``weight_zero`` if symmetric.
        weight_group: int64 (inputs,), the group of each input; empty if groups are equal runs.
    """

    weight_int8: Tensor
    weight_scale: Tensor
    weight_zero: Tensor | None
    weight_group: Tensor
    weight_meta: tuple[torch.dtype, bool]
    weight_layout: Layout

    @property
    def weight(self) -> Tensor:
        """The weight in floating point, a new tensor."""
        dtype, transposed = self.weight_meta
        numbers = self.weight_int8.t() if transposed else self.weight_int8
        value = dequantize(numbers, self.weight_scale, self.weight_zero, self.weight_group).to(dtype)
        return value.t() if transposed else value


def quantize(module: nn.Module, grid: Grid, options: Int8 | None = None) -> list[str]:
    """Replace a module's linear layers by layers with int8 weights, in place. Collective over the tensor axis.

    Linear layers are triax's column- and row-parallel ones, those of ``parallelize``, ``nn.Linear`` and GPT-2's
    ``Conv1D``. The output layer keeps its weight, and so do embeddings, norms and experts.

    Args:
        module: the module, whose values are there. It cannot be trained afterwards.
        grid: grid whose tensor axis shards it.
        options: the options; None: groups of 64 inputs.

    Returns:
        The names of the layers.

    Raises:
        ValueError: a layer is quantized already, or the module is itself a linear layer.
    """
    uses = _count_uses(module)
    work = []
    for name, layer in module.named_modules():
        if isinstance(layer, _QuantizedWeight):
            raise ValueError(f"{name} is quantized already. Quantize a model once.")
        # A weight in several places is that of the embedding too.
        if is_linear(layer) and uses.get(id(layer.weight)) == 1 and not _is_head(name, layer, module):
            work.append((name, layer))
    if any(layer is module for _, layer in work):
        raise ValueError("the module is itself a linear layer, which cannot be replaced: pass nn.Sequential(module)")
    replaced = {layer: _quantized(layer, grid.tensor, options or Int8()) for _, layer in work}
    for parent in [*module.modules()]:
        for name, child in [*parent._modules.items()]:
            if child in replaced:
                setattr(parent, name, replaced[child])
    return [name for name, _ in work]


def weight_bytes(module: nn.Module) -> int:
    """Return the memory in bytes of a module's parameters and buffers, each counted once."""
    tensors = {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())}
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def is_linear(layer: Any) -> bool:
    """Return True for a layer that multiplies its input by a weight of two dims."""
    return (isinstance(layer, _LINEAR) or type(layer).__name__ == "Conv1D") and layer.weight.dim() == 2


def dequantize(numbers: Tensor, scale: Tensor, zero: Tensor | None, group: Tensor) -> Tensor:
    """Return the fp32 weight: (N, K) from int8 (N, K), and scales and zeros (N, G)."""
    if group.numel():  # groups that the tensor axis cuts, or a last one that is shorter
        value = numbers * scale.index_select(1, group)
        return value if zero is None else value.add_(zero.index_select(1, group))
    value = numbers.unflatten(1, (scale.shape[1], -1)) * scale[..., None]
    return (value if zero is None else value.add_(zero[..., None])).flatten(1)


def quantize_tensor(
    w: Tensor, options: Int8, places: Tensor, inputs: int, largest: Callable[[Tensor], Tensor] = lambda x: x
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """Quantize a weight.

    Args:
        w: (N, K), this rank's inputs.
        options: the options.
        places: (K,) the place of each of this rank's inputs in the whole weight.
        inputs: number of inputs of the whole weight.
        largest: function that returns the maximum over the ranks that hold other inputs, elementwise.

    Returns:
        int8 (N, K); scales and zeros (None if symmetric), fp32 (N, G); and the group of each input, (K,), or an empty
        tensor if the groups are equal runs of this rank's inputs.
    """
    size, w = options.size(inputs), w.detach().float()
    group_of_input = places // size  # group of each input in the whole weight
    count = -(-inputs // size)
    index = group_of_input.expand_as(w)

    def over_groups(x: Tensor) -> Tensor:  # (N, K) -> (N, groups of the whole weight)
        return largest(x.new_full((len(w), count), -torch.inf).scatter_reduce_(1, index, x, "amax"))

    zero = None
    if options.symmetric:
        scale = over_groups(w.abs()) / 127
    else:
        top, bottom = over_groups(w), -over_groups(-w)
        scale, zero = (top - bottom) / 254, (top + bottom) / 2
    scale = scale.clamp(min=torch.finfo(torch.float32).tiny)
    centered = w if zero is None else w - zero.gather(1, index)
    numbers = (centered / scale.gather(1, index)).round_().clamp_(-127, 127)
    first, last = int(group_of_input.min()), int(group_of_input.max()) + 1
    scale, zero = scale[:, first:last].clone(), None if zero is None else zero[:, first:last].clone()
    group = group_of_input - first
    even = len(group) == (last - first) * size and torch.equal(group, torch.arange(len(group), device=w.device) // size)
    return numbers.to(torch.int8), scale, zero, group[:0] if even else group


@torch.no_grad()
def _quantized(layer: Any, axis: Axis, options: Int8) -> nn.Module:
    """Return a layer that takes the place of another: with its members, and an int8 weight. The other loses its own."""
    weight = layer.weight
    layout, transposed = layout_of(weight), bool(getattr(layer, "transposed", type(layer).__name__ == "Conv1D"))
    dim = 0 if transposed else 1  # of the inputs
    inputs, places = layout.shape[dim], torch.arange(weight.shape[dim], device=weight.device)
    share: Callable[[Tensor], Tensor] = lambda x: x  # noqa: E731
    if layout.sharded and layout.shard_dim == dim and axis.size > 1:
        (box,) = layout.boxes(axis.rank, axis.size)
        places = places + box.whole[dim].start

        def share(x: Tensor) -> Tensor:
            x = x.contiguous()
            axis.all_reduce(x, op="max")
            return x

    matrix = weight.t() if transposed else weight
    numbers, scale, zero, group = quantize_tensor(matrix, options, places, inputs, share)
    del layer._parameters["weight"]
    cls = type(layer)
    int8: Any = type(f"Int8{cls.__name__}", (_QuantizedWeight, cls), {"__module__": cls.__module__})
    new = int8.__new__(int8)
    new.__setstate__(vars(layer))  # as copy.copy does
    new.weight_meta, new.weight_layout = (weight.dtype, transposed), layout
    new.register_buffer("weight_int8", (numbers.t() if transposed else numbers).contiguous())
    new.register_buffer("weight_scale", scale)
    new.register_buffer("weight_zero", zero)
    new.register_buffer("weight_group", group, persistent=False)
    if getattr(layer, "together", None) is not None:
        layer.together.replace(layer, new)
    assert isinstance(new, nn.Module)
    return new


def _count_uses(module: nn.Module) -> dict[int, int]:
    """Return for each parameter, by its id, in how many modules it is: a tied weight is in several."""
    uses: dict[int, int] = {}
    for layer in module.modules():
        for parameter in layer._parameters.values():
            if parameter is not None:
                uses[id(parameter)] = uses.get(id(parameter), 0) + 1
    return uses


def _is_head(name: str, layer: Any, module: nn.Module) -> bool:
    """True for the layer that makes the logits."""
    output = getattr(module, "get_output_embeddings", None)
    made = output is not None and output() is layer
    return made or isinstance(layer, VocabParallelHead) or name.rpartition(".")[2] == "lm_head"
