"""Weights to another program without files: from rank 0 of a training run to the ranks of an inference engine.

A process group has rank 0 of the run as its rank 0, and the receivers. What rank 0 broadcasts, in this order:

    int64 (1,)      number of bytes of the next message
    uint8 (n,)      JSON: [[name, dtype, shape], ...] in the order of the tensors
    the tensors     each as a whole, under Hugging Face's name

so a transfer takes 8 + n + the bytes of the weights, once, and a receiver may keep a slice of each tensor.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import timedelta
from ipaddress import ip_address
from socket import gethostbyname
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...base.ports import resolve
from ...base.torch_private import gloo_options
from ...grid.agreement.agreement import agreed
from ...grid.agreement.failure import all_or_none
from ...grid.comm.tcp_store import serve_store
from .save import HuggingFaceWeights


def transfer_group(
    address: str, rank: int, size: int, device: torch.device | str = "cpu", timeout: float = 600.0
) -> dist.ProcessGroup:
    """Make a process group of several programs: rank 0 is that of the training run. Every member calls it.

    It is no group of ``torch.distributed.init_process_group``: a member may have another one beside it.

    Args:
        address: host:port of the member of rank 0, at which the members meet; the port must be free there.
        rank: rank of this member; 0 sends.
        size: number of members: 1 and the receivers.
        device: device of the tensors: ``cpu`` makes a group of gloo, ``cuda`` one of NCCL.
        timeout: seconds after which any wait fails.

    Raises:
        ValueError: the address or the rank cannot be used.
        RuntimeError: the members did not meet within the time.
    """
    host, _, port = address.rpartition(":")
    if not (host and port.isdecimal()):
        raise ValueError(f"address is {address!r}: give host:port of the member of rank 0, such as 10.0.0.7:29600")
    if not 0 <= rank < size or size < 2:
        raise ValueError(f"rank is {rank} of {size}: give 0 to the rank that sends, and 1, 2, ... to the receivers")
    limit = timedelta(seconds=timeout)
    backends: Any = dist  # its stubs do not know that a backend's group is a ProcessGroup
    made: dist.ProcessGroup
    store = dist.PrefixStore("triax weights", _meeting_store(host, int(port), rank, size, limit))
    if torch.device(device).type == "cuda":
        options = backends.ProcessGroupNCCL.Options()
        options._timeout = limit
        made = backends.ProcessGroupNCCL(store, rank, size, options)
    elif not ip_address(gethostbyname(host)).is_loopback:
        made = backends.ProcessGroupGloo(store, rank, size, limit)
    else:
        options = gloo_options(host, limit)  # on one host its name may lead to no interface
        made = backends.ProcessGroupGloo(store, rank, size, options)
    return made


def _meeting_store(host: str, port: int, rank: int, size: int, limit: timedelta) -> dist.TCPStore:
    """Return the store of a group, which rank 0 serves on one address of its host.

    Raises:
        ValueError: that is no address of this host, or the port is in use.
    """
    if rank:
        return dist.TCPStore(host, port, size, is_master=False, timeout=limit)
    try:
        return serve_store(resolve(host), port, limit, size, wait=True)
    except OSError as error:
        raise ValueError(
            f"rank 0 cannot listen on {host}:{port} ({error.strerror or error}): give an address of its host, and a "
            "port that is free there"
        ) from error


def send_weights(weights: HuggingFaceWeights, group: dist.ProcessGroup | None) -> int:
    """Send a model's weights, as they are now, to the other ranks of a group. Collective over the ranks of the run.

    Args:
        weights: the weights, of an engine or a module.
        group: on rank 0 the group, of whose ranks it is rank 0; on the other ranks of the run None.

    Returns:
        The bytes that rank 0 broadcast; 0 on the other ranks.

    Raises:
        ValueError: rank 0 has no group, or another rank has one.
        RuntimeError: on every rank: a receiver did not take a tensor within the group's time limit.
    """
    grid, sent = weights.grid, 0
    with agreed(grid, None):
        if (group is None) == (grid.rank == 0):
            who = "rank 0 has no group" if group is None else f"rank {grid.rank} has a group"
            raise ValueError(f"{who}: rank 0 alone sends; give it the group of transfer_group, and None to the others")
    with all_or_none(grid, lambda: None, "send_weights"):
        if group is not None:
            text = json.dumps([[n, str(d).removeprefix("torch."), s] for n, (s, d) in weights.shapes.items()]).encode()
            listed = torch.frombuffer(bytearray(text), dtype=torch.uint8)
            for message in (torch.tensor([len(text)]), listed):
                sent += _broadcast(message.to(grid.device), group)
        for _, tensor in weights:
            if group is not None and tensor is not None:
                sent += _broadcast(tensor, group)
    return sent


def receive_weights(group: dist.ProcessGroup, device: torch.device | str = "cpu") -> Iterator[tuple[str, Tensor]]:
    """Yield the name and the tensor of each weight that rank 0 of a group sends. Every receiver iterates to the end.

    A tensor is a new one, which is freed when the caller drops it: one is held at a time. vLLM's and SGLang's
    ``model.load_weights`` take this iterator, and cut the shards of each rank themselves.

    Args:
        group: the group, of ``transfer_group``.
        device: device of the tensors, that of the group.
    """
    length = torch.empty(1, dtype=torch.int64, device=device)
    _broadcast(length, group)
    text = torch.empty(int(length), dtype=torch.uint8, device=device)
    _broadcast(text, group)
    for name, dtype, shape in json.loads(bytes(text.tolist())):
        tensor = torch.empty(shape, dtype=getattr(torch, dtype), device=device)
        _broadcast(tensor, group)
        yield name, tensor


def _broadcast(tensor: Tensor, group: dist.ProcessGroup) -> int:
    """Broadcast a tensor from rank 0 of a group, and return its bytes."""
    message = tensor.detach().contiguous()
    group.broadcast(message, 0).wait()
    return message.nbytes
