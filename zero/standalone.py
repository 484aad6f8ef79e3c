"""ZeRO in a plain PyTorch loop, without an engine: one optimizer over the replicas of any module.

optimizer = ShardedOptimizer(torch.optim.AdamW, model.parameters(), grid.data, stage=2, lr=1e-3)
for x, y in batches:                            # this replica's own
    optimizer.zero_grad()
    loss_fn(model(x), y).backward()             # gradients are reduced while it runs
    optimizer.step()
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..grid import Axis
from .arguments import checked, compressed
from .compression import MakeExchange
from .compressor import Compressor
from .mode import Mode
from .norm import clip_coefficient
from .onebit_step import stepped_by
from .plus import Plus
from .stepped import PassesOptimizer
from .topk import TopK, require_no_momentum


class ShardedOptimizer(PassesOptimizer):
    """An optimizer of torch's whose state, gradients and weights are sharded over replicas (ZeRO).

    It is made alike on every rank, after the model is on its device, and it broadcasts the parameters of the axis's
    first rank, as DDP does (not buffers). Gradients are then summed over the axis within the backward pass, by torch's
    own hooks, and divided by the number of replicas: each rank's loss is a mean over its own samples, as under DDP.
    Gradients of several backward passes add up, as ever in torch: divide the loss by their number for a mean.

    Learning-rate schedulers take it for what it is, a ``torch.optim.Optimizer``. A parameter that had no gradient on
    any replica stands still (Adam's count of steps, for its bias correction, goes on). Parameters' own ``.grad`` is
    whole in stage 0 only, after ``synchronize``; ``gradients()`` has it in every stage. ``torch.amp.GradScaler`` looks
    at ``.grad`` and so does not work with it: use bf16.

    Args:
        optimizer_class: one that treats every element alone: Adam, AdamW, SGD, ...; or, in stage 0, one of those that
            compress their momentum: ``OneBitAdam``, ``ZeroOneAdam``, ``OneBitLamb``.
        params: parameters, parameter groups or named parameters, as the class takes them.
        axis: ``grid.data``. The grid's tensor axis is summed over too, where parameters' layouts say so.
        stage: of ZeRO, 0 to 3: nothing is sharded; the optimizer's state; gradients too; weights too.
        module: the model; stage 3 needs it, to have weights whole where they are used.
        units: of the module, in stage 3: patterns of names or submodules; see ``find_units``. By default the entries
            of its ``ModuleList`` s and ``Sequential`` s. Every replica runs the same ones in the same order.
        keep_gathered: in stage 3, hold weights whole from a step's first forward to its last backward pass. A loss
            that has a gradient in it (``create_graph=True``) needs that.
        backward_passes_per_step: how many, before ``step``. In stages 0 and 1 the last one reduces, in 2 and 3 each.
        reduction: ``"mean"`` or ``"sum"`` over replicas.
        bucket_size: elements of gradient reduced in one collective.
        weight_dtype: make parameters of this dtype, e.g. ``torch.bfloat16``, and where ``module`` is given whatever
            else it has; masters start from what they were before.
        master_dtype: of master weights, state and accumulated gradients; by default fp32 under a ``weight_dtype``,
            else the parameters' own.
        communication_dtype: in which gradients are summed over replicas; by default ``master_dtype``.
        quantized_weights: in stage 3, gather weights as blocks of 8 bits (ZeRO++, as are the next two).
        quantized_gradients: in stages 1 to 3, reduce gradients as blocks of 4 bits.
        hpz_partition_size: in stage 3, so many consecutive replicas, those of a host, keep the weights once more among
            them, and gather from there but for the first time in a step.
        compression: ``"fp16"`` or ``"bf16"``, other names of such a ``communication_dtype``; or, in stages 0 and 1,
            ``TopK(...)``, ``PowerSGD(...)``, ``SparseRows([...])``: after a step's last backward pass. See docs.
        options: the optimizer class's own: ``lr=1e-3``, ...

    Raises:
        ValueError: arguments that cannot be, parameters that differ between ranks or lie elsewhere than the grid.
    """

    def __init__(
        self,
        optimizer_class: type[torch.optim.Optimizer],
        params: Iterable[Any],
        axis: Axis,
        *,
        stage: int = 1,
        module: nn.Module | None = None,
        units: Sequence[str | nn.Module] | None = None,
        keep_gathered: bool = False,
        backward_passes_per_step: int = 1,
        reduction: str = "mean",
        bucket_size: int = 2**22,
        weight_dtype: torch.dtype | None = None,
        master_dtype: torch.dtype | None = None,
        communication_dtype: torch.dtype | None = None,
        quantized_weights: bool = False,
        quantized_gradients: bool = False,
        hpz_partition_size: int = 1,
        compression: str | MakeExchange | None = None,
        **options: Any,
    ) -> None:
        grid = checked(optimizer_class, axis, stage, module, backward_passes_per_step, reduction)
        communicate, exchange = compressed(compression, communication_dtype, stage, optimizer_class)
        plus = Plus(quantized_weights, False, quantized_gradients, hpz_partition_size, hpz_partition_size)
        fitting = plus.fitting(stage, grid.data.size, communicate, keep_gathered)
        masters = master_dtype or (torch.float32 if weight_dtype is not None else None)
        super().__init__(
            stepped_by(optimizer_class, lambda groups: optimizer_class(groups, **options)),
            params,
            grid,
            Mode(stage, weight_dtype, masters, communicate, exchange=exchange, plus=fitting),
            bucket_size,
            module=module,
            units=units,
            keep=keep_gathered,
            expected=backward_passes_per_step,
        )
        self._mean = reduction == "mean"
        if isinstance(compression, TopK) and compression.momentum:
            require_no_momentum(compression.momentum, self._inner)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Reduce what was not yet reduced, step this rank's range, bring the new weights to every replica. Collective.

        Args:
            closure: computes the gradients first, and returns what ``step`` returns: the loss.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.require_known()
        self.synchronize()
        self.apply(1.0, self._replicas.without_gradient())
        return loss

    @torch.no_grad()
    def synchronize(self) -> None:
        """Have all gradients reduced, and divided by the number of replicas, before ``step`` does. Collective."""
        if self.passes.reduced:
            return
        self.passes.close()
        if self._replicas.exchanges is not None:
            if self._finite():
                self._replicas.exchange(1.0 / self._grid.data.size if self._mean else 1.0)
            else:
                self._replicas.spoil()
            return
        owned = [bucket.owned_gradient for bucket in self._replicas.buckets if bucket.trained]
        if self._mean and self._grid.data.size > 1 and owned:
            torch._foreach_mul_(owned, 1.0 / self._grid.data.size)

    def _finite(self) -> bool:
        """Whether every gradient of the grid is, where a residual would keep what is not. Collective over the grid."""
        if not isinstance(self._replicas.exchanges, Compressor):
            return True
        square = self._replicas.squares()
        self._grid.world.all_reduce(square)
        return bool(square.isfinite())

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale all gradients so that their norm over the whole grid is no longer than this. Collective over the grid.

        Returns:
            The norm before, 0-dim float64: what ``torch.nn.utils.clip_grad_norm_`` returns, which cannot be used here.
        """
        self.synchronize()
        square = self._replicas.squares()
        self._grid.world.all_reduce(square)
        norm = square.sqrt()
        owned = [bucket.owned_gradient for bucket in self._replicas.buckets if bucket.trained]
        if owned:
            torch._foreach_mul_(owned, clip_coefficient(norm, max_norm))
        return norm

    def gradients(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Each trained parameter and its whole gradient (this tensor rank's), until ``zero_grad``. Collective."""
        self.synchronize()
        for member, gradient in self._replicas.gradients():
            yield member.parameter, gradient
