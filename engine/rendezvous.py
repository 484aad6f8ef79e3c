"""How the launchers of several hosts agree: when to start, when to start again, and when to end.

torchrun's own ``c10d`` rendezvous orders hosts by their addresses, notices a lost one only when its ranks do, and may
block for as long as TCP keeps trying. This handler, which torchrun's agent takes in its place, is for a fixed list of
hosts: they keep their places, and tell each other every second that they are there.

The first host's launcher holds a TCPStore. A thread of each launcher writes its pulse to it, reads the others', the
number of the attempt and whether the job is closed; the agent reads what the thread found, and so never waits for a
connection that is gone.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import TypeVar

from torch.distributed import PrefixStore, Store, TCPStore
from torch.distributed.elastic.rendezvous.api import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from ..grid.watch import within
from .hosts import Hosts

T = TypeVar("T")

BEAT = 1.0  # seconds between two pulses
FAREWELL = 5.0  # seconds that the first host stays for the others to read why the job ended


class JobEnded(Exception):
    """Another host ended the job, or cannot be reached; the message says which and why."""


class HostRendezvous(RendezvousHandler):
    """torchrun's interface over the pulses.

    Args:
        hosts: who meets, and where.
        attempts: how often the job may be started again.

    Attributes:
        attempt: how often it was.
    """

    def __init__(self, hosts: Hosts, attempts: int) -> None:
        self._hosts, self._attempts = hosts, attempts
        self.attempt = -1
        self._done = False
        self._me = f"{os.getpid()}-{time.time_ns()}"
        self._server: TCPStore | None = None
        self._meeting: TCPStore | None = None  # the store of this attempt's ranks
        if hosts.node == 0:
            try:
                self._server = TCPStore(hosts.address, hosts.port, is_master=True, wait_for_workers=False)
            except (RuntimeError, ValueError) as error:
                raise JobEnded(
                    f"port {hosts.port} on {hosts.names[0]} cannot be opened ({_first_line(error)}): is another job "
                    "using it? Give another --master-port"
                ) from error
        self._pulse = _Pulse(hosts)

    def get_backend(self) -> str:
        return "triax"

    def get_run_id(self) -> str:
        return f"triax-{self._hosts.address}-{self._hosts.port}"

    @property
    def use_agent_store(self) -> bool:
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait until every host has come to the next attempt.

        Raises:
            JobEnded: the job was closed, or a host did not come in time.
        """
        hosts, pulse = self._hosts, self._pulse
        wanted = self.attempt + 1
        deadline = time.monotonic() + hosts.patience
        missing: list[str] = list(hosts.names)
        while missing:
            if pulse.closed is not None:
                raise JobEnded(pulse.closed)
            if time.monotonic() > deadline:
                raise JobEnded(self._close(self._absent(missing)))
            if wanted > self._attempts:
                raise JobEnded(self._close(f"{hosts.names[hosts.node]} was started again, and no restart is left"))
            with contextlib.suppress(_Unreachable):
                wanted = pulse.ask(partial(self._join, least=wanted))
                here = pulse.ask(partial(_present, attempt=wanted, hosts=len(hosts.names)))
                missing = [name for name, there in zip(hosts.names, here, strict=True) if not there]
            if missing:
                time.sleep(0.1)
        self.attempt = wanted
        pulse.begin(wanted)
        while True:
            if pulse.closed is not None:
                raise JobEnded(pulse.closed)
            if time.monotonic() > deadline:
                raise JobEnded(self._close(f"{hosts.names[0]} has not answered for {hosts.patience:g} s"))
            with contextlib.suppress(_Unreachable, TimeoutError, RuntimeError):
                place = pulse.ask(self._meet)
                if place is not None:
                    store: Store = PrefixStore(f"agents/{wanted}", within(hosts.lost, pulse.connect))
                    break
            time.sleep(0.05)
        return RendezvousInfo(store, hosts.node, len(hosts.names), RendezvousStoreInfo(*place))

    def _join(self, store: Store, least: int) -> int:
        """Ask for an attempt, the one that others ask for if that is later, and say that this host is there."""
        known = int(store.compare_set("wanted", "", str(least)))
        if known < least:
            known = int(store.compare_set("wanted", str(known), str(least)))
        if store.compare_set(f"join/{known}/{self._hosts.node}", "", self._me).decode() != self._me:
            # A launcher that was here before this one took part in it.
            return known + 1
        return known

    def _meet(self, store: Store) -> tuple[str, int] | None:
        """Where this attempt's ranks meet: a store that no rank before has written to."""
        key = f"place/{self.attempt}"
        if self._hosts.node == 0 and not store.check([key]):
            self._meeting = TCPStore(self._hosts.address, 0, is_master=True, wait_for_workers=False)
            store.set(key, str(self._meeting.port))
        return (self._hosts.address, int(store.get(key))) if store.check([key]) else None

    def num_nodes_waiting(self) -> int:
        """More than 0: the ranks must be started again, for another host asks for it, or was lost.

        Raises:
            JobEnded: the job was closed, or a host was lost and there is no attempt left.
        """
        pulse = self._pulse
        if pulse.closed is not None:
            raise JobEnded(pulse.closed)
        if pulse.wanted > self.attempt:
            return 1
        lost = pulse.lost()
        if lost is None:
            return 0
        if self.attempt >= self._attempts:
            raise JobEnded(self._close(lost))
        return 1

    def lost(self) -> str | None:
        """Which host is not heard of, if one is."""
        return self._pulse.lost()

    def arrive(self, ended: bool = True) -> bool:
        """This host's ranks came to their end (or were started again); whether those of every host did."""
        self._pulse.done = ended
        self._done = ended and self._pulse.all_done
        return self._done

    def heard(self, seconds: float) -> str | None:
        """Why the job is closed, if it is within so many seconds."""
        deadline = time.monotonic() + seconds
        while self._pulse.closed is None and time.monotonic() < deadline:
            time.sleep(0.05)
        return self._pulse.closed

    def close(self, why: str) -> None:
        """End the job on every host."""
        self._close(why)

    def _close(self, why: str) -> str:
        """Returns what is said: the first reason given stays."""
        with contextlib.suppress(_Unreachable):
            said = self._pulse.ask(lambda store: store.compare_set("closed", "", why).decode())
            return str(said)
        return why

    def is_closed(self) -> bool:
        return self._pulse.closed is not None

    def set_closed(self) -> None:
        self._close("the job was closed")

    def shutdown(self) -> bool:
        """Leave; the first host stays a moment, so that the others can read how it ended."""
        if not self._done:
            self._close(f"{self._hosts.names[self._hosts.node]} left")
        self._pulse.leave(FAREWELL)
        return True

    def _absent(self, missing: Sequence[str]) -> str:
        lost = self._pulse.lost()
        who = ", ".join(missing)
        if self._hosts.names[0] in missing and lost is not None:
            return lost
        return (
            f"{who} did not come within {self._hosts.patience:g} s: start triax run there too, with the same "
            f"--master-addr {self._hosts.address} --master-port {self._hosts.port} and its own --node-rank"
        )


