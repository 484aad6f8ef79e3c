"""Sharded layers with which ``parallelize`` replaces plain layers. Parameters keep their names.

Unlike ``ColumnParallelLinear`` and ``RowParallelLinear``, these layers are made from an existing weight, which may be
stored transposed (as in GPT-2's ``Conv1D``). They also support embeddings with a padding row, and fewer key/value heads
than ranks. No gradient is partial after the backward pass, so any optimizer in any training loop can step the weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from ..base.autograd import product_dtype
from ..grid.comm.axis import Axis
from ..grid.comm.regions import all_reduce_copy, copy_all_reduce, gather_split
from .adaptable import Adaptable
from .column import column_linear, column_linears
from .linear import updated
from .norm import sharded_rms_norm
from .outside import ReadOutside


class _Linear(Adaptable, ReadOutside):
    """Base class of linear layers that are made from existing parameters.

    Args:
        weight: (outputs, inputs), or (inputs, outputs) if ``transposed``.
        bias: (outputs,), or None.
        axis: the axis that shards weight and bias.
    """

    bias: nn.Parameter | None
    together: Together | None = None  # with what is given the same input

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None, axis: Axis, transposed: bool) -> None:
        super().__init__()
        self.axis, self.transposed = axis, transposed
        self.weight = weight
        self.register_parameter("bias", bias)

    def matrix(self) -> Tensor:
        """Return the weight as a matrix (outputs, inputs), transposed if needed."""
        return self._shard.t() if self.transposed else self._shard

    def used(self) -> tuple[Tensor, Tensor | None]:
        """Return the weight (n, K) and bias (n,) that this rank multiplies by."""
        return self.matrix(), self.bias

    def product(self, x: Tensor) -> Tensor:
        """Compute this rank's outputs (..., n) from the input (..., K), which is equal on every rank."""
        if self.together is not None:
            return updated(self, self.together(self, x), x, self._used_bias())
        weight, bias = self.used()
        return updated(self, column_linear(x, weight, bias, self.axis), x, bias)

    def _used_bias(self) -> Tensor | None:
        """Return the bias (n,) of the outputs that this rank computes."""
        return self.bias

    def extra_repr(self) -> str:
        """Text that ``print`` shows: this rank's sizes, and the number of shards."""
        outputs, inputs = self.matrix().shape
        return f"{inputs} -> {outputs} on this rank, bias={self.bias is not None}, tensor={self.axis.size}"


class Together:
    """Group of layers that are called one after the other with the same input, such as queries, keys and values.

    When the first layer is called, the outputs of all layers of the group are computed, so that the input's gradient is
    reduced once for the whole group. An input without a gradient is multiplied by the weight of one layer at a time.

    Args:
        axis: the axis that shards the layers.
    """

    def __init__(self, axis: Axis) -> None:
        self.axis = axis
        self.members: list[_Linear] = []
        # For each layer not yet called: the input, what ``_state`` was, and the output.
        self._ready: dict[nn.Module, tuple[Tensor, tuple[Any, ...], Tensor]] = {}

    def replace(self, layer: _Linear, new: _Linear) -> None:
        """Put another layer in the place of a member."""
        self.members[self.members.index(layer)] = new

    def __call__(self, layer: _Linear, x: Tensor) -> Tensor:
        """Return one layer's output (..., n) for the input x (..., K).

        The first call with an input computes the outputs of the whole group and keeps those of the other layers for
        their calls.
        """
        if not (torch.is_grad_enabled() and x.requires_grad):
            return column_linears(x, [layer.used()], self.axis)[0]
        state, ready = self._state(x), self._ready.pop(layer, None)
        if ready is not None and ready[0] is x and ready[1] == state:
            return ready[2]
        outputs = column_linears(x, [member.used() for member in self.members], self.axis)
        self._ready = {member: (x, state, y) for member, y in zip(self.members, outputs, strict=True)}
        return self._ready.pop(layer)[2]

    def _state(self, x: Tensor) -> tuple[Any, ...]:
        """Return what tells if outputs that were kept for the input x are still right."""
        parameters = [p for member in self.members for p in member._parameters.values() if p is not None]
        return product_dtype(x), x._version, *((id(p), p._version) for p in parameters)


class ColumnSharded(_Linear):
    """Column-parallel linear layer made from this rank's shard of an existing weight.

    Args:
        weight, bias, axis, transposed: as for ``_Linear``, with this rank's shard of the outputs.
        gathered: N, the number of outputs, if all outputs are returned on every rank; None to return this rank's.
        unit: number of consecutive outputs that stay on one rank; used only to gather the outputs.

    Shape:
        (..., K), equal on every tensor-parallel rank -> (..., N_local), or (..., N) if gathered.
    """

    def __init__(
        self,
        weight: nn.Parameter,
        bias: nn.Parameter | None,
        axis: Axis,
        transposed: bool = False,
        gathered: int | None = None,
        unit: int = 1,
    ) -> None:
        super().__init__(weight, bias, axis, transposed)
        self.gathered, self.unit = gathered, unit

    def forward(self, x: Tensor) -> Tensor:
        """Compute this rank's outputs, and gather them if asked: (..., K) -> (..., N_local) or (..., N)."""
        y = self.product(x)  # (..., N_local)
        return y if self.gathered is None else gather_split(y, self.axis, length=self.gathered, unit=self.unit)


class RowSharded(_Linear):
    """Row-parallel linear layer: (..., K_local) -> (..., N), equal on every tensor-parallel rank.

    The bias is added once, after the all-reduce.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Compute this rank's product and sum it over the axis: (..., K_local) -> (..., N)."""
        y = updated(self, all_reduce_copy(F.linear(x, self.matrix()), self.axis), x, None)  # (..., N)
        return y if self.bias is None else y + self.bias


