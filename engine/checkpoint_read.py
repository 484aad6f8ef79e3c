"""Reading a checkpoint on any grid: each rank finds the boxes that overlap its own, and reads those parts of them."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..grid import Grid, layout_of
from ..zero.held import Held, Range
from . import checkpoint_exchange
from . import checkpoint_state as states
from .batch import AgreedError
from .checkpoint_boxes import everything, overlap, pieces, within
from .checkpoint_exchange import EXCHANGE
from .checkpoint_file import DTYPES, CorruptError
from .checkpoint_folder import what
from .checkpoint_index import Entry, Index, read_index
from .checkpoint_state import BUFFERS, CLIENT, OPTIMIZER, RANDOM, WEIGHTS
from .checkpoint_values import decode

if TYPE_CHECKING:
    from .compat import Compat

_NAMED = 8  # names that a message lists


class CheckpointError(AgreedError):
    """A checkpoint could not be written or read; every rank raises it alike, and nothing was changed."""


class DamagedError(CheckpointError):
    """What is there is not what was written."""


@dataclass(frozen=True)
class Wanted:
    """What to load.

    Attributes:
        strict: names and shapes must be those of the model; else the rest is loaded.
        optimizer: its state, the groups' options, the loss scale.
        schedule: the learning-rate schedule.
        weights_only: neither of them, nor steps and places.
        verify: hold what is read against its checksums first.
        local: what replicas that step on their own had, each of them.
    """

    strict: bool = True
    optimizer: bool = True
    schedule: bool = True
    weights_only: bool = False
    verify: bool = True
    local: bool = False

    def kinds(self) -> tuple[str, ...]:
        """Of tensors."""
        if self.weights_only:
            return (WEIGHTS, BUFFERS, CLIENT)
        more = (*((EXCHANGE,) if self.optimizer else ()), *(("replica", "outer") if self.local else ()))
        return (WEIGHTS, BUFFERS, CLIENT, RANDOM, *((OPTIMIZER,) if self.optimizer else ()), *more)


@contextmanager
def agreed(grid: Grid) -> Iterator[None]:
    """What fails within on one rank is raised on every rank. Collective.

    Raises:
        DamagedError, CheckpointError: with what the first rank said that failed.
    """
    failed: Exception | None = None
    try:
        yield
    except (CorruptError, OSError, ValueError, TypeError, KeyError, RuntimeError) as error:
        failed = error
    told = grid.world.all_gather_object(None if failed is None else (str(failed), isinstance(failed, CorruptError)))
    said = next((each for each in told if each is not None), None)
    if said is not None:
        text, damaged = said
        raise (DamagedError if damaged else CheckpointError)(text) from failed


class Reader:
    """The tensors of one checkpoint.

    Args:
        path: of its folder.
        index: of it.
    """

    def __init__(self, path: Path, index: Index) -> None:
        self.path, self.index = path, index
        self._folder = index.folder(path)

    def fill(self, name: str, part: Range, rank: int, size: int) -> None:
        """Read what a range on tensor rank ``rank`` of ``size`` is made of, into it."""
        entry = self.index.tensors[name]
        for piece in pieces(part, rank, size):
            self.into(entry, piece.box, piece.value)

    def into(self, entry: Entry, box: Any, value: Tensor) -> None:
        """Read a box of a tensor into ``value``, in whatever dtype that is."""
        dtype = DTYPES[entry.dtype]
        for stored in entry.boxes:
            common = overlap(box, stored.box)
            if common is not None:
                shape = tuple(b - a for a, b in stored.box)
                read = self._folder.tensor(stored.file, stored.span.start, stored.span.stop, dtype, shape)
                value[within(common, box)].copy_(read[within(common, stored.box)])

    def whole(self, name: str) -> Tensor:
        """All of a tensor, in its own dtype."""
        entry = self.index.tensors[name]
        value = torch.empty(entry.shape, dtype=DTYPES[entry.dtype])
        self.into(entry, everything(entry.shape), value)
        return value

    def verify(self, kinds: Sequence[str], rank: int, size: int) -> None:
        """Hold this rank's share of all bytes against their checksums: over all ranks, each byte once.

        Raises:
            CorruptError: naming the file, the tensor and the bytes.
        """
        files = sorted(self.index.files)
        for number, name in enumerate(files):
            if number % size == rank:
                self._folder.check(name, self.index.files[name].header, "its header")
        listed = [
            (stored, name)
            for name, entry in self.index.tensors.items()
            if name.partition("/")[0] in kinds
            for stored in entry.boxes
        ]
        listed.sort(key=lambda item: (item[0].file, item[0].span.start))
        total = sum(stored.span.stop - stored.span.start for stored, _ in listed)
        at = 0
        for stored, name in listed:
            if at * size // max(total, 1) == rank:
                self._folder.check(stored.file, stored.span, what(name, stored.box))
            at += stored.span.stop - stored.span.start

    def client_state(self) -> dict[str, Any]:
        """What the user had saved with it."""
        found: dict[str, Any] = decode(
            self.index.head.get("client_state", {}), lambda name: self.whole(f"{CLIENT}/{name}")
        )
        return found


def open_checkpoint(grid: Grid, path: Path, wanted: Wanted) -> Reader:
    """A checkpoint, known to be as it was written. Collective.

    Raises:
        DamagedError: it is not.
        CheckpointError: there is none.
    """
    reader: Reader | None = None
    with agreed(grid):
        try:
            reader = Reader(path, read_index(path))
        except FileNotFoundError:
            near = sorted(each.name for each in path.parent.glob("*/") if not each.name.startswith("."))
            raise ValueError(
                f"{path} is no checkpoint: it has no index.json; {path.parent} has {', '.join(near) or 'none'}"
            ) from None
        except OSError as error:
            raise ValueError(f"{path}: its index.json cannot be read: {error.strerror}") from error
    with agreed(grid):
        assert reader is not None
        if wanted.verify:
            reader.verify(wanted.kinds(), grid.rank, grid.size)
    assert reader is not None
    return reader


@torch.no_grad()
def restore(engine: Compat, reader: Reader, wanted: Wanted) -> None:
    """Give an engine what a checkpoint has. Collective.

    Raises:
        CheckpointError: names or shapes differ, and they must not: nothing was changed.
    """
    grid, held, index = engine.grid, states.held_by(engine), reader.index
    place, state = (grid.tensor.rank, grid.tensor.size), index.head["run"]
    if engine.local is not None:
        with agreed(grid):
            engine.local.require(reader, wanted)
    usable = _compare(engine, held, reader, wanted)
    for part in held.values(mine=False):
        if f"{WEIGHTS}/{part.name}" in usable:
            reader.fill(f"{WEIGHTS}/{part.name}", part, *place)
    held.settle()
    for name, buffer, _ in states.buffers(engine.module, grid.pipe.rank):
        if f"{BUFFERS}/{name}" in usable:
            value = torch.empty_like(buffer, memory_format=torch.contiguous_format)
            reader.fill(f"{BUFFERS}/{name}", Range(name, layout_of(buffer), 0, buffer.numel(), value.view(-1)), *place)
            buffer.copy_(value)
    if wanted.weights_only:
        if engine.local is not None:
            engine.local.restore(reader, wanted, usable)
        return
    notes = []
    if wanted.optimizer and engine._replicas.optimizer is not None:
        if states.same_state(state.get("optimizer"), engine):
            read_optimizer(held, reader, usable, place)
            notes += states.set_optimizer(engine, state)
        else:
            notes.append(f"the optimizer was a {state['optimizer']}: its state is not loaded")
        notes += checkpoint_exchange.restore(engine, held, reader, place)
    if wanted.schedule:
        notes += states.set_schedule(engine, state)
    with agreed(grid):  # a loader may be of other data
        notes += states.set_position(engine, state)
    if engine.local is not None:
        notes += engine.local.restore(reader, wanted, usable)
    if index.head["grid"] == grid.topology.axes:
        names = {name.split("/")[1]: name for name in index.tensors if name.startswith(f"{RANDOM}/")}
        mine = {kind: f"{RANDOM}/{kind}/{grid.rank:05}" for kind in names}
        states.set_generators(engine, {k: reader.whole(n) for k, n in mine.items() if n in index.tensors})
    if grid.rank == 0:
        for note in notes:
            logging.getLogger("triax").warning("%s: %s", reader.path, note)


def read_optimizer(held: Held, reader: Reader, usable: Mapping[str, Any], place: tuple[int, int]) -> None:
    """Give an optimizer the state that is there of the parameters that can be used."""
    entries = reader.index.tensors
    shapes = {name.partition("/")[2]: layout.shape for name, layout in usable.items() if name.startswith(WEIGHTS)}
    keys = list(dict.fromkeys(name.split("/", 2)[1] for name in entries if name.startswith(f"{OPTIMIZER}/")))

    def has(name: str, key: str) -> torch.dtype | None:
        entry = entries.get(f"{OPTIMIZER}/{key}/{name}")
        return DTYPES[entry.dtype] if entry is not None and shapes.get(name) == entry.shape else None

    held.forget()
    for key, part in held.rooms(has, keys):
        reader.fill(f"{OPTIMIZER}/{key}/{part.name}", part, *place)
    for name, shape in shapes.items():
        for key in keys:
            entry = entries.get(f"{OPTIMIZER}/{key}/{name}")
            if entry is not None and entry.shape != shape:
                held.set_other(name, key, reader.whole(f"{OPTIMIZER}/{key}/{name}"))
    saved = reader.index.head["numbers"]
    unlike = held.set_numbers({name: decode(saved[name]) for name in shapes if name in saved})
    held.resume()
    if unlike:
        logging.getLogger("triax").warning(
            "%s: parameters beside %s had taken unlike numbers of steps, or none: they count the most from here on",
            reader.path,
            ", ".join(unlike[:_NAMED]),
        )


def _compare(engine: Compat, held: Held, reader: Reader, wanted: Wanted) -> dict[str, Any]:
    """What this rank loads of weights and buffers, with its layouts.

    Raises:
        CheckpointError: something is missing, unexpected or of another shape, and must not be; or cannot be loaded now.
    """
    grid, mine, entries = engine.grid, states.layouts(engine, held), reader.index.tensors
    missing = [name for name in mine if name not in entries]
    shapes = [
        f"{_short(name)} {entries[name].shape} there, {layout.shape} here"
        for name, layout in mine.items()
        if name in entries and entries[name].shape != layout.shape
    ]
    optimizer = ""
    theirs = reader.index.head["run"].get("optimizer")
    steps = wanted.optimizer and not wanted.weights_only and engine._replicas.optimizer is not None
    if steps and not states.same_state(theirs, engine):
        optimizer = f"the optimizer was a {theirs}, and this one is a {type(engine._replicas.optimizer).__name__}"
    told = grid.world.all_gather_object(([*mine], missing, shapes, held.whole()))
    lent = next((name for *_, name in told if name is not None), None)
    if lent is not None:
        raise CheckpointError(f"{lent} is lent out whole: load_checkpoint outside of whole_weights() and gathered()")
    everybody = {name for names, *_ in told for name in names}
    ours = (WEIGHTS, BUFFERS)
    unexpected = [name for name in entries if name.partition("/")[0] in ours and name not in everybody]
    found = {
        "missing there": list(dict.fromkeys(_short(name) for _, names, *_ in told for name in names)),
        "unexpected": [_short(name) for name in unexpected],
        "of another shape": list(dict.fromkeys(text for _, _, texts, _ in told for text in texts)),
    }
    problems = [f"{title}: {_listed(names)}" for title, names in found.items() if names]
    if optimizer:
        problems.append(f"{optimizer} (load_optimizer_states=False loads the rest)")
    if problems and wanted.strict:
        raise CheckpointError(
            f"{reader.path} is not of this model: {'; '.join(problems)}. load_checkpoint(..., strict=False) loads what "
            "fits"
        )
    if problems and grid.rank == 0:
        logging.getLogger("triax").warning("%s: not loaded: %s", reader.path, "; ".join(problems))
    return {name: layout for name, layout in mine.items() if name in entries and entries[name].shape == layout.shape}


def _short(name: str) -> str:
    return name.removeprefix(f"{WEIGHTS}/")


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more
