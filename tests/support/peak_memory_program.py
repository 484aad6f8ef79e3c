"""Program of tests/engine/monitor/test_accounting.py: fresh processes train and print what they held and counted.

python peak_memory_program.py STAGE RANKS PRECISION
"""

from __future__ import annotations

import itertools
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

import triax
from triax.grid.launcher.launch import launch
from triax.models.gpt import GPTConfig, GPTLoss, gpt_layers

LENGTH, VOCABULARY = 64, 256


def engine(grid: triax.Grid, stage: int, precision: str, width: int, layers: int) -> triax.PipelineEngine:
    shape = GPTConfig(
        vocab_size=VOCABULARY,
        max_position_embeddings=LENGTH,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=4,
    )
    model = triax.PipelineModule(gpt_layers(shape), grid=grid, loss_fn=GPTLoss(grid, vocab_size=VOCABULARY))
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 2**20},
    }
    if precision != "fp32":
        config[precision] = {"enabled": True, **({"initial_scale_power": 8} if precision == "fp16" else {})}
    return triax.initialize(model=model, config=config)[0]


def train(made: triax.PipelineEngine, steps: int) -> dict[str, Any]:
    ids = torch.randint(VOCABULARY, (2, LENGTH + 1))
    data = itertools.repeat((ids[:, :-1], ids[:, 1:]))
    for step in range(steps):
        made.record_memory = step == steps - 1
        made.train_batch(data)
    return made.memory_report()


def measure(stage: int, precision: str, folder: str) -> None:
    grid = triax.Grid()
    # What a process holds that trains next to nothing: imports, kernels, connections.
    train(engine(grid, stage, precision, 8, 1), 2)
    footprint = grid.peak_memory()
    report = train(engine(grid, stage, precision, 512, 8), 2)
    Path(folder, str(grid.rank)).write_text(json.dumps({**report, "footprint": footprint}))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        code = launch(measure, int(sys.argv[1]), sys.argv[3], folder, ranks=int(sys.argv[2]), threads=1)
        if not code:
            print(json.dumps([json.loads(path.read_text()) for path in sorted(Path(folder).iterdir())]))
    sys.exit(code)
