"""Coordinator: torchft's Lighthouse, which tells replicas who is there, and the client of one replica.

The Lighthouse hears the replicas' heartbeats, and answers a meeting when every replica that it hears has come, or after
``patience`` seconds without the slow ones. All replicas of a meeting get the same answer.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from datetime import timedelta
from typing import Any

from ..base.errors import ConfigError, to_install
from .meeting import Report

_BEATS = 10  # heartbeats in the time after which a replica counts as lost
_ASK = 30.0  # seconds of one request; it is repeated


def coordination() -> Any:
    """Return torchft's module of the Lighthouse.

    Raises:
        ConfigError: torchft is not installed.
    """
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
        url = address if "//" in address else f"http://{address}"
        deadline = time.monotonic() + give_up
        while True:
            try:
                self._client = coordination().LighthouseClient(url, timedelta(seconds=min(give_up, 10.0)))
                break
            except (RuntimeError, ConnectionError, TimeoutError, OSError) as error:
                if time.monotonic() > deadline:
                    raise RuntimeError(self._no_answer(error)) from error
                time.sleep(0.2)
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
        deadline = time.monotonic() + self._give_up
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
                found = [Report.of(json.loads(each.data["report"])) for each in quorum.participants]
                return sorted(found, key=lambda each: each.name)
            except (RuntimeError, ConnectionError, TimeoutError, OSError) as error:
                if time.monotonic() > deadline:
                    raise RuntimeError(self._no_answer(error)) from error
                time.sleep(0.1)

    def close(self) -> None:
        """Send no more heartbeats."""
        self._ended.set()

    def _beat(self, period: float) -> None:
        while not self._ended.wait(period):
            with contextlib.suppress(Exception):  # a coordinator that is down: ``meet`` says so
                self._client.heartbeat(self.name, timedelta(seconds=max(1.0, period)))

    def _no_answer(self, error: BaseException) -> str:
        said = str(error).strip().splitlines()
        return (
            f"replica {self.name} stops, because the coordinator at {self.address} has not let it meet the others for "
            f"{self._give_up:g} s: it is down, or cut off from this host, or too few replicas are there "
            f"({said[0] if said else type(error).__name__})"
        )
