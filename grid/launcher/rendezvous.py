"""Rendezvous of one host, and of a fixed list of hosts whose launchers agree when to start, to restart and to end.

torchrun's own ``c10d`` rendezvous orders hosts by their addresses, notices a lost host only when its ranks do, and may
block for as long as TCP keeps trying. With this handler, which torchrun's agent takes in its place, hosts keep their
order, and each writes a heartbeat every second.

The launcher of the first host holds a TCPStore. A thread of each launcher writes its heartbeat to the store, and reads
those of the other hosts, the number of the attempt and the reason for which the job ended. The agent reads the thread's
results, and thus never waits for a broken connection.

Stores listen on one address: on one host the loopback address, on several the address of the first host. What is read
from a store is text and numbers, and is never unpickled.
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

from torch.distributed import HashStore, PrefixStore, Store, TCPStore
from torch.distributed.elastic.rendezvous.api import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from ...base.ports import LOOPBACK, is_loopback, resolve
from ..agreement.hang_watch import with_timeout
from ..comm.tcp_store import serve_store
from .hosts import Hosts

T = TypeVar("T")

INTERVAL = 1.0  # seconds between two heartbeats
FAREWELL = 5.0  # seconds for which the first host's store stays, so that the others can read why the job ended


class JobEnded(Exception):
    """The end of the job by another host, or the loss of a host; the message names it and the reason."""


class LocalRendezvous(RendezvousHandler):
    """Rendezvous handler of a single host, for torchrun's agent. The ranks' store listens on the loopback address.

    Attributes:
        attempt: how often the job was restarted.
    """

    def __init__(self) -> None:
        self.attempt = -1
        self._store = HashStore()  # of the agent, in this process
        self._ranks_server: TCPStore | None = None  # the store of this attempt's ranks

    def get_backend(self) -> str:
        return "triax"

    def get_run_id(self) -> str:
        return f"triax-{os.getpid()}"

    @property
    def use_agent_store(self) -> bool:
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Begin the next attempt, with a new store."""
        self.attempt += 1
        self._ranks_server = serve_store(LOOPBACK)
        address = RendezvousStoreInfo(LOOPBACK, self._ranks_server.port)
        return RendezvousInfo(PrefixStore(str(self.attempt), self._store), 0, 1, address)

    def num_nodes_waiting(self) -> int:
        return 0

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def shutdown(self) -> bool:
        return True


