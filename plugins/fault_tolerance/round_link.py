"""Connection of a rank to the ranks at its place in the other replicas, one round after another.

    closed --open(round)--> open        a group of the round's ranks
    open   --close()------> closed      so that no other replica waits for this one; the next round opens it again

A group that cannot be made leaves the connection closed: the next sum fails, and all replicas meet again.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from torch import Tensor

from .meeting import Round
from .replica_group import ReplicaGroup
from .state_transfers import FAILURES

_LOG = logging.getLogger("triax")


class RoundLink:
    """Connection to the other replicas.

    Args:
        name: this replica's name.
        rank: this rank in its replica.
        address, secret, host, timeout: as for ``ReplicaGroup``.

    Attributes:
        group: the open group; None while the connection is closed.
    """

    def __init__(self, name: str, rank: int, address: str, secret: bytes, host: str, timeout: float) -> None:
        self._name, self._rank = name, rank
        self._where, self._timeout = (address, secret, host), timeout
        self.group: ReplicaGroup | None = None
        self._sent_before = 0.0  # by groups that are closed

    @property
    def sent(self) -> float:
        """Bytes that this rank has sent to other replicas."""
        return self._sent_before + (0.0 if self.group is None else self.group.sent)

    def open(self, round_: Round) -> None:
        """Make the group of a round. Collective over the round."""
        self.close()
        rank = round_.group.index(self._name)
        key = f"round {round_.number} of rank {self._rank}, from {round_.process}"
        try:
            self.group = ReplicaGroup(*self._where, key, rank, len(round_.group), self._timeout)
        except FAILURES as error:
            _LOG.debug("the group of round %d was not made: %s", round_.number, error)

    def close(self) -> None:
        """Close the connections to the other replicas."""
        if self.group is not None:
            self._sent_before += self.group.sent
            self.group.abort()
        self.group = None

    def opened(self) -> ReplicaGroup:
        """Return the open group.

        Raises:
            RuntimeError: the connection is closed.
        """
        if self.group is None:
            raise RuntimeError("the group of the round was not made")
        return self.group

    def sum(self, round_: Round, contributors: Sequence[str], tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the contributors' sums of the tensors. Collective over the round.

        Raises:
            RuntimeError: the connection is closed, or another replica is lost.
        """
        group = self.opened()
        places = [round_.group.index(name) for name in contributors]
        return [group.sum(tensor, places) for tensor in tensors]
