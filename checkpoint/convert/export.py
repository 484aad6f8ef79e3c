"""Export of unsharded weights to one safetensors file, from a checkpoint or from a running model.

From a checkpoint one process writes tensor by tensor. From a running model each rank writes its own boxes.
"""

from __future__ import annotations

import math
import os
from collections import ChainMap
from collections.abc import Iterator
from contextlib import closing
from itertools import product
from pathlib import Path

import torch

from ...base.folder_files import sync
from ...base.safetensors import TensorStream, header, raw
from ...grid import Grid
from ...grid.agreement.agreement import agreed
from ...grid.ranges import Spans, shape_of
from ..snapshot import BUFFERS, WEIGHTS, Snapshot, WholeTensor


def export(snapshot: Snapshot, path: Path, dtype: torch.dtype | None = None) -> dict[str, tuple[int, ...]]:
    """Write a checkpoint's weights and buffers to one file, under the model's names. One tensor is in memory at a time.

    Args:
        snapshot: read from the checkpoint.
        path: path of the file to write.
        dtype: dtype of floating-point tensors in the file. None: the dtype in the checkpoint (fp32 for master weights).

    Returns:
        The names that were written, with their shapes.
    """
    chosen = snapshot.of_kinds(BUFFERS, WEIGHTS)  # in the order of the index
    announced = {title: (tensor.shape, _dtype(tensor, dtype)) for title, tensor in chosen.items()}
    temporary = path.with_name(f".{path.name}.part")
    path.parent.mkdir(parents=True, exist_ok=True)
    with closing(TensorStream(temporary, announced, checksums=False)) as stream:
        for title, tensor in chosen.items():
            stream.write(title, tensor.read_all().to(_dtype(tensor, dtype)))
        stream.sync()
    temporary.replace(path)
    sync(path.parent)
    return {title: tensor.shape for title, tensor in chosen.items()}


def write_model(grid: Grid, snapshot: Snapshot, path: Path, dtype: torch.dtype | None) -> None:
    """Write a run's weights and buffers to one file. Collective.

    Nothing is gathered: every rank writes its boxes at their places in the file.

    Args:
        grid: the run's grid.
        snapshot: the boxes of weights and buffers that this rank writes. Over all ranks each element is in one box.
        path: path of the file, in a folder that every rank sees.
        dtype: dtype of floating-point tensors in the file. None: the dtype of each tensor.

    Raises:
        CheckpointError: on every rank, if a rank could not write. An existing file of that name does not change.
    """
    temporary = path.with_name(f".{path.name}.part")
    own_tensors = {name: (tensor.shape, _dtype(tensor, dtype)) for name, tensor in snapshot.tensors.items()}
    everything = dict(ChainMap(*grid.world.all_gather_json(own_tensors)))
    top, places = header({name.partition("/")[2]: everything[name] for name in sorted(everything)})
    with agreed(grid):
        if grid.rank == 0:
            path.parent.mkdir(parents=True, exist_ok=True)
            with temporary.open("wb") as file:
                file.write(top)
                file.truncate(len(top) + sum(math.prod(s) * d.itemsize for s, d in everything.values()))
    with agreed(grid), temporary.open("r+b", buffering=0) as file:
        for name, tensor in snapshot.tensors.items():
            written, offset = _dtype(tensor, dtype), places[name.partition("/")[2]]
            for box, load in tensor.boxes:
                data = memoryview(raw(load().to(written)))
                at = 0
                for start, length in runs(tensor.shape, box):
                    size = length * written.itemsize
                    _put(file.fileno(), data[at : at + size], offset + start * written.itemsize)
                    at += size
        os.fsync(file.fileno())
    with agreed(grid):
        if grid.rank == 0:
            temporary.replace(path)
            sync(path.parent)


def runs(shape: tuple[int, ...], box: Spans) -> Iterator[tuple[int, int]]:
    """Yield the flat, row-major runs of elements that a box of a tensor covers, in order: (start, length).

    >>> [*runs((4, 3), ((1, 3), (0, 2)))]
    [(3, 2), (6, 2)]
    >>> [*runs((4, 3), ((1, 3), (0, 3)))]
    [(3, 6)]
    """
    lengths, outer = shape_of(box), len(shape)
    while outer and lengths[outer - 1] == shape[outer - 1]:
        outer -= 1  # whole dims at the end run on
    inner = math.prod(shape[outer:])
    if outer:
        outer -= 1
        inner *= lengths[outer]
    strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    base = sum(low * stride for (low, _), stride in zip(box[outer:], strides[outer:], strict=True))
    if math.prod(lengths):
        for index in product(*(range(low, high) for low, high in box[:outer])):
            yield base + sum(at * stride for at, stride in zip(index, strides, strict=False)), inner


def _dtype(tensor: WholeTensor, dtype: torch.dtype | None) -> torch.dtype:
    return dtype if dtype is not None and tensor.dtype.is_floating_point else tensor.dtype


def _put(file: int, data: memoryview, at: int) -> None:
    while len(data):
        done = os.pwrite(file, data, at)
        data, at = data[done:], at + done
