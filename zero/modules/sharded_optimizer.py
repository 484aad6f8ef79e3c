"""ZeRO in a plain PyTorch loop, without an engine: ``ShardedOptimizer``, for any module.

optimizer = ShardedOptimizer(torch.optim.AdamW, model.parameters(), grid, stage=2, lr=1e-3)
for x, y in batches:                            # this replica's own batches
    optimizer.zero_grad()
    loss_fn(model(x), y).backward()             # gradients are reduced while it runs
    optimizer.step()
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...base.checks import SMALLEST
from ...grid import Grid
from ..axis_options import ZeroOptions
from ..flat import require_equal_groups
from ..gradient_norm import clip_coefficient
from ..protocols import Compressing, MakeExchange
from ..range_stepper import with_own_stepper
from ..zeropp.options import ZeroPlusPlus
from .module_optimizer import ZeroModuleOptimizer
from .optimizer_arguments import check_arguments, communication


class ShardedOptimizer(ZeroModuleOptimizer):
    """An optimizer of torch whose state, gradients and weights are sharded over replicas (ZeRO).

    Make it with the same arguments on every rank, after the model is on its device. It broadcasts the parameters of
    the first replica, as DDP does (not buffers), and within a replica those that tensor ranks do not shard. Gradients
    are summed over the data axis within the backward pass, by torch's own hooks, and divided by the number of replicas:
    each rank's loss is a mean over its own samples, as under DDP. Gradients of several backward passes add up: divide
    the loss by their number for a mean.

    It is a ``torch.optim.Optimizer``, so learning-rate schedulers accept it. If a parameter has a gradient on no
    replica, neither it nor its step count changes. The parameters' own ``.grad`` can be read and changed in stages 0
    and 1; ``gradients()`` returns whole gradients in every stage. It refuses ``torch.amp.GradScaler``: use bf16.

    >>> weight = nn.Parameter(torch.tensor([1.0, -2.0]))
    >>> optimizer = triax.ShardedOptimizer(torch.optim.SGD, [weight], triax.Grid(), stage=1, lr=0.1)
    >>> weight.square().sum().backward()
    >>> optimizer.step()
    >>> weight.data
    tensor([ 0.8000, -1.6000])

    Args:
        optimizer_class: an optimizer that works element by element: Adam, AdamW, SGD, ...; or, in stage 0, one of
            another package that needs whole tensors, or a 1-bit optimizer: ``OneBitAdam``, ``ZeroOneAdam``,
            ``OneBitLamb``.
        params: parameters, parameter groups or named parameters, as the class takes them.
        grid: gradients are averaged over its data axis, and summed over its tensor axis if a parameter's layout
            asks for it.
        stage: of ZeRO. 0: nothing is sharded; 1: the optimizer's state; 2: gradients too; 3: weights too.
        module: the model; stage 3 needs it, to gather weights before they are used.
        units: of the module, in stage 3: patterns of names or submodules; see ``find_units``. By default the entries
            of its ``ModuleList`` s and ``Sequential`` s. Every replica must run the same ones in the same order.
        keep_gathered: in stage 3, keep weights gathered from a step's first forward to its last backward pass. A loss
            with a gradient in it (``create_graph=True``) needs that.
        backward_passes_per_step: number of backward passes before ``step``. In stages 0 and 1 the last one reduces
            gradients, in stages 2 and 3 each.
        reduction: ``"mean"`` or ``"sum"`` over replicas.
        bucket_size: elements of gradient reduced in one collective.
        weight_dtype: cast parameters to this dtype, e.g. ``torch.bfloat16``, and also the other floating-point tensors
            of ``module`` if it is given; master weights start from the values before the cast.
        master_dtype: of master weights, state and accumulated gradients; by default fp32 under a ``weight_dtype``,
            else the parameters' own.
        communication_dtype: dtype in which gradients are summed over replicas; by default ``master_dtype``.
        quantized_weights: in stage 3, all-gather weights quantized to 8 bits (qwZ of ZeRO++).
        quantized_gradients: in stages 1 to 3, reduce gradients quantized to 4 bits (qgZ of ZeRO++).
        hpz_partition_size: in stage 3, number of consecutive replicas (usually those of one host) over which a second
            copy of the weights is sharded (hpZ of ZeRO++). Gathers read this copy, except the first gather of a step.
        shard_size: in stages 1 to 3, number of consecutive replicas (usually those of one host) that shard among
            themselves, a divisor of all (HSDP). Groups of them hold copies. None: all replicas are one group.
        compression: ``"fp16"`` or ``"bf16"``, other names of such a ``communication_dtype``; or, in stages 0 and 1,
            ``TopK(...)``, ``PowerSGD(...)``, ``SparseRows([...])``, which act after a step's last backward pass: see
            docs/compression.md.
        options: of the optimizer class: ``lr=1e-3``, ...

    Raises:
        ValueError: an argument is not supported; parameters differ between ranks or are not on the grid's device.
    """

    def __init__(
        self,
        optimizer_class: type[torch.optim.Optimizer],
        params: Iterable[Any],
        grid: Grid,
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
        shard_size: int | None = None,
        compression: str | MakeExchange | None = None,
        **options: Any,
    ) -> None:
        check_arguments(optimizer_class, grid, stage, module, backward_passes_per_step, reduction)
        communicate, exchange = communication(compression, communication_dtype, stage, optimizer_class)
        plus = ZeroPlusPlus(quantized_weights, False, quantized_gradients, hpz_partition_size, hpz_partition_size)
        fitting = plus.fitting(stage, grid.data_context.size, communicate, keep_gathered)
        if shard_size is not None:
            require_equal_groups(grid.data_context.size, shard_size)
        masters = master_dtype or (torch.float32 if weight_dtype is not None else None)
        super().__init__(
            with_own_stepper(optimizer_class, lambda groups: optimizer_class(groups, **options)),
            params,
            grid,
            ZeroOptions(
                stage=stage,
                shard_size=shard_size,
                weight_dtype=weight_dtype,
                accumulation_dtype=masters,
                communication_dtype=communicate,
                exchange=exchange,
                zeropp=fitting,
            ),
            bucket_size,
            module=module,
            units=units,
            keep=keep_gathered,
            expected=backward_passes_per_step,
        )
        self._mean = reduction == "mean"
        access = self.backward_passes.access
        access.connect(
            self._gradient_divisor,
            "Call optimizer.clip_grad_norm_(max_norm) to clip, and optimizer.gradients() to read",
        )
        access.plain = grid.size == 1 and backward_passes_per_step == 1 and exchange is None
        if exchange is not None and hasattr(exchange, "require_fitting"):
            exchange.require_fitting(self.inner)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Reduce gradients if needed, step this rank's range, and send new weights to every replica. Collective.

        Args:
            closure: computes gradients before the step; ``step`` returns its result, the loss.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.backward_passes.require_unchanged()
        self.synchronize()
        self.backward_passes.access.take_back()
        self.apply(1.0, self._data_axis.without_gradient())
        return loss

    @torch.no_grad()
    def synchronize(self) -> None:
        """Reduce all gradients and divide them by the number of replicas, as ``step`` does. Collective."""
        if self.backward_passes.reduced:
            return
        self.backward_passes.end_reductions()
        if self._data_axis.exchange is not None:
            if self._finite():
                self._data_axis.exchange_gradients(1.0 / self._grid.data.size if self._mean else 1.0)
            else:
                self._data_axis.poison()
            return
        if self._mean and self._grid.data.size > 1:
            self.backward_passes.access.multiply(1.0 / self._grid.data.size)

    def _finite(self) -> bool:
        """Return True if every gradient is finite, or no residual would keep it. Collective over the grid."""
        if not isinstance(self._data_axis.exchange, Compressing):
            return True
        square = self._data_axis.squares()
        self._grid.world.all_reduce(square)
        return bool(square.isfinite())

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale all gradients so that their norm over the whole grid is at most ``max_norm``. Collective over the grid.

        Returns:
            The norm before, 0-dim float64, as ``torch.nn.utils.clip_grad_norm_`` does, which works in stages 0 and 1.

        Raises:
            ValueError: a limit below 0 or too small for float32, or no number.
        """
        if not (max_norm == 0 or max_norm >= SMALLEST):
            raise ValueError(f"max_norm is {max_norm}: give 0, or a number of {SMALLEST:.2g} or more")
        self.synchronize()
        self.backward_passes.access.take_back()
        square = self._data_axis.squares()
        self._grid.world.all_reduce(square)
        norm = square.sqrt()
        self.backward_passes.access.multiply(clip_coefficient(norm, max_norm))
        return norm

    def _gradient_divisor(self) -> float:
        """End the reductions for a reader of ``.grad``. Collective.

        Raises:
            RuntimeError: a backward pass of the step is missing.
        """
        passes = self.backward_passes
        if not passes.reduced and not passes.complete:
            raise RuntimeError(
                f"gradients were read or changed after {passes.count} backward passes of a step that has "
                "backward_passes_per_step of them: do it after the last one, or call optimizer.synchronize() before"
            )
        self.synchronize()
        return 1.0

    def gradients(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Yield each trained parameter and its whole gradient (this rank's shard), until ``zero_grad``. Collective."""
        self.synchronize()
        self.backward_passes.access.take_back()
        for member, gradient in self._data_axis.gradients():
            yield member.parameter, gradient
