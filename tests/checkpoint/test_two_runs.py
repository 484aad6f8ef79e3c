"""Two runs in one folder, clocks that step back, a damaged ``latest``: the checkpoints there are, and the last one."""

from __future__ import annotations

import gc
import json
import os
import shutil
import signal
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from triax.base.errors import CheckpointError, CorruptError
from triax.checkpoint.format import folder as folders
from triax.checkpoint.format import lock as locks
from triax.checkpoint.format.index import Index, read_index
from triax.cli.main import app
from triax.testing.pool import RankFailure, slowdown

from support.command_line import output_of
from support.rank_checks import triax_warnings
from support.small_checkpoints import problems, small_engine, small_steps
from support.toys import error_text


def save_into_taken_folder(folder: str) -> tuple[bool, str, str]:
    """A run that saves into a folder that another process has, and one that would save there automatically."""
    with triax_warnings() as lines:
        trained = small_engine(1)
        small_steps(trained)
        done = trained.save_checkpoint(folder, "same")
        refused = error_text(lambda: small_engine(1, dir=folder, every=1), CheckpointError)
    return done, "\n".join(lines), refused


def test_a_second_run_cannot_save_and_names_the_folders_owner(ranks: Any, tmp_path: Path) -> None:
    """A job that was submitted twice destroyed its own checkpoints, and save_checkpoint returned True in both."""
    first = small_engine()
    small_steps(first)
    assert first.save_checkpoint(tmp_path, "same")
    (tmp_path / ".next.abc.part").mkdir()  # as if it were being written
    before = (tmp_path / "same/index.json").read_bytes()
    ((done, lines, refused),) = ranks(1, save_into_taken_folder, str(tmp_path), timeout=60)
    for text in (lines, refused):
        assert f"on host {socket.gethostname()}, process {os.getpid()}, saves into {tmp_path}" in text
    assert not done and "was not written" in lines and len(lines.splitlines()) == 1
    assert (tmp_path / ".next.abc.part").is_dir() and (tmp_path / "same/index.json").read_bytes() == before
    assert not problems(tmp_path / "same")
    del first
    gc.collect()
    ((done, lines, refused),) = ranks(1, save_into_taken_folder, str(tmp_path), timeout=60)
    assert done and not lines and refused == "no error" and not (tmp_path / ".next.abc.part").exists()


@pytest.mark.parametrize("tag", ["same", "global_step{}"])
def test_two_jobs_saving_into_one_folder_keep_checkpoints_whole(tmp_path: Path, tag: str) -> None:
    """Two such jobs left 81 states, of which 41 failed verify. Now at each moment all checkpoints are whole."""
    runs = [small_engine(0), small_engine(1)]
    for trained in runs:
        small_steps(trained)  # here, because a fork has no threads for it
    pids = []
    for trained in runs:
        pid = os.fork()
        if not pid:
            try:
                for number in range(12):
                    trained.save_checkpoint(tmp_path, tag.format(number))
            finally:
                os._exit(0)
        pids.append(pid)
    states = 0
    while pids:
        pids = [pid for pid in pids if not os.waitpid(pid, os.WNOHANG)[0]]
        for each in [*tmp_path.glob("[!.]*/index.json")]:
            copy = tmp_path.parent / f"{tmp_path.name}-copy"
            shutil.rmtree(copy, ignore_errors=True)
            try:
                before = os.stat(each.parent)
                shutil.copytree(each.parent, copy)
                after = os.stat(each.parent)
            except (shutil.Error, OSError):
                continue
            if (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns):  # no other took its name
                assert not problems(copy)
                states += 1
    assert states and not [path for path in tmp_path.glob("*/index.json") if problems(path.parent)]


def test_a_checkpoint_with_files_of_two_runs_is_refused(tmp_path: Path) -> None:
    """Each file is as it was written, and the index has their checksums: verify passed what two runs had mixed."""
    for name, seed in (("a", 0), ("b", 1)):
        trained = small_engine(seed)
        small_steps(trained)
        assert trained.save_checkpoint(tmp_path / name, "t")
    ours, theirs = read_index(tmp_path / "a/t"), read_index(tmp_path / "b/t")
    shutil.copy(tmp_path / "b/t/rank-00000.safetensors", tmp_path / "a/t")
    (tmp_path / "a/t/index.json").write_bytes(Index(ours.head, theirs.tensors, theirs.files).dump())
    (problem,) = problems(tmp_path / "a/t")
    assert "rank-00000.safetensors was written in the save" in problem and "the files of two runs are mixed" in problem
    with pytest.raises(CheckpointError, match="two runs are mixed"):
        small_engine().load_checkpoint(tmp_path / "a")


