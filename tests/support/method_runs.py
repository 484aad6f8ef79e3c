"""Runs of training files with a ``method``, on a model of letters, as ranks of a pool."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from triax.base.errors import ConfigError
from triax.data.dataloader import BatchOrder
from triax.train.file import read_training_file
from triax.train.start import make_job

from support.file_runs import losses_of
from support.method_steps import WORDS, same_weights
from support.toy_answers import model_of, tokenizer
from support.trl_in_float64 import exact

STEPS, BATCH, RATE = 6, 4, 0.05
STOP = "training.time_limit=0.001s"  # after the first step
PAIRS = [(f"{a} ", b, a) for a in WORDS for b in WORDS[:4] if a != b]  # prompt, better and worse answer
FILE = f"""\
name: NAME
method: {{name: METHOD}}
model: {{folder: first}}
data: {{training: METHOD.jsonl}}
batch: {{size: {BATCH}, microbatch: 1}}
training:
  steps: {STEPS}
  sequence: 16
  learning_rate: {{peak: {RATE}, schedule: constant, warmup_steps: 0}}
optimizer: {{type: SGD, decays: all}}
precision: fp64
clip: null
checkpoint: {{every: 2}}
monitor: {{trace: false}}
"""


def write_model(folder: Path) -> None:
    """Write the first model and its tokenizer."""
    with exact():
        model_of().save_pretrained(folder)
    tokenizer().save_pretrained(folder)


def write_samples(root: Path, method: str, samples: list[dict[str, Any]], file: str = FILE) -> None:
    """Write samples and the training file of a method."""
    (root / f"{method}.jsonl").write_text("".join(json.dumps(each) + "\n" for each in samples))
    (root / f"{method}.yaml").write_text(file.replace("METHOD", method).replace("NAME", method))


def run(root: str, method: str, *changes: str) -> list[float]:
    """Be a rank of a run; return the losses of its steps."""
    return losses_of(root, f"{method}.yaml", *changes)


def batches_of(data: Any) -> list[list[int]]:
    """Return the numbers of the samples of each step."""
    return [*BatchOrder(len(data), BATCH, BATCH, 0, 1, 0)][:STEPS]


def refusal_of(name: str, changes: list[str], capsys: Any) -> str:
    """Return the text with which the training file ``name``.yaml of this folder is refused, before or in its run."""
    try:
        make_job(read_training_file(f"{name}.yaml", changes)[0])
        run(os.getcwd(), name, "name=refused", *changes)
    except ConfigError as error:
        return str(error)
    except SystemExit:
        return str(capsys.readouterr().err)
    raise AssertionError("nothing was refused")


def same_run(
    ranks: Any, root: Path, method: str, name: str, wanted: list[float], last: Path, *parts: tuple[int, str]
) -> None:
    """Check losses and model of a run: each part is a number of ranks and changes; a part but the last ends early."""
    losses: list[float] = []
    for size, changes in parts:
        assert len(losses) < len(wanted)
        here = ranks(size, run, str(root), method, f"name={name}", *changes.split("; "))[0]
        assert here
        losses += here
    assert losses == pytest.approx(wanted, rel=1e-10)
    same_weights(root / "runs" / name / "model", last)
