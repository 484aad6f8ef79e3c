"""Record of a run of replicas: the ledger with its file, lost time, and the lines of the log about other replicas."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...base.records import Records
from ...base.steady_time import steady_time
from ...checkpoint.format.folder import write_atomically
from .meeting import Decision, Round
from .membership import Change, Ledger

_LOG = logging.getLogger("triax")
_NOTABLE = 0.001  # seconds of lost time that are recorded
_SLOW_STEPS = 10  # steps in a row after which a slow replica is named


class ReplicaRecord:
    """Record that one replica keeps of the run.

    Args:
        name: the replica's name.
        folder: folder of the history's file; None: there is no file.
        writes: this rank writes the file and the lines of the log.
        unit: name of what the history counts.

    Attributes:
        ledger: the samples taken, and the history of members.
    """

    def __init__(self, name: str, folder: str | None, writes: bool, unit: str) -> None:
        self._name, self._folder, self._writes, self._unit = name, folder, writes, unit
        self.ledger = Ledger()
        self._lost_time: dict[str, float] = {}  # cause -> seconds since the last recorded change
        self._gone: list[str] = []  # replicas that have left since then because they were asked to
        self._slow = "", 0  # the slowest replica, and the steps since it is
        self._records, self._unwritten = Records(), False  # True: a change is not in the history's file yet

    @property
    def is_new(self) -> bool:
        """True if the run has taken steps, and this replica took no share of the last one."""
        return bool(self.ledger.changes) and self._name not in self.ledger.members

    def lose(self, cause: str, seconds: float) -> None:
        """Note time that this replica lost, which the next change records."""
        if seconds > _NOTABLE:
            self._lost_time[cause] = self._lost_time.get(cause, 0.0) + round(seconds, 4)

    def add_step(
        self, round_: Round, planned: Sequence[str], counted: Sequence[str], decision: Decision, seconds: float
    ) -> None:
        """Record a step that is taken.

        Args:
            round_: the round that took it.
            planned: the replicas that took shares of its samples.
            counted: those whose gradients are in it.
            decision: the decision of the meeting after it.
            seconds: time that a loss within it cost; 0: none was lost.
        """
        resumed = bool(self.ledger.changes) and not self.ledger.members
        facts: dict[str, Any] = {"time": steady_time()} | ({"seconds": seconds} if seconds else {})
        facts |= {key: {self._name: value} for key, value in self._lost_time.items()}
        facts |= ({"left": self._gone} if self._gone else {}) | ({"resumed": True} if resumed else {})
        facts |= {"cause": f"lost: {', '.join(decision.lost)}"} if decision.lost else {}
        changes = self.ledger.record(round_.step, planned, counted, **facts)
        if changes:
            self._lost_time, self._gone = {}, []
        self._gone += decision.left
        if changes or self._unwritten:
            self.write_history()
        if self._writes:
            for change in changes:
                self._log(change)
            self._name_slow(decision, round_)

    def write_history(self) -> None:
        """Write the history file of this replica, as a whole. The run goes on without a file that cannot be written."""
        if self._folder is None or not self._writes:
            return
        path, self._unwritten = Path(self._folder, f"{self._name}.jsonl"), True
        with self._records.writing(f"the history of members {path}, which a replay needs,"):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, self.ledger.history().encode())
            self._unwritten = False

    def _log(self, change: Change) -> None:
        if change.members is None:
            names = ", ".join(change.lost)
            _LOG.warning("%s %d is taken without %s, whose samples are taken later", self._unit, change.step, names)
        else:
            _LOG.warning("from %s %d on the replicas are %s", self._unit, change.step, ", ".join(change.members))

    def _name_slow(self, decision: Decision, round_: Round) -> None:
        """Log the name of a replica that was the slowest, and slow, in several steps in a row."""
        name = "" if decision.slowest is None else decision.slowest[0]
        before, count = self._slow
        self._slow = name, count + 1 if name and name == before else 1
        if name and self._slow[1] == _SLOW_STEPS and decision.slowest is not None:
            text = "replica %s is slow: in %d steps it took more than twice the median of all, in step %d %.3g s"
            _LOG.warning(text, name, _SLOW_STEPS, round_.step, decision.slowest[1])
