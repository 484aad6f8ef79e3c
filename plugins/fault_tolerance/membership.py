"""Membership of replicas as a value: who contributed to which step, and the samples that each one took. No torch.

The samples of a run are cut into shares of equal size, numbered in the order that the seed gives. In each step every
member takes one share. A share of a replica that was lost within the step is owed: the next step takes it first, so no
sample is lost and none is taken twice. The shares are a function of the history of members alone, so a history that is
replayed gives the same batches.

Changes are written to a file, one JSON object in a line, after a checksum of the rest of the file:

    {"sha256": "5f2c..."}
    {"step": 0, "members": ["0", "1", "2"]}     from step 0 on, these replicas take shares, in this order
    {"step": 7, "lost": ["2"]}                  replica 2 took a share of step 7, and its gradient is not in the sum
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...base.errors import ConfigError
from ...base.files import parse_json

RESTARTED = "started again from files"  # cause of a change


@dataclass(frozen=True)
class Change:
    """Change of the members.

    Attributes:
        step: the step, counted from 0.
        members: the replicas that take shares from this step on; None if the change is a loss.
        lost: the replicas whose gradients are not in the sum of this step alone.
        facts: facts for reports, which a replay ignores: ``time`` (of the clock) of the end of the step, ``seconds``
            that the loss took, ``cause``; ``left``, the replicas that were asked to go before; ``resumed`` if the run
            has started again from a checkpoint; and time that the writing replica lost since the change before, by its
            name: ``detection`` (sums that failed, and meetings that said so), ``again`` (sums and connections after
            them), ``joining`` (sends and connections for a newcomer, or as a newcomer the time from its start).
    """

    step: int
    members: tuple[str, ...] | None = None
    lost: tuple[str, ...] = ()
    facts: Mapping[str, Any] = field(default_factory=dict, compare=False)

    def line(self) -> str:
        """Return the change as a line of a history file."""
        what = {"lost": self.lost} if self.members is None else {"members": self.members}
        return json.dumps({"step": self.step, **what, **self.facts})

    @classmethod
    def of(cls, line: str) -> Change:
        """Return the change of a line of a history file.

        Raises:
            ValueError: the line is no change.
        """
        value = parse_json(line)
        if not isinstance(value, dict) or type(step := value.pop("step", None)) is not int:
            raise ValueError("it has no step")
        names = value.pop("lost", None), value.pop("members", None)
        for given in names:
            if given is not None and not (isinstance(given, list) and all(isinstance(each, str) for each in given)):
                raise ValueError("members and lost are lists of names")
        lost, members = names
        if (lost is None) == (members is None):
            raise ValueError("it has neither members nor lost, or both")
        return cls(step, None if members is None else tuple(members), tuple(lost or ()), value)


@dataclass
class Ledger:
    """Shares that were taken and that are owed, and the changes of the members so far.

    Attributes:
        next_share: number of the first share that no replica has taken.
        owed: shares of lost replicas, ascending, which the next step takes first.
        members: the members of the last step.
        changes: all changes so far.
        counted: number of shares whose gradients were summed.
    """

    next_share: int = 0
    owed: list[int] = field(default_factory=list)
    members: tuple[str, ...] = ()
    changes: list[Change] = field(default_factory=list)
    counted: int = 0

    def plan(self, members: Sequence[str]) -> dict[str, int]:
        """Return the share that each member takes in the next step; nothing is recorded."""
        new = range(self.next_share, self.next_share + len(members))
        return dict(zip(members, [*self.owed, *new], strict=False))

    def record(self, step: int, members: Sequence[str], counted: Iterable[str], **facts: Any) -> list[Change]:
        """Record a step that was taken, and return its changes.

        Args:
            step: the step, counted from 0.
            members: the replicas that took shares, in their order.
            counted: the members whose gradients are in the sum.
            facts: facts for reports, of the changes of this step.
        """
        shares, counted = self.plan(members), set(counted)
        changes = []
        if tuple(members) != self.members:
            changes.append(Change(step, tuple(members), facts=facts))
        lost = tuple(name for name in members if name not in counted)
        if lost:
            changes.append(Change(step, None, lost, facts=facts))
        taken = set(shares.values())
        self.next_share += len(taken - set(self.owed))
        self.owed = sorted((set(self.owed) - taken) | {shares[name] for name in lost})
        self.members, self.counted = tuple(members), self.counted + len(members) - len(lost)
        self.changes += changes
        return changes

    def state(self) -> dict[str, Any]:
        """Return the ledger for JSON."""
        changes = [change.line() for change in self.changes]
        return {
            "next_share": self.next_share,
            "owed": self.owed,
            "members": [*self.members],
            "counted": self.counted,
            "changes": changes,
        }

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> Ledger:
        """Return the ledger of ``state``."""
        changes = [Change.of(line) for line in state["changes"]]
        return cls(state["next_share"], [*state["owed"]], tuple(state["members"]), changes, state["counted"])

    def history(self) -> str:
        """Return the content of the history's file."""
        lines = "".join(change.line() + "\n" for change in self.changes)
        return _first_line(lines) + lines


