"""Older names of training file keys: they are read as today's names, and rewritten with the file's comments."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from triax.base.errors import ConfigError
from triax.train.file import read_training_file
from triax.train.older_keys import MOVED
from triax.train.upgrade import upgrade

from support.command_line import output_of

OLDER = """\
# a run
model:
  preset: bytes-tiny  # small
  lora: {r: 4, lora_alpha: 8}  # adapters
data: tokens
training:
  steps: 3  # few
  batch: 8  # sequences
  microbatch: 2  # at once
  # the optimizer
  optimizer:
    type: SGD  # plain
    momentum: 0.5
  zero:
    stage: 3  # weights too
    stage3_prefetch_bucket_size: 100
    offload_param: {device: nvme, nvme_path: disk}
  clip: 0  # no limit
  recompute: {number_checkpoints: 2}
  precision: fp64
monitor: {log_every: 5, trace: 0}
checkpoint: {async: false}
# the end
"""


def test_a_file_of_older_names_is_rewritten(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(OLDER)
    before, _ = read_training_file(file, ["training.microbatch=4", "monitor.trace=0"])
    assert "training.zero is an older name of zero, which triax 0.3 removes" in caplog.text
    assert (before.batch.size, before.batch.microbatch, before.optimizer.type) == (8, 4, "SGD")
    assert (before.zero.stage, before.zero.prefetch_bucket_size, before.clip) == (3, 100, None)
    assert before.zero.offload_parameters.path == "disk" and before.recompute.groups == 2
    assert before.lora is not None and (before.lora.rank, before.lora.alpha) == (4, 8)
    assert before.precision.weights == "fp64" and not before.checkpoint.background
    assert (before.monitor.print_every, before.monitor.trace.step) == (5, None)

    assert "training.batch is an older name of batch.size" in output_of("train", file, "--upgrade")
    caplog.clear()
    after, _ = read_training_file(file, ["batch.microbatch=4"])
    assert after == before and not caplog.text
    kept = [comment.partition("#")[2] for comment in OLDER.splitlines() if "#" in comment]
    assert all(comment in file.read_text() for comment in kept)
    assert "no older name" in output_of("train", file, "--upgrade")


@pytest.mark.parametrize("older", MOVED)
def test_a_key_under_both_names_is_refused(tmp_path: Path, older: str) -> None:
    file, name = tmp_path / "run.yaml", MOVED[older]
    values: dict[str, Any] = {"model": {"preset": "bytes-tiny"}, "data": "tokens"}
    for path in (older, name):
        *sections, last = path.split(".")
        section = values
        for part in sections:
            section = section.setdefault(part, {})
        section[last] = 1
    file.write_text(yaml.safe_dump(values))
    with pytest.raises(ConfigError, match=f"{older} is an older name of {name}: give the second alone"):
        read_training_file(file)


def test_a_file_in_toml_is_renamed_by_hand(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text("data = 'tokens'\n")
    with pytest.raises(ConfigError, match="is no YAML: rename its keys by hand"):
        upgrade(tmp_path / "run.toml")
