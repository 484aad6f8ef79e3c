"""Linear layers sharded over the tensor axis: by columns (outputs) or by rows (inputs) of the paper's Y = XA.

Shoeybi et al. 2019, arXiv:1909.08053, section 3: a column-parallel layer followed by a row-parallel one needs
one all-reduce forward (f-bar) and one backward (f). All products are ``F.linear`` and ``column_linear``; the split
backward intercepts these two functions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..grid import Grid
from ..grid.comm.axis import Axis
from ..grid.comm.regions import border, gather_split, reduce_scatter_gather, split_gather
from ..grid.layout import Layout, layout_of
from ..grid.randomness.random import Distribution, Uniform, sharded_parameter
from ..grid.ranges import check_units
from .adaptable import Adaptable
from .column import column_linear
from .outside import ReadOutside


class _ParallelLinear(Adaptable, ReadOutside):
    """Parameters that column- and row-parallel layers share, with the initial distributions of ``nn.Linear``.

    Args:
        axis: the axis that shards the weight.
        layout: layout of the weight, (out_features, in_features) over all ranks.
        bias_layout: layout of the bias, or None for a layer without a bias.
        sequence_parallel, init, bias_init, device, dtype: as for the layers.
    """

    def __init__(
        self,
        axis: Axis,
        layout: Layout,
        bias_layout: Layout | None,
        sequence_parallel: bool,
        init: Distribution | None,
        bias_init: Distribution | None,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__()
        self.axis, self.sequence_parallel = axis, sequence_parallel
        self.out_features, self.in_features = layout.shape
        self.parts, self.unit = layout.parts, layout.unit
        default = Uniform(1 / math.sqrt(self.in_features) if self.in_features else 0.0)
        make = partial(sharded_parameter, rank=axis.rank, size=axis.size, device=device, dtype=dtype)
        self.weight = make(layout, init or default)
        self.bias = None if bias_layout is None else make(bias_layout, bias_init or default)

    def extra_repr(self) -> str:
        """Text that ``print`` shows: whole sizes, and the number of shards."""
        parts = "" if self.parts is None else f", parts={self.parts}"
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"
            f"{parts}, tensor={self.axis.size}"
        )


class ColumnParallelLinear(_ParallelLinear):
    """Linear layer ``y = x A^T + b`` with the rows of A (the outputs) sharded over the tensor axis.

    On a grid with tensor=1 it is ``nn.Linear``. Initial values are drawn for the whole weight, with the whole
    fan-in, so that they do not depend on the tensor axis's size.

    >>> layer = triax.ColumnParallelLinear(16, 64, grid=triax.Grid())  # with tensor=2, weight is (32, 16)
    >>> layer.weight.shape, layer(torch.ones(2, 16)).shape
    (torch.Size([64, 16]), torch.Size([2, 64]))

    Args:
        in_features: K, the number of inputs.
        out_features: N, the number of outputs of the whole layer. The tensor axis's size t must divide N and each of
            ``parts``, unless ``unit`` is given.
        bias: add a bias, sharded like the outputs.
        grid: grid whose tensor axis shards the layer.
        gather_output: return all N outputs on every rank, rather than this rank's N / t.
        parts: numbers of outputs of layers that are fused along the outputs (for example q, k and v), with sum N.
            Each part is sharded separately: a rank then holds a slice of q, a slice of k and a slice of v, in this
            order.
        unit: number of consecutive outputs that stay on one rank (for example those of a head), in every part.
            ``grid.ranges.split`` distributes whole units, unevenly if t does not divide the number of units.
        sequence_parallel: the input is this rank's shard of the sequence (dim 1), and the layer gathers it. Only the
            shard is saved for the backward pass (Korthikanti et al. 2022, arXiv:2205.05198, section 4.2.2).
        init: distribution of the initial weight; by default ``nn.Linear``'s, uniform within 1 / sqrt(K).
        bias_init: distribution of the initial bias; by default ``nn.Linear``'s, which is the same.
        device, dtype: device and dtype of the parameters, as for ``nn.Linear``.

    Attributes:
        weight: (N / t, K).
        bias: (N / t,), or None.

    Shape:
        (..., K), the same on every tensor-parallel rank -> (..., N / t), or (..., N) if ``gather_output``.
        With ``sequence_parallel``: (B, T / t, K) -> (B, T, N / t), or (B, T, N).

    Raises:
        ValueError: t does not divide N or one of the parts, the parts do not add up to N, ``unit`` does not divide N
            and each part, or there are fewer units than ranks.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        grid: Grid,
        gather_output: bool = False,
        parts: Sequence[int] | None = None,
        unit: int | None = None,
        sequence_parallel: bool = False,
        init: Distribution | None = None,
        bias_init: Distribution | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        fused = None if parts is None else tuple(parts)
        what = "out_features" if parts is None else "one of the parts"
        for length in fused or (out_features,):
            _shareable(type(self).__name__, what, length, grid.tensor.size, unit)
        layout = Layout((out_features, in_features), shard_dim=0, parts=fused, unit=unit or 1)
        bias_layout = replace(layout, shape=(out_features,)) if bias else None
        super().__init__(grid.tensor, layout, bias_layout, sequence_parallel, init, bias_init, device, dtype)
        self.gather_output = gather_output

    def forward(self, x: Tensor) -> Tensor:
        """Compute this rank's outputs or, with ``gather_output``, all outputs; shapes as in the class's docstring."""
        y = column_linear(x, self._shard, self.bias, self.axis, self.sequence_parallel)  # (..., N / t)
        y = updated(self, y, x, self.bias)
        return self._gather(y) if self.gather_output and self.axis.size > 1 else y

    def _gather(self, y: Tensor) -> Tensor:
        lengths = self.parts or (self.out_features,)
        weight = self._parameters.get("weight")  # as it is registered, with its layout
        layout = layout_of(self.weight if weight is None else weight)
        own_parts = y.split(layout.lengths(self.axis.rank, self.axis.size), dim=-1)
        parts = [gather_split(p, self.axis, length=n, unit=self.unit) for p, n in zip(own_parts, lengths, strict=True)]
        return torch.cat(parts, dim=-1) if len(parts) > 1 else parts[0]  # (..., N)


