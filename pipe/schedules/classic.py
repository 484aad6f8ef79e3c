"""Schedules with a whole backward (B) and a fixed pattern per rank: GPipe, 1F1B, interleaved, breadth-first.

A generator returns the order of every rank. Its docstring has an example of the output, and two figures: the idle time
of a rank in a step, and the peak of the activations that it holds. In the figures, p is the number of ranks, m of
microbatches, and v of chunks. F, B, I and W are the times of one microbatch on a rank, all chunks together. The unit of
the peak is the activations of one microbatch in 1/p of the model.

For n slices of each sequence (program/slices.py) the generators count slices in place of microbatches. They number the
backwards in the order in which they run; `named_schedule` then gives the backwards the slices of a sequence in reverse.
Idle times and peaks are 1/n of the figures of the same order with n - 1 more forwards ahead.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence

from ..program.forward_only import forward_only
from ..program.ops import Op, Orders
from ..program.placement import loop
from .squeeze import StageOp, squeeze


def gpipe(pipe: int, microbatches: int, chunks: int = 1, slices: int = 1) -> Orders:
    """All forwards, then all backwards (Huang 2019). Idle time (p-1)(F+B), peak m. Over slices: TeraPipe (Li 2021).

    rank 0: 0F0 0F1 0F2 0B0 0B1 0B2
    rank 1: 1F0 1F1 1F2 1B0 1B1 1B2
    """
    return [[Op(kind, r, m) for kind in "FB" for m in range(microbatches)] for r in range(pipe)]


def one_f_one_b(pipe: int, microbatches: int, chunks: int = 1, slices: int = 1) -> Orders:
    """Each backward as early as possible (Narayanan 2019). Idle time (p-1)(F+B), peak of rank r min(p-r, m).

    Over n slices (Seq1F1B, Sun 2024): idle time (p-1)(F+B)/n, peak of rank r min(1 + (p-r-1)/n, m).

    rank 0: 0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3
    rank 1: 1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3
    rank 2: 2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3
    """
    return [alternate(r, microbatches, ahead=pipe - r + slices - 1) for r in range(pipe)]


def eager_1f1b(pipe: int, microbatches: int, chunks: int = 1) -> Orders:
    """1F1B with twice the forwards ahead, which hides slow messages (Zhuang 2022).

    Idle (p-1)(F+B), peak of rank r min(2(p-r)-1, m).

    rank 0: 0F0 0F1 0F2 0B0 0F3 0B1 0F4 0B2 0B3 0B4
    rank 1: 1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3 1F4 1B4
    """
    return [alternate(r, microbatches, ahead=2 * (pipe - r) - 1) for r in range(pipe)]


def alternate(stage: int, microbatches: int, ahead: int) -> list[Op]:
    """Return a stage's order: `ahead` forwards, then backward and forward in turn."""
    return number(merge([("F", stage)] * microbatches, [("B", stage)] * microbatches, ahead))


def interleaved(pipe: int, microbatches: int, chunks: int, slices: int = 1) -> Orders:
    """1F1B over groups of p microbatches, each group chunk by chunk (Narayanan 2021).

    Idle (p-1)(F+B)/v where m >= p; peak p + (p-1)/v on rank 0, less on the others.
    Over n slices, n a multiple of p (SlimPipe, Li 2025): idle (p-1)(F+B)/(nv), peak of rank r 1 + 2(p-r-1)/(nv).

    rank 0: 0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 0B2 0B3
    rank 1: 1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3

    If p does not divide m, one group is short, and in this order its chunks would wait for each other. Then
    ops are pulled ahead (squeeze.py) in a few ways to form groups, and the best one is taken.
    """
    if slices > 1:
        return _interleaved_slices(pipe, microbatches, chunks, slices)
    # forwards before the first backward; from then on the rank holds as many activations
    ahead = [2 * (pipe - r - 1) + (chunks - 1) * min(pipe, microbatches) + 1 for r in range(pipe)]

    def pattern(sizes_f: list[int], sizes_b: list[int]) -> list[list[StageOp]]:
        forwards, backwards = chunk_order(sizes_f, chunks), chunk_order(sizes_b, chunks)
        return [
            merge([("F", c * pipe + r) for c in forwards], [("B", (chunks - 1 - c) * pipe + r) for c in backwards], n)
            for r, n in enumerate(ahead)
        ]

    groups, rest = divmod(microbatches, pipe)
    if not rest or not groups:
        sizes = [pipe] * groups or [microbatches]
        return [number(stage_ops) for stage_ops in pattern(sizes, sizes)]
    placement = loop(pipe, chunks)
    ways = [("last", "merged"), ("first", "first"), ("merged", "merged"), ("last", "first")]
    tries = [(way, limits) for way in ways for limits in (ahead, [ahead[0]] * pipe)]

    def attempt(i: int, count: int) -> tuple[int, list[list[Op]]] | None:
        (way_f, way_b), limits = tries[i]
        stage_ops = pattern(group_sizes(count, pipe, way_f), group_sizes(count, pipe, way_b))
        return squeeze(stage_ops, placement, count, limits, ahead=True)

    def bound(count: int) -> int:
        return 3 * chunks * count + 3 * (pipe - 1)

    def best(which: Iterable[int]) -> tuple[int, list[list[Op]]] | None:
        shortest = None
        for i in which:
            result = attempt(i, microbatches)
            if result and (shortest is None or result[0] < shortest[0]):
                shortest = result
            if shortest and shortest[0] <= bound(microbatches):
                break
        return shortest

    def promising() -> Iterator[int]:
        few = rest + min(groups, 2) * pipe
        for i in range(len(tries)):
            sample = attempt(i, few)
            if sample and sample[0] <= bound(few):
                yield i

    # a way that reaches the bound on a few microbatches mostly reaches it on all
    result = best(promising()) or best(range(len(tries)))
    assert result is not None
    return result[1]


