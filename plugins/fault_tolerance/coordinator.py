"""Coordinator: tells replicas who is there, and holds the addresses with which the ranks of a round connect. No torch.

It hears the replicas' heartbeats, and answers a meeting when

- all replicas of the last meeting have come, or
- at least ``min_replicas`` have come, more than half of those that send heartbeats, and either all of these have come,
  or the first has waited for ``straggler_timeout`` seconds.

All replicas of a meeting get the same answer. A client proves that it knows the run's secret before it is told anything
(secret_channel.py). Its messages:

    {"beat": [name, process]}       heartbeat                                        {}
    {"meet": report}                meeting                                          {"waits": true} while it waits
                                                                                     {"reports": [report, ...]}
    {"set": key, "value": text}     address of a rank                                {}
    {"get": key, "seconds": s}      that of another one, when it is there            {"value": text or null}

An answer {"refused": reason} is for this client alone: one that is not a replica of the run does not end the others.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Mapping
from typing import Any

from ...base.ports import LOOPBACK, listen, resolve
from .meeting import Report
from .secret_channel import SecretChannel

_TICK = 0.05  # seconds between two looks at the time
_SIGN = 2.0  # seconds after which a waiting replica is told that it waits
_STRANGERS = 64  # connections at once whose clients have not proven yet that they know the secret


class Coordinator:
    """Server of the coordinator, in threads of this process.

    Args:
        port: TCP port; 0: any free one.
        min_replicas: number of replicas without which no step is taken.
        heartbeat_timeout: seconds without a heartbeat after which a replica is lost.
        straggler_timeout: seconds that a meeting waits for a replica that sends heartbeats and does not come.
        secret: what the replicas of the run know.
        host: address to listen on.

    Attributes:
        address: ``host:port``.

    Raises:
        OSError: the address is not one of this host, or the port is in use.
    """

    def __init__(
        self,
        port: int,
        min_replicas: int,
        heartbeat_timeout: float,
        straggler_timeout: float,
        secret: bytes,
        host: str = LOOPBACK,
    ) -> None:
        self._min_replicas, self._secret = min_replicas, secret
        self._heartbeat_timeout, self._straggler_timeout = heartbeat_timeout, straggler_timeout
        self._changed = threading.Condition()
        self._beats: dict[tuple[str, str], tuple[float, float]] = {}  # (name, process) -> first and last heartbeat
        self._visits: dict[str, _Visit] = {}  # of the next meeting
        self._last: list[Report] = []  # the last meeting
        self._keys: dict[str, str] = {}
        self._older_keys: dict[str, str] = {}  # of before the last meeting; then they are dropped
        self._strangers = threading.Semaphore(_STRANGERS)
        self._listener, self._closed = listen(resolve(host), port), False
        self.address = f"{host}:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True, name="triax coordinator").start()

    def close(self) -> None:
        """Accept no more clients."""
        self._closed = True
        self._listener.shutdown(socket.SHUT_RDWR)  # else the thread that accepts would keep the port open
        self._listener.close()

    def _accept(self) -> None:
        while not self._closed:
            self._strangers.acquire()
            try:
                connection, _ = self._listener.accept()
            except OSError:  # closed, or no more files may be open
                self._strangers.release()
                time.sleep(_TICK)
                continue
            threading.Thread(target=self._serve, args=(connection,), daemon=True, name="triax client").start()

    def _serve(self, connection: socket.socket) -> None:
        """Answer a client until it is gone. A replica whose heartbeats end with their connection is lost at once."""
        beats: tuple[str, str] | None = None
        with contextlib.suppress(OSError, ValueError):
            try:
                channel = SecretChannel(connection, self._secret, serves=True)
            finally:
                self._strangers.release()
            try:
                while True:
                    message = channel.receive()
                    channel.send(answer := self._answer(message, channel))
                    if answer == {} and "beat" in message:
                        beats = (message["beat"][0], message["beat"][1])
            finally:
                channel.close()
                with self._changed:
                    if beats is not None and beats[0] not in self._visits:
                        self._beats.pop(beats, None)

    def _answer(self, message: Any, channel: SecretChannel) -> Mapping[str, Any]:
        """Return the answer to a message; one that is malformed is refused."""
        try:
            if "beat" in message:
                name, process = map(str, message["beat"])
                with self._changed:
                    self._beat(name, process)
                return {}
            if "set" in message:
                with self._changed:
                    self._keys[str(message["set"])] = str(message["value"])
                    self._changed.notify_all()
                return {}
            if "get" in message:
                return {"value": self._value(str(message["get"]), float(message["seconds"]))}
            report = Report.of(message["meet"])
        except (KeyError, TypeError, ValueError) as error:
            return {"refused": f"the message {message!r:.100} is not one of a replica ({error})"}
        return self._meet(report, channel)

    def _value(self, key: str, seconds: float) -> str | None:
        with self._changed:
            self._changed.wait_for(lambda: key in self._keys or key in self._older_keys, seconds)
            return self._keys.get(key, self._older_keys.get(key))

    # ------------------------------------------------------------------------------------------ meetings

    def _meet(self, report: Report, channel: SecretChannel) -> Mapping[str, Any]:
        """Return the answer of the next meeting. The client gets a sign now and then while it waits."""
        with self._changed:
            arrived = time.monotonic()
            while (other := self._namesake(report)) is not None:
                if other > arrived:
                    return {
                        "refused": f"two processes have the name of replica {report.name}, and this one came later: "
                        "give each replica a name of its own, as in triax run --replicas a,b"
                    }
                self._changed.wait(_TICK)
            self._beat(report.name, report.process)
            if (reason := self._foreign(report)) is not None:
                del self._beats[report.name, report.process]
                return {"refused": reason}
            visit = self._visits[report.name] = _Visit(report, arrived)
            self._changed.notify_all()
        try:
            while True:
                with self._changed:
                    until = time.monotonic() + _SIGN
                    while visit.answer is None and time.monotonic() < until:
                        if (found := self._gathered()) is not None:
                            self._end_meeting(found)
                        else:
                            self._changed.wait(_TICK)
                    if visit.answer is not None:
                        return visit.answer
                channel.send({"waits": True})
        finally:
            with self._changed:
                if self._visits.get(report.name) is visit:  # the client is gone
                    del self._visits[report.name]

    def _beat(self, name: str, process: str) -> None:
        now = time.monotonic()
        self._beats[name, process] = self._living().get((name, process), (now, now))[0], now

    def _living(self) -> dict[tuple[str, str], tuple[float, float]]:
        """Return the heartbeats of the processes that send any; those of others are dropped."""
        now = time.monotonic()
        self._beats = {key: times for key, times in self._beats.items() if now - times[1] < self._heartbeat_timeout}
        return self._beats

    def _namesake(self, report: Report) -> float | None:
        """Return the last heartbeat of an earlier process that has a replica's name and is alive; None without one."""
        living = self._living()
        since, _ = living.get((report.name, report.process), (time.monotonic(), 0.0))
        earlier = (key for key, (first, _) in living.items() if key[0] == report.name and first < since)
        return max((living[key][1] for key in earlier), default=None)

    def _gathered(self) -> list[Report] | None:
        """Return the reports of the next meeting, sorted by name; None if it waits."""
        living, now = {name for name, _ in self._living()}, time.monotonic()
        here = {name: visit for name, visit in sorted(self._visits.items()) if name in living}
        reports = [visit.report for visit in here.values()]
        if here and self._last and all(each.name in here for each in self._last):
            return reports
        if len(here) < self._min_replicas or 2 * len(here) <= len(living):
            return None
        waited = now - min(visit.since for visit in here.values())
        return reports if len(here) == len(living) or waited >= self._straggler_timeout else None

    def _end_meeting(self, reports: list[Report]) -> None:
        plain = [each.plain() for each in reports]
        names = {each.name for each in reports}
        for name, visit in self._visits.items():
            visit.answer = {"reports": plain} if name in names else {"again": True}  # it was stopped for a while
        self._visits, self._last = {}, reports
        self._keys, self._older_keys = {}, self._keys
        self._changed.notify_all()

    def _foreign(self, report: Report) -> str | None:
        """Return why a replica is none of this run; None if it is one.

        The settings of the run are those of the replicas with the state of the latest round; in a new run, of the first
        that has come.
        """
        living = self._living()
        known = [visit.report for visit in self._visits.values() if visit.report.name != report.name]
        known += [each for each in self._last if (each.name, each.process) in living and each.name != report.name]
        run = max(known, key=lambda each: each.round, default=report)
        if report.round <= run.round:
            return _difference(report, run)
        for name, visit in [*self._visits.items()]:
            if (reason := _difference(visit.report, report)) is not None:
                visit.answer = {"refused": reason}
                del self._visits[name]
        return None


class _Visit:
    """A replica at the next meeting.

    Attributes:
        report: its report.
        since: time at which it came.
        answer: the answer, when the meeting has ended.
    """

    def __init__(self, report: Report, since: float) -> None:
        self.report, self.since = report, since
        self.answer: Mapping[str, Any] | None = None


def _difference(report: Report, run: Report) -> str | None:
    """Return what a replica has that is different from the run; None if nothing is."""
    names = [key for key in {**run.settings, **report.settings} if report.settings.get(key) != run.settings.get(key)]
    if not names:
        return None
    each = [f"{name} ({report.settings.get(name)}; the run has {run.settings.get(name)})" for name in names]
    return (
        f"replica {report.name} is not one of this run, because it differs from replica {run.name} in "
        f"{', '.join(each)}: start all replicas with the same program, options and data"
    )
