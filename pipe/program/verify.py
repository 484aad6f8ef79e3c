"""Verification of schedules and programs: complete, in order, within memory, free of deadlock.

    complete   each F, and each B or I and W, of each stage and microbatch once, on the stage's rank
    in order   F before B or I, I before W; the stage before first, and backward the stage after
    slices     on each stage, F of a sequence's slices from the first to the last, B or I from the last to the first
    memory     no rank holds more activations than it may
    transfers  activations are offloaded once, after their F, and reloaded before their backward
    pairs      the two ops of a pair come one after the other, and start when the inputs of both are there
    recompute  C comes once, after its F and before its backward; what it makes anew is not offloaded
    deadlock   a program is run with every SEND blocking until its RECV is posted, every compute op
               until its message has arrived, every TIED until all its ranks have reached it. A
               program that passes cannot hang in an executor whose sends block less than that.
    channels   both ends of a channel see its messages in the same order
    weights    every gradient is reduced, after the last backward and after its ties are summed;
               under ZeRO 3 every compute op runs between its stage's GATHER and RELEASE

`verify` returns None, or raises `ScheduleError` with a counterexample.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from enum import IntEnum
from itertools import pairwise

from .activations import activations_held
from .deadlock import ScheduleError, Wait, deadlock
from .ops import (
    BACKWARD,
    BARE,
    COMPUTE,
    GATHER,
    RECV_B,
    RECV_F,
    RECVS,
    REDUCE,
    RELEASE,
    SEND_B,
    SEND_F,
    SENDS,
    TIED,
    TRANSFERS,
    Op,
    Orders,
)
from .program import Program, crossing
from .schedule import Schedule
from .simulate import timeline_of


def verify(subject: Schedule | Program, memory: float | Sequence[float] | None = None) -> None:
    """Check that `subject` runs to its end.

    >>> schedule = triax.make_schedule("gpipe", pipe=2, microbatches=4)
    >>> triax.verify(schedule)  # no error
    >>> triax.verify(schedule, memory=2)
    Traceback (most recent call last):
        ...
    triax.pipe.program.deadlock.ScheduleError: rank 0 may hold 2 activations, but at 0F2 it holds 3

    Args:
        subject: a schedule or a program.
        memory: limit on the activations that a rank holds (one number for all ranks, or one for each). The unit is the
            activations of one microbatch in 1/pipe of the model, as in `peak_activations`. If None, there is no limit.

    Raises:
        ScheduleError: the subject is incomplete, in a wrong order, exceeds the limit or hangs. The message names the
            op.
    """
    schedule = subject.schedule if isinstance(subject, Program) else subject
    orders: Orders = schedule.orders
    if isinstance(subject, Program):
        orders = [[op for op in ops if op.kind in COMPUTE | TRANSFERS] for ops in subject.ops]
        for rank, (order, wanted) in enumerate(zip(orders, schedule.orders, strict=True)):
            if tuple(order) != wanted:
                i = next((i for i, (a, b) in enumerate(zip(order, wanted, strict=False)) if a != b), -1)
                op = order[i] if order else wanted[0]
                raise ScheduleError(
                    f"rank {rank} computes in another order than its schedule, from {op} on", [(rank, op)]
                )
    _placement(schedule)
    _complete(schedule, orders)
    if memory is not None:
        _memory(schedule, memory)
    timeline_of(schedule)  # raises if it hangs
    if isinstance(subject, Program):
        _together(subject)
        _weights(subject)
        _messages(subject)
        _rendezvous(subject)


# ------------------------------------------------------------------------------------ a bare schedule


def _placement(schedule: Schedule) -> None:
    for stage, rank in enumerate(schedule.placement):
        if not 0 <= rank < schedule.pipe:
            raise ScheduleError(f"stage {stage} is placed on rank {rank}, but the ranks are 0 to {schedule.pipe - 1}")
    for rank in range(schedule.pipe):
        stages = schedule.placement.count(rank)
        if stages != schedule.chunks:
            raise ScheduleError(f"rank {rank} holds {stages} stages, not {schedule.chunks}: {schedule.placement}")


class _Progress(IntEnum):
    """Progress of one stage with one microbatch: its last op, and the ops that may follow.

    progress     after     before
    NOT_BEGUN              F
    FORWARDED    F         B, I, O, C
    SPLIT        I         W
    ENDED        B, W
    OFFLOADED    O         R
    RELOADED     R         B, I
    RECOMPUTED   C         B, I
    """

    NOT_BEGUN = 0
    FORWARDED = 1
    SPLIT = 2
    ENDED = 3
    OFFLOADED = 4
    RELOADED = 5
    RECOMPUTED = 6


_NOT_BEGUN, _FORWARDED, _SPLIT, _ENDED, _OFFLOADED, _RELOADED, _RECOMPUTED = _Progress
_WITH_ACTIVATIONS = (_FORWARDED, _RELOADED, _RECOMPUTED)
# Kind of an op -> the progress before it, and after it.
_BEFORE = {
    "F": (_NOT_BEGUN,),
    "W": (_SPLIT,),
    "O": (_FORWARDED,),
    "R": (_OFFLOADED,),
    "C": (_FORWARDED,),
    **dict.fromkeys("BI", _WITH_ACTIVATIONS),
}
_AFTER = {"F": _FORWARDED, "B": _ENDED, "I": _SPLIT, "W": _ENDED, "O": _OFFLOADED, "R": _RELOADED, "C": _RECOMPUTED}


def _complete(schedule: Schedule, orders: Orders) -> None:
    """Check that each (stage, microbatch) has F, then B, or F, I and W, once and on the stage's rank."""
    stages, mbs, placement, slices = schedule.stages, schedule.passes, schedule.placement, len(schedule.slices)
    done = bytearray(stages * mbs)  # _Progress of each (stage, microbatch)
    for rank, order in enumerate(orders):
        for op in order:
            kind, stage, mb = ("text", 0, 0) if isinstance(op, str) else op
            if kind not in _BEFORE:
                problem = (
                    f"{op!r} is text: write an Op such as" if kind == "text" else f"{op} is not an op of a schedule:"
                )
                raise ScheduleError(
                    f'rank {rank}: {problem} Op("F", 0, 0), of the kinds F, B, I, W, C, O and R', [(rank, op)]
                )
            if not (0 <= stage < stages and 0 <= mb < mbs):
                what = "microbatches" if slices == 1 else "slices"
                size = f"stages are 0 to {stages - 1} and {what} 0 to {mbs - 1}"
                raise ScheduleError(f"rank {rank} has {op}, but {size}", [(rank, op)])
            if placement[stage] != rank:
                there = placement[stage]
                raise ScheduleError(
                    f"{op} is on rank {rank}, but stage {stage} is placed on rank {there}", [(rank, op)]
                )
            at = stage * mbs + mb
            if done[at] not in _BEFORE[kind]:
                raise ScheduleError(_misplaced(op, rank, _Progress(done[at]), order), [(rank, op)])
            if kind == "F" and mb % slices and not done[at - 1]:
                raise ScheduleError(_early_slice(op, rank, op._replace(microbatch=mb - 1), slices), [(rank, op)])
            if kind in BACKWARD and (mb + 1) % slices and done[at + 1] not in (_SPLIT, _ENDED):
                raise ScheduleError(_early_slice(op, rank, op._replace(microbatch=mb + 1), slices), [(rank, op)])
            done[at] = _AFTER[kind]
    final = _FORWARDED if schedule.forward_only else _ENDED
    if done.count(final) != len(done):
        at = next(i for i, state in enumerate(done) if state != final)
        stage, mb = divmod(at, mbs)
        missing = Op({_NOT_BEGUN: "F", _SPLIT: "W", _OFFLOADED: "R"}.get(_Progress(done[at]), "B"), stage, mb)
        rank = placement[stage]
        raise ScheduleError(f"rank {rank} never runs {missing}", [(rank, missing)])


