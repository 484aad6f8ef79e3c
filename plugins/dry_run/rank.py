"""One rank of a dry run: a process that runs the user's program on the meta device up to the end of a step."""

from __future__ import annotations

import os
import runpy
import socket
import sys
import traceback
from collections.abc import Callable, Sequence
from functools import wraps
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist

from ...base.seeds import derive
from ...engine.module_engine import ModuleEngine
from ...engine.pipeline_engine import PipelineEngine
from ...engine.snapshot.capture import capture
from ...grid import layout_of
from ...grid.devices import ignore_device_choice
from ...grid.launcher.worker import LOCAL_RANK
from ...options.batch import BatchSizes
from ...options.engine import EngineOptions
from ...pipe.schedules.registry import RECIPES
from ...zero.held_bytes import held_bytes
from .exchange import HangError, RankSocket
from .group import BACKEND, Recorder, RecordingGroup
from .traced_rank import Comparison, trace_environment, traced
from .values import OF_AUTOCAST, MetaValues, without_meta


class Script(NamedTuple):
    """Program that every rank runs.

    Attributes:
        script: path of a Python file, or name of a module.
        arguments: the script's own arguments.
        module: True if ``script`` is the name of a module.
    """

    script: str
    arguments: Sequence[str] = ()
    module: bool = False

    def run(self) -> None:
        """Run the program as Python would."""
        sys.argv = [self.script, *(each.replace(LOCAL_RANK, os.environ["LOCAL_RANK"]) for each in self.arguments)]
        if self.module:
            runpy.run_module(self.script, run_name="__main__", alter_sys=True)
        else:
            sys.path.insert(0, str(Path(self.script).resolve().parent))
            runpy.run_path(self.script, run_name="__main__")


class Settings(NamedTuple):
    """Settings of a dry run.

    Attributes:
        ranks: number of ranks of the cluster.
        per_host: ranks of one host, for ``LOCAL_RANK``.
        steps: training steps to run.
        stand_in: value of a number that is read from a tensor without values.
    """

    ranks: int
    per_host: int = 8
    steps: int = 1
    stand_in: float = 1.0


class _StepsDoneError(BaseException):
    """End of the steps to run. It leaves the user's program from within the engine's call."""


def be_rank(
    rank: int, settings: Settings, program: Callable[[], None], connection: socket.socket, log: Path
) -> NoReturn:
    """Run the program as one rank of a cluster, send the record of it, and end this process.

    Args:
        rank: the rank.
        settings: settings of the dry run.
        program: the program.
        connection: socket to the process that started this one.
        log: file for the output of the program.
    """
    link = RankSocket(connection)
    recorder = Recorder(rank, settings.ranks, link)
    values = MetaValues(settings.stand_in)
    comparisons: set[Comparison] = set()
    untraced: set[str] = set()
    engines: list[Any] = []
    outcome: dict[str, Any] = {"outcome": "no step"}
    with log.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    try:
        _enter(rank, settings, recorder, comparisons, untraced)
        _end_after(settings.steps, engines)
        _limit_microbatches(recorder)
        with values:
            program()
    except _StepsDoneError:
        outcome = {"outcome": "step"}
    except HangError as error:
        outcome = {"outcome": "hang", "error": str(error)}
    except SystemExit as error:
        if error.code not in (None, 0):
            outcome = {"outcome": "error", "error": f"the program ended with {error.code!r}"}
    except BaseException as error:
        traceback.print_exc()
        outcome = {"outcome": "error", "error": f"{type(error).__name__}: {error}"}
    try:
        record = outcome | _record(recorder, values, comparisons, untraced)
        if outcome["outcome"] == "step":
            with values:
                record |= _engine_record(engines[-1], recorder)
    except BaseException as error:
        traceback.print_exc()
        outcome = {"outcome": "error", "error": f"{type(error).__name__}: {error}"}
        record = outcome | _record(recorder, values, set(), untraced)
    sys.stdout.flush()
    sys.stderr.flush()
    link.send({"kind": "end", "record": record})
    # Without the rest of the program: no ``finally``, no exit handler, no checkpoint.
    os._exit(0)


def _enter(rank: int, settings: Settings, recorder: Recorder, comparisons: set[Comparison], untraced: set[str]) -> None:
    """Set the launcher's variables and make the process group, as if the rank had been started on a cluster."""
    torch.set_num_threads(1)
    local = rank % settings.per_host
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(settings.ranks),
        "LOCAL_RANK": str(local),
        "LOCAL_WORLD_SIZE": str(min(settings.per_host, settings.ranks)),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
    }

    def make(options: Any, _: Any) -> RecordingGroup:
        return RecordingGroup(recorder, options.global_ranks_in_group or range(settings.ranks))

    dist.Backend.register_backend(BACKEND, make, extended_api=True, devices=["cpu", "cuda", "meta"])
    dist.init_process_group(BACKEND, store=dist.HashStore(), rank=rank, world_size=settings.ranks)
    _replace(dist, "init_process_group", lambda *_, **__: None)
    _replace(dist, "get_rank", _traced_get_rank(dist.get_rank, comparisons))
    ignore_device_choice()
    for name in OF_AUTOCAST:
        _replace(torch, name, without_meta(getattr(torch, name)))
    of_optimizers = sys.modules[torch.optim.Optimizer.__module__]
    supported = of_optimizers._get_fused_kernels_supported_devices
    _replace(of_optimizers, "_get_fused_kernels_supported_devices", lambda: [*supported(), "meta"])
    of_host = (("mod", settings.per_host),)
    ranks = {"RANK": traced(rank, "world", comparisons), "LOCAL_RANK": traced(local, "world", comparisons, of_host)}
    trace_environment(ranks, untraced)
    made = recorder.grids

    class Grids(list[Any]):
        """Grids of the script, whose ranks are traced."""

        def append(self, grid: Any) -> None:
            super().append(grid)
            grid.rank = traced(grid.rank, "world", comparisons)
            for name in ("pipe", "data", "context", "tensor"):
                axis = grid.axis(name)
                if axis.size > 1:
                    axis.rank = traced(axis.rank, name, comparisons)

    recorder.grids = Grids(made)


