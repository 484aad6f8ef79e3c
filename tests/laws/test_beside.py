"""Without a part of plugins/ and compat/, the rest of the library still imports and trains.

The parts are deleted in a copy of the library, in which a process with torch forks a child for each case.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from support.import_reader import BESIDE, NEEDS, library, part
from support.paths import ROOT

# Arguments: NEEDS, the files with their parts, and what to delete: all parts, or each in turn. Each child deletes some,
# with those that need them; it trains a pipeline and a plain module in ZeRO's stage 3, and imports the parts left.
PROGRAM = """
import importlib, os, shutil, sys
from functools import partial
from pathlib import Path
import torch
from torch import nn

HERE, needs, files = Path.cwd() / "triax", eval(sys.argv[1]), sys.argv[2].split()
parts, part_of = sorted({part for _, part in map(lambda each: each.split(":"), files)}), dict(
    each.split(":") for each in files
)

def without(gone):
    gone = set(gone)
    while more := {part for part, needed in needs.items() if needed in gone} - gone:
        gone |= more
    for file, part in part_of.items():
        if part in gone:
            (HERE / file).unlink()
    import triax
    options = {"optimizer": partial(torch.optim.AdamW, lr=0.1), "batch": triax.Batch(size=4, microbatch=2), "clip": 1.0}
    layers = [triax.LayerSpec(nn.Linear, 3, 3), torch.tanh, triax.LayerSpec(nn.Linear, 3, 3)]
    pipeline = triax.Engine(triax.PipelineModule(layers, loss_fn=nn.functional.mse_loss), schedule="1f1b", **options)
    pipeline.train_batch(iter([(torch.ones(2, 3), torch.ones(2, 3))] * 2))
    plain = triax.Engine(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), zero=triax.Zero(stage=3), **options)
    for _ in range(2):
        plain.backward(plain(torch.ones(2, 3)).square().mean())
        plain.step()
    plain.save_checkpoint(f"saved/{os.getpid()}")
    assert pipeline.global_steps == plain.global_steps == 1
    for file, part in part_of.items():
        if part not in gone and not file.endswith("__main__.py"):
            importlib.import_module(".".join(["triax", *Path(file).with_suffix("").parts]).removesuffix(".__init__"))
    assert Path(triax.__file__).parent == HERE
    print("without", *sorted(gone), flush=True)

kept = Path.cwd() / "kept"
shutil.copytree(HERE, kept)
for gone in [parts] if sys.argv[3] == "all" else [[part] for part in parts]:
    if (child := os.fork()) == 0:
        without(gone)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, f"without {gone}"
    shutil.rmtree(HERE)
    shutil.copytree(kept, HERE)
"""
# Their packages are extras, which they import at their tops (REACHED_LATE of test_imports.py).
EXTRA = ("compat/huggingface/training_arguments.py", "compat/huggingface/trainer.py", "compat/lm_eval.py")


@pytest.mark.parametrize("deleted", ["all", pytest.param("each", marks=pytest.mark.exhaustive)])
def test_library_works_without_each_part_of_plugins_and_compat(tmp_path: Path, deleted: str) -> None:
    package, beside = tmp_path / "triax", list[str]()
    for file in library(ROOT):
        (package / file).parent.mkdir(parents=True, exist_ok=True)
        for path in (ROOT / file, *(ROOT / file).parent.glob("*.toml"), (ROOT / file).with_suffix(".pyi")):
            if path.exists():
                shutil.copy(path, (package / file).parent)
        if file.split("/")[0] in BESIDE and part(file) not in BESIDE and file not in EXTRA:
            beside.append(f"{file}:{part(file)}")
    parts = {each.partition(":")[2] for each in beside}
    assert {"plugins/plan", "plugins/fault_tolerance", "compat/deepspeed", "compat/horovod"} < parts
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-c", PROGRAM, repr(NEEDS), " ".join(beside), deleted]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("without") == (1 if deleted == "all" else len(parts)), done.stdout
