"""``monitor.profile``: counts and times one step of an engine, and prints the report of the whole model.

FLOPs are counted in the step's first microbatch and time is measured in the others, because counting slows down a
forward pass. If the step has a single microbatch, it is both counted and timed. At the end of the step the ranks
exchange their measurements.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import astuple
from typing import cast

import torch
from torch import Tensor

from ...grid.comm.spans import OpenSpan
from ..kinds import AnyEngine, Pipelined, Stepped, is_pipelined
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
        self.active, self._begin = True, self._now()

    def stop(self) -> None:
        """Remove all hooks from the module."""
        self._hooks.close()
        self.active = False

    def microbatch(self, index: int) -> AbstractContextManager[None]:
        """Return the context for a microbatch's forward pass: microbatch 0 counts FLOPs, the others are timed.

        The only microbatch of a step is both counted and timed.
        """
        if not self.active:
            return nullcontext()
        return self.modules.measured(flops=index == 0, seconds=self.times(index))

    def times(self, index: int) -> bool:
        """Return True if this microbatch is timed."""
        return index > 0 or self._engine.batch.accumulation == 1

    @contextmanager
    def timed(self, into: list[float]) -> Iterator[None]:
        """Context whose duration in seconds is appended to the list ``into``."""
        begin = self._now()
        yield
        into.append(self._now() - begin)

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
    """Let an engine profile the step ``monitor.profile.step`` and no other step."""
    if is_pipelined(engine):
        _profile_pipeline(engine)
    else:
        _profile_module(cast("Stepped", engine))


def _profile_pipeline(engine: Pipelined) -> None:
    """Profile one call of ``train_batch``."""
    profile = StepProfile(engine)

    @contextmanager
    def step(span: OpenSpan) -> Iterator[None]:
        if not profile.due:
            yield
            return
        recorded, engine.record_timeline = engine.record_timeline, True
        interleaves, engine.executor.interleaves = engine.executor.interleaves, False  # each pass is timed by itself
        stops = [
            engine.spans.read(lambda span: profile.modules.within(""), "stage"),
            engine.spans.read(lambda span: profile.timed(profile.update), "optimizer"),
        ]
        profile.start()
        try:
            yield
        except BaseException:
            profile.stop()
            raise
        finally:
            for stop in stops:
                stop()
            engine.record_timeline = recorded
            engine.executor.interleaves = interleaves
        assert engine.timeline is not None
        for op, start, end in engine.timeline.rows[engine.grid.pipe.rank]:
            if profile.times(op.microbatch):
                (profile.forward if op.kind == "F" else profile.backward).append(end - start)
        profile.finish()

    engine.spans.read(lambda span: profile.microbatch(span.about.microbatch), "F")
    engine.spans.read(step, "step")


def _profile_module(engine: Stepped) -> None:
    """Profile one step, which consists of calls of ``forward``, ``backward`` and ``step``."""
    profile = StepProfile(engine)

    def trains() -> bool:
        return bool(engine.module.training and torch.is_grad_enabled())  # an evaluation in between does not count

    def timed(into: list[float]) -> AbstractContextManager[None]:
        wanted = profile.active and trains() and profile.times(engine.microbatch)
        return profile.timed(into) if wanted else nullcontext()

    @contextmanager
    def forward(span: OpenSpan) -> Iterator[None]:
        if profile.due and trains():
            profile.start()
        try:
            with timed(profile.forward), profile.microbatch(engine.microbatch) if trains() else nullcontext():
                yield
        except BaseException:
            profile.stop()
            raise

    @contextmanager
    def step(span: OpenSpan) -> Iterator[None]:
        last = profile.active and engine.is_last_microbatch()
        with profile.timed(profile.update) if last else nullcontext():
            yield
        if last:
            profile.finish()

    engine.spans.read(forward, "forward")
    engine.spans.read(lambda span: timed(profile.backward), "backward")
    engine.spans.read(step, "step")