class KeyValueWhole(_Linear):
    """Key or value projection that is replicated because the tensor axis does not divide the key/value heads.

    (..., K), equal on every tensor-parallel rank -> (..., heads of this rank x head_dim). Each rank computes only the
    heads that its query heads use. The backward pass sums the weight's gradient over the ranks.

    Args:
        weight, bias, axis, transposed: as for ``_Linear``, with the weight and bias of all key/value heads.
        heads: range [start, stop) of the key/value heads that this rank's query heads use.
        head_dim: number of outputs per head.
        repeat: for each of this rank's query heads, the index of its key/value head within ``heads``. If None, each
            key/value head is returned once.
    """

    def __init__(
        self,
        weight: nn.Parameter,
        bias: nn.Parameter | None,
        axis: Axis,
        transposed: bool,
        heads: tuple[int, int],
        head_dim: int,
        repeat: Sequence[int] | None,
    ) -> None:
        super().__init__(weight, bias, axis, transposed)
        self.rows = slice(heads[0] * head_dim, heads[1] * head_dim)
        self.head_dim = head_dim
        self.repeat = None if repeat is None else tuple(repeat)

    def used(self) -> tuple[Tensor, Tensor | None]:
        """Return the rows of weight, (n, K), and bias, (n,), of the key/value heads that this rank computes."""
        weight = copy_all_reduce(self._shard, self.axis)
        return (weight.t() if self.transposed else weight)[self.rows], self._used_bias()

    def _used_bias(self) -> Tensor | None:
        return None if self.bias is None else copy_all_reduce(self.bias, self.axis)[self.rows]

    def forward(self, x: Tensor) -> Tensor:
        """Compute this rank's keys or values: (..., K) -> (..., heads of this rank x head_dim)."""
        y = self.product(x)  # (..., heads x head_dim)
        if self.repeat is None:
            return y
        picked = torch.tensor(self.repeat, device=y.device)
        return y.unflatten(-1, (-1, self.head_dim)).index_select(-2, picked).flatten(-2)


class FusedWhole(_Linear):
    """Fused projection to this rank's queries and to the only key/value head; the weight is replicated.

    (..., K), equal on every tensor-parallel rank -> (..., this rank's query heads, then the key and the value).

    Args:
        weight, bias, axis: as for ``_Linear``, whole.
        heads: range [start, stop) of this rank's query heads.
        head_dim: number of outputs per head.
    """

    adaptable = False

    def __init__(
        self, weight: nn.Parameter, bias: nn.Parameter | None, axis: Axis, heads: tuple[int, int], head_dim: int
    ) -> None:
        super().__init__(weight, bias, axis, transposed=False)
        self.rows, self.last = slice(heads[0] * head_dim, heads[1] * head_dim), 2 * head_dim

    def used(self) -> tuple[Tensor, Tensor | None]:
        """Return the rows of weight, (n, K), and bias, (n,), that this rank computes."""
        wholes = [None if tensor is None else copy_all_reduce(tensor, self.axis) for tensor in (self._shard, self.bias)]
        weight, bias = (None if w is None else torch.cat([w[self.rows], w[-self.last :]]) for w in wholes)
        assert weight is not None
        return weight, bias

    def forward(self, x: Tensor) -> Tensor:
        """Compute this rank's queries, the key and the value: (..., K) -> (..., n)."""
        return self.product(x)


class EmbeddingSharded(ReadOutside):
    """Embedding whose columns are sharded, made from this rank's: integers (...) -> (..., D_local).

    The row ``padding_idx`` gets no gradient, as in ``nn.Embedding``.
    """

    def __init__(self, weight: nn.Parameter, axis: Axis, padding_idx: int | None = None) -> None:
        super().__init__()
        self.weight, self.axis, self.padding_idx = weight, axis, padding_idx

    def forward(self, ids: Tensor) -> Tensor:
        """Look up this rank's part of the vectors."""
        return F.embedding(ids, self._shard, self.padding_idx)


class ShardedRMSNorm(nn.Module):
    """RMSNorm over a last dim that is sharded, made from this rank's shard of the weight: (..., D / t), unchanged.

    Args:
        weight: (D / t,), this rank's shard.
        width: D, the length of the dim over all ranks.
        eps: constant that is added to the mean of the squares.
        axis: the axis that shards the dim.
    """

    def __init__(self, weight: nn.Parameter, width: int, eps: float, axis: Axis) -> None:
        super().__init__()
        self.weight, self.width, self.eps, self.axis = weight, width, eps, axis

    def forward(self, x: Tensor) -> Tensor:
        """Normalize this rank's shard."""
        return sharded_rms_norm(x, self.weight, (-1,), self.width, self.eps, self.axis)


class OnShards(nn.Module):
    """Replicated layer that each rank applies to its own heads, such as a norm of the queries.

    Each rank's gradient is partial. The backward pass sums the gradients over the tensor axis.
    """

    layer: nn.Module

    def __init__(self, layer: nn.Module, axis: Axis) -> None:
        super().__init__()
        self.axis = axis
        object.__setattr__(self, "layer", layer)  # no submodule: parameters keep their names
        for name, parameter in layer.named_parameters():
            if "." in name:
                raise TypeError(f"{type(layer).__name__} contains other layers ({name}). Name those in the plan.")
            self.register_parameter(name, parameter)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Apply the layer, and sum the gradients of its weights over the tensor axis in the backward pass."""
        weights = {name: copy_all_reduce(p, self.axis) for name, p in self.named_parameters()}
        return functional_call(self.layer, weights, args, kwargs)
