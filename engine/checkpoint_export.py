"""One safetensors file of whole weights: from a checkpoint, tensor by tensor; from a run, each rank its own boxes."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from . import checkpoint_state as states
from .checkpoint_boxes import Spans, shape_of
from .checkpoint_file import DTYPES, NAMES, Planned, raw, write_tensors
from .checkpoint_folder import sync
from .checkpoint_read import Reader, agreed
from .checkpoint_state import BUFFERS, WEIGHTS

if TYPE_CHECKING:
    from .compat import Compat


def export(reader: Reader, path: Path, dtype: torch.dtype | None = None) -> dict[str, tuple[int, ...]]:
    """Write a checkpoint's weights and buffers to one file, under their own names. No more than a tensor is held.

    Args:
        reader: of the checkpoint.
        path: of the file.
        dtype: of floating-point tensors; None: that in which they are kept, masters fp32.

    Returns:
        What was written: names and shapes.
    """
    planned, written = [], {}
    for name, entry in reader.index.tensors.items():
        kind, _, title = name.partition("/")
        if kind in (WEIGHTS, BUFFERS):
            own = DTYPES[entry.dtype]
            kept = dtype if dtype is not None and own.is_floating_point else own
            planned.append(Planned(title, entry.shape, kept, _Cast(reader, name, kept)))
            written[title] = entry.shape
    temporary = path.with_name(f".{path.name}.part")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_tensors(temporary, planned)
    temporary.replace(path)
    sync(path.parent)
    return written


class _Cast:
    """A tensor that is read when it is written."""

    def __init__(self, reader: Reader, name: str, dtype: torch.dtype) -> None:
        self._reader, self._name, self._dtype = reader, name, dtype

    def __call__(self) -> Tensor:
        return self._reader.whole(self._name).to(self._dtype)


def write_model(engine: Compat, path: Path, dtype: torch.dtype | None, frozen: bool = True) -> None:
    """Write a run's weights and buffers to one file. Collective.

    Nothing is gathered: every rank puts its boxes in place.

    Args:
        engine: of the run.
        path: of the file, which every rank sees.
        dtype: of floating-point weights; None: their own.
        frozen: those too that are not trained.

    Raises:
        CheckpointError: on every rank, where one could not write; a file of that name stays as it was.
    """
    grid = engine.grid
    temporary = path.with_name(f".{path.name}.part")
    with agreed(grid):
        held = states.held_by(engine)
        out = set() if frozen else states.frozen(held)
        parts = [p for p in states.parts(engine, held) if p.name.partition("/")[0] in (WEIGHTS, BUFFERS)]
        mine = {p.name: (p.shape, _kept(p.dtype, dtype)) for p in parts if p.name not in out}
    everything: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    for each in grid.world.all_gather_object(mine):
        everything.update(each)
    header, places = _lay_out(everything)
    with agreed(grid):
        if grid.rank == 0:
            path.parent.mkdir(parents=True, exist_ok=True)
            with temporary.open("wb") as file:
                file.write(header)
                file.truncate(len(header) + sum(math.prod(s) * d.itemsize for s, d in everything.values()))
    with agreed(grid), temporary.open("r+b", buffering=0) as file:
        for part in parts:
            if part.name in mine:
                shape, kept = mine[part.name]
                data = memoryview(raw(part.value.to(kept)))
                at = 0
                for start, length in runs(shape, part.box):
                    size = length * kept.itemsize
                    _put(file.fileno(), data[at : at + size], places[part.name] + start * kept.itemsize)
                    at += size
        os.fsync(file.fileno())
    with agreed(grid):
        if grid.rank == 0:
            temporary.replace(path)
            sync(path.parent)


def runs(shape: tuple[int, ...], box: Spans) -> Iterator[tuple[int, int]]:
    """The flat, row-major runs of elements that a box of a tensor covers, in order: (start, length).

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
        for place in product(*(range(low, high) for low, high in box[:outer])):
            yield base + sum(at * stride for at, stride in zip(place, strides, strict=False)), inner


def _kept(own: torch.dtype, dtype: torch.dtype | None) -> torch.dtype:
    return dtype if dtype is not None and own.is_floating_point else own


def _lay_out(tensors: Mapping[str, tuple[tuple[int, ...], torch.dtype]]) -> tuple[bytes, dict[str, int]]:
    """The file's header, and the byte at which each tensor begins."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    starts, at = {}, 0
    for name, (shape, dtype) in sorted(tensors.items()):
        stop = at + math.prod(shape) * dtype.itemsize
        header[name.partition("/")[2]] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [at, stop]}
        starts[name], at = at, stop
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    whole = len(text).to_bytes(8, "little") + text
    return whole, {name: start + len(whole) for name, start in starts.items()}


def _put(file: int, data: memoryview, at: int) -> None:
    while len(data):
        done = os.pwrite(file, data, at)
        data, at = data[done:], at + done
