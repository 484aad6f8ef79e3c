"""Process group of the ranks at one place of all replicas, made anew when replicas come or go, and its sum.

The group runs on gloo, in host memory: on accelerators, gradients pass through it as copies. A replica that dies closes
its connections, so an operation fails at once on its neighbors; each of them drops the group, and so all of them fail.

A sum has a fixed order, which does not depend on the group's size: each rank adds up its part of the tensor, in the
order of the contributors, and all gather the parts. So a step gives the same bits with and without a spare replica, and
with and without a failed attempt before.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...base.torch_private import gloo_options
from .coordinator_client import CoordinatorStore

_CONNECT = 15.0  # seconds in which the ranks of a new group must connect


class ReplicaGroup:
    """Group of one rank of each replica. Collective over them when it is made.

    Args:
        address, secret: the coordinator's address, ``host:port``, and the run's secret.
        host: this host's address, to which the other replicas connect.
        key: prefix of the group's keys at the coordinator, used once.
        rank, size: position of this replica, and number of replicas.
        timeout: seconds after which an operation fails.

    Attributes:
        sent: bytes that this rank has sent for sums.

    Raises:
        RuntimeError, OSError: not all ranks are there within 15 seconds, or the coordinator is not.
    """

    def __init__(self, address: str, secret: bytes, host: str, key: str, rank: int, size: int, timeout: float) -> None:
        self.rank, self.size, self.sent = rank, size, 0.0
        self._group: Any = None
        if size > 1:
            seconds = min(_CONNECT, timeout)
            options = gloo_options(host, timedelta(seconds=seconds))  # the replica's own grid may use another device
            store = CoordinatorStore(address, secret, seconds)
            try:
                self._group = dist.ProcessGroupGloo(dist.PrefixStore(key, store), rank, size, options)
            finally:
                store.close()
            self._group._set_default_timeout(timedelta(seconds=timeout))

    def sum(self, tensor: Tensor, contributors: Sequence[int]) -> Tensor:
        """Return the sum of the contributors' flat tensors, in host memory. Collective.

        Args:
            tensor: (n,), of the same length and dtype on all ranks. It stays as it is.
            contributors: positions of the ranks whose tensors are summed, in the order of the sum.

        Raises:
            RuntimeError: another rank is gone, or did not come within the time limit.
        """
        own = tensor.detach().to("cpu")
        if self.size == 1:
            return own.clone()
        part = -(-own.numel() // self.size)
        whole = torch.zeros(self.size * part, dtype=own.dtype)
        whole[: own.numel()] = own
        gives = self.rank in contributors
        sends = [part if gives else 0] * self.size
        receives = [part if rank in contributors else 0 for rank in range(self.size)]
        found = torch.empty(sum(receives), dtype=own.dtype)
        self._group.alltoall_base(found, whole if gives else whole[:0], receives, sends, dist.AllToAllOptions()).wait()
        rows = dict(zip(sorted(contributors), found.split(part), strict=True)) if part else {}
        mine = torch.zeros(part, dtype=own.dtype)
        for index, rank in enumerate(contributors if part else ()):
            mine = rows[rank].clone() if index == 0 else mine.add_(rows[rank])
        if part:
            self._group._allgather_base(whole, mine).wait()
        self.sent += own.element_size() * part * (self.size - 1) * (1 + int(gives))
        return whole[: own.numel()]

    def gather(self, tensor: Tensor) -> Tensor:
        """Return the flat tensors of all ranks, in host memory, one after the other. Collective.

        Args:
            tensor: (n,) in host memory, of the same length and dtype on all ranks.

        Raises:
            RuntimeError: another rank is gone, or did not come within the time limit.
        """
        whole = tensor.new_empty(self.size * tensor.numel())
        if whole.numel():
            self._open()._allgather_base(whole.view(torch.uint8), tensor.view(torch.uint8)).wait()
        self.sent += tensor.nbytes * (self.size - 1)
        return whole

    def send(self, tensor: Tensor, to: int) -> None:
        """Send a tensor in host memory to another rank, and wait."""
        self._open().send([tensor], to, 0).wait()

    def receive(self, tensor: Tensor, source: int) -> None:
        """Receive into a tensor in host memory from another rank, and wait."""
        self._open().recv([tensor], source, 0).wait()

    def _open(self) -> Any:
        if (group := self._group) is None:
            raise RuntimeError("the connections to the other replicas are closed")
        return group

    def abort(self) -> None:
        """Close all connections, so that the other ranks do not wait for this one.

        gloo closes a connection for good when its peer has closed it too. A peer that has its sum already keeps its
        connections until the meeting, to which this rank must come: so a thread waits for it.
        """
        group, self._group = self._group, None
        if group is not None:
            threading.Thread(target=_abort, args=(group,), daemon=True, name="triax abort").start()


def _abort(group: Any) -> None:
    with contextlib.suppress(RuntimeError):
        group.abort()
