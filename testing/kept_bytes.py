"""Bytes of a microbatch that each layer keeps for the backward pass."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from ..base.nest import map_tensors
from ..engine.monitor.profiler.memory_meter import MemoryMeter
from ..pipe.module import PipelineModule


def kept_bytes(model: PipelineModule, inputs: Any, fields: dict[str, Any]) -> dict[str, int]:
    """Run a microbatch forward on a model of one stage, and return layer -> bytes that autograd saves.

    A tensor counts for the first layer that saves it; parameters and buffers do not count. A function between two
    layers that are modules counts for the layer before it.
    """
    meter, before = MemoryMeter(lambda: 0), dict[str, int]()

    def note(name: str, *_: Any) -> None:
        before.setdefault(name, meter.saved)

    layers = [(name, layer) for _, name, layer in model.named_layers() if name != "loss_fn"]
    handles = [layer.register_forward_pre_hook(partial(note, name)) for name, layer in layers]
    try:
        with meter.counting():
            outputs = model.run_stage(0, map_tensors(torch.clone, inputs), fields)
    finally:
        for handle in handles:
            handle.remove()
    names, ends = list(before), [*before.values(), meter.saved]
    del outputs  # whose graph holds what was saved
    return {name: ends[at + 1] - ends[at] for at, name in enumerate(names)}
