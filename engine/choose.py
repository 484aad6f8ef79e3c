"""Which schedule a configuration or a command asks for: a name, a search, or a file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ..pipe.schedules import Schedule, make_schedule
from ..pipe.search import find_schedule
from ..pipe.simulate import Costs

FILES = (".csv", ".json")


def choose_schedule(
    name: str,
    pipe: int,
    microbatches: int,
    chunks: int | None = None,
    costs: Costs | None = None,
    memory: float | Sequence[float] | None = None,
) -> Schedule:
    """The schedule ``name``: a published one, ``auto`` (the best found for ``costs``), or the path of a file.

    Args:
        name: one of ``triax.pipe.schedules.NAMES``, ``auto``, or a path that ends in .csv or .json.
        pipe: ranks of the pipe axis.
        microbatches: of a step.
        chunks: stages per rank; None: the schedule's own.
        costs: for ``auto``: of F, I, W and a message.
        memory: for ``auto``: activations that a rank may hold, in microbatches through 1/pipe of the model;
            None: as many as 1F1B holds.

    Raises:
        ValueError: no such schedule, or a file of another size.
    """
    if name == "auto":
        return find_schedule(pipe, microbatches, costs, pipe if memory is None else memory, chunks)
    if not name.endswith(FILES):
        return make_schedule(name, pipe, microbatches, chunks)
    schedule = read_schedule(Path(name))
    found = schedule.pipe, schedule.microbatches, schedule.chunks
    wanted = pipe, microbatches, schedule.chunks if chunks is None else chunks
    if found != wanted:
        raise ValueError(
            "{} is a schedule of pipe {}, microbatches {}, chunks {}; this run has {}, {}, {}: write one of that size, "
            "or change the run's".format(name, *found, *wanted)
        )
    return schedule


def read_schedule(path: Path) -> Schedule:
    """A schedule from .json (as ``triax schedule --json`` prints it) or CSV (as torch's pipelining writes it).

    Raises:
        ValueError: the file is not there, or not a schedule.
    """
    try:
        content = path.read_text(encoding="utf-8")
        if path.suffix == ".json":
            return Schedule.from_json(content)
        return Schedule.from_csv(content, name=path.stem)
    except OSError as error:
        raise ValueError(f"the schedule {path} cannot be read: {error.strerror}") from None
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{path}: {error}") from None
