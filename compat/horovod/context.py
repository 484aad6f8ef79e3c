"""Horovod's process context: ``init``, ``rank``, ``size``, process sets and the timeline.

Horovod's functions take no grid: ``hvd.rank()`` and ``hvd.allreduce(tensor)`` must work in a script of which only the
import was changed. ``init`` therefore makes a grid (every rank a replica) and keeps it in ``_context``, the one global
variable of this package; the functions of the other files get it by calling ``context()``.
"""

from __future__ import annotations

import atexit
import socket
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch.distributed as dist

from ...base.checks import check_path
from ...base.records import Records
from ...grid import Axis, Grid
from ...grid.comm.timeline_recorder import TimelineRecorder
from ...grid.environment import local_place
from .negotiation import CollectiveQueue, CollectiveRequest


@dataclass
class HorovodContext:
    """State made by ``init``.

    Attributes:
        grid: all processes, on the data axis.
        axis: an axis of all processes, used by Horovod's collectives alone.
        queue: runs the collectives, one at a time.
        places: for each rank, its number on its host and the number of processes on that host.
        timeline: the file given to ``start_timeline``, the temporary folder of each rank's part, the recorder, and the
            function that stops recording.
    """

    grid: Grid
    axis: Axis
    queue: CollectiveQueue
    places: list[tuple[int, int]]
    timeline: tuple[Path, tempfile.TemporaryDirectory[str], TimelineRecorder, Callable[[], None]] | None = None


_context: HorovodContext | None = None


def init(comm: Sequence[int] | None = None, process_sets: Any = None, *, timeout: float = 600.0) -> None:
    """Join the processes that a launcher started (``triax run``, torchrun, mpirun, srun); else run as one process.

    A second call has no effect. Collective.

    Args:
        comm, process_sets: Horovod's subsets of processes: not supported.
        timeout: seconds after which a wait for another rank is an error.

    Raises:
        ValueError: ``comm`` or ``process_sets`` is given.
    """
    global _context
    if comm or process_sets:
        refuse_process_sets()
    if _context is not None:
        return
    grid = Grid(timeout=timeout)
    axis = grid.subgroup("data", range(grid.size), " of Horovod's calls")
    assert axis is not None
    here = local_place() if grid.size > 1 else (0, 1)
    told = grid.world.all_gather_json((here, socket.gethostname()))
    if all(rank_and_host is not None for rank_and_host, _ in told):
        places = [rank_and_host for rank_and_host, _ in told]
    else:
        hosts = [host for _, host in told]
        places = [(hosts[:rank].count(host), hosts.count(host)) for rank, host in enumerate(hosts)]
    _context = HorovodContext(grid, axis, CollectiveQueue(grid, axis), places)
    atexit.register(_close)


def shutdown() -> None:
    """Drop the context that ``init`` made, after the collectives that are still running. Every rank calls it.

    ``init`` may be called again. The process group stays connected until the process ends, so that ranks that are still
    running lose no connection. Without a context it does nothing.
    """
    if _context is not None and _context.timeline is not None:
        stop_timeline()
    _close()


def _close() -> None:
    """Drop the context without a collective: at exit, other ranks may have failed."""
    global _context
    if _context is None:
        return
    _context.queue.close()
    _context = None
    atexit.unregister(_close)


def is_initialized() -> bool:
    """Return True between ``init`` and ``shutdown``."""
    return _context is not None


def context() -> HorovodContext:
    """Return the context that ``init`` made.

    Raises:
        ValueError: ``init`` was not called.
    """
    if _context is None:
        raise ValueError("hvd.init() was not called: call it once, before any other function of Horovod's API")
    return _context


def rank() -> int:
    """Return this process's rank."""
    return context().grid.rank


def size() -> int:
    """Return the number of processes."""
    return context().grid.size


def local_rank() -> int:
    """Return this process's number on its host, which is also the index of its GPU."""
    return context().places[rank()][0]


def local_size() -> int:
    """Return the number of processes on this host."""
    return context().places[rank()][1]


def cross_rank() -> int:
    """Return this process's number among the processes of the same ``local_rank`` on all hosts."""
    return [place for place, _ in context().places[: rank()]].count(local_rank())


def cross_size() -> int:
    """Return the number of hosts that have a process with this process's ``local_rank``."""
    return [place for place, _ in context().places].count(local_rank())


def is_homogeneous() -> bool:
    """Return True if every host has the same number of processes."""
    return len({count for _, count in context().places}) == 1


