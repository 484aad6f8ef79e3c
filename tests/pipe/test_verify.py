"""verify: schedules that it accepts run to their end; for the others it names the op at which they would fail."""

from __future__ import annotations

import random
import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from triax.pipe.program.deadlock import ScheduleError
from triax.pipe.program.ops import COMPUTE, RECVS, SENDS, Op
from triax.pipe.program.passes import lower
from triax.pipe.program.program import Program
from triax.pipe.program.schedule import Schedule
from triax.pipe.program.verify import verify
from triax.pipe.schedules.choose import make_schedule
from triax.testing.strategies import schedules

from support.schedule_runner import ops
from support.schedule_runner import runs as schedule_runs
from support.toys import error_text

SEVERAL = settings(max_examples=150, derandomize=True)


@st.composite
def programs(draw: st.DrawFn) -> Program:
    schedule = draw(schedules())
    stages = st.integers(0, schedule.stages - 1)
    ties = draw(st.lists(st.lists(stages, min_size=1, max_size=3, unique=True), max_size=3))
    return lower(schedule, draw(st.integers(0, 3)), ties)


def runs(program: Program) -> bool:
    """Run a program with blocking sends, one op of a random rank at a time, with nothing but mailboxes."""
    place = program.schedule.placement
    at = [0] * len(program.ops)
    posted: dict[tuple[str, int], list[int]] = {}
    got: set[tuple[str, int, int]] = set()
    sent: dict[tuple[str, int], int] = {}
    waiting: dict[int, set[int]] = {}
    order = random.Random(0)
    while True:
        open_ranks = [r for r, ops in enumerate(program.ops) if at[r] < len(ops)]
        if not open_ranks:
            return True
        order.shuffle(open_ranks)
        for rank in open_ranks:
            kind, s, m = program.ops[rank][at[rank]]
            if kind in RECVS:
                channel = (kind, s)
                posted.setdefault(channel, []).append(m)
            elif kind in SENDS:
                channel = ("RECV_F", s + 1) if kind == "SEND_F" else ("RECV_B", s - 1)
                k = sent.get(channel, 0)
                if k >= len(posted.get(channel, [])):
                    continue
                if posted[channel][k] != m:
                    return False
                sent[channel] = k + 1
                got.add((channel[0], channel[1], m))
            elif kind == "F":
                if s > 0 and place[s - 1] != rank and ("RECV_F", s, m) not in got:
                    continue
            elif kind in "BI":
                if s + 1 < len(place) and place[s + 1] != rank and ("RECV_B", s, m) not in got:
                    continue
            elif kind == "TIED":
                waiting.setdefault(m, set()).add(rank)
                if waiting[m] != {place[t] for t in program.ties[m]}:
                    continue
            at[rank] += 1
            break
        else:
            return False


@SEVERAL
@given(programs())
def test_every_program_verifies_and_runs(program: Program) -> None:
    verify(program.schedule)
    verify(program)
    assert runs(program)


def mutate(orders: tuple[tuple[Op, ...], ...], rank: int, i: int, j: int, how: str) -> tuple[tuple[Op, ...], ...]:
    order = list(orders[rank])
    i, j = i % len(order), j % len(order)
    if how == "drop":
        del order[i]
    elif how == "twice":
        order.insert(j, order[i])
    else:
        order[i], order[j] = order[j], order[i]
    return (*orders[:rank], tuple(order), *orders[rank + 1 :])


@SEVERAL
@given(schedules(), st.integers(0, 99), st.integers(0, 999), st.integers(0, 999), st.sampled_from(["drop", "twice"]))
def test_verify_names_a_lost_or_doubled_op(schedule: Schedule, rank: int, i: int, j: int, how: str) -> None:
    rank %= schedule.pipe
    op = schedule.orders[rank][i % len(schedule.orders[rank])]
    if how == "drop" and schedule.stages * schedule.microbatches == 1 and op.kind in "BI":
        return  # what is left is inference
    mutant = replace(schedule, orders=mutate(schedule.orders, rank, i, j, how))
    words = error_text(lambda: verify(mutant), ScheduleError)
    assert f"rank {rank}" in words
    name = {"B": "B", "I": "[IBW]", "W": "W", "F": "[FIB]"}[op.kind]
    assert re.search(rf"{op.stage}{name}{op.microbatch}\b", words)


