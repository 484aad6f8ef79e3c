"""Transport of ranks that share a GPU: its collectives and messages are gloo's, over copies in host memory.

NCCL refuses two ranks of one GPU ("Duplicate GPU detected"), and gloo's messages take no tensors of a GPU. Every byte
crosses to the host and back, so this is for tests of several ranks on one GPU, not for speed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .pending import Done, Pending, Then
from .transport import Transport


class HostTransport(Transport):
    """Transport that copies tensors on a GPU to host memory, communicates there, and copies back on ``wait``."""

    def all_reduce(self, tensor: Tensor, op: str, async_op: bool) -> Pending:
        """``Transport.all_reduce`` by way of the host."""
        return _by_host(super().all_reduce, [tensor], op, async_op)

    def all_gather(self, output: Tensor, tensor: Tensor, async_op: bool, tag: int | None = None) -> Pending:
        """``Transport.all_gather`` by way of the host."""
        return _by_host(super().all_gather, [output, tensor], async_op, tag)

    def reduce_scatter(self, output: Tensor, tensor: Tensor, async_op: bool) -> Pending:
        """``Transport.reduce_scatter`` by way of the host."""
        return _by_host(super().reduce_scatter, [output, tensor], async_op)

    def all_to_all(
        self, output: Tensor, tensor: Tensor, async_op: bool, receive: Sequence[int], send: Sequence[int], row: int
    ) -> Pending:
        """``Transport.all_to_all`` by way of the host."""
        return _by_host(super().all_to_all, [output, tensor], async_op, receive, send, row)

    def broadcast(self, tensor: Tensor, source: int, async_op: bool) -> Pending:
        """``Transport.broadcast`` by way of the host."""
        return _by_host(super().broadcast, [tensor], source, async_op)

    def send(self, tensor: Tensor, to: int, tag: int) -> Pending:
        """``Transport.send`` by way of the host."""
        if is_on_host(tensor):
            return super().send(tensor, to, tag)
        host = tensor.detach().to("cpu", copy=True)
        return Then(super().send(host, to, tag), lambda: host)  # the copy must exist until it is sent

    def receive(self, tensor: Tensor, source: int, tag: int) -> Pending:
        """``Transport.receive`` by way of the host."""
        return _by_host(super().receive, [tensor], source, tag)

    def barrier(self) -> None:
        """``Transport.barrier`` by a collective in host memory."""
        super().all_reduce(torch.zeros(1), "sum", False).wait()


def is_on_host(tensor: Tensor) -> bool:
    """Return whether a tensor is in host memory, so that gloo takes it as it is."""
    return tensor.device.type == "cpu"


def _by_host(method: Callable[..., Pending], tensors: list[Tensor], *args: Any) -> Pending:
    """Run a method of ``Transport`` on copies in host memory. The first tensor is the one that it writes."""
    if is_on_host(tensors[0]):
        return method(*tensors, *args)
    output = tensors[0].detach()
    hosts = [tensor.detach().to("cpu", copy=True) for tensor in tensors]
    pending = method(*hosts, *args)
    if isinstance(pending, Done):
        output.copy_(hosts[0])
        return pending
    return Then(pending, lambda: output.copy_(hosts[0]))
