"""What a ``ShardedOptimizer`` is handed: checked, named, and the same on every replica."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..grid import Axis, Grid, layout_of
from .compression import MakeExchange
from .onebit_adam import OneBit
from .optimizer import ELEMENTWISE, needs_whole_tensors
from .powersgd import PowerSGD
from .sparse_rows import SparseRows
from .topk import TopK

_NARROW = {"fp16": torch.float16, "bf16": torch.bfloat16}


def checked(
    optimizer_class: type[torch.optim.Optimizer],
    axis: Axis,
    stage: int,
    module: nn.Module | None,
    passes: int,
    reduction: str,
) -> Grid:
    """The grid of the axis, once the arguments are known to make sense."""
    grid = axis.grid
    if grid is None or axis is not grid.data:
        raise ValueError(f"{axis!r} is not a grid's data axis: pass grid.data, with grid = triax.Grid(...)")
    if not isinstance(optimizer_class, type) or not issubclass(optimizer_class, torch.optim.Optimizer):
        raise ValueError(f"optimizer_class is {optimizer_class!r}: pass the class itself, torch.optim.AdamW say")
    if needs_whole_tensors(optimizer_class):
        raise ValueError(
            f"{optimizer_class.__name__} needs whole tensors, but optimizer state lives on flat ranges here; use one "
            f"of {', '.join(ELEMENTWISE)}"
        )
    if issubclass(optimizer_class, OneBit) and stage != 0:
        raise ValueError(
            f"{optimizer_class.__name__} has whole state on every replica, and errors that are each one's own, which "
            f"nothing shards: pass stage=0, not {stage}"
        )
    if stage not in (0, 1, 2, 3):
        raise ValueError(f"stage is ZeRO's, 0, 1, 2 or 3, not {stage!r}")
    if stage == 3 and module is None:
        raise ValueError("stage 3 gathers weights where the model uses them: pass module=model")
    if passes < 1:
        raise ValueError(f"backward_passes_per_step is at least 1, not {passes}")
    if reduction not in ("mean", "sum"):
        raise ValueError(f"reduction over replicas is 'mean' or 'sum', not {reduction!r}")
    return grid


def compressed(
    compression: str | MakeExchange | None,
    dtype: torch.dtype | None,
    stage: int,
    optimizer_class: type[torch.optim.Optimizer],
) -> tuple[torch.dtype | None, MakeExchange | None]:
    """In which dtype gradients are summed, and what stands in place of the sum, if anything."""
    narrow = _NARROW.get(compression, dtype) if isinstance(compression, str) else dtype
    if narrow == torch.float16 and (isinstance(compression, SparseRows) or issubclass(optimizer_class, OneBit)):
        name = type(compression).__name__ if isinstance(compression, SparseRows) else optimizer_class.__name__
        raise ValueError(
            f"{name} sums gradients that are means already, and fp16 has no room for how small they are: use bf16"
        )
    if isinstance(compression, (TopK, PowerSGD)) and dtype is not None:
        raise ValueError(
            f"communication_dtype={dtype} is the dtype of a plain sum, and {type(compression).__name__} sends "
            "something else: leave it out" + (" (values=)" if isinstance(compression, TopK) else "")
        )
    if isinstance(compression, str):
        if compression not in _NARROW:
            raise ValueError(
                f"compression is 'fp16' or 'bf16', or zero.TopK(...), zero.PowerSGD(...) or zero.SparseRows([...]), "
                f"not {compression!r}"
            )
        if dtype not in (None, _NARROW[compression]):
            raise ValueError(f"compression={compression!r} and communication_dtype={dtype} differ: give one of them")
        return _NARROW[compression], None
    if compression is not None and not callable(compression):
        raise ValueError(f"compression is a {type(compression).__name__}: pass 'fp16', or zero.TopK(...), say")
    if compression is not None and stage > 1:
        raise ValueError(
            f"{type(compression).__name__} acts on a replica's whole gradient of a step, and stage {stage} has it "
            "reduced after each backward pass: use stage 1, or compression='bf16'"
        )
    return dtype, compression


def listed(
    group_of: dict[Any, int],
    where: dict[nn.Parameter, list[int]],
    names: dict[Tensor, str],
    module: nn.Module | None,
    stage: int,
) -> list[nn.Parameter]:
    """The parameters to lay out, in the order of the model where that is known; in stage 3 all of the model's."""
    if stage < 3:
        order = {} if module is None else {p: i for i, p in enumerate(module.parameters())}
        return sorted(group_of, key=lambda p: order.get(p, -1))
    strangers = [p for p in group_of if p not in where]
    if strangers:
        raise ValueError(f"{names[strangers[0]]} is not one of module's parameters: in stage 3 all must be")
    return list(where)


def names(groups: Iterable[Mapping[str, Any]], module: nn.Module | None) -> dict[Tensor, str]:
    """What to call each parameter."""
    found: dict[Tensor, str] = {}
    for g, group in enumerate(groups):
        given = group.get("param_names") or [f"parameter {i} of group {g}" for i in range(len(group["params"]))]
        found.update(zip(group["params"], given, strict=True))
    if module is not None:
        found.update({parameter: name for name, parameter in module.named_parameters()})
    return {p: layout_of(p).name or name for p, name in found.items()}


def agree(parameters: Sequence[nn.Parameter], names: dict[Tensor, str], grid: Grid) -> None:
    """Every replica has the same parameters; then, the first one's values."""
    away = next((p for p in parameters if p.device != grid.device), None)
    problem = None if away is None else f"{names[away]} is on {away.device}, and the grid on {grid.device}: move it"
    mine = [(names[p], tuple(p.shape), str(p.dtype), p.requires_grad) for p in parameters]
    told: list[tuple[str | None, Any]] = grid.data.all_gather_object((problem, mine))
    for rank, (other, theirs) in enumerate(told):
        if other is not None:
            raise ValueError(f"replica {rank}: {other}")
        if theirs != told[0][1]:
            a, b = next(((a, b) for a, b in zip(told[0][1], theirs) if a != b), (len(told[0][1]), len(theirs)))
            raise ValueError(f"replicas are of one model, but replica 0 has {a} where replica {rank} has {b}")
    for parameter in parameters:
        whole = parameter.detach().contiguous()
        grid.data.broadcast(whole)
        parameter.data.copy_(whole)


def cast(parameters: Iterable[Tensor], module: nn.Module | None, dtype: torch.dtype | None) -> None:
    """What is not laid out in buckets, in the dtype of the weights: a module's buffers, and what is not trained.

    Frequencies of rotary positions (``inv_freq``, as transformers names them) stay as they are: whoever computes angles
    does so in fp32, and a frequency that was rounded to bf16 is off by radians some thousand tokens on.
    """
    if dtype is None:
        return
    named = () if module is None else (*module.named_parameters(), *module.named_buffers())
    for name, tensor in (*(("", parameter) for parameter in parameters), *named):
        if tensor.is_floating_point() and tensor.dtype != dtype and not name.endswith("inv_freq"):
            tensor.data = tensor.data.to(dtype)
