"""Lowering of a schedule to a program, by small passes over lists of ops.

    schedule   0F0                       0B0
    reduce     0F0                       0B0          0REDUCE
    gather     0GATHER 0F0 0RELEASE      0GATHER 0B0  0REDUCE0 0RELEASE     (ZeRO 3)
    tie        ...                       0TIED0 0REDUCE, at the end
    message    0F0 0SEND_F0   0RECV_B0   0B0 ...
    pair       0RECV_B0 0F1 0B0 0SEND_F1, where 0F1&0B0 is a pair: nothing comes between its two ops

In the executor RECV only posts a receive and returns; the compute op that reads it waits. SEND never
blocks compute. Each channel (a boundary and a direction) is a queue, and both ends see its messages in
the same order.

Why no program hangs: take one linear order of the whole step, the simulation's. The messages of an op
happen right after it in that order, on both ends, so replaying the order never blocks. Each rank's
program is this order seen from that rank, except that receives are posted earlier: at least one compute
op, and no later than where the channel's message before is read, so that a receive is there when its
message is sent, and the transfer overlaps computation. This is safe: posting a receive earlier blocks
no rank.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterable, Sequence

from .ops import BACKWARD, COMPUTE, GATHER, RECV_B, RECV_F, RECVS, REDUCE, RELEASE, SEND_B, SEND_F, TIED, Op, Orders
from .program import Program, Ties, crossing
from .schedule import Schedule
from .simulate import timeline_of


def lower(schedule: Schedule, zero: int = 0, ties: Iterable[Iterable[int]] = (), each: bool | None = None) -> Program:
    """Lower a schedule to a program.

    Args:
        schedule: the schedule.
        zero: stage of ZeRO.
        ties: for each tied weight, the stages that hold it.
        each: True to reduce gradients after every backward, False to reduce them only after a stage's last backward.
            If None, it is True in ZeRO stages 2 and 3, as in the paper.

    Raises:
        ValueError: the ZeRO stage does not exist, or a tie names a pipeline stage that does not exist.
    """
    if zero not in (0, 1, 2, 3):
        raise ValueError(f"zero is the stage of ZeRO, 0, 1, 2 or 3, not {zero}")
    sorted_ties = tuple(tuple(sorted(set(tie))) for tie in ties)
    for k, tie in enumerate(sorted_ties):
        if not tie or tie[0] < 0 or tie[-1] >= schedule.stages:
            stages = f"the stages are 0 to {schedule.stages - 1}"
            raise ValueError(f"tie {k} is held by stages {list(tie)}, but {stages}")
    ops: Orders = schedule.orders
    each = zero >= 2 if each is None else each
    ops = [reduce_pass(order, sorted_ties, schedule.placement, each) for order in ops]
    if zero == 3:
        ops = [gather_pass(order) for order in ops]
    ops = [tie_pass(order, rank, sorted_ties, schedule.placement) for rank, order in enumerate(ops)]
    ops = message_pass(schedule, ops)
    if schedule.pairs:
        ops = [join_pass(order, schedule.pairs) for order in ops]
    return Program(schedule, tuple(map(tuple, ops)), sorted_ties)


def reduce_pass(order: Sequence[Op], ties: Ties, placement: Sequence[int], each: bool) -> list[Op]:
    """Insert REDUCE after a stage's last backward or, if `each`, after every backward.

    The gradients of stages with ties are not final until the ties are summed: `tie_pass` reduces them at the end.
    """
    tied = {s for tie in crossing(ties, placement).values() for s in tie}
    last = {op.stage: i for i, op in enumerate(order) if op.kind in "BW"}
    out: list[Op] = []
    for i, op in enumerate(order):
        out.append(op)
        if op.kind in "BW":
            if each:
                out.append(Op(REDUCE, op.stage, op.microbatch))
            elif last[op.stage] == i and op.stage not in tied:
                out.append(Op(REDUCE, op.stage))
    return out


def gather_pass(order: Sequence[Op]) -> list[Op]:
    """Insert GATHER before, and RELEASE after, each uninterrupted sequence of compute ops of one stage."""
    out: list[Op] = []
    gathered = None  # the stage whose weights are gathered
    for op in order:
        if op.kind in COMPUTE and op.stage != gathered:
            if gathered is not None:
                out.append(Op(RELEASE, gathered))
            out.append(Op(GATHER, op.stage))
            gathered = op.stage
        out.append(op)
    if gathered is not None:
        out.append(Op(RELEASE, gathered))
    return out


def tie_pass(order: Sequence[Op], rank: int, ties: Ties, placement: Sequence[int]) -> list[Op]:
    """Append a TIED for each tie between ranks, then a REDUCE for the stages that hold them.

    Each rank has one TIED per tie, named by its first stage there, in the order of the ties on all ranks:
    they are collectives over the ranks that hold the tie.
    """
    out, stages = list(order), set()
    if not any(op.kind in "BW" for op in order):
        return out  # forward only: there is no gradient
    for k, tie in crossing(ties, placement).items():
        here = [s for s in tie if placement[s] == rank]
        if here:
            out.append(Op(TIED, here[0], k))
            stages.update(here)
    return out + [Op(REDUCE, s) for s in sorted(stages)]


def message_pass(schedule: Schedule, orders: Orders) -> list[list[Op]]:
    """Insert SEND after each op whose result another rank reads, and RECV on that rank before it arrives."""
    placement, end = schedule.placement, {}
    for row in timeline_of(schedule).rows:
        for span in row:
            end[span.op] = span.end
    sends: dict[Op, Op] = {}
    arrivals: list[list[tuple[float, Op]]] = [[] for _ in orders]  # per rank: when, and its RECV
    for op, at in sorted(end.items(), key=lambda item: item[1]):  # stable: a pair's ops, which end together, in order
        kind, s, mb = op
        if kind == "F" and s + 1 < len(placement) and placement[s] != placement[s + 1]:
            sends[op] = Op(SEND_F, s, mb)
            arrivals[placement[s + 1]].append((at, Op(RECV_F, s + 1, mb)))
        elif kind in BACKWARD and s > 0 and placement[s] != placement[s - 1]:
            sends[op] = Op(SEND_B, s, mb)
            arrivals[placement[s - 1]].append((at, Op(RECV_B, s - 1, mb)))
    out: list[list[Op]] = []
    for order, coming in zip(orders, arrivals, strict=True):
        computed = [op for op in order if op.kind in COMPUTE]
        ends = [end[op] for op in computed]
        readers = {(op.kind != "F", op.stage, op.microbatch): i for i, op in enumerate(computed) if op.kind != "W"}
        posts: dict[int, list[Op]] = {}  # compute op -> the receives posted before it
        read: dict[tuple[str, int], int] = {}  # channel -> the compute op that reads its last message
        for at, recv in coming:
            # Posted before the compute op whose end the arrival follows, and no later than the op that reads the
            # channel's message before; the first receive of a channel before the first op.
            kind, s, mb = recv
            posts.setdefault(min(max(bisect_right(ends, at) - 1, 0), read.get((kind, s), 0)), []).append(recv)
            read[kind, s] = readers[kind == RECV_B, s, mb]
        ops: list[Op] = []
        i = 0
        for op in order:
            if op.kind in COMPUTE:
                ops += posts.get(i, ())
                i += 1
            ops.append(op)
            if op in sends:
                ops.append(sends[op])
        out.append(ops)
    return out


def join_pass(order: Sequence[Op], pairs: Collection[Op]) -> list[Op]:
    """Move what stands between the two ops of a pair: before it what the second one needs, after it the rest."""
    out: list[Op] = []
    after: list[Op] | None = None  # what comes after the open pair
    for op in order:
        if after is None:
            out.append(op)
            after = [] if op in pairs else None
        elif op.kind in COMPUTE:
            out += [op, *after]
            after = None
        elif op.kind in RECVS or op.kind == GATHER:
            out.insert(-1, op)
        else:
            after.append(op)
    return out
