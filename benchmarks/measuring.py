"""Measuring for the benchmarks: contenders in turn, the slowest rank's time, what others took of the machine, bytes."""

from __future__ import annotations

import ctypes
import gc
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import torch

import triax

DISTURBED = 0.04  # the share of the machine that other programs may take during a turn

T = TypeVar("T")


def in_turn(running: Sequence[T], rounds: int) -> Iterator[T]:
    """Each of them once a round, every round beginning one further down the list than the round before."""
    gc.collect()
    gc.freeze()  # what exists by now is no garbage: let no contender pay for looking through the others
    for round_ in range(rounds):
        for i in range(len(running)):
            yield running[(round_ + i) % len(running)]


def compare(name: str, found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """A benchmark of other numbers is worth nothing.

    Raises:
        AssertionError: a gradient is missing, or not plain autograd's.
    """
    if not found:
        raise AssertionError(f"{name} left no gradients")
    for parameter, gradient in found.items():
        message = f"{name}, the gradient of {parameter}: {{}}".format
        torch.testing.assert_close(gradient, expected[parameter], rtol=1e-4, atol=1e-6, msg=message)


def timed(grid: triax.Grid, step: Callable[[], None], turns: int, deadline: float) -> tuple[float, float]:
    """A step's time on the slowest rank, the mean of ``turns`` in a row; and the share of the machine others took.

    Until the deadline (of ``time.monotonic`` on rank 0), it waits for others to be idle, and a turn that they
    disturbed is done again.
    """
    while True:
        while grid.rank == 0 and time.monotonic() < deadline and _share_taken(0.15) > DISTURBED:
            pass
        grid.world.barrier()
        machine, mine, begin = _busy(), time.process_time(), time.perf_counter()
        for _ in range(turns):
            step()
        elapsed = torch.tensor(time.perf_counter() - begin, dtype=torch.float64)
        grid.world.all_reduce(elapsed, op="max")
        ours = torch.tensor(time.process_time() - mine, dtype=torch.float64)
        grid.world.all_reduce(ours)
        others = max(0.0, (_busy() - machine - float(ours)) / (float(elapsed) * (os.cpu_count() or 1)))
        again = torch.tensor(others > DISTURBED and time.monotonic() < deadline, dtype=torch.int64)
        grid.world.broadcast(again)
        if not again:
            return float(elapsed) / turns, others


def slowest(grid: triax.Grid, step: Callable[[], object]) -> float:
    """A step's time on the slowest rank."""
    grid.world.barrier()
    begin = time.perf_counter()
    step()
    elapsed = torch.tensor(time.perf_counter() - begin, dtype=torch.float64)
    grid.world.all_reduce(elapsed, op="max")
    return float(elapsed)


def timed_and_carried(grid: triax.Grid, step: Callable[[], None], deadline: float) -> tuple[float, float]:
    """A step's time, as ``timed`` has it, and the bytes that the loopback device carried meanwhile for each rank."""
    grid.world.barrier()
    before = carried()
    elapsed, _ = timed(grid, step, 1, deadline)
    grid.world.barrier()
    return elapsed, (carried() - before) / grid.size


def _share_taken(seconds: float) -> float:
    """The share of the machine that is taken while this process sleeps."""
    busy = _busy()
    time.sleep(seconds)
    return (_busy() - busy) / seconds / (os.cpu_count() or 1)


def _busy() -> float:
    """Seconds that the machine's cores have worked since it started; 0 where the system does not tell."""
    try:
        user, nice, system, _, _, *interrupts = map(int, Path("/proc/stat").read_text().split()[1:9])
        return (user + nice + system + sum(interrupts)) / os.sysconf("SC_CLK_TCK")
    except OSError:
        return 0.0


def carried() -> float:
    """Bytes that the loopback device has carried so far; NaN where the system does not tell."""
    try:
        lines = Path("/proc/net/dev").read_text().splitlines()
        return float(next(line for line in lines if line.strip().startswith("lo:")).split(":")[1].split()[8])
    except (OSError, StopIteration):
        return float("nan")


def growth(grid: triax.Grid, step: Callable[[], None]) -> float:
    """By how much the process grows in a step, in MiB, at its largest; NaN where the system does not tell.

    glibc is told to give memory back as soon as it is free. What it keeps all the same makes this a rough figure.
    """
    try:
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(-3, 1 << 16)  # M_MMAP_THRESHOLD: larger blocks are mapped one by one
        libc.malloc_trim(0)
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")  # the largest size so far is the present one
        before = _status("VmHWM")
    except (OSError, AttributeError):
        return float("nan")
    grid.world.barrier()
    step()
    return (_status("VmHWM") - before) / 1024


def _status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(key)).split()[1])
