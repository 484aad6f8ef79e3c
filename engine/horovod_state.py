"""Horovod's ways to start all ranks alike: parameters, an optimizer's state, and any object, from one of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..grid import Axis
from .horovod import ProcessSet, job, only_global
from .horovod_calls import Request
from .horovod_ops import as_numbers, require, require_rank, shape
from .horovod_optimizer import kept


def broadcast_parameters(params: Any, root_rank: int = 0, process_set: ProcessSet | None = None) -> None:
    """Every rank's parameters and buffers become those of rank ``root_rank``, in place.

    Args:
        params: ``model.state_dict()``, ``model.named_parameters()`` or ``model.parameters()``: a dict, or anything that
            gives tensors or pairs of name and tensor. What a dict has that is no tensor is left as it is.

    Raises:
        ValueError: on every rank: names, shapes or dtypes differ between ranks; or it is an optimizer's state.
    """
    only_global(process_set)
    require_rank(root_rank)
    named = list(_named(params))
    tensors = [(name, value) for name, value in named if isinstance(value, Tensor)]
    if not tensors and "param_groups" in dict(named):
        raise ValueError(
            "an optimizer's state_dict() has its tensors further in, and none would be sent: call "
            "triax.broadcast_optimizer_state(optimizer)"
        )
    for _, tensor in tensors:
        require(tensor)
    _from_root("broadcast_parameters", [tensor for _, tensor in tensors], root_rank, [name for name, _ in tensors])


def _named(params: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(params, Mapping):
        yield from params.items()
    elif isinstance(params, Iterable) and not isinstance(params, Tensor | str):
        for number, each in enumerate(params):
            yield each if isinstance(each, tuple) else (str(number), each)
    else:
        raise ValueError(
            f"{type(params).__name__} holds no parameters: give model.state_dict() or model.named_parameters()"
        )


def _from_root(what: str, tensors: list[Tensor], root: int, names: Iterable[str]) -> None:
    """Overwrite tensors with the root's; ranks agree on all of them before any is sent."""

    def work(axis: Axis) -> None:
        pending = []
        for tensor in tensors:
            whole = as_numbers(tensor.detach().contiguous())
            pending.append((axis.broadcast(whole, root, async_op=True), whole, tensor.detach()))
        for each, whole, tensor in pending:
            each.wait()
            if whole.data_ptr() != tensor.data_ptr():
                tensor.copy_(whole.view(tensor.dtype))

    said = ", ".join(f"{name} {shape(tensor)}" for name, tensor in zip(names, tensors, strict=True))
    job().calls.now(Request("broadcast", what, f"from rank {root}: {said}"), work)


class _Place(NamedTuple):
    """A tensor of the root's state, on its way."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: str


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer, root_rank: int = 0, process_set: ProcessSet | None = None
) -> None:
    """Every rank's optimizer gets the state and the options (learning rates, ...) of rank ``root_rank``'s.

    The other ranks need have no state yet, or may have more. No step is made for it: the parameters stay. So do the
    dicts of ``param_groups``, which a scheduler may hold.

    Raises:
        ValueError: on every rank: the optimizers are not of as many parameters; or it is a ``ShardedOptimizer``.
    """
    only_global(process_set)
    require_rank(root_rank)
    if hasattr(optimizer, "passes"):
        raise ValueError(
            "a ShardedOptimizer has on each rank the state of its own shard: there is nothing to broadcast"
        )
    state = optimizer.state_dict()
    sizes = [len(group["params"]) for group in state["param_groups"]]
    leaves: list[Tensor] = []

    def leave(value: Tensor) -> _Place:
        leaves.append(value)
        return _Place(tuple(value.shape), value.dtype, value.device.type)

    skeleton = broadcast_object((_mapped(leave, state), sizes), root_rank, "broadcast_optimizer_state")
    told = allgather_object(sizes, "broadcast_optimizer_state.sizes")
    if told.count(told[0]) < len(told):
        other = next(rank for rank, each in enumerate(told) if each != told[0])
        raise ValueError(
            f"the parameter groups of rank {other}'s optimizer have {told[other]} parameters, and those of rank 0's "
            f"{told[0]}: broadcast_optimizer_state is for optimizers of one model"
        )
    if job().grid.rank != root_rank:
        leaves = []
        state = _mapped(None, skeleton[0], leaves)
    _from_root("optimizer state", leaves, root_rank, map(str, range(len(leaves))))
    if job().grid.rank != root_rank:
        with kept(optimizer):
            optimizer.load_state_dict(state)


def _mapped(leave: Any, value: Any, made: list[Tensor] | None = None) -> Any:
    """A nest with places in the place of tensors; or with tensors, which ``made`` collects, in that of places."""
    if leave is not None and isinstance(value, Tensor):
        return leave(value)
    if isinstance(value, _Place):
        assert made is not None
        made.append(torch.empty(value.shape, dtype=value.dtype, device=_device(value.device)))
        return made[-1]
    if isinstance(value, Mapping):
        return {key: _mapped(leave, each, made) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)([_mapped(leave, each, made) for each in value])
    return value


def _device(kind: str) -> torch.device:
    """This rank's of that kind."""
    grid = job().grid
    return grid.device if grid.device.type == kind else torch.device(kind)


def broadcast_object(
    obj: Any = None, root_rank: int = 0, name: str | None = None, process_set: ProcessSet | None = None
) -> Any:
    """Rank ``root_rank``'s object, on every rank: anything that can be pickled. Between ranks of one job, not files."""
    only_global(process_set)
    require_rank(root_rank)
    calls, mine = job().calls, obj if job().grid.rank == root_rank else None
    request = Request("broadcast_object", calls.name("broadcast_object", name), f"from rank {root_rank}")
    everyone = calls.now(request, lambda axis: axis.all_gather_object(mine))
    return obj if job().grid.rank == root_rank else everyone[root_rank]


def allgather_object(obj: Any, name: str | None = None, process_set: ProcessSet | None = None) -> list[Any]:
    """Every rank's object, in the order of the ranks."""
    only_global(process_set)
    calls = job().calls
    request = Request("allgather_object", calls.name("allgather_object", name), "objects")
    found: list[Any] = calls.now(request, lambda axis: axis.all_gather_object(obj))
    return found
