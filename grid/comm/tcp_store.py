"""TCP stores that listen on one address: a store of torch's own making listens on all addresses of its host."""

from __future__ import annotations

from datetime import timedelta

from torch.distributed import TCPStore

from ...base.ports import listen

_LIMIT = timedelta(seconds=300)  # torch's default


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
    with listen(address, port) as listener:
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
