"""Asynchronous DiLoCo: each replica sends its differences, and goes on with those that have arrived.

Each replica numbers its rounds. The difference of round k counts in round k, at whatever time it arrives.

complete   a round is complete when the differences of all replicas have arrived. The common weights and the velocity
           are those of DiLoCo after the complete rounds. They are bitwise equal on every replica, whatever the order
           in which messages arrived
start      the weights at the start of a round. They are the common weights, updated by the later rounds with those
           differences that have arrived, each times 1/N. A missing difference counts in its own round when it arrives
staleness  a replica does not end round k before it has every difference of round k - ``staleness``. With a staleness
           of 0 it waits for all differences, and the method is DiLoCo. (Stale synchronous parallel: Ho et al. 2013,
           section 3.)
early      a slow replica ends its round with fewer steps if other replicas would soon have to wait for it. (This is
           similar to dynamic local updates: Liu et al. 2024, Asynchronous Local-SGD, section 5.)

Differences are sent as messages between ranks. The store of the process group holds the status of each replica: the
rounds that the replica has sent and received, and whether it has left the training. A replica therefore waits only at
the staleness bound, and at most up to a time limit.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from time import sleep as wait  # grid/agreement/hang_watch.py recognizes waiting ranks by this name
from typing import NamedTuple

import torch
from torch import Tensor

from ...grid.comm.axis import Axis
from ...grid.comm.pending import All, Pending
from ...zero.data_axis import ZeroDataAxis
from .outer_optimizer import NesterovStep, OuterOptimizer, total_bytes
from .replica_grid import ReplicaGrid

_TAG, _TAGS = 2**21, 2**20  # first message tag, and number of tags
_FIRST, _LONGEST = 0.001, 0.02  # seconds between two reads of the store
_ASK = 1.0  # seconds of waiting after which a replica looks for failures of other ranks


class ReplicaStatus(NamedTuple):
    """Progress of one replica, which the replica writes to the store of the process group."""

    rounds: int  # number of rounds whose differences this replica has sent
    steps: int  # number of optimizer steps that this replica has taken, which shows that it is alive
    left: int  # 0 while the replica trains; 1 after its last step, while it receives differences; 2 after its end
    received: tuple[int, ...]  # for each sending replica, the number of rounds whose differences have arrived here

    def row(self) -> list[int]:
        """Return all fields of the status as one flat list of integers."""
        return [self.rounds, self.steps, self.left, *self.received]


class PendingDifference(NamedTuple):
    """A difference of round ``round`` that is being sent to replica ``to``. ``sent`` is the handle of the send."""

    to: int
    round: int
    sent: Pending


class AsyncOuterOptimizer(OuterOptimizer):
    """Outer optimizer of a replica that waits for the others only at the staleness bound.

    Args:
        data_axis, step, dtype: the arguments of ``OuterOptimizer``.
        grid: the grid of this replica.
        axis: this rank and the ranks with the same coordinate in the other replicas. Only differences are sent over
            this axis.
        staleness: the maximum number of rounds for which the difference of another replica may be missing.
        early: end a round with fewer steps if others would soon wait for this replica.

    Attributes:
        round: number of the running round, from 1.
        complete_round: the last round that is complete.
        statuses: for each replica, the last status that this replica has read from the store.
        lag: at the last synchronization, the most rounds for which another replica's differences were missing.
        waited: seconds that this replica has waited at the staleness bound so far.
    """

    asynchronous = True

    def __init__(
        self,
        data_axis: ZeroDataAxis,
        grid: ReplicaGrid,
        axis: Axis,
        step: NesterovStep,
        dtype: torch.dtype | None,
        staleness: int,
        early: bool,
    ) -> None:
        super().__init__(data_axis, grid.full_grid.data, step, dtype)
        self._grid, self._messages, self._replica, self._size = grid, axis, axis.rank, axis.size
        self._staleness, self._early = staleness, early and staleness > 0
        self._key = f"triax/local/{grid.barrier_name()}"
        self.start = [common.clone() for common in self.common]
        self.round, self.complete_round, self.steps = 1, 0, 0
        self.statuses = [ReplicaStatus(0, 0, 0, (0,) * self._size)] * self._size
        self._received = [0] * self._size  # rounds of each replica whose differences have arrived
        self._differences_of: dict[tuple[int, int], list[Tensor]] = {}  # (replica, round) -> one of each bucket
        self._left: dict[int, int] = {}  # a replica that has left -> its last round
        self._sending: list[PendingDifference] = []
        self.lag, self.waited = 0, 0.0

    # ------------------------------------------------------------------------------------------- steps and rounds

    def end_step(self) -> bool:
        """Count an optimizer step, and return True if the round must end early. Collective within the replica."""
        self.steps += 1
        self._write_status()
        if not self._early:
            return False
        self._read_statuses()
        self._receive_sent()
        ahead = max((status.rounds for status in self.statuses if not status.left), default=0)
        return ahead >= self.round + self._staleness - 1

    @torch.no_grad()
    def synchronize(self) -> None:
        """End the round: send its difference, receive what has arrived, start the next. Collective in the replica."""
        self._send()
        self._write_status()
        began = time.monotonic()
        self._wait_for(self.round - self._staleness)
        self.waited += time.monotonic() - began
        self._receive_sent()
        self.lag = max((self.round - self._received[i] for i in self.present), default=0)
        self._apply_complete_rounds()
        self._start_next(max(self._received) if self._staleness else self.round)
        self.synchronizations += 1

    # ------------------------------------------------------------------------------- all replicas, and the end

    @torch.no_grad()
    def synchronize_all(self, since: int) -> None:
        """End the round of every replica, after any number of steps, and wait for all differences. Collective.

        Args:
            since: steps of this replica since its last synchronization.

        Raises:
            RuntimeError: a replica has left.
        """
        if self._left:
            raise RuntimeError(
                f"replicas {', '.join(map(str, sorted(self._left)))} have left the training, so not all replicas can "
                "synchronize: synchronize and save before a replica calls leave()"
            )
        if since:
            self._send()
        table = torch.zeros(self._size, dtype=torch.int64, device=self._grid.device)
        table[self._replica] = self._received[self._replica]
        self._axis.all_reduce(table, op="max")
        rounds = table.tolist()
        self._receive(rounds)
        for replica, last in enumerate(rounds):
            for missing in range(last + 1, max(rounds) + 1):
                self._differences_of[replica, missing] = []  # counts as zero
        self.synchronizations += max(rounds) > self.complete_round
        self._received = [max(rounds)] * self._size
        self.round = max(rounds)
        self._apply_complete_rounds()
        self._start_next(self.round)
        self._wait_for_sends()
        self.statuses = [
            ReplicaStatus(self.round - 1, status.steps, 0, tuple(self._received)) for status in self.statuses
        ]
        self._write_status()
        self._axis.barrier()  # no replica reads an older status

    def restart(self) -> None:
        """End the rounds in progress, then restart from the model's weights. Collective."""
        self._data_axis.written.take()
        own = [master.clone() for master in self._masters]
        self.synchronize_all(0)
        self._set_weights(own)
        super().restart()

    @torch.no_grad()
    def leave(self, since: int, seconds: float) -> bool:
        """Send the last difference, announce the end of this replica, and wait until the others have left too.

        From now on no replica waits for this one, which takes no more steps. Collective within the replica.

        Args:
            since: steps since the last synchronization.
            seconds: time without any progress of the others after which to stop waiting for them.

        Returns:
            True if all have left; the model then has the last common weights.
        """
        if since:
            self._send()
        self._left[self._replica] = self._received[self._replica]
        self._write_status()
        seen, progress, complete = self.statuses, time.monotonic(), False
        while not complete:
            self._read_statuses()
            self._receive_sent()
            self._apply_complete_rounds()
            self._write_status()
            last = self._left[self._replica]
            complete = all(status.left and status.received[self._replica] >= last for status in self.statuses)
            if self.statuses != seen:
                seen, progress = self.statuses, time.monotonic()
            elif self._first_rank_says(time.monotonic() - progress > seconds):
                break
            if not complete:
                self._pause(progress)
        if complete:
            self._wait_for_sends()
        else:
            self._write_status(ended=True)
        self._set_weights(self.common)
        return complete

    def memory(self) -> int:
        """Return the bytes of common weights, velocity, start of the round, and differences of incomplete rounds."""
        waiting = [tensor for tensors in self._differences_of.values() for tensor in tensors]
        return super().memory() + total_bytes((*self.start, *waiting))

    def report(self) -> dict[str, float]:
        """Return the lag in rounds, and the seconds that this replica has waited at the staleness bound."""
        return {"staleness": self.lag, "waited_s": self.waited}

    @property
    def present(self) -> list[int]:
        """Numbers of the replicas that have not left the training, by the statuses that this replica has received."""
        return [replica for replica in range(self._size) if replica not in self._left]

    # --------------------------------------------------------------------------------------------------- messages

    def _send(self) -> None:
        """Start sending the difference of this round to every other replica."""
        differences = [difference.cpu() for difference in self.differences()]
        self._differences_of[self._replica, self.round] = differences
        self._received[self._replica] = self.round
        for step in range(1, self._size):
            to = (self._replica + step) % self._size
            if self.statuses[to].left < 2:
                works = [self._messages.send(d, to, self._tag(self.round, n)) for n, d in enumerate(differences)]
                self._sending.append(PendingDifference(to, self.round, All(works)))

    def _tag(self, number: int, bucket: int) -> int:
        return _TAG + (number * max(len(self.common), 1) + bucket) % _TAGS

    def _receive_sent(self) -> None:
        """Receive the differences that the other replicas have sent according to their statuses."""
        self._receive([status.rounds for status in self.statuses])
        self._wait_for_sends([status.received[self._replica] for status in self.statuses])

    def _receive(self, rounds: Sequence[int]) -> None:
        for replica, last in enumerate(rounds):
            for number in range(self._received[replica] + 1, last + 1):
                found = [torch.empty(c.shape, dtype=d) for c, d in zip(self.common, self._dtypes, strict=True)]
                All([self._messages.receive(d, replica, self._tag(number, n)) for n, d in enumerate(found)]).wait()
                self._differences_of[replica, number] = found
                self._received[replica] = number

    def _wait_for_sends(self, received: Sequence[int] | None = None) -> None:
        """Wait for the sends of the rounds that each replica has ``received``; None waits for all sends."""
        kept = []
        for difference in self._sending:
            if received is None or difference.round <= received[difference.to]:
                difference.sent.wait()
            else:
                kept.append(difference)
        self._sending = kept

    # --------------------------------------------------------------------------------------------------- statuses

    def _write_status(self, ended: bool = False) -> None:
        """Write the status of this replica to the store. Only the first rank of the replica writes."""
        left = 2 if ended else int(self._replica in self._left)
        status = ReplicaStatus(self._received[self._replica], self.steps, left, tuple(self._received))
        self.statuses = [*self.statuses[: self._replica], status, *self.statuses[self._replica + 1 :]]
        if self._grid.world.is_first and self._size > 1:
            try:
                self._grid.store_set(f"{self._key}/{self._replica}", " ".join(map(str, status.row())))
            except RuntimeError:
                if not self._all_left():
                    raise

    def _read_statuses(self) -> None:
        """Read the other replicas' statuses on the first rank, and broadcast them to all ranks of this replica."""
        if self._size == 1:
            return
        table = torch.tensor([status.row() for status in self.statuses], dtype=torch.int64)
        if self._grid.world.is_first:
            try:
                for replica in range(self._size):
                    text = None if replica == self._replica else self._grid.store_get(f"{self._key}/{replica}")
                    if text is not None:
                        table[replica] = torch.tensor(list(map(int, text.split())), dtype=torch.int64)
            except RuntimeError:
                if not self._all_left():
                    raise
                # The process that held the store had all differences, and ended. The others are taken to have them too.
                table[:, 3 + self._replica] = self._received[self._replica]
        if self._grid.world.size > 1:
            table = table.to(self._grid.device)
            self._grid.world.broadcast(table)
        self.statuses = [
            ReplicaStatus(rounds, steps, left, tuple(received)) for rounds, steps, left, *received in table.tolist()
        ]
        for replica, status in enumerate(self.statuses):
            if status.left and replica != self._replica:
                self._left[replica] = status.rounds

    def _all_left(self) -> bool:
        """Return True if every replica has left, because then no replica will send a further difference."""
        return all(status.left for status in self.statuses)

    def _wait_for(self, rounds: int) -> None:
        """Wait until every replica that has not left has sent its differences of at least ``rounds`` rounds.

        Raises:
            RuntimeError: a replica did not send them within the time limit of the grid, or a rank failed.
        """
        began = time.monotonic()
        while True:
            self._read_statuses()
            late = [i for i, status in enumerate(self.statuses) if not status.left and status.rounds < rounds]
            if not late:
                return
            if self._first_rank_says(time.monotonic() - began > self._grid.timeout):
                raise RuntimeError(
                    f"timed out: waited {self._grid.timeout:g} s at the end of round {self.round} for replica "
                    f"{late[0]}, which has sent {self.statuses[late[0]].rounds} rounds, but "
                    f"local_updates.max_staleness {self._staleness} needs {rounds}. "
                    "Raise max_staleness or Grid(timeout=...)"
                )
            self._pause(began)

    def _pause(self, since: float) -> None:
        """Sleep between two reads of the store. The sleep becomes longer the longer this replica has waited.

        Raises:
            RuntimeError: a rank of another replica failed.
        """
        waited = time.monotonic() - since
        if waited > _ASK and (reported := self._grid.reported_failure()) is not None:
            raise RuntimeError(f"another replica's rank failed: {reported}")
        wait(min(max(waited, _FIRST), _LONGEST))

    def _first_rank_says(self, flag: bool) -> bool:
        """Return the flag that the first rank of this replica passes. Collective within the replica."""
        told = torch.tensor([flag], dtype=torch.int64, device=self._grid.device)
        self._grid.world.broadcast(told)
        return bool(told)

    # ---------------------------------------------------------------------------------------------- outer updates

    def _members(self, number: int) -> list[int]:
        """Return the replicas whose differences belong to round ``number``, because they had not left before it."""
        return [i for i in range(self._size) if i not in self._left or number <= self._left[i]]

    def _apply_complete_rounds(self) -> None:
        """Apply the outer update of every complete round to the common weights."""
        while (members := self._members(self.complete_round + 1)) and all(
            (replica, self.complete_round + 1) in self._differences_of for replica in members
        ):
            self.complete_round += 1
            self._apply(self.complete_round, members, self.common, self.velocity)
            for replica in members:
                del self._differences_of[replica, self.complete_round]

    def _start_next(self, last: int) -> None:
        """Start a round from the common weights plus the updates that arrived for the rounds up to ``last``."""
        self.start_round()
        if self.complete_round < last:
            velocity = [each.clone() for each in self.velocity]
            for number in range(self.complete_round + 1, last + 1):
                self._apply(number, self._members(number), self.start, velocity)
        self._set_weights(self.start)
        self.round += 1

    def _apply(
        self, number: int, members: Sequence[int], weights: Sequence[Tensor], velocity: Sequence[Tensor]
    ) -> None:
        """Update weights and velocity by one outer step, with the differences of round ``number`` that have arrived."""
        arrived = [found for i in members if (found := self._differences_of.get((i, number)))]  # same order everywhere
        for n, weight in enumerate(weights):
            gradient = torch.zeros_like(weight)
            for differences in arrived:
                gradient.add_(differences[n].to(weight.device, weight.dtype))
            self._step(weight, velocity[n] if velocity else None, gradient.div_(len(members)))
