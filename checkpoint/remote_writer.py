"""Writing a snapshot to a file system of fsspec: each rank uploads its own file, rank 0 the index at the end."""

from __future__ import annotations

import contextlib
from typing import Any

from ..base.errors import CheckpointError
from ..base.temporary_folders import temporary_folder
from ..grid import Grid
from .format.folder import LATEST, note_saved
from .format.index import NAME, checksum
from .format.remote import Folder, RemotePath
from .lineage import Lineage
from .snapshot import Snapshot
from .writer import AllGather, Writer, merged, piece_name, rank_name, write_rank


class RemoteWriter(Writer):
    """Writes one checkpoint to a URI. A rank's file is written to a temporary folder of its host, and uploaded.

    index.json is written when all files are there. The files of an older checkpoint of the tag are removed after that.

    Args:
        grid, snapshot, folder, tag, all_gather, save_latest, lineage: as of ``Writer``.
    """

    def __init__(self, grid: Grid, snapshot: Snapshot, folder: RemotePath, *rest: Any) -> None:
        super().__init__(grid, snapshot, folder, *rest)
        self._target = folder / self._tag
        self._publishing = False

    def _write(self) -> None:
        with temporary_folder("checkpoint") as staging:
            write_rank(staging, self._rank, self._snapshot, self._save)
            for name in (rank_name(self._rank, self._save), piece_name(self._rank, self._save)):
                (self._target / name).upload(staging / name)

    def _commit(self) -> None:
        if self._rank:
            return
        header = self._snapshot.header
        pieces = [piece_name(rank, self._save) for rank in range(self._size)]
        with temporary_folder("checkpoint") as staging:
            for name in pieces:
                (staging / name).write_bytes((self._target / name).read_bytes())
            index = merged(staging, self._size, header, self._save)
        data = index.dump()
        self._lineage.lock(self._folder)  # another run may have taken it
        note_saved(self._folder, self._tag, self._save)
        self._publishing = True
        (self._target / NAME).write_bytes(data)
        if self._save_latest:
            (self._folder / LATEST).write_bytes(self._tag.encode())
        self._lineage.written(self._folder, header, checksum(data))
        with contextlib.suppress(CheckpointError):  # files that nothing names
            for name in self._target.files():
                if name != NAME and name not in index.files:
                    (self._target / name).remove()

    def _discard(self) -> None:
        """Remove the files of this save, unless its index may be there, which names them."""
        if self._publishing:
            return
        with contextlib.suppress(CheckpointError):
            for name in self._target.files():
                if f".{self._save}." in name:
                    (self._target / name).remove()


def make_writer(
    grid: Grid,
    snapshot: Snapshot,
    folder: Folder,
    tag: str,
    all_gather: AllGather | None,
    save_latest: bool,
    lineage: Lineage,
) -> Writer:
    """Return the writer of a checkpoint to a folder or a URI. The arguments are those of ``Writer``."""
    if isinstance(folder, RemotePath):
        return RemoteWriter(grid, snapshot, folder, tag, all_gather, save_latest, lineage)
    return Writer(grid, snapshot, folder, tag, all_gather, save_latest, lineage)
