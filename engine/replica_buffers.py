"""Buffers that steps change, such as batch norm's statistics: all replicas get the first replica's, as under DDP.

DDP broadcasts all buffers before each forward pass. triax broadcasts, at the end of each step and in one message, only
the buffers that the step has changed on any replica. So it sends no masks and rotary tables, and evaluation and
checkpoints find equal buffers on all replicas. A model without buffers costs nothing. Under ``local_updates`` replicas
have buffers of their own until they synchronize their weights; with ``async_diloco`` they keep them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..base.checksum import checksum
from ..grid import Grid, layout_of

# Buffers of a mixture of experts, which each rank computes from sums over all ranks.
_EQUAL = ("past_loads", "correction_bias")

_COMPARED = 2  # steps in which all values are compared: batch norm writes without raising the version counter


class _Seen(NamedTuple):
    """A buffer as it was at the end of a step."""

    buffer: Tensor
    version: int
    sum: int


class ReplicaBuffers:
    """Buffers of a model on this rank, kept equal on all replicas. Collective over the grid when it is made.

    Args:
        module: the model.
        grid: the grid whose ranks take steps together.
    """

    def __init__(self, module: nn.Module, grid: Grid) -> None:
        self._module, self._grid = module, grid
        self._seen: dict[str, _Seen] = {}
        self._changing: dict[str, str] = {}  # name -> shape and dtype of the buffers that are broadcast
        self._strayed: set[str] = set()  # other buffers that steps changed on this rank
        self._places: dict[str, tuple[nn.Module, str]] = {}
        self._compared, self._modes = _COMPARED, [False]
        self._exist = False
        if grid.data_context.size > 1 and grid.device.type != "meta":
            self._find()
            with grid.world.traffic.uncounted():
                self._exist = any(grid.world.all_gather_json(len(self._places)))
            self.strayed()
            self._compared = _COMPARED

    def __bool__(self) -> bool:
        """True if there are replicas, and the model has buffers on any rank."""
        return self._exist

    def strayed(self) -> bool:
        """Return True if a step has changed a buffer on this rank that is not broadcast yet."""
        modes = [module.training for module, _ in self._places.values()]
        if modes != self._modes:
            self._modes, self._compared = modes, _COMPARED
        if self._compared:
            self._find()
        strayed, written = set(), {module for module, _ in self._places.values()} if self._compared else set()
        for name, (module, key) in self._places.items():
            buffer, seen = module._buffers.get(key), self._seen.get(name)
            if buffer is None:
                continue
            if name in self._changing:
                if _kind(buffer) != self._changing[name]:
                    strayed.add(name)
            elif seen is None or buffer is not seen.buffer or buffer._version != seen.version:
                written.add(module)
        # The version of batch norm's count tells that its mean was written too.
        for name, (module, key) in self._places.items() if written else ():
            buffer, seen = module._buffers.get(key), self._seen.get(name)
            if module in written and name not in self._changing and buffer is not None:
                self._seen[name] = now = _Seen(buffer, buffer._version, int(checksum(buffer)))
                if seen is not None and (now.sum != seen.sum or _kind(buffer) != _kind(seen.buffer)):
                    strayed.add(name)
        self._strayed |= strayed  # also of a step that failed before it synchronized
        self._compared = max(0, self._compared - 1)
        return bool(self._strayed)

    @torch.no_grad()
    def synchronize(self, strayed: bool) -> None:
        """Give all replicas the first replica's values of the buffers that steps change. Collective.

        Args:
            strayed: ``strayed`` returned True on any rank.
        """
        if strayed:
            self._agree()
        by_axis: dict[str, list[Tensor]] = {}
        for name in self._changing:
            module, key = self._places[name]
            buffer = module._buffers[key]
            assert buffer is not None
            by_axis.setdefault(layout_of(buffer).replicas, []).append(buffer)
        for axis, buffers in by_axis.items():
            # As bytes: the buffers of all dtypes in one message.
            flat = torch.cat([_bytes(buffer) for buffer in buffers])
            self._grid.axis(axis).broadcast(flat).wait()
            for buffer, values in zip(buffers, flat.split([buffer.nbytes for buffer in buffers]), strict=True):
                if not self._grid.axis(axis).is_first:
                    value = torch.empty(buffer.shape, dtype=buffer.dtype, device=buffer.device)
                    value.view(-1).view(torch.uint8).copy_(values)
                    buffer.copy_(value)

    def _agree(self) -> None:
        """Agree with the other replicas on the buffers that are broadcast. Collective over the replicas."""
        named = {name: buffer for name, (m, key) in self._places.items() if (buffer := m._buffers.get(key)) is not None}
        kinds = {name: _kind(buffer) for name, buffer in named.items()}
        with self._grid.world.traffic.uncounted():
            told = self._grid.data_context.all_gather_json((kinds, sorted(self._strayed | self._changing.keys())))
        self._strayed = set()
        wanted = {name for _, names in told for name in names}
        self._changing = {
            name: kind for name, kind in kinds.items() if name in wanted and all(k.get(name) == kind for k, _ in told)
        }

    def _find(self) -> None:
        """Find the model's buffers, each once, by name."""
        held: dict[int, str] = {}
        self._places = {}
        for prefix, module in self._module.named_modules():
            for key, buffer in module._buffers.items():
                name = f"{prefix}.{key}".lstrip(".")
                if buffer is not None and key not in _EQUAL and held.setdefault(id(buffer), name) == name:
                    self._places[name] = module, key


def _kind(buffer: Tensor) -> str:
    return f"{buffer.dtype}{list(buffer.shape)}"


def _bytes(buffer: Tensor) -> Tensor:
    return buffer.contiguous().view(-1).view(torch.uint8)