def _early_slice(op: Op, rank: int, first: Op, slices: int) -> str:
    microbatch, number = divmod(op.microbatch, slices)
    reads = "reads its keys and values" if op.kind == "F" else "needs the gradients of its keys and values from there"
    return (
        f"rank {rank} runs {op} before {first}, but slice {number} of microbatch {microbatch} {reads}: forwards of "
        "slices run from the first to the last, backwards from the last to the first"
    )


def _misplaced(op: Op, rank: int, progress: _Progress, order: Sequence[Op]) -> str:
    kind, stage, mb = op
    if sum(other == op for other in order) > 1:
        return f"rank {rank} runs {op} more than once"
    if progress is _ENDED or (kind == "B" and progress is _SPLIT):
        return f"rank {rank} runs {op}, but the backward of stage {stage} on microbatch {mb} is already there"
    activations = f"rank {rank} runs {op}, but the activations of stage {stage} and microbatch {mb} are "
    offloaded = progress in (_SPLIT, _OFFLOADED, _RELOADED)
    if (kind == "C" and offloaded) or (kind in "OR" and progress is _RECOMPUTED):
        what = {_RECOMPUTED: "recomputed", _SPLIT: "needed no more"}.get(progress, "offloaded")
        return f"{activations}{what}: offload them, or run C once between F and its backward"
    if kind in "OR" and offloaded:
        what = {_OFFLOADED: "in host memory", _SPLIT: "needed no more"}.get(progress, "reloaded")
        return f"{activations}{what} already: offload and reload them once, between F and its backward"
    if kind in "BI" and progress is _OFFLOADED:
        offload, reload = Op("O", stage, mb), Op("R", stage, mb)
        return f"rank {rank} runs {op}, but {offload} has offloaded its activations: put {reload} before"
    first = Op("I" if kind == "W" else "O" if kind == "R" else "F", stage, mb)
    verb = "runs before" if first in order else "needs"
    return f"rank {rank}: {op} {verb} {first}" + ("" if first in order else ", which is not there")


