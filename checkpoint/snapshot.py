"""Snapshot: the state of a training run at one moment, as boxes of whole tensors, numbers and a header.

An engine makes one of its own state (``engine/snapshot/capture.py``) and applies one (``engine/snapshot/restore.py``).
This folder writes snapshots to files and reads them. Neither side imports the other.

A tensor's name begins with its kind:

weights/NAME                      a parameter's master values, unrounded
buffers/NAME                      a buffer
optimizer/KEY/NAME                optimizer state of the parameter's shape, such as exp_avg
random/KIND/RANK                  states of the random generators of one process
client/NUMBER                     a tensor of the user's client state
exchange/KEY/REPLICA/NAME         residuals of a gradient compression
replica/NUMBER/..., outer/...     local updates: state of one replica, state of the outer optimizer
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..base.json_values import decode, encode
from ..grid import Grid, Layout
from ..grid.layout import FlatRange
from ..grid.ranges import Spans, boxes_of_range, everything, overlap, shape_of, within

WEIGHTS, BUFFERS, OPTIMIZER, RANDOM = "weights", "buffers", "optimizer", "random"
CLIENT, EXCHANGE, REPLICA, OUTER = "client", "exchange", "replica", "outer"


class TensorBox(NamedTuple):
    """One box (n-d slice) of an unsharded tensor. ``load()`` returns the values, in the box's shape."""

    box: Spans
    load: Callable[[], Tensor]


@dataclass
class WholeTensor:
    """Unsharded tensor of the model, stored as boxes.

    Read from a checkpoint it has all boxes. Made by an engine it has only the boxes that this rank writes.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    boxes: list[TensorBox] = field(default_factory=list)

    def read_box(self, box: Spans, target: Tensor) -> None:
        """Copy into ``target`` the values of ``box`` that this tensor's boxes contain. ``target`` has the box's shape.

        The values are converted to the dtype of ``target``.
        """
        for held in self.boxes:
            common = overlap(box, held.box)
            if common is not None:
                target[within(common, box)].copy_(held.load()[within(common, held.box)])

    def read_range(self, part: FlatRange, grid: Grid) -> None:
        """Copy a flat range of this rank's shard of the tensor into ``part.value``."""
        for box, value in _pieces_here(part, grid):
            self.read_box(box, value)

    def read_shard(self, target: Tensor, layout: Layout, grid: Grid) -> None:
        """Copy this rank's shard of the tensor into ``target``.

        Args:
            target: has the shard's shape.
            layout: layout of the parameter: which dims the tensor axis and the expert axis shard.
            grid: the grid of this rank.
        """
        value = torch.empty(target.shape, dtype=target.dtype, device=target.device)
        for box in layout.boxes(grid.tensor.rank, grid.tensor.size, (grid.expert.rank, grid.expert.size)):
            self.read_box(tuple((span.start, span.stop) for span in box.whole), value[box.local])
        target.copy_(value)

    def read_all(self) -> Tensor:
        """Return the whole tensor, in its own dtype."""
        value = torch.empty(self.shape, dtype=self.dtype)
        self.read_box(everything(self.shape), value)
        return value


