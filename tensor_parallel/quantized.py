"""Frozen weights of linear layers in 4 or 8 bits, which are computed in floating point where a product reads them.

A layer keeps its class and its name. Its parameter ``weight`` gives way to a module ``quantized`` with integer
parameters (nf4.py), and ``layer.weight`` becomes a tensor without memory: each operation on it computes the weight
from the integers. Autograd saves that tensor, so between forward and backward no weight is there in floating point
(QLoRA, Dettmers et al. 2023, arXiv:2305.14314, equation 5).

Blocks are those of the whole weight: where the tensor axis shards the inputs, and a block lies on two ranks, its scale
is the maximum over both. So the weights are the same on every grid.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ..base.torch_private import cast_operator, make_wrapper, no_function, tree_leaves, tree_map
from ..grid.comm.axis import Axis
from ..grid.layout import Layout, layout_of, set_layout
from . import nf4

_SAME = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)
_TRANSPOSED = (torch.ops.aten.t.default, torch.ops.aten.transpose.int)


class QuantizedNumbers(nn.Module):
    """Integers from which the weight of a linear layer is computed.

    Args:
        form: ``nf4``, ``nf4-double`` or ``int8``.
        layout: layout of the weight (outputs, inputs).
        axis: the tensor axis.
        weight: this rank's part of it; a placeholder without values gives integers without values, on the meta device.

    Attributes:
        codes: int8 (N, K), or uint8 (N, K / 2) with two codes in a byte; N and K are those of this rank.
        scales: (N, G), the bits of fp32 numbers as int32; uint8 codes with double quantization. G counts the blocks of
            this rank's inputs, or of all inputs if a block lies on two ranks. Integers, because what casts a model's
            floating-point tensors must not touch them.
        outer, mean: bits of fp32 numbers, of the whole matrix; only with double quantization.

    Raises:
        ValueError: a rank's part begins or ends within a byte.
    """

    codes: nn.Parameter
    scales: nn.Parameter
    outer: nn.Parameter | None
    mean: nn.Parameter | None

    def __init__(self, form: str, layout: Layout, axis: Axis, weight: Tensor) -> None:
        super().__init__()
        self.form, self.axis = form, axis
        self.shape = tuple(weight.shape)  # (N, K)
        outputs, inputs = layout.shape
        block = nf4.block_size(form, inputs)
        row = layout.shard_dim == 1
        whole_groups = -(-inputs // block)
        self.code_layout = code_layout(form, layout, axis)
        aligned = _divided(layout, block, axis.size) if row else replace(layout, shape=(outputs, whole_groups))
        self.scale_layout = Layout((outputs, whole_groups)) if aligned is None else aligned
        places = _places(layout, axis) // block  # of each input: its block in the whole weight
        first = 0 if aligned is None or not row else int(places[0])
        equal = len(places) % block == 0 and torch.equal(places - first, torch.arange(len(places)) // block)
        self._groups = None if equal or form == "int8" else (places - first).to(weight.device)
        known = not weight.is_meta and (weight.numel() < 2 or any(weight.stride()))
        with torch.no_grad():
            made = self._quantized(weight.detach().float(), places, first, whole_groups) if known else self._empty()
        for name, (tensor, own) in made.items():
            parameter = nn.Parameter(tensor, requires_grad=False)
            set_layout(parameter, replace(own, name=""))
            self.register_parameter(name, parameter)

    def _quantized(self, w: Tensor, places: Tensor, first: int, count: int) -> dict[str, tuple[Tensor, Layout]]:
        """Return the parameters' values and layouts of this rank's weight. Collective over the tensor axis."""
        index = places.to(w.device).expand_as(w)
        largest = w.new_zeros(len(w), count).scatter_reduce_(1, index, w.abs(), "amax")
        if self.code_layout.shard_dim == 1 and self.axis.size > 1:
            self.axis.all_reduce(largest, op="max")
        codes = nf4.codes_of(self.form, w, largest.gather(1, index))
        here = self.scale_layout.local_shape(self.axis.rank, self.axis.size)
        scales = largest[:, first : first + here[1]].contiguous()
        if self.form != "nf4-double":
            return self._named(codes, scales.view(torch.int32))
        all_scales = self.scale_layout.gather(self.axis, scales)
        outer_codes, outer, mean = nf4.outer_codes(all_scales)
        own_codes = self.scale_layout.shard(outer_codes, self.axis.rank, self.axis.size).contiguous()
        return self._named(codes, own_codes, outer.view(torch.int32), mean.view(torch.int32))

    def _empty(self) -> dict[str, tuple[Tensor, Layout]]:
        def meta(layout: Layout, dtype: torch.dtype) -> Tensor:
            return torch.empty(layout.local_shape(self.axis.rank, self.axis.size), dtype=dtype, device="meta")

        codes = meta(self.code_layout, torch.int8 if self.form == "int8" else torch.uint8)
        if self.form != "nf4-double":
            return self._named(codes, meta(self.scale_layout, torch.int32))
        rows, groups = self.scale_layout.shape
        outer = torch.empty(-(-rows * groups // nf4.OUTER), dtype=torch.int32, device="meta")
        return self._named(codes, meta(self.scale_layout, torch.uint8), outer, outer.new_empty(1))

    def _named(self, codes: Tensor, scales: Tensor, *outer: Tensor) -> dict[str, tuple[Tensor, Layout]]:
        made = {"codes": (codes, self.code_layout), "scales": (scales, self.scale_layout)}
        for name, tensor in zip(("outer", "mean"), outer, strict=False):
            made[name] = (tensor, Layout(tuple(tensor.shape)))
        return made

    @torch.no_grad()
    def dense(self) -> Tensor:
        """Compute the weight of this rank, fp32 (N, K)."""
        codes, scales = self.codes.detach(), self.scales.detach()
        if self.form == "nf4-double":
            places = torch.arange(math.prod(self.scale_layout.shape), device=scales.device)
            places = places.view(self.scale_layout.shape)
            places = self.scale_layout.shard(places, self.axis.rank, self.axis.size) // nf4.OUTER
            assert self.outer is not None and self.mean is not None
            outer, mean = (values.detach().view(torch.float32) for values in (self.outer, self.mean))
            scales = nf4.outer_values(scales, outer, mean, places)
        else:
            scales = scales.view(torch.float32)
        groups = None if self._groups is None else self._groups.to(scales.device)
        return nf4.weight_of(self.form, codes, scales, groups)

    def extra_repr(self) -> str:
        """Text that ``print`` shows."""
        return f"{self.form}, {self.shape[1]} -> {self.shape[0]} on this rank"


class ComputedWeight(Tensor):
    """Weight of a layer without memory of its own: an operation that reads it computes it from the layer's integers.

    A product reads it in the dtype of its other factor, anything else in its own dtype.
    """

    __torch_function__ = no_function  # type: ignore[assignment]
    numbers: QuantizedNumbers
    flipped: bool

    @staticmethod
    def __new__(
        cls, numbers: QuantizedNumbers, dtype: torch.dtype, device: torch.device, flipped: bool = False
    ) -> ComputedWeight:
        """Make the tensor (N, K), or (K, N) if ``flipped``."""
        shape = numbers.shape[::-1] if flipped else numbers.shape
        made = make_wrapper(cls, shape, dtype=dtype, device=device)
        made.numbers, made.flipped = numbers, flipped
        return made

    def dense(self, dtype: torch.dtype | None = None) -> Tensor:
        """Compute the weight as a plain tensor."""
        value = self.numbers.dense().to(dtype or self.dtype)
        return value.t() if self.flipped else value

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operation with the computed weight; views and casts of it stay without memory."""
        kwargs = dict(kwargs or {})
        first = args[0] if args else None
        if isinstance(first, ComputedWeight):
            if func in _SAME:
                return cls(first.numbers, first.dtype, first.device, first.flipped)
            if func in _TRANSPOSED:
                return cls(first.numbers, first.dtype, first.device, not first.flipped)
            if func is cast_operator and set(kwargs) <= {"dtype", "non_blocking"}:
                return cls(first.numbers, kwargs.get("dtype") or first.dtype, first.device, first.flipped)
        if func._schema.is_mutable:
            for value in tree_leaves((args[:1], kwargs.get("out"))):
                if isinstance(value, ComputedWeight):
                    raise RuntimeError(
                        f"{layout_of(value).name or 'a weight'} is kept in {value.numbers.form}, and {func} would "
                        "write to it: change the model before its base is quantized (the option lora.base)"
                    )
        values = (*args, *kwargs.values())
        others = [value for value in values if isinstance(value, Tensor) and not isinstance(value, ComputedWeight)]
        dtype = others[0].dtype if others and others[0].is_floating_point() else None

        def dense(value: Any) -> Any:
            return value.dense(dtype) if isinstance(value, ComputedWeight) else value

        args, kwargs = tree_map(dense, (args, kwargs))
        return func(*args, **kwargs)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Text that ``print`` shows."""
        return f"ComputedWeight({self.numbers.form}, {tuple(self.shape)}, {self.dtype})"

    def __deepcopy__(self, memo: dict[int, Any]) -> ComputedWeight:
        """Return the weight of the copied layer."""
        copied = type(self)(copy.deepcopy(self.numbers, memo), self.dtype, self.device, self.flipped)
        copied.__dict__.update({key: value for key, value in vars(self).items() if key != "numbers"})
        return copied


def quantize_layer(layer: Any, name: str, form: str, axis: Axis, transposed: bool) -> None:
    """Keep the weight of a linear layer in 4 or 8 bits from now on. Collective over the tensor axis.

    Args:
        layer: the layer.
        name: its name in the whole model, for messages.
        form: ``nf4``, ``nf4-double`` or ``int8``.
        axis: the tensor axis.
        transposed: the layer's weight is (inputs, outputs).
    """
    weight = layer._parameters["weight"]
    own = weight.detach().t() if transposed else weight.detach()
    numbers = QuantizedNumbers(form, matrix_layout(weight, name, transposed), axis, own)
    weight_layout = layout_of(weight)
    del layer._parameters["weight"]
    layer.add_module("quantized", numbers)
    seen: Any = ComputedWeight(numbers, weight.dtype, weight.device, transposed)
    set_layout(seen, weight_layout)
    layer.__dict__["weight"] = seen


def matrix_layout(weight: Tensor, name: str, transposed: bool) -> Layout:
    """Return the layout of a layer's weight as a matrix (outputs, inputs); arguments as for ``quantize_layer``."""
    layout = replace(layout_of(weight), name=f"{name}.weight", tie=None)
    if not transposed:
        return layout
    dim = None if layout.shard_dim is None else 1 - layout.shard_dim
    return replace(layout, shape=layout.shape[::-1], shard_dim=dim)


