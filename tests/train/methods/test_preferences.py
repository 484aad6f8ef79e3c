"""Preference losses on grids, beside TRL's DPOTrainer and the papers' equations in plain PyTorch: 6 or 20 steps."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

import triax
from triax import Grid
from triax.train.methods import preference_loss, with_reference

from support.toy_answers import in_order, model_of, quiet, row_of, run_of, steps, tokenizer
from support.trl_in_float64 import exact

PAIRS, BETA = 4, 0.2
STEPS = pytest.mark.parametrize("steps", [6, pytest.param(20, marks=pytest.mark.exhaustive)])
RATES = {"dpo": 0.05, "ipo": 0.002, "simpo": 0.05, "orpo": 0.05}  # at which no run grows, as errors would with it
WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy"]
ROWS = [(f"{a} ", b, a) for a in WORDS for b in WORDS if a != b]  # prompt, better answer, worse answer


def trl_steps(folder: str, kind: str, count: int) -> list[float]:
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
        trainer = in_order(trl.DPOTrainer, len(ROWS))(
            model, model_of(), args=args, train_dataset=data, processing_class=tokenizer()
        )
        return [row["loss"] for row in run_of(trainer, folder)]


def microbatches(first: int, count: int) -> tuple[Tensor, dict[str, Tensor]]:
    """Return a microbatch of the pairs from ``first`` on."""
    rows = [row_of(p, b) for p, b, _ in ROWS[first : first + count]]
    rows += [row_of(p, w) for p, _, w in ROWS[first : first + count]]
    ids, labels = (torch.stack(each) for each in zip(*rows, strict=True))
    return ids, {"labels": labels}


def trained(
    folder: str, kind: str, steps: int, axes: dict[str, Any], schedule: str, stage: Any, labels: Any = "read"
) -> tuple[list[float], dict[str, Any]]:
    """Train on a grid with the model of a folder, and save the weights; return the losses, and the last metrics."""
    grid = Grid(**axes, timeout=60)
    config = triax.config_from_hf(f"{folder}/first")
    options = {"attention": "ring"} if "context" in axes else {}
    layers: Any = triax.load_hf(f"{folder}/first", triax.llama_layers(config, **options))  # type: ignore[arg-type]
    margin = 0.5 if kind == "simpo" else 0.0
    loss_fn = preference_loss(grid, config.vocab_size, kind, beta=BETA, margin=margin, chunk_tokens=12)  # type: ignore[arg-type]
    module = triax.PipelineModule(layers, grid=grid, loss_fn=loss_fn, dtype=torch.float64, partition="uniform")
    count = 1 if schedule != "1f1b" or grid.data.size > 1 else 2  # pairs of a microbatch
    engine = triax.Engine(
        module,
        optimizer=partial(torch.optim.SGD, lr=RATES[kind]),
        batch=triax.Batch(size=2 * PAIRS, microbatch=2 * count, labels=labels),
        schedule=schedule,
        zero=triax.Zero(stage=stage),
    )
    assert isinstance(engine, triax.PipelineEngine)
    share = PAIRS // grid.data.size
    starts = [
        step * PAIRS + grid.data.rank * share + first for step in range(steps) for first in range(0, share, count)
    ]
    # TRL reads the 56 rows again from the start, 14 batches of an epoch.
    starts = [start % len(ROWS) for start in starts]
    data = [microbatches(start, count) for start in starts]
    if labels == "sent" and not module.is_first:
        data = []
    if loss_fn.loss_fn.uses_reference:  # type: ignore[attr-defined]
        data = with_reference(engine, data)
    batches = iter(data) if data else None
    losses = [engine.train_batch(batches).item() for _ in range(steps)]
    metrics = engine.metrics
    triax.save_hf(engine, f"{folder}/triax")
    return losses, metrics


def plain_steps(folder: str, kind: str, count: int) -> list[float]:
    """Train by the paper's equations in plain PyTorch, and save the weights."""
    with exact():
        model = model_of()
        model.save_pretrained(f"{folder}/first")
        losses = []
        for step in range(count):
            ids, labels = microbatches(step * PAIRS % len(ROWS), PAIRS)
            wanted, counts = labels["labels"], (labels["labels"] >= 0).sum(1)
            logits = model(input_ids=ids).logits
            found = logits.log_softmax(-1).gather(-1, wanted.clamp(min=0)[..., None])[..., 0] * (wanted >= 0)
            better, worse = (found.sum(1) / counts).chunk(2)
            if kind == "simpo":
                loss = -F.logsigmoid(BETA * (better - worse) - 0.5).mean()
            else:
                odds = [each.exp() / (1 - each.exp()) for each in (better, worse)]
                nll = -found[:PAIRS].sum() / counts[:PAIRS].sum()
                loss = nll - BETA * F.logsigmoid(torch.log(odds[0] / odds[1])).mean()
            gradients = torch.autograd.grad(loss, list(model.parameters()))
            with torch.no_grad():
                for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                    parameter.sub_(RATES[kind] * gradient)
            losses.append(loss.item())
        model.save_pretrained(f"{folder}/last")
    return losses


