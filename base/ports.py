"""Ports: each one that the library opens listens on one address, where torch's own stores listen on all of a host."""

from __future__ import annotations

import ipaddress
import socket

LOOPBACK = "127.0.0.1"
_BACKLOG = 4096  # connections that may wait to be accepted: all ranks connect at once


def resolve(host: str) -> str:
    """Return a host's numeric address, an IPv4 one if it has any.

    Raises:
        OSError: the host is not known.
    """
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return str(min(found, key=lambda each: each[0] != socket.AF_INET)[4][0])


def is_loopback(address: str) -> bool:
    """Return True if a numeric address can be reached from this host alone."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def listen(address: str, port: int = 0) -> socket.socket:
    """Return a socket that listens on one address of this host alone.

    Args:
        address: the numeric address.
        port: the port; 0: any that is free.

    Raises:
        OSError: the address is not one of this host, or the port is in use.
    """
    listener = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # after a restart the port is still in TIME_WAIT
        listener.bind((address, port))
        listener.listen(_BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener
