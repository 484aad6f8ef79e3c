"""Choice of a schedule by name, by search (`auto`), or from a file: the public `make_schedule`.

Another package adds names by entry points: [project.entry-points."triax.schedules"] name = "package.module:function",
where function(pipe, microbatches, chunks) returns a Schedule; chunks is None if the user gave none.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from importlib.metadata import EntryPoints
from pathlib import Path

from ...base.entry_points import offered
from ...base.errors import ConfigError, nearest, no_such
from ...base.files import read_text
from ..program.costs import Costs
from ..program.schedule import Schedule
from ..program.slices import slice_lengths
from ..program.zero_bubble_log import from_zero_bubble, to_zero_bubble
from .fitting import find_fitting
from .registry import RECIPES, named_schedule
from .search import find_schedule

NAMES = (*RECIPES, "auto")
FILES = (".csv", ".json", ".txt")  # endings of schedule files
_GROUP = "triax.schedules"  # of other packages' entry points


def make_schedule(
    name: str,
    pipe: int,
    microbatches: int,
    chunks: int | None = None,
    costs: Costs | None = None,
    memory: float | Sequence[float] | None = None,
    offload: float = 0.0,
    recompute: float = 0.0,
    offload_stages: Collection[int] | None = None,
    slices: int | Sequence[float] = 1,
) -> Schedule:
    """Make or read a schedule: a published one, ``auto`` (the best found for ``costs``), or a file.

    >>> print(triax.make_schedule("1f1b", pipe=2, microbatches=3))
    1f1b: pipe 2, microbatches 3, chunks 1
    rank 0: 0F0 0F1 0B0 0F2 0B1 0B2
    rank 1: 1F0 1B0 1F1 1B1 1F2 1B2

    Args:
        name: a published name (``triax.pipe.schedules.registry.RECIPES``), ``auto``, a path that ends in .csv,
            .json or .txt, or the name of another package's entry point (group ``triax.schedules``).
        pipe: ranks of the pipe axis.
        microbatches: microbatches of a step.
        chunks: stages per rank; None: the schedule's default.
        costs: for ``auto``: the costs of F, I, W, a message, and copies to the host (O) and back (R).
        memory: for ``auto``: the activations that a rank may hold, in microbatches through 1/pipe of the model;
            None: as many as 1F1B holds.
        offload, recompute: for ``auto``: the largest shares of a rank's activations that may be in host memory, and
            that may be recomputed by ops of the schedule, 0 to 1. The search does so where that makes the step shorter
            within the limit.
        offload_stages: for ``auto``: stages whose activations may be offloaded; None: all.
        slices: slices of each microbatch along its tokens (``program/slices.py``): their number, or their relative
            lengths. A file says it itself.

    Raises:
        ValueError: an unknown name, sizes that the schedule does not exist for, or a file of other sizes.
    """
    sliced = len(slice_lengths(slices)) > 1
    if sliced and name not in RECIPES and not name.endswith(FILES):
        raise ValueError(f"{name} runs whole microbatches: for slices={slices} name a schedule, such as 1f1b")
    if name == "auto":
        limit = pipe if memory is None else memory
        if offload or recompute:
            return find_fitting(pipe, microbatches, costs, limit, chunks, offload, recompute, offload_stages)
        return find_schedule(pipe, microbatches, costs, limit, chunks)
    if not name.endswith(FILES):
        installed = _installed(name)
        if name not in installed.names:
            if name not in RECIPES:
                raise ValueError(f"there is no schedule {name!r}; {nearest(name, schedule_names())}")
            return named_schedule(name, pipe, microbatches, chunks, slices)
        made = installed[name].load()(pipe, microbatches, chunks)
        if not isinstance(made, Schedule):
            raise TypeError(f"{installed[name].value} returned a {type(made).__name__}, but must return a Schedule")
        require_size(made, name, pipe, microbatches, chunks, f"{installed[name].value} must make it, or raise.")
        return made
    schedule = read_schedule(Path(name))
    require_size(schedule, name, pipe, microbatches, chunks, slices=slices if sliced else None)
    return schedule


def _installed(name: str | None = None) -> EntryPoints:
    """Return other packages' schedules; none for a published name, which keeps its meaning."""
    return EntryPoints() if name in NAMES else offered(_GROUP)


