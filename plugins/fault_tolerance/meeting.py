"""Meetings of replicas: what each one reports, and the decision that follows from the reports. No torch, no network.

The coordinator gives every replica of a meeting the same list of reports, and ``decide`` is a function of that list, so
all replicas come to the same decision without a further message. One meeting ends each attempt to sum the gradients:

- every member of the round that is still there has the whole sum: the step is taken, with the gradients of all members
  of the round, also of those that have died since. New replicas enter, and others leave;
- a member that is still there has no sum, because another one died: those that are left sum their gradients again,
  without the lost one's. The gradients of a replica are in a step entirely, or not at all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any


@dataclass(frozen=True)
class Report:
    """Message of a replica to the others at a meeting.

    Attributes:
        name: the replica's name.
        step: number of steps that it has taken; -1 if it has lost its state, or waits for it.
        round: number of the round whose sum it tried; -1 if it has no state that the others could rely on.
        summed: True if all its ranks have the whole sum of that round.
        members, contributors, owners, keepers: those of the round.
        planned: the replicas that took shares in the step, also those that were lost since.
        leaving: True if the replica ends after this step.
        settings: name of what must be equal on all replicas -> its value or hash.
        process: random text, different for each process that takes the replica's name.
        seconds: time from the begin of the step to its own gradients.
    """

    name: str
    step: int
    round: int = -1
    summed: bool = False
    members: tuple[str, ...] = ()
    contributors: tuple[str, ...] = ()
    planned: tuple[str, ...] = ()
    owners: tuple[str, ...] = ()
    keepers: tuple[str, ...] = ()
    leaving: bool = False
    settings: Mapping[str, str] = field(default_factory=dict, hash=False)
    process: str = ""
    seconds: float = 0.0

    def plain(self) -> dict[str, Any]:
        """Return the report for JSON."""
        return asdict(self)

    @classmethod
    def of(cls, value: Mapping[str, Any]) -> Report:
        """Return the report of ``plain``.

        Raises:
            ValueError: it is none.
        """
        if not isinstance(value, dict) or {*value} != {each.name for each in fields(cls)}:
            raise ValueError(f"it has not the fields of a report: {value!r:.100}")
        plain: dict[str, Any] = {}
        for key, given in value.items():
            kind = type(getattr(cls, key, {} if key == "settings" else 0 if key == "step" else ""))
            texts = [*given, *given.values()] if isinstance(given, dict) else given if isinstance(given, list) else []
            plain[key] = tuple(given) if isinstance(given, list) else float(given) if kind is float else given
            if type(plain[key]) is not kind or not all(isinstance(each, str) for each in texts):
                raise ValueError(f"{key} of a report is {given!r:.100}")
        return cls(**plain)


@dataclass(frozen=True)
class Round:
    """An attempt to take a step together.

    Attributes:
        number: number of the round, larger than those of all rounds before.
        step: the step, counted from 0.
        members: replicas with the state of the run, the longest-standing first.
        contributors: the members whose gradients are summed, in the order of the sum. The others are spare.
        newcomers: replicas that get the state from ``donor`` in this round. They contribute nothing.
        donor: the member that sends the state; empty without newcomers.
        process: that of the replica whose state all have, which names the keys of this round's group.
        fresh: True at the start of a run: newcomers get the state before the step, and contribute.
        owners: replicas among which the optimizer state is cut that the last step has left; empty after a fresh round,
            when each has the whole state.
        keepers: those of the owners that still hold what they held then.
    """

    number: int
    step: int
    members: tuple[str, ...]
    contributors: tuple[str, ...]
    newcomers: tuple[str, ...] = ()
    donor: str = ""
    process: str = ""
    fresh: bool = False
    owners: tuple[str, ...] = ()
    keepers: tuple[str, ...] = ()

    @property
    def group(self) -> tuple[str, ...]:
        """Replicas of the round, in the order of their ranks in its process group."""
        return (*self.members, *(name for name in self.newcomers if name not in self.members))


@dataclass(frozen=True)
class Decision:
    """Result of a meeting: the next round, and what became of the last one.

    Attributes:
        committed: the contributors of the step that is taken now; None: no step is taken.
        next: the next round. Replicas of the meeting that are not in its group meet again.
        lost: members of the last round that are not at the meeting.
        left: members that end after the step.
        slowest: name and seconds of the slowest contributor; None if it is not slow.
        keeps: True if all replicas of the next round have the sum of the last one: their connections stand.
    """

    committed: tuple[str, ...] | None
    next: Round
    lost: tuple[str, ...] = ()
    left: tuple[str, ...] = ()
    slowest: tuple[str, float] | None = None
    keeps: bool = False


Choose = Callable[[int, tuple[str, ...]], tuple[str, ...]]  # (step, members) -> contributors

_SLOW = 2.0  # a replica is slow if it takes so many times the median of the others


def decide(reports: Sequence[Report], choose: Choose, hands_over: bool = False) -> Decision | None:
    """Return the decision of a meeting; None if every member of the last round is lost, so that no state is left.

    Args:
        reports: the reports of all replicas at the meeting.
        choose: chooses the contributors of a step among the members.
        hands_over: a replica that leaves is spare for one step, in which the others take what it owns.
    """
    by_name = {report.name: report for report in reports}
    number = max(report.round for report in reports)
    if number < 0:
        source = min(reports, key=lambda report: (-report.step, report.name))
        if source.step < 0:
            return None
        names = tuple(sorted(by_name))
        others = tuple(name for name in names if name != source.name)
        return Decision(
            None, Round(0, source.step, names, choose(source.step, names), others, source.name, source.process, True)
        )
    round_ = {report.name: report for report in reports if report.round == number}
    last = next(iter(round_.values()))
    here = [name for name in last.contributors if name in round_]
    if not here:
        return None
    last = round_[here[0]]
    lost = tuple(name for name in last.members if name not in round_)
    if not all(round_[name].summed for name in here):
        members = tuple(name for name in last.members if name in round_)
        newcomers = tuple(sorted(name for name in round_ if name not in last.members))
        # Newcomers of the round have their state already: those that have not are not in the round any more.
        keepers = tuple(name for name in last.keepers if name in round_)
        again = Round(
            number + 1,
            last.step,
            (*members, *newcomers),
            tuple(here),
            process=round_[here[0]].process,
            owners=last.owners,
            keepers=keepers,
        )
        return Decision(None, again, lost)
    there = [name for name in last.members if name in round_ and round_[name].summed]
    entered = sorted(name for name, each in round_.items() if name not in last.members and each.summed)
    waits = hands_over and any(not round_[name].leaving for name in (*there, *entered))
    leaving = [name for name in last.members if name in round_ and round_[name].leaving]
    left = tuple(name for name in leaving if not (waits and name in last.planned))
    stay = [name for name in there if name not in left]
    members = (*stay, *(name for name in entered if not round_[name].leaving))
    newcomers = tuple(sorted(name for name in by_name if name not in members and name not in left))
    step = last.step + 1
    donor = members[0] if members else ""
    following = Round(
        number + 1,
        step,
        members,
        choose(step, tuple(name for name in members if not round_[name].leaving)),
        newcomers,
        donor if newcomers else "",
        round_[donor].process if members else "",
        owners=last.planned,
        keepers=tuple(name for name in last.planned if name in stay),
    )
    keeps = all(name in round_ and round_[name].summed for name in following.group)
    return Decision(last.contributors, following, lost, left, _slowest([round_[name] for name in here]), keeps)


def _slowest(reports: Sequence[Report]) -> tuple[str, float] | None:
    """Return the slowest of three or more replicas, if it takes more than twice the median; else None."""
    ordered = sorted(reports, key=lambda report: report.seconds)
    median = ordered[(len(ordered) - 1) // 2].seconds
    if len(ordered) < 3 or ordered[-1].seconds <= _SLOW * median:
        return None
    return ordered[-1].name, ordered[-1].seconds
