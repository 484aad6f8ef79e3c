"""Exchange of small values between the ranks of a dry run, through the process that started them.

A rank in a dry run computes no values, but some numbers decide what happens next: the schema of the first message
between two stages, flags that all ranks agree on. Ranks that run at the same time exchange these through sockets, and
so wait for each other as on a cluster. If all of them wait, or one waits for a rank that has ended, the program would
hang, and they are told so.
"""

from __future__ import annotations

import json
import selectors
import socket
import struct
from collections.abc import Callable
from typing import Any

_LENGTH = struct.Struct("<Q")
_BEAT = 1.0  # seconds, at most, between two calls of a hub's ``beat``
NOT_RUN = "not run"  # answer in place of the values of a rank that no process runs
Message = dict[str, Any]


class HangError(BaseException):
    """Error of a rank that waits for what never comes. No ``except Exception`` of the script catches it."""


class RankSocket:
    """A rank's end of its socket.

    Args:
        connection: the socket.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection

    def send(self, message: Message) -> None:
        """Send a message to the process that started this rank."""
        data = json.dumps(message).encode()
        self._socket.sendall(_LENGTH.pack(len(data)) + data)

    def receive(self) -> Message | None:
        """Wait for a message. None if the other end is closed."""
        head = self._read(_LENGTH.size)
        if head is None:
            return None
        body = self._read(_LENGTH.unpack(head)[0])
        return None if body is None else json.loads(body)

    def ask(self, message: Message) -> Any:
        """Send a request and wait for its answer.

        Raises:
            HangError: the answer would never come on a cluster either.
        """
        self.send(message)
        answer = self.receive()
        if answer is None:
            raise HangError("the dry run was ended")
        if "hang" in answer:
            raise HangError(answer["hang"])
        return answer["value"]

    def _read(self, size: int) -> bytes | None:
        parts = bytearray()
        while len(parts) < size:
            part = self._socket.recv(min(size - len(parts), 2**20))
            if not part:
                return None
            parts += part
        return bytes(parts)


class Hub:
    """The other end of the sockets of all ranks that run at the same time.

    Args:
        announced: called with a rank and its message when it makes its first grid.
        joined: values that ranks gave in collectives and messages, by their names: those of ranks that ran before stand
            for ranks that do not run.
        beat: called again and again while the ranks compute.

    Attributes:
        ended: rank -> the record that it sent last; None if its process ended without one.
    """

    def __init__(
        self,
        announced: Callable[[int, Message], None],
        joined: dict[str, dict[int, Any]],
        beat: Callable[[], None] = lambda: None,
    ) -> None:
        self._announced, self._beat = announced, beat
        self._selector = selectors.DefaultSelector()
        self._links: dict[int, RankSocket] = {}
        self._joined = joined
        self._waiting: dict[int, Message] = {}
        self.ended: dict[int, Message | None] = {}

    def add(self, rank: int, connection: socket.socket) -> None:
        """Add a rank that has been started."""
        self._links[rank] = RankSocket(connection)
        self._selector.register(connection, selectors.EVENT_READ, rank)

    def run(self) -> None:
        """Serve the ranks until all have ended."""
        while len(self.ended) < len(self._links):
            self._beat()
            for key, _ in self._selector.select(_BEAT):
                rank = key.data
                message = self._links[rank].receive()
                if message is None or message["kind"] == "end":
                    self._selector.unregister(key.fileobj)
                    self.ended[rank] = None if message is None else message["record"]
                else:
                    self._take(rank, message)
            self._answer()

    def _take(self, rank: int, message: Message) -> None:
        kind = message["kind"]
        if kind == "grid":
            self._announced(rank, message)
        elif kind in ("post", "join"):
            self._joined.setdefault(message["key"], {})[rank] = message["value"]
        else:  # "get", "look", "members"
            self._waiting[rank] = message

    def _answer(self) -> None:
        """Answer the requests that can be, and tell the ranks that would hang."""
        for rank, request in list(self._waiting.items()):
            missing = self._missing(request)
            if not missing:
                self._reply(rank, {"value": self._value(request)})
            elif gone := [other for other in missing if other in self.ended]:
                self._reply(rank, {"hang": _waits(request, gone, "which has ended without it")})
        running = [rank for rank in self._links if rank not in self.ended]
        if running and all(rank in self._waiting for rank in running):
            for rank in running:
                request = self._waiting[rank]
                self._reply(rank, {"hang": _waits(request, self._missing(request), "which waits itself")})

    def _missing(self, request: Message) -> list[int]:
        """Return the ranks that a request waits for."""
        joined = self._joined.get(request["key"], {})
        if request["kind"] == "get":
            return [] if request["source"] in joined else [request["source"]]
        if request["kind"] == "look":
            return []
        return [member for member in request["members"] if member not in joined]

    def _value(self, request: Message) -> Any:
        joined = self._joined.get(request["key"], {})
        if request["kind"] in ("get", "look"):
            return joined.get(request["source"], NOT_RUN)
        return [[rank, value] for rank, value in joined.items()]

    def _reply(self, rank: int, answer: Message) -> None:
        del self._waiting[rank]
        try:
            self._links[rank].send(answer)
        except OSError:
            self.ended.setdefault(rank, None)


def _waits(request: Message, ranks: list[int], why: str) -> str:
    listed = ", ".join(map(str, ranks[:4])) + (", ..." if len(ranks) > 4 else "")
    return f"it waits in {request['what']} for rank{'' if len(ranks) == 1 else 's'} {listed}, {why}"