def code_layout(form: str, layout: Layout, axis: Axis) -> Layout:
    """Return the layout of the codes of a weight (outputs, inputs).

    Raises:
        ValueError: a rank's part begins or ends within a byte.
    """
    if form == "int8":
        return layout
    divided = _divided(layout, 2, axis.size)
    if divided is None or layout.local_shape(axis.rank, axis.size)[1] % 2:
        raise ValueError(
            f"{layout.name or 'a weight'} of {layout.shape} has an odd number of inputs on a rank of tensor="
            f"{axis.size}, and {form} has two inputs in a byte: use a tensor axis for which it is even, or int8"
        )
    return divided


def _divided(layout: Layout, by: int, size: int) -> Layout | None:
    """Return the layout of a tensor with one column for each ``by`` columns, if no rank's part cuts such columns.

    Columns may be left over at the end of the whole tensor.
    """
    shape = (layout.shape[0], -(-layout.shape[1] // by))
    if layout.shard_dim != 1:
        return replace(layout, shape=shape)
    for unit in {layout.unit // by if layout.unit % by == 0 else 1, 1}:
        if shape[1] % unit:
            continue
        made = replace(layout, shape=shape, unit=unit)
        if all(_matches(layout, made, by, rank, size) for rank in range(size)):
            return made
    return None


def _matches(layout: Layout, divided: Layout, by: int, rank: int, size: int) -> bool:
    (fine,), (coarse,) = layout.boxes(rank, size), divided.boxes(rank, size)
    start, stop = fine.whole[1].start, fine.whole[1].stop
    ends = stop % by == 0 or stop == layout.shape[1]
    return start == coarse.whole[1].start * by and ends and -(-stop // by) == coarse.whole[1].stop


def _places(layout: Layout, axis: Axis) -> Tensor:
    """Return the place in the whole weight of each of this rank's inputs."""
    places = torch.arange(layout.shape[1])
    if layout.shard_dim != 1:
        return places
    (box,) = layout.boxes(axis.rank, axis.size)
    return places[box.whole[1]]