def schedule_names() -> tuple[str, ...]:
    """Return the names of all schedules: the published ones, ``auto``, and those of installed packages."""
    return (*NAMES, *sorted(_installed().names - set(NAMES)))


def require_schedule(where: str, name: str) -> None:
    """Check that a name is a schedule's, ``auto``, or ends as a schedule's file.

    Args:
        where: the key or argument that has the name, for the message.
        name: the name.

    Raises:
        ConfigError: it is none of them; the message has the nearest name.
    """
    if name not in NAMES and not name.endswith(FILES) and name not in (names := schedule_names()):
        raise ConfigError(no_such(where, name, names))


def require_size(
    schedule: Schedule,
    name: str,
    pipe: int,
    microbatches: int,
    chunks: int | None,
    advice: str = "",
    slices: int | Sequence[float] | None = None,
) -> None:
    """Check that a schedule is for these sizes; ``chunks`` None: for any number of stages per rank.

    Args:
        schedule: the schedule.
        name: its name or file, for the message.
        pipe: ranks of the pipe axis.
        microbatches: microbatches of a step.
        chunks: stages per rank.
        advice: end of the message, if not that of a file.
        slices: slices of each microbatch, or their lengths; None: as the schedule has them.

    Raises:
        ValueError: it is for others.
    """
    own_sizes = schedule.pipe, schedule.microbatches, schedule.chunks
    wanted = pipe, microbatches, schedule.chunks if chunks is None else chunks
    if own_sizes != wanted:
        sizes = "pipe {}, microbatches {}, chunks {}".format
        advice = advice or (
            "Write one of that size, or change the run's. A function that is registered under a name (entry points, "
            f"group {_GROUP}) makes one of every size."
        )
        raise ValueError(f"{name} is a schedule of {sizes(*own_sizes)}; this run has {sizes(*wanted)}. {advice}")
    if slices is not None and (lengths := slice_lengths(slices)) != schedule.slices:
        raise ValueError(
            f"{name} is a schedule of slices with the lengths {schedule.slices}; this run has {lengths}. Leave out "
            "slices: the schedule says it (in JSON, which CSV cannot)"
        )


def read_schedule(path: Path) -> Schedule:
    """Read a schedule from a file, by the ending of its name.

    .json: as ``triax schedule --json`` prints it; .csv: as torch's pipelining writes it; .txt: as the zero-bubble
    repository prints it (program/zero_bubble_log.py).

    Raises:
        ValueError: the file is not there, or not a schedule.
    """
    try:
        content = read_text(path)
        if path.suffix == ".json":
            return Schedule.from_json(content)
        if path.suffix == ".txt":
            return from_zero_bubble(content, path.stem)
        return Schedule.from_csv(content, name=path.stem)
    except OSError as error:
        raise ValueError(f"the schedule {path} cannot be read: {error.strerror}") from None
    except RecursionError:
        raise ValueError(
            f"{path} is nested too deeply for a schedule: write what `triax schedule --json` prints"
        ) from None
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{path}: {error}") from None


def write_schedule(schedule: Schedule, path: Path) -> None:
    """Write a schedule to a file that ``read_schedule`` reads; the ending of its name is .json, .csv or .txt.

    Raises:
        ValueError: the name has another ending, or the format has no such ops.
    """
    if path.suffix not in FILES:
        raise ValueError(f"{path} must end in .json, .csv (torch's pipelining) or .txt (the zero-bubble repository)")
    if len(schedule.slices) > 1 and path.suffix != ".json":
        raise ValueError(f"{path} cannot say that the ops are of {len(schedule.slices)} slices: write a .json file")
    added = next((op for order in schedule.orders for op in order if op.kind in "COR"), None)
    if added is not None and path.suffix == ".csv":
        raise ValueError(
            f"{path} cannot contain {added}, because torch's pipelining has no ops that offload, reload or recompute: "
            "write a .json file"
        )
    if path.suffix == ".txt":
        content = to_zero_bubble(schedule)
    else:
        content = schedule.to_csv() if path.suffix == ".csv" else schedule.to_json()
    path.write_text(content, encoding="utf-8")
