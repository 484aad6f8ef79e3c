"""TCP stores that listen on one address: a store of torch's own making listens on all addresses of its host."""

from __future__ import annotations

import ipaddress
import socket
from datetime import timedelta

from torch.distributed import TCPStore

_LIMIT = timedelta(seconds=300)  # torch's default
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


def serve_store(
    address: str, port: int = 0, limit: timedelta = _LIMIT, ranks: int | None = None, wait: bool = False
) -> TCPStore:
    """Return a store that listens on one address of this host alone.

    Args:
        address: the numeric address.
        port: the port; 0: any that is free.
        limit: time limit of the store's requests.
        ranks: number of processes that use the store, if it is known.
        wait: wait until all ranks have connected.

    Raises:
        OSError: the address is not one of this host, or the port is in use.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # after a restart the port is still in TIME_WAIT
        listener.bind((address, port))
        listener.listen(_BACKLOG)
        port = listener.getsockname()[1]
        return TCPStore(
            address,
            port,
            ranks,
            is_master=True,
            timeout=limit,
            wait_for_workers=wait,
            multi_tenant=True,
            master_listen_fd=listener.detach(),
        )
