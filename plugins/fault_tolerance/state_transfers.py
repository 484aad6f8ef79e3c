"""Transfers of whole states between a replica and others, in threads, while a step runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ...base.threads import BackgroundCall
from .peer_state import receive_state, send_state
from .replica_group import ReplicaGroup

FAILURES = (RuntimeError, OSError, ConnectionError, TimeoutError)  # of a connection whose other end is lost
State = tuple[dict[str, Any], list[Tensor]]  # header, tensors


def reason(error: BaseException) -> str:
    """Return the text of a failure, which is never empty."""
    return str(error) or type(error).__name__


class StateTransfers:
    """State that this replica sends, and state that it receives."""

    def __init__(self) -> None:
        self._sent: list[BackgroundCall[None]] = []
        self._received: BackgroundCall[State] | None = None

    def send(self, header: Tensor, tensors: list[Tensor], group: ReplicaGroup, ranks: Sequence[int]) -> None:
        """Begin to send a state to ranks of the group, one after the other."""

        def send() -> None:
            for rank in ranks:
                send_state(header, tensors, group, rank)

        self._sent.append(BackgroundCall(send, "triax state"))

    def wait_sent(self) -> int:
        """Wait until what was sent has arrived; return the number of transfers. A receiver that is lost joins again."""
        transfers, self._sent = self._sent, []
        for transfer in transfers:
            _problem(transfer)
        return len(transfers)

    def receive(self, group: ReplicaGroup | None, source: int) -> None:
        """Begin to receive a state from a rank of the group; without a group the transfer fails."""

        def receive() -> State:
            if group is None:
                raise RuntimeError("the group of the round was not made")
            return receive_state(group, source)

        self._received = BackgroundCall(receive, "triax state")

    @property
    def receives(self) -> bool:
        """True if a state is under way to this replica."""
        return self._received is not None

    def received(self) -> State | str:
        """Wait for the state under way; return it, or the reason why it did not come."""
        transfer, self._received = self._received, None
        assert transfer is not None  # the caller has asked ``receives``
        return _problem(transfer) or transfer.result()


def _problem(transfer: BackgroundCall[Any]) -> str | None:
    """Wait for the end of a transfer; return the reason why it failed, or None. Any other error is raised."""
    try:
        transfer.result()
    except FAILURES as error:
        return reason(error)
    return None
