"""The GPT of examples/gpt_3d.py in five spellings, with equal losses, and what its command does."""

from __future__ import annotations

import dataclasses
import math
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import triax
from triax.base.errors import ConfigError
from triax.train.data import open_data
from triax.train.job import Job, resolve
from triax.train.loop import train
from triax.train.sections import TrainingFile
from triax.train.start import make_job

from support.file_runs import NoPictures, written_losses
from support.paths import EXAMPLES
from support.processes import program

sys.path.insert(0, str(EXAMPLES))

import gpt_3d
import gpt_plain

STEPS = 4


def start(job: Job, folder: str) -> None:
    os.chdir(folder)
    train(job, [NoPictures()])


def plain(shape: triax.GPTConfig = gpt_3d.SHAPE) -> gpt_plain.GPT:
    """Return the plain model with the weights with which triax begins."""
    weights = dict(triax.PipelineModule(gpt_3d.layers(shape), dtype=torch.float64).named_parameters())
    model = gpt_plain.GPT(shape.vocab_size, shape.max_position_embeddings).double()
    model.load_state_dict(weights)
    return model


@pytest.fixture(scope="module")
def wanted() -> list[float]:
    return gpt_plain.train(plain(), STEPS, of=STEPS)


def test_the_plain_gpt_lowers_its_loss(wanted: list[float]) -> None:
    assert wanted[-1] < wanted[0]


@pytest.mark.parametrize(
    "options",
    [
        "",
        "--data 2 --zero 3",
        "--pipe 2 --tensor 2 --schedule zb-v",
        pytest.param("--pipe 2 --schedule zb-v", marks=pytest.mark.exhaustive),
        pytest.param("--pipe 2 --tensor 2", marks=pytest.mark.exhaustive),
        pytest.param("--pipe 2 --data 2 --tensor 2", marks=pytest.mark.exhaustive),
    ],
)
def test_gpt_3d_losses_equal_plain_pytorch(ranks: Any, tmp_path: Path, options: str, wanted: list[float]) -> None:
    words = shlex.split(f"{EXAMPLES / 'gpt_3d.py'} {options} --dtype float64 --steps {STEPS} --folder run")
    count = math.prod(int(size) for size in re.findall(r"--(?:pipe|data|tensor) (\d)", options))
    ranks(count, program, words, str(tmp_path))
    torch.testing.assert_close(written_losses(tmp_path / "run"), wanted, rtol=0, atol=1e-10)


def test_gpt_3d_resumed_on_another_grid_equals_one_process(ranks: Any, tmp_path: Path) -> None:
    """Three steps, then two more, on other grids each time: the losses of one process. It leaves pictures."""
    script = str(EXAMPLES / "gpt_3d.py")
    common = ["--dtype", "float64", "--folder"]
    ranks(2, program, [script, "--pipe", "2", "--steps", "3", *common, "wide"], str(tmp_path))
    ranks(2, program, [script, "--tensor", "2", "--resume", "--steps", "5", *common, "wide"], str(tmp_path))
    for more in (["--steps", "3"], ["--resume", "--steps", "5"]):
        (said,) = ranks(1, program, [script, *more, *common, "one"], str(tmp_path))
    torch.testing.assert_close(written_losses(tmp_path / "wide"), written_losses(tmp_path / "one"), rtol=0, atol=1e-10)
    assert len(written_losses(tmp_path / "one")) == 5
    assert "step    5 of 5  loss " in said and said.count(" wrong") + said.count(" right\n") == 5 + 1, said
    for file in ("report.html", "loss.png", "schedule.png"):
        assert (tmp_path / "wide" / file).stat().st_size > 10_000


def test_gpt_3d_stops_at_the_time_limit_and_says_so(ranks: Any, tmp_path: Path) -> None:
    options = ["--minutes", "0", "--steps", "60", "--batch", "16"]
    (said,) = ranks(1, program, [str(EXAMPLES / "gpt_3d.py"), *options], str(tmp_path))
    assert "stopped after 0.0 minutes, at step 50 of 60: --resume continues" in said


@pytest.mark.exhaustive
def test_gpt_3d_learns_to_add_numbers(tmp_path: Path) -> None:
    """The main job, as ``make train`` starts it."""
    words = ["--pipe", "2", "--data", "2", "--tensor", "2", "--minutes", "30"]
    command = [sys.executable, str(EXAMPLES / "gpt_3d.py"), *words]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    shares = [float(share) for share in re.findall(r"([\d.]+)% of held-out sums right", done.stdout)]
    assert len(shares) == 14 and shares[-1] > 99.0, done.stdout


def test_a_training_file_trains_a_list_of_layers(ranks: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fifth spelling: ``model: gpt_3d.py:layers``, on text, against the plain model on the same rows."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text").write_text("12+34=64\n78+19=79\n" * 40)
    triax.data.tokenize(["text"], "bytes", "tokens", split="file")
    values = {
        "name": "file",
        "model": {"layers": f"{EXAMPLES / 'gpt_3d.py'}:layers", "overrides": {"vocab_size": 256}},
        "data": {"training": "tokens", "document_mask": False},
        "grid": {"pipe": 2},
        "training": {"steps": STEPS, "learning_rate": {"peak": 5e-3, "schedule": "constant", "warmup_steps": 0}},
        "batch": {"size": 4, "microbatch": 1},
        "precision": "fp64",
        "optimizer": {"type": "AdamW", "betas": [0.9, 0.99], "weight_decay": 0.0},
        "clip": 1.0,
        "checkpoint": False,
    }
    file = TrainingFile.of(values)
    ranks(2, start, make_job(file, 2), str(tmp_path))
    model = plain(dataclasses.replace(gpt_3d.SHAPE, vocab_size=256))
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, betas=(0.9, 0.99), weight_decay=0.0)
    rows = iter(open_data(file, 8, "training").loader(4, 4, threads=0))
    wanted = []
    for _ in range(STEPS):
        ids, labels = next(rows)
        loss = F.cross_entropy(model(ids).flatten(0, 1), labels.flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        wanted.append(loss.item())
    torch.testing.assert_close(written_losses(tmp_path / "runs" / "file"), wanted, rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model": "nowhere.py:layers"}, "model.layers: nowhere.py:layers cannot be read"),
        ({"model": f"{EXAMPLES / 'gpt_3d.py'}:logits"}, "its first argument has no configuration as its default"),
        ({"data": {"training": "tokens"}}, "data.document_mask is true, for which the first layer of model.layers"),
        ({"sample": {"prompt": "1"}}, "sample works with triax's own models, and model.layers is a function"),
        ({"grid": {"sequence_parallel": True}}, "grid.sequence_parallel works with triax's own models"),
        ({"method": "dpo"}, "method works with triax's own models"),
    ],
)
def test_training_files_refuse_options_a_list_of_layers_lacks(changes: dict[str, Any], said: str) -> None:
    values = {
        "model": f"{EXAMPLES / 'gpt_3d.py'}:layers",
        "data": {"training": "tokens", "document_mask": False},
        "training": {"steps": 1},
        "batch": {"size": 1},
    }
    with pytest.raises(ConfigError, match=re.escape(said)):
        resolve(TrainingFile.of(values | changes))
