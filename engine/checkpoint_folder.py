"""Checkpoints in a folder: one that is being written is not there until it is whole, whatever happens meanwhile.

runs/                   what save_checkpoint is given
  latest                the tag of the last one
  global_step10/        one checkpoint: index.json and the ranks' files
  .global_step20.part/  one that is being written; it is renamed once everything is on the disk
  .best.old/            one that another of its name is about to replace
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from .checkpoint_file import CorruptError
from .checkpoint_index import NAME, Index, read_index

LATEST = "latest"
_PLAIN = re.compile(r"global_step\d+")


def check_tag(tag: str) -> str:
    """The tag, if a folder can have it as its name.

    Raises:
        ValueError: it cannot.
    """
    if not tag or Path(tag).name != tag or tag.startswith(".") or tag == LATEST:
        raise ValueError(
            f"tag {tag!r} is no name for a folder: give one like 'global_step10', without / or a leading dot"
        )
    return tag


def part(folder: Path, tag: str) -> Path:
    """Where a checkpoint is while it is written."""
    return folder / f".{tag}.part"


def begin(folder: Path, tag: str) -> None:
    """Make the folder to write to; what is left of an earlier attempt goes."""
    folder.mkdir(parents=True, exist_ok=True)
    restore(folder)
    for tagged in (part(folder, tag), old(folder, tag)):
        if tagged.exists():
            shutil.rmtree(tagged)
    part(folder, tag).mkdir()


def commit(folder: Path, tag: str, save_latest: bool) -> None:
    """All of it is written: have it take its name. One of that name is replaced, and there until then.

    Raises:
        OSError: it has not taken its name, and everything is as it was.
    """
    temporary, final, before = part(folder, tag), folder / tag, old(folder, tag)
    sync(temporary, strict=True)
    named = _write_beside(folder / LATEST, tag.encode()) if save_latest else None
    replaces = final.exists()
    if replaces:
        final.rename(before)
    try:
        temporary.rename(final)
        try:
            if named is not None:
                named.replace(folder / LATEST)
        except OSError:
            final.rename(temporary)
            raise
    except OSError:
        if replaces:
            before.rename(final)
        raise
    sync(folder)
    shutil.rmtree(before, ignore_errors=True)


def old(folder: Path, tag: str) -> Path:
    """Where a checkpoint is while another one takes its name."""
    return folder / f".{tag}.old"


def remove(folder: Path, tag: str) -> None:
    """Remove a checkpoint: it is there, or not, and never in part."""
    gone = folder / f".{tag}.gone"
    (folder / tag).rename(gone)
    shutil.rmtree(gone)


def restore(folder: Path) -> None:
    """After a kill, for the job that writes: those whose place another was about to take have their names again."""
    for gone in folder.glob(".*.gone"):
        shutil.rmtree(gone, ignore_errors=True)
    for before in folder.glob(".*.old"):
        final = folder / before.name.removeprefix(".").removesuffix(".old")
        with contextlib.suppress(OSError):  # nobody may write here
            if final.exists():
                shutil.rmtree(before)
            else:
                before.rename(final)


def place(folder: Path, tag: str) -> Path:
    """Where a checkpoint is to be read: another one may be about to take its name, or the run was killed then."""
    before = old(folder, tag)
    return before if before.is_dir() and not (folder / tag).exists() else folder / tag


def discard(folder: Path, tag: str) -> None:
    """Remove what was written of a checkpoint that does not come to be."""
    shutil.rmtree(part(folder, tag), ignore_errors=True)
    with contextlib.suppress(OSError):
        (folder / f".{LATEST}.part").unlink(missing_ok=True)


def write_text(path: Path, text: str | bytes) -> None:
    """Write a small file: it is the old one or the new one, never half of it."""
    _write_beside(path, text.encode() if isinstance(text, str) else text).replace(path)
    sync(path.parent)


def _write_beside(path: Path, data: bytes) -> Path:
    """The same, but for its name."""
    temporary = path.with_name(f".{path.name}.part")
    with temporary.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return temporary


def sync(folder: Path, strict: bool = False) -> None:
    """Have a folder's names reach the disk.

    Args:
        folder: of them.
        strict: a disk that says no is an error; not so a file system that does not know this of folders.

    Raises:
        OSError: where ``strict``.
    """
    try:
        opened = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(opened)
        finally:
            os.close(opened)
    except OSError as error:
        if strict and error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EBADF, errno.EACCES):
            raise


def tags(folder: Path) -> list[str]:
    """The checkpoints of a folder, the oldest first: by the time that they were written, which copies keep.

    (A run that went back to an earlier one has newer ones of fewer steps.)
    """
    found = []
    for path in folder.iterdir() if folder.is_dir() else ():
        if (path / NAME).is_file() and not path.name.startswith("."):
            with contextlib.suppress(CorruptError, OSError):
                index = read_index(path)
                written = index.head.get("written", (path / NAME).stat().st_mtime)
                found.append((written, step_of(index), path.name))
    return [tag for _, _, tag in sorted(found)]


def step_of(index: Index) -> int:
    """The optimizer steps that a checkpoint comes after."""
    step = index.head.get("step", 0)
    return step if isinstance(step, int) else 0


def unreadable(folder: Path) -> Iterator[tuple[str, str]]:
    """Checkpoints whose index cannot be read, with the reason; and what was never finished."""
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if path.is_dir() and path.name.endswith(".part"):
            yield path.name, "it was never finished"
        elif (path / NAME).is_file() and not path.name.startswith("."):
            try:
                read_index(path)
            except (CorruptError, OSError) as error:
                yield path.name, str(error)


def latest(folder: Path) -> str | None:
    """The tag that ``latest`` names; None: there is no such file."""
    try:
        return (folder / LATEST).read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        return None


def prunable(folder: Path, keep: int, plain: bool = False) -> list[str]:
    """The tags of all but the last ``keep`` checkpoints, without the one that ``latest`` names.

    Args:
        folder: of the checkpoints.
        keep: how many stay.
        plain: look at those alone that nobody gave a name.
    """
    named = latest(folder)
    found = [tag for tag in tags(folder) if not plain or _PLAIN.fullmatch(tag)]
    return [tag for tag in found[:-keep] if tag != named]


def verify(path: Path, index: Index) -> Iterator[str]:
    """What of a checkpoint is not as it was written, all of it; nothing where all is well."""
    folder = index.folder(path)
    for name, file in index.files.items():
        try:
            folder.check(name, file.header, "its header")
        except CorruptError as error:
            yield str(error)
    for name, entry in index.tensors.items():
        for stored in entry.boxes:
            try:
                folder.check(stored.file, stored.span, what(name, stored.box))
            except CorruptError as error:
                yield str(error)


def what(name: str, box: tuple[tuple[int, int], ...]) -> str:
    """A box of a tensor, as one would write it."""
    return f"{name}[{', '.join(f'{a}:{b}' for a, b in box)}]" if box else name