def _memory(schedule: Schedule, memory: float | Sequence[float]) -> None:
    limits = [float(memory)] * schedule.pipe if isinstance(memory, int | float) else list(memory)
    if len(limits) != schedule.pipe:
        raise ValueError(f"memory has {len(limits)} limits for {schedule.pipe} ranks: give one number, or one each")
    units = schedule.chunks * sum(schedule.slices)
    for rank, limit in enumerate(limits):
        for op, counts in activations_held(schedule, rank):
            if sum(counts) > limit * units + 1e-9:
                holds = f"at {op} it holds {sum(counts) / units:g}"
                raise ScheduleError(f"rank {rank} may hold {limit:g} activations, but {holds}", [(rank, op)])


# ------------------------------------------------------------------------------------------ a program


def _peer(op: Op) -> Op:
    """Return the op at the other end of a message."""
    kind, stage, mb = op
    if kind in (SEND_F, RECV_B):
        return Op(RECV_F if kind == SEND_F else SEND_B, stage + 1, mb)
    return Op(SEND_F if kind == RECV_F else RECV_B, stage - 1, mb)


def _read(op: Op, placement: Sequence[int]) -> Op | None:
    """Return the RECV of the message that a compute op reads, if it comes from another rank."""
    kind, stage, mb = op
    if kind == "F" and stage > 0 and placement[stage - 1] != placement[stage]:
        return Op(RECV_F, stage, mb)
    if kind in "BI" and stage + 1 < len(placement) and placement[stage + 1] != placement[stage]:
        return Op(RECV_B, stage, mb)
    return None


