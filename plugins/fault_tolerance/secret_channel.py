"""Messages between two processes that know the same secret; whoever does not know it learns nothing. No torch.

    client   32 random bytes c
    server   32 random bytes s
    client   HMAC-SHA256(secret, "client" c s)        the server closes the connection if it is another one
    server   HMAC-SHA256(secret, "server" c s)        so does the client
    both     messages: 4 bytes with the length n, n bytes of JSON

The messages are not encrypted: who can read or change the packets between two hosts can read or change them.
"""

from __future__ import annotations

import hmac
import json
import secrets
import socket
import time
from typing import Any

from ...base.files import parse_json

_RANDOM, _PROOF = 32, 32  # bytes
_LARGEST = 2**24  # bytes of a message
_HANDSHAKE = 5.0  # seconds


class WrongSecretError(ConnectionError):
    """The other side of a connection does not know this side's secret."""


class SecretChannel:
    """Connection over which both sides have proven that they know the secret.

    Args:
        connection: the connected socket, which the channel closes.
        secret: the secret.
        serves: True on the side that has accepted the connection.

    Raises:
        WrongSecretError: the other side has another secret.
        OSError: the connection is lost, or the other side does not answer within 5 s.
    """

    def __init__(self, connection: socket.socket, secret: bytes, serves: bool) -> None:
        self._connection = connection
        self._until: float | None  # time of ``time.monotonic`` until which this side waits for what it reads
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            self._until = time.monotonic() + _HANDSHAKE
            self._handshake(secret, serves)
            connection.settimeout(None)
        except BaseException:
            connection.close()
            raise

    def _handshake(self, secret: bytes, serves: bool) -> None:
        own = secrets.token_bytes(_RANDOM)
        if serves:
            numbers = self._read(_RANDOM) + own
            self._connection.sendall(own)
            self._require_proof(secret, b"client" + numbers)
            self._connection.sendall(hmac.digest(secret, b"server" + numbers, "sha256"))
        else:
            self._connection.sendall(own)
            numbers = own + self._read(_RANDOM)
            self._connection.sendall(hmac.digest(secret, b"client" + numbers, "sha256"))
            self._require_proof(secret, b"server" + numbers)

    def _require_proof(self, secret: bytes, text: bytes) -> None:
        try:
            proof = self._read(_PROOF)
        except ConnectionError:
            proof = b""
        if not hmac.compare_digest(proof, hmac.digest(secret, text, "sha256")):
            raise WrongSecretError("the other side has another secret")

    def send(self, value: Any) -> None:
        """Send a value that JSON can hold.

        Raises:
            OSError: the connection is lost.
        """
        data = json.dumps(value).encode()
        self._connection.sendall(len(data).to_bytes(4, "big") + data)

    def receive(self, seconds: float | None = None) -> Any:
        """Return the next value.

        Args:
            seconds: time limit; None: none.

        Raises:
            OSError: the connection is lost, or nothing came in time.
            ValueError: it is no message.
        """
        self._until = None if seconds is None else time.monotonic() + seconds
        size = int.from_bytes(self._read(4), "big")
        if size > _LARGEST:
            raise ValueError(f"a message of {size} bytes")
        return parse_json(self._read(size))

    def ask(self, value: Any, seconds: float) -> Any:
        """Send a value, and return the answer, or raise as ``receive``."""
        self.send(value)
        return self.receive(seconds)

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def _read(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            self._connection.settimeout(None if self._until is None else max(0.001, self._until - time.monotonic()))
            if not (piece := self._connection.recv(min(size - len(data), 2**16))):
                raise ConnectionResetError("the connection was closed")
            data += piece
        return data


def connect(address: str, secret: bytes, seconds: float) -> SecretChannel:
    """Return a new channel to the server at ``host:port``.

    Raises:
        OSError: as ``SecretChannel``, or nothing listens there.
    """
    host, _, port = address.rpartition("//")[2].rpartition(":")
    connection = socket.create_connection((host.strip("[]"), int(port)), timeout=seconds)
    return SecretChannel(connection, secret, serves=False)
