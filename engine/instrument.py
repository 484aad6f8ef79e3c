"""Instruments of an engine: autocast, profilers and loggers of its passes.

An instrument reads the spans of the engine (``engine.spans``), and returns the context in which each of them runs.
"""

from __future__ import annotations

import torch

from ..base.deferred import Deferred
from ..base.dtypes import dtype_of
from ..pipe.backward import SplitBackward
from .accounting import memory_breakdown, step_profile, torch_profile
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
    if options.profile is not None:
        step_profile.install(engine)
    if options.memory:
        memory_breakdown.install(engine)
    if options.profiler is not None:
        torch_profile.install(engine)
    if options.state:
        dump(engine)


def _install_autocast(engine: AnyEngine, dtype: torch.dtype) -> None:
    """Run forward passes under autocast to a dtype.

    For the backward pass, autograd keeps the copies of weights that autocast makes. In stage 3 of ZeRO no rank has
    memory for all of them: there each matrix product of a ``PipelineModule`` keeps the weight itself, which is gathered
    for its backward pass, and casts it again.
    """
    kind = engine.grid.device.type
    engine.spans.read(lambda span: torch.autocast(kind, dtype=dtype), "F", "forward")
    if is_pipelined(engine) and engine.options.zero.stage == 3:
        # A split that defers nothing keeps weights. Recomputation in a backward pass is split in the same way.
        engine.spans.read(lambda span: SplitBackward(Deferred()), "F", "B", "I")