class HostRendezvous(RendezvousHandler):
    """Rendezvous handler for torchrun's agent.

    Args:
        hosts: all hosts, and the address of the store.
        attempts: how often the job may be restarted.

    Attributes:
        attempt: how often the job was restarted.
    """

    def __init__(self, hosts: Hosts, attempts: int) -> None:
        self._hosts, self._attempts = hosts, attempts
        self.attempt = -1
        self._done = False
        self._me = f"{os.getpid()}-{time.time_ns()}"
        self._server: TCPStore | None = None
        self._ranks_server: TCPStore | None = None  # the store of this attempt's ranks
        if hosts.node == 0:
            try:
                self._address = resolve(hosts.address)
                self._server = serve_store(self._address, hosts.port)
            except (OSError, RuntimeError, ValueError) as error:
                raise JobEnded(
                    f"port {hosts.port} of {hosts.address} cannot be opened on {hosts.names[0]} "
                    f"({_first_line(error)}): if another job uses it, give another --master-port; if {hosts.address} "
                    "is not an address of that host, give one that is with --master-addr"
                ) from error
        self._heartbeat = _Heartbeat(hosts)

    def get_backend(self) -> str:
        return "triax"

    def get_run_id(self) -> str:
        return f"triax-{self._hosts.address}-{self._hosts.port}"

    @property
    def use_agent_store(self) -> bool:
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait until every host has joined the next attempt.

        Raises:
            JobEnded: the job was closed, or a host did not join in time.
        """
        hosts, heartbeat = self._hosts, self._heartbeat
        wanted = self.attempt + 1
        deadline = time.monotonic() + hosts.patience
        missing: list[str] = list(hosts.names)
        while missing:
            if heartbeat.closed is not None:
                raise JobEnded(heartbeat.closed)
            if time.monotonic() > deadline:
                raise JobEnded(self.close(self._absent_message(missing)))
            if wanted > self._attempts:
                spent = f"--max-restarts {self._attempts} allows no further restart"
                raise JobEnded(self.close(f"the launcher of {hosts.names[hosts.node]} was restarted, but {spent}"))
            with contextlib.suppress(_Unreachable):
                wanted = heartbeat.query(partial(self._join, least=wanted))
                here = heartbeat.query(partial(_present, attempt=wanted, hosts=len(hosts.names)))
                missing = [name for name, there in zip(hosts.names, here, strict=True) if not there]
            if missing:
                time.sleep(0.1)
        self.attempt = wanted
        heartbeat.begin(wanted)
        while True:
            if heartbeat.closed is not None:
                raise JobEnded(heartbeat.closed)
            if time.monotonic() > deadline:
                raise JobEnded(self.close(f"{hosts.names[0]} has not answered for {hosts.patience:g} s"))
            with contextlib.suppress(_Unreachable, TimeoutError, RuntimeError):
                address = heartbeat.query(self._ranks_store)
                if address is not None:
                    store: Store = PrefixStore(f"agents/{wanted}", with_timeout(hosts.lost, heartbeat.connect))
                    break
            time.sleep(0.05)
        return RendezvousInfo(store, hosts.node, len(hosts.names), RendezvousStoreInfo(*address))

    def _join(self, store: Store, least: int) -> int:
        """Join attempt ``least``, or a later attempt that another host asks for. Returns the attempt's number."""
        known = int(store.compare_set("wanted", "", str(least)))
        if known < least:
            known = int(store.compare_set("wanted", str(known), str(least)))
        if store.compare_set(f"join/{known}/{self._hosts.node}", "", self._me).decode() != self._me:
            # An earlier launcher of this host took part in it.
            return known + 1
        return known

    def _ranks_store(self, store: Store) -> tuple[str, int] | None:
        """Return address and port of the TCPStore through which the ranks themselves meet in this attempt.

        The launcher of the first host makes it. The result is None as long as it has not.
        """
        key = f"place/{self.attempt}"
        if self._hosts.node == 0 and not store.check([key]):
            self._ranks_server = serve_store(self._address)
            store.set(key, str(self._ranks_server.port))
        return (self._hosts.address, int(store.get(key))) if store.check([key]) else None

    def num_nodes_waiting(self) -> int:
        """Return 1 if the ranks must be restarted, because another host asks for it or was lost; otherwise 0.

        Raises:
            JobEnded: the job was closed, or a host was lost and there is no attempt left.
        """
        heartbeat = self._heartbeat
        if heartbeat.closed is not None:
            raise JobEnded(heartbeat.closed)
        if heartbeat.wanted > self.attempt:
            return 1
        lost = heartbeat.lost_host()
        if lost is None:
            return 0
        if self.attempt >= self._attempts:
            raise JobEnded(self.close(lost))
        return 1

    def lost_host(self) -> str | None:
        """Return a message about a host whose heartbeats have stopped; None if there is none."""
        return self._heartbeat.lost_host()

    def report_done(self, ended: bool = True) -> bool:
        """Publish in the store that this host's ranks are done, or are not if ``ended`` is False.

        Returns:
            True if the ranks of every host are done.
        """
        self._heartbeat.done = ended
        self._done = ended and self._heartbeat.all_done
        return self._done

    def end_reason(self, seconds: float) -> str | None:
        """Return the reason for which the job was closed, if it is closed within ``seconds``."""
        deadline = time.monotonic() + seconds
        while self._heartbeat.closed is None and time.monotonic() < deadline:
            time.sleep(0.05)
        return self._heartbeat.closed

    def close(self, why: str) -> str:
        """End the job on every host; return the reason that was given first."""
        with contextlib.suppress(_Unreachable):
            first = self._heartbeat.query(lambda store: store.compare_set("closed", "", why).decode())
            return str(first)
        return why

    def is_closed(self) -> bool:
        return self._heartbeat.closed is not None

    def set_closed(self) -> None:
        self.close("the job was closed")

    def shutdown(self) -> bool:
        """Leave the rendezvous; the first host waits a moment, so that the others can read the reason for the end."""
        if not self._done:
            self.close(f"{self._hosts.names[self._hosts.node]} left")
        self._heartbeat.leave(FAREWELL)
        return True

    def _absent_message(self, missing: Sequence[str]) -> str:
        lost = self._heartbeat.lost_host()
        who = ", ".join(missing)
        if self._hosts.names[0] in missing and lost is not None:
            return lost
        text = (
            f"{who} did not join within {self._hosts.patience:g} s: start triax run there too, with the same "
            f"--master-addr {self._hosts.address} --master-port {self._hosts.port} and its own --node-rank"
        )
        if self._hosts.node == 0 and is_loopback(self._address):
            text += (
                f". {self._hosts.address} is {self._address} on this host (see /etc/hosts), which no other host can "
                "reach: give the address of its network interface"
            )
        return text


