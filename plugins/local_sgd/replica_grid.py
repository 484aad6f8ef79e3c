"""Grid of the ranks of one replica: the stages and shards of the full grid, and a data axis of size 1.

An engine on it trains this replica alone: its sums, norms, overflow checks and agreements include only the replica's
ranks, and nothing is sent over the data axis. Ranks keep their numbers, so that one rank 0 prints and writes.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...grid.comm.axis import Axis
from ...grid.grid import STOPPED, Grid
from ...grid.topology import Topology


class ReplicaGrid(Grid):
    """Grid of this replica's ranks. Making it is collective over the full grid.

    Attributes:
        full_grid: the grid of all replicas; failures, observers and ``close`` are passed on to it.
        world: the axis of the replica's ranks, in the order of ``topology``.
        data: an axis that contains this rank only.
        rank: this process's rank on the full grid.

    Raises:
        ValueError: the full grid has an expert axis: its shards would be on several replicas.
    """

    def __init__(self, full_grid: Grid) -> None:
        if full_grid.expert.size > 1:
            raise ValueError(
                "local updates train each replica separately, but the experts of a layer are spread over "
                f"{full_grid.expert.size} ranks of data x context: use a grid with expert=1, or leave local_updates "
                "out"
            )
        self.full_grid = full_grid
        self._init_view(
            full_grid,
            topology=Topology(**{**full_grid.topology.axes, "data": 1}),
            world=full_grid.joint("pipe", "context", "tensor"),
            data=Axis("data", [full_grid.rank], full_grid.rank, None, full_grid.traffic),
        )

    @property
    def replica(self) -> int:
        """Index of this replica."""
        return self.full_grid.replica

    @property
    def replicas(self) -> int:
        """Number of replicas of the full grid."""
        return self.full_grid.replicas

    def axes(self) -> list[Axis]:
        """Return the axes of the full grid."""
        return self.full_grid.axes()

    def joint(self, *axes: str) -> Axis:
        """Call ``Grid.joint`` of the full grid. Collective over the full grid."""
        return self.full_grid.joint(*axes)

    def subgroup(self, axis: str, members: Sequence[int], purpose: str = "") -> Axis | None:
        """Call ``Grid.subgroup`` of the full grid. Collective over the full grid."""
        return self.full_grid.subgroup(axis, members, purpose)

    def describe(self, rank: int | None = None) -> str:
        """Return a rank's name on the full grid."""
        return self.full_grid.describe(rank)

    def start_hang_watch(self) -> None:
        """Call ``Grid.start_hang_watch`` of the full grid."""
        self.full_grid.start_hang_watch()

    def failure_cause(self, error: BaseException) -> str | None:
        """Call ``Grid.failure_cause`` of the full grid."""
        return self.full_grid.failure_cause(error)

    def barrier_name(self) -> str:
        """Call ``Grid.barrier_name`` of the full grid."""
        return self.full_grid.barrier_name()

    def end(self) -> None:
        """Call ``Grid.end`` of the full grid."""
        self.full_grid.end()

    def close(self) -> None:
        """Leave the process group, and close the full grid."""
        self.full_grid.close()
        self.world.close()

    def store_set(self, key: str, text: str) -> None:
        """Write a text to the store, for all ranks of the full grid; it replaces an earlier one. Not a collective.

        Raises:
            RuntimeError: the store does not answer.
        """
        store = self._store
        assert store is not None
        self._ask_store(min(self.timeout, STOPPED), lambda: store.set(key, text))

    def store_get(self, key: str) -> str | None:
        """Return the last text written under a key; None if there is none. Not a collective.

        Raises:
            RuntimeError: the store does not answer.
        """
        store = self._store
        assert store is not None
        found = self._ask_store(min(self.timeout, STOPPED), lambda: store.get(key) if store.check([key]) else None)
        return None if found is None else found.decode()
