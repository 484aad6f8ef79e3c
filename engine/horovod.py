"""What a script of Horovod's asks first: ``init``, ``rank``, ``size`` and their like.

Nothing in this house is global, but for the one list in this file. In Horovod's interface the processes are known to
everybody: ``hvd.rank()`` and ``hvd.allreduce(tensor)`` take no grid, and a script whose import alone is changed must
find them so. ``init`` makes a grid as anybody may, all of its ranks replicas, and keeps it here; the functions of the
``horovod_*`` files ask ``job()`` for it, and nothing else in triax does.
"""

from __future__ import annotations

import atexit
import socket
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch.distributed as dist

from ..grid import Axis, Grid
from ..grid.environment import local_place
from ..grid.timeline import record
from .horovod_calls import Calls, Request


@dataclass
class Job:
    """What ``init`` made.

    Attributes:
        grid: of all processes, on its data axis.
        axis: of these, for the calls of the script: others may use the grid's own meanwhile.
        calls: they run here, one after the other.
        places: of each rank, its number on its host and how many are there.
        timeline: the file that ``start_timeline`` named, and the folder of the parts.
    """

    grid: Grid
    axis: Axis
    calls: Calls
    places: list[tuple[int, int]]
    timeline: tuple[Path, tempfile.TemporaryDirectory[str]] | None = None


_JOB: list[Job] = []  # empty, or the one


def init(comm: Sequence[int] | None = None, process_sets: Any = None, *, timeout: float = 600.0) -> None:
    """Join the other processes as the launcher says: ``triax run``, torchrun, mpirun or srun. Without one: alone.

    A second call does nothing.

    Args:
        comm, process_sets: Horovod's subsets of processes: refused.
        timeout: seconds that any wait may take before it is an error.

    Raises:
        ValueError: a subset is asked for.
    """
    if comm or process_sets:
        no_process_sets()
    if _JOB:
        return
    grid = Grid(timeout=timeout)
    axis = grid.subgroup("data", range(grid.size), " of Horovod's calls")
    assert axis is not None
    axis.grid = grid
    here = local_place() if grid.size > 1 else (0, 1)
    told = grid.world.all_gather_object((here, socket.gethostname()))
    if all(place is not None for place, _ in told):
        places = [place for place, _ in told]
    else:
        hosts = [host for _, host in told]
        places = [(hosts[:rank].count(host), hosts.count(host)) for rank, host in enumerate(hosts)]
    _JOB.append(Job(grid, axis, Calls(grid, axis), places))
    atexit.register(_leave)


def shutdown() -> None:
    """Forget what ``init`` made, when what is under way has ended; ``init`` may follow. Every rank calls it.

    The processes stay connected until they end, so that nobody who is still at work loses a connection. Before any
    ``init`` it does nothing.
    """
    if _JOB and _JOB[0].timeline is not None:
        stop_timeline()
    _leave()


def _leave() -> None:
    """At exit too, when other ranks may have failed: nothing is asked of them."""
    if not _JOB:
        return
    _JOB.pop().calls.close()
    atexit.unregister(_leave)


def is_initialized() -> bool:
    """Whether ``init`` was called, and not ``shutdown`` since."""
    return bool(_JOB)


def job() -> Job:
    """What ``init`` made.

    Raises:
        ValueError: it was not called.
    """
    if not _JOB:
        raise ValueError("triax.init() was not called: call it once, before anything else of Horovod's interface")
    return _JOB[0]


def rank() -> int:
    """This process's number among all."""
    return job().grid.rank


def size() -> int:
    """How many processes there are."""
    return job().grid.size


def local_rank() -> int:
    """This process's number on its host: that of its GPU."""
    return job().places[rank()][0]


def local_size() -> int:
    """How many processes this host has."""
    return job().places[rank()][1]


def cross_rank() -> int:
    """Of the processes that have the same ``local_rank`` on their hosts, how many come before this one."""
    return [place for place, _ in job().places[: rank()]].count(local_rank())


def cross_size() -> int:
    """How many processes have the same ``local_rank``: one on each host that has so many."""
    return [place for place, _ in job().places].count(local_rank())