@SEVERAL
@given(schedules(), st.integers(0, 99), st.integers(0, 999), st.integers(0, 999))
def test_verify_rejects_swapped_ops_or_they_run(schedule: Schedule, rank: int, i: int, j: int) -> None:
    rank %= schedule.pipe
    mutant = replace(schedule, orders=mutate(schedule.orders, rank, i, j, "swap"))
    error = rejection(mutant)
    if error is not None:
        assert error.where, error
        assert not schedule_runs(mutant)
    else:
        program = lower(mutant)
        verify(program)
        assert runs(program) and schedule_runs(mutant)


def rejection(subject: Schedule | Program) -> ScheduleError | None:
    try:
        verify(subject)
    except ScheduleError as error:
        return error
    return None


@SEVERAL
@given(programs(), st.integers(0, 99), st.integers(0, 999), st.integers(0, 999))
def test_verify_rejects_mutated_programs_or_they_run(program: Program, rank: int, i: int, j: int) -> None:
    rank %= len(program.ops)
    swapped = replace(program, ops=mutate(program.ops, rank, i, j, "swap"))
    assert rejection(swapped) or runs(swapped)
    dropped = replace(program, ops=mutate(program.ops, rank, i, j, "drop"))
    op = program.ops[rank][i % len(program.ops[rank])]
    if op.kind != "RELEASE":  # weights that stay gathered cost memory and hurt nobody
        with pytest.raises(ScheduleError):
            verify(dropped)


@SEVERAL
@given(programs(), st.data())
def test_an_earlier_receive_never_breaks_a_program(program: Program, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, len(program.ops) - 1))
    ops = list(program.ops[rank])
    receives = [i for i, op in enumerate(ops) if op.kind in RECVS]
    if receives:
        first = receives[0]
        ops.insert(data.draw(st.integers(0, first)), ops.pop(first))
        verify(replace(program, ops=(*program.ops[:rank], tuple(ops), *program.ops[rank + 1 :])))


def of(name: str, *rows: str, placement: tuple[int, ...] | None = None) -> Schedule:
    orders = tuple(map(ops, rows))
    mbs = 1 + max(op.microbatch for order in orders for op in order)
    return Schedule(name, len(rows), mbs, 1, placement or tuple(range(len(rows))), orders)


def test_verify_names_the_ranks_and_ops_of_a_deadlock() -> None:
    circle = of("circle", "0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1")
    message = "rank 0 stands at 0B0 and waits for 1B0 of rank 1; rank 1 stands at 1F1 and waits for 0F1 of rank 0"
    with pytest.raises(ScheduleError, match=message) as caught:
        verify(circle)
    assert caught.value.where == ((0, Op.parse("0B0")), (1, Op.parse("1F1")))


