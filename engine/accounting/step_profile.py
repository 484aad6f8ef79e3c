"""``monitor.profile``: counts and times one step of an engine, and prints the report of the whole model.

FLOPs are counted in the step's first microbatch and time is measured in the others, because counting slows down a
forward pass. If the step has a single microbatch, it is both counted and timed. At the end of the step the ranks
exchange their measurements.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import astuple
from typing import cast

import torch
from torch import Tensor

from ...grid.comm.spans import OpenSpan
from ...pipe.program.ops import COMPUTE
from ..kinds import AnyEngine, Stepped, is_pipelined
from ..monitor.profiler.module_counter import ModuleCounter
from ..monitor.profiler.step_report import RankProfile, head, whole_model
from ..monitor.profiler.tree_report import ModuleNode, publish, report
from ..named_parameters import named_parameters


class StepProfile:
    """Measures FLOPs and times of the step of an engine that ``monitor.profile.step`` names.

    Args:
        engine: the engine.
    """

    def __init__(self, engine: AnyEngine) -> None:
        assert engine.options.monitor.profile is not None
        self._engine, self._options = engine, engine.options.monitor.profile
        # The elements that this rank adds to the model's parameter count.
        named = named_parameters(engine.module)
        self._numel: dict[Tensor, int] = {p: math.prod(layout.shape) for p, layout, counted in named if counted}
        self.modules = ModuleCounter(engine.module)
        self._hooks = ExitStack()
        self.active = False  # the step is being measured
        self.forward: list[float] = []  # seconds of each forward pass or op that was timed
        self.backward: list[float] = []
        self.update: list[float] = []
        self._begin = 0.0

    @property
    def due(self) -> bool:
        """True if the next step is the one to profile."""
        return not self.active and self._engine.global_steps == self._options.step

    def start(self) -> None:
        """Install hooks on the module and begin to measure a step."""
        self.modules.reset()
        self.forward, self.backward, self.update = [], [], []
        self._hooks.enter_context(self.modules.hooked())
        if is_pipelined(self._engine):
            executor = self._engine.executor
            self._hooks.callback(setattr, executor, "interleaves", executor.interleaves)
            executor.interleaves = False  # each pass is timed by itself
        self.active, self._begin = True, self._now()

    def stop(self) -> None:
        """Remove all hooks from the module, and measure no more."""
        self._hooks.close()
        self.active = False

    @contextmanager
    def microbatch(self, index: int) -> Iterator[None]:
        """Context for a microbatch's forward pass: microbatch 0 counts FLOPs, the others are timed.

        The only microbatch of a step is both counted and timed.
        """
        try:
            with self.modules.measured(flops=index == 0, seconds=self.times(index)):
                yield
        except BaseException:
            self.stop()
            raise

    def times(self, index: int) -> bool:
        """Return True if this microbatch is timed."""
        return index > 0 or self._engine.batch.accumulation == 1

    @contextmanager
    def timed(self, span: OpenSpan, into: list[float]) -> Iterator[None]:
        """Context that appends the seconds of a span, from when its op has its inputs, to the list ``into``."""
        begins = [self._now()]
        span.at_turn(lambda: begins.append(self._now()))
        yield
        into.append(self._now() - begins[-1])

    def finish(self) -> None:
        """End the step; rank 0 prints the report. Collective."""
        seconds, engine, options = self._now() - self._begin, self._engine, self._options
        self.stop()
        timed = max(1, engine.batch.accumulation - 1)
        own_profile = RankProfile(
            self.modules.entries(lambda parameter: self._numel.get(parameter, 0), timed=timed),
            sum(p.numel() for p in engine.module.parameters()),
            sum(self.forward) / timed,
            sum(self.backward) / timed if self.backward else None,
            sum(self.update),
            seconds,
        )
        told = engine.grid.world.all_gather_json(([astuple(node) for node in own_profile.entries], *own_profile[1:]))
        everyone = [RankProfile([ModuleNode(*node) for node in nodes], *numbers) for nodes, *numbers in told]
        if engine.grid.rank == 0:
            root = whole_model(engine.grid, everyone)
            rows = head(engine.grid, everyone, root, engine.batch, options.recompute_factor)
            step, depth = engine.global_steps - 1, options.depth
            publish(report(step, rows, root, depth, options.top_modules, options.detailed), options.file)

    def _now(self) -> float:
        self._engine.grid.synchronize()
        return time.perf_counter()


def install(engine: AnyEngine) -> None:
    """Let an engine profile the step ``monitor.profile.step`` and no other step.

    The step of a pipeline begins with ``train_batch``, the step of another module with its first forward pass.
    """
    profile, pipelined = StepProfile(engine), is_pipelined(engine)

    def microbatch(span: OpenSpan) -> int | None:
        """Return the number of the microbatch of a pass. None if it is not measured, as an evaluation in between."""
        if not (profile.active and engine.module.training and torch.is_grad_enabled()):
            return None
        number: int = span.about.microbatch if pipelined else cast("Stepped", engine).microbatch
        return number

    def counted(span: OpenSpan) -> AbstractContextManager[None] | None:
        return None if (number := microbatch(span)) is None else profile.microbatch(number)

    def timed(span: OpenSpan) -> AbstractContextManager[None] | None:
        if (number := microbatch(span)) is None or not profile.times(number):
            return None
        return profile.timed(span, profile.forward if span.kind in ("F", "forward") else profile.backward)

    def update(span: OpenSpan) -> AbstractContextManager[None] | None:
        return profile.timed(span, profile.update) if profile.active and engine.is_last_microbatch() else None

    @contextmanager
    def step(span: OpenSpan) -> Iterator[None]:
        last = profile.active and engine.is_last_microbatch()
        try:
            yield
        except BaseException:
            profile.stop()
            raise
        if last:
            profile.finish()

    def begin(span: OpenSpan) -> None:
        if profile.due and (pipelined or (engine.module.training and torch.is_grad_enabled())):
            profile.start()

    engine.spans.read(counted, "F", "forward")
    engine.spans.read(timed, *COMPUTE, "forward", "backward")
    engine.spans.read(lambda span: profile.modules.within("") if profile.active else None, "stage")
    engine.spans.read(update, "optimizer" if pipelined else "step")
    engine.spans.read(step, "step")
    engine.spans.read(begin, "step" if pipelined else "forward")  # last, so that it is called first
