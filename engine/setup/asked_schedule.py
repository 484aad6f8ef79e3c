"""Schedule that ``options.schedule`` asks for: by name, with pairs of passes, offloads and recomputations. No torch."""

from __future__ import annotations

from dataclasses import replace

from ...base.option_error import Note, OptionError, refusal
from ...options.schedule import ScheduleOptions
from ...pipe.program.costs import Costs
from ...pipe.program.offload import offload_pass
from ...pipe.program.pairs import pair_pass
from ...pipe.program.recompute_pass import recompute_pass
from ...pipe.program.schedule import Schedule
from ...pipe.schedules.choose import make_schedule


def schedule_of(options: ScheduleOptions, pipe: int, microbatches: int, chunks: int | None) -> Schedule:
    """Return the schedule that options (options/schedule.py) name.

    ``auto`` chooses what to recompute, and with a memory limit what to offload too.

    Raises:
        ValueError: as ``make_schedule``.
    """
    offload, costs = options.offload, _costs(options)
    share = offload.fraction if options.chooses_offload else 0.0
    again = options.recompute if options.name == "auto" else 0.0
    memory, stages = options.memory, offload.stages
    return make_schedule(options.name, pipe, microbatches, chunks, costs, memory, share, again, stages, options.slices)


def _costs(options: ScheduleOptions) -> Costs:
    copy = options.offload.copy_time
    return replace(Costs(*options.costs), O=copy, R=copy)


def with_passes(
    schedule: Schedule, options: ScheduleOptions, layers_recompute: bool = False
) -> tuple[Schedule, list[Note]]:
    """Return a schedule with the pairs, offloads and recomputations that options ask for.

    An engine, a training file and ``triax plan`` make their schedules by this function, and so refuse the same options.

    Args:
        schedule: as ``schedule_of`` returns it; a schedule of forwards alone stays as it is.
        options: the options.
        layers_recompute: the option ``recompute`` of the engine runs layers again in the backward passes.

    Returns:
        The schedule, and notes on options that change nothing in it.

    Raises:
        OptionError: the options contradict one another, or the schedule.
    """
    notes: list[Note] = []
    if schedule.forward_only:
        return schedule, notes
    offload, costs, name = options.offload, _costs(options), schedule.name
    if options.pairs is not None:
        try:
            schedule = pair_pass(schedule, replace(costs, AR=options.pairs))
        except ValueError as error:
            raise OptionError("schedule.pairs", reason=str(error)) from error
        if not schedule.pairs:
            why = f"joins no passes of {name}, as no pair makes its step shorter; leave it out"
            notes.append(Note("schedule.pairs", why))
    if offload.device != "none" and not (schedule.offloads or options.chooses_offload):
        try:
            schedule = offload_pass(schedule, offload.fraction, offload.stages, costs)
        except ValueError as error:
            raise OptionError("schedule.offload", reason=str(error)) from error
        if not schedule.offloads:
            why = f"offloads nothing with {name}: no copy fits that lowers a peak; set it to none"
            notes.append(Note("schedule.offload", why))
    if options.recompute and options.name != "auto" and not schedule.recomputes:
        try:
            schedule = recompute_pass(schedule, options.recompute, costs=costs)
        except ValueError as error:
            raise OptionError("schedule.recompute", options.recompute, str(error)) from error
        if not schedule.recomputes:
            notes.append(
                Note("schedule.recompute", f"recomputes nothing with {name}, because no peak would become smaller")
            )
    if schedule.recomputes and layers_recompute:
        raise refusal(
            f"<recompute> and a schedule that recomputes ({name}) are both given, and each layer would run three "
            "times: leave one of them out"
        )
    return schedule, notes
