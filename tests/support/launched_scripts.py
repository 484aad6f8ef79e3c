"""Scripts that tests of the launcher start, and waiting for what they write."""

from __future__ import annotations

from pathlib import Path

SCRIPT = """
import os, signal, sys, time
import torch
from triax.grid import Grid

attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
grid = Grid(timeout=60)
x = torch.ones(1)
grid.world.all_reduce(x)
print(f"rank {grid.rank} of {int(x)}, attempt {attempt}, {sys.argv[1:]}", flush=True)
"""


def written(folder: Path, body: str) -> Path:
    path = folder / "script.py"
    path.write_text(SCRIPT + body)
    return path


ELSEWHERE = "env HOST={host} sh -c {command}"  # a host that is this one
