"""Axis of ranks that share a GPU: its collectives and messages are gloo's, over copies in host memory.

NCCL refuses two ranks of one GPU ("Duplicate GPU detected"), and gloo's messages take no tensors of a GPU. Every byte
crosses to the host and back, so this is for tests of several ranks on one GPU, not for speed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .axis import Axis
from .pending import Done, Pending, Then


class HostAxis(Axis):
    """Axis whose tensors on a GPU are copied to host memory, communicated there, and copied back on ``wait``.

    Its methods use nothing of this class: ``ObservedAxis`` calls them too.
    """

    def all_reduce(self, tensor: Tensor, op: str = "sum", async_op: bool = False) -> Pending:
        """``Axis.all_reduce`` by way of the host."""
        return _by_host(self, Axis.all_reduce, [tensor], op, async_op)

    def all_gather(self, output: Tensor, tensor: Tensor, async_op: bool = False) -> Pending:
        """``Axis.all_gather`` by way of the host."""
        return _by_host(self, Axis.all_gather, [output, tensor], async_op)

    def reduce_scatter(self, output: Tensor, tensor: Tensor, async_op: bool = False) -> Pending:
        """``Axis.reduce_scatter`` by way of the host."""
        return _by_host(self, Axis.reduce_scatter, [output, tensor], async_op)

    def all_to_all(
        self,
        output: Tensor,
        tensor: Tensor,
        async_op: bool = False,
        *,
        receive: Sequence[int] | None = None,
        send: Sequence[int] | None = None,
    ) -> Pending:
        """``Axis.all_to_all`` by way of the host."""
        return _by_host(self, Axis.all_to_all, [output, tensor], async_op, receive=receive, send=send)

    def broadcast(self, tensor: Tensor, source: int = 0, async_op: bool = False) -> Pending:
        """``Axis.broadcast`` by way of the host."""
        return _by_host(self, Axis.broadcast, [tensor], source, async_op)

    def send(self, tensor: Tensor, to: int, tag: int) -> Pending:
        """``Axis.send`` by way of the host."""
        if is_on_host(tensor):
            return Axis.send(self, tensor, to, tag)
        host = tensor.detach().to("cpu", copy=True)
        return Then(Axis.send(self, host, to, tag), lambda: host)  # the copy must exist until it is sent

    def receive(self, tensor: Tensor, source: int, tag: int) -> Pending:
        """``Axis.receive`` by way of the host."""
        return _by_host(self, Axis.receive, [tensor], source, tag)

    def barrier(self) -> None:
        """``Axis.barrier`` by a collective in host memory."""
        Axis.all_reduce(self, torch.zeros(1)).wait()


def is_on_host(tensor: Tensor) -> bool:
    """Return whether a tensor is in host memory, so that gloo takes it as it is."""
    return tensor.device.type == "cpu"


def _by_host(axis: Axis, method: Callable[..., Pending], tensors: list[Tensor], *args: Any, **named: Any) -> Pending:
    """Run a method of ``Axis`` on copies in host memory. The first tensor is the one that it writes."""
    if is_on_host(tensors[0]):
        return method(axis, *tensors, *args, **named)
    output = tensors[0].detach()
    hosts = [tensor.detach().to("cpu", copy=True) for tensor in tensors]
    pending = method(axis, *hosts, *args, **named)
    if isinstance(pending, Done):
        output.copy_(hosts[0])
        return pending
    return Then(pending, lambda: output.copy_(hosts[0]))
