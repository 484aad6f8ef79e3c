"""``flops_profiler``: one step of an engine, counted and timed, and the report of the whole model.

Of a step's microbatches the first is counted and the others are timed: counting slows what it counts. Where there is
one alone, it is both. Ranks tell each other at the end of that step, so the tree is of the whole model: the operations
of pipe stages and of tensor shards are added up, and replicas, which do the same, are counted once.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from ..grid import Grid, layout_of
from ..pipe.ops import Op
from . import units
from .profile_passes import Passes
from .profile_report import Entry, merged, report, tree
from .profiler import show

if TYPE_CHECKING:
    from .engine import Engine
    from .module_engine import ModuleEngine


class Measured(NamedTuple):
    """What one rank measured: seconds of a microbatch's forward and backward pass here, and of the whole step."""

    entries: list[Entry]
    params: int  # this rank's
    forward: float
    backward: float | None
    update: float
    step: float


class StepProfile:
    """Measures the step ``profile_step`` of an engine, and prints.

    Args:
        engine: of either kind.
        counted: the parameters of this rank that this rank counts for the whole model.
    """

    def __init__(self, engine: Engine | ModuleEngine, counted: set[nn.Parameter]) -> None:
        self._engine, self._section, self._counted = engine, engine.config.flops_profiler, counted
        self.passes = Passes(engine.module)
        self._active = ExitStack()
        self.active = False
        self.forward: list[float] = []  # of each op or pass
        self.backward: list[float] = []
        self.update = 0.0
        self._begin = 0.0

    @property
    def due(self) -> bool:
        """Whether the step that comes is the one."""
        return not self.active and self._engine.global_steps == self._section.profile_step

    def start(self) -> None:
        """The step begins."""
        self.passes.reset()
        self.forward, self.backward = [], []
        self._active.enter_context(self.passes.hooked())
        self.active, self._begin = True, self._now()

    def leave(self) -> None:
        """Leave nothing on the module."""
        self._active.close()
        self.active = False

    def microbatch(self, index: int) -> AbstractContextManager[None]:
        """A forward pass of that microbatch runs within."""
        if not self.active:
            return nullcontext()
        alone = self._engine.batch.accumulation == 1
        return self.passes.measured(flops=index == 0, seconds=alone or index > 0)

    @contextmanager
    def timed(self, into: list[float]) -> Iterator[None]:
        """Add the seconds of what runs within."""
        begin = self._now()
        yield
        into.append(self._now() - begin)

    def finish(self) -> None:
        """The step is over. Collective."""
        seconds, engine = self._now() - self._begin, self._engine
        self.leave()
        timed = max(1, engine.batch.accumulation - 1)
        mine = Measured(
            self.passes.entries(self._whole, timed=timed),
            sum(p.numel() for p in engine.module.parameters()),
            sum(self.forward) / timed,
            sum(self.backward) / timed if self.backward else None,
            self.update,
            seconds,
        )
        everyone = engine.grid.world.all_gather_object(mine)
        if engine.grid.rank == 0:
            step, section = engine.global_steps - 1, self._section
            root = tree(merged(_replica(engine.grid, everyone)))
            rows = self._rows(everyone, root.params, root.flops)
            text = report(step, rows, root, section.module_depth, section.top_modules, section.detailed)
            show(text, section.output_file)

    def _rows(self, everyone: list[Measured], params: int, flops: float) -> list[tuple[str, str]]:
        """The head of the report; what is of one rank is rank 0's."""
        engine, factor, mine = self._engine, self._section.recompute_fwd_factor, everyone[0]
        grid, batch = engine.grid, engine.batch
        here = tree(mine.entries).flops
        ranks = [[max(m.forward for m in stage)] for stage in _measured(grid, everyone)]
        model = sum(map(sum, ranks))
        both = None if mine.backward is None else mine.forward + mine.backward
        step_flops = (3 + factor) * flops * batch.accumulation * grid.data.size
        label = f"fwd+bwd FLOPS per GPU = {3 + factor:g} * fwd flops per GPU / (fwd+bwd latency):"
        return [
            ("world size:", str(grid.size)),
            ("data parallel size:", str(grid.data.size)),
            ("model parallel size (tensor):", str(grid.tensor.size)),
            ("pipeline stages (pipe):", str(grid.pipe.size)),
            ("batch size per GPU (a microbatch):", str(batch.micro)),
            ("microbatches a step:", str(batch.accumulation)),
            ("params per GPU (rank 0):", units.count(mine.params)),
            ("params of model:", units.count(params)),
            ("fwd MACs per GPU (rank 0):", units.count(here / 2, "MACs")),
            ("fwd flops per GPU (rank 0):", units.count(here)),
            ("fwd MACs of model, one microbatch:", units.count(flops / 2, "MACs")),
            ("fwd flops of model, one microbatch:", units.count(flops)),
            (f"flops of a step = {3 + factor:g} * fwd flops * microbatches * replicas:", units.count(step_flops)),
            ("fwd latency (rank 0):", units.duration(mine.forward)),
            ("fwd latency of all stages:", units.duration(model)),
            ("bwd latency (rank 0):", "-" if mine.backward is None else units.duration(mine.backward)),
            ("fwd FLOPS per GPU = fwd flops per GPU / fwd latency:", units.rate(here, mine.forward)),
            (
                f"bwd FLOPS per GPU = {2 + factor:g} * fwd flops per GPU / bwd latency:",
                units.rate((2 + factor) * here, mine.backward),
            ),
            (label, units.rate((3 + factor) * here, both)),
            ("step latency (the update):", units.duration(mine.update)),
            ("iter latency:", units.duration(mine.step)),
            ("samples/second:", f"{batch.train / mine.step:.4g}"),
        ]

    def _whole(self, parameter: Tensor) -> int:
        """What a parameter counts here for the whole model: all of it, whichever shard this rank holds."""
        return math.prod(layout_of(parameter).shape) if parameter in self._counted else 0

    def _now(self) -> float:
        self._engine.grid.synchronise()
        return time.perf_counter()