@dataclass
class Snapshot:
    """State of a run at one moment.

    Attributes:
        tensors: name -> tensor. In a snapshot that an engine made, a tensor has the boxes that this rank writes, and
            over all ranks each element is in one box. In a snapshot read from a checkpoint, it has all boxes.
        numbers: for each parameter, the entries of its optimizer state that are single numbers, in JSON.
        header: the run in JSON: its step, configuration, grid, versions, ``run`` (counters and schedules),
            ``identity`` (``Lineage.next_save``) and ``client_state``. Equal on all ranks. Read from a checkpoint it has
            also the ``checksum`` of the index.
        source: the checkpoint's folder, for messages; empty for a snapshot of an engine.
        after_write: called with each tensor when it has been written, so that values kept on disk can leave memory.
    """

    tensors: dict[str, WholeTensor] = field(default_factory=dict)
    numbers: dict[str, Any] = field(default_factory=dict)
    header: dict[str, Any] = field(default_factory=dict)
    source: str = ""
    after_write: Callable[[Tensor], None] | None = None

    def declare(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> WholeTensor:
        """Return the tensor of that name, made without boxes if there was none."""
        return self.tensors.setdefault(name, WholeTensor(shape, dtype))

    def add(self, name: str, value: Tensor) -> None:
        """Add an unsharded tensor to the snapshot under this name."""
        tensor = self.declare(name, tuple(value.shape), value.dtype)
        if value.numel():
            tensor.boxes.append(TensorBox(everything(value.shape), lambda: value))

    def add_range(self, name: str, part: FlatRange, grid: Grid) -> None:
        """Add a flat range of this rank's shard of a tensor."""
        tensor = self.declare(name, part.layout.shape, part.value.dtype)
        tensor.boxes += (TensorBox(box, value.detach) for box, value in _pieces_here(part, grid))

    def of_kinds(self, *kinds: str) -> dict[str, WholeTensor]:
        """Return the tensors of these kinds, kind after kind, by their names without the kind."""
        split = [(*name.partition("/"), tensor) for name, tensor in self.tensors.items()]
        return {name: tensor for kind in kinds for tensor_kind, _, name, tensor in split if tensor_kind == kind}

    def under(self, prefix: str) -> Snapshot:
        """Return a snapshot of the entries whose names begin with ``prefix``; the prefix is removed."""
        tensors = {name.removeprefix(prefix): value for name, value in self.tensors.items() if name.startswith(prefix)}
        numbers = {name.removeprefix(prefix): value for name, value in self.numbers.items() if name.startswith(prefix)}
        return Snapshot(tensors, numbers, self.header, self.source)

    def set_client_state(self, values: Mapping[str, Any], add_tensors: bool) -> None:
        """Put the user's client state into the header, and its tensors, as they are now, beside the others.

        Args:
            values: numbers, text, tensors, and lists, tuples and dicts of these.
            add_tensors: True on the one rank that writes the tensors among the values.

        Raises:
            TypeError: if a value has another type.
        """
        client_tensors: list[Tensor] = []

        def put(tensor: Tensor) -> str:
            client_tensors.append(tensor.detach().cpu().clone())
            return f"{len(client_tensors) - 1}"

        self.header["client_state"] = encode(dict(values), put)
        if add_tensors:
            for number, tensor in enumerate(client_tensors):
                self.add(f"{CLIENT}/{number}", tensor)

    def client_state(self) -> dict[str, Any]:
        """Return the client state that the user gave to ``save_checkpoint``."""
        saved = self.header.get("client_state", {})
        state: dict[str, Any] = decode(saved, lambda name: self.tensors[f"{CLIENT}/{name}"].read_all())
        return state

    @property
    def bytes(self) -> int:
        """Bytes of all boxes."""
        return sum(
            math.prod(shape_of(part.box)) * tensor.dtype.itemsize
            for tensor in self.tensors.values()
            for part in tensor.boxes
        )


def _pieces_here(part: FlatRange, grid: Grid) -> Iterator[tuple[Spans, Tensor]]:
    return pieces(part, grid.tensor.rank, grid.tensor.size, (grid.expert.rank, grid.expert.size))


def pieces(part: FlatRange, rank: int, size: int, expert: tuple[int, int] = (0, 1)) -> Iterator[tuple[Spans, Tensor]]:
    """Yield the boxes of the whole tensor that make up a flat range of one shard of it.

    Each comes with its values: a view of the range's values, in the box's shape.

    Args:
        part: the range, with the layout of the parameter.
        rank, size: position of the shard's rank on the tensor axis, and the size of that axis.
        expert: position of the shard's rank on the expert axis, and the size of that axis.
    """
    shard = part.layout.boxes(rank, size, expert)
    at = 0
    for here in boxes_of_range(part.layout.local_shape(rank, size, expert), part.start, part.stop):
        spans = tuple((span.start, span.stop) for span in here)
        shape = shape_of(spans)
        value = part.value[at : at + math.prod(shape)].view(shape)
        at += math.prod(shape)
        for box in shard:
            common = overlap(spans, tuple((span.start, span.stop) for span in box.local))
            if common is not None:
                shifts = [whole.start - local.start for whole, local in zip(box.whole, box.local, strict=True)]
                target = tuple((low + shift, high + shift) for (low, high), shift in zip(common, shifts, strict=True))
                yield target, value[within(common, spans)]
