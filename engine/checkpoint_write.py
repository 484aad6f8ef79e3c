"""Writing a checkpoint: every rank its own file, rank 0 the index; then all of it gets its name at once, or nothing."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from ..grid import Grid
from . import checkpoint_folder as folders
from .checkpoint_boxes import everything, shape_of
from .checkpoint_file import Planned, write_tensors
from .checkpoint_folder import what
from .checkpoint_index import FORMAT, NAME, VERSION, Entry, File, Index, Stored, read_index
from .checkpoint_state import Part

Tell = Callable[[str], Sequence[str | None]]
_SEEN = 10.0  # seconds in which a folder that rank 0 made must be there for every rank


class Writer:
    """A checkpoint that is being written. Every rank has one, and runs it.

    Args:
        grid: of the run.
        folder, tag: where it goes.
        parts: what this rank writes.
        numbers: what is one number a parameter, of this rank's.
        head: of the index; rank 0's counts.
        tell: what every rank says, in order; called as often on each.
        save_latest: name it in ``latest``.
        after: told of each tensor when it is written.
    """

    def __init__(
        self,
        grid: Grid,
        folder: Path,
        tag: str,
        parts: Sequence[Part],
        numbers: dict[str, Any],
        head: dict[str, Any],
        tell: Tell,
        save_latest: bool,
        after: Callable[[Tensor], None] | None = None,
    ) -> None:
        self._who, self._rank, self._size = grid.describe(), grid.rank, grid.size
        folder = folder.absolute()  # the process may go elsewhere while it is written
        self._folder, self._tag, self._temporary = folder, tag, folders.part(folder, tag)
        self._parts, self._numbers, self._head = parts, numbers, head
        self._tell, self._save_latest, self._after = tell, save_latest, after

    def run(self) -> str | None:
        """Write it; returns why it did not come to be, alike on every rank. What was there before is there then."""
        for act in (self._begin, self._write, self._commit):
            problem = self._together(act)
            if problem is not None:
                if self._rank == 0:
                    folders.discard(self._folder, self._tag)
                return problem
        return None

    def _together(self, act: Callable[[], None]) -> str | None:
        problem = ""
        try:
            act()
        except Exception as error:  # whatever it is, the others must hear of it
            problem = f"{self._who}: {self._explain(error)}"
        told = self._tell(problem)
        absent = [str(rank) for rank, said in enumerate(told) if said is None]
        if absent:
            return f"{self._who} waited in vain for ranks {', '.join(absent)}"
        return next((said for said in told if said), None)

    def _begin(self) -> None:
        if self._rank == 0:
            folders.begin(self._folder, self._tag)

    def _write(self) -> None:
        deadline = time.monotonic() + _SEEN
        while not self._temporary.is_dir():
            if time.monotonic() > deadline:
                raise FileNotFoundError(
                    f"{self._temporary}, which rank 0 made, is not here: save to a file system that every rank sees"
                )
            time.sleep(0.05)
        write_rank(self._temporary, self._rank, self._parts, self._numbers, self._after)

    def _commit(self) -> None:
        if self._rank == 0:
            index = merged(self._temporary, self._size, self._head)
            folders.write_text(self._temporary / NAME, index.dump())
            for rank in range(self._size):
                (self._temporary / _piece(rank)).unlink()
            folders.commit(self._folder, self._tag, self._save_latest)

    def _explain(self, error: Exception) -> str:
        if isinstance(error, OSError) and error.strerror:
            needed = sum(part.value.numel() * part.dtype.itemsize for part in self._parts)
            text = f"{error.strerror}: {error.filename or self._temporary}"
            try:
                near = next(path for path in (self._temporary, *self._temporary.parents) if path.exists())
                free = shutil.disk_usage(near).free
                return f"{text} (this rank writes {needed / 1e6:.3g} MB, and {free / 1e6:.3g} MB are free there)"
            except (OSError, StopIteration):
                return text
        return f"{type(error).__name__}: {error}"


def write_rank(
    folder: Path,
    rank: int,
    parts: Sequence[Part],
    numbers: dict[str, Any],
    after: Callable[[Tensor], None] | None = None,
) -> None:
    """One rank's file, and what rank 0 must know of it."""
    file = f"rank-{rank:05}.safetensors"
    written = [part for part in parts if part.value.numel()]
    keys = [part.name if part.box == everything(part.shape) else what(part.name, part.box) for part in written]
    planned = [Planned(k, shape_of(p.box), p.dtype, partial(_value, p)) for k, p in zip(keys, written, strict=True)]
    header, spans = write_tensors(folder / file, planned, after)
    tensors: dict[str, Entry] = {}
    for part in parts:
        tensors.setdefault(part.name, Entry(part.shape, str(part.dtype).removeprefix("torch.")))
    for part, key, span in zip(written, keys, spans, strict=True):
        tensors[part.name].boxes.append(Stored(part.box, file, key, span))
    size = spans[-1].stop if spans else header.stop
    index = Index(_head({"numbers": numbers}), tensors, {file: File(size, header)})
    folders.write_text(folder / _piece(rank), index.dump())


def merged(folder: Path, size: int, head: dict[str, Any]) -> Index:
    """The index of all ranks' files."""
    whole = Index(_head(head), {}, {})
    numbers: dict[str, Any] = {}
    for rank in range(size):
        piece = read_index(folder, _piece(rank), whole=False)
        numbers.update(piece.head["numbers"])
        whole.files.update(piece.files)
        for name, entry in piece.tensors.items():
            known = whole.tensors.setdefault(name, Entry(entry.shape, entry.dtype))
            if (known.shape, known.dtype) != (entry.shape, entry.dtype):
                raise ValueError(
                    f"{name} is {known.dtype} {known.shape} on one rank and {entry.dtype} {entry.shape} on rank {rank}"
                )
            known.boxes += entry.boxes
    whole.head["numbers"] = dict(sorted(numbers.items()))
    whole.tensors = dict(sorted(whole.tensors.items(), key=lambda item: _order(item[0])))
    whole.check(str(folder))
    return whole


def _value(part: Part) -> Any:
    return part.value


def _piece(rank: int) -> str:
    return f"rank-{rank:05}.json"


def _order(name: str) -> tuple[Any, ...]:
    """Layers by their numbers, 2 before 10."""
    return tuple((0, int(word), "") if word.isdigit() else (1, 0, word) for word in name.replace("/", ".").split("."))


def _head(head: dict[str, Any]) -> dict[str, Any]:
    return {"format": FORMAT, "version": VERSION, **head}