def _first_line(lines: str) -> str:
    """Return the first line of a history file, of the lines that follow it."""
    return json.dumps({"sha256": hashlib.sha256(lines.encode()).hexdigest()}) + "\n"


def read_changes(path: Path) -> list[Change]:
    """Return the changes in a history file, which may be one without a checksum, of an earlier version.

    Raises:
        ConfigError: the file cannot be read, is damaged, or has a line that is no change.
    """
    changes = []
    try:
        text = path.read_bytes().decode()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"fault_tolerance.replay: {path} cannot be read: {error}") from error
    head, _, lines = text.partition("\n")
    first = 1
    if head.startswith('{"sha256"'):
        if head + "\n" != _first_line(lines):
            raise ConfigError(f"the history {path} is damaged: its checksum is wrong. Give the file of another replica")
        text, first = lines, 2
    for number, line in enumerate(text.splitlines(), first):
        try:
            changes.append(Change.of(line))
        except ValueError as error:
            raise ConfigError(f"{path}, line {number}: {error}. Give the file that a run has written") from None
    return changes


class History:
    """History of members that a run recorded, to be replayed.

    Args:
        changes: the changes, in the order of their steps.

    Attributes:
        restarted: True if the run has started again from files in between.
    """

    def __init__(self, changes: Iterable[Change]) -> None:
        changes = list(changes)
        self.restarted = any(change.facts.get("cause") == RESTARTED for change in changes)
        self._members: dict[int, tuple[str, ...]] = {}
        self._lost: dict[int, tuple[str, ...]] = {}
        for change in changes:
            if change.members is None:
                self._lost[change.step] = change.lost
            else:
                self._members[change.step] = change.members
        self._steps = sorted(self._members)

    @classmethod
    def from_file(cls, path: Path) -> History:
        """Read a history file.

        Raises:
            ConfigError: as ``read_changes``, or it is not the history of a whole run.
        """
        changes = read_changes(path)
        if not any(change.members and change.step == 0 for change in changes):
            raise ConfigError(f"{path} has no members of step 0, so it is not the history of a whole run")
        return cls(changes)

    @property
    def names(self) -> list[str]:
        """Names of all replicas that were ever members, sorted."""
        return sorted({name for members in self._members.values() for name in members})

    def members(self, step: int) -> tuple[str, ...]:
        """Return the members of a step; after the end of the history, the last members."""
        return self._members[max(each for each in self._steps if each <= step)]

    def counted(self, step: int) -> tuple[str, ...]:
        """Return the members of a step whose gradients were in the sum."""
        lost = self._lost.get(step, ())
        return tuple(name for name in self.members(step) if name not in lost)
