"""Instruments of an engine: autocast, profilers and loggers of its passes.

The engine has no code for instruments. Each instrument replaces methods of an engine whose options enable it, so
that a disabled instrument costs no time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from ..base.dtypes import dtype_of
from ..grid.comm.timeline_recorder import TimelineRecorder
from ..monitor.method_hooks import Hook, hook_method
from ..monitor.trace import comms_logger
from ..pipe.backward import Deferred, SplitBackward
from ..pipe.program.ops import COMPUTE
from .accounting import memory_breakdown, step_profile
from .accounting.dump_state import dump
from .kinds import is_pipelined

if TYPE_CHECKING:
    from .module_engine import ModuleEngine
    from .pipeline_engine import PipelineEngine


def instrument(engine: PipelineEngine | ModuleEngine) -> None:
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


def _install_autocast(engine: PipelineEngine | ModuleEngine, dtype: torch.dtype) -> None:
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
            for each in ("F", "B", "I"):
                engine.executor.wrap(each, lambda op: SplitBackward(Deferred()))
        return

    def under_autocast(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with torch.autocast(kind, dtype=dtype):
            return call(*args, **kwargs)

    hook_method(engine, "forward", under_autocast)


def _record_spans(engine: PipelineEngine | ModuleEngine, recorder: TimelineRecorder) -> None:
    """Record passes and steps as spans of the timeline of ``triax run --timeline``, beside its collectives."""

    def span(kind: str, name: Callable[[], str]) -> Hook:
        def hook(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            with recorder.span(name(), kind):
                return call(*args, **kwargs)

        return hook

    step = span("step", lambda: f"step {engine.global_steps + 1}")
    hook_method(engine.data_axis, "step", span("optimizer", lambda: "optimizer"))
    if is_pipelined(engine):
        for kind in COMPUTE:
            engine.executor.wrap(kind, lambda op: recorder.span(str(op), "compute"))
        hook_method(engine, "train_batch", step)
        return
    hook_method(engine, "forward", span("compute", lambda: "forward"))
    hook_method(engine, "backward", span("compute", lambda: "backward"))
    hook_method(engine, "step", step)