class RowParallelLinear(_ParallelLinear):
    """Linear layer ``y = x A^T + b`` with the columns of A (the inputs) sharded over the tensor axis.

    On a grid with tensor=1 it is ``nn.Linear``. The bias is replicated on every rank and is added after the all-reduce,
    because the all-reduce would add it t times.

    >>> layer = triax.RowParallelLinear(64, 16, grid=triax.Grid())  # with tensor=2, weight is (16, 32)
    >>> layer.weight.shape, layer(torch.ones(2, 64)).shape
    (torch.Size([16, 64]), torch.Size([2, 16]))

    Args:
        in_features: K, the number of inputs of the whole layer. The tensor axis's size t must divide K, unless
            ``unit`` is given.
        out_features: N, the number of outputs.
        bias: add a bias.
        grid: grid whose tensor axis shards the layer.
        input_is_parallel: True if the input is already this rank's shard of K / t values, as a column-parallel layer
            returns it. If False, the input has all K values, and the layer takes this rank's slice.
        unit: number of consecutive inputs that stay on one rank (for example those of a head). ``grid.ranges.split``
            distributes whole units, unevenly if t does not divide the number of units.
        sequence_parallel: return on each rank only its shard of the sequence (dim 1). The bias is then added to each
            shard, and the bias's gradient is partial: it is summed over the tensor axis when gradients are reduced.
        init: distribution of the initial weight; by default ``nn.Linear``'s, uniform within 1 / sqrt(K) for the
            whole K.
        bias_init: distribution of the initial bias; by default ``nn.Linear``'s, which is the same.
        device, dtype: device and dtype of the parameters, as for ``nn.Linear``.

    Attributes:
        weight: (N, K / t).
        bias: (N,), or None.

    Shape:
        (..., K / t), or (..., K) unless ``input_is_parallel`` -> (..., N), the same on every tensor-parallel rank.
        With ``sequence_parallel``: (B, T, K / t) -> (B, T / t, N).

    Raises:
        ValueError: t does not divide K, ``unit`` does not divide K, or there are fewer units than ranks; in forward,
            with ``sequence_parallel``, t does not divide T.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        grid: Grid,
        input_is_parallel: bool = True,
        unit: int | None = None,
        sequence_parallel: bool = False,
        init: Distribution | None = None,
        bias_init: Distribution | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if sequence_parallel and not input_is_parallel:
            raise ValueError(
                "RowParallelLinear got sequence_parallel=True and input_is_parallel=False, but sequence parallelism "
                "needs an input that is sharded over the tensor axis. Leave out one of the two arguments."
            )
        _shareable(type(self).__name__, "in_features", in_features, grid.tensor.size, unit)
        layout = Layout((out_features, in_features), shard_dim=1, unit=unit or 1)
        bias_layout = Layout((out_features,), partial=sequence_parallel and grid.tensor.size > 1) if bias else None
        super().__init__(grid.tensor, layout, bias_layout, sequence_parallel, init, bias_init, device, dtype)
        self.input_is_parallel = input_is_parallel

    def forward(self, x: Tensor) -> Tensor:
        """Compute the product and sum it over the tensor-parallel ranks; shapes as in the class's docstring."""
        if self.axis.size == 1:
            return updated(self, F.linear(x, self._shard, self.bias), x, self.bias)
        if not self.input_is_parallel:
            x = split_gather(x, self.axis, unit=self.unit)  # (..., K / t)
        y = reduced(F.linear(x, self._shard), self.axis, self.sequence_parallel)  # (..., N)
        y = updated(self, y, x, None)
        return y if self.bias is None else y.add_(self.bias)


