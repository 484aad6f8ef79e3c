"""Preference losses on grids, beside TRL's DPOTrainer and the papers' equations in plain PyTorch: 3 or 20 steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import triax
from triax import Grid
from triax.train.methods import preference_loss, with_reference

from support.method_steps import (
    STEPS,
    WORDS,
    Place,
    descend,
    engine_at,
    gets_data,
    grids,
    label_log_probs,
    same_steps,
)
from support.toy_answers import LETTERS, in_order, model_of, quiet, row_of, run_of, steps, tokenizer
from support.trl_in_float64 import exact

PAIRS, BETA = 4, 0.2
RATES = {"dpo": 0.05, "ipo": 0.002, "simpo": 0.05, "orpo": 0.05}  # at which no run grows, as errors would with it
ROWS = [(f"{a} ", b, a) for a in WORDS for b in WORDS if a != b]  # prompt, better answer, worse answer


def trl_steps(folder: str, kind: str, count: int) -> list[list[float]]:
    """Train with TRL on one process; return the losses and save the weights before and after."""
    quiet()
    import datasets
    import trl

    args = trl.DPOConfig(
        beta=BETA, loss_type=[{"dpo": "sigmoid"}.get(kind, kind)], **steps(folder, PAIRS, count, RATES[kind])
    )
    with exact():
        model = model_of()
        model.save_pretrained(f"{folder}/first")
        data = datasets.Dataset.from_list([{"prompt": p, "chosen": b, "rejected": w} for p, b, w in ROWS])
        trainer = in_order(trl.DPOTrainer, range(len(ROWS)))(
            model, model_of(), args=args, train_dataset=data, processing_class=tokenizer()
        )
        return [[row["loss"]] for row in run_of(trainer, folder)]


def microbatches(first: int, count: int) -> tuple[Tensor, dict[str, Tensor]]:
    """Return a microbatch of the pairs from ``first`` on."""
    rows = [row_of(p, b) for p, b, _ in ROWS[first : first + count]]
    rows += [row_of(p, w) for p, _, w in ROWS[first : first + count]]
    ids, labels = (torch.stack(each) for each in zip(*rows, strict=True))
    return ids, {"labels": labels}


def trained(folder: str, steps: int, place: Place, kind: Any) -> tuple[list[list[float]], dict[str, Any]]:
    """Train with the model of a folder, and save the weights; return the losses, and the last metrics."""
    grid = Grid(**place.axes, timeout=60)
    margin = 0.5 if kind == "simpo" else 0.0
    loss_fn: Any = preference_loss(grid, len(LETTERS), kind, beta=BETA, margin=margin, chunk_tokens=12)
    count = 1 if place.schedule != "1f1b" or grid.data.size > 1 else 2  # pairs of a microbatch
    engine = engine_at(place, grid, f"{folder}/first", loss_fn, 2 * PAIRS, 2 * count, RATES[kind])
    share = PAIRS // grid.data.size
    starts = [
        step * PAIRS + grid.data.rank * share + first for step in range(steps) for first in range(0, share, count)
    ]
    # TRL reads the 56 rows again from the start, 14 batches of an epoch.
    data = [microbatches(start % len(ROWS), count) for start in starts] if gets_data(engine, place) else []
    if loss_fn.loss_fn.uses_reference:
        data = with_reference(engine, data)
    batches = iter(data) if data else None
    losses = [[engine.train_batch(batches).item()] for _ in range(steps)]
    metrics = engine.metrics
    triax.save_hf(engine, f"{folder}/triax")
    return losses, metrics


def plain_steps(folder: str, kind: str, count: int) -> list[list[float]]:
    """Train by the paper's equations in plain PyTorch, and save the weights."""
    with exact():
        model = model_of()
        model.save_pretrained(f"{folder}/first")
        losses = []
        for step in range(count):
            ids, labels = microbatches(step * PAIRS % len(ROWS), PAIRS)
            found, counts = label_log_probs(model, ids, labels["labels"]), (labels["labels"] >= 0).sum(1)
            better, worse = (found.sum(1) / counts).chunk(2)
            if kind == "simpo":
                loss = -F.logsigmoid(BETA * (better - worse) - 0.5).mean()
            else:
                odds = [each.exp() / (1 - each.exp()) for each in (better, worse)]
                nll = -found[:PAIRS].sum() / counts[:PAIRS].sum()
                loss = nll - BETA * F.logsigmoid(torch.log(odds[0] / odds[1])).mean()
            losses.append([descend(model, loss, RATES[kind])])
        model.save_pretrained(f"{folder}/last")
    return losses


@STEPS
@pytest.mark.parametrize("kind", ["dpo", "ipo"])
def test_preference_losses_and_weights_equal_trls(ranks: Any, tmp_path: Path, kind: str, steps: int) -> None:
    (losses,) = ranks(1, trl_steps, str(tmp_path), kind, steps, timeout=300)
    assert len(losses) == steps and max(losses)[0] - min(losses)[0] > 0.01
    for place in grids(steps) if kind == "dpo" else grids(steps)[:1]:
        metrics = same_steps(ranks, trained, tmp_path, losses, place, kind)
    assert metrics["rewards/margins"] != 0
    assert list(metrics) == [kind, *(f"rewards/{name}" for name in ("chosen", "rejected", "margins", "accuracies"))]


@STEPS
@pytest.mark.parametrize("kind", ["simpo", "orpo"])
def test_preference_losses_and_weights_follow_the_equations(ranks: Any, tmp_path: Path, kind: str, steps: int) -> None:
    (losses,) = ranks(1, plain_steps, str(tmp_path), kind, steps, timeout=300)
    for place in grids(steps)[1:]:
        same_steps(ranks, trained, tmp_path, losses, place, kind)
