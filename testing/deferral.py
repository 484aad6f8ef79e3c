"""Weight gradients that a schedule which splits the backward pass computes at once, as it cannot defer them."""

from __future__ import annotations

from typing import Any

import torch

from ..base.deferred import Deferred
from ..base.nest import tensors_of
from ..pipe.backward import deferring
from ..pipe.module import PipelineModule


def not_deferred(model: PipelineModule, inputs: Any, labels: Any, fields: dict[str, Any]) -> list[str]:
    """Run a microbatch on a model of one stage, and return the names of matrices whose gradient is not deferred."""
    deferred = Deferred()
    with deferring(deferred):
        loss = model.loss(model.run_stage(0, inputs, fields), labels)
        roots = [tensor.sum() for tensor in tensors_of(loss) if tensor.requires_grad]
        if roots:
            torch.autograd.backward(roots)
    return [name for name, parameter in model.named_parameters() if parameter.dim() > 1 and parameter.grad is not None]
