"""Checkpoints in a folder, and their commit: a checkpoint has its name only when all of it is on the disk.

runs/                   save_dir of save_checkpoint
  latest                the tag of the last checkpoint
  global_step10/        one checkpoint: index.json and the ranks' files
  .global_step20.RUN.part/  a checkpoint that the run RUN is writing; ``commit`` renames it
  .best.old/            a checkpoint that another of its name is about to replace
  .lock                 the run that saves into the folder (lock.py)
  .saved.json           for each tag, the save that wrote the checkpoint

A folder may also be a URI: remote.py describes its files.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

from ...base.errors import CheckpointError, CorruptError
from ...base.files import parse_json, read_bytes
from ...base.folder_files import sync
from .index import NAME, Index, read_index
from .remote import Folder as Folder
from .remote import RemotePath
from .remote import folder_at as folder_at
from .remote import local_folder as local_folder

LATEST, SAVED = "latest", ".saved.json"
_LONGEST = 200  # bytes of a tag: names of files have 255, and parts and runs need the rest
_AUTOMATIC = re.compile(r"global_step\d+")  # tags that no user chose
_Either = TypeVar("_Either", Path, RemotePath, Folder)
_RANK = re.compile(r"rank-\d{5,}\.")


def check_tag(tag: str) -> None:
    """Check that a tag can be the name of a checkpoint's folder.

    Raises:
        ValueError: if it cannot.
    """
    usable = tag.isprintable() and 0 < len(tag.encode(errors="replace")) <= _LONGEST
    if not usable or Path(tag).name != tag or tag.startswith(".") or tag == LATEST:
        raise ValueError(
            f"the tag {tag[:60]!r} cannot be the name of a checkpoint's folder: give one like 'global_step10', which "
            f"contains no /, begins with no dot, and is not '{LATEST}'"
        )


def partial_path(folder: Path, tag: str, run: str) -> Path:
    """Return the folder of a checkpoint that a run is writing."""
    return folder / f".{tag}.{run}.part"


def begin(folder: Folder, tag: str, run: str) -> None:
    """Make the folder to write to. Remains of an earlier attempt of the run are removed. A URI needs no folder."""
    if isinstance(folder, RemotePath):
        return
    for path in (partial_path(folder, tag, run), replaced_path(folder, tag)):
        _remove_tree(path)
    partial_path(folder, tag, run).mkdir()


def commit(folder: Path, tag: str, run: str, save_latest: bool) -> None:
    """Rename the folder of a completely written checkpoint to its tag. An older checkpoint of that tag is replaced.

    Raises:
        OSError: if the folder could not be renamed. The checkpoints of the folder are then unchanged.
    """
    temporary, final, before = partial_path(folder, tag, run), folder / tag, replaced_path(folder, tag)
    sync(temporary, strict=True)
    latest_file = _write_beside(folder / LATEST, tag.encode()) if save_latest else None
    replaces = final.exists()
    if replaces:
        final.rename(before)
    try:
        temporary.rename(final)
        try:
            if latest_file is not None:
                latest_file.replace(folder / LATEST)
        except OSError:
            final.rename(temporary)
            raise
    except OSError:
        if replaces:
            before.rename(final)
        raise
    sync(folder)
    shutil.rmtree(before, ignore_errors=True)


def replaced_path(folder: Path, tag: str) -> Path:
    """Return the folder of a checkpoint while another one takes its name."""
    return folder / f".{tag}.old"


def remove(folder: Folder, tag: str) -> None:
    """Remove a checkpoint. It is renamed first, so that no part of one is ever under its name.

    At a URI its index is removed first, without which it is no checkpoint.
    """
    if isinstance(folder, RemotePath):
        (folder / tag).remove()
        return
    removed = folder / f".{tag}.gone"
    _remove_tree(removed)  # of a removal that a kill interrupted
    (folder / tag).rename(removed)
    _remove_tree(removed)


def _remove_tree(path: Path) -> None:
    """Remove a folder, if it is there. Of a symbolic link the link is removed, and not the folder that it names."""
    if path.is_symlink():
        path.unlink()
    elif path.exists():
        shutil.rmtree(path)


def tidy_up(folder: Folder, run: str) -> None:
    """Finish removals and undo replacements that a kill interrupted, and remove what was never finished.

    Only the owner of the folder's lock calls it, when it has taken the lock: every other run has then ended.

    Args:
        folder: the folder of checkpoints.
        run: the owner's identity. What it is writing stays.
    """
    if isinstance(folder, RemotePath):
        with contextlib.suppress(CheckpointError):  # an account that may not remove files
            for tag in _remote_tags(folder)[1]:
                (folder / tag).remove()
        return
    for before in folder.glob(".*.old"):
        final = folder / before.name.removeprefix(".").removesuffix(".old")
        with contextlib.suppress(OSError):  # a folder that is read-only
            if final.exists():
                _remove_tree(before)
            else:
                before.rename(final)
    for left in (*folder.glob(".*.gone"), *folder.glob(".*.part")):
        if (left.is_dir() or left.is_symlink()) and not left.name.endswith(f".{run}.part"):
            with contextlib.suppress(OSError):
                _remove_tree(left)


def readable_path(folder: _Either, tag: str) -> _Either:
    """Return the folder to read a checkpoint from: the replaced one, if a replacement was interrupted."""
    if isinstance(folder, RemotePath):
        return folder / tag
    before = replaced_path(folder, tag)
    return before if before.is_dir() and not (folder / tag).exists() else folder / tag


def discard(folder: Path, tag: str, run: str) -> None:
    """Remove the partly written folder of a checkpoint whose writing failed."""
    shutil.rmtree(partial_path(folder, tag, run), ignore_errors=True)
    for name in (LATEST, SAVED):
        with contextlib.suppress(OSError):
            (folder / f".{name}.part").unlink(missing_ok=True)


def note_saved(folder: Folder, tag: str, save: str) -> None:
    """Write down which save a tag is of from now on, so that another checkpoint under its name is noticed.

    The save that has the tag so far stays noted, because this process may be killed before it is replaced.

    Args:
        folder, tag: the folder of checkpoints, and the checkpoint's name.
        save: name of the save.
    """
    there = names(folder)
    known = {saved_tag: saves for saved_tag, saves in saved(folder).items() if saved_tag in there}
    before = []
    with contextlib.suppress(CorruptError, OSError):
        before = [read_index(folder / tag).save_name]
    file, data = folder / SAVED, json.dumps({**known, tag: [save, *before]}, indent=0).encode()
    if isinstance(file, Path):
        write_atomically(file, data)
    else:
        file.write_bytes(data)


def saved(folder: Folder) -> dict[str, list[str]]:
    """Return the saves that were noted for each tag; none if the list is missing or damaged."""
    file = folder / SAVED
    try:
        record = parse_json(read_bytes(file) if isinstance(file, Path) else file.read_bytes())
    except (OSError, ValueError):
        return {}
    return {tag: saves for tag, saves in record.items() if isinstance(saves, list)} if isinstance(record, dict) else {}


def write_atomically(path: Path, data: bytes) -> None:
    """Write a small file atomically: a reader finds the old content or the new."""
    _write_beside(path, data).replace(path)
    sync(path.parent)


def _write_beside(path: Path, data: bytes) -> Path:
    """Write a file under a temporary name in the same folder, onto the disk. Returns that name."""
    temporary = path.with_name(f".{path.name}.part")
    with temporary.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return temporary


def tags(folder: Folder) -> list[str]:
    """Return the tags of a folder's checkpoints, the oldest first.

    Each checkpoint's order is one more than the largest in its folder when it was written, so that a run that went back
    to an earlier checkpoint, or whose clock was set back, writes newer ones. The time in the index, which copies keep,
    decides between checkpoints of one order: those of runs in other folders, and of older versions, which have none.
    """
    entries = []
    for tag, index in _indices(folder):
        if isinstance(index, Index):
            path = folder / tag / NAME
            modified = path.stat().st_mtime if isinstance(path, Path) else 0.0
            entries.append((index.order, index.head.get("written", modified), index.head["step"], tag))
    return [tag for *_, tag in sorted(entries)]


def last_order(folder: Folder) -> int:
    """Return the largest order of a folder's checkpoints; 0 if none has one."""
    return max((index.order for _, index in _indices(folder) if isinstance(index, Index)), default=0)


