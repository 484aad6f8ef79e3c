"""Pipeline schedule of a training step, from ``options.schedule``."""

from __future__ import annotations

from ...base.option_error import OptionError
from ...options.schedule import ScheduleOptions
from ...pipe.module import PipelineModule
from ...pipe.program.schedule import Schedule
from ...pipe.program.simulate import Costs
from ...pipe.schedules.choose import make_schedule, require_size


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
    pipe, costs = module.grid.pipe.size, Costs(*options.costs)
    given: Schedule | None = options.value
    if chunks is None and options.name == "auto" and len(module.layer_specs) < 2 * pipe:
        chunks = 1  # the search tries two stages per rank too
    try:
        if given is None:
            return make_schedule(options.name, pipe, microbatches, chunks, costs, options.memory)
        require_size(given, given.name, pipe, microbatches, chunks)
    except ValueError as error:
        hint = "" if chunks is None else " (PipelineModule(..., chunks=) sets the chunks)"
        raise OptionError("schedule.name", reason=f"{error}{hint}") from error
    return given
