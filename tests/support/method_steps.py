"""Steps of post-training methods on a grid, beside the steps of TRL or of the equations on one process.

A folder has the models of one comparison: ``first`` before the steps; ``last`` and ``triax`` after them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import triax
from triax import Grid

WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy"]
STEPS = pytest.mark.parametrize("steps", [3, pytest.param(20, marks=pytest.mark.exhaustive)])


class Place(NamedTuple):
    """Where and how a model is trained."""

    axes: dict[str, Any]
    schedule: str = "1f1b"
    stage: Any = 1
    labels: Any = "read"
    sequence_parallel: bool = False

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return math.prod(self.axes.values())


GRIDS = [
    Place({"pipe": 2, "tensor": 2}),
    Place({"data": 2, "pipe": 2}, "zb-v", 2, "sent"),
    Place({"context": 2}, stage=3),
]
# Those of a few steps in each run.
QUICK = [
    Place({"pipe": 2, "tensor": 2}, "zb-v", 1, "sent"),
    Place({"data": 2}, stage=2),
    Place({"context": 2}, stage=3),
]


def grids(steps: int) -> list[Place]:
    """Return the places of a comparison of so many steps."""
    return QUICK if steps < 20 else GRIDS


def engine_at(
    place: Place, grid: Grid, folder: str, loss_fn: Any, size: int, microbatch: int, rate: float | None
) -> Any:
    """Return the engine of a folder's model in float64. It has SGD if there is a rate."""
    layers = triax.load_hf(folder, sequence_parallel=place.sequence_parallel)
    return triax.Engine(
        triax.PipelineModule(layers, grid=grid, loss_fn=loss_fn, dtype=torch.float64, partition="uniform"),
        optimizer=None if rate is None else partial(torch.optim.SGD, lr=rate),
        batch=triax.Batch(size=size, microbatch=microbatch, labels=place.labels),
        schedule=place.schedule,
        zero=triax.Zero(stage=place.stage),
    )


def gets_data(engine: Any, place: Place) -> bool:
    """Return True if this rank is given microbatches: labels that are sent are read by the first stage alone."""
    return place.labels == "read" or bool(engine.module.is_first)


def descend(model: torch.nn.Module, loss: Tensor, rate: float) -> float:
    """Take a step of SGD in plain PyTorch; return the loss."""
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    with torch.no_grad():
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            parameter.sub_(rate * gradient)
    return loss.item()


def label_log_probs(model: Any, ids: Tensor, labels: Tensor) -> Tensor:
    """Return the log-probabilities of the labels (rows, T) in plain PyTorch, 0 where a label does not count."""
    found: Tensor = model(input_ids=ids).logits.log_softmax(-1)
    return found.gather(-1, labels.clamp(min=0)[..., None])[..., 0] * (labels >= 0)


def same_weights(found: Path, wanted: Path) -> None:
    """Compare the weights of two folders."""
    right, weights = (load_file(folder / "model.safetensors") for folder in (wanted, found))
    assert weights.keys() == right.keys()
    for name, weight in right.items():
        torch.testing.assert_close(weights[name], weight, rtol=0, atol=1e-10, msg=name)


def same_steps(
    ranks: Any, trained: Callable[..., Any], folder: Path, wanted: list[list[float]], place: Place, *case: Any
) -> dict[str, Any]:
    """Train at a place, where each rank has the numbers of all steps, and the weights of ``last``; return the metrics.

    ``trained`` takes the folder, the number of steps, the place and the case; it returns the numbers and the metrics.
    """
    everyone = ranks(place.ranks, trained, str(folder), len(wanted), place, *case, timeout=120)
    metrics: dict[str, Any] = everyone[0][1]
    for found, own in everyone:
        for step, right in zip(found, wanted, strict=True):
            assert step == pytest.approx(right, rel=1e-10, abs=1e-12), place
        assert repr(own) == repr(metrics)  # some may be nan
    same_weights(folder / "triax", folder / "last")
    return metrics