def unreadable(folder: Folder) -> Iterator[tuple[str, str]]:
    """Yield the checkpoints that are unfinished or exchanged, or whose index cannot be read: name and reason."""
    if isinstance(folder, RemotePath):
        parts = _remote_tags(folder)[1]
    else:
        parts = [path.name for path in sorted(folder.glob(".*.part")) if path.is_dir()]
    yield from ((part, "it was never finished") for part in parts)
    known = saved(folder)
    for tag, index in _indices(folder):
        try:
            if not isinstance(index, Index):
                raise index
            check_place(folder / tag, index, known)
        except (CorruptError, OSError) as error:
            yield tag, str(error)


def _indices(folder: Folder) -> Iterator[tuple[str, Index | Exception]]:
    """Yield each checkpoint of a folder: its tag, and its index or the error of reading that."""
    if isinstance(folder, RemotePath):
        candidates = _remote_tags(folder)[0]
    else:
        candidates = [file.parent.name for file in sorted(folder.glob(f"[!.]*/{NAME}"))]
    for tag in candidates:
        try:
            yield tag, read_index(folder / tag)
        except (CorruptError, OSError) as error:
            yield tag, error


def _remote_tags(folder: RemotePath) -> tuple[list[str], list[str]]:
    """Return the folders with an index, which are checkpoints, and those without one that a rank wrote to."""
    inner = {tag: files for tag, files in folder.listing().items() if tag and not tag.startswith(".")}
    complete = [tag for tag, files in inner.items() if NAME in files]
    parts = [tag for tag, files in inner.items() if tag not in complete and any(map(_RANK.match, files))]
    return complete, parts


