"""Meetings at which nobody waits: each replica posts how far it came, and goes on with what the others have posted.

A replica's rounds are numbered; the difference of its round k counts in round k, whenever it comes:

settled     rounds of which every replica's difference is here: common and velocity are DiLoCo's after these rounds,
            the same bits on every replica, whatever came when
start       of a round: the settled weights, and on top of them the later rounds with what is here of them, each
            difference at 1/N. What is missing counts when it is here, in its own round
bound       a replica does not end round k before it has every difference of round k - ``staleness``: with 0 it waits
            for all, and this is DiLoCo. (Stale synchronous parallel: Ho et al. 2013, section 3.)
early       a replica that others would soon wait for ends its round with the steps it has. (In the manner of dynamic
            local updates: Liu et al. 2024, Asynchronous Local-SGD, section 5.)

What is posted goes by messages from rank to rank; that it is there, how far a replica is and that it leaves, by the
store. So nobody waits for a replica that does not answer, but at the bound, and there for so many seconds.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from time import sleep as wait  # by its name a rank is known to wait: grid/watch.py
from typing import NamedTuple

import torch
from torch import Tensor

from ..grid import Axis, Pending
from ..grid.replica import ReplicaGrid
from .local import Meetings, Outer
from .replicas import Replicas

__all__ = ["AsyncMeetings"]

_TAG, _TAGS = 2**21, 2**20
_FIRST, _LONGEST = 0.001, 0.02  # seconds between two looks
_ASK = 1.0  # seconds after which a replica that waits asks whether another one failed


class Word(NamedTuple):
    """What a replica says of itself."""

    rounds: int  # that it has posted
    steps: int  # that it has taken: it is alive
    left: int  # 1: it steps no more, and waits for the last differences; 2: it is gone
    taken: tuple[int, ...]  # of each replica, the rounds whose differences it has

    def dump(self) -> str:
        """As text."""
        return " ".join(map(str, self.row()))

    def row(self) -> list[int]:
        """As numbers."""
        return [self.rounds, self.steps, self.left, *self.taken]


@dataclass
class _Post:
    """A difference on its way to another replica."""

    to: int
    round: int
    works: list[Pending]


class AsyncMeetings(Meetings):
    """The meetings of a replica that waits for others only at the bound.

    Args:
        replicas, outer, dtype: of ``Meetings``.
        grid: this replica's.
        axis: of this rank and its like in the other replicas, for these messages alone.
        staleness: the most rounds that a difference may be missing for.
        early: end a round before its time, where others would soon wait for this replica.

    Attributes:
        round: the one under way, from 1.
        settled: the last round that is complete everywhere.
        words: what each replica last said.
        lag: at the last meeting, the most rounds that another replica's differences were behind.
        waited: seconds spent at the bound so far.
    """

    def __init__(
        self,
        replicas: Replicas,
        grid: ReplicaGrid,
        axis: Axis,
        outer: Outer,
        dtype: torch.dtype | None,
        staleness: int,
        early: bool,
    ) -> None:
        super().__init__(replicas, grid.whole.data, outer, dtype)
        self._grid, self._posts, self._me, self._size = grid, axis, axis.rank, axis.size
        self._staleness, self._early = staleness, early and staleness > 0
        self._key = f"triax/local/{grid.meeting()}"
        self.base = [common.clone() for common in self.common]
        self.round, self.settled, self.steps = 1, 0, 0
        self.words = [Word(0, 0, 0, (0,) * self._size)] * self._size
        self._taken = [0] * self._size  # rounds of each replica whose differences are here
        self._here: dict[tuple[int, int], list[Tensor]] = {}  # (replica, round): of each bucket
        self._gone: dict[int, int] = {}  # a replica that left: its last round
        self._under_way: list[_Post] = []
        self.lag, self.waited = 0, 0.0

    # ------------------------------------------------------------------------------------------------- of each step

    def stepped(self) -> bool:
        """A step was taken; returns whether the round is to end now. Collective within the replica."""
        self.steps += 1
        self._say()
        if not self._early:
            return False
        self._hear()
        self._take()
        ahead = max((word.rounds for word in self.words if not word.left), default=0)
        return ahead >= self.round + self._staleness - 1

    @torch.no_grad()
    def meet(self) -> None:
        """The round ends: post it, take what is there, begin the next. Collective within the replica."""
        self._post()
        self._say()
        began = time.monotonic()
        self._wait_for(self.round - self._staleness)
        self.waited += time.monotonic() - began
        self._take()
        self.lag = max((self.round - self._taken[i] for i in range(self._size) if i not in self._gone), default=0)
        self._settle()
        self._begin(max(self._taken) if self._staleness else self.round)
        self.met += 1

    # ------------------------------------------------------------------------------------------- all, and the end

    @torch.no_grad()
    def meet_all(self, since: int) -> None:
        """Everybody ends its round, however far it is, and waits for all: they have the same again. Collective.

        Args:
            since: steps of this replica since its last meeting.

        Raises:
            RuntimeError: a replica has left, and would not come.
        """
        if self._gone:
            raise RuntimeError(
                f"replicas {', '.join(map(str, sorted(self._gone)))} have left: meet, and save, before leave()"
            )
        if since:
            self._post()
        table = torch.zeros(self._size, dtype=torch.int64, device=self._grid.device)
        table[self._me] = self._taken[self._me]
        self._axis.all_reduce(table, op="max")
        last = table.tolist()
        self._receive(last)
        for replica, posted in enumerate(last):
            for missing in range(posted + 1, max(last) + 1):
                self._here[replica, missing] = []  # it counts as zero
        self.met += max(last) > self.settled
        self._taken = [max(last)] * self._size
        self.round = max(last)
        self._settle()
        self._begin(self.round)
        self._release()
        self.words = [Word(self.round - 1, word.steps, 0, tuple(self._taken)) for word in self.words]
        self._say()
        self._axis.barrier()  # nobody reads what was said before

    def adopt(self) -> None:
        """As ``Meetings.adopt``. Collective: what is under way comes to its end before."""
        own = [master.clone() for master in self._masters]
        self.meet_all(0)
        self.take(own)
        super().adopt()
        for base, common in zip(self.base, self.common, strict=True):
            base.copy_(common)

    @torch.no_grad()
    def leave(self, since: int, seconds: float) -> bool:
        """Post what is left, say that this was all, and wait for the others to do the same.

        From now on nobody waits for this replica, and it steps no more. Collective within the replica.

        Args:
            since: steps since the last meeting.
            seconds: without a sign of life of the others, after which they are given up.

        Returns:
            Whether all have left, and the model has the last common weights.
        """
        if since:
            self._post()
        self._gone[self._me] = self._taken[self._me]
        self._say()
        seen, news, pause, complete = self.words, time.monotonic(), _FIRST, False
        while not complete:
            self._hear()
            self._take()
            self._settle()
            self._say()
            complete = all(word.left and word.taken[self._me] >= self._gone[self._me] for word in self.words)
            if self.words != seen:
                seen, news, pause = self.words, time.monotonic(), _FIRST
            elif self._agreed(time.monotonic() - news > seconds):
                break
            if not complete:
                self._ask(news)
                wait(pause)
                pause = min(2 * pause, _LONGEST)
        if complete:
            self._release()
        else:
            self._say(gone=True)
        self.take(self.common)
        return complete

    def held(self) -> int:
        """As ``Meetings.held``; where a round is started from, and differences that wait for others, among them."""
        here = [tensor for found in self._here.values() for tensor in found]
        return super().held() + sum(tensor.numel() * tensor.element_size() for tensor in (*self.base, *here))

    @property
    def present(self) -> list[int]:
        """The replicas that have not left, as far as was heard."""
        return [replica for replica in range(self._size) if replica not in self._gone]

    # --------------------------------------------------------------------------------------------------- messages

    def _post(self) -> None:
        """Start sending how far this round came to every other replica."""
        differences = [self.difference(number, base).cpu() for number, base in enumerate(self.base)]
        self._here[self._me, self.round] = differences
        self._taken[self._me] = self.round
        for step in range(1, self._size):
            to = (self._me + step) % self._size
            if self.words[to].left < 2:
                works = [self._posts.send(d, to, self._tag(self.round, n)) for n, d in enumerate(differences)]
                self._under_way.append(_Post(to, self.round, works))

    def _tag(self, number: int, bucket: int) -> int:
        return _TAG + (number * max(len(self.common), 1) + bucket) % _TAGS

    def _say(self, gone: bool = False) -> None:
        """Tell the others how far this replica is: its first rank does."""
        left = 2 if gone else int(self._me in self._gone)
        word = Word(self._taken[self._me], self.steps, left, tuple(self._taken))
        self.words = [*self.words[: self._me], word, *self.words[self._me + 1 :]]
        if self._grid.world.is_first and self._size > 1:
            try:
                self._grid.tell(f"{self._key}/{self._me}", word.dump())
            except RuntimeError:
                if not self._all_left():
                    raise

    def _hear(self) -> None:
        """What the others have said: the first rank reads it, so that all of the replica go by the same."""
        if self._size == 1:
            return
        table = torch.tensor([word.row() for word in self.words], dtype=torch.int64)
        if self._grid.world.is_first:
            try:
                for replica in range(self._size):
                    if replica != self._me and (text := self._grid.told(f"{self._key}/{replica}")) is not None:
                        table[replica] = torch.tensor(list(map(int, text.split())), dtype=torch.int64)
            except RuntimeError:
                if not self._all_left():
                    raise
                # Who held the store had all that it needed, and ended: so have the others, as far as can be known.
                table[:, 3 + self._me] = self._taken[self._me]
        if self._grid.world.size > 1:
            table = table.to(self._grid.device)
            self._grid.world.broadcast(table)
        self.words = [Word(rounds, steps, left, tuple(taken)) for rounds, steps, left, *taken in table.tolist()]
        for replica, word in enumerate(self.words):
            if word.left and replica != self._me:
                self._gone[replica] = word.rounds

    def _all_left(self) -> bool:
        """Whether every replica said that it steps no more: then all that it ever posts is known."""
        return all(word.left for word in self.words)

    def _wait_for(self, rounds: int) -> None:
        """Return when every replica that has not left has posted so many rounds.

        Raises:
            RuntimeError: one did not for as long as a wait may take, or a rank failed.
        """
        began, pause = time.monotonic(), _FIRST
        while True:
            self._hear()
            late = [i for i, word in enumerate(self.words) if not word.left and word.rounds < rounds]
            if not late:
                return
            if self._agreed(time.monotonic() - began > self._grid.timeout):
                raise RuntimeError(
                    f"timed out: {self._grid.timeout:g} s at meeting {self.round} for replica {late[0]}, which has "
                    f"posted {self.words[late[0]].rounds} rounds, and local_updates.max_staleness "
                    f"{self._staleness} needs {rounds}: raise it, or Grid(timeout=...)"
                )
            self._ask(began)
            wait(pause)
            pause = min(2 * pause, _LONGEST)

    def _ask(self, since: float) -> None:
        """After a while without news: whether a rank failed.

        Raises:
            RuntimeError: one did.
        """
        if time.monotonic() - since > _ASK and (reported := self._grid.reported_failure()) is not None:
            raise RuntimeError(f"another replica's rank failed: {reported}")

    def _agreed(self, flag: bool) -> bool:
        """Whether it is so on the replica's first rank."""
        if self._grid.world.size == 1:
            return flag
        told = torch.tensor([flag], dtype=torch.int64, device=self._grid.device)
        self._grid.world.broadcast(told)
        return bool(told)

    def _take(self) -> None:
        """Receive what the others are known to have posted."""
        self._receive([word.rounds for word in self.words])
        self._release([word.taken[self._me] for word in self.words])

    def _receive(self, rounds: Sequence[int]) -> None:
        for replica, last in enumerate(rounds):
            for number in range(self._taken[replica] + 1, last + 1):
                found = [torch.empty(c.shape, dtype=d) for c, d in zip(self.common, self._dtypes, strict=True)]
                works = [self._posts.receive(d, replica, self._tag(number, n)) for n, d in enumerate(found)]
                for work in works:
                    work.wait()
                self._here[replica, number] = found
                self._taken[replica] = number

    def _release(self, arrived: Sequence[int] | None = None) -> None:
        """Let go of what was sent, and has come: to each replica so many rounds; all, by default."""
        kept = []
        for post in self._under_way:
            if arrived is None or post.round <= arrived[post.to]:
                for work in post.works:
                    work.wait()
            else:
                kept.append(post)
        self._under_way = kept

    # ------------------------------------------------------------------------------------------------------ rounds

    def _members(self, number: int) -> list[int]:
        """The replicas whose differences make a round: those that had not left before."""
        return [i for i in range(self._size) if i not in self._gone or number <= self._gone[i]]

    def _settle(self) -> None:
        """Let the common weights take every round that is complete."""
        while (members := self._members(self.settled + 1)) and all(
            (replica, self.settled + 1) in self._here for replica in members
        ):
            self.settled += 1
            self._apply(self.settled, members, self.common, self.velocity)
            for replica in members:
                del self._here[replica, self.settled]

    def _begin(self, last: int) -> None:
        """The next round starts from the common weights and what is here of the rounds up to ``last``."""
        for base, common in zip(self.base, self.common, strict=True):
            base.copy_(common)
        if self.settled < last:
            velocity = [each.clone() for each in self.velocity]
            for number in range(self.settled + 1, last + 1):
                self._apply(number, self._members(number), self.base, velocity)
        self.take(self.base)
        self.round += 1

    def _apply(
        self, number: int, members: Sequence[int], weights: Sequence[Tensor], velocity: Sequence[Tensor]
    ) -> None:
        """One outer step, with what is here of a round."""
        here = [found for i in members if (found := self._here.get((i, number)))]  # in order, on every replica
        for n, each in enumerate(weights):
            gradient = torch.zeros_like(each)
            for difference in here:
                gradient.add_(difference[n].to(each.device, each.dtype))
            self.outer.step(each, velocity[n] if velocity else None, gradient.div_(len(members)))
