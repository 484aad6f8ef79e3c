"""Parameters of a model on this rank, with their whole-model names."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from ..grid import layout_of
from ..pipe.module import PipelineModule
from ..zero.shard_ranges import NamedParameter


def named_parameters(module: nn.Module) -> list[NamedParameter]:
    """Return a module's parameters on this rank, each once, with their whole-model names."""
    if isinstance(module, PipelineModule):
        return [NamedParameter(entry.parameter, entry.layout, entry.counted) for entry in module.local_parameters()]
    layouts = [(parameter, layout_of(parameter), name) for name, parameter in module.named_parameters()]
    return [NamedParameter(p, replace(layout, name=layout.name or name), True) for p, layout, name in layouts]
