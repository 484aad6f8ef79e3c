"""Checkpoints at URIs: equal to those in a folder, complete or absent after any failure, and counted bytes."""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem

from triax.base.errors import CheckpointError, ConfigError
from triax.checkpoint.format import folder as folders
from triax.checkpoint.format.index import Index, read_index
from triax.checkpoint.format.remote import RemotePath, folder_at
from triax.checkpoint.reader import Reader
from triax.checkpoint.writer import rank_name
from triax.engine.snapshot.checkpointer import Checkpointer

from support.checkpoint_jobs import Cell, Job, command, make
from support.small_checkpoints import problems, small_engine, small_steps


class Store(MemoryFileSystem):
    """File system in memory whose calls are counted, and may fail; its own is the protocol ``store``."""

    protocol = "store"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    calls: ClassVar[list[str]] = []
    fails: int | None = None  # number of the call that fails; -1: each put
    lost = cut = False  # all calls after that fail, too; its data are cut off instead
    error: Exception = ConnectionError("the network is down")

    def _call(self, name: str) -> bool:
        """Count a call, and fail if it is its turn. Returns True if the write must be cut off."""
        Store.calls.append(name)
        if Store.fails is None:
            return False
        at = len(Store.calls) - 1
        if Store.cut:
            return at == Store.fails or (Store.fails < 0 and name.startswith("put"))
        if at == Store.fails or (Store.lost and at > Store.fails):
            raise Store.error
        return False

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **options: Any) -> bytes:
        self._call(f"read {end - start if start is not None and end is not None else 0}")
        found: bytes = super().cat_file(path, start=start, end=end, **options)
        return found

    def put_file(self, lpath: str, rpath: str, **options: Any) -> None:
        data = Path(lpath).read_bytes()
        super().pipe_file(rpath, data[: len(data) // 2] if self._call(f"put {len(data)}") else data)

    def pipe_file(self, path: str, value: bytes, **options: Any) -> None:
        super().pipe_file(path, value[: len(value) // 2] if self._call(f"pipe {len(value)}") else value)

    def cp_file(self, path1: str, path2: str, **options: Any) -> None:
        self._call("copy")
        super().cp_file(path1, path2, **options)

    def rm(self, path: Any, recursive: bool = False, maxdepth: Any = None) -> None:
        self._call("remove")
        super().rm(path, recursive=recursive, maxdepth=maxdepth)


@pytest.fixture
def store() -> type[Store]:
    fsspec.register_implementation("store", Store, clobber=True)
    Store.store, Store.pseudo_dirs, Store.calls = {}, [""], []
    Store.fails, Store.lost, Store.cut, Store.error = None, False, False, ConnectionError("the network is down")
    Checkpointer._saved.clear()  # the folder is empty, and engines of earlier tests may not have been collected yet
    return Store


@pytest.fixture
def memory() -> Iterator[str]:
    MemoryFileSystem.store.clear()
    yield "memory://run"
    MemoryFileSystem.store.clear()


def tensors(folder: Any) -> dict[str, torch.Tensor]:
    assert not problems(folder)
    return {name: each.read_all() for name, each in Reader(folder, read_index(folder)).snapshot.tensors.items()}


def assert_same(one: Any, other: Any) -> None:
    a, b = tensors(one), tensors(other)
    assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_a_run_saves_and_resumes_at_a_uri(memory: str, tmp_path: Path, capsys: Any) -> None:
    """Automatic saves, keep and resume, in the background too: as in a folder, and nothing is left on this host."""
    before = {*Path(tempfile.gettempdir()).glob("triax-checkpoint-*")}
    losses = {}
    for place in (str(tmp_path / "run"), memory):
        section: dict[str, Any] = {"dir": place, "every": 2, "keep": 2, "resume": "auto", "async": place == memory}
        engine = small_engine(**section)
        assert engine.resumed == (None, None)
        losses[place] = [small_steps(engine) for _ in range(7)]
        assert engine.wait_for_checkpoint() is None
        again = small_engine(**section)
        assert again.global_steps == 6 and again.resumed[0] == f"{place}/global_step6"
        assert small_steps(again) == losses[place][-1]
        assert folders.tags(folder_at(place)) == ["global_step4", "global_step6"]
        del engine, again
    one, other = losses.values()
    assert one == other
    for tag in ("global_step4", "global_step6"):
        assert_same(tmp_path / "run" / tag, folder_at(memory) / tag)
    assert {*Path(tempfile.gettempdir()).glob("triax-checkpoint-*")} == before
    assert command("verify", memory)[0] == 0 and "global_step6" in command("show", memory, "--no-tensors")[1]
    assert command("diff", memory, tmp_path / "run")[1].startswith("run/") is False
    assert "weights/" in command("diff", f"{memory}/global_step4", tmp_path / "run")[1]
    code, said = command("prune", memory, "--keep", 1)
    assert code == 0 and folders.tags(folder_at(memory)) == ["global_step6"], said


def test_replacing_a_remote_checkpoint_is_atomic(store: type[Store]) -> None:
    """Fail each call of a save that replaces a checkpoint: there is the old one or the new one, whole."""
    engine = small_engine()
    small_steps(engine)
    place = RemotePath("store://run")
    assert engine.save_checkpoint("store://run", "best")
    small_steps(engine)
    kept, dirs = dict(store.store), list(store.pseudo_dirs)
    store.calls.clear()
    assert engine.save_checkpoint("store://run", "best")
    count = len(store.calls)
    assert count > 6 and len((place / "best").files()) == 2, store.calls
    seen: dict[int, int] = {}
    for way in ("fails", "lost", "cut"):
        for number in range(count):
            store.store.clear()
            store.store.update(kept)
            store.pseudo_dirs[:] = dirs
            store.calls.clear()
            store.fails, store.lost, store.cut = number, way == "lost", way == "cut"
            done = engine.save_checkpoint("store://run", "best")
            store.fails = None
            assert not problems(place / "best")
            found = read_index(place / "best").head["step"]
            assert found == 2 or not done
            seen[found] = seen.get(found, 0) + 1
    assert seen.keys() == {1, 2} and seen[1] > 6, seen
    assert engine.save_checkpoint("store://run", "best") and len((place / "best").files()) == 2


def test_remote_save_errors_say_what_to_check(store: type[Store], caplog: Any) -> None:
    engine = small_engine()
    small_steps(engine)
    with caplog.at_level(logging.ERROR, "triax"):
        for error, text in (
            (PermissionError("Access Denied"), "because permission is denied (PermissionError: Access Denied). Give"),
            (ConnectionError("reset"), "because of ConnectionError: reset. Check the address, the network and"),
            (RuntimeError("botocore"), "RuntimeError: botocore"),
        ):
            store.fails, store.lost, store.error = len(store.calls), True, error
            assert not engine.save_checkpoint("store://run")
            assert text in caplog.text and "Older checkpoints are unchanged" in caplog.text
        store.fails, store.lost, store.cut = -1, False, True
        assert not engine.save_checkpoint("store://run")
        assert "was written in part:" in caplog.text
    store.fails = None
    assert folders.tags(folder_at("store://run")) == []
    assert engine.save_checkpoint("store://run", "a") and engine.save_checkpoint("store://run", "b")
    # A connection that fails is no damaged checkpoint: a run must not go back to an older one for it.
    for lost in (True, False):
        for number in range(3):
            store.fails, store.lost, store.cut = len(store.calls) + number, lost, False
            with pytest.raises(RuntimeError, match="Check the address"):
                engine.checkpointer.resume("store://run")
    store.fails = None
    # A file that is missing or cut is damage, and the one before is taken.
    place = RemotePath("store://run")
    names = read_index(place / "b").files
    (place / "b" / next(iter(names))).write_bytes(b"x" * 10)
    engine.checkpointer.resume("store://run")
    assert engine.resumed[0] == "store://run/a"
    (place / "b" / next(iter(names))).remove()
    with pytest.raises(CheckpointError, match="is damaged: it is missing"):
        engine.load_checkpoint("store://run", "b")


def test_wrong_uris_are_refused(monkeypatch: Any, tmp_path: Path) -> None:
    engine = small_engine()
    for place, text in (
        ("nowhere://bucket/run", "is not a folder that fsspec can open: ValueError: Protocol not known: nowhere"),
        ("s3:/bucket/run", "one slash after s3:, but a URI has two. Write s3://"),
        (Path("s3://bucket/run"), "as text and not as a pathlib.Path"),
    ):
        for call in (engine.save_checkpoint, engine.load_checkpoint):
            with pytest.raises((ConfigError, RuntimeError), match=text):
                call(place)
    with pytest.raises((ConfigError, RuntimeError), match="is a URI, but this is written to a local folder"):
        engine.save_16bit_model("memory://run")
    assert folder_at("s3:bucket") == Path("s3:bucket") and folder_at(tmp_path) == tmp_path
    engine = small_engine()
    assert engine.load_checkpoint("memory://none") == (None, None)
    with pytest.raises(RuntimeError, match=r"is not a checkpoint, because it has no index\.json"):
        engine.load_checkpoint("memory://none", "x")
    monkeypatch.setitem(sys.modules, "fsspec.core", None)
    with pytest.raises(ConfigError, match=r"needs the package fsspec.*pip install .*\[remote\]'"):
        folder_at("memory://run")


def test_a_run_cannot_save_after_another_took_its_remote_folder(memory: str) -> None:
    """Of two processes in one folder, the earlier one cannot save any more, and names the later one."""
    engine = small_engine(on_failure="stop")
    small_steps(engine)
    assert engine.save_checkpoint(memory)
    lock = folder_at(memory) / ".lock"
    owner = json.loads(lock.read_bytes())
    lock.write_bytes(json.dumps(owner | {"pid": 1, "run": "other", "host": "far"}).encode())
    with pytest.raises(CheckpointError, match="the run other on host far, process 1, has taken memory://run since"):
        engine.save_checkpoint(memory, "again")
    assert folders.tags(folder_at(memory)) == ["global_step1"]
    small_engine(dir=memory, every=1)  # a new run takes it
    assert json.loads(lock.read_bytes())["pid"] == owner["pid"]


def save_and_load(folder: str, uri: str) -> tuple[float, float, int]:
    """Save on one grid and load on another; the next loss of both, and the bytes of files that this rank read."""
    engine = make(Cell((2, 1, 1), stage=1), Job())
    engine.train_batch()
    assert engine.save_checkpoint(folder, "a") and engine.save_checkpoint(uri, "a")
    read, plain = 0, RemotePath.read_bytes

    def counted(path: RemotePath, *span: Any) -> bytes:
        nonlocal read
        data = plain(path, *span)
        read += len(data) if span else 0
        return data

    other = make(Cell((1, 2, 1), stage=3), Job())
    RemotePath.read_bytes = counted  # type: ignore[method-assign, assignment]
    try:
        assert other.load_checkpoint(uri)[0] == f"{uri}/a"
    finally:
        RemotePath.read_bytes = plain  # type: ignore[method-assign]
    return engine.train_batch().item(), other.train_batch().item(), read


def test_another_grid_loads_a_remote_checkpoint(ranks: Any, tmp_path: Path) -> None:
    """On two ranks, through file://: the same bytes as in a folder; a rank reads no block twice."""
    uri = f"file://{tmp_path}/there"
    results = ranks(2, save_and_load, str(tmp_path / "here"), uri, timeout=60)
    index = read_index(RemotePath(uri) / "a")
    for here, there, read in results:
        assert there == pytest.approx(here, rel=1e-10)
        assert 0 < read <= sum(file.size for file in index.files.values())
    assert_same(tmp_path / "here" / "a", RemotePath(uri) / "a")
    names = {rank_name(rank, index.save_name) for rank in range(2)}
    assert {*index.files} == names and {*(RemotePath(uri) / "a").files()} == {"index.json", *names}


def blocks_of(index: Index, kind: str, size: int) -> set[tuple[str, int]]:
    """The file and number of each block in which tensors of a kind lie."""
    return {
        (box.file, block)
        for name, entry in index.tensors.items()
        if name.startswith(f"{kind}/")
        for box in entry.boxes
        for block in range(box.span.start // size, math.ceil(box.span.stop / size))
    }


def test_reading_weights_twice_fetches_each_block_once(store: type[Store], monkeypatch: Any) -> None:
    """Without verification, no other blocks are read."""
    from triax.checkpoint.format import remote_files

    monkeypatch.setattr(remote_files, "BLOCK", 4096)
    engine = make(Cell(), Job())
    engine.train_batch()
    assert engine.save_checkpoint("store://run", "a")
    index = read_index(folder_at("store://run") / "a")
    store.calls.clear()
    snapshot = Reader(folder_at("store://run") / "a", index).snapshot
    for _ in range(2):
        for tensor in snapshot.of_kinds("weights").values():
            tensor.read_all()
    read = sum(int(call.split()[1]) for call in store.calls if call.startswith("read"))
    blocks = len(blocks_of(index, "weights", size=4096))
    assert (blocks - 1) * 4096 < read <= blocks * 4096  # the last block of the one file may be shorter
    assert read < 0.7 * sum(file.size for file in index.files.values())


def test_loading_names_a_full_temporary_folder(memory: str, monkeypatch: Any) -> None:
    """A block that was written through the map of a sparse file ended the process by SIGBUS."""
    engine = small_engine()
    small_steps(engine)
    assert engine.save_checkpoint(memory, "a")

    def full(*arguments: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(CheckpointError, match=r"temporary folder /.* \(No space left on device\): make room there"):
        small_engine().load_checkpoint(memory, "a")


def test_saving_names_a_full_temporary_folder(memory: str, monkeypatch: Any) -> None:
    engine = small_engine()
    small_steps(engine)

    def full(*arguments: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", full)
    assert not engine.save_checkpoint(memory, "a")
    monkeypatch.undo()
    problem = engine.checkpointer.problem
    assert problem is not None and f"No space left on device: {tempfile.gettempdir()}" in problem


def test_a_save_removes_temporary_files_of_a_killed_save(memory: str, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    engine = small_engine()
    small_steps(engine)
    if (process := os.fork()) == 0:
        monkeypatch.setattr(RemotePath, "upload", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        engine.save_checkpoint(memory, "a")
    os.waitpid(process, 0)
    assert [*tmp_path.glob("triax-checkpoint-*/rank-*.safetensors")]
    assert engine.save_checkpoint(memory, "b")
    assert not [*tmp_path.iterdir()]