def _traced_get_rank(plain: Callable[..., int], comparisons: set[Comparison]) -> Callable[..., int]:
    @wraps(plain)
    def get_rank(*args: Any, **kwargs: Any) -> int:
        rank = plain(*args, **kwargs)
        whole = all(each in (None, dist.group.WORLD) for each in (*args, *kwargs.values()))
        return traced(rank, "world", comparisons) if whole else rank

    return get_rank


def _replace(owner: Any, name: str, function: Any) -> None:
    """Replace a function of a module or class, in this process, which runs nothing else."""
    setattr(owner, name, function)


def _end_after(steps: int, engines: list[Any]) -> None:
    """End the program after some steps of the engine's."""

    def ends(cls: type, method: str, taken: Callable[[Any], int]) -> None:
        plain = getattr(cls, method)

        @wraps(plain)
        def step(self: Any, *args: Any, **kwargs: Any) -> Any:
            self.record_memory = True
            before = taken(self)
            result = plain(self, *args, **kwargs)
            if taken(self) > before and taken(self) >= steps:
                engines.append(self)
                raise _StepsDoneError
            return result

        _replace(cls, method, step)

    ends(PipelineEngine, "train_batch", lambda engine: int(engine.global_steps))
    ends(ModuleEngine, "step", lambda engine: int(engine.global_steps))


def _limit_microbatches(recorder: Recorder) -> None:
    """Let a step have as many microbatches as stages, or twice as many: what is held is then at its peak already.

    Not so under schedules that run all forward passes first, which keep all their microbatches.
    """
    whole = EngineOptions.batch_sizes

    def fewer(options: EngineOptions, data: int) -> BatchSizes:
        sizes, schedule = whole(options, data), options.schedule.name
        stages = recorder.topology.size("pipe") if recorder.topology is not None else 1
        recipe = RECIPES.get(schedule)
        limit = 2 * stages if recipe is None else max(recipe.steady(stages), recipe.least(stages))
        if sizes.accumulation <= limit:
            return sizes
        most = int(limit)
        recorder.microbatches = sizes.accumulation, most
        return BatchSizes(train=sizes.micro * most * data, micro=sizes.micro, accumulation=most)

    _replace(EngineOptions, "batch_sizes", fewer)


def _record(recorder: Recorder, values: MetaValues, comparisons: set[Comparison], untraced: set[str]) -> dict[str, Any]:
    """Return what is recorded of any program, in JSON's types."""
    names = _group_names(recorder)
    return {
        "groups": [
            {"name": names.get(number, ""), "ranks": list(ranks), "same": same}
            for number, (ranks, same) in enumerate(recorder.groups)
        ],
        "operations": [list(operation) for operation in recorder.operations],
        "asked": values.asked,
        "mixed": values.mixed,
        "comparisons": [list(each) for each in comparisons],
        "untraced": sorted(untraced),
        "microbatches": recorder.microbatches,
        "axes": None if recorder.topology is None else recorder.topology.axes,
        "expert": 1 if recorder.topology is None else recorder.topology.expert,
    }


def _group_names(recorder: Recorder) -> dict[int, str]:
    names = {0: "world"}
    for grid in recorder.grids:
        for axis in grid.axes():
            if isinstance(axis.group, RecordingGroup):
                names.setdefault(axis.group.number, axis.name)
    return names


def _engine_record(engine: Any, recorder: Recorder) -> dict[str, Any]:
    """Return memory, traffic, program and checkpoint boxes of an engine after its step."""
    grid, module = engine.grid, engine.module
    record: dict[str, Any] = {"coordinate": {k: int(v) for k, v in grid.coordinate._asdict().items()}}
    if isinstance(engine, PipelineEngine):
        report = engine.memory_report()
        record["memory"] = {kind: value for kind, value in report["held"].items() if value}
        record["offloaded"] = report["offloaded"]
        record["layers"] = [[module.boundaries[s], module.boundaries[s + 1]] for s in module.stages]
        record["ops"] = len(engine.program.ops[grid.pipe.rank])
        record["in_flight"] = engine.executor.last_run.peak
        record["sent"] = {
            axis: sum(each["bytes"] for each in kinds.values())
            for axis, kinds in engine.traffic_report()["sent"].items()
        }
    else:
        record["memory"] = {k: v for k, v in held_bytes(engine.data_axis, module).items() if v}
    snapshot = capture(engine, "dry", {})
    record["checkpoint"] = [sum(len(each.boxes) for each in snapshot.tensors.values()), snapshot.bytes]
    buckets = engine.data_axis.buckets
    record["zero"] = [len(buckets), sum(b.owned[1] - b.owned[0] for b in buckets if b.trained)]
    record["parameters"] = sum(p.numel() for p in module.parameters())
    shapes = [layout_of(p) for p in module.parameters()]
    size, expert = grid.tensor.size, (grid.expert.rank, grid.expert.size)
    record["shards"] = [derive(*(str(s.local_shape(t, size, expert)) for s in shapes)) for t in range(size)]
    record["batch"] = list(engine.batch)
    return record
