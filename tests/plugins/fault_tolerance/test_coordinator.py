"""The coordinator: who meets whom, what it refuses, and that a stranger learns nothing and ends nothing."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from triax.base.errors import ConfigError
from triax.base.threads import BackgroundCall
from triax.grid.environment import run_secret
from triax.plugins.fault_tolerance.coordinator import Coordinator
from triax.plugins.fault_tolerance.coordinator_client import CoordinatorClient, CoordinatorStore
from triax.plugins.fault_tolerance.meeting import Report
from triax.plugins.fault_tolerance.secret_channel import WrongSecretError, connect

SECRET = b"the secret of the run"
SETTINGS = {"model": "abc", "data": "60 samples"}


class Replica:
    """Client of a replica that has a state if ``round`` is not -1."""

    def __init__(self, server: Coordinator, name: str, round_: int = -1, process: str = "", **settings: str) -> None:
        process = process or f"process of {name}"
        self.report = Report(name, max(round_, 0), round_, settings={**SETTINGS, **settings}, process=process)
        self.client = CoordinatorClient(server.address, SECRET, name, process, heartbeat_timeout=0.5, give_up=3.0)

    def meet(self) -> BackgroundCall[list[str]]:
        """Begin to meet the others; the result has their names."""
        return BackgroundCall(lambda: [each.name for each in self.client.meet(self.report)], "meets")


@pytest.fixture
def server() -> Iterator[Coordinator]:
    server = Coordinator(0, min_replicas=2, heartbeat_timeout=0.5, straggler_timeout=1.0, secret=SECRET)
    yield server
    server.close()


@contextlib.contextmanager
def a_run_that_goes_on(server: Coordinator) -> Iterator[list[Replica]]:
    """Two members that meet before and after the block."""
    members = [Replica(server, name, 4) for name in "ab"]
    try:
        for _ in range(2):
            for meeting in [each.meet() for each in members]:
                assert meeting.result() == ["a", "b"]
            if _ == 0:
                yield members
    finally:
        for each in members:
            each.client.close()


def answers_of(server: Coordinator, *sent: bytes) -> bytes:
    """Return all that the server tells a client that sends these bytes."""
    host, _, port = server.address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        with contextlib.suppress(OSError):  # it has closed the connection
            for each in sent:
                connection.sendall(each)
                time.sleep(0.05)
            connection.shutdown(socket.SHUT_WR)
        found = b""
        with contextlib.suppress(ConnectionError):
            while piece := connection.recv(4096):
                found += piece
    return found


def test_clients_without_the_secret_get_no_data_and_stop_no_run(server: Coordinator) -> None:
    meet = json.dumps({"meet": Report("z", 9, 9).plain()}).encode()
    with a_run_that_goes_on(server):
        assert answers_of(server) == b""
        said = b"GET /status HTTP/1.1\r\n\r\n" * 4
        for sent in (said, bytes(32), bytes(64), bytes(64) + len(meet).to_bytes(4, "big") + meet):
            assert len(answers_of(server, sent[:32], sent[32:])) in (0, 32)  # random bytes alone
        with pytest.raises(WrongSecretError):
            connect(server.address, b"a guess", 5.0)
        with pytest.raises(RuntimeError, match="does not know the secret of replica z: set TRIAX_SECRET"):
            CoordinatorClient(server.address, b"a guess", "z", "1", heartbeat_timeout=0.5, give_up=3.0)
        with pytest.raises(WrongSecretError):
            CoordinatorStore(server.address, b"a guess", 5.0)
        port = int(server.address.rpartition(":")[2])
        idle = [socket.create_connection(("127.0.0.1", port), timeout=5) for _ in range(9)]
    for each in idle:
        each.close()


def test_clients_refuse_a_server_without_the_secret() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def accept() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(32)
                connection.sendall(bytes(64))

        accepted = BackgroundCall(accept, "accepts")
        with pytest.raises(WrongSecretError):
            connect(f"127.0.0.1:{listener.getsockname()[1]}", SECRET, 5.0)
        accepted.result()


PLAIN = Report("z", 0, process="1", settings=SETTINGS).plain()
MALFORMED: list[Any] = [None, 7, [], {}, "beat", {"meet": None}, {"meet": {}}, {"meet": [PLAIN]}, {"beat": "a"}]
MALFORMED += [
    {"beat": None},
    {"get": "key"},
    {"set": "key"},
    {"get": "key", "seconds": "x"},
    {"meet": {**PLAIN, "x": 1}},
]
MALFORMED += [{"meet": {key: value for key, value in PLAIN.items() if key != left_out}} for left_out in PLAIN]
MALFORMED += [{"meet": {**PLAIN, key: value}} for key in PLAIN for value in (None, {"a": 1}, [1], [["a"]], 1j.imag)
              if not (key == "seconds" and isinstance(value, float))]  # fmt: skip


def test_a_malformed_message_is_refused_and_the_run_goes_on(server: Coordinator) -> None:
    """The messages are malformed, or have no token."""
    with a_run_that_goes_on(server):
        for message in MALFORMED:
            channel = connect(server.address, SECRET, 5.0)
            assert "is not one of a replica" in channel.ask(message, 5.0)["refused"], message
            channel.close()
        channel = connect(server.address, SECRET, 5.0)
        channel._connection.sendall(b"\0\0\0\3abc")  # no JSON: the connection is closed
        with pytest.raises(ConnectionError):
            channel.receive(5.0)


@pytest.mark.parametrize("round_", [-1, 3])
def test_a_replica_that_differs_is_refused_and_the_run_goes_on(server: Coordinator, round_: int) -> None:
    with a_run_that_goes_on(server) as members:
        other = Replica(server, "c", round_, data="12 samples")
        said = r"replica c .* differs from replica a in data \(12 samples; the run has 60 samples\)"
        with pytest.raises(RuntimeError, match=said):
            other.meet().result()
        same = Replica(server, "c")
        meetings = [same.meet()]
        time.sleep(0.2)
        meetings += [each.meet() for each in members]
        assert [each.result() for each in meetings] == [["a", "b", "c"]] * 3
        same.client.close()
        time.sleep(0.6)  # it counts as lost


def test_a_replica_that_differs_is_refused_even_if_it_is_first(server: Coordinator) -> None:
    """The settings of the run are those of the replicas with its state."""
    other = Replica(server, "c", data="12 samples").meet()
    time.sleep(0.2)
    with a_run_that_goes_on(server), pytest.raises(RuntimeError, match=r"replica c .* from replica [ab] in data"):
        other.result()


def test_the_second_process_with_a_replica_name_is_refused(server: Coordinator) -> None:
    with a_run_that_goes_on(server) as members:
        with pytest.raises(RuntimeError, match="two processes have the name of replica a, and this one came later"):
            Replica(server, "a", process="another").meet().result()
        members[0].client.close()  # killed: its next process waits until it counts as lost
        members[0] = Replica(server, "a", 4, process="the next")


def test_a_meeting_waits_for_replicas_that_send_heartbeats(server: Coordinator) -> None:
    a, b, c = (Replica(server, name) for name in "abc")
    time.sleep(0.2)  # the first heartbeats
    begun = time.monotonic()
    meetings = [a.meet(), b.meet()]
    assert [each.result() for each in meetings] == [["a", "b"]] * 2  # the straggler timeout is over
    assert time.monotonic() - begun >= 1.0
    late = c.meet()
    with pytest.raises(RuntimeError, match=r"replica c stops, .* for 3 s: .* too few replicas are there"):
        late.result()  # never more than half of the living, nor all of the last meeting
    for each in (a, b, c):
        each.client.close()


def test_a_replica_whose_process_ends_is_lost_at_once(server: Coordinator) -> None:
    """Its heartbeats end with their connection: the others do not wait for the time without a heartbeat."""
    server._heartbeat_timeout = 60.0
    members = [Replica(server, name, 4) for name in "abc"]
    time.sleep(0.2)
    assert [each.result() for each in [each.meet() for each in members]] == [["a", "b", "c"]] * 3
    members[2].client.close()
    time.sleep(0.3)
    assert [each.result() for each in [each.meet() for each in members[:2]]] == [["a", "b"]] * 2
    for each in members:
        each.client.close()


def test_the_coordinator_serves_the_store_of_a_round(server: Coordinator) -> None:
    one, other = (CoordinatorStore(server.address, SECRET, 5.0) for _ in range(2))
    waiting = BackgroundCall(lambda: other.get("key"), "waits")
    one.set("key", b"\0\xff")
    assert waiting.result() == one.get("key") == b"\0\xff"
    with pytest.raises(RuntimeError, match=r"did not come within 0\.1 s"):
        CoordinatorStore(server.address, SECRET, 0.1).get("another")


def test_a_missing_secret_error_names_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    for value in ("", None):
        monkeypatch.setenv("TRIAX_SECRET", value) if value is not None else monkeypatch.delenv("TRIAX_SECRET")
        with pytest.raises(ConfigError, match=r"TRIAX_SECRET is not set, .* type export TRIAX_SECRET=TEXT"):
            run_secret()


def test_reports_survive_json_unchanged() -> None:
    report = Report("a", 3, 2, True, ("a", "b"), ("a",), seconds=1.5, settings=SETTINGS)
    assert Report.of(json.loads(json.dumps(report.plain()))) == report
    assert Report.of({**report.plain(), "seconds": 2}) == replace(report, seconds=2.0)
