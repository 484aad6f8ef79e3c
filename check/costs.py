"""Costs of layers on one process: time, bytes of activations, and weights that zero bubble cannot defer."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..base.nest import tensors_of
from ..grid import layout_of
from ..grid.loss_pair import is_pair
from ..pipe.backward import Deferred, SplitBackward
from ..pipe.module import PipelineModule


class Cost(NamedTuple):
    """Costs of one entry of the list of layers, for one microbatch.

    Attributes:
        name: name of the layer.
        forward: seconds of the forward pass; the best of three.
        activations: bytes that the backward pass keeps of it, without parameters and what earlier layers keep.
        undeferred: names of the parameters whose gradient a zero-bubble schedule computes at once, in I instead of W.
    """

    name: str
    forward: float
    activations: int
    undeferred: tuple[str, ...]


def measure(module: PipelineModule, microbatch: tuple[Any, Any]) -> list[Cost]:
    """Measure the layers of a model on one process, and leave no gradients."""
    inputs, labels = microbatch
    seconds = [_forward_seconds(module, inputs) for _ in range(3)]
    best = {index: min(each[index] for each in seconds) for index in seconds[0]}
    kept = _activations(module, inputs)
    undeferred = _undeferred(module, inputs, labels)
    layers = [str(i) for i in range(len(module.layer_specs))]
    return [
        Cost(
            f"layers.{i}",
            best.get(int(i), 0.0),
            kept.get(int(i), 0),
            tuple(name for name in undeferred if name.startswith(f"layers.{i}.")),
        )
        for i in layers
    ]


def _forward_seconds(module: PipelineModule, inputs: Any) -> dict[int, float]:
    found: dict[int, float] = {}
    last = time.perf_counter()

    def ended(index: int, value: Any) -> None:
        nonlocal last
        now = time.perf_counter()
        found[index], last = now - last, now

    _with_hook(module, ended, inputs)
    return found


def _activations(module: PipelineModule, inputs: Any) -> dict[int, int]:
    """Return index -> bytes of the storages that autograd saves in the layer."""
    known = {p.untyped_storage().data_ptr() for p in [*module.parameters(), *module.buffers()]}
    found: dict[int, int] = {}
    held: list[Tensor] = []  # so that no storage's address is used twice
    size = 0

    def pack(tensor: Tensor) -> Tensor:
        nonlocal size
        address = tensor.untyped_storage().data_ptr()
        if address not in known:
            known.add(address)
            held.append(tensor)
            size += tensor.untyped_storage().nbytes()
        return tensor

    def ended(index: int, value: Any) -> None:
        nonlocal size
        found[index], size = size, 0

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        held += tensors_of(_with_hook(module, ended, inputs))
    return found


def _undeferred(module: PipelineModule, inputs: Any, labels: Any) -> list[str]:
    """Return the names of parameters that have a gradient before the deferred ones are computed."""
    deferred = Deferred()
    with SplitBackward(deferred):
        value = module.loss(module(inputs), labels)
    losses = [value[0]] if is_pair(value) else tensors_of(getattr(value, "terms", value))
    roots = [each for each in losses if each.requires_grad]
    with ExitStack() as stack:
        stack.enter_context(deferred.backward())
        torch.autograd.backward([each.sum() for each in roots])
    found = [layout_of(p).name or name for name, p in module.named_parameters() if p.grad is not None]
    module.zero_grad(set_to_none=True)
    deferred.run(lambda parameter: torch.zeros_like(parameter), lambda parameter: None)
    return found


def _with_hook(module: PipelineModule, hook: Callable[[int, Any], None], inputs: Any) -> Any:
    module.layer_hook = hook
    try:
        return module(inputs)
    finally:
        module.layer_hook = None