# ------------------------------------------------------------------------------------------------------- the lock


def lock_of(folder: Path, /, **owner: Any) -> Path:
    folder.mkdir(exist_ok=True)
    other = {"run": "other", "host": "node7", "machine": "another", "pid": 7, "started": "1"}
    (folder / ".lock").write_text(json.dumps({**other, **owner}))
    return folder / ".lock"


def test_the_lock_of_a_dead_process_is_taken_at_once(tmp_path: Path) -> None:
    """The process is gone, or its number is another's now, or it has ended and its parent has not asked for it yet."""
    machine = locks._process()["machine"]
    pid = os.fork()
    if not pid:
        os._exit(0)
    time.sleep(0.2)
    started = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    try:
        for owner in ({"pid": 2**22 + 5}, {"pid": os.getppid(), "started": "1"}, {"pid": pid, "started": started}):
            lock_of(tmp_path / "runs", machine=machine, **owner)
            trained, start = small_engine(), time.monotonic()
            small_steps(trained)
            assert trained.save_checkpoint(tmp_path / "runs") and time.monotonic() - start < 3 * slowdown()
            del trained
            gc.collect()
    finally:
        os.waitpid(pid, 0)


def test_a_lock_from_another_host_expires(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A process of another host cannot be looked up, and has another clock: it lives while its heartbeat moves."""
    monkeypatch.setattr(locks, "_PAUSE", 0.05)
    path, end = lock_of(tmp_path), threading.Event()

    def beat() -> None:
        while not end.wait(0.1):
            os.utime(path)

    thread = threading.Thread(target=beat)
    thread.start()
    trained = small_engine()
    small_steps(trained)
    try:
        assert not trained.save_checkpoint(tmp_path)
    finally:
        end.set()
        thread.join()
    assert "the run other on host node7, process 7, saves into" in caplog.text and not folders.tags(tmp_path)
    os.utime(path, (2e9, 2e9))  # by that host's clock it is years later
    assert trained.save_checkpoint(tmp_path) and folders.tags(tmp_path) == ["global_step1"]
    lock_of(tmp_path).write_bytes(b"")  # it is damaged
    assert trained.save_checkpoint(tmp_path) and not [*tmp_path.glob(".lock.*")]
    lock_of(tmp_path).write_bytes(b"[" * 4096)  # nested too deeply
    assert trained.save_checkpoint(tmp_path)
    lock_of(tmp_path).unlink()
    (tmp_path / ".lock").symlink_to("nowhere")  # it could neither be read nor be made, again and again
    assert trained.save_checkpoint(tmp_path)


def test_saving_works_in_a_copy_of_a_locked_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The copied lock names a process that is alive, but saves into the other folder."""
    monkeypatch.setattr(locks, "_PAUSE", 0.02)
    trained = small_engine()
    small_steps(trained)
    parent = os.getppid()
    owner = {"machine": locks._process()["machine"], "pid": parent, "started": locks._started(parent)}
    lock_of(tmp_path / "runs", folder=tmp_path.stat().st_ino, **owner)
    assert trained.save_checkpoint(tmp_path / "runs")


def test_a_paused_run_that_lost_its_lock_cannot_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stopped run loses its lock, and continues in the middle of a save."""
    trained = small_engine()
    small_steps(trained)
    assert trained.save_checkpoint(tmp_path, "a")
    parent = os.getppid()
    begin = folders.begin

    def held_up(*arguments: Any) -> None:
        begin(*arguments)
        owner = {"machine": locks._process()["machine"], "pid": parent, "started": locks._started(parent)}
        lock_of(tmp_path, folder=tmp_path.stat().st_ino, **owner)

    monkeypatch.setattr(folders, "begin", held_up)
    assert not trained.save_checkpoint(tmp_path, "b")
    assert folders.tags(tmp_path) == ["a"] and (tmp_path / "latest").read_text() == "a"


# ------------------------------------------------------------------------------------------ order, and the file latest


def test_keep_and_resume_ignore_a_clock_that_steps_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """keep deleted the newest checkpoints, and the next start went on from an old one."""
    section: dict[str, Any] = {"dir": str(tmp_path), "every": 1, "keep": 2, "resume": "auto"}
    now = 2e9
    monkeypatch.setattr(time, "time", lambda: now)
    trained = small_engine(**section)
    small_steps(trained, 3)
    now = 1e9
    small_steps(trained)
    assert folders.tags(tmp_path) == ["global_step3", "global_step4"]
    trained = small_engine(**section)
    assert trained.global_steps == 4
    now = 5e8
    small_steps(trained, 2)
    assert folders.tags(tmp_path) == ["global_step5", "global_step6"] and small_engine(**section).global_steps == 6
    heads = [read_index(tmp_path / f"global_step{step}") for step in (5, 6)]
    assert heads[1].head["identity"]["parent"] == {
        "run": heads[0].head["identity"]["run"],
        "step": 5,
        "checksum": heads[0].checksum,
    }


def test_a_damaged_file_latest_is_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Two of 96 flipped bits silently loaded another checkpoint; ../x and absolute paths were followed."""
    trained = small_engine()
    for _ in range(3):
        small_steps(trained)
        assert trained.save_checkpoint(tmp_path / "runs")
    shutil.copytree(tmp_path / "runs/global_step1", tmp_path / "outside")
    latest, loaded = tmp_path / "runs/latest", set()
    texts = [
        f"../{tmp_path.name}/outside",
        "../outside",
        str(tmp_path / "outside"),
        "",
        ".",
        "a\0b",
        "global_step9",
        "x" * 999,
    ]
    good = latest.read_bytes()
    flipped = [
        bytes(b ^ (1 << bit) * (i == at) for i, b in enumerate(good)) for at in range(len(good)) for bit in range(8)
    ]
    assert len(flipped) == 96
    for data in [*(text.encode() for text in texts), *flipped]:
        latest.write_bytes(data)
        caplog.clear()
        path, _ = trained.load_checkpoint(tmp_path / "runs")
        assert len(caplog.messages) == 1 and "latest" in caplog.text and Path(path).name in caplog.text, data
        loaded.add(Path(path).name)
    assert loaded == {"global_step1", "global_step2", "global_step3"}  # two are names of others, and are said to be
    for path in (tmp_path / "runs").glob("global*"):
        shutil.rmtree(path)
    with pytest.raises((CheckpointError, CorruptError), match="latest is damaged"):
        trained.load_checkpoint(tmp_path / "runs")


def killed_while_saving(folder: str, every: int | None) -> None:
    """A run that is killed in its first save, when its shard is written and the checkpoint has no name yet."""
    folders.commit = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    trained = small_engine(1, dir=folder, every=every) if every else small_engine(1)
    small_steps(trained)
    trained.save_checkpoint(folder, "global_step1")


def parts(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob(".*") if path.name not in (".lock", ".saved.json"))


@pytest.mark.parametrize("way", ["start", "resume", "save", "prune"])
def test_unfinished_checkpoints_of_a_killed_run_are_removed(ranks: Any, tmp_path: Path, way: str) -> None:
    """Each kill of a run with automatic saves left up to a whole checkpoint, for good."""
    with pytest.raises(RankFailure, match="SIGKILL"):
        ranks(1, killed_while_saving, str(tmp_path), 1, timeout=60)
    (left,) = parts(tmp_path)
    assert left.startswith(".global_step1.") and left.endswith(".part") and any((tmp_path / left).iterdir())
    (tmp_path / ".best.gone").mkdir()
    if way == "start":
        mine = small_engine(dir=str(tmp_path), every=1)
    elif way == "resume":
        mine = small_engine(dir=str(tmp_path), resume="auto")
    elif way == "save":
        mine = small_engine()
        small_steps(mine)
        assert mine.save_checkpoint(tmp_path, "other")
    else:
        output_of("checkpoint", "prune", tmp_path, "--keep", 1)
    assert not parts(tmp_path)
    if way != "start":
        return
    # What a run that lives is writing stays: of this process, and of another host, whose heartbeat moves.
    (tmp_path / ".global_step2.abc.part").mkdir()
    again = small_engine(dir=str(tmp_path), every=1, resume="auto")
    lock = tmp_path / ".lock"
    there = json.loads(lock.read_text())
    del mine, again
    gc.collect()
    lock.write_text(json.dumps(there | {"machine": "far", "host": "far", "pid": 1}))
    small_engine(dir=str(tmp_path), resume="auto")
    CliRunner().invoke(app, ["checkpoint", "prune", str(tmp_path), "--keep", "1"])
    assert parts(tmp_path) == [".global_step2.abc.part"]