def reduced(y: Tensor, axis: Axis, sequence_parallel: bool) -> Tensor:
    """Sum y over the ranks of the axis, by all-reduce (f-bar) or by reduce-scatter along the sequence, dim 1 (g-bar).

    ``y`` may be overwritten, so it must be a tensor that no backward pass needs, such as a matrix product.

    Raises:
        ValueError: the axis's size does not divide the sequence's length.
    """
    if not sequence_parallel:
        return border("all_reduce", "copy", y, axis, ours=True)
    if y.dim() < 2 or y.shape[1] % axis.size:
        raise ValueError(
            f"the input has shape {tuple(y.shape)}, but sequence parallelism shards dim 1 in equal parts over "
            f"{axis.name}={axis.size}. Pad the sequence to a multiple of {axis.size}, or build the model with "
            "sequence_parallel=False."
        )
    return reduce_scatter_gather(y, axis, dim=1)


def updated(layer: nn.Module, y: Tensor, x: Tensor, bias: Tensor | None) -> Tensor:
    """Return a linear layer's output y for the input x, with the updates of its adapters if it has any (lora.py).

    ``bias`` is that of this rank's outputs, if y has it already.
    """
    adapters = layer._modules.get("lora")
    return y if adapters is None else adapters(layer, y, x, bias)


def _shareable(layer: str, what: str, length: int, size: int, unit: int | None) -> None:
    """Raise ValueError if the axis's size does not divide a length or, with ``unit``, if a rank would get no unit."""
    if unit is not None:
        check_units(f"{layer}: {what}", length, unit, size)
    elif length % size:
        below, above = length // size * size, (length // size + 1) * size
        near = f"{below} or {above}" if below else f"{above}"
        fits = ", ".join(str(t) for t in range(1, size) if length % t == 0)
        raise ValueError(
            f"{layer}: {what} is {length}, which tensor={size} does not divide. Make it {near}, or give the grid "
            f"tensor={fits}."
        )
