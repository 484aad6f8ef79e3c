"""The core needs nothing of what stands beside it: without these folders it imports, and trains."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from import_reader import BESIDE, library
from paths import ROOT

PROGRAM = """
from functools import partial
import torch
from torch import nn
import triax

options = {"optimizer": partial(torch.optim.AdamW, lr=0.1), "batch": triax.Batch(size=4, microbatch=2), "clip": 1.0}
layers = [triax.LayerSpec(nn.Linear, 3, 3), torch.tanh, triax.LayerSpec(nn.Linear, 3, 3)]
pipeline = triax.Engine(triax.PipelineModule(layers, loss_fn=nn.functional.mse_loss), schedule="1f1b", **options)
pipeline.train_batch(iter([(torch.ones(2, 3), torch.ones(2, 3))] * 2))

plain = triax.Engine(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), zero=triax.Zero(stage=3), **options)
for _ in range(2):
    plain.backward(plain(torch.ones(2, 3)).square().mean())
    plain.step()
plain.save_checkpoint("saved")
print(pipeline.global_steps, plain.global_steps, triax.__file__)
"""


def test_the_core_trains_without_what_stands_beside_it(tmp_path: Path) -> None:
    package = tmp_path / "triax"
    for file in library(ROOT):
        if Path(file).parts[0] not in BESIDE:
            (package / file).parent.mkdir(parents=True, exist_ok=True)
            for path in (ROOT / file, (ROOT / file).with_suffix(".pyi")):
                if path.exists():
                    shutil.copy(path, (package / file).parent)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.stdout.split()[-3:] == ["1", "1", str(package / "__init__.py")], done.stdout + done.stderr
    assert not any((package / folder).exists() for folder in BESIDE)
