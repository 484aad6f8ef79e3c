"""Simulation of a schedule: costs of the ops -> timeline, makespan, bubble, peak activations.

    >>> result = triax.simulate(triax.make_schedule("1f1b", pipe=4, microbatches=8), triax.Costs(F=1, I=1, W=1))
    >>> result.makespan, round(result.bubble, 3), result.peak_activations
    (33.0, 0.273, (4.0, 3.0, 2.0, 1.0))

A rank runs its ops in order, each as soon as its inputs have arrived. A message takes COMM and keeps no
rank busy; between two stages of one rank there is no message. Transfers of activations (O, R) run one after the other
in a lane of their rank, beside its compute ops. A backward waits for the reload of its activations, and an F for the
offloads that were issued before the compute op before it, so that memory is bounded whatever the speed of the lane.

The two ops of a pair (pairs.py) start together, when the inputs of both have arrived, and end together. Both have the
same span.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from operator import mul
from typing import NamedTuple

from .deadlock import Wait, deadlock
from .ops import BACKWARD, COMPUTE, MAKES, TRANSFERS, Op
from .orders import Orders
from .slices import slice_costs
from .timeline import Span, Timeline

Cost = float | Sequence[float]


class _Pass(NamedTuple):
    """Parts of one pass of one stage."""

    products: float
    all_reduce: float
    exchange: float
    alone: float  # what it takes without another pass

    @classmethod
    def of(cls, kind: str, f: float, i: float, w: float, all_reduce: float, exchange: float) -> _Pass:
        if kind == "W":
            return cls(w, 0.0, 0.0, w)
        products = {"F": f, "I": i, "B": i + w}[kind]
        hidden = min(w, all_reduce) if kind == "B" else 0.0
        return cls(products, all_reduce, exchange, products + all_reduce - hidden + exchange)


@dataclass(frozen=True)
class Costs:
    """Costs of a forward, an input gradient, a weight gradient and a message, in any unit of time.

    >>> schedule = triax.make_schedule("1f1b", pipe=2, microbatches=4)
    >>> triax.simulate(schedule, triax.Costs(F=1, I=1, W=1, COMM=0.5)).makespan
    17.0

    Each cost but COMM is a number or a sequence. A number is the cost of one rank's whole share of a microbatch, all
    its chunks together, so that schedules with different chunks compare: an op of one of v chunks costs 1/v of it. A
    sequence gives one cost for each stage: of one op of this stage, as it is measured. C, a forward that is run again,
    costs as much as F.

    AR and A2A are collectives: they take a network, and the products F, I and W a processor. A pass alone waits for its
    collectives, except that the all-reduces of a B run beside its own weight gradient:

        pass     alone                   in a pair of passes 1 and 2
        F        F + AR + A2A            the longest of: the products of 1 + 2, AR of 1 + 2, A2A of 1 + 2,
        I        I + AR + A2A            pass 1 alone, pass 2 alone
        B        I + max(W, AR) + A2A
        W        W

    Attributes:
        F: time of a forward pass.
        I: time of the gradient of the inputs.
        W: time of the gradient of the weights.
        COMM: time of one message. A sequence gives it for each boundary, the boundary of stages 0 and 1 first.
        GATHER: for ZeRO-3: time to gather the weights over the data axis. Layers are gathered ahead while others
            compute. So a pass that needs them (F, and I or B) takes no less time than its gather, and all of this time
            counts as busy.
        O, R: times to offload and to reload the activations of a microbatch: bytes / bandwidth + latency.
        AR: time of the all-reduces of the tensor axis in an F, and in an I or B.
        A2A: time of the all-to-alls of the expert axis in an F, and in an I or B.
        attention: share of causal attention in F and in I of a whole microbatch, 0 to 1, for schedules over slices of
            sequences (slices.py): a later slice attends to more tokens and takes longer. All other costs of a slice,
            its messages too, are the costs of the microbatch times the slice's share of the tokens.
    """

    F: Cost = 1.0
    I: Cost = 1.0
    W: Cost = 1.0
    COMM: Cost = 0.0
    GATHER: Cost = 0.0
    O: Cost = 1.0
    R: Cost = 1.0
    AR: Cost = 0.0
    A2A: Cost = 0.0
    attention: float = 0.0

    def __post_init__(self) -> None:
        for field in ("F", "I", "W", "COMM", "GATHER", "O", "R", "AR", "A2A"):
            value = getattr(self, field)
            if isinstance(value, Sequence):
                object.__setattr__(self, field, tuple(float(x) for x in value))
            values = value if isinstance(value, Sequence) else (value,)
            if not all(0 <= x <= 1e100 for x in values):  # sums and products of larger ones overflow
                raise ValueError(f"the cost {field} is {value}: give a number from 0 to 1e100")
        if not 0 <= self.attention <= 1:
            raise ValueError(f"attention is {self.attention}: give its share of F and I, a number from 0 to 1")

    def op_costs(self, stages: int, chunks: int, tokens: float = 1.0, forward: float = 1.0) -> dict[str, list[float]]:
        """Return for each kind of a schedule's ops the cost of one op of each stage, with the gather of its weights.

        Args:
            stages, chunks: number of stages of the schedule, and of chunks of a rank.
            tokens, forward: for ops of a slice, its shares as ``slice_costs`` returns them.
        """
        w, g, o, r = (self._per_stage(name, stages, chunks) for name in ("W", "GATHER", "O", "R"))
        w, o, r = ([cost * tokens for cost in costs] for costs in (w, o, r))
        f, i, b = ([each.alone for each in self._passes(kind, stages, chunks, tokens, forward)] for kind in "FIB")
        return {"W": w, "O": o, "R": r} | {
            kind: list(map(max, cost, g)) for kind, cost in (("F", f), ("C", f), ("I", i), ("B", b))
        }

    def pair_costs(self, schedule: Orders) -> Callable[[Op, Op], float]:
        """Return the function that gives the time of two compute ops of a schedule as a pair."""
        stages, chunks = schedule.stages, schedule.chunks
        passes = {kind: self._passes(kind, stages, chunks) for kind in "FIBW"}
        alone = self.op_costs(stages, chunks)

        def cost(first: Op, second: Op) -> float:
            one, other = passes[first.kind][first.stage], passes[second.kind][second.stage]
            shared = (one.products + other.products, one.all_reduce + other.all_reduce, one.exchange + other.exchange)
            return max(*shared, alone[first.kind][first.stage], alone[second.kind][second.stage])

        return cost

    def _passes(self, kind: str, stages: int, chunks: int, tokens: float = 1.0, forward: float = 1.0) -> list[_Pass]:
        """Return the parts of a pass of each stage; ``tokens`` and ``forward`` as for ``op_costs``."""
        shares = {"F": forward, "I": forward, "W": tokens, "AR": tokens, "A2A": tokens}
        parts = ([share * each for each in self._per_stage(name, stages, chunks)] for name, share in shares.items())
        return [_Pass.of(kind, *each) for each in zip(*parts)]

    def hops(self, placement: Sequence[int]) -> list[float]:
        """Return the time of a message across each boundary; 0 if both stages are on one rank."""
        boundaries = len(placement) - 1
        times = list(self.COMM) if isinstance(self.COMM, Sequence) else [float(self.COMM)] * boundaries
        if len(times) != boundaries:
            raise ValueError(f"COMM has {len(times)} values, but {len(placement)} stages have {boundaries} boundaries")
        return [0.0 if placement[s] == placement[s + 1] else t for s, t in enumerate(times)]

    def _per_stage(self, name: str, stages: int, chunks: int) -> list[float]:
        value = getattr(self, name)
        if not isinstance(value, Sequence):
            return [value / chunks] * stages
        if len(value) != stages:
            raise ValueError(f"{name} has {len(value)} values for {stages} stages: give each one, or one number")
        return list(value)


@dataclass(frozen=True)
class Simulation:
    """Result of `simulate`: the times of all ops, and the makespan, bubble and peak memory that follow from them.

    Attributes:
        makespan: time of the step, in the unit of the costs.
        bubble: idle share of the busiest rank, 1 - (its busy time) / makespan.
        peak_activations: for each rank the activations that it holds at most, in microbatches through 1/pipe of the
            model.
        peak_of_stages: the same for each stage; the stages of a rank may hold their most at different times.
        timeline: start and end of each op.
        peak_offloaded: for each rank the activations in host memory at most, in the same unit; () if the schedule
            offloads none.
    """

    makespan: float
    bubble: float
    peak_activations: tuple[float, ...]
    peak_of_stages: tuple[float, ...]
    timeline: Timeline
    peak_offloaded: tuple[float, ...] = ()


def simulate(schedule: Orders, costs: Costs | None = None, keep_gathered: bool = False) -> Simulation:
    """Simulate a step of `schedule`.

    >>> result = triax.simulate(triax.make_schedule("zb-h1", pipe=4, microbatches=8))
    >>> result.makespan, round(result.bubble, 3), result.peak_activations
    (27.0, 0.111, (4.0, 4.0, 4.0, 4.0))

    Args:
        schedule: the schedule.
        costs: by default F = I = W = 1, COMM = GATHER = 0.
        keep_gathered: under ZeRO-3, gather a stage's weights only before its first F of the step, and keep them
            gathered until the end of the step.

    Raises:
        ScheduleError: the schedule would hang.
    """
    times = timeline_of(schedule, costs, keep_gathered)
    offloaded = peak_offloaded(schedule) if schedule.offloads else ()
    counts = counts_in_flight(schedule)
    stages = _stage_peaks(schedule, counts)
    return Simulation(times.makespan, times.bubble, _rank_peaks(schedule, counts), stages, times, offloaded)


def peak_activations(schedule: Orders, sizes: Sequence[float] | None = None) -> tuple[float, ...]:
    """Return the most activations that each rank holds at once.

    A rank holds an activation from the start of its F to the end of its W or B; in a forward-only schedule, during its
    F only. It holds an offloaded activation until an F or C has waited for its O, and again from its R on. It holds a
    recomputed activation during its F, and again from its C on; the stage's input, which stays, does not count.

    Args:
        schedule: the schedule.
        sizes: activations of one microbatch in each stage, such as bytes, which are then the unit of the result. None:
            the unit is the activations of one microbatch in 1/pipe of the model, so that schedules with different
            chunks compare.
    """
    counts = counts_in_flight(schedule)
    if sizes is None:
        return _rank_peaks(schedule, counts)
    own = [
        [size for size, home in zip(sizes, schedule.placement, strict=True) if home == r] for r in range(len(counts))
    ]
    return tuple(max((sum(map(mul, each, of)) for each in most), default=0) for most, of in zip(counts, own))


def _rank_peaks(schedule: Orders, counts: Sequence[Sequence[tuple[float, ...]]]) -> tuple[float, ...]:
    return tuple(max(map(sum, each), default=0) / schedule.chunks for each in counts)


def _stage_peaks(schedule: Orders, counts: Sequence[Sequence[tuple[float, ...]]]) -> tuple[float, ...]:
    """Return the most activations of each stage that its rank holds at once."""
    of_ranks = [iter(map(max, zip(*each, strict=True))) for each in counts]  # the stages of a rank are in their order
    return tuple(next(of_ranks[rank], 0.0) / schedule.chunks for rank in schedule.placement)


def counts_in_flight(schedule: Orders) -> list[list[tuple[float, ...]]]:
    """Return for each rank the largest numbers of microbatches whose activations its stages hold at once.

    A slice counts as its share of a microbatch's tokens. A rank with several stages may have several such tuples,
    because none is larger in all stages: with two chunks, (3, 1) and (2, 2).
    """
    found = []
    for rank in range(schedule.pipe):
        most = largest_counts(counts for _, counts in activations_held(schedule, rank))
        if len(schedule.slices) > 1:
            most = [tuple(count / sum(schedule.slices) for count in each) for each in most]
        found.append(most)
    return found


def activations_held(schedule: Orders, rank: int) -> Iterator[tuple[Op, tuple[float, ...]]]:
    """Yield each op of a rank that takes memory for activations, and what each stage of the rank then holds.

    The unit is a microbatch or, with slices, the unit of ``Schedule.slices``. An offload frees its memory when a later
    op waits for it. An F or C waits for the offloads that were issued before the compute op before it, and the second
    op of a pair for those of the first, with which it starts.
    """
    place = {stage: i for i, stage in enumerate(s for s, home in enumerate(schedule.placement) if home == rank)}
    held: list[float] = [0] * len(place)
    leaving: deque[tuple[int, int, float]] = deque()  # offloads under way: compute ops before it, its stage, size
    computed, order = 0, schedule.orders[rank]  # compute ops that have started before this op
    again = {op[1:] for op in order if op.kind == "C"}
    forward_only, paired = schedule.forward_only, False
    for op in order:
        kind, stage, microbatch = op
        size = schedule.slices[microbatch % len(schedule.slices)]
        if kind in MAKES:
            while leaving and leaving[0][0] < computed:
                _, left, freed = leaving.popleft()
                held[place[left]] -= freed
        elif kind == "O":
            leaving.append((computed, stage, size))
        if kind in "FRC":
            held[place[stage]] += size
            yield op, tuple(held)
            if forward_only:
                held[place[stage]] = 0
            elif kind == "F" and (stage, microbatch) in again:
                held[place[stage]] -= size
        elif kind in "BW":
            held[place[stage]] -= size
        first = op in schedule.pairs
        computed += (kind in COMPUTE and not first) + paired
        paired = first


def peak_offloaded(schedule: Orders) -> tuple[float, ...]:
    """Return the most activations that each rank holds in host memory, in the unit of ``peak_activations``.

    A buffer in host memory is taken from an O until the backward that reads the reloaded activations.
    """
    found = []
    for order in schedule.orders:
        there: dict[tuple[int, int], float] = {}
        most = 0.0
        for kind, stage, microbatch in order:
            if kind == "O":
                there[stage, microbatch] = schedule.slices[microbatch % len(schedule.slices)]
                most = max(most, sum(there.values()))
            elif kind in BACKWARD:
                there.pop((stage, microbatch), None)
        found.append(most / (schedule.chunks * sum(schedule.slices)))
    return tuple(found)


def largest_counts(counts: Iterable[tuple[float, ...]]) -> list[tuple[float, ...]]:
    """Return the tuples that no other one exceeds in all places."""
    found: list[tuple[float, ...]] = []
    for each in sorted(set(counts), reverse=True):  # a tuple comes after those that exceed it
        if not any(all(x <= y for x, y in zip(each, larger, strict=True)) for larger in found):
            found.append(each)
    return found


def timeline_of(schedule: Orders, costs: Costs | None = None, keep_gathered: bool = False) -> Timeline:
    """Return the times of every op; arguments and errors as for `simulate`."""
    stages, mbs, placement = len(schedule.placement), schedule.passes, schedule.placement
    costs = costs or Costs()
    shares, slices = slice_costs(schedule.slices, costs.attention), len(schedule.slices)
    first_f = costs.op_costs(stages, schedule.chunks, *shares[0])["F"]  # of each stage's first microbatch
    if keep_gathered:
        costs = replace(costs, GATHER=0.0)
    cost, hop = [costs.op_costs(stages, schedule.chunks, *each) for each in shares], costs.hops(placement)
    cost_f, cost_b, cost_i, cost_w = ([each[kind] for each in cost] for kind in "FBIW")  # by slice, by stage
    part = [tokens for tokens, _ in shares]
    # ready_f[s * mbs + m]: when the input of stage s has arrived; ready_b[(s + 1) * mbs + m]: when the
    # gradient of its output has. The data and the loss's gradient are ready from the start.
    ready_f = [0.0] * mbs + [-1.0] * (stages * mbs)
    ready_b = [-1.0] * (stages * mbs) + [0.0] * mbs
    hop_f, hop_b = [*hop, 0.0], [0.0, *hop]  # where the output of a stage goes, and its input gradient
    rows: list[list[Span]] = [[] for _ in schedule.orders]
    transfers: list[list[Span]] = [[] for _ in rows]
    leaving: list[deque[tuple[int, float]]] = [deque() for _ in rows]  # compute ops before an offload, its end
    reloaded: dict[int, float] = {}  # stage * mbs + m -> when its activations are back
    clock, done = [0.0] * len(rows), [0] * len(rows)
    pairs, pair_cost = schedule.pairs, costs.pair_costs(schedule) if schedule.pairs else None
    waiting: dict[tuple[bool, int], int] = {}  # arrival that a rank waits for -> the rank
    runnable = list(range(len(rows)))[::-1]

    def absent(op: Op) -> tuple[bool, int] | None:
        """Return the arrival that an op of a pair waits for; None if its inputs have a time."""
        at = op.stage * mbs + op.microbatch
        if op.kind == "F":
            return (True, at) if ready_f[at] < 0 else None
        return (False, at + mbs) if op.kind != "W" and (ready_b[at + mbs] < 0 or ready_f[at + mbs] < 0) else None

    def ready(op: Op, rank: int) -> float:
        """Return when the inputs of an op of a pair have arrived."""
        at = op.stage * mbs + op.microbatch
        if op.kind == "W":
            return 0.0
        if op.kind != "F":
            return max(ready_b[at + mbs], reloaded.get(at, 0.0))
        start = ready_f[at]
        while leaving[rank] and leaving[rank][0][0] < len(rows[rank]):
            start = max(start, leaving[rank].popleft()[1])
        return start

    while runnable:
        rank = runnable.pop()
        order, row, now = schedule.orders[rank], rows[rank], clock[rank]
        lane = transfers[rank]
        for i in range(done[rank], len(order)):
            op = order[i]
            kind, stage, mb = op
            at = stage * mbs + mb
            if pairs and i and order[i - 1] in pairs:
                continue  # it has run with the op before
            if op in pairs:
                both = op, order[i + 1]
                lacking = absent(both[0]) or absent(both[1])
                if lacking is not None:
                    waiting[lacking] = rank
                    break
                start = max(now, ready(both[0], rank), ready(both[1], rank))
                assert pair_cost is not None  # there are pairs
                gathers = [first_f[each.stage] for each in both if each.kind == "F" and not each.microbatch]
                now = start + max((pair_cost(*both), *gathers))
                for each in both:
                    row.append(Span(each, start, now))
                    at = each.stage * mbs + each.microbatch
                    if each.kind == "F":
                        ready_f[at + mbs], arrival = now + hop_f[each.stage], (True, at + mbs)
                    elif each.kind != "W":
                        ready_b[at], arrival = now + hop_b[each.stage], (False, at)
                    if each.kind != "W" and arrival in waiting:
                        runnable.append(waiting.pop(arrival))
                continue
            if kind == "W":
                row.append(Span(op, now, now + cost_w[mb % slices][stage]))
                now += cost_w[mb % slices][stage]
                continue
            if kind == "C":
                start = now
                while leaving[rank] and leaving[rank][0][0] < len(row):
                    start = max(start, leaving[rank].popleft()[1])
                row.append(Span(op, start, start + cost[mb % slices]["C"][stage]))
                now = row[-1].end
                continue
            if kind == "F":
                start = ready_f[at]
                if start < 0:
                    waiting[True, at] = rank
                    break
                start = max(now, start)
                while leaving[rank] and leaving[rank][0][0] < len(row):
                    start = max(start, leaving[rank].popleft()[1])
                now = start + (cost_f[mb % slices][stage] if mb else first_f[stage])
                ready_f[at + mbs] = now + hop_f[stage] * part[mb % slices]
                arrival = (True, at + mbs)
            elif kind in TRANSFERS:
                start = max(now, lane[-1].end if lane else 0.0)
                lane.append(Span(op, start, start + cost[mb % slices][kind][stage]))
                if kind == "O":
                    leaving[rank].append((len(row), lane[-1].end))
                else:
                    reloaded[at] = lane[-1].end
                continue
            else:
                start = ready_b[at + mbs]
                if start < 0 or ready_f[at + mbs] < 0:
                    waiting[False, at + mbs] = rank
                    break
                start = max(now, start, reloaded.get(at, 0.0))
                now = start + (cost_b if kind == "B" else cost_i)[mb % slices][stage]
                ready_b[at] = now + hop_b[stage] * part[mb % slices]
                arrival = (False, at)
            row.append(Span(op, start, now))
            if arrival in waiting:
                runnable.append(waiting.pop(arrival))
        else:
            i = len(order)
        clock[rank], done[rank] = now, i
    if any(i < len(order) for i, order in zip(done, schedule.orders, strict=True)):
        raise deadlock(schedule.orders, done, lambda op: _source(schedule, op))
    return Timeline(tuple(map(tuple, rows)), transfers=tuple(map(tuple, transfers)) if any(transfers) else ())


def _source(schedule: Orders, op: Op) -> Wait | None:
    """Return the op whose result an F or a backward reads, and its rank; None if it reads data or the loss."""
    kind, stage, microbatch = op
    source = stage - 1 if kind == "F" else stage + 1
    if not 0 <= source < schedule.stages:
        return None
    rank = schedule.placement[source]
    made = Op("F" if kind == "F" else "B", source, microbatch)
    if kind in "BI" and made not in schedule.orders[rank]:
        made = made._replace(kind="I")  # its backward is split
    return made, rank