def is_homogeneous() -> bool:
    """Whether every host has as many processes."""
    return len({count for _, count in job().places}) == 1


def mpi_threads_supported() -> bool:
    """False: there is no MPI underneath."""
    job()
    return False


def mpi_enabled() -> bool:
    """False: ``mpirun`` may start the processes, and they talk over gloo or NCCL."""
    return False


def mpi_built() -> bool:
    """False, as ``mpi_enabled``."""
    return False


def gloo_enabled() -> bool:
    """Whether torch has gloo."""
    return bool(dist.is_gloo_available())


def gloo_built() -> bool:
    """The same."""
    return gloo_enabled()


def nccl_built() -> int:
    """1 where torch has NCCL, else 0."""
    return int(dist.is_nccl_available())


def start_timeline(file_path: str | Path, mark_cycles: bool = False) -> None:
    """Record from here to ``stop_timeline`` what these processes do, for ``ui.perfetto.dev``. Every rank calls it.

    ``triax run --timeline FILE`` records a whole run, crashes included.

    Raises:
        ValueError: one is recorded already, or ``mark_cycles``: nothing here works in cycles.
    """
    made = job()
    if mark_cycles:
        raise ValueError("mark_cycles=True: collectives start when they are asked for, and there are no cycles to mark")
    if made.grid.timeline is not None:
        raise ValueError("a timeline is recorded already, by triax run --timeline or start_timeline")
    folder = tempfile.TemporaryDirectory(prefix="triax-timeline-")
    _behind_all(made, "start_timeline")
    record(made.grid, folder.name)
    made.timeline = (Path(file_path), folder)


def stop_timeline() -> None:
    """Write the file that ``start_timeline`` named, on rank 0. Every rank calls it.

    Raises:
        ValueError: none is recorded since ``start_timeline``.
    """
    made = job()
    if made.timeline is None or made.grid.timeline is None:
        raise ValueError("no timeline is recorded: call start_timeline(file) before")
    from .timeline_file import merged
    from .trace import write_trace

    _behind_all(made, "stop_timeline")
    file, folder = made.timeline
    recorder, made.timeline, made.grid.timeline = made.grid.timeline, None, None
    recorder.close()
    parts = made.grid.world.all_gather_object(recorder.file.read_text(encoding="utf-8"))
    folder.cleanup()
    if made.grid.rank == 0:
        write_trace(merged(parts), file)
    made.grid.world.barrier()


def _behind_all(made: Job, call: str) -> None:
    """Wait for every rank to be here, and for what it started: recording begins and ends between two operations."""
    made.calls.now(Request(call, "the timeline", "all"), lambda axis: axis.barrier())


# ----------------------------------------------------------------------------------------------------- process sets


class ProcessSet:
    """Horovod's subsets of the processes. There is the one of all, ``global_process_set``; others are refused.

    Raises:
        ValueError: it is made.
    """

    process_set_id = 0

    def __init__(self, ranks: Sequence[int] = ()) -> None:
        no_process_sets()

    def size(self) -> int:
        """Of all processes."""
        return size()

    def rank(self) -> int:
        """This process's."""
        return rank()

    def included(self) -> bool:
        """Every process is."""
        return True


global_process_set: ProcessSet = ProcessSet.__new__(ProcessSet)


def add_process_set(process_set: Any) -> NoReturn:
    """Refused.

    Raises:
        ValueError: always.
    """
    no_process_sets()


def remove_process_set(process_set: Any) -> NoReturn:
    """Refused.

    Raises:
        ValueError: always.
    """
    no_process_sets()


def no_process_sets() -> NoReturn:
    """Say what to use in their place."""
    raise ValueError(
        "process sets are not here: groups of processes are the axes of a grid. Make one, grid = triax.Grid(tensor=2), "
        "and use grid.data, grid.tensor, or grid.subgroup(axis, members) for some of an axis; for tensor or pipeline "
        "parallel training see triax.initialize"
    )


def only_global(process_set: ProcessSet | None) -> None:
    """Refuse any other than that of all processes."""
    if process_set is not None and process_set is not global_process_set:
        no_process_sets()
