"""Coordinator: torchft's Lighthouse, which tells replicas who is there, and the client of one replica.

The Lighthouse hears the replicas' heartbeats, and answers a meeting when every replica that it hears has come, or after
``patience`` seconds without the slow ones. All replicas of a meeting get the same answer.
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import time
from datetime import timedelta
from typing import Any

from ..base.errors import ConfigError, to_install
from ..grid.environment import quiet_rust
from .meeting import Report

_LOG = logging.getLogger("triax")
_BEATS = 10  # heartbeats in the time after which a replica counts as lost
_ASK = 10.0  # seconds of one request; it is repeated


def coordination() -> Any:
    """Return torchft's module of the Lighthouse.

    Raises:
        ConfigError: torchft is not installed.
    """
    quiet_rust()  # it would write the reports of all replicas to the terminal in every step
    try:
        from torchft import coordination as module
    except ImportError as error:
        raise ConfigError(f"fault_tolerance needs torchft: {to_install('faults')} ({error})") from error
    return module


def serve(port: int, least: int, silence: float, patience: float, host: str = "0.0.0.0") -> Any:
    """Start a coordinator in this process; return its server, with ``address()`` and ``shutdown()``.

    Args:
        port: TCP port; 0: any free one.
        least: number of replicas without which no step is taken.
        silence: seconds without a heartbeat after which a replica is lost.
        patience: seconds that a meeting waits for a replica that sends heartbeats and does not come.
        host: address to listen on.
    """
    return coordination().LighthouseServer(
        bind=f"{host}:{port}",
        min_replicas=least,
        join_timeout_ms=int(1000 * patience),
        quorum_tick_ms=50,
        heartbeat_timeout_ms=int(1000 * silence),
    )


class CoordinatorClient:
    """Client of one replica, on its first rank: a thread sends heartbeats.

    Args:
        address: the coordinator's address, ``host:port``.
        name: the replica's name.
        silence: seconds without a heartbeat after which the coordinator takes a replica for lost.
        give_up: seconds without an answer after which the replica stops.
    """

    def __init__(self, address: str, name: str, silence: float, give_up: float) -> None:
        self.address, self.name, self._give_up = address, name, give_up
        self._silence = silence
        self._client = self._connect(time.monotonic() + give_up)
        self._ended = threading.Event()
        self._thread = threading.Thread(
            target=self._beat, args=(silence / _BEATS,), daemon=True, name="triax heartbeat"
        )
        self._thread.start()

    def meet(self, report: Report) -> list[Report]:
        """Meet the other replicas, and return the reports of all, sorted by name.

        Raises:
            RuntimeError: no answer for ``give_up`` seconds.
        """
        begun = time.monotonic()
        deadline, waits = begun + self._give_up, False
        while True:
            left = deadline - time.monotonic()
            try:
                quorum = self._client.quorum(
                    self.name,
                    timedelta(seconds=max(0.1, min(left, _ASK))),
                    address="",
                    store_address=report.store,
                    step=report.step,
                    world_size=1,
                    shrink_only=False,
                    data={"report": json.dumps(report.plain())},
                )
                if waits:
                    _LOG.warning("replica %s meets the others again after %.0f s", self.name, time.monotonic() - begun)
                found = [Report.of(json.loads(each.data["report"])) for each in quorum.participants]
                return sorted(found, key=lambda each: each.name)
            except (RuntimeError, ConnectionError, TimeoutError, OSError) as error:
                if time.monotonic() > deadline:
                    raise RuntimeError(self._no_answer(error)) from error
                if not waits:
                    text = "replica %s waits: the coordinator at %s has not let it meet the others for %.0f s (%s)"
                    _LOG.warning(text, self.name, self.address, time.monotonic() - begun, _first_line(error))
                waits = True
                # A connection whose packets were lost would wait for its next try. A coordinator that has started again
                # must hear of all replicas before it answers one, or some would go on without the others.
                self._client = self._connect(deadline)
                time.sleep(min(self._silence, max(0.0, deadline - time.monotonic())))

    def _connect(self, deadline: float) -> Any:
        """Return a new connection to the coordinator.

        Raises:
            RuntimeError: there is none until the deadline.
        """
        url = self.address if "//" in self.address else f"http://{self.address}"
        while True:
            left = max(0.1, deadline - time.monotonic())
            try:
                return coordination().LighthouseClient(url, timedelta(seconds=min(left, _ASK)))
            except (RuntimeError, ConnectionError, TimeoutError, OSError) as error:
                if time.monotonic() > deadline:
                    raise RuntimeError(self._no_answer(error)) from error
                time.sleep(0.2)

    def close(self) -> None:
        """Send no more heartbeats."""
        self._ended.set()

    def _beat(self, period: float) -> None:
        while not self._ended.wait(period):
            with contextlib.suppress(RuntimeError, OSError):  # a coordinator that is down: ``meet`` says so
                self._client.heartbeat(self.name, timedelta(seconds=max(1.0, period)))

    def _no_answer(self, error: BaseException) -> str:
        return (
            f"replica {self.name} stops, because the coordinator at {self.address} has not let it meet the others for "
            f"{self._give_up:g} s: it is down, or cut off from this host, or too few replicas are there "
            f"({_first_line(error)})"
        )


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
