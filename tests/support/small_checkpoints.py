"""A small engine for tests of checkpoints."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import triax


def linear(optimizer: dict[str, Any], frozen: bool = False) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)).double()
    model[0].requires_grad_(not frozen)
    engine = triax.initialize(model=model, config={"train_micro_batch_size_per_gpu": 2, "optimizer": optimizer})[0]
    engine.backward(engine(torch.ones(2, 4, dtype=torch.float64)).square().mean())
    engine.step()
    return engine
