"""KTO on grids, beside TRL's KTOTrainer over 6 or 20 steps."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import triax
from triax import Grid
from triax.train.methods import kto_loss, with_baseline, with_reference

from support.toy_answers import in_order, model_of, quiet, row_of, run_of, steps, tokenizer
from support.trl_in_float64 import exact

BATCH, BETA, RATE, UNDESIRABLE = 4, 0.2, 0.1, 1.3
WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy"]
PAIRS = [(f"{a} ", b) for a in WORDS for b in WORDS if a != b]
DESIRABLE = ["yyny", "nnnn", "yyyy", "nyny", "nyyn"]  # of a batch of 4: one batch has no desirable answer, one no other
ROWS = [(p, c, DESIRABLE[n // 4 % 5][n % 4] == "y") for n, (p, c) in enumerate(PAIRS)]


def trl_steps(folder: str, count: int) -> list[float]:
    """Train with TRL on one process; return the losses and save the weights before and after."""
    quiet()
    import datasets
    import trl

    args = trl.KTOConfig(beta=BETA, undesirable_weight=UNDESIRABLE, **steps(folder, BATCH, count, RATE))
    with exact():
        model = model_of()
        model.save_pretrained(f"{folder}/first")
        data = datasets.Dataset.from_list([{"prompt": p, "completion": c, "label": good} for p, c, good in ROWS])
        trainer = in_order(trl.KTOTrainer, len(ROWS))(
            model, model_of(), args=args, train_dataset=data, processing_class=tokenizer()
        )
        return [row["loss"] for row in run_of(trainer, folder)]


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


def trained(folder: str, steps: int, axes: dict[str, Any], schedule: str, stage: Any, labels: Any) -> Any:
    """Train on a grid with the model of a folder, and save the weights; return the losses, and the last metrics."""
    grid = Grid(**axes, timeout=60)
    config = triax.config_from_hf(f"{folder}/first")
    layers: Any = triax.load_hf(f"{folder}/first", triax.llama_layers(config))  # type: ignore[arg-type]
    loss_fn = kto_loss(grid, config.vocab_size, beta=BETA, undesirable_weight=UNDESIRABLE, chunk_tokens=12)
    module = triax.PipelineModule(layers, grid=grid, loss_fn=loss_fn, dtype=torch.float64, partition="uniform")
    size = 1 if schedule != "1f1b" else 2  # rows of a microbatch
    engine = triax.Engine(
        module,
        optimizer=partial(torch.optim.SGD, lr=RATE),
        batch=triax.Batch(size=BATCH, microbatch=size, labels=labels),
        schedule=schedule,
        zero=triax.Zero(stage=stage),
    )
    assert isinstance(engine, triax.PipelineEngine)
    reads = labels == "read" or module.is_first
    rows, turned = batches(grid.data.rank, grid.data.size, size) if reads else ([], [])
    rows, turned = with_reference(engine, rows), with_reference(engine, turned)
    count, losses = BATCH // grid.data.size // size, []
    for step in range(steps):
        # TRL reads the rows again from the start.
        here = slice(step % (len(ROWS) // BATCH) * count, (step % (len(ROWS) // BATCH) + 1) * count)
        batch = with_baseline(engine, rows[here], turned[here])
        losses.append(engine.train_batch(iter(batch) if reads else None).item())
    triax.save_hf(engine, f"{folder}/triax")
    return losses, engine.metrics


GRIDS: list[tuple[dict[str, int], str, int, str]] = [
    ({"pipe": 2, "tensor": 2}, "1f1b", 1, "read"),
    ({"data": 2, "pipe": 2}, "zb-v", 2, "sent"),
    ({"context": 2}, "1f1b", 3, "read"),
]


@pytest.mark.parametrize("steps", [6, pytest.param(20, marks=pytest.mark.exhaustive)])
def test_kto_has_trls_losses_and_weights(ranks: Any, tmp_path: Path, steps: int) -> None:
    (losses,) = ranks(1, trl_steps, str(tmp_path), steps, timeout=300)
    last = load_file(tmp_path / "last" / "model.safetensors")
    kls = []
    for axes, schedule, stage, labels in GRIDS:
        everyone = ranks(math.prod(axes.values()), trained, str(tmp_path), steps, axes, schedule, stage, labels)
        for found, metrics in everyone:
            assert found == pytest.approx(losses, rel=1e-10)
            assert metrics == pytest.approx(everyone[0][1], rel=1e-10, nan_ok=True)
        weights = load_file(tmp_path / "triax" / "model.safetensors")
        assert weights.keys() == last.keys()
        for name, weight in last.items():
            torch.testing.assert_close(weights[name], weight, rtol=0, atol=1e-10, msg=name)
        kls.append(everyone[0][1]["kl"])
    assert len(losses) == steps and max(losses) - min(losses) > 0.01
    assert kls[0] > 0 and kls == pytest.approx(kls[:1] * 3, rel=1e-10)


def test_kto_losses_refuse_mistakes() -> None:
    grid = Grid()
    with pytest.raises(ValueError, match="beta is 0"):
        kto_loss(grid, 8, beta=0)
    with pytest.raises(ValueError, match="undesirable_weight is -1"):
        kto_loss(grid, 8, undesirable_weight=-1)
    loss_fn, logits = kto_loss(grid, 8), torch.zeros(2, 3, 8)
    labels = {"labels": torch.zeros(2, 3, dtype=torch.long)}
    with pytest.raises(ValueError, match=r"labels\['baseline'\], which is None: make each step's"):
        loss_fn(logits, labels)
    labels["baseline"] = torch.zeros(2)
    with pytest.raises(ValueError, match=r"labels\['desirable'\], a torch.bool tensor of shape \(2,\)"):
        loss_fn(logits, labels | {"desirable": torch.zeros(2)})
    with pytest.raises(ValueError, match=r"labels\['reference'\], which is None: make the microbatches"):
        loss_fn(logits, labels | {"desirable": torch.tensor([True, False])})
