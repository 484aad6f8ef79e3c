"""Which parameters of a model get a gradient, and which weight gradients a split backward pass computes later."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ..base.nest import tensors_of
from ..pipe.backward import Deferred
from ..pipe.module import PipelineModule


class Gradients(NamedTuple):
    """Names of parameters by how they get their gradients in one microbatch.

    Attributes:
        missing: trained, and without a gradient, or with zeros alone.
        at_once: matrices whose gradient a schedule that splits the backward pass, such as ``zb-h1``, cannot defer.
        matrices: number of matrices that are trained.
    """

    missing: list[str]
    at_once: list[str]
    matrices: int


def gradients_of(model: PipelineModule, inputs: Any, labels: Any, fields: dict[str, Any]) -> Gradients:
    """Run a microbatch forward and backward on a model of one stage, with a split backward pass."""
    deferred = Deferred()
    later: set[torch.Tensor] = set()
    with deferred.backward():
        loss = model.loss(model.run_stage(0, inputs, fields), labels)
        roots = [each for each in tensors_of(loss) if each.requires_grad]
        torch.autograd.backward([each.sum() for each in roots])
    deferred.run(lambda _: None, later.add)
    trained = {name: each for name, each in model.named_parameters() if each.requires_grad}
    missing = [name for name, each in trained.items() if each.grad is None or not bool(each.grad.any())]
    matrices = [name for name, each in trained.items() if each.dim() > 1]
    at_once = [name for name in matrices if trained[name] not in later and name not in missing]
    return Gradients(missing, at_once, len(matrices))