def of_pipeline(engine: Engine) -> None:
    """Profile a step of ``train_batch``."""
    module, executor = engine.module, engine._executor
    profile = StepProfile(engine, {p.parameter for p in module.placed() if p.counted})
    train, run_stage, update = engine.train_batch, module.run_stage, engine._replicas.step

    def around_forward(op: Op) -> AbstractContextManager[None]:
        return profile.microbatch(op.microbatch)

    def stage_within(stage: int, x: Any) -> Any:
        with profile.passes.within(""):
            return run_stage(stage, x)

    def update_timed(*args: Any, **kwargs: Any) -> None:
        taken: list[float] = []
        with profile.timed(taken):
            update(*args, **kwargs)
        profile.update = taken[0]

    def train_batch(data_iter: Iterator[Any] | None = None) -> Tensor:
        if not profile.due:
            return train(data_iter)
        recorded, engine.record_timeline = engine.record_timeline, True
        profile.start()
        with _set(module, "run_stage", stage_within), _set(engine._replicas, "step", update_timed):
            try:
                loss = train(data_iter)
            except BaseException:
                profile.leave()
                raise
            finally:
                engine.record_timeline = recorded
        assert engine.timeline is not None
        for op, start, end in engine.timeline.rows[engine.grid.pipe.rank]:
            if engine.batch.accumulation == 1 or op.microbatch > 0:
                (profile.forward if op.kind == "F" else profile.backward).append(end - start)
        profile.finish()
        return loss

    executor.wrap("F", around_forward)
    engine.train_batch = train_batch  # type: ignore[method-assign]


def of_module(engine: ModuleEngine) -> None:
    """Profile a step of forward, ``backward`` and ``step``."""
    profile = StepProfile(engine, set(engine.module.parameters()))
    forward, backward, step = engine.forward, engine.backward, engine.step

    def timed(inner: Callable[..., Any], into: list[float], *args: Any, **kwargs: Any) -> Any:
        if not profile.active or not engine.module.training or not torch.is_grad_enabled():
            return inner(*args, **kwargs)  # an evaluation in between is none of it
        index = engine._micro
        begin = profile._now()
        with profile.microbatch(index) if inner is forward else nullcontext():
            result = inner(*args, **kwargs)
        if index > 0 or engine.batch.accumulation == 1:
            into.append(profile._now() - begin)
        return result

    def run(*args: Any, **kwargs: Any) -> Any:
        if profile.due and engine.module.training and torch.is_grad_enabled():
            profile.start()
        try:
            return timed(forward, profile.forward, *args, **kwargs)
        except BaseException:
            profile.leave()
            raise

    def run_backward(*args: Any, **kwargs: Any) -> Tensor:
        result: Tensor = timed(backward, profile.backward, *args, **kwargs)
        return result

    def run_step(*args: Any, **kwargs: Any) -> None:
        last = profile.active and engine.is_gradient_accumulation_boundary()
        taken: list[float] = []
        with profile.timed(taken) if last else nullcontext():
            step(*args, **kwargs)
        if last:
            profile.update = taken[0]
            profile.finish()

    for name, method in (("forward", run), ("backward", run_backward), ("step", run_step)):
        setattr(engine, name, method)


def _measured(grid: Grid, everyone: list[Any]) -> list[list[Any]]:
    """What the ranks of the first replica have: for each pipe rank, for each tensor rank."""
    pipe, tensor = range(grid.pipe.size), range(grid.tensor.size)
    return [[everyone[grid.topology.rank(pipe=p, data=0, tensor=t)] for t in tensor] for p in pipe]


def _replica(grid: Grid, everyone: list[Measured]) -> list[list[list[Entry]]]:
    return [[measured.entries for measured in stage] for stage in _measured(grid, everyone)]


@contextmanager
def _set(owner: Any, name: str, value: Any) -> Iterator[None]:
    """An attribute of its own for a while, in the place of its class's."""
    before = owner.__dict__.get(name)
    object.__setattr__(owner, name, value)
    try:
        yield
    finally:
        if before is None:
            object.__delattr__(owner, name)
        else:
            object.__setattr__(owner, name, before)