def _together(program: Program) -> None:
    """Check that nothing comes between the two ops of a pair."""
    for rank, ops in enumerate(program.ops):
        for op, after in pairwise(ops):
            if op in program.schedule.pairs and after.kind not in COMPUTE:
                raise ScheduleError(
                    f"rank {rank}: {after} comes between {op} and the op that runs with it", [(rank, op)]
                )


def _messages(program: Program) -> None:
    """Check that each result that another rank reads is sent once, after its op, and received before it is read."""
    schedule = program.schedule
    placement, last = schedule.placement, schedule.stages - 1
    for rank, ops in enumerate(program.ops):
        seen: set[Op] = set()
        for op in ops:
            kind, stage, mb = op
            if op in seen and kind not in (GATHER, RELEASE):  # these come with every run of a stage
                raise ScheduleError(f"rank {rank} runs {op} more than once", [(rank, op)])
            seen.add(op)
            if kind not in SENDS and kind not in RECVS:
                read = _read(op, placement)
                if read is not None and read not in seen:
                    raise ScheduleError(
                        f"rank {rank}: {op} reads a message that no {read} before it receives", [(rank, op)]
                    )
                continue
            there = stage + 1 if kind in (SEND_F, RECV_B) else stage - 1
            if not (0 <= stage <= last and placement[stage] == rank):
                raise ScheduleError(f"rank {rank} has {op}, but does not hold stage {stage}", [(rank, op)])
            if not 0 <= there <= last or placement[there] == rank:
                raise ScheduleError(f"rank {rank}: {op} has no other rank at its other end", [(rank, op)])
            made = [Op("F", stage, mb)] if kind == SEND_F else [Op("B", stage, mb), Op("I", stage, mb)]
            if kind in SENDS and seen.isdisjoint(made):
                raise ScheduleError(f"rank {rank}: {op} sends what is not computed yet", [(rank, op)])


def _weights(program: Program) -> None:
    """Check that weights are gathered where they are used, and that every gradient is reduced, after its ties."""
    schedule = program.schedule
    ties = crossing(program.ties, schedule.placement)
    for rank, ops in enumerate(program.ops):
        gathered: set[int] = set()
        open_: dict[int, set[int]] = defaultdict(set)  # stage -> microbatches whose gradient is not reduced yet
        every = {op.stage for op in ops if op.kind == REDUCE and op.microbatch >= 0}  # stages that reduce every one
        unsummed = {
            s: {k for k, tie in ties.items() if s in tie} for s, r in enumerate(schedule.placement) if r == rank
        }
        gathers = any(op.kind in (GATHER, RELEASE) for op in ops)
        for op in ops:
            kind, stage, mb = op
            if kind in BARE and stage not in unsummed:
                raise ScheduleError(f"rank {rank} has {op}, but does not hold stage {stage}", [(rank, op)])
            if kind == GATHER:
                gathered.add(stage)
            elif kind == RELEASE:
                if stage not in gathered:
                    raise ScheduleError(f"rank {rank}: {op} releases what no GATHER made whole", [(rank, op)])
                gathered.discard(stage)
            elif kind in COMPUTE:
                if gathers and stage not in gathered:
                    raise ScheduleError(
                        f"rank {rank}: {op} runs while the weights of stage {stage} are released",
                        [(rank, op)],
                    )
                if kind in "BW":
                    open_[stage].add(mb)
                    if summed := [k for k, tie in ties.items() if stage in tie and k not in unsummed[stage]]:
                        raise ScheduleError(f"rank {rank}: {op} comes after tie {summed[0]} is summed", [(rank, op)])
            elif kind == TIED:
                tie = ties.get(mb, ())
                if stage not in tie or stage not in unsummed:
                    raise ScheduleError(f"rank {rank} has {op}, but stage {stage} holds no tie {mb} here", [(rank, op)])
                for s in tie:
                    unsummed.get(s, set()).discard(mb)
            elif kind == REDUCE:
                if mb >= 0 and mb not in open_[stage]:
                    raise ScheduleError(f"rank {rank}: {op} reduces a gradient that is not there", [(rank, op)])
                if mb < 0 and unsummed[stage]:
                    first = min(unsummed[stage])
                    raise ScheduleError(f"rank {rank}: {op} comes before tie {first} is summed", [(rank, op)])
                if mb < 0 and stage in every and open_[stage]:
                    missing = Op(REDUCE, stage, min(open_[stage]))
                    raise ScheduleError(f"rank {rank}: {op} comes after every backward's own, and {missing} is missing")
                open_[stage] = open_[stage] - {mb} if mb >= 0 else set()
        for stage, left in open_.items():
            if left or unsummed[stage]:
                what = f"the gradient of {Op('F', stage, min(left))}" if left else f"tie {min(unsummed[stage])}"
                raise ScheduleError(f"rank {rank}: {what} is never reduced")


