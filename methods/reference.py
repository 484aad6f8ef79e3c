"""Log-probabilities of answers by the model as it is now, for losses that compare with them later."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from .preferences import REFERENCE

if TYPE_CHECKING:
    from ..engine.pipeline_engine import PipelineEngine


def with_reference(engine: PipelineEngine, microbatches: Sequence[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    """Return microbatches whose labels have the log-probability of each row by the model as it is now. Collective.

    Called before the first step, the reference is the model that training starts from, and no second model is held.

    Args:
        engine: engine of a model whose ``loss_fn`` is a ``preference_loss``.
        microbatches: microbatches of this replica, (inputs, labels); labels are a dict with ``labels``. On a rank that
            does not read data (``batch.labels="sent"``) an empty list.

    Returns:
        The microbatches, with ``reference`` (B,) in their labels.

    Raises:
        TypeError: the model has another loss function.
    """
    grid, module = engine.grid, engine.module
    pairs: Any = getattr(module.loss_fn, "loss_fn", None)
    if not hasattr(pairs, "recording"):
        raise TypeError(
            f"with_reference was given an engine whose loss_fn is a {type(module.loss_fn).__name__}: make the model "
            "with loss_fn=triax.methods.preference_loss(...)"
        )
    count = max(grid.pipe.all_gather_json(len(microbatches)))
    with pairs.recording() as records:
        engine.eval_batch(iter(microbatches) if microbatches else None, num_micro_batches=count)
    last = module.placement[-1]
    sizes = grid.pipe.all_gather_json([len(each) for each in records])[last]
    rows = torch.cat(records) if records else torch.empty(sum(sizes), dtype=torch.float32, device=grid.device)
    rows = rows.double()
    grid.pipe.broadcast(rows, last)
    return [
        (inputs, {**labels, REFERENCE: part})
        for (inputs, labels), part in zip(microbatches, rows.cpu().split(sizes), strict=False)
    ]
