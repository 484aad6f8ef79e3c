"""What an op costs the host: Python and C calls of a microbatch, which do not vary with the machine as times do."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import nn

import triax


def calls_of_a_step(engine: Any, microbatches: int) -> int:
    """Count the calls of one step, those of torch's own Python code among them."""
    engine.set_batch_size(microbatches)
    data = [(torch.zeros(1, 1), torch.zeros(1, 1))] * microbatches
    for _ in range(2):
        engine.train_batch(iter(data))  # what is made once
    count = 0

    def called(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(called)
    try:
        engine.train_batch(iter(data))
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.parametrize(("schedule", "most"), [("gpipe", 235), ("1f1b", 235), ("zb-h1", 500)])
def test_a_microbatch_costs_the_host_few_calls(schedule: str, most: int) -> None:
    """Forward and backward of one linear layer and its loss. Lower the limits when the executor needs fewer calls."""
    model = triax.PipelineModule([triax.LayerSpec(nn.Linear, 1, 1)], loss_fn=nn.functional.mse_loss)
    optimizer = triax.Optimizer("SGD", lr=0.1)
    engine = triax.Engine(model, optimizer=optimizer, batch=triax.Batch(size=16, microbatch=1), schedule=schedule)
    few, many = calls_of_a_step(engine, 16), calls_of_a_step(engine, 48)
    assert (many - few) / 32 <= most
