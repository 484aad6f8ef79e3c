"""What a configuration has an engine do around its passes: autocast, and whatever measures them.

An engine knows nothing of it: its methods are replaced by others that call them, on the engine that asks for it alone,
so what is off costs nothing.
"""

from __future__ import annotations

from typing import Any

import torch

from ..pipe.backward import Deferred, SplitBackward
from . import comms, memory_breakdown, profile_step, state, timeline
from .autocast import autocast_dtype
from .engine import Engine
from .module_engine import ModuleEngine

__all__ = ["instrument"]


def instrument(engine: Engine | ModuleEngine) -> None:
    """Do to a new engine what its configuration says."""
    config = engine.config
    _autocast(engine)
    comms.install(config.comms_logger, engine.grid)
    timeline.install(engine)
    if config.flops_profiler.enabled:
        _either(engine, profile_step)
    if config.memory_breakdown:
        _either(engine, memory_breakdown)
    if config.dump_state:
        state.dump(engine)


def _either(engine: Engine | ModuleEngine, instruments: Any) -> None:
    (instruments.of_pipeline if isinstance(engine, Engine) else instruments.of_module)(engine)


def _autocast(engine: Engine | ModuleEngine) -> None:
    """Forward passes run under autocast.

    Autograd keeps the narrow copies of weights that autocast makes, for the backward pass. In stage 3 of ZeRO no rank
    has room for all of them: there each product of a ``PipelineModule`` keeps the weight itself, which is gathered when
    its turn comes, and casts it once more.
    """
    dtype, kind = autocast_dtype(engine.config), engine.grid.device.type
    if dtype is None:
        return
    if isinstance(engine, Engine):
        engine._executor.wrap("F", lambda op: torch.autocast(kind, dtype=dtype))
        if engine.config.zero_optimization.stage == 3:
            # A split that puts nothing off keeps weights. What a backward pass computes again, it splits alike.
            for each in ("F", "B", "I"):
                engine._executor.wrap(each, lambda op: SplitBackward(Deferred()))
        return
    forward = engine.forward

    def narrowed(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast(kind, dtype=dtype):
            return forward(*args, **kwargs)

    engine.forward = narrowed  # type: ignore[method-assign]
