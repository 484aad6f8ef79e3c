"""Log-probabilities of answers by the model as it is now, for losses that compare with them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .answer_losses import BASELINE, REFERENCE, AnswerLoss

if TYPE_CHECKING:
    from ...engine.pipeline_engine import PipelineEngine

Microbatches = Sequence[tuple[Any, Any]]


def with_reference(engine: PipelineEngine, microbatches: Microbatches) -> list[tuple[Any, Any]]:
    """Return microbatches whose labels have the log-probability of each row by the model as it is now. Collective.

    Called before the first step, the reference is the model that training starts from, and no second model is held.

    Args:
        engine: engine of a model whose ``loss_fn`` is a ``preference_loss`` or a ``kto_loss``.
        microbatches: microbatches of this replica, (inputs, labels); labels are a dict with ``labels``. On a rank that
            does not read data (``batch.labels="sent"``) an empty list.

    Returns:
        The microbatches, with ``reference`` (B,) in their labels.

    Raises:
        TypeError: the model has another loss function.
    """
    found = row_log_probs(engine, microbatches)
    return [(x, {**labels, REFERENCE: rows}) for (x, labels), rows in zip(microbatches, found, strict=False)]


def with_baseline(engine: PipelineEngine, microbatches: Microbatches, mismatched: Microbatches) -> list[Any]:
    """Return the microbatches of a step with KTO's baseline, by the model as it is now. Collective.

    Called before each step. The baseline is max(0, mean of log p - r) over the rows of ``mismatched`` of all replicas.

    Args:
        engine: engine of a model whose ``loss_fn`` is a ``kto_loss``.
        microbatches: this replica's microbatches of the step.
        mismatched: this replica's microbatches of rows whose answer belongs to another prompt, with ``reference`` in
            their labels: those of ``with_reference``. TRL takes the batch's own prompts and answers, each answer at the
            next prompt. On a rank that does not read data both are empty lists.

    Returns:
        The microbatches, with ``baseline`` (B,) in their labels, the same number in each row.

    Raises:
        TypeError: the model has another loss function.
        KeyError: the mismatched rows have no ``reference``.
    """
    found = row_log_probs(engine, mismatched)
    sums = [(rows - labels[REFERENCE]).sum().item() for (_, labels), rows in zip(mismatched, found, strict=False)]
    count = sum(len(rows) for rows in found)
    # Ranks that read no data have no references: the first rank of the pipe axis that has them tells the others.
    total = next(
        (each for each in engine.grid.pipe.all_gather_json(sum(sums) if sums else None) if each is not None), 0
    )
    whole = torch.tensor([total, count], dtype=torch.float64, device=engine.grid.device)
    engine.grid.data.all_reduce(whole)
    baseline = (whole[0] / whole[1]).clamp(min=0).cpu()
    return [(x, {**labels, BASELINE: baseline.expand(len(labels["labels"]))}) for x, labels in microbatches]


def row_log_probs(engine: PipelineEngine, microbatches: Microbatches) -> list[Tensor]:
    """Return the log-probabilities of the rows of each microbatch by the model as it is now. Collective.

    Args:
        engine: engine of a model whose ``loss_fn`` is a ``preference_loss`` or a ``kto_loss``.
        microbatches: as for ``with_reference``.

    Returns:
        For each microbatch float64 (B,) on the CPU, on every rank of the pipe axis, also on those that read no data.

    Raises:
        TypeError: the model has another loss function.
    """
    grid, module = engine.grid, engine.module
    answers: Any = getattr(module.loss_fn, "loss_fn", None)
    if not isinstance(answers, AnswerLoss):
        raise TypeError(
            f"the engine's loss_fn is a {type(module.loss_fn).__name__}, which takes no answers: make the model with "
            "loss_fn=triax.methods.preference_loss(...) or kto_loss(...)"
        )
    count = max(grid.pipe.all_gather_json(len(microbatches)))
    with answers.recording() as records:
        engine.eval_batch(iter(microbatches) if microbatches else None, num_micro_batches=count)
    last = module.placement[-1]
    sizes = grid.pipe.all_gather_json([len(each) for each in records])[last]
    rows = torch.cat(records) if records else torch.empty(sum(sizes), dtype=torch.float32, device=grid.device)
    rows = rows.double()
    grid.pipe.broadcast(rows, last)
    return list(rows.cpu().split(sizes))
