"""``monitor.profiler``: torch.profiler of some steps, a trace of each rank, with the names of the spans in it."""

from __future__ import annotations

import atexit
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch

from ...base.errors import ConfigError
from ...base.records import Records
from ...base.torch_private import profiler_of_all_threads
from ...grid.agreement.agreement import agreed
from ...grid.comm.axis import Operation
from ...grid.comm.spans import OpenSpan
from ...options.monitoring import OPERATIONS
from ..kinds import AnyEngine


def install(engine: AnyEngine) -> None:
    """Record the steps that ``monitor.profiler`` names, on every rank. Collective.

    Raises:
        ConfigError: on every rank, if a rank cannot make the folder.
    """
    options = engine.options.monitor.profiler
    assert options is not None
    folder = Path(options.folder or Path(engine.options.monitor.json or "") / "profiler")
    with agreed(engine.grid, ConfigError):
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            name = engine.options.say("<monitor.profiler.folder>")
            raise ConfigError(f"{name} {str(folder)!r} cannot be made, because of {error}: give another") from error
    file = str(folder / f"rank-{engine.grid.rank}.pt.trace.json")  # TensorBoard's ending

    def write(profile: torch.profiler.profile) -> None:
        atexit.unregister(profile.stop)
        for stop in stops:
            stop()
        with Records().writing(file):
            profile.export_chrome_trace(file)

    profile = torch.profiler.profile(
        schedule=torch.profiler.schedule(
            wait=max(0, options.start - 2), warmup=min(1, options.start - 1), active=options.steps, repeat=1
        ),
        on_trace_ready=write,
        experimental_config=profiler_of_all_threads(),
    )

    @contextmanager
    def named(span: OpenSpan) -> Iterator[None]:
        steps = engine.global_steps
        with _name(span):
            yield
        if span.kind == "step" and engine.global_steps > steps:
            profile.step()

    stops = engine.spans.read(named), engine.grid.spans.read(_name, *OPERATIONS)
    profile.start()
    # A program that ends before the last of these steps writes those that it has. Without the stop, torch ends the
    # process with a segmentation fault.
    atexit.register(profile.stop)


@contextmanager
def _name(span: OpenSpan) -> Iterator[None]:
    """Context in which the profiler has a span's name. Of an asynchronous operation it names the wait alone.

    The names of one thread must lie within each other.
    """
    with ExitStack() as stack:

        def name() -> None:
            stack.enter_context(torch.profiler.record_function(str(span.about)))

        if isinstance(span.about, Operation) and span.about.async_op:
            span.at_turn(name)
        else:
            name()
        yield
