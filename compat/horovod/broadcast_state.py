"""Horovod's broadcasts of state from one rank: parameters, optimizer state, Python objects; ``allgather_object``.

Objects are pickled, as in Horovod, here alone in triax. Whoever can send a rank a message could make it run code, so
use ``broadcast_object`` and ``allgather_object`` only on a network that you trust (docs/launch.md).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...base.json_values import decode, encode
from ...base.torch_private import tree_map
from ...grid import Axis
from ...zero.modules.module_optimizer import ZeroModuleOptimizer
from ...zero.optimizer_entries import load_in_place
from .context import ProcessSet, context, require_global
from .negotiation import CollectiveRequest
from .reductions import describe, require_rank, require_tensor, to_message


def broadcast_parameters(params: Any, root_rank: int = 0, process_set: ProcessSet | None = None) -> None:
    """Overwrite every rank's parameters and buffers with those of rank ``root_rank``. Collective.

    Args:
        params: ``model.state_dict()``, ``model.named_parameters()`` or ``model.parameters()``: a dict, or an iterable
            of tensors or pairs (name, tensor). Values of the dict that are no tensors are left unchanged.
        root_rank: the rank whose tensors are sent.
        process_set: None or ``global_process_set``.

    Raises:
        ValueError: on every rank: names, shapes or dtypes differ between ranks; or ``params`` is an optimizer's state.
    """
    require_global(process_set)
    require_rank(root_rank)
    named = list(_named(params))
    tensors = [(name, value) for name, value in named if isinstance(value, Tensor)]
    if not tensors and "param_groups" in dict(named):
        raise ValueError(
            "params is an optimizer's state_dict(), whose tensors lie in nested dicts and would not be sent: call "
            "hvd.broadcast_optimizer_state(optimizer)"
        )
    for _, tensor in tensors:
        require_tensor(tensor)
    _broadcast_all("broadcast_parameters", tensors, root_rank)


def _named(params: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(params, Mapping):
        yield from params.items()
    elif isinstance(params, Iterable) and not isinstance(params, Tensor | str):
        for number, param in enumerate(params):
            yield param if isinstance(param, tuple) else (str(number), param)
    else:
        raise ValueError(
            f"params is a {type(params).__name__}, which has no parameters: give model.state_dict() or "
            "model.named_parameters()"
        )


def _broadcast_all(request: str, named: list[tuple[str, Tensor]], root: int) -> None:
    """Overwrite named tensors with the root's. The ranks negotiate once, for all tensors, before any is sent."""

    def work(axis: Axis) -> None:
        pending = []
        for _, tensor in named:
            sent = to_message(tensor)
            pending.append((axis.broadcast(sent, root, async_op=True), sent, tensor.detach()))
        for operation, sent, tensor in pending:
            operation.wait()
            if sent.data_ptr() != tensor.data_ptr():
                tensor.copy_(sent.view(tensor.dtype))

    listed = ", ".join(f"{name} {describe(tensor)}" for name, tensor in named)
    context().queue.run(CollectiveRequest("broadcast", request, f"from rank {root}: {listed}"), work)


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer, root_rank: int = 0, process_set: ProcessSet | None = None
) -> None:
    """Overwrite every rank's optimizer state and options (learning rates, ...) with those of rank ``root_rank``.

    The other ranks may have no state yet, or more state. No optimizer step is made, so the parameters do not change.
    The dicts of ``param_groups``, to which a scheduler may refer, stay the same objects. Collective.

    Raises:
        ValueError: on every rank: the optimizers differ in their number of parameters; or it is a
            ``ShardedOptimizer``.
    """
    require_global(process_set)
    require_rank(root_rank)
    if isinstance(optimizer, ZeroModuleOptimizer):
        raise ValueError(
            "each rank of a ShardedOptimizer has the state of its own shard: leave out broadcast_optimizer_state"
        )
    state = optimizer.state_dict()
    sizes = [len(group["params"]) for group in state["param_groups"]]
    grid = context().grid
    is_root = grid.rank == root_rank
    tensors: list[Tensor] = []

    def put(tensor: Tensor) -> str:
        tensors.append(tensor)
        return str(len(tensors) - 1)

    problem, tree = None, None
    if is_root:
        try:
            tree = json.dumps(encode(state, put, "the optimizer's state_dict()"))
        except TypeError as error:
            problem = str(error)
    specs = [(tensor.shape, tensor.dtype, tensor.device.type) for tensor in tensors]
    queue = context().queue
    request = queue.request("broadcast_optimizer_state", None, f"from rank {root_rank}")
    told = queue.run(request, lambda axis: axis.all_gather_json((sizes, problem, tree, specs)))
    sizes_of = [answer[0] for answer in told]
    _, problem, tree, specs = told[root_rank]
    if problem is not None:
        raise ValueError(f"rank {root_rank}: {problem}")
    if sizes_of.count(sizes_of[0]) < len(sizes_of):
        other = next(rank for rank, told_sizes in enumerate(sizes_of) if told_sizes != sizes_of[0])
        raise ValueError(
            f"the parameter groups of rank {other}'s optimizer have {sizes_of[other]} parameters, and those of rank "
            f"0's {sizes_of[0]}: broadcast_optimizer_state needs optimizers of one model"
        )
    if not is_root:
        tensors = [
            torch.empty(shape, dtype=dtype, device=grid.device if grid.device.type == kind else torch.device(kind))
            for shape, dtype, kind in specs
        ]
        state = decode(json.loads(tree), lambda name: tensors[int(name)])
    _broadcast_all("optimizer state", [(str(number), tensor) for number, tensor in enumerate(tensors)], root_rank)
    if not is_root:
        with load_in_place(optimizer):
            optimizer.load_state_dict(state)
        numbers = [number for group in state["param_groups"] for number in group["params"]]
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        for number, parameter in zip(numbers, parameters, strict=True):
            if sent := state["state"].get(number):
                optimizer.state[parameter].update(tree_map(_as_sent, optimizer.state[parameter], sent))


def _as_sent(loaded: Any, sent: Any) -> Any:
    """Return loaded state in the dtype that was sent: torch's ``load_state_dict`` casts it to the parameter's."""
    return sent.to(loaded.device) if isinstance(sent, Tensor) and sent.dtype != loaded.dtype else loaded


def broadcast_object(
    obj: Any = None, root_rank: int = 0, name: str | None = None, process_set: ProcessSet | None = None
) -> Any:
    """Return rank ``root_rank``'s object on every rank. Collective.

    The object is pickled. Reading a pickle can run code, so use this on a network that you trust.
    """
    require_global(process_set)
    require_rank(root_rank)
    is_root = context().grid.rank == root_rank
    everyone = _gather_objects("broadcast_object", name, f"from rank {root_rank}", obj if is_root else None)
    return obj if is_root else everyone[root_rank]


def allgather_object(obj: Any, name: str | None = None, process_set: ProcessSet | None = None) -> list[Any]:
    """Return every rank's object, in the order of the ranks. Collective.

    The objects are pickled. Reading a pickle can run code, so use this on a network that you trust.
    """
    require_global(process_set)
    return _gather_objects("allgather_object", name, "objects", obj)


def _gather_objects(kind: str, name: str | None, what: str, obj: Any) -> list[Any]:
    def gather(axis: Axis) -> list[Any]:
        objects = [obj] * axis.size
        if axis.size > 1:
            dist.all_gather_object(objects, obj, group=axis.group)
        return objects

    queue = context().queue
    gathered: list[Any] = queue.run(queue.request(kind, name, what), gather)
    return gathered
