"""Program: a schedule with the messages, collectives and tied sums that it needs to run. (passes.py makes it.)"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .ops import Op
from .schedule import Schedule

Ties = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Program:
    """Ops of each rank: a schedule's compute ops, messages, ZeRO's collectives, sums of tied gradients.

    Attributes:
        schedule: the schedule.
        ops: for each rank its ops, in the order in which it runs them.
        ties: for each tie, the stages that hold it, ascending.
    """

    schedule: Schedule
    ops: tuple[tuple[Op, ...], ...]
    ties: Ties = ()

    def __str__(self) -> str:
        rows = (f"rank {r}: {' '.join(map(str, ops))}" for r, ops in enumerate(self.ops))
        return "\n".join((f"program of {str(self.schedule).splitlines()[0]}", *rows))


def crossing(ties: Ties, placement: Sequence[int]) -> dict[int, tuple[int, ...]]:
    """Return index of a tie -> its stages, for the ties whose stages lie on more than one rank.

    Their gradients need a collective. Stages of one rank share one parameter, so a tie within a rank needs no sum.

    Args:
        ties: for each tie, the stages that hold it.
        placement: the rank of each stage.
    """
    return {k: tie for k, tie in enumerate(ties) if len({placement[s] for s in tie}) > 1}
