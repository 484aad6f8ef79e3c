"""Arguments of ``ShardedOptimizer``: checks, names of parameters, and their broadcast from the first replica."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...base.dtypes import SHORT_NAMES
from ...base.errors import require_at_least
from ...grid import Grid, layout_of
from ...grid.layout import require_plain
from ..managed import is_released
from ..protocols import MakeExchange
from ..range_stepper import ELEMENTWISE, needs_whole_tensors
from ..sharded_init import sharded_parameter


def check_arguments(
    optimizer_class: type[torch.optim.Optimizer],
    grid: Grid,
    stage: int,
    module: nn.Module | None,
    passes: int,
    reduction: str,
) -> None:
    """Check the arguments of a ``ShardedOptimizer`` that need neither the parameters nor a collective.

    Raises:
        ValueError: an argument, or a combination of two, is not supported.
    """
    if not isinstance(grid, Grid):
        raise ValueError(f"{grid!r} is not a grid: pass grid = triax.Grid(...)")
    if not isinstance(optimizer_class, type) or not issubclass(optimizer_class, torch.optim.Optimizer):
        raise ValueError(
            f"optimizer_class is {optimizer_class!r}: pass the class itself, for example torch.optim.AdamW"
        )
    if needs_whole_tensors(optimizer_class):
        raise ValueError(
            f"{optimizer_class.__name__} needs whole tensors, but optimizer state is sharded into flat ranges here; "
            f"use one of {', '.join(ELEMENTWISE)}"
        )
    if hasattr(optimizer_class, "stepper") and stage != 0:
        raise ValueError(
            f"{optimizer_class.__name__} keeps whole state and its own compression errors on every replica, so there "
            f"is nothing to shard: pass stage=0, not {stage}"
        )
    if stage not in (0, 1, 2, 3):
        raise ValueError(f"stage={stage!r} is no stage of ZeRO: give 0, 1, 2 or 3")
    if stage == 3 and module is None:
        raise ValueError("stage 3 gathers weights where the model uses them: pass module=model")
    require_at_least(1, backward_passes_per_step=passes)
    if reduction not in ("mean", "sum"):
        raise ValueError(f"reduction is 'mean' or 'sum', not {reduction!r}: give one of the two")


def communication(
    compression: str | MakeExchange | None,
    dtype: torch.dtype | None,
    stage: int,
    optimizer_class: type[torch.optim.Optimizer],
) -> tuple[torch.dtype | None, MakeExchange | None]:
    """Return the dtype in which gradients are summed, and the gradient compressor.

    A dtype of None means the gradients' dtype. A compressor of None means a plain sum.

    Raises:
        ValueError: ``compression`` is unknown, or contradicts another argument.
    """
    named = SHORT_NAMES[compression] if compression in ("fp16", "bf16") else None
    narrow = named or dtype
    if compression is not None and named is None and not callable(compression):
        raise ValueError(
            f"compression={compression!r} is unknown: pass 'fp16' or 'bf16', or TopK(...), PowerSGD(...) or "
            "SparseRows([...]) of triax.gradient_compression"
        )
    own_dtype = getattr(compression, "own_dtype", False)
    if own_dtype and dtype is not None:
        raise ValueError(
            f"communication_dtype={dtype} is the dtype of a plain sum, and {type(compression).__name__} sends "
            "something else: leave it out"
        )
    sums_means = compression is not None and named is None  # an exchange gets gradients that are divided by the batch
    if narrow == torch.float16 and (sums_means or hasattr(optimizer_class, "stepper")):
        name = type(compression).__name__ if sums_means else optimizer_class.__name__
        raise ValueError(
            f"{name} sums gradients that are already divided by the batch, too small for fp16's range: use bf16"
        )
    if isinstance(compression, str):
        if dtype not in (None, named):
            raise ValueError(f"compression={compression!r} and communication_dtype={dtype} differ: give one of them")
        return named, None
    if compression is not None and stage > 1:
        raise ValueError(
            f"{type(compression).__name__} compresses a replica's whole gradient of a step, and stage {stage} "
            "reduces it after each backward pass: use stage 1, or compression='bf16'"
        )
    return dtype, compression


def managed_parameters(
    group_of: dict[Any, int],
    where: dict[nn.Parameter, list[int]],
    names: dict[Tensor, str],
    module: nn.Module | None,
    stage: int,
) -> list[nn.Parameter]:
    """Return the parameters to lay out in buckets, in the model's order if ``module`` is given.

    In stage 3 these are all parameters of the module, because stage 3 also shards parameters that are not trained.

    Args:
        group_of: trained parameter -> number of its parameter group.
        where: in stage 3, parameter of the module -> the units that use it.
        names: parameter -> name, for the error message.
        module: the model, or None.
        stage: ZeRO stage.

    Raises:
        ValueError: in stage 3, a parameter does not belong to the module.
    """
    if stage < 3:
        order = {} if module is None else {p: i for i, p in enumerate(module.parameters())}
        return sorted(group_of, key=lambda p: order.get(p, -1))
    if (unknown := next((p for p in group_of if p not in where), None)) is not None:
        raise ValueError(f"{names[unknown]} is not one of module's parameters: in stage 3 pass a module that has all")
    return list(where)


def parameter_names(groups: Iterable[Mapping[str, Any]], module: nn.Module | None) -> dict[Tensor, str]:
    """Return the name of each parameter.

    The name is that in the parameter's layout, else that in the module, else that in the optimizer's parameter group.

    Raises:
        ValueError: a parameter without a shape, or a DTensor.
    """
    name_of: dict[Tensor, str] = {}
    for g, group in enumerate(groups):
        given = group.get("param_names") or [f"parameter {i} of group {g}" for i in range(len(group["params"]))]
        name_of.update(zip(group["params"], given, strict=True))
    if module is not None:
        name_of.update({parameter: name for name, parameter in module.named_parameters()})
    require_plain(((name, parameter) for parameter, name in name_of.items()), "the optimizer")
    return {p: layout_of(p).name or name for p, name in name_of.items()}


def broadcast_parameters(parameters: Sequence[nn.Parameter], names: dict[Tensor, str], grid: Grid) -> None:
    """Broadcast the parameters of the first replica to all replicas. Collective over the grid.

    Over the tensor axis, parameters that it does not shard are broadcast too.

    Raises:
        ValueError: names, shapes or dtypes of parameters differ between replicas, or a parameter is not on the grid's
            device, or another engine has released it. Every rank raises it.
    """
    away = next((p for p in parameters if p.device != grid.device), None)
    problem = None if away is None else f"{names[away]} is on {away.device}, and the grid on {grid.device}: move it"
    taken = next((p for p in parameters if is_released(p) and sharded_parameter(p) is None), None)
    if taken is not None:
        problem = (
            f"{names[taken]} is released by stage 3 of another engine or optimizer, which goes on gathering and "
            "releasing it: build the model again, and load its weights, engine.module_state_dict()"
        )
    described = [(names[p], tuple(p.shape), str(p.dtype), p.requires_grad) for p in parameters]
    gathered: list[tuple[str | None, Any]] = grid.data_context.all_gather_json((problem, described))
    for rank, (other, theirs) in enumerate(gathered):
        if other is not None:
            raise ValueError(f"replica {rank}: {other}")
        if theirs != gathered[0][1]:
            a, b = next(((a, b) for a, b in zip(gathered[0][1], theirs) if a != b), (len(gathered[0][1]), len(theirs)))
            raise ValueError(
                f"replicas must have the same model, but replica 0 has {a} and replica {rank} has {b}: build the model "
                "with the same arguments on every rank"
            )
    for parameter in parameters:
        if (record := sharded_parameter(parameter)) is not None:
            record.take_assigned()
            continue  # its shards are of the first rank's values
        layout, values = layout_of(parameter), parameter.detach().contiguous()
        for axis in (*([] if layout.sharded else [grid.tensor]), grid.axis(layout.replicas)):
            axis.broadcast(values)
        parameter.data.copy_(values)