def mpi_threads_supported() -> bool:
    """Return False: triax does not use MPI."""
    context()
    return False


def mpi_enabled() -> bool:
    """Return False: processes communicate over gloo or NCCL, also when ``mpirun`` started them."""
    return False


def mpi_built() -> bool:
    """Return False: triax does not use MPI."""
    return False


def gloo_enabled() -> bool:
    """Return True if torch was built with gloo."""
    return bool(dist.is_gloo_available())


def gloo_built() -> bool:
    """Return True if torch was built with gloo."""
    return gloo_enabled()


def nccl_built() -> int:
    """Return 1 if torch was built with NCCL, else 0."""
    return int(dist.is_nccl_available())


def start_timeline(file_path: str | Path, mark_cycles: bool = False) -> None:
    """Record a timeline of all ranks until ``stop_timeline``, for ``ui.perfetto.dev``. Every rank calls it.

    ``triax run --timeline FILE`` records a whole run, also one that fails.

    Raises:
        ValueError: a timeline is being recorded already, ``mark_cycles`` is set (triax has no cycles), or
            ``file_path`` is no path.
    """
    hvd = context()
    check_path("start_timeline", file_path=file_path)
    if mark_cycles:
        raise ValueError("mark_cycles=True: triax has no cycles, collectives start when they are called: leave it out")
    if hvd.grid.spans.reader(TimelineRecorder) is not None:
        raise ValueError("a timeline is being recorded already, by triax run --timeline or start_timeline")
    folder = tempfile.TemporaryDirectory(prefix="triax-timeline-")
    _barrier(hvd, "start_timeline")
    recorder = TimelineRecorder(folder.name, hvd.grid.rank, hvd.grid.describe())
    hvd.timeline = (Path(file_path), folder, recorder, hvd.grid.spans.read(recorder))


def stop_timeline() -> None:
    """Stop recording, and write the timeline to the file given to ``start_timeline``, on rank 0. Every rank calls it.

    Raises:
        ValueError: ``start_timeline`` was not called.
    """
    hvd = context()
    if hvd.timeline is None:
        raise ValueError("no timeline is being recorded: call start_timeline(file) before")
    from ...engine.monitor.trace.merge_timelines import merged
    from ...pipe.program.chrome_trace import write_trace

    _barrier(hvd, "stop_timeline")
    (file, folder, recorder, stop), hvd.timeline = hvd.timeline, None
    stop()
    recorder.close()
    parts = hvd.grid.world.all_gather_json(recorder.file.read_text(encoding="utf-8"))
    folder.cleanup()
    if hvd.grid.rank == 0:
        with Records().writing(str(file)):
            write_trace(merged(parts), file)
    hvd.grid.world.barrier()


def _barrier(hvd: HorovodContext, call: str) -> None:
    """Wait for every rank and its running collectives, so that recording begins and ends between two operations."""
    hvd.queue.run(CollectiveRequest(call, "the timeline", "all"), lambda axis: axis.barrier())


# ----------------------------------------------------------------------------------------------------- process sets


class ProcessSet:
    """Horovod's subset of the processes. Only ``global_process_set``, the set of all processes, exists.

    Raises:
        ValueError: on construction: other subsets are not supported.
    """

    process_set_id = 0

    def __init__(self, ranks: Sequence[int] = ()) -> None:
        refuse_process_sets()

    def size(self) -> int:
        """Return the number of all processes."""
        return size()

    def rank(self) -> int:
        """Return this process's rank."""
        return rank()

    def included(self) -> bool:
        """Return True: every process is in it."""
        return True


global_process_set: ProcessSet = ProcessSet.__new__(ProcessSet)


def add_process_set(process_set: Any) -> NoReturn:
    """Raise a ValueError: process sets are not supported."""
    refuse_process_sets()


def remove_process_set(process_set: Any) -> NoReturn:
    """Raise a ValueError: process sets are not supported."""
    refuse_process_sets()


def refuse_process_sets() -> NoReturn:
    """Raise a ValueError that says what to use in place of process sets."""
    raise ValueError(
        "process sets are not supported: groups of processes are the axes of a grid. Make grid = triax.Grid(tensor=2), "
        "and use grid.data, grid.tensor, or grid.subgroup(axis, members) for a part of an axis; for tensor or pipeline "
        "parallel training use triax.initialize"
    )


def require_global(process_set: ProcessSet | None) -> None:
    """Raise a ValueError for a process set other than the set of all processes."""
    if process_set is not None and process_set is not global_process_set:
        refuse_process_sets()
