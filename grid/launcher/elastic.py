"""Torch's rendezvous of hosts that join and leave (``--rdzv-endpoint``), without the pickles in its store.

Every launcher reads what the others have written there. The state is therefore written as JSON, and a store that this
process serves listens on the address of the endpoint alone.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime, timedelta
from typing import Any

from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters, dynamic_rendezvous
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import DEFAULT_PORT, C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from ...base.ports import resolve
from ..comm.tcp_store import serve_store


class StateAsJson:
    """Stands in for the module ``pickle`` in torch's rendezvous, which writes and reads its state with it."""

    PickleError = (ValueError, TypeError, KeyError, AttributeError)  # of a text that no launcher has written

    @staticmethod
    def dumps(state: Any) -> bytes:
        """Return a rendezvous's state as JSON text. A host is the list of its address, process and number."""
        return json.dumps(
            {
                "round": state.round,
                "complete": state.complete,
                "closed": state.closed,
                "deadline": state.deadline and state.deadline.isoformat(),
                "participants": [[*_host(node), rank] for node, rank in state.participants.items()],
                "wait_list": [_host(node) for node in state.wait_list],
                "redundancy_list": [_host(node) for node in state.redundancy_list],
                "last_heartbeats": [[*_host(node), when.isoformat()] for node, when in state.last_heartbeats.items()],
            }
        ).encode()

    @staticmethod
    def loads(text: bytes) -> Any:
        """Return the state of which ``dumps`` made a text."""
        data, state = json.loads(text), dynamic_rendezvous._RendezvousState()
        state.round, state.complete, state.closed = int(data["round"]), bool(data["complete"]), bool(data["closed"])
        state.deadline = data["deadline"] and datetime.fromisoformat(data["deadline"])
        state.participants = {_node(host): int(rank) for *host, rank in data["participants"]}
        state.wait_list = set(map(_node, data["wait_list"]))
        state.redundancy_list = set(map(_node, data["redundancy_list"]))
        state.last_heartbeats = {_node(host): datetime.fromisoformat(when) for *host, when in data["last_heartbeats"]}
        return state


def elastic_rendezvous(settings: Mapping[str, Any]) -> RendezvousHandler:
    """Return torch's rendezvous handler of these ``RendezvousParameters``."""
    dynamic_rendezvous.pickle = StateAsJson  # type: ignore[assignment]  # torch has no option for it
    parameters = RendezvousParameters(**settings)
    if parameters.backend != "c10d" or parameters.get("store_type", "tcp") != "tcp":
        return get_rendezvous_handler(parameters)
    store = _tcp_store(parameters)
    return dynamic_rendezvous.create_handler(store, C10dRendezvousBackend(store, parameters.run_id), parameters)


def _tcp_store(parameters: RendezvousParameters) -> TCPStore:
    """Return the hosts' store. It is served by the first launcher on the endpoint's host."""
    host, port = parse_rendezvous_endpoint(parameters.endpoint, DEFAULT_PORT)
    limit = timedelta(seconds=parameters.get_as_int("read_timeout", 60) or 60)
    if parameters.get_as_bool("is_host") is not False:
        with suppress(OSError):  # not an address of this host, or another launcher here serves the store
            return serve_store(resolve(host), port, limit)
    return TCPStore(host, port, is_master=False, timeout=limit)


def _host(node: Any) -> list[Any]:
    return [node.addr, node.pid, node.local_id]


def _node(host: Any) -> Any:
    address, process, number = host
    return dynamic_rendezvous._NodeDesc(str(address), int(process), int(number))
