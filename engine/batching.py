"""Continuous batching: which sequences run when. Plain Python, the same plan on every rank.

Requests wait in one queue. A group of slots takes its turn at the model, again and again; at each turn the requests
that join run their whole prompts (prefill), and those that are there run their last token (decode). A request that is
done leaves its slot at once, and the next one in the queue has it at the group's next turn.

There are as many groups as the pipe has legs, so that every leg has another group's turn to run: turn i + groups of a
group starts when the tokens of its turn i are known, which is when all the turns in between are under way.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ..grid.layout import split


class Token(NamedTuple):
    """A new token, as it comes.

    Attributes:
        request: the prompt's place in the list.
        token: its id.
        position: its place in the sequence, the prompt's tokens counted.
        last: whether the sequence ends with it.
    """

    request: int
    token: int
    position: int
    last: bool


@dataclass(eq=False)
class Request:
    """A sequence that is generated.

    Attributes:
        index: its place in the list of prompts.
        tokens: the prompt, and what was generated so far.
        limit: the length at which it ends.
        key: what its draws depend on, beside the position.
        replica, slot: where it runs.
        held: tokens whose keys and values its slot holds.
    """

    index: int
    tokens: list[int]
    limit: int
    key: tuple[int, ...]
    replica: int = -1
    slot: int = -1
    held: int = 0


@dataclass(frozen=True)
class Pass:
    """Sequences of one replica that go through the model together, each with as many new tokens.

    Attributes:
        requests: (B,) in the order of their slots.
        slots, starts: (B,) where each is, and how many tokens its slot holds already.
        tokens: (B, T) ids.
    """

    requests: list[Request]
    slots: list[int]
    starts: list[int]
    tokens: list[list[int]]

    @property
    def shape(self) -> tuple[int, int]:
        """(B, T)"""
        return len(self.tokens), len(self.tokens[0])


@dataclass
class Turn:
    """One turn of a group of slots: the passes of each replica; none where nothing is left to do."""

    passes: list[list[Pass]] = field(default_factory=list)

    def rows(self, replica: int) -> list[Request]:
        """The requests that get a token, in order."""
        return [request for part in self.passes[replica] for request in part.requests]

    @property
    def width(self) -> int:
        """The most rows of a replica; 0: an empty turn."""
        return max((len(self.rows(replica)) for replica in range(len(self.passes))), default=0)


class Batcher:
    """Deals requests to slots and plans turns.

    Args:
        requests: the queue.
        slots: of each replica.
        replicas: the data axis's size.
        groups: the slots are shared out to so many.
        eos: the token that ends a sequence, if one does.
    """

    def __init__(
        self, requests: Sequence[Request], *, slots: int, replicas: int, groups: int, eos: frozenset[int]
    ) -> None:
        self._queue = deque(requests)
        self._replicas, self._groups, self._eos = replicas, groups, eos
        self._running: list[list[Request]] = [[] for _ in range(groups)]
        # The lowest slots first, so that those in use are neighbours; and one replica after the other.
        ranges = [range(*split(slots, groups, group)) for group in range(groups)]
        self._sizes = [len(span) for span in ranges]
        self._free = [[(slot, replica) for slot in span for replica in range(replicas)] for span in ranges]

    def plan(self, turn: int) -> Turn:
        """What runs at a turn. The tokens of turn - groups must have been taken."""
        group = turn % self._groups
        running, free = self._running[group], self._free[group]
        joined: list[Request] = []
        # No more than the group's share: other groups would stand idle.
        everything = len(self._queue) + sum(map(len, self._running))
        share = -(-everything * self._sizes[group] // sum(self._sizes))
        while self._queue and free and len(running) + len(joined) < share:
            request = self._queue.popleft()
            at = min(range(len(free)), key=lambda i: (self._load(free[i][1], running, joined), free[i]))
            request.slot, request.replica = free.pop(at)
            joined.append(request)
        if not running and not joined:
            return Turn()
        passes: list[list[Pass]] = []
        for replica in range(self._replicas):
            here = [request for request in joined if request.replica == replica]
            lengths = sorted({len(request.tokens) for request in here})
            batches = [[request for request in here if len(request.tokens) == length] for length in lengths]
            batches.append([request for request in running if request.replica == replica])
            passes.append([_pass(batch) for batch in batches if batch])
        running += joined
        return Turn(passes)

    def take(self, turn: Turn, tokens: Sequence[Sequence[int]]) -> list[Token]:
        """Put the tokens of a turn, (replicas, rows), behind their sequences; those that end leave."""
        new = []
        for replica, chosen in enumerate(tokens):
            for request, token in zip(turn.rows(replica) if turn.passes else [], chosen):
                request.held = len(request.tokens)
                request.tokens.append(token)
                last = token in self._eos or len(request.tokens) >= request.limit
                new.append(Token(request.index, token, len(request.tokens) - 1, last))
                if last:
                    self._leave(request)
        return new

    def cancel(self) -> None:
        """Plan nothing more: whoever reads the tokens has had enough."""
        self._queue.clear()
        for running in self._running:
            running.clear()

    @property
    def done(self) -> bool:
        """Whether nothing is left to plan."""
        return not self._queue and not any(self._running)

    def _leave(self, request: Request) -> None:
        for group, running in enumerate(self._running):
            if request in running:
                running.remove(request)
                self._free[group].append((request.slot, request.replica))

    @staticmethod
    def _load(replica: int, *parts: list[Request]) -> int:
        return sum(request.replica == replica for part in parts for request in part)


def _pass(requests: list[Request]) -> Pass:
    """One token each where a slot holds the others, or the whole prompts."""
    ordered = sorted(requests, key=lambda request: request.slot)
    return Pass(
        ordered,
        [request.slot for request in ordered],
        [request.held for request in ordered],
        [request.tokens[request.held :] for request in ordered],
    )
