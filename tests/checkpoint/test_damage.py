"""Checkpoints that are damaged, do not fit, or cannot be written."""

from __future__ import annotations

import os
import random
import resource
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import triax
from triax.base.errors import CheckpointError, CorruptError, DamagedError
from triax.checkpoint.format import folder as folders
from triax.checkpoint.format.index import Index, read_index
from triax.checkpoint.reader import Reader
from triax.cli.main import app

from support.checkpoint_jobs import Cell, Job, make
from support.small_checkpoints import linear


def test_verify_names_the_file_of_every_flipped_byte(saved: Path, tmp_path: Path) -> None:
    folder, draw = tmp_path / "there", random.Random(4)
    shutil.copytree(saved / "there", folder)
    index = read_index(folder)
    files = {path: path.stat().st_size for path in sorted(folder.iterdir())}
    places = [(path, place) for path in files for place in draw.sample(range(files[path]), k=1000 // len(files) + 1)]
    assert len(places) >= 1000 and folder / "index.json" in files
    for path, place in places:
        with path.open("r+b") as file:
            file.seek(place)
            before = file.read(1)[0]
            file.seek(place)
            file.write(bytes([before ^ draw.randrange(1, 256)]))
        if path.name == "index.json":
            with pytest.raises(CorruptError, match=r"index\.json is damaged"):
                read_index(folder)
        else:
            problems = (
                [*folders.verify(folder, index)] if place % 40 == 0 else _affected(folder, index, path.name, place)
            )
            assert len(problems) == 1 and path.name in problems[0] and "is damaged" in problems[0]
        with path.open("r+b") as file:
            file.seek(place)
            file.write(bytes([before]))
    assert not [*folders.verify(folder, index)]


def _affected(folder: Path, index: Index, file: str, place: int) -> list[str]:
    """``verify`` of what holds one byte of a file."""
    problems = []
    for held, span, name in index.byte_ranges():
        if held == file and span.start <= place < span.stop:
            try:
                index.check_range(index.folder(folder), held, span, name)
            except CorruptError as error:
                problems.append(str(error))
    return problems


def test_each_damaged_range_is_found_by_one_rank(saved: Path, tmp_path: Path) -> None:
    """Three ranks share the bytes of a checkpoint that they compare with checksums."""
    folder, finders = tmp_path / "there", list[int]()
    shutil.copytree(saved / "there", folder)
    index = read_index(folder)
    ranges = index.byte_ranges()
    for name, span, _ in ranges[:: len(ranges) // 9]:
        data = (folder / name).read_bytes()
        place = span.stop - 1
        (folder / name).write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
        before = len(finders)
        for rank in range(3):
            try:
                Reader(folder, index).verify((), rank, 3)
            except CorruptError:
                finders.append(rank)
        assert len(finders) == before + 1, (name, span)
        (folder / name).write_bytes(data)
    assert finders == sorted(finders) and {*finders} == {0, 1, 2}


def test_loading_refuses_damaged_files(saved: Path, tmp_path: Path) -> None:
    folder = tmp_path / "there"
    shutil.copytree(saved / "there", folder)
    engine = make(Cell(), Job())
    before = engine.gather()
    name, entry = next((n, e) for n, e in read_index(folder).tensors.items() if n.startswith("optimizer/exp_avg/"))
    with (folder / entry.boxes[0].file).open("r+b") as file:
        file.seek(entry.boxes[0].span.start)
        file.write(b"\x00\x01\x02")
    with pytest.raises(DamagedError, match=f"{entry.boxes[0].file} is damaged: {name}"):
        engine.load_checkpoint(tmp_path, "there")
    assert all(torch.equal(before[n], w) for n, w in engine.gather().items()) and engine.global_steps == 0
    engine.load_checkpoint(tmp_path, "there", load_module_only=True)  # that part is as it was written
    (folder / entry.boxes[0].file).write_bytes(b"short")
    with pytest.raises(DamagedError, match="it has 5 bytes"):
        engine.load_checkpoint(tmp_path, "there")
    (folder / entry.boxes[0].file).unlink()
    with pytest.raises(DamagedError, match="No such file"):
        engine.load_checkpoint(tmp_path, "there")


def test_loading_unpickles_no_file_of_a_checkpoint(saved: Path, tmp_path: Path) -> None:
    """Each file in turn is one that runs code where it is unpickled."""
    mark = tmp_path / "ran"
    evil = b"cos\nsystem\n(S'touch " + str(mark).encode() + b"'\ntR."
    for path in sorted((saved / "there").iterdir()):
        shutil.copytree(saved / "there", tmp_path / "there", dirs_exist_ok=True)
        (tmp_path / "there" / path.name).write_bytes(evil)
        with pytest.raises(CheckpointError, match="is damaged"):
            make(Cell(), Job()).load_checkpoint(tmp_path, "there")
        if path.name == "index.json":
            assert CliRunner().invoke(app, ["checkpoint", "verify", str(tmp_path / "there")]).exit_code != 0
    os.system(f"true && touch {tmp_path / 'ran'}-not")  # that a shell could have made it
    assert not mark.exists() and (tmp_path / "ran-not").exists()


def test_loading_lists_names_and_shapes_that_differ(saved: Path, tmp_path: Path) -> None:
    class Grown(nn.Module):
        def __init__(self, extra: bool, width: int) -> None:
            super().__init__()
            self.same, self.wide = nn.Linear(4, 4), nn.Linear(4, width)
            self.new = nn.Linear(4, 2) if extra else None
            self.old = None if extra else nn.Linear(4, 3)
            self.register_buffer("count", torch.tensor(7.0 if extra else 3.0))

        def forward(self, x: torch.Tensor) -> Any:
            last = self.new if self.new is not None else self.old
            assert last is not None
            return self.wide(self.same(x)).sum() + last(x).sum()

    config = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "Adam", "params": {"lr": 0.01}}}
    first, second = (triax.initialize(model=Grown(*sizes), config=config)[0] for sizes in ((False, 5), (True, 6)))
    first.backward(first(torch.ones(2, 4)))
    first.step()
    assert first.save_checkpoint(tmp_path, "a")
    before = second.gather()
    with pytest.raises(CheckpointError) as error:
        second.load_checkpoint(tmp_path, "a")
    message = str(error.value)
    assert "missing in the checkpoint: new.weight, new.bias" in message
    assert "not in the model: old.bias, old.weight" in message and "strict=False" in message
    assert "of another shape: wide.weight (5, 4) in the checkpoint, (6, 4) in the model" in message
    assert second.global_steps == 0 and all(torch.equal(before[n], w) for n, w in second.gather().items())
    second.load_checkpoint(tmp_path, "a", strict=False)
    after = second.gather()
    assert torch.equal(after["same.weight"], first.gather()["same.weight"]) and second.count.item() == 3.0
    assert torch.equal(after["wide.weight"], before["wide.weight"]) and second.global_steps == 1
    for _ in range(2):
        second.backward(second(torch.ones(2, 4)))
        second.step()
    assert all(torch.isfinite(w).all() for w in second.gather().values())


@pytest.mark.parametrize("kind", ["Adam", "Lamb"])
def test_only_lamb_warns_of_unequal_step_counts_in_a_bucket(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A parameter without steps has its own step count, except in LAMB, where all of a bucket have one."""
    optimizer = {"type": kind, "params": {"lr": 0.1}}
    assert linear(optimizer, frozen=True).save_checkpoint(tmp_path)
    linear(optimizer).load_checkpoint(tmp_path)
    warned = "that share a bucket with 0." in caplog.text and "different numbers of steps, or none" in caplog.text
    assert warned == (kind == "Lamb"), caplog.text


def save_on_rank_0_alone(folder: str, pause: float) -> str:
    engine = make(Cell((1, 2, 1)), Job(), checkpoint={"patience": 1.0})
    engine.train_batch()
    try:
        if engine.grid.rank == 0:
            engine.save_checkpoint(folder)
        else:
            time.sleep(pause)
            engine.train_batch()
    except RuntimeError as error:
        return str(error)
    return ""


def test_a_save_on_one_rank_alone_is_an_error_on_both(ranks: Any, tmp_path: Path) -> None:
    for text in ranks(2, save_on_rank_0_alone, str(tmp_path), 0.0, timeout=30):
        assert "tensor 0) calls save_checkpoint, but rank 1 (pipe 0, data 1, tensor 0) calls train_batch of 2" in text
        assert "make the same call on every rank, and none under `if rank == 0`" in text
    first, second = ranks(2, save_on_rank_0_alone, str(tmp_path), 1.5, timeout=30)
    assert "save_checkpoint waited 1 s for rank 1 (pipe 0, data 1, tensor 0), which did not call it" in first
    assert "Call it on every rank" in first and "if rank == 0" in first
    assert "did not call it" in second  # it stopped at once, and says why


def fail_to_save(folder: str, how: str) -> Any:
    policy = "stop" if how == "stop" else "continue"
    engine = make(Cell((1, 2, 1), stage=1), Job(), checkpoint={"on_failure": policy, "tag_validation": "Fail"})
    engine.train_batch()
    assert engine.save_checkpoint(folder, "good")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    said = ""
    try:
        if engine.grid.rank == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))  # a full disk, for this rank
        done = engine.save_checkpoint(folder, "bad")
    except CheckpointError as error:
        done, said = False, str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    nowhere = Path(folder) / "latest" / "inside a file"
    refused = None
    if how == "continue":
        refused = engine.save_checkpoint(nowhere)
    with pytest.raises(CheckpointError, match="different tags"):
        engine.save_checkpoint(folder, f"rank{engine.grid.rank}")
    loss = engine.train_batch().item()  # the run goes on
    return done, said, refused, loss, engine.load_checkpoint(folder)[0], sorted(os.listdir(folder))


@pytest.mark.parametrize("how", ["continue", "stop"])
def test_a_failed_save_keeps_the_last_checkpoint(ranks: Any, tmp_path: Path, how: str) -> None:
    for done, said, refused, loss, path, names in ranks(2, fail_to_save, str(tmp_path), how, timeout=60):
        assert done is False and not refused and loss > 0
        assert path == str(tmp_path / "good") and {*names} - {".lock", ".saved.json"} == {"good", "latest"}
        if how == "stop":
            assert "rank 1 (pipe 0, data 1, tensor 0): File too large" in said and "MB are free" in said
