"""Writing a snapshot: every rank writes its own file, rank 0 the index; then the checkpoint takes its name."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from ..base.errors import CheckpointError
from ..base.safetensors import TensorStream
from ..grid import Grid
from ..grid.ranges import everything, shape_of
from .format import folder as folders
from .format.index import NAME, Index, StoredBox, StoredFile, StoredTensor, box_name, checksum, read_index, save_name
from .format.remote import Folder
from .lineage import Lineage
from .snapshot import Snapshot

AllGather = Callable[[str], Sequence[str | None]]  # from this rank's text to those of all ranks; None: a rank is absent
_SEEN = 10.0  # seconds within which a folder that rank 0 made must be visible on every rank


class Writer:
    """Writes one checkpoint. Every rank makes a ``Writer`` and calls ``run``.

    Args:
        grid: the run's grid.
        snapshot: the boxes that this rank writes. The header is taken from rank 0's snapshot.
        folder, tag: the folder of checkpoints, and the new checkpoint's name.
        all_gather: function that gathers a text from every rank. It is called equally often on each rank. None: a
            collective of the grid.
        save_latest: name the checkpoint in the file ``latest``.
        lineage: the run's identity and locks.
    """

    def __init__(
        self,
        grid: Grid,
        snapshot: Snapshot,
        folder: Folder,
        tag: str,
        all_gather: AllGather | None,
        save_latest: bool,
        lineage: Lineage,
    ) -> None:
        self._name, self._rank, self._size = grid.describe(), grid.rank, grid.size
        folder = folder.absolute()  # the process may change its directory while this is written
        self._folder, self._tag = folder, tag
        self._temporary = Path(tempfile.gettempdir())  # of a checkpoint at a URI, which is staged on this host
        if isinstance(folder, Path):
            self._temporary = folders.partial_path(folder, tag, lineage.run)
        self._all_gather: AllGather = all_gather or grid.world.all_gather_json
        self._snapshot, self._save_latest = snapshot, save_latest
        self._lineage, self._identity = lineage, lineage.next_save()
        snapshot.header["identity"] = self._identity
        self._save = save_name(self._identity)

    def run(self) -> str | None:
        """Write the checkpoint. Returns None, or on every rank the reason why it failed.

        After a failure the folder is as it was before.
        """
        for phase in (self._begin, self._write, self._commit):
            problem = self._on_all_ranks(phase)
            if problem is not None:
                self._discard()
                return problem
        return None

    def _on_all_ranks(self, phase: Callable[[], None]) -> str | None:
        problem = ""
        try:
            phase()
        except Exception as error:  # any error at all: the other ranks must learn of it
            problem = f"{self._name}: {self._explain(error)}"
        gathered = self._all_gather(problem)
        absent = [str(rank) for rank, text in enumerate(gathered) if text is None]
        if absent:
            return f"{self._name} waited for ranks {', '.join(absent)}, which did not answer"
        return next((text for text in gathered if text), None)

    def _begin(self) -> None:
        if self._rank == 0:
            self._lineage.begin(self._folder, self._tag, self._identity)

    def _write(self) -> None:
        deadline = time.monotonic() + _SEEN
        while not self._temporary.is_dir():
            if time.monotonic() > deadline:
                raise FileNotFoundError(
                    f"{self._temporary} was made by rank 0, but this rank does not see it: save to a file system that "
                    "all hosts share"
                )
            time.sleep(0.05)
        write_rank(self._temporary, self._rank, self._snapshot)

    def _commit(self) -> None:
        if self._rank == 0:
            header = self._snapshot.header
            assert isinstance(self._folder, Path)
            data = merged(self._temporary, self._size, header).dump()
            folders.write_atomically(self._temporary / NAME, data)
            for rank in range(self._size):
                (self._temporary / piece_name(rank)).unlink()
            self._lineage.lock(self._folder)  # another run may have it, if this one was held up for long
            folders.note_saved(self._folder, self._tag, self._save)
            folders.commit(self._folder, self._tag, self._lineage.run, self._save_latest)
            self._lineage.written(self._folder, header, checksum(data))

    def _discard(self) -> None:
        if self._rank == 0 and isinstance(self._folder, Path):
            folders.discard(self._folder, self._tag, self._lineage.run)

    def _explain(self, error: Exception) -> str:
        if isinstance(error, OSError) and error.strerror:
            text = f"{error.strerror}: {error.filename or self._temporary}"
            try:
                near = next(path for path in (self._temporary, *self._temporary.parents) if path.exists())
                free = shutil.disk_usage(near).free
                return f"{text} (this rank writes {self._snapshot.bytes / 1e6:.3g} MB, {free / 1e6:.3g} MB are free)"
            except (OSError, StopIteration):
                return text
        return str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"


def write_rank(folder: Path, rank: int, snapshot: Snapshot, save: str = "") -> None:
    """Write one rank's safetensors file, and a JSON file with its part of the index.

    Args:
        folder: the folder of the checkpoint that is being written.
        rank: the rank.
        snapshot: the boxes that this rank writes.
        save: name of the save, which the files then have in their names.
    """
    file = rank_name(rank, save)
    boxes = [(name, tensor, part) for name, tensor in snapshot.tensors.items() for part in tensor.boxes]
    keys = [name if part.box == everything(tensor.shape) else box_name(name, part.box) for name, tensor, part in boxes]
    announced = {key: (shape_of(part.box), tensor.dtype) for key, (_, tensor, part) in zip(keys, boxes, strict=True)}
    tensors = {
        name: StoredTensor(tensor.shape, str(tensor.dtype).removeprefix("torch."))
        for name, tensor in snapshot.tensors.items()
    }
    size, identity = 0, snapshot.header["identity"]
    with closing(TensorStream(folder / file, announced, True, {"save": save_name(identity)})) as stream:
        for key, (name, _, part) in zip(keys, boxes, strict=True):
            value = part.load()
            span = stream.write(key, value)
            tensors[name].boxes.append(StoredBox(part.box, file, key, span))
            size = span.stop
            if snapshot.after_write is not None:
                snapshot.after_write(value)
        stream.sync()
    header = stream.head
    index = Index(
        {"numbers": snapshot.numbers, "save": save_name(identity)},
        tensors,
        {file: StoredFile(max(size, header.stop), header)},
    )
    folders.write_atomically(folder / piece_name(rank, save), index.dump())


def merged(folder: Path, size: int, head: dict[str, Any], save: str = "") -> Index:
    """Return the index of the checkpoint, merged from the JSON files in which the ranks wrote their parts.

    Args:
        folder: the folder of the checkpoint that is being written.
        size: number of ranks.
        head: the run's header. The numbers of the ranks' parts are added to it.
        save: name of the save in the names of the files.
    """
    index = Index(head, {}, {})
    numbers: dict[str, Any] = {}
    for rank in range(size):
        piece = read_index(folder, piece_name(rank, save), whole=False)
        if piece.head["save"] != index.save_name:
            raise ValueError(f"{piece_name(rank, save)} is of save {piece.head['save']}, and not of {index.save_name}")
        numbers.update(piece.head["numbers"])
        index.files.update(piece.files)
        for name, entry in piece.tensors.items():
            known = index.tensors.setdefault(name, StoredTensor(entry.shape, entry.dtype))
            if (known.shape, known.dtype) != (entry.shape, entry.dtype):
                raise ValueError(
                    f"{name} is {known.dtype} {known.shape} on one rank and {entry.dtype} {entry.shape} on rank {rank}"
                )
            known.boxes += entry.boxes
    index.head["numbers"] = dict(sorted(numbers.items()))
    index.tensors = dict(sorted(index.tensors.items(), key=lambda item: _order(item[0])))
    index.check(str(folder))
    return index


def rank_name(rank: int, save: str = "") -> str:
    """Return the name of a rank's safetensors file; ``save``: name of the save, to be in it."""
    return f"rank-{rank:05}{'.' if save else ''}{save}.safetensors"


def piece_name(rank: int, save: str = "") -> str:
    """Return the name of the JSON file with a rank's part of the index."""
    return f"rank-{rank:05}{'.' if save else ''}{save}.json"


def _order(name: str) -> tuple[Any, ...]:
    """Sort key of a tensor's name: layers by their numbers, 2 before 10."""
    return tuple((0, int(word), "") if word.isdigit() else (1, 0, word) for word in name.replace("/", ".").split("."))
