"""One replica's ranks as a grid of their own: the same stages and shards, and a data axis of one.

What trains on it is whole within the replica: sums, norms, overflows and agreements take in the replica's ranks alone,
and nothing goes over the data axis. The rank keeps its number, so that there is one rank 0 to speak and to write.
"""

from __future__ import annotations

from collections.abc import Sequence

from .axis import Axis
from .grid import Grid
from .logged import Log
from .topology import Topology


class ReplicaGrid(Grid):
    """The ranks of a grid that hold this replica. Making it is collective.

    Attributes:
        whole: the grid that it is a part of; what fails, is logged or closed here, is so there.
        world: the replica's ranks; their positions are those of ``topology``, whose data axis has size 1.
        data: this rank alone.
        rank: of the whole grid.
    """

    def __init__(self, whole: Grid) -> None:
        # Not as a grid of processes is made: it is another view of one that is there.
        self.__dict__.update(whole.__dict__)
        self.whole = whole
        self.topology = Topology(**{**whole.topology.axes, "data": 1})
        self.world = whole.joint("pipe", "tensor")
        self.size = self.world.size
        self.data = Axis("data", [whole.rank], whole.rank, None, whole.traffic)
        self.mesh = None

    @property
    def replica(self) -> int:
        """Which replica this is."""
        return self.whole.replica

    @property
    def replicas(self) -> int:
        """Of how many."""
        return self.whole.replicas

    def axes(self) -> list[Axis]:
        """As the whole grid's, of which these are some."""
        return self.whole.axes()

    def joint(self, *axes: str) -> Axis:
        """As the whole grid's. Collective over that."""
        return self.whole.joint(*axes)

    def subgroup(self, axis: str, members: Sequence[int], purpose: str = "") -> Axis | None:
        """As the whole grid's. Collective over that."""
        return self.whole.subgroup(axis, members, purpose)

    def log_communication(self, log: Log) -> None:
        """As the whole grid's."""
        self.whole.log_communication(log)

    def describe(self, rank: int | None = None) -> str:
        """A rank by its name on the whole grid."""
        return self.whole.describe(rank)

    def watch(self) -> None:
        """As the whole grid's."""
        self.whole.watch()

    def cause(self, error: BaseException) -> str | None:
        """As the whole grid's."""
        return self.whole.cause(error)

    def meeting(self) -> str:
        """As the whole grid's."""
        return self.whole.meeting()

    def close(self) -> None:
        """Leave the process group, with the whole grid."""
        self.whole.close()
        self.world.group = None

    def tell(self, key: str, text: str) -> None:
        """Leave a word for the other ranks of the whole grid; what was there is written over. No collective."""
        assert self._store is not None
        self._store.set(key, text)

    def told(self, key: str) -> str | None:
        """The last word that was left under a key, if any was. No collective, and nobody is waited for."""
        assert self._store is not None
        if not self._store.check([key]):
            return None
        found: bytes = self._store.get(key)
        return found.decode()
