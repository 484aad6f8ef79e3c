"""Clients of the coordinator: meetings and heartbeats of a replica's first rank, and the store of all its ranks."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from torch.distributed import Store

from .meeting import Report
from .secret_channel import SecretChannel, WrongSecretError, connect

_LOG = logging.getLogger("triax")
_BEATS = 10  # heartbeats in the time after which a replica counts as lost
_ASK = 10.0  # seconds of one request; it is repeated


class CoordinatorClient:
    """Client of one replica, on its first rank: a thread sends heartbeats.

    Args:
        address: the coordinator's address, ``host:port``.
        secret: the run's secret.
        name, process: the replica's name, and a random text that no other process has.
        heartbeat_timeout: seconds without a heartbeat after which the coordinator takes a replica for lost.
        give_up: seconds without an answer after which the replica stops.

    Raises:
        RuntimeError: the coordinator has another secret, or there is none for ``give_up`` seconds.
    """

    def __init__(
        self, address: str, secret: bytes, name: str, process: str, heartbeat_timeout: float, give_up: float
    ) -> None:
        self.address, self.name, self._process = address, name, process
        self._secret, self._heartbeat_timeout, self._give_up = secret, heartbeat_timeout, give_up
        self._channel: SecretChannel | None = None
        deadline = time.monotonic() + give_up
        while self._channel is None:
            try:
                self._channel = connect(address, secret, _ASK)
            except WrongSecretError as error:
                raise RuntimeError(
                    f"the coordinator at {address} does not know the secret of replica {name}: set TRIAX_SECRET to the "
                    "same text for the coordinator and on all hosts"
                ) from error
            except OSError as error:
                if time.monotonic() > deadline:
                    raise RuntimeError(self._no_answer(error)) from error
                time.sleep(0.2)
        self._ended = threading.Event()
        threading.Thread(
            target=self._beat, args=(heartbeat_timeout / _BEATS,), daemon=True, name="triax heartbeat"
        ).start()

    def meet(self, report: Report) -> list[Report]:
        """Meet the other replicas, and return the reports of all, sorted by name.

        Raises:
            RuntimeError: no answer for ``give_up`` seconds, or the replica is refused.
        """
        begun, waits = time.monotonic(), False
        deadline = begun + self._give_up
        while True:
            try:
                self._channel = self._channel or connect(self.address, self._secret, _ASK)
                answer = self._channel.ask({"meet": report.plain()}, _ASK)
                while "waits" in answer and time.monotonic() < deadline:
                    if not waits and time.monotonic() > begun + _ASK:
                        waits = self._say_waits(begun, "too few are there, or one that sends heartbeats does not come")
                    answer = self._channel.receive(_ASK)
                if "refused" in answer:
                    self.close()
                    raise RuntimeError(answer["refused"])
                if "reports" in answer:
                    if waits:
                        text = "replica %s meets the others again after %.0f s"
                        _LOG.warning(text, self.name, time.monotonic() - begun)
                    return [Report.of(each) for each in answer["reports"]]
                error: Exception = TimeoutError("too few replicas are there")
            except (OSError, ValueError) as problem:
                error = problem
                if not waits:
                    waits = self._say_waits(begun, str(error))
                if self._channel is not None:
                    self._channel.close()
                self._channel = None
                # A coordinator that has started again must hear of all replicas before it answers one, or some would go
                # on without the others.
                time.sleep(min(self._heartbeat_timeout, max(0.0, deadline - time.monotonic())))
            if time.monotonic() > deadline:
                raise RuntimeError(self._no_answer(error)) from error

    def close(self) -> None:
        """Send no more heartbeats."""
        self._ended.set()

    def _beat(self, period: float) -> None:
        channel = None
        while not self._ended.wait(period):
            try:
                channel = channel or connect(self.address, self._secret, _ASK)
                channel.ask({"beat": [self.name, self._process]}, _ASK)
            except (OSError, ValueError):  # a coordinator that is down: ``meet`` says so
                if channel is not None:
                    channel.close()
                channel = None
        if channel is not None:
            channel.close()  # the coordinator need not wait for this replica

    def _say_waits(self, begun: float, why: str) -> bool:
        text = "replica %s waits: the coordinator at %s has not let it meet the others for %.0f s (%s)"
        _LOG.warning(text, self.name, self.address, time.monotonic() - begun, why)
        return True

    def _no_answer(self, error: BaseException) -> str:
        return (
            f"replica {self.name} stops, because the coordinator at {self.address} has not let it meet the others for "
            f"{self._give_up:g} s: it is down, or cut off from this host, or listens on another address, or too few "
            f"replicas are there ({error})"
        )


class CoordinatorStore(Store):
    """Store with which the ranks of a round connect: its keys are at the coordinator, and need the run's secret.

    Args:
        address: the coordinator's address, ``host:port``.
        secret: the run's secret.
        seconds: time limit of each request.
    """

    def __init__(self, address: str, secret: bytes, seconds: float) -> None:
        super().__init__()
        self._channel, self._seconds = connect(address, secret, seconds), seconds
        self._found: dict[str, bytes] = {}

    def set(self, key: str, value: bytes | str) -> None:
        """Set a key."""
        data = value.encode() if isinstance(value, str) else value
        self._channel.ask({"set": key, "value": data.hex()}, self._seconds)

    def get(self, key: str) -> bytes:
        """Return the value of a key, when another rank has set it.

        Raises:
            RuntimeError: none has within the time limit, or the coordinator is gone.
        """
        self.wait([key])
        return self._found[key]

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until keys are set, or raise as ``get``."""
        seconds = self._seconds if timeout is None else timeout.total_seconds()
        for key in keys:
            if key not in self._found:
                try:
                    answer: Any = self._channel.ask({"get": key, "seconds": seconds}, seconds + _ASK)
                except OSError as error:
                    raise RuntimeError(f"the coordinator is gone: {error}") from error
                if answer.get("value") is None:
                    raise RuntimeError(f"another rank did not come within {seconds:g} s")
                self._found[key] = bytes.fromhex(answer["value"])

    def close(self) -> None:
        """Close the connection."""
        self._channel.close()
