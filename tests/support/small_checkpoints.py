"""Small engines for tests of checkpoints, and the index of a checkpoint with the checksum that belongs to it."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import torch
from torch import nn

import triax
from triax.checkpoint.format.folder import verify
from triax.checkpoint.format.index import read_index


def linear(optimizer: dict[str, Any], frozen: bool = False) -> Any:
    """Return an engine of two layers with an optimizer, after one step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)).double()
    model[0].requires_grad_(not frozen)
    engine = triax.initialize(model=model, config={"train_micro_batch_size_per_gpu": 2, "optimizer": optimizer})[0]
    engine.backward(engine(torch.ones(2, 4, dtype=torch.float64)).square().mean())
    engine.step()
    return engine


def small_engine(seed: int = 0, stage: int = 0, **section: Any) -> Any:
    """Return an engine of one layer, whose checkpoints are quick to write. ``section``: keys of ``checkpoint``."""
    torch.manual_seed(seed)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.01, "momentum": 0.9}},
        "zero_optimization": {"stage": stage},
        "checkpoint": section,
    }
    return triax.initialize(model=nn.Linear(4, 4), config=config)[0]


def small_steps(engine: Any, steps: int = 1) -> float:
    """Train a small engine, and return the last loss."""
    for _ in range(steps):
        loss = engine(torch.ones(2, 4)).square().mean()
        engine.backward(loss)
        engine.step()
    return float(loss.detach())


def problems(folder: Any) -> list[str]:
    """Return what ``verify`` finds in a checkpoint."""
    return [*verify(folder, read_index(folder))]


def write_index(folder: Path, content: dict[str, Any]) -> None:
    """Write an index with any content, and the checksum that belongs to it."""
    lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in content.items() if key != "checksum"]
    write_index_text(folder, "{\n" + ",\n".join(lines) + ",\n")


def write_index_text(folder: Path, text: str) -> None:
    """Write an index that begins with a text, and ends with its checksum."""
    data = text.encode()
    (folder / "index.json").write_bytes(data + f'"checksum": "{zlib.crc32(data):08x}"\n}}\n'.encode())