class _Unreachable(Exception):
    """The store did not answer in time."""


class _Pulse:
    """This host's thread: what it writes and reads, once a second.

    Attributes:
        attempt: of this host; ``wanted``: the latest that any host asks for.
        closed: why the job ended, if it did.
        done: set when this host's ranks have come to their end; ``all_done`` when every host's have.
    """

    def __init__(self, hosts: Hosts) -> None:
        self._hosts = hosts
        self.attempt = self.wanted = -1
        self.closed: str | None = None
        self.done = self.all_done = False
        now = time.monotonic()
        self._answered: float | None = None  # when the store last did
        self._seen = [("", now)] * len(hosts.names)  # each one's last pulse, and when it changed
        self._store: TCPStore | None = None
        self._leaving = threading.Event()
        self._gone = threading.Event()
        threading.Thread(target=self._run, daemon=True, name="pulse").start()

    def connect(self) -> TCPStore:
        """A connection of one's own to the first host's store."""
        hosts = self._hosts
        # The store's own host must reach it when its link is down, too.
        address = "127.0.0.1" if hosts.node == 0 else hosts.address
        limit = timedelta(seconds=max(hosts.lost, 5.0))
        return TCPStore(address, hosts.port, is_master=False, wait_for_workers=False, timeout=limit)

    def ask(self, question: Callable[[Store], T]) -> T:
        """What the store says, within the limit.

        Raises:
            _Unreachable: it did not answer, and the next question goes over a new connection.
        """

        def put() -> T:
            if self._store is None:
                self._store = self.connect()
            return question(self._store)

        try:
            return within(self._hosts.lost / 3, put)
        except (TimeoutError, RuntimeError, ValueError) as error:
            self._store = None
            raise _Unreachable(_first_line(error)) from error

    def lost(self) -> str | None:
        """Which host has not been heard of for too long."""
        hosts, now = self._hosts, time.monotonic()
        if self._answered is None:
            return None  # it has not started yet: `patience` is for that
        if now - self._answered > hosts.lost:
            return (
                f"{hosts.names[0]}, the first host, has not answered {hosts.names[hosts.node]} for "
                f"{now - self._answered:.0f} s: it, its launcher or the link to it is down"
            )
        for name, (pulse, when) in zip(hosts.names, self._seen, strict=True):
            if pulse and pulse != "done" and now - when > hosts.lost:
                return (
                    f"{name} has not been heard of for {now - when:.0f} s: it, its launcher or the link to it is down"
                )
        return None

    def begin(self, attempt: int) -> None:
        """All hosts were there a moment ago."""
        now = time.monotonic()
        self.attempt, self._seen = attempt, [(pulse, now) for pulse, _ in self._seen]
        if self._answered is not None:
            self._answered = now

    def leave(self, limit: float) -> None:
        self._leaving.set()
        self._gone.wait(limit)

    def _run(self) -> None:
        store, count = None, 0
        names = range(len(self._hosts.names))
        keys = [f"pulse/{node}" for node in names]
        while not self._leaving.wait(0 if store is None else BEAT / 5 if self.done else BEAT):
            try:
                if store is None:
                    store = within(self._hosts.lost, self.connect)
                count += 1
                mine = "done" if self.done else str(count)

                def exchange(store: Store = store, mine: str = mine) -> list[str]:
                    store.set(keys[self._hosts.node], mine)
                    wanted = [key for key in (*keys, "wanted", "closed") if store.check([key])]
                    found = dict(zip(wanted, store.multi_get(wanted), strict=True))
                    return [found.get(key, b"").decode() for key in (*keys, "wanted", "closed")]

                *pulses, wanted, closed = within(self._hosts.lost / 3, exchange)
            except (TimeoutError, RuntimeError, ValueError):
                store = None  # a new connection finds its way sooner than one that TCP has put off
                self._leaving.wait(BEAT / 2)
                continue
            now = time.monotonic()
            away = self._answered is not None and now - self._answered > self._hosts.lost
            for node, pulse in enumerate(pulses):
                # After a time without the store, nobody's silence means anything.
                if pulse != self._seen[node][0] or away:
                    self._seen[node] = pulse, now
            self._answered = now
            self.wanted = int(wanted or -1)
            self.all_done = all(pulse == "done" for pulse in pulses)
            self.closed = closed or None
        self._say_farewell(store)

    def _say_farewell(self, store: Store | None) -> None:
        """The others say that they have read the end; the first host waits for those that still can."""
        nodes = range(len(self._hosts.names))
        try:
            if store is not None:
                within(1.0, lambda: store.set(f"left/{self._hosts.node}", "1"))
            end = time.monotonic() + FAREWELL
            while store is not None and self._hosts.node == 0 and time.monotonic() < end:
                left = within(1.0, lambda: store.check([f"left/{node}" for node in nodes if self._seen[node][0]]))
                if left:
                    break
                time.sleep(0.05)
        except (TimeoutError, RuntimeError, ValueError):
            pass
        self._gone.set()


def _present(store: Store, attempt: int, hosts: int) -> list[bool]:
    return [store.check([f"join/{attempt}/{node}"]) for node in range(hosts)]


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]
