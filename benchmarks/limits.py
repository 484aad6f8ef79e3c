"""Limits: the time that a step takes at least on this machine, whoever makes it, and how near to it a contender is.

On the data and tensor axes the limit is the time of as many processes that do the same arithmetic at the same time and
send nothing, plus the bytes that the method must send, at the transport's rate while all of them compute. On the pipe
axis it is the simulated makespan of the schedule, with the costs of its stages measured in the same way. It is measured
in every round, like a contender, so that a ratio to it is of one round's times.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median, quantiles

import torch
from measuring import slowest

import triax
from triax.grid import Axis

MESSAGE = 2**22  # bytes
_TAG = 2**21


def ratios(mine: Sequence[float], theirs: Sequence[float]) -> list[float]:
    """Ratios of two contenders' times, round by round."""
    return [a / b for a, b in zip(mine, theirs, strict=True)]


def spread(values: Sequence[float], form: str = ".2f") -> str:
    """Return the median, and in brackets the middle half: ``0.97 (0.96 to 0.98)``."""
    low, _, high = quantiles(values, n=4, method="inclusive") if len(values) > 1 else [*values] * 3
    return f"{median(values):{form}} ({low:{form}} to {high:{form}})"


def seconds_per_byte(grid: triax.Grid, axis: Axis | None = None, message: int = MESSAGE, repeats: int = 15) -> float:
    """Time that one more byte sent by every rank adds to a computation that runs on every rank. Collective.

    The axis, by default ``grid.world``, has all ranks of the grid. The threads of its transport may have a policy of
    their own.

    Each rank sends messages to the next rank and receives as many while it multiplies matrices, and then multiplies as
    many matrices alone. Both are repeated in turn; the result is the median of the differences.
    """
    if grid.size == 1:
        return 0.0
    axis = axis or grid.world
    count, products = max(1, 2**24 // message), max(1, message * 20 // 2**22)
    sent, received = (torch.zeros(message, dtype=torch.uint8) for _ in range(2))
    to, source = (grid.rank + 1) % grid.size, (grid.rank - 1) % grid.size
    matrix = torch.ones(256, 256)

    def compute() -> None:
        for _ in range(products * count):
            torch.mm(matrix, matrix)

    def compute_and_send() -> None:
        with axis.traffic.uncounted():
            works = [
                work for _ in range(count) for work in (axis.receive(received, source, _TAG), axis.send(sent, to, _TAG))
            ]
        compute()
        for work in works:
            work.wait()

    both = compute_and_send, compute
    times = [[slowest(grid, step) for step in both] for _ in range(repeats + 1)][1:]
    return max(0.0, median(busy - alone for busy, alone in times)) / (count * message)


def seconds_per_message(grid: triax.Grid, message: torch.Tensor, repeats: int = 30) -> float:
    """Time of one message between two ranks that do nothing else. Collective; the ranks are taken in pairs."""
    axis, peer = grid.world, grid.rank ^ 1
    times = []
    for _ in range(repeats):
        axis.barrier()
        begin = time.perf_counter()
        if peer < grid.size:
            for sends in (grid.rank < peer, grid.rank > peer):
                with axis.traffic.uncounted():
                    work = axis.send(message, peer, _TAG) if sends else axis.receive(message.clone(), peer, _TAG)
                work.wait()
        times.append((time.perf_counter() - begin) / 2)
    return float(min(axis.all_gather_json(median(times))))


def stage_costs(
    grid: triax.Grid, forward: Callable[[], torch.Tensor], wanted: torch.Tensor, microbatches: int
) -> tuple[float, float, float]:
    """Median times of a stage's forward, its input gradient, and its weight gradients, while all ranks compute theirs.

    Args:
        grid: all its ranks call this at the same time.
        forward: runs the stage on one microbatch, in plain torch.
        wanted: the stage's input or, if that needs no gradient, its first weight: the gradient of it is the least that
            the backward pass of the stage before needs.
        microbatches: number of microbatches to run.
    """
    grid.world.barrier()
    took: list[tuple[float, float, float]] = []
    for _ in range(microbatches):
        begin = time.perf_counter()
        outputs = forward()
        between = time.perf_counter()
        outputs.backward(_gradient(outputs))
        end = time.perf_counter()
        again = forward()
        start = time.perf_counter()
        torch.autograd.grad(again, [wanted], _gradient(again))
        took.append((between - begin, time.perf_counter() - start, end - between))
    forwards, inputs, whole = (median(times) for times in zip(*took, strict=True))
    return forwards, min(inputs, whole), max(0.0, whole - inputs)


def _gradient(outputs: torch.Tensor) -> torch.Tensor | None:
    return torch.ones_like(outputs) if outputs.dim() else None