def names(folder: Folder) -> list[str]:
    """Return the names of the folders in a folder, for messages."""
    if isinstance(folder, RemotePath):
        return sorted(name for name in folder.listing() if name and not name.startswith("."))
    return sorted(subfolder.name for subfolder in folder.glob("*/") if not subfolder.name.startswith("."))


def latest(folder: Folder) -> str | None:
    """Return the tag in the file ``latest``; None if there is no such file."""
    file = folder / LATEST
    try:
        data = read_bytes(file) if isinstance(file, Path) else file.read_bytes()
    except FileNotFoundError:
        return None
    return data.decode(errors="replace").strip()


def last(folder: Folder) -> tuple[str | None, str]:
    """Return the tag to load where none was given, and a note for the log.

    It is the one in the file ``latest``. If that does not name a checkpoint of the folder, it is the newest one.

    Returns:
        The tag, or None if there is no file ``latest``; and a note, empty if ``latest`` names the newest checkpoint.

    Raises:
        CorruptError: if ``latest`` does not name a checkpoint, and there is none.
    """
    named = latest(folder)
    if named is None:
        return None, ""
    known = tags(folder)
    newest = known[-1] if known else None
    try:
        check_tag(named)
        readable = (readable_path(folder, named) / NAME).is_file()
    except ValueError:
        readable = False
    if not readable and newest is None:
        raise CorruptError(
            f"{folder / LATEST} is damaged: it has {named[:60]!r}, which is not a checkpoint in {folder}, and there is "
            "no other. Remove the file to start from the beginning"
        )
    if not readable:
        return newest, f"{folder / LATEST} has {named[:60]!r}, which is not a checkpoint there: {newest} is used"
    if newest not in (None, named):
        return (
            named,
            f"{folder / LATEST} names {named}, which is used, though {newest} is newer. Give a tag for another",
        )
    return named, ""


def prunable(folder: Folder, keep: int, automatic: bool = False) -> list[str]:
    """Return the tags of all but the last ``keep`` checkpoints, without the one that ``latest`` names.

    A checkpoint that a symbolic link of the folder names stays as long as the link does.

    Args:
        folder: the folder of checkpoints.
        keep: number of checkpoints to keep.
        automatic: consider only checkpoints whose tag no user chose.
    """
    named, every = latest(folder), tags(folder)
    matching = [tag for tag in every if not automatic or _AUTOMATIC.fullmatch(tag)]
    old = [tag for tag in matching[:-keep] if tag != named]
    if isinstance(folder, RemotePath):
        return old
    pinned = {(folder / tag).resolve() for tag in every if tag not in old and (folder / tag).is_symlink()}
    return [tag for tag in old if (folder / tag).is_symlink() or (folder / tag).resolve() not in pinned]


def check_place(path: Folder, index: Index, known: dict[str, list[str]] | None = None) -> None:
    """Check that a folder holds the checkpoint that was saved under its name.

    A copy that was never saved under its name may be one of any checkpoint.

    Args:
        path, index: the checkpoint.
        known: what ``saved`` returns for its folder of checkpoints; None: that is read.

    Raises:
        CorruptError: the folder was exchanged for another one.
    """
    path = path.absolute()
    name, step = str(path).rpartition("/")[2], index.head["step"]
    tag, identity = index.head.get("tag") or name, index.head.get("identity") or {}
    known = saved(path.parent) if known is None else known
    exchanged = name in known and index.save_name not in known[name]
    # Where the list is missing, as in a copy: no user chose this name for another checkpoint.
    exchanged = exchanged or (_AUTOMATIC.fullmatch(name) is not None and name not in (tag, f"global_step{step}"))
    if exchanged:
        raise CorruptError(
            f"{path} holds another checkpoint than the one that was saved there: that of step {step} of the run "
            f"{identity.get('run', '(unknown)')}, which was saved as {tag}. Put the right folder there, or give this "
            "one a name of its own"
        )


def verify(path: Folder, index: Index) -> Iterator[str]:
    """Compare all bytes of a checkpoint with their checksums. Yields a message for each damaged header or box.

    The first message is of a folder that was exchanged for another one.
    """
    try:
        check_place(path, index)
    except CorruptError as error:
        yield str(error)
    folder = index.folder(path)
    for file, span, name in index.byte_ranges():
        try:
            index.check_range(folder, file, span, name)
        except CorruptError as error:
            yield str(error)
