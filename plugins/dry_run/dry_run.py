"""Dry run: one rank of every class of a cluster's ranks, in forked processes of this machine, on the meta device."""

from __future__ import annotations

import gc
import importlib
import os
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ...base.errors import ConfigError
from ...base.temporary_folders import temporary_folder
from ...grid.launcher.worker import killed_with_parent
from ...grid.topology import Topology
from .classes import Classes
from .exchange import Hub
from .group import column
from .match import mismatches
from .rank import Settings, be_rank

Record = dict[str, Any]
_ENDED = ("step", "no step")
_EVERY = 10.0  # seconds between two lines of progress
# Imported once, before there are ranks. torch imports the second with the first optimizer.
_PRELOAD = ("torch.distributed.fsdp", "torch._dynamo", "triax.inference.engine", "triax.models")


class DryRun:
    """Findings of a dry run.

    Attributes:
        settings: its settings.
        records: rank -> what it recorded, of the ranks that were run.
        classes: classes of ranks.
        problems: sentences: what would have failed on the cluster.
        logs: rank -> the end of its output, of ranks that failed.
        seconds: time of the dry run.
        joined: values that ranks exchanged, as ``Hub`` keeps them.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.records: dict[int, Record] = {}
        self.classes = Classes(Topology(data=settings.ranks))
        self.problems: list[str] = []
        self.logs: dict[int, str] = {}
        self.seconds = 0.0
        self.joined: dict[str, dict[int, Any]] = {}


def dry_run(
    program: Callable[[], None], settings: Settings, progress: Callable[[str], object] = lambda line: None
) -> DryRun:
    """Run a program as ranks of a cluster, without the cluster.

    Each rank is a forked process: what a script leaves in its module, in the environment and in torch's process groups
    is gone with it, and what is imported here is not imported again. The stages of one pipeline run at the same time,
    because they exchange shapes; one pipeline runs after the other. When this process is killed, they end (on Linux).

    Args:
        program: runs the user's program, e.g. ``Script.run``. It is called in the forked processes.
        settings: number of ranks, steps, and the stand-in for values that are not known.
        progress: called with a line for each pipeline, and every 10 s.
    """
    if settings.ranks < 1:
        raise ConfigError(f"You asked for a dry run of {settings.ranks} ranks, but at least 1 is required.")
    begun, run = time.monotonic(), DryRun(settings)
    for name in _PRELOAD:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # the ranks share these objects, whose pages the collector would write to

    def say(line: str) -> None:
        progress(f"dry run, {time.monotonic() - begun:.0f} s: {line}")

    with temporary_folder("dry") as folder:
        _run_pipeline(run, program, folder, 0, say)
        first = run.records[0]
        axes = first["axes"] or {"data": settings.ranks}
        run.classes = Classes(Topology(**axes, expert=first["expert"]))
        run.classes.learn(run.records)
        ahead: int | None = settings.ranks - 1
        while ahead is not None and all(record["outcome"] in _ENDED for record in run.records.values()):
            if ahead not in run.records:
                _run_pipeline(run, program, folder, ahead, say)
                run.classes.learn(run.records)
            ahead = run.classes.next_rank(run.records)
    run.problems = _problems(run, run.classes)
    run.seconds = time.monotonic() - begun
    return run


def _run_pipeline(
    run: DryRun, program: Callable[[], None], folder: Path, rank: int, say: Callable[[str], None]
) -> None:
    """Run a rank, and the other stages of its pipeline as soon as its grid is known."""
    started: list[int] = []
    say(f"rank {rank} of {run.settings.ranks:,} and its pipeline run a step; {len(run.records)} ranks have")
    said, parent = time.monotonic(), os.getpid()

    def start(each: int) -> None:
        ours, theirs = socket.socketpair()
        process = os.fork()
        if process == 0:
            killed_with_parent()
            if os.getppid() != parent:
                os._exit(1)
            ours.close()
            be_rank(each, run.settings, program, theirs, folder / f"{each}.log")
        theirs.close()
        started.append(process)
        hub.add(each, ours)

    def announced(asking: int, message: Record) -> None:
        if asking == rank:
            topology = Topology(**message["axes"], expert=message["expert"])
            for other in column(topology, rank):
                if other != rank:
                    start(other)

    def beat() -> None:
        nonlocal said
        if time.monotonic() - said >= _EVERY:
            said = time.monotonic()
            say(f"{len(started) - len(hub.ended)} ranks still compute")

    hub = Hub(announced, run.joined, beat)
    start(rank)
    try:
        hub.run()
    finally:
        for process in started:
            _reap(process, kill=len(hub.ended) < len(started))
    lost: Record = {"groups": [], "operations": [], "comparisons": [], "untraced": [], "asked": {}, "mixed": {}}
    lost |= {"outcome": "error", "error": "its process was killed", "microbatches": None, "axes": None, "expert": 1}
    for each, record in hub.ended.items():
        run.records[each] = record or dict(lost)
        if run.records[each]["outcome"] != "step":
            run.logs[each] = (folder / f"{each}.log").read_text(errors="replace")


def _reap(process: int, kill: bool) -> None:
    if kill:
        os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)


def _problems(run: DryRun, classes: Classes) -> list[str]:
    """Return what would have failed on the cluster: errors, mismatched operations, and then hangs."""
    errors: dict[str, list[int]] = {}
    hangs: dict[str, list[int]] = {}
    for rank, record in sorted(run.records.items()):
        if record["outcome"] in ("error", "hang"):
            (errors if record["outcome"] == "error" else hangs).setdefault(record["error"], []).append(rank)
    # First the mismatches: an error may follow from one.
    found = mismatches(classes, run.records)
    found += [f"{_ranks(ranks)}: {error}" for error, ranks in errors.items()]
    # A rank that waits for one that failed is no finding of its own.
    return found or [f"{_ranks(ranks)}: {text}" for text, ranks in hangs.items()]


def _ranks(ranks: list[int]) -> str:
    listed = ", ".join(map(str, ranks[:4])) + (f" and {len(ranks) - 4} more" if len(ranks) > 4 else "")
    return f"rank {listed}" if len(ranks) == 1 else f"ranks {listed}"
