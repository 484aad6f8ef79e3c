"""Adapters of a linear layer: modules that compute the low-rank update, or DoRA's, of the outputs on a rank.

    y = x W^T + b                         the layer's outputs, in one or several fused parts
    y + s (x A^T) B^T                     LoRA (Hu et al. 2021, arXiv:2106.09685)
    b + m / |W + s B A| (y - b + s (x A^T) B^T)     DoRA (Liu et al. 2024, arXiv:2402.09353)

    layer               A                           B                           reduced over the tensor axis
    column-parallel     replicated                  sharded like W's outputs    backward: the gradient of x A^T
    row-parallel        sharded like W's inputs     replicated                  forward: x A^T
    replicated          replicated                  replicated                  nothing

So each message has r channels. DoRA's norms of the rows |W + s B A| are constants for the gradient (section 4.3). A
rank of a row-parallel layer has a part of each row: the squares are summed over the tensor axis.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..base.uncompiled import uncompiled
from ..grid.comm.axis import Axis
from ..grid.layout import layout_of, set_layout
from ..grid.randomness.random import Constant, Uniform, seeded, sharded_parameter
from .adaptable import rows_in_use
from .column import column_linear
from .linear import reduced
from .lora_layouts import FactorLayouts

DEFAULT = "default"  # name of a model's set of adapters, as PEFT's


class Adapter(nn.Module):
    """Factors A and B of the update of one linear layer, or of one of several layers that are fused along the outputs.

    Args:
        layouts: of the factors.
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
        layouts: FactorLayouts,
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
        a, b = layouts
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
        """Return the norms of rows: (N,). In a row-parallel layer this rank has a part of each row, else whole rows."""
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

    A model may have several sets of adapters. An adapter has the name of its part in the set ``default``, and the name
    ``part@set`` in another set.

    Args:
        lengths: length of each part of the layer's outputs on this rank.

    Attributes:
        active: names of the sets whose updates are added.
    """

    def __init__(self, lengths: Sequence[int]) -> None:
        super().__init__()
        self.lengths = list(lengths)
        self._names_of_parts: list[list[str]] = [[] for _ in lengths]
        self.active: tuple[str, ...] = ()

    def add(self, name: str, adapters: Sequence[tuple[str, Adapter] | None], active: bool) -> None:
        """Add a set of adapters: for each part its name and adapter, or None."""
        for names, named in zip(self._names_of_parts, adapters, strict=True):
            if named is not None:
                part, adapter = named
                key = named_in(name, part)
                self.add_module(key, adapter.requires_grad_(active))
                names.append(key)
        self.active = (*self.active, name) if active else self.active

    def forward(self, layer: Any, y: Tensor, x: Tensor, bias: Tensor | None) -> Tensor:
        """Return the layer's output y with the updates that belong to the input x.

        ``bias`` is that of this rank's outputs, if y has it already.
        """
        adapters_of_parts = self._active()
        outputs = self._parts(y, dim=-1)
        rows: Sequence[Tensor | None] = [None] * len(self.lengths)
        biases = rows
        if any(adapter.magnitude is not None for adapters in adapters_of_parts for adapter in adapters):
            rows = self._parts(rows_in_use(layer), dim=0)
            biases = biases if bias is None else self._parts(bias, dim=0)
        for part, adapters in enumerate(adapters_of_parts):
            for adapter in adapters:
                outputs[part] = adapter(outputs[part], x, rows[part], biases[part])
        return torch.cat(outputs, dim=-1) if len(outputs) > 1 else outputs[0]

    def _parts(self, tensor: Tensor, dim: int) -> list[Tensor]:
        """Split a tensor of this rank's outputs; one part has no length of its own."""
        return list(tensor.split(self.lengths, dim=dim)) if len(self.lengths) > 1 else [tensor]

    def merged(self, matrix: Tensor) -> Tensor:
        """Return the layer's weight, (N, K) of this rank, with the updates."""
        lengths = self.lengths
        if sum(lengths) != len(matrix):  # keys and values: this rank computes some of their heads
            lengths = [len(matrix) // len(lengths)] * len(lengths)
        parts = list(matrix.split(lengths))
        for number, adapters in enumerate(self._active()):
            for adapter in adapters:
                parts[number] = adapter.merged(parts[number])
        return torch.cat(parts)

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
        return [[modules[key] for key in keys if set_of(key) in self.active] for keys in self._names_of_parts]


def named_in(name: str, part: str) -> str:
    """Return the name in a layer of the adapter of a part, of the set of this name."""
    return part if name == DEFAULT else f"{part}@{name}"


def set_of(key: str) -> str:
    """Return the name of the set of an adapter with this name in its layer."""
    return key.partition("@")[2] or DEFAULT
