"""What an engine adds to the timeline of ``triax run --timeline``: its passes and steps, beside the collectives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..grid.timeline import Recorder
from .tap import Hook, tap

_PASSES = ("F", "B", "I", "W")


def install(engine: Any) -> None:
    """Record an engine's passes, where a timeline is recorded; a new engine's, once."""
    recorder: Recorder | None = engine.grid.timeline
    if recorder is None:
        return
    write = recorder

    def hook(name: Callable[[], str], kind: str) -> Hook:
        def run(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            with write.span(name(), kind):
                return call(*args, **kwargs)

        return run

    def step() -> str:
        return f"step {engine.global_steps + 1}"

    tap(engine._replicas, "step", hook(lambda: "optimizer", "optimizer"))
    if "_executor" in vars(engine):
        for kind in _PASSES:
            engine._executor.wrap(kind, lambda op: write.span(str(op), "compute"))
        tap(engine, "_train_batch", hook(step, "step"))
        return
    tap(engine, "forward", hook(lambda: "forward", "compute"))
    tap(engine, "backward", hook(lambda: "backward", "compute"))
    tap(engine, "step", hook(step, "step"))