def test_two_sends_that_face_each_other_deadlock() -> None:
    good = lower(make_schedule("1f1b", 2, 2))
    rows = [
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1 0REDUCE",
        "1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1 1REDUCE",
    ]
    bad = replace(good, ops=tuple(map(ops, rows)))
    with pytest.raises(
        ScheduleError, match=r"rank 0 stands at 0SEND_F1 and waits for 1RECV_F1 of rank 1; rank 1 .*1SEND_B0"
    ):
        verify(bad)
    assert not runs(bad)


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        (of("lost", "0F0 0B0 0F1"), "rank 0 never runs 0B1"),
        (of("early", "0B0 0F0"), "0B0 runs before 0F0"),
        (of("half", "0F0 0I0"), "rank 0 never runs 0W0"),
        (of("both", "0F0 0I0 0W0 0B0"), "already there"),
        (of("other", "0F0 0B0 1F0 1B0", "0F0"), "stage 1 is placed on rank 1"),
        (of("crowd", "0F0 0B0", "1F0 1B0", placement=(0, 0)), "rank 0 holds 2 stages, not 1"),
        (of("far", "0F0 0B0", placement=(3,)), "placed on rank 3, but the ranks are 0 to 0"),
        (of("message", "0F0 0SEND_F0 0B0"), "is not an op of a schedule"),
    ],
)
def test_verify_names_the_rule_that_a_schedule_breaks(schedule: Schedule, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        verify(schedule)


def test_verify_refuses_more_activations_than_allowed() -> None:
    schedule = make_schedule("1f1b", 4, 8)
    verify(schedule, 4)
    verify(schedule, (4, 3, 2, 1))
    with pytest.raises(ScheduleError, match="rank 1 may hold 2 activations, but at 1F2 it holds 3"):
        verify(schedule, (4, 2, 2, 1))
    verify(make_schedule("v-half", 4, 8), 3)
    with pytest.raises(ScheduleError, match="3"):
        verify(make_schedule("v-half", 4, 8), 2.5)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_a_tie_is_summed_before_its_weight_is_reduced(zero: int) -> None:
    program = lower(make_schedule("interleaved", 2, 4), zero, [(0, 3), (1, 3), (0, 2)])
    for rank, order in enumerate(program.ops):
        tied = [op for op in order if op.kind == "TIED"]
        assert [op.microbatch for op in tied] == [0], f"rank {rank}: ties within a rank need no message"
        final = [op for op in order if op.kind == "REDUCE" and op.microbatch < 0 and op.stage == tied[0].stage]
        assert order.index(final[0]) > order.index(tied[-1])
    moved = [[op for op in order if op.kind != "TIED"] for order in program.ops]
    with pytest.raises(ScheduleError, match="tie 0"):
        verify(replace(program, ops=tuple(map(tuple, moved))))
    # A sum that comes before a backward of a stage with the tie misses its gradient.
    early = []
    for late in map(list, program.ops):
        late.insert(0, late.pop(next(i for i, op in enumerate(late) if op.kind == "TIED")))
        early.append(tuple(late))
    with pytest.raises(ScheduleError, match="comes after tie 0 is summed"):
        verify(replace(program, ops=tuple(early)))


def test_zero_stages_differ_only_in_reduce_and_gather_ops() -> None:
    schedule = make_schedule("zb-v", 2, 3)
    for zero in range(4):
        kinds = [op.kind for ops in lower(schedule, zero).ops for op in ops]
        assert [op.kind for ops in schedule.orders for op in ops] == [kind for kind in kinds if kind in COMPUTE]
        assert kinds.count("REDUCE") == (4 if zero < 2 else 12)
        assert (kinds.count("GATHER") > 0) == (zero == 3)
        assert kinds.count("GATHER") == kinds.count("RELEASE")


def test_stages_next_to_each_other_on_one_rank_send_nothing() -> None:
    schedule = make_schedule("zb-v", pipe=2, microbatches=3)
    assert schedule.placement == (0, 1, 1, 0)  # nothing is sent between stages 1 and 2, of rank 1
    sends = [str(op) for ops in lower(schedule).ops for op in ops if op.kind in SENDS]
    between = ("0SEND_F", "1SEND_B", "2SEND_F", "3SEND_B")
    assert sorted(sends) == [f"{kind}{microbatch}" for kind in between for microbatch in range(3)]


@pytest.mark.parametrize("text", ["0F0", "10F0"])
def test_verify_refuses_ops_given_as_text(text: str) -> None:
    with pytest.raises(ScheduleError, match=f"'{text}' is text: write an Op such as"):
        verify(Schedule("mine", 1, 1, 1, (0,), ((text, "0B0"),)))  # type: ignore[arg-type]
