"""KTO on grids, beside TRL's KTOTrainer over 3 or 20 steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import triax
from triax import Grid
from triax.train.methods import kto_loss, with_baseline, with_reference

from support.method_steps import STEPS, WORDS, Place, engine_at, gets_data, grids, same_steps
from support.toy_answers import LETTERS, in_order, model_of, quiet, row_of, run_of, steps, tokenizer
from support.trl_in_float64 import exact

BATCH, BETA, RATE, UNDESIRABLE = 4, 0.2, 0.1, 1.3
PAIRS = [(f"{a} ", b) for a in WORDS for b in WORDS if a != b]
DESIRABLE = ["yyny", "nnnn", "yyyy", "nyny", "nyyn"]  # of a batch of 4: one batch has no desirable answer, one no other
ROWS = [(p, c, DESIRABLE[n // 4 % 5][n % 4] == "y") for n, (p, c) in enumerate(PAIRS)]


def trl_steps(folder: str, count: int) -> list[list[float]]:
    """Train with TRL on one process; return the losses and save the weights before and after."""
    quiet()
    import datasets
    import trl

    args = trl.KTOConfig(beta=BETA, undesirable_weight=UNDESIRABLE, **steps(folder, BATCH, count, RATE))
    with exact():
        model = model_of()
        model.save_pretrained(f"{folder}/first")
        data = datasets.Dataset.from_list([{"prompt": p, "completion": c, "label": good} for p, c, good in ROWS])
        trainer = in_order(trl.KTOTrainer, range(len(ROWS)))(
            model, model_of(), args=args, train_dataset=data, processing_class=tokenizer()
        )
        return [[row["loss"]] for row in run_of(trainer, folder)]


def microbatch(rows: list[tuple[str, str, bool]]) -> tuple[Tensor, dict[str, Tensor]]:
    ids, labels = (torch.stack(each) for each in zip(*(row_of(p, c) for p, c, _ in rows), strict=True))
    return ids, {"labels": labels, "desirable": torch.tensor([good for *_, good in rows])}


def batches(replica: int, replicas: int, size: int) -> tuple[list[Any], list[Any]]:
    """Return a replica's microbatches of all batches, and those with each answer at the next prompt of its batch."""
    found: tuple[list[Any], list[Any]] = [], []
    for first in range(0, len(ROWS), BATCH):
        rows = ROWS[first : first + BATCH]
        turned = [(p, c, good) for (p, *_), (_, c, good) in zip(rows, rows[-1:] + rows[:-1], strict=True)]
        share = BATCH // replicas
        for kind, each in zip(found, (rows, turned), strict=True):
            mine = each[replica * share : (replica + 1) * share]
            kind += [microbatch(mine[at : at + size]) for at in range(0, share, size)]
    return found


def trained(folder: str, steps: int, place: Place) -> tuple[list[list[float]], dict[str, Any]]:
    """Train with the model of a folder, and save the weights; return the losses, and the last metrics."""
    grid = Grid(**place.axes, timeout=60)
    loss_fn = kto_loss(grid, len(LETTERS), beta=BETA, undesirable_weight=UNDESIRABLE, chunk_tokens=12)
    size = 1 if place.schedule != "1f1b" else 2  # rows of a microbatch
    engine = engine_at(place, grid, f"{folder}/first", loss_fn, BATCH, size, RATE)
    reads = gets_data(engine, place)
    rows, turned = batches(grid.data.rank, grid.data.size, size) if reads else ([], [])
    rows, turned = with_reference(engine, rows), with_reference(engine, turned)
    count, losses = BATCH // grid.data.size // size, []
    for step in range(steps):
        # TRL reads the rows again from the start.
        here = slice(step % (len(ROWS) // BATCH) * count, (step % (len(ROWS) // BATCH) + 1) * count)
        batch = with_baseline(engine, rows[here], turned[here])
        losses.append([engine.train_batch(iter(batch) if reads else None).item()])
    triax.save_hf(engine, f"{folder}/triax")
    return losses, engine.metrics


@STEPS
def test_kto_losses_and_weights_equal_trls(ranks: Any, tmp_path: Path, steps: int) -> None:
    (losses,) = ranks(1, trl_steps, str(tmp_path), steps, timeout=300)
    assert len(losses) == steps and max(losses)[0] - min(losses)[0] > 0.01
    kls = [same_steps(ranks, trained, tmp_path, losses, place)["kl"] for place in grids(steps)]
    assert kls[0] > 0 and kls == pytest.approx(kls[:1] * 3, rel=1e-10)
