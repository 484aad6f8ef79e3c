"""Continuous batching: which sequences run at each decode step. Plain Python; every rank makes the same plan.

Requests wait in one queue. The slots of the KV cache are divided into groups, and the groups take turns. In a group's
step the requests that join run their whole prompts (prefill), and the running ones run their last token (decode). A
request that ends frees its slot at once, for the next request of the queue in the group's next step.

A hop is a run of neighbouring stages on one rank, without a message in between. There are as many groups as hops, so
that all hops are busy, each with another group. Step i + groups of a group starts when the tokens of its step i are
known; all the steps in between have been started by then.

In beam search the K sequences of a prompt are K requests, which join and end together, in neighbouring slots of one
group.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ..grid.ranges import split
from .beam_search import Beams, as_float, read_candidates
from .sampling import NOT_FINITE


class Token(NamedTuple):
    """A generated token.

    Attributes:
        request: index of the prompt in the list.
        token: the token's id.
        position: index in the sequence, prompt included.
        last: True if the sequence ends with this token.
    """

    request: int
    token: int
    position: int
    last: bool


@dataclass(eq=False)
class Request:
    """A sequence to generate.

    Attributes:
        index: index of the prompt in the list.
        tokens: the prompt and the tokens generated so far.
        limit: length at which the sequence ends.
        key: integers that the draws depend on, beside the position.
        beams: the beam search of which this is one sequence, or None.
        logprobs: log-probabilities of the generated tokens, if they are asked for.
        replica, slot: data rank and slot of the KV cache where it runs.
        source: slot from which its keys and values are to be copied, in beam search.
        cached: number of tokens whose keys and values are in the slot.
    """

    index: int
    tokens: list[int]
    limit: int
    key: tuple[int, ...]
    beams: Beams | None = None
    logprobs: list[float] = field(default_factory=list)
    replica: int = -1
    slot: int = -1
    source: int = -1
    cached: int = 0


@dataclass(frozen=True)
class Forward:
    """One forward pass: sequences of one replica, each with the same number T of new tokens.

    Attributes:
        requests: (B,) in the order of their slots.
        slots: (B,) the slot of each.
        starts: (B,) the number of tokens that each slot has already.
        tokens: (B, T) ids of the new tokens.
        sources: (B,) the slot from which each takes those that it has; None: its own.
    """

    requests: list[Request]
    slots: list[int]
    starts: list[int]
    tokens: list[list[int]]
    sources: list[int] | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """Batch and new tokens, (B, T)."""
        return len(self.tokens), len(self.tokens[0])


@dataclass
class DecodeStep:
    """One step of a group of slots: the forward passes of each replica; an empty list if nothing is left to run."""

    forwards: list[list[Forward]] = field(default_factory=list)

    def rows(self, replica: int) -> list[Request]:
        """Return the requests that get a token on a replica, in the order of the tokens."""
        return [request for forward in self.forwards[replica] for request in forward.requests]

    @property
    def width(self) -> int:
        """Largest number of rows of a replica; 0 for an empty step."""
        return max((len(self.rows(replica)) for replica in range(len(self.forwards))), default=0)


class Batcher:
    """Planner of the decode steps: assigns requests to slots, and lists the forward passes of each step.

    Args:
        requests: the queue; in beam search the K of a prompt one behind the other.
        slots: number of slots of each replica, a multiple of K.
        replicas: size of the data axis.
        groups: number of groups into which the slots are divided.
        ends: function that is True for a sequence (prompt included) that ends with its last token.
        beams: K; 1 without beam search.
    """

    def __init__(
        self,
        requests: Sequence[Request],
        *,
        slots: int,
        replicas: int,
        groups: int,
        ends: Callable[[list[int]], bool],
        beams: int = 1,
    ) -> None:
        self._queue = deque(list(requests[i : i + beams]) for i in range(0, len(requests), beams))
        self._replicas, self._groups, self._ends, self._beams = replicas, groups, ends, beams
        self._running: list[list[Request]] = [[] for _ in range(groups)]
        # Lowest slots first, so that the slots in use are contiguous; replicas in turn.
        parts = [split(slots // beams, groups, group) for group in range(groups)]
        ranges = [range(beams * start, beams * stop, beams) for start, stop in parts]
        self._sizes = [len(span) for span in ranges]
        self._free = [[(slot, replica) for slot in span for replica in range(replicas)] for span in ranges]

    def plan(self, step: int) -> DecodeStep:
        """Return the forwards of decode step number ``step``, of group ``step % groups``.

        The tokens of ``step - groups``, the group's step before, must have been appended.
        """
        group = step % self._groups
        running, free = self._running[group], self._free[group]
        joined: list[Request] = []
        if self._queue and free:
            # No more than the group's share: else other groups would have nothing to run.
            total = len(self._queue) + sum(map(len, self._running)) // self._beams
            share = -(-total * self._sizes[group] // sum(self._sizes)) * self._beams
            while self._queue and free and len(running) + len(joined) < share:
                load = Counter(other.replica for other in running + joined)
                slot_of_replica = min(free, key=lambda place: (load[place[1]], place))  # (slot, replica)
                free.remove(slot_of_replica)
                for slot, request in enumerate(self._queue.popleft(), start=slot_of_replica[0]):
                    request.slot, request.source, request.replica = slot, slot, slot_of_replica[1]
                    joined.append(request)
        if not running and not joined:
            return DecodeStep()
        forwards: list[list[Forward]] = []
        for replica in range(self._replicas):
            here = [request for request in joined if request.replica == replica]
            lengths = sorted({len(request.tokens) for request in here})
            batches = [[request for request in here if len(request.tokens) == length] for length in lengths]
            batches.append([request for request in running if request.replica == replica])
            forwards.append([_forward(batch) for batch in batches if batch])
        running += joined
        return DecodeStep(forwards)

    def append(self, step: DecodeStep, numbers: Sequence[Sequence[Sequence[int]]]) -> list[Token]:
        """Append the tokens that a step has drawn to their sequences. Sequences that end free their slots.

        Args:
            step: the step.
            numbers: (replicas, rows, n), in the order of ``step.rows(replica)``: a token's id, and the bits of its
                log-probability; or in beam search the rows of ``beam_search.continuations``.

        Returns:
            The new tokens. Beam search returns none but the last one of a search.
        """
        new: list[Token] = []
        for replica, chosen in enumerate(numbers):
            rows = step.rows(replica) if step.forwards else []
            if self._beams > 1:
                for start in range(0, len(rows), self._beams):
                    stop = start + self._beams
                    new += self._advance(rows[start:stop], chosen[start:stop])
                continue
            for request, (token, *bits) in zip(rows, chosen):
                request.cached = len(request.tokens)
                request.tokens.append(token)
                request.logprobs += map(as_float, bits)
                last = len(request.tokens) >= request.limit or self._ends(request.tokens)
                new.append(Token(request.index, token, len(request.tokens) - 1, last))
                if last:
                    self._free_slots([request])
        return new

    def _advance(self, rows: list[Request], numbers: Sequence[Sequence[int]]) -> list[Token]:
        """Continue the beam search of one prompt."""
        beams, length, candidates = rows[0].beams, len(rows[0].tokens), read_candidates(numbers)
        assert beams is not None
        if candidates[0].beam < 0:
            return [Token(rows[0].index, NOT_FINITE, length, True)]
        ended = beams.advance(candidates)
        for row, tokens, parent in zip(rows, beams.tokens, beams.parents):
            row.cached, row.tokens, row.source = length, tokens, rows[parent].slot
        if not ended:
            return []
        self._free_slots(rows)
        return [Token(rows[0].index, beams.found[0].tokens[-1], len(beams.found[0].tokens) - 1, True)]

    def cancel(self) -> None:
        """Drop all requests, so that no further step is planned."""
        self._queue.clear()
        for running in self._running:
            running.clear()

    @property
    def done(self) -> bool:
        """True if no request is waiting or running."""
        return not self._queue and not any(self._running)

    def _free_slots(self, rows: list[Request]) -> None:
        """Free the slots of requests that end together."""
        for group, running in enumerate(self._running):
            if rows[0] in running:
                self._running[group] = [request for request in running if request not in rows]
                self._free[group].append((rows[0].slot, rows[0].replica))


def _forward(requests: list[Request]) -> Forward:
    """Return the forward pass of the tokens of these requests whose keys and values are not cached yet.

    These are the whole prompts of requests that join, or the last token of each running request.
    """
    ordered = sorted(requests, key=lambda request: request.slot)
    slots, sources = [request.slot for request in ordered], [request.source for request in ordered]
    return Forward(
        ordered,
        slots,
        [request.cached for request in ordered],
        [request.tokens[request.cached :] for request in ordered],
        None if sources == slots else sources,
    )