def _interleaved_slices(pipe: int, microbatches: int, chunks: int, slices: int) -> Orders:
    groups, rest = divmod(microbatches, pipe)
    if rest:
        raise ValueError(
            f"interleaved runs groups of {pipe} slices, and {pipe} does not divide the {microbatches} of a step: the "
            f"nearest is slices={-(-slices // pipe) * pipe}"
        )
    forwards = chunk_order([pipe] * groups, chunks)
    # The last rank's backwards of the last chunk need its forwards: of the last slice of a sequence first.
    done = [i for i, c in enumerate(forwards) if c == chunks - 1]
    starts = [i for i, c in enumerate(forwards) if c == 0]  # the backwards of the last chunk, in their order
    needed = [done[(k // slices + 1) * slices - 1 - k % slices] + 1 - start for k, start in enumerate(starts)]
    ahead = [max(needed) + 2 * (pipe - r - 1) for r in range(pipe)]
    return [
        number(
            merge(
                [("F", c * pipe + r) for c in forwards],
                [("B", (chunks - 1 - c) * pipe + r) for c in forwards],
                ahead[r],
            )
        )
        for r in range(pipe)
    ]


def group_sizes(microbatches: int, pipe: int, where: str) -> list[int]:
    """Split the microbatches into groups of ``pipe``, and return the sizes of the groups.

    ``where`` says where the remainder goes: ``"first"`` or ``"last"`` makes it a group of its own, ``"merged"`` adds it
    to the last full group.
    """
    groups, rest = divmod(microbatches, pipe)
    full = [pipe] * groups
    return {"first": [rest, *full], "last": [*full, rest], "merged": [*full[:-1], pipe + rest]}[where]


def chunk_order(sizes: Sequence[int], chunks: int) -> list[int]:
    """Return the chunk of each forward of a rank in order: each group of microbatches runs through all chunks in turn.

    `sizes` has the number of microbatches of each group.

    >>> chunk_order([2, 2], 2)
    [0, 0, 1, 1, 0, 0, 1, 1]
    """
    return [c for size in sizes for c in range(chunks) for _ in range(size)]


def number(stage_ops: Sequence[StageOp]) -> list[Op]:
    """Number the microbatches: the k-th forward and the k-th backward of a stage are of microbatch k.

    A W belongs to the earliest I of the rank that has no W yet.

    Args:
        stage_ops: one rank's ops in order, as (kind, stage).
    """
    count: Counter[tuple[bool, int]] = Counter()
    deferred: deque[Op] = deque()
    order = []
    for kind, stage in stage_ops:
        if kind == "W":
            order.append(deferred.popleft())
            continue
        op = Op(kind, stage, count[kind == "F", stage])
        count[kind == "F", stage] += 1
        order.append(op)
        if kind == "I":
            deferred.append(op._replace(kind="W"))
    return order


def looped_bfs(pipe: int, microbatches: int, chunks: int) -> Orders:
    """Breadth first: all microbatches through a chunk, then all through the next (Lamy-Poirier 2023).

    Idle (p-1)(F+B)/v where m >= p, peak m. The ops of a stage are contiguous, so ZeRO-3 gathers it twice.

    rank 0: 0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1
    rank 1: 1F0 1F1 3F0 3F1 3B0 3B1 1B0 1B1
    """
    runs = [("F", c) for c in range(chunks)] + [("B", c) for c in reversed(range(chunks))]
    return [[Op(k, c * pipe + r, m) for k, c in runs for m in range(microbatches)] for r in range(pipe)]


def forward(pipe: int, microbatches: int, chunks: int) -> Orders:
    """Inference: forwards only, in groups of p, so that each result is ready as early as possible.

    Idle (p-1)F/v where p divides m.

    rank 0: 0F0 0F1 0F2
    rank 1: 1F0 1F1 1F2
    """
    return forward_only(loop(pipe, chunks), microbatches).orders


def merge(forwards: list[StageOp], backwards: list[StageOp], ahead: int) -> list[StageOp]:
    """Interleave a rank's forwards and backwards: `ahead` forwards, then a backward and a forward in turn.

    The remaining backwards follow at the end.
    """
    order = forwards[:ahead]
    for i, stage_op in enumerate(backwards):
        order.append(stage_op)
        order += forwards[ahead + i : ahead + i + 1]
    return order
