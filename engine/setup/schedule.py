"""Pipeline schedule of a training step, from ``options.schedule``, and the cut that suits it."""

from __future__ import annotations

from ...base.errors import ConfigError
from ...base.option_error import OptionError
from ...options.schedule import ScheduleOptions
from ...pipe.cuts import StageCut, find_cut
from ...pipe.module import PipelineModule
from ...pipe.partition import SEARCHED
from ...pipe.program.schedule import Schedule
from ...pipe.schedules.choose import require_size
from .asked_schedule import schedule_of


def training_schedule(
    module: PipelineModule, options: ScheduleOptions, microbatches: int, chunks: int | None
) -> Schedule:
    """Return the schedule that was given, or the one that the options name.

    Args:
        module: the model.
        options: the options.
        microbatches: microbatches of a step.
        chunks: stages per rank; None: as many as the schedule needs.

    Raises:
        OptionError: if the schedule does not run this many chunks, or is for another number of ranks or microbatches.
    """
    pipe = module.grid.pipe.size
    given: Schedule | None = options.value
    if chunks is None and options.name == "auto" and len(module.layer_specs) < 2 * pipe:
        chunks = 1  # the search tries two stages per rank too
    try:
        if given is None:
            return schedule_of(options, pipe, microbatches, chunks)
        slices = options.slices if options.changes("slices") else None
        require_size(given, given.name, pipe, microbatches, chunks, slices=slices)
    except ValueError as error:
        hint = "" if chunks is None else " (PipelineModule(..., chunks=) sets the chunks)"
        raise OptionError("schedule.name", reason=f"{error}{hint}") from error
    return given


def searched_cut(
    module: PipelineModule, options: ScheduleOptions, microbatches: int, chunks: int | None
) -> StageCut | None:
    """Return the cut that the model's costs ask for; None if it has other boundaries.

    Args:
        module, options, microbatches: as for ``training_schedule``.
        chunks: stages per rank; None: the schedule's own number, or the best one if the schedule is searched.

    Raises:
        OptionError: an option has no meaning for such a cut, or the memory limit cannot be kept.
    """
    method, costs = module.partition, module.costs
    if costs is None or method not in SEARCHED:
        if options.limit is not None:
            raise OptionError(
                "schedule.limit", options.limit, "it is for PipelineModule(partition='time', 'memory' or 'auto')"
            )
        return None
    assert isinstance(method, str)
    for name in ("costs", "memory", "slices"):
        if options.changes(name):
            reason = f"partition={method!r} goes by the costs of the layers: leave it out, or give <schedule.limit>"
            raise OptionError(f"schedule.{name}", getattr(options, name), reason)
    named = options.changes("name") and options.name != "auto"
    if method == "auto" and named:
        raise OptionError(
            "schedule.name", options.name, "partition='auto' chooses the schedule: leave it out, or partition='time'"
        )
    if method != "auto" and options.name == "auto":
        raise OptionError("schedule.name", "auto", "write partition='auto', which chooses schedule and cut together")
    pipe = module.grid.pipe.size
    try:
        if method == "auto":
            return find_cut(method, costs, pipe, microbatches, chunks=chunks, limit=options.limits)
        schedule = training_schedule(module, options, microbatches, chunks)
        return find_cut(method, costs, pipe, microbatches, schedule, limit=options.limits)
    except ConfigError as error:
        if isinstance(error, OptionError):
            raise
        raise OptionError("schedule.limit", reason=str(error)) from error