def _rendezvous(program: Program) -> None:
    """Run the program with every SEND blocking until its RECV is posted."""
    placement = program.schedule.placement
    ties = crossing(program.ties, placement)
    holders = {k: {placement[s] for s in tie} for k, tie in ties.items()}
    at = [0] * len(program.ops)
    posted: dict[tuple[str, int], list[int]] = defaultdict(list)  # channel, named by its sender -> microbatches
    sent: dict[tuple[str, int], int] = defaultdict(int)  # channel -> messages so far
    arrived: set[Op] = set()  # RECVs whose message was sent
    standing: dict[int, set[int]] = defaultdict(set)  # tie -> ranks that have reached it

    def reads(rank: int, op: Op) -> list[Op]:
        """Return the RECVs that a compute op waits for, and the RECVs of the op that runs interleaved with it."""
        both = (op, program.ops[rank][at[rank] + 1]) if op in program.schedule.pairs else (op,)
        return [read for member in both if (read := _read(member, placement)) is not None]

    def step(rank: int, op: Op) -> bool:
        kind, stage, mb = op
        if kind in RECVS:
            posted[_peer(op)[:2]].append(mb)
        elif kind in SENDS:
            channel = (kind, stage)
            k = sent[channel]
            if k >= len(posted[channel]):
                return False
            if posted[channel][k] != mb:
                other = _peer(op)._replace(microbatch=posted[channel][k])
                there = placement[other.stage]
                raise ScheduleError(
                    f"message {k} of a channel is {op} on rank {rank}, but {other} on rank {there}",
                    [(rank, op), (there, other)],
                )
            sent[channel] = k + 1
            arrived.add(_peer(op))
        elif kind in COMPUTE:
            return all(read in arrived for read in reads(rank, op))
        elif kind == TIED:
            standing[mb].add(rank)
            return standing[mb] == holders[mb]
        return True

    progress = True
    while progress:
        progress = False
        for rank, ops in enumerate(program.ops):
            while at[rank] < len(ops) and step(rank, ops[at[rank]]):
                at[rank] += 1
                progress = True

    def waits(op: Op) -> Wait | None:
        if op.kind == TIED:
            there = min(holders[op.microbatch] - standing[op.microbatch])
            return next(Op(TIED, s, op.microbatch) for s in ties[op.microbatch] if placement[s] == there), there
        missing = [op] if op.kind in SENDS else [r for r in reads(placement[op.stage], op) if r not in arrived]
        return (_peer(missing[0]), placement[_peer(missing[0]).stage]) if missing else None

    if any(i < len(ops) for i, ops in zip(at, program.ops, strict=True)):
        raise deadlock(program.ops, at, waits)
    for channel, recvs in posted.items():
        if sent[channel] < len(recvs):
            other = _peer(Op(*channel, recvs[sent[channel]]))
            rank = placement[other.stage]
            raise ScheduleError(
                f"rank {rank} would wait for ever at {other}, because no rank sends that message: add the send",
                [(rank, other)],
            )
