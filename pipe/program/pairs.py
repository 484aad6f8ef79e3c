"""Pairs of passes of different microbatches, which a rank runs interleaved so that collectives hide, as a pass.

A tensor-parallel layer waits for an all-reduce after its products, and a layer of experts for an all-to-all before and
after them. In a pair, one pass computes while the other one waits:

    alone    F products, all-reduce, products, all-reduce; then B products, all-reduce, products, all-reduce
    pair     F products   B products   F products   B products
                          all-reduce   all-reduce   all-reduce   all-reduce

The first pass of a pair is a forward, the second one any pass of another microbatch. A pair starts when the inputs of
both have arrived, and its results are there at its end. It saves the time of collectives, and delays the result of the
pass that would have come first. DualPipe pairs F with B (DeepSeek 2025). STP pairs F also with W and with F (Qi et al.
2025, arXiv:2510.27257; pipe/schedules/braided.py).

    >>> costs = Costs(F=1, I=1, W=1, AR=0.25)
    >>> plain = triax.make_schedule("dualpipe-v", pipe=4, microbatches=16)
    >>> triax.simulate(plain, costs).makespan, triax.simulate(pair_pass(plain, costs), costs).makespan
    (54.75, 53.25)
"""

from __future__ import annotations

from dataclasses import replace

from .costs import Costs
from .ops import BACKWARD, Op
from .schedule import Schedule
from .simulate import timeline_of

# Kinds of the passes that are tried as the partner of a forward.
_PARTNERS = ("BI", "BIW", "FBIW")


def pair_pass(schedule: Schedule, costs: Costs | None = None) -> Schedule:
    """Join neighboring passes of a schedule to pairs where that makes the step shorter.

    The order of each rank stays, except that the forward of a pair comes first: a rank may then hold the activations of
    one more microbatch in one stage.

    Args:
        schedule: a schedule without pairs, offload and recomputation.
        costs: times of the ops; None: ``Costs()``, which has no collectives to hide.

    Returns:
        The schedule with the pairs that were found best; the schedule itself if none makes the step shorter.

    Raises:
        ValueError: the schedule has pairs, or offloads or recomputes activations.
        ScheduleError: the schedule would hang.
    """
    if schedule.pairs:
        raise ValueError(f"{schedule.name} has pairs already: give a schedule without")
    if schedule.offloads or schedule.recomputes:
        raise ValueError(f"{schedule.name} offloads or recomputes activations: give a schedule without O, R and C")
    costs = costs or Costs()
    best, shortest = schedule, timeline_of(schedule, costs).makespan
    for kinds in _PARTNERS:
        joined = _joined(schedule, costs, kinds)
        makespan = timeline_of(joined, costs).makespan
        if makespan < shortest * (1 - 1e-9):
            best, shortest = joined, makespan
    return best


def _joined(schedule: Schedule, costs: Costs, kinds: str) -> Schedule:
    """Run the schedule in the order of time, and join a pass with the next one where the two end earlier so."""
    alone, pair_cost = costs.op_costs(schedule.stages, schedule.chunks), costs.pair_costs(schedule)
    hops = costs.hops(schedule.placement)
    arrived: dict[tuple[bool, int, int], float] = {}  # (forward, stage, microbatch) -> time of the input

    def ready(op: Op) -> float | None:
        forward, (_, stage, microbatch) = op.kind == "F", op
        if op.kind == "W" or stage == (0 if forward else schedule.stages - 1):
            return 0.0
        return arrived.get((forward, stage, microbatch))

    def publish(op: Op, end: float) -> None:
        _, stage, microbatch = op
        if op.kind == "F" and stage + 1 < schedule.stages:
            arrived[True, stage + 1, microbatch] = end + hops[stage]
        elif op.kind in BACKWARD and stage:
            arrived[False, stage - 1, microbatch] = end + hops[stage - 1]

    def joins(op: Op, after: Op) -> bool:
        """Return True if the two may be a pair of the kinds that are tried."""
        first, second = (op, after) if op.kind == "F" else (after, op)
        return first.kind == "F" and second.kind in kinds and op.microbatch != after.microbatch

    clock, done = [0.0] * schedule.pipe, [0] * schedule.pipe
    orders: list[list[Op]] = [[] for _ in clock]
    pairs = set()
    while True:
        # The pass that starts first runs next: all that arrives until then is known.
        starts = []
        for rank, order in enumerate(schedule.orders):
            if done[rank] < len(order) and (at := ready(order[done[rank]])) is not None:
                starts.append((max(at, clock[rank]), rank))
        if not starts:
            break
        start, rank = min(starts)
        order, i = schedule.orders[rank], done[rank]
        op, after = order[i], order[i + 1] if i + 1 < len(order) else None
        end = start + alone[op.kind][op.stage]
        both = [op]
        if after is not None and joins(op, after) and (at := ready(after)) is not None:
            together = max(start, at) + pair_cost(op, after)
            if together < max(end, at) + alone[after.kind][after.stage] - 1e-12:
                both, end = sorted((op, after), key=lambda member: member.kind != "F"), together
                pairs.add(both[0])
        orders[rank] += both
        for member in both:
            publish(member, end)
        clock[rank], done[rank] = end, i + len(both)
    assert all(i == len(order) for i, order in zip(done, schedule.orders, strict=True))  # timeline_of has run it
    return replace(schedule, orders=tuple(map(tuple, orders)), pairs=frozenset(pairs))
