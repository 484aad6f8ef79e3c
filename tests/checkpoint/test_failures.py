"""A disk that fails, and a process that is killed, at each system call of a save: earlier checkpoints stay."""

from __future__ import annotations

import errno
import gc
import itertools
import os
import shutil
import tempfile
from importlib.metadata import Distribution, PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest

import triax
from triax.checkpoint.format.folder import tags
from triax.checkpoint.format.index import read_index

from support.failing_disk import disturbed
from support.small_checkpoints import problems, small_engine, small_steps


def whole(folder: Path) -> dict[str, Any]:
    """Client state of each checkpoint in a folder, all of which must be undamaged."""
    found: dict[str, Any] = {}
    for path in sorted(folder.iterdir()):
        if path.is_dir():
            assert not problems(path), path
            found[path.name] = read_index(path).head["client_state"]
        elif path.name not in (".lock", ".saved.json"):
            found[path.name] = path.read_text()
    return found


def fill_disk_at_each_call(folder: str, victim: int, replaces: bool) -> int:
    """Make the disk full at one call after the other, on one rank."""
    place, trained = Path(folder), small_engine(stage=1)
    small_steps(trained)
    world, first = trained.grid.world, trained.grid.rank == 0
    assert trained.save_checkpoint(place, "good", {"save": "good"})

    def no_room() -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "it")

    for number in itertools.count():
        if first and not replaces and (place / "new").exists():
            shutil.rmtree(place / "new")
            (place / "latest").write_text("good")
        before = world.all_gather_json(whole(place) if first else None)[0]
        with disturbed(number if trained.grid.rank == victim else -1, no_room) as calls:
            done = trained.save_checkpoint(place, "new", {"save": number})
        after = world.all_gather_json(whole(place) if first else None)[0]
        if done:
            assert after == {"good": {"save": "good"}, "new": {"save": number}, "latest": "new"}, (number, calls[-1:])
        else:
            assert after == before, (number, calls[-1:])
        small_steps(trained)  # the run goes on
        reached = world.all_gather_json(len(calls) > number)[victim]
        if not reached:
            assert done
            break
    assert trained.load_checkpoint(place)[1] == {"save": number}
    return number


@pytest.mark.parametrize("replaces", [False, True], ids=["new", "replaced"])
@pytest.mark.parametrize("victim", [0, 1])
def test_a_full_disk_at_any_system_call_keeps_old_checkpoints(
    ranks: Any, tmp_path: Path, victim: int, replaces: bool
) -> None:
    """After each failed call on either rank, the new checkpoint is whole, or absent and the old one is there."""
    calls = ranks(2, fill_disk_at_each_call, str(tmp_path), victim, replaces, timeout=90)
    assert calls[0] == calls[1] > (20 if victim == 0 else 10)


def save_in_a_fork(trained: Any, folder: Path, number: int) -> bool:
    """Save as ``new`` in a fork, which is killed at its system call ``number``; return True if it lived to the end."""
    process = os.fork()
    if not process:
        done = False
        try:
            with disturbed(number, lambda: os._exit(9)):
                done = trained.save_checkpoint(folder, "new", {"save": number})
        finally:
            os._exit(0 if done else 1)
    code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    assert code in (0, 9)
    return code == 0


@pytest.mark.parametrize("replaces", [False, True], ids=["new", "replaced"])
def test_a_kill_at_any_system_call_keeps_old_checkpoints(tmp_path: Path, replaces: bool) -> None:
    """A fork of the run dies at each call in turn: the last checkpoint is then the old one or the new one, whole."""
    trained, other = small_engine(stage=1), small_engine(stage=1)
    small_steps(trained)
    first = small_engine(stage=1)
    small_steps(first)
    assert first.save_checkpoint(tmp_path, "good", {"save": -1})
    del first  # so that the folder is free for the forks
    gc.collect()
    assert not (tmp_path / ".lock").exists()

    def number_in_checkpoint(tag: str | None = None) -> int:
        return int(other.load_checkpoint(tmp_path, tag)[1]["save"])

    last, new = -1, None
    for number in itertools.count():
        if not replaces:
            shutil.rmtree(tmp_path / "new", ignore_errors=True)
            (tmp_path / "latest").write_text("good")
            last, new = -1, None
        saved = save_in_a_fork(trained, tmp_path, number)
        now = number_in_checkpoint()
        assert now == number or (not saved and now == last), number
        if new is not None or (tmp_path / "new").exists():  # under its name too, at any moment
            before, new = new, number_in_checkpoint("new")
            assert new == number or (not saved and new == before), number
        other.checkpointer.resume(tmp_path)
        assert other.resumed[1]["save"] in (now, new) and other.global_steps == 1
        assert not [*tmp_path.glob(".*.old")]
        last = now
        if saved:
            break
    assert number > 20 and tags(tmp_path) == ["good", "new"] and last == new == number


def save_into_read_only_folder(folder: str) -> tuple[bool, str, float]:
    trained = small_engine(stage=1, **{"async": True})
    small_steps(trained)
    effective = os.geteuid()
    if effective == 0:
        os.seteuid(65534)  # nothing is read-only for root
    try:
        done = trained.save_checkpoint(folder)
        said = trained.wait_for_checkpoint()
    finally:
        os.seteuid(effective)
    small_steps(trained)
    return done, said, trained.global_steps


def test_a_save_into_a_read_only_folder_reports_the_reason(ranks: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o555)
        for done, said, steps in ranks(2, save_into_read_only_folder, folder, timeout=60):
            assert done and "rank 0 (pipe 0, data 0, tensor 0): Permission denied" in said and steps == 2
        assert not [*Path(folder).iterdir()]


def test_saving_works_from_a_source_tree_that_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as a checkout on PYTHONPATH, which has no metadata of an installed package."""

    def not_installed(name: str) -> None:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(Distribution, "from_name", not_installed)
    trained = small_engine(stage=1)
    small_steps(trained)
    assert trained.save_checkpoint(tmp_path)
    assert read_index(tmp_path / "global_step1").head["versions"]["triax"] == triax.__version__
