"""Instruments of an engine: autocast, profilers and loggers of its passes.

An instrument is a context around parts of a step (``engine.parts``) or around ops of the executor.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch

from ..base.deferred import Deferred
from ..base.dtypes import dtype_of
from ..grid.comm.timeline_recorder import TimelineRecorder
from ..pipe.backward import SplitBackward
from ..pipe.program.ops import COMPUTE
from .accounting import memory_breakdown, step_profile
from .accounting.dump_state import dump
from .kinds import AnyEngine, is_pipelined
from .monitor.trace import comms_logger


def instrument(engine: AnyEngine) -> None:
    """Install on a new engine autocast and the profilers and loggers that its options enable."""
    options = engine.options.monitor
    dtype = dtype_of(engine.options.precision.autocast)
    if dtype is not None:
        _install_autocast(engine, dtype)
    log = options.communication
    if log is not None:
        comms_logger.install(engine.grid, log.wanted, log.verbose, log.callers)
    recorder = engine.grid.observer(TimelineRecorder)
    if recorder is not None:
        _record_spans(engine, recorder)
    if options.profile is not None:
        step_profile.install(engine)
    if options.memory:
        memory_breakdown.install(engine)
    if options.state:
        dump(engine)


def _install_autocast(engine: AnyEngine, dtype: torch.dtype) -> None:
    """Run forward passes under autocast to a dtype.

    For the backward pass, autograd keeps the copies of weights that autocast makes. In stage 3 of ZeRO no rank has
    memory for all of them: there each matrix product of a ``PipelineModule`` keeps the weight itself, which is gathered
    for its backward pass, and casts it again.
    """
    kind = engine.grid.device.type
    if is_pipelined(engine):
        engine.executor.wrap("F", lambda op: torch.autocast(kind, dtype=dtype))
        if engine.options.zero.stage == 3:
            # A split that defers nothing keeps weights. Recomputation in a backward pass is split in the same way.
            for op_kind in ("F", "B", "I"):
                engine.executor.wrap(op_kind, lambda op: SplitBackward(Deferred()))
        return

    engine.parts.watch("forward", lambda: torch.autocast(kind, dtype=dtype))


def _record_spans(engine: AnyEngine, recorder: TimelineRecorder) -> None:
    """Record passes and steps as spans of the timeline of ``triax run --timeline``, beside its collectives."""

    def step() -> AbstractContextManager[None]:
        return recorder.span(f"step {engine.global_steps + 1}", "step")

    engine.parts.watch("optimizer", lambda: recorder.span("optimizer", "optimizer"))
    engine.parts.watch("step", step)
    if is_pipelined(engine):
        for kind in COMPUTE:
            engine.executor.wrap(kind, lambda op: recorder.span(str(op), "compute"))
        return
    engine.parts.watch("forward", lambda: recorder.span("forward", "compute"))
    engine.parts.watch("backward", lambda: recorder.span("backward", "compute"))
