"""The layers that ``parallelize`` puts in the place of plain ones: the same parameters under the same names, of which
each tensor rank holds its part.

They differ from ``ColumnParallelLinear`` and its kin in what they take over: a weight that exists, either way round
(GPT-2's ``Conv1D`` keeps it transposed), embeddings with a padding row, key and value heads that are fewer than ranks.
Here every gradient is whole on the rank that holds its weight, so that any optimizer in any loop may step it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from ..grid.axis import Axis
from ..grid.layout import split
from .column import column_linear, column_linears
from .embedding import check_ids
from .regions import all_reduce_copy, copy_all_reduce, gather_split

__all__ = ["ColumnSharded", "KeyValueWhole", "OnShards", "RowSharded", "Together", "VocabSharded"]


class _Linear(nn.Module):
    """A linear layer around parameters that exist.

    Args:
        weight: (outputs, inputs), or the other way round where ``transposed``.
        bias: (outputs,), or None.
        axis: that shards them.
    """

    bias: nn.Parameter | None
    together: Together | None = None  # with what is given the same input

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None, axis: Axis, transposed: bool) -> None:
        super().__init__()
        self.axis, self.transposed = axis, transposed
        self.weight = weight
        self.register_parameter("bias", bias)

    def matrix(self) -> Tensor:
        """The weight as (outputs, inputs)."""
        return self.weight.t() if self.transposed else self.weight

    def used(self) -> tuple[Tensor, Tensor | None]:
        """What this rank multiplies by: (n, K) and (n,)."""
        return self.matrix(), self.bias

    def product(self, x: Tensor) -> Tensor:
        """(..., K), the same on every rank -> (..., n)."""
        if self.together is not None:
            return self.together(self, x)
        return column_linear(x, *self.used(), self.axis)

    def extra_repr(self) -> str:
        """What ``print`` shows: this rank's sizes, and the number of shards."""
        outputs, inputs = self.matrix().shape
        return f"{inputs} -> {outputs} on this rank, bias={self.bias is not None}, tensor={self.axis.size}"


class Together:
    """Layers that are given the same input one after the other (queries, keys and values): computed at once by the
    first that is called, so that the input's gradient is reduced once for all of them.

    Args:
        axis: that shards them.
    """

    def __init__(self, axis: Axis) -> None:
        self.axis = axis
        self.members: list[_Linear] = []
        # Of those still to be called: the input, whether for a backward pass, and the output.
        self._ready: dict[nn.Module, tuple[Tensor, bool, Tensor]] = {}

    def __call__(self, layer: nn.Module, x: Tensor) -> Tensor:
        """The layer's output, (..., n) from (..., K)."""
        differentiable = torch.is_grad_enabled()
        ready = self._ready.pop(layer, None)
        if ready is not None and ready[0] is x and ready[1] == differentiable:
            return ready[2]
        outputs = column_linears(x, [member.used() for member in self.members], self.axis)
        self._ready = {member: (x, differentiable, y) for member, y in zip(self.members, outputs, strict=True)}
        return self._ready.pop(layer)[2]


class ColumnSharded(_Linear):
    """Outputs sharded: (..., K), the same on every tensor rank -> (..., N_local), or (..., N) where gathered.

    Args:
        weight, bias, axis, transposed: see above; the outputs are this rank's.
        gathered: N, the length of one part, to return all outputs on every rank; None returns this rank's.
        unit: outputs that stay together, where they are gathered.
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
        """See above."""
        y = self.product(x)  # (..., N_local)
        return y if self.gathered is None else gather_split(y, self.axis, length=self.gathered, unit=self.unit)


class RowSharded(_Linear):
    """Inputs sharded: (..., K_local) -> (..., N), the same on every tensor rank. The bias is added once, behind."""

    def forward(self, x: Tensor) -> Tensor:
        """See above."""
        y = all_reduce_copy(F.linear(x, self.matrix()), self.axis)  # (..., N)
        return y if self.bias is None else y + self.bias


class KeyValueWhole(_Linear):
    """Key or value heads that the tensor axis does not divide: whole on every rank, used where their queries are.

    (..., K), the same on every tensor rank -> (..., heads of this rank x head_dim). The gradient of the whole weight
    is summed over the ranks in the backward pass, each of which used some of its rows.

    Args:
        weight, bias, axis, transposed: see above; whole.
        heads: the first key/value head that this rank's queries use, and the one behind the last.
        head_dim: outputs a head.
        repeat: for each of this rank's queries, its head among those; None: each head once.
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
        """The rows of the heads that this rank computes, (n, K), and their bias."""
        whole = copy_all_reduce(self.weight, self.axis)
        bias = None if self.bias is None else copy_all_reduce(self.bias, self.axis)[self.rows]
        return (whole.t() if self.transposed else whole)[self.rows], bias

    def forward(self, x: Tensor) -> Tensor:
        """See above."""
        y = self.product(x)  # (..., heads x head_dim)
        if self.repeat is None:
            return y
        picked = torch.tensor(self.repeat, device=y.device)
        return y.unflatten(-1, (-1, self.head_dim)).index_select(-2, picked).flatten(-2)


class VocabSharded(nn.Module):
    """An embedding whose rows are sharded: ids (...) -> (..., D), the same on every tensor rank.

    Args:
        weight: (V_local, D), this rank's rows.
        axis: that shards them.
        num_embeddings: V.
        padding_idx: the row that gets no gradient, as in ``nn.Embedding``, or None.

    Raises:
        IndexError: in forward, an id outside the vocabulary.
    """

    def __init__(self, weight: nn.Parameter, axis: Axis, num_embeddings: int, padding_idx: int | None) -> None:
        super().__init__()
        self.axis, self.num_embeddings, self.padding_idx = axis, num_embeddings, padding_idx
        self.embedding_dim = weight.shape[1]
        self.start, self.stop = split(num_embeddings, axis.size, axis.rank)
        self.weight = weight

    def forward(self, ids: Tensor) -> Tensor:
        """See above."""
        check_ids(ids, self.num_embeddings, "token id")
        foreign = (ids < self.start) | (ids >= self.stop)  # (...)
        mine = self.padding_idx is not None and self.start <= self.padding_idx < self.stop
        padding = self.padding_idx - self.start if self.padding_idx is not None and mine else None
        rows = F.embedding((ids - self.start).masked_fill(foreign, 0), self.weight, padding)  # (..., D)
        return all_reduce_copy(rows.masked_fill(foreign[..., None], 0.0), self.axis)

    def extra_repr(self) -> str:
        """What ``print`` shows: whole sizes, and the number of shards."""
        return f"{self.num_embeddings}, {self.embedding_dim}, tensor={self.axis.size}"


class OnShards(nn.Module):
    """A layer that every rank has whole and applies to its own heads (a norm of queries, say).

    Each rank's gradient is that of its own part; they are summed over the tensor axis in the backward pass.
    """

    layer: nn.Module

    def __init__(self, layer: nn.Module, axis: Axis) -> None:
        super().__init__()
        self.axis = axis
        object.__setattr__(self, "layer", layer)  # no submodule: parameters keep their names
        for name, parameter in layer.named_parameters():
            if "." in name:
                raise TypeError(f"{type(layer).__name__} has layers of its own ({name}): name those in the plan")
            self.register_parameter(name, parameter)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the layer does."""
        weights = {name: copy_all_reduce(p, self.axis) for name, p in self.named_parameters()}
        return functional_call(self.layer, weights, args, kwargs)
