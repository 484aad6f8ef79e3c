"""Protocols of the two kinds of engines, for what watches them; and the function that tells the kinds apart."""

from __future__ import annotations

from typing import Protocol, TypeGuard

from ..grid.comm.spans import Spans
from ..options.batch import BatchSizes
from ..pipe.executor import Executor
from ..pipe.module import PipelineModule
from .accounting.memory import MemoryAccounts
from .snapshot.capture import Checkpointed


class AnyEngine(Checkpointed, Protocol):
    """Protocol: the members of both kinds that instruments and reports read. ``Engine`` documents them."""

    batch: BatchSizes
    spans: Spans
    accounts: MemoryAccounts
    record_memory: bool

    def loss_scale(self) -> float | None: ...
    def is_last_microbatch(self) -> bool: ...


class Pipelined(AnyEngine, Protocol):
    """Protocol: an engine of a ``PipelineModule``, as ``PipelineEngine`` documents it."""

    executor: Executor


class Stepped(AnyEngine, Protocol):
    """Protocol: an engine of any other module, as ``ModuleEngine`` documents it."""

    microbatch: int


def is_pipelined(engine: AnyEngine) -> TypeGuard[Pipelined]:
    """Return True for a ``PipelineEngine``, which trains a ``PipelineModule``."""
    return isinstance(engine.module, PipelineModule)
