"""The package `triax` as help, star imports, inspect and type checkers see it, with and without the extras."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from support.paths import ROOT

EXTRAS: tuple[str, ...] = (
    "transformers",
    "accelerate",
    "huggingface_hub",
    "matplotlib",
    "tensorboard",
    "wandb",
    "lm_eval",
)
EXTRAS += ("mlflow", "trackio", "pyarrow", "fsspec", "peft", "trl", "bitsandbytes", "datasets")
ASKED = """
import inspect, pydoc, sys
sys.modules.update(dict.fromkeys({extras}))
import triax
from triax import *
names = {{name for name, _ in inspect.getmembers(triax)}}
assert {{"Engine", "Grid", "LayerSpec"}} <= names, names
assert ("Trainer" in names) == (not {extras}) and set(triax.__all__) <= names
text = pydoc.plain(pydoc.render_doc(triax))
assert "class PipelineEngine" in text and ("class Trainer" in text) == (not {extras})
try:
    triax.Trainer
except ImportError as error:
    assert "[hf]" in str(error), error
else:
    assert not {extras}
"""

# Mistakes of a user's program, each in its own line, and the type that an engine has.
PLANTED = """
import functools

import torch
from torch import nn

import triax

grid = triax.Grid(pipe=2)
layers = [triax.LayerSpec(nn.Linear, 4, 1)]
model = triax.PipelineModule(layers, grid=grid, loss_fn=nn.functional.mse_loss)
adam = functools.partial(torch.optim.Adam, lr=1e-3)
pipeline: triax.PipelineEngine = triax.Engine(model, optimizer=adam, batch=triax.Batch(size=4, microbatch=2))
plain: triax.ModuleEngine = triax.Engine(nn.Linear(2, 2), optimizer=adam, batch=1)
pipeline.train_btach()  # error
plain.train_batch()  # error
plain.backwards(torch.zeros(()))  # error
pipeline.train_batch(3)  # error
pipeline.eval_batch()  # error
pipeline.save_checkpoint()  # error
pipeline.gather(3)  # error
plain.grad_nrom  # error
triax.Engine(model, optmizer=adam)  # error
triax.Engine(model, optimizer=adam, zero=5)  # error
triax.Engine(model, optimizer=adam, precision="fp8")  # error
triax.Engine(layers, optimizer=adam)  # error
triax.Batch(sise=4)  # error
triax.Zero(stage="3")  # error
triax.Grid(pip=2)  # error
triax.LayerSpec()  # error
triax.Grid(timeout="3")  # error
triax.make_schedule("1f1b", pipe="2", microbatches=4)  # error
triax.simulate("1f1b")  # error
triax.Eengine  # error
triax.verify(model)  # error
triax.PipelineModule(layers, grdi=grid)  # error
triax.PipelineModule(layers, grid=grid, loss_fn="mse")  # error
"""


@pytest.mark.parametrize(
    "extras", [EXTRAS, pytest.param((), marks=pytest.mark.exhaustive)], ids=["without extras", "with all"]
)
def test_help_and_star_imports_work_without_extras(extras: tuple[str, ...]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", ASKED.format(extras=extras)], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.exhaustive  # mypy reads the whole library: `make lint` checks the examples with a cache
def test_a_type_checker_finds_each_mistake_of_a_program(tmp_path: Path) -> None:
    place = tmp_path / "as-package"
    place.mkdir()
    (place / "triax").symlink_to(ROOT)
    (tmp_path / "program.py").write_text(PLANTED)
    words = ["--strict", "--config-file", "/dev/null", "--cache-dir", str(tmp_path / "cache"), "../program.py"]
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *words], cwd=place, capture_output=True, text=True, check=False, timeout=900
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("../program.py") and ": error:" in line]
    found = {int(line.split(":")[1]) for line in lines}
    planted = {number for number, line in enumerate(PLANTED.splitlines(), 1) if "# error" in line}
    assert found == planted, done.stdout
