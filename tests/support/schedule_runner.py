"""Execution of a schedule op by op, with nothing of triax but its ops: the reference of ``verify``."""

from __future__ import annotations

from collections.abc import Iterable

from triax import Schedule, verify
from triax.pipe.program.deadlock import ScheduleError
from triax.pipe.program.ops import Op
from triax.pipe.program.passes import lower

Key = tuple[int, int]  # stage, and microbatch or slice


def ops(text: str) -> tuple[Op, ...]:
    """Return the ops of a text such as ``0F0 0B0``."""
    return tuple(map(Op.parse, text.split()))


def runs(schedule: Schedule) -> bool:
    """Return True if every op finds what it reads, and nothing is left at the end.

    A rank runs its ops in order, the two of a pair at once. An F leaves activations on the device, or their inputs,
    if a C is to come; I leaves work for W. The F of a slice reads the keys of the slices before it, its backward pass
    the gradients of those after it.
    """
    slices, last = len(schedule.slices), schedule.stages - 1
    kinds = {op.kind for order in schedule.orders for op in order}
    again = {op[1:] for order in schedule.orders for op in order if op.kind == "C"}
    forward, backward, offloaded = set[Key](), set[Key](), set[Key]()
    device, host, inputs, split = set[Key](), set[Key](), set[Key](), set[Key]()
    at = [0] * schedule.pipe

    def ready(op: Op) -> bool:
        stage, unit = key = op[1:]
        match op.kind:
            case "F":
                there = stage == 0 or (stage - 1, unit) in forward
                return there and key not in forward and (unit % slices == 0 or (stage, unit - 1) in forward)
            case "B" | "I":
                there = stage == last or (stage + 1, unit) in backward
                return there and key in device and ((unit + 1) % slices == 0 or (stage, unit + 1) in backward)
            case "O":
                return key in device and key not in offloaded and key not in again
        return key in {"C": inputs, "R": host, "W": split}[op.kind]

    def run(op: Op) -> None:
        key = op[1:]
        match op.kind:
            case "F":
                forward.add(key)
                (inputs if key in again else device).add(key)
            case "B" | "I":
                device.remove(key)
                backward.add(key)
                split.update([key] if op.kind == "I" else [])
            case "W":
                split.remove(key)
            case "C":
                inputs.remove(key)
                device.add(key)
            case "O":
                device.remove(key)
                host.add(key)
                offloaded.add(key)
            case "R":
                host.remove(key)
                device.add(key)

    moved = True
    while moved:
        moved = False
        for rank, order in enumerate(schedule.orders):
            group = order[at[rank] : at[rank] + 1]
            if group and group[0] in schedule.pairs:
                group = order[at[rank] : at[rank] + 2]
            if group and all(map(ready, group)):
                for op in group:
                    run(op)
                at[rank] += len(group)
                moved = True
    ended = at == [len(order) for order in schedule.orders] and not (host or inputs or split)
    inference = kinds == {"F"}
    return ended and len(forward) == schedule.stages * schedule.passes and (inference or not device)


def assert_verify_accepts_what_runs(mutants: Iterable[tuple[Schedule, int]]) -> None:
    """Compare ``verify`` with ``runs`` on schedules, each with the ZeRO stage of its program. Some run, some do not."""
    accepted = []
    for number, (schedule, stage) in enumerate(mutants):
        reason = ""
        try:
            verify(schedule)
            verify(lower(schedule, stage))
        except ScheduleError as error:
            reason = str(error)
        assert runs(schedule) == (not reason), (number, reason, str(schedule))
        assert not reason or "rank" in reason
        accepted.append(not reason)
    assert 0.1 * len(accepted) < sum(accepted) < 0.9 * len(accepted)
