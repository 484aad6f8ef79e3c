"""Folders of checkpoints with links, FIFOs and devices, exchanged folders, and names that drive a terminal."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from triax.base.errors import CheckpointError, ConfigError, CorruptError
from triax.base.json_comments import read_json
from triax.checkpoint.format import folder as folders
from triax.engine.monitor.report.write import write_report
from triax.models.huggingface.config import read_config
from triax.pipe.schedules.choose import read_schedule
from triax.train.file import read_training_file

from support.command_line import output_of, run_triax
from support.small_checkpoints import small_engine, small_steps, write_index


def saved(folder: Path, steps: int, seed: int = 0) -> Path:
    trained = small_engine(seed, dir=str(folder), every=1)
    small_steps(trained, steps)
    return folder


def test_pruning_removes_links_but_keeps_their_targets(tmp_path: Path) -> None:
    """A link is no folder: removing it as one ended ``prune`` with a traceback, and left ``.global_step1.gone``."""
    place = saved(tmp_path / "runs", 5)
    (place / "global_step1").rename(tmp_path / "elsewhere")
    (place / "global_step1").symlink_to(tmp_path / "elsewhere")
    (place / "pinned").symlink_to("global_step2")
    trained = small_engine(dir=str(place), resume="auto")
    trained.save_checkpoint(place, "global_step9")
    output_of("checkpoint", "prune", place, "--keep", 2)
    left = sorted(path.name for path in place.iterdir() if path.name[0] != ".")
    assert left == ["global_step5", "global_step9", "latest"]
    assert not [*place.glob(".*.gone")] and (tmp_path / "elsewhere" / "index.json").is_file()


def test_automatic_pruning_keeps_the_target_of_a_link(tmp_path: Path) -> None:
    place = saved(tmp_path / "runs", 4)
    (place / "best").symlink_to("global_step2")
    assert folders.prunable(place, 1, automatic=True) == ["global_step1", "global_step3"]


def make_fifo_or_device(path: Path, kind: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists():
        path.unlink()
    if kind == "FIFO":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero")


@pytest.mark.parametrize("kind", ["FIFO", "device"])
@pytest.mark.timeout(60)
def test_fifos_and_devices_are_refused_without_waiting(tmp_path: Path, kind: str) -> None:
    place = saved(tmp_path / "runs", 2)
    for name in ("global_step2/index.json", "global_step2/rank-00000.safetensors", "latest", ".lock"):
        copy = tmp_path / "copy"
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(place, copy)
        make_fifo_or_device(copy / name, kind)
        if name != ".lock":
            code, text = run_triax("checkpoint", "verify", copy if name == "latest" else copy / "global_step2")
            assert code != 0 and text.strip(), name
            trained = small_engine(dir=str(copy), resume="auto")
            assert trained.global_steps == (2 if name == "latest" else 1), name
        else:
            trained = small_engine()
            assert not trained.save_checkpoint(copy, "more")
        tag = {"latest": None, ".lock": "none"}.get(name, "global_step2")
        with pytest.raises((CheckpointError, CorruptError, OSError, ValueError)):
            small_engine().load_checkpoint(copy, tag)
    readers: dict[str, Callable[[Path], Any]] = {
        "run.yaml": lambda path: read_training_file(path, []),
        "schedule.json": read_schedule,
        "schedule.csv": read_schedule,
        "ds_config.json": read_json,
        "model/config.json": lambda path: read_config(path.parent),
    }
    for name, reader in readers.items():
        make_fifo_or_device(tmp_path / name, kind)
        with pytest.raises((ValueError, OSError)) as error:
            reader(tmp_path / name)
        assert str(tmp_path / name).removesuffix("/config.json") in str(error.value), name
    make_fifo_or_device(tmp_path / "run/run.json", kind)
    make_fifo_or_device(tmp_path / "run/rank-0.log", kind)
    (tmp_path / "run/metrics.jsonl").write_text('{"step": 1, "samples": 4, "time": 0.0, "x": 1.0}\n')
    assert write_report(tmp_path / "run").is_file()


def test_escape_sequences_in_names_are_printed_as_text(tmp_path: Path) -> None:
    """A tensor's name with an escape sequence cleared the reader's screen, or wrote its title."""
    place = saved(tmp_path / "runs", 1) / "global_step1"
    bad, shown = "\x1b]0;owned\x07\x1b[2J[red]", "\\x1b]0;owned\\x07\\x1b[2J[red]"
    content = json.loads((place / "index.json").read_text())
    content["versions"] |= {bad: bad}
    content["identity"]["run"] = bad
    write_index(place, content)
    for words in (("show",), ("verify",), ("diff", place)):
        code, output = run_triax("checkpoint", words[0], place, *words[1:])
        assert "\x1b" not in output and "\x07" not in output, words
        if words == ("show",):
            assert code == 0 and f"run {shown}, number" in output and f"{shown} {shown}" in output
    assert "\x1b" not in str(CorruptError(bad)) and shown in str(ConfigError(bad))
    assert str(CheckpointError("two\nlines: é, 梯")) == "two\nlines: é, 梯"


def test_loading_refuses_a_checkpoint_folder_that_was_exchanged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Otherwise a run could resume with the weights of another one."""
    mine, other = saved(tmp_path / "mine", 4), saved(tmp_path / "other", 4, seed=1)
    small_engine(seed=2).save_checkpoint(mine, "best")
    small_engine(seed=3).save_checkpoint(mine, "first")
    exchanges = {
        "global_step2": (other / "global_step2", "step 2"),  # another run's
        "global_step3": (other / "global_step2", "step 2"),  # and of another step
        "global_step4": (other / "global_step4", "step 4"),  # the newest, which no later one names
        "best": (mine / "first", "step 0"),  # the run's own
    }
    for tag, (source, words) in exchanges.items():
        shutil.rmtree(mine / tag)
        shutil.copytree(source, mine / tag)
        with pytest.raises(CheckpointError, match=f"{tag} holds another checkpoint than .*{words} of the run"):
            small_engine().load_checkpoint(mine, tag)
        code, output = run_triax("checkpoint", "verify", mine / tag)
        assert code == 1 and "holds another checkpoint" in output
    shutil.rmtree(mine / "first")
    resumed = small_engine(dir=str(mine), resume="auto")
    assert resumed.global_steps == 1 and "global_step4 is not used" in caplog.text
    # A folder whose list is missing, as in a copy of its checkpoints alone, or damaged, can be loaded.
    for content in (b"", b"[]", b'{"global_step1": 3}', b"[" * 10**5):
        (mine / ".saved.json").write_bytes(content)
        assert small_engine().load_checkpoint(mine, "global_step1")[0] is not None
    resumed.save_checkpoint(mine, "again")
    assert [*json.loads((mine / ".saved.json").read_text())] == ["again"]
    # A copy under a name of the user's own is loaded, and so is a step that two runs saved, under two names.
    shutil.copytree(other / "global_step2", mine / "copy")
    assert small_engine().load_checkpoint(mine, "copy")[0] is not None
    again = small_engine(dir=str(other), resume="auto")
    again.save_checkpoint(other, "best")
    small_steps(again)
    again.save_checkpoint(other, "global_step5")
    shutil.rmtree(other / "best")
    assert small_engine().load_checkpoint(other, "global_step4")[0] is not None