def same_run(
    ranks: Any, folder: Path, losses: list[float], kind: str, axes: dict[str, int], schedule: str, *more: Any
) -> dict[str, Any]:
    """Check that all steps on a grid have the losses and the weights of a folder's run; return the metrics."""
    last = load_file(folder / "last" / "model.safetensors")
    everyone = ranks(math.prod(axes.values()), trained, str(folder), kind, len(losses), axes, schedule, *more)
    for found, own in everyone:
        assert found == pytest.approx(losses, rel=1e-10) and own == everyone[0][1]
    weights = load_file(folder / "triax" / "model.safetensors")
    assert weights.keys() == last.keys()
    for name, weight in last.items():
        torch.testing.assert_close(weights[name], weight, rtol=0, atol=1e-10, msg=name)
    metrics: dict[str, Any] = everyone[0][1]
    return metrics


GRIDS: list[tuple[dict[str, int], str, int, str]] = [
    ({"pipe": 2, "tensor": 2}, "1f1b", 1, "read"),
    ({"data": 2, "pipe": 2}, "zb-v", 2, "sent"),
    ({"context": 2}, "1f1b", 3, "read"),
]


@STEPS
@pytest.mark.parametrize("kind", ["dpo", "ipo"])
def test_preference_losses_and_weights_are_those_of_trl(ranks: Any, tmp_path: Path, kind: str, steps: int) -> None:
    (losses,) = ranks(1, trl_steps, str(tmp_path), kind, steps, timeout=300)
    grids = GRIDS if kind == "dpo" else GRIDS[:1]
    for axes, schedule, stage, labels in grids:
        metrics = same_run(ranks, tmp_path, losses, kind, axes, schedule, stage, labels)
    assert len(losses) == steps
    assert max(losses) - min(losses) > 0.01 and metrics["rewards/margins"] != 0
    assert list(metrics) == [kind, *(f"rewards/{name}" for name in ("chosen", "rejected", "margins", "accuracies"))]


@STEPS
@pytest.mark.parametrize("kind", ["simpo", "orpo"])
def test_preference_losses_and_weights_are_the_equations(ranks: Any, tmp_path: Path, kind: str, steps: int) -> None:
    (losses,) = ranks(1, plain_steps, str(tmp_path), kind, steps, timeout=300)
    for axes, schedule, stage, labels in GRIDS[1:]:
        same_run(ranks, tmp_path, losses, kind, axes, schedule, stage, labels)


def test_preference_losses_refuse_mistakes() -> None:
    grid = Grid()
    with pytest.raises(ValueError, match="there is no preference loss 'dop'"):
        preference_loss(grid, 8, "dop")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="beta is 0"):
        preference_loss(grid, 8, beta=0)
    with pytest.raises(ValueError, match="dpo has no margin, but simpo has"):
        preference_loss(grid, 8, margin=0.5)
    labels, logits = torch.zeros(2, 3, dtype=torch.long), torch.zeros(2, 3, 8)
    with pytest.raises(ValueError, match=r"labels\['reference'\], which is None: make the"):
        preference_loss(grid, 8)(logits, {"labels": labels})
    with pytest.raises(ValueError, match="has 1 rows, but pairs need an even number"):
        preference_loss(grid, 8, "simpo")(logits[:1], {"labels": labels[:1]})