class _Unreachable(Exception):
    """Error raised if the store does not answer in time."""


class _Heartbeat:
    """This host's thread, which writes its heartbeat and reads the other hosts', once a second.

    Attributes:
        attempt, wanted: the number of this host's attempt, and the largest attempt number that any host asks for.
        closed: the reason for which the job ended. None while the job runs.
        done: True when the ranks of this host are done.
        all_done: True when the ranks of every host are done.
    """

    def __init__(self, hosts: Hosts) -> None:
        self._hosts = hosts
        self.attempt = self.wanted = -1
        self.closed: str | None = None
        self.done = self.all_done = False
        now = time.monotonic()
        self._answered: float | None = None  # time of the store's last answer
        self._seen = [("", now)] * len(hosts.names)  # each host's last heartbeat, and when it changed
        self._store: TCPStore | None = None
        self._leaving = threading.Event()
        self._gone = threading.Event()
        threading.Thread(target=self._run, daemon=True, name="pulse").start()

    def connect(self) -> TCPStore:
        """Open a new connection to the first host's store."""
        hosts = self._hosts
        limit = timedelta(seconds=max(hosts.lost, 5.0))
        return TCPStore(hosts.address, hosts.port, is_master=False, wait_for_workers=False, timeout=limit)

    def query(self, request: Callable[[Store], T]) -> T:
        """Return the store's answer to a request.

        Raises:
            _Unreachable: it did not answer in time; the next request uses a new connection.
        """

        def put() -> T:
            if self._store is None:
                self._store = self.connect()
            return request(self._store)

        try:
            return with_timeout(self._hosts.lost / 3, put)
        except (TimeoutError, RuntimeError, ValueError) as error:
            self._store = None
            raise _Unreachable(_first_line(error)) from error

    def lost_host(self) -> str | None:
        """Return a message about a host whose heartbeats have stopped; None if there is none."""
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
                    f"{name} has sent no heartbeat for {now - when:.0f} s: it, its launcher or the link to it is down"
                )
        return None

    def begin(self, attempt: int) -> None:
        """Begin an attempt, which all hosts have just joined."""
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
        while not self._leaving.wait(0 if store is None else INTERVAL / 5 if self.done else INTERVAL):
            try:
                if store is None:
                    store = with_timeout(self._hosts.lost, self.connect)
                count += 1
                own_state = "done" if self.done else str(count)

                def exchange(store: Store = store, mine: str = own_state) -> list[str]:
                    store.set(keys[self._hosts.node], mine)
                    wanted = [key for key in (*keys, "wanted", "closed") if store.check([key])]
                    values = dict(zip(wanted, store.multi_get(wanted), strict=True))
                    return [values.get(key, b"").decode() for key in (*keys, "wanted", "closed")]

                *pulses, wanted, closed = with_timeout(self._hosts.lost / 3, exchange)
            except (TimeoutError, RuntimeError, ValueError):
                store = None  # a new connection is faster than waiting for TCP's retransmissions on the old one
                self._leaving.wait(INTERVAL / 2)
                continue
            now = time.monotonic()
            away = self._answered is not None and now - self._answered > self._hosts.lost
            for node, pulse in enumerate(pulses):
                # While the store could not be reached, missing heartbeats mean nothing.
                if pulse != self._seen[node][0] or away:
                    self._seen[node] = pulse, now
            self._answered = now
            self.wanted = int(wanted or -1)
            self.all_done = all(pulse == "done" for pulse in pulses)
            self.closed = closed or None
        self._say_farewell(store)

    def _say_farewell(self, store: Store | None) -> None:
        """Note in the store that this host leaves, and knows for which reason the job ended.

        The first host, whose process holds the store, waits until all hosts that it can reach have left.
        """
        nodes = range(len(self._hosts.names))
        try:
            if store is not None:
                with_timeout(1.0, lambda: store.set(f"left/{self._hosts.node}", "1"))
            end = time.monotonic() + FAREWELL
            while store is not None and self._hosts.node == 0 and time.monotonic() < end:
                left = with_timeout(1.0, lambda: store.check([f"left/{node}" for node in nodes if self._seen[node][0]]))
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
