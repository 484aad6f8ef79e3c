"""State of an engine from a peer's memory: weights, optimizer state, buffers, counters, schedules and client state.

A rank sends to the rank at the same place of another replica, whose grid is equal, so that its shards are equal too.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ...base.dtypes import dtype_of
from ...base.json_values import decode, encode
from ...engine.snapshot.capture import Checkpointed, all_parameters, buffers, optimizer_numbers, run_state
from ...engine.snapshot.restore import set_optimizer, set_position, set_schedule
from ...zero.state_shards import StateShards
from .replica_group import ReplicaGroup

Dtypes = Mapping[str, Mapping[str, str]]  # key of the optimizer's state -> parameter -> dtype


def _shards(engine: Checkpointed) -> StateShards:
    return StateShards(engine.data_axis, all_parameters(engine), engine.grid)


def _dtypes(shards: StateShards) -> dict[str, dict[str, str]]:
    """Return the dtypes of the elementwise optimizer state that this rank holds."""
    found: dict[str, dict[str, str]] = {}
    masters = [members for _, members in shards.stepper.masters()]
    for index, key, value in shards.stepper.state_tensors():
        for name in masters[index]:
            found.setdefault(key, {})[name] = str(value.dtype).removeprefix("torch.")
    return found


def _weights(engine: Checkpointed, shards: StateShards) -> Iterator[Tensor]:
    """Yield flat views of this rank's weights, which may be read and written."""
    yield from (part.value for part in shards.values(mine=False))


def _buffers(engine: Checkpointed) -> Iterator[Tensor]:
    yield from (buffer for _, buffer, _ in buffers(engine.module, engine.grid.pipe.rank))


def _states(shards: StateShards, dtypes: Dtypes) -> Iterator[Tensor]:
    """Yield flat views of this rank's optimizer state, which are allocated where there are none."""

    def saved(name: str, key: str) -> torch.dtype | None:
        return dtype_of(dtypes[key].get(name))

    yield from (part.value for _, part in shards.stepper.load_targets(shards.ranges, saved, list(dtypes)))


def capture_here(
    engine: Checkpointed,
    client_state: Mapping[str, Any] | None,
    more: Mapping[str, Any],
    further: Sequence[Tensor] = (),
) -> tuple[Tensor, list[Tensor]]:
    """Return this rank's state: a header as bytes, and tensors, which are views of the engine's.

    Args:
        engine: the engine, between two steps.
        client_state: the user's own values.
        more: further values for the header.
        further: flat tensors after those of the engine, which ``load_here`` leaves out.
    """
    shards = _shards(engine)
    dtypes = _dtypes(shards)
    own: list[Tensor] = []  # of the client state

    def put(tensor: Tensor) -> str:
        own.append(tensor)
        return str(len(own) - 1)

    values = None if client_state is None else encode(dict(client_state), put)
    tensors = [*_weights(engine, shards), *_buffers(engine), *_states(shards, dtypes), *own, *further]
    run = run_state(engine)
    for key in ("loader", "membership"):  # the ledger says which samples follow
        run.pop(key, None)
    header = {
        "run": run,
        "client_state": values,
        "client_shapes": [[*each.shape] for each in own],
        "numbers": optimizer_numbers(shards),
        "dtypes": dtypes,
        **more,
    }
    return packed(header, tensors)


def packed(header: Mapping[str, Any], tensors: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Return a header as bytes, with the sizes and dtypes of the tensors that follow it, and the tensors."""
    sizes = [(each.numel(), str(each.dtype).removeprefix("torch.")) for each in tensors]
    text = json.dumps({**header, "tensors": sizes}).encode()
    return torch.frombuffer(bytearray(text), dtype=torch.uint8), tensors


def send_state(header: Tensor, tensors: list[Tensor], group: ReplicaGroup, to: int) -> None:
    """Send a state to another rank of the group."""
    group.send(torch.tensor([header.numel()], dtype=torch.int64), to)
    group.send(header, to)
    for tensor in tensors:
        if tensor.numel():
            group.send(tensor.detach().reshape(-1).to("cpu").contiguous().view(torch.uint8), to)


def receive_state(group: ReplicaGroup, source: int) -> tuple[dict[str, Any], list[Tensor]]:
    """Receive a state into host memory; returns the header and the flat tensors."""
    size = torch.zeros(1, dtype=torch.int64)
    group.receive(size, source)
    text = torch.empty(int(size), dtype=torch.uint8)
    group.receive(text, source)
    header: dict[str, Any] = json.loads(bytes(text.tolist()))
    tensors = []
    for numel, name in header["tensors"]:
        dtype = dtype_of(name)
        assert dtype is not None
        tensor = torch.empty(numel, dtype=dtype)
        if numel:
            group.receive(tensor.view(torch.uint8), source)
        tensors.append(tensor)
    return header, tensors


@torch.no_grad()
def load_here(engine: Checkpointed, header: Mapping[str, Any], tensors: list[Tensor]) -> Any:
    """Load a state that the rank at this place of another replica has sent. Collective over this replica's data axis.

    Returns:
        The client state of the peer.

    Raises:
        RuntimeError: the state does not fit this engine.
    """
    shards, given = _shards(engine), iter(tensors)
    for target in _weights(engine, shards):
        target.copy_(_fitting(next(given), target))
    shards.publish()
    for target in _buffers(engine):
        target.copy_(_fitting(next(given), target).view(target.shape))
    shards.reset_optimizer()
    for target in _states(shards, header["dtypes"]):
        target.copy_(_fitting(next(given), target))
    shards.set_scalars({name: decode(numbers) for name, numbers in header["numbers"].items()})
    shards.stepper.resume()
    set_optimizer(engine, header["run"])
    set_schedule(engine, header["run"])
    set_position(engine, header["run"])
    own = [next(given).view(shape) for shape in header["client_shapes"]]
    return decode(header["client_state"], lambda name: own[int(name)])


def _fitting(given: Tensor, target: Tensor) -> Tensor:
    if given.numel() != target.numel() or given.dtype != target.dtype:
        raise RuntimeError(
            f"the state of a peer has a tensor of {given.numel()} elements of {given.dtype} where this replica has "
            f"{target.numel()} of {target.dtype}: start all replicas with the same model and options"
        )
    return given
