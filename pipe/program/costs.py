"""Costs of the ops of a schedule: what a pass of each stage takes, alone and in a pair."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from .ops import Op
from .orders import Orders

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
        work: for each microbatch, its work over the mean: all of its costs but GATHER are multiplied by it, and its
            activations count as those of any microbatch. (): 1 for each.
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
    work: Sequence[float] = field(default=(), kw_only=True)

    def __post_init__(self) -> None:
        for name in ("F", "I", "W", "COMM", "GATHER", "O", "R", "AR", "A2A"):
            value = getattr(self, name)
            if isinstance(value, Sequence):
                object.__setattr__(self, name, tuple(float(x) for x in value))
            values = value if isinstance(value, Sequence) else (value,)
            if not all(0 <= x <= 1e100 for x in values):  # sums and products of larger ones overflow
                raise ValueError(f"the cost {name} is {value}: give a number from 0 to 1e100")
        if not 0 <= self.attention <= 1:
            raise ValueError(f"attention is {self.attention}: give its share of F and I, a number from 0 to 1")
        object.__setattr__(self, "work", tuple(map(float, self.work)))
        if not all(0 <= work <= 1e100 for work in self.work):
            raise ValueError(f"the work of microbatches is {self.work}: give numbers from 0 to 1e100")

    def op_costs(self, stages: int, chunks: int, tokens: float = 1.0, forward: float = 1.0) -> dict[str, list[float]]:
        """Return for each kind of a schedule's ops the cost of one op of each stage, with the gather of its weights.

        Args:
            stages, chunks: number of stages of the schedule, and of chunks of a rank.
            tokens, forward: for ops of a slice, its shares as ``slice_costs`` returns them.
        """
        w, g, o, r = (self._per_stage(name, stages, chunks) for name in ("W", "GATHER", "O", "R"))
        w, o, r = ([cost * tokens for cost in costs] for costs in (w, o, r))
        f, i, b = ([cost.alone for cost in self._passes(kind, stages, chunks, tokens, forward)] for kind in "FIB")
        return {"W": w, "O": o, "R": r} | {
            kind: list(map(max, cost, g)) for kind, cost in (("F", f), ("C", f), ("I", i), ("B", b))
        }

    def pair_costs(self, schedule: Orders) -> Callable[[Op, Op], float]:
        """Return the function that gives the time of two compute ops of a schedule as a pair."""
        stages, chunks = schedule.stages, schedule.chunks
        passes = {kind: self._passes(kind, stages, chunks) for kind in "FIBW"}
        gather = self._per_stage("GATHER", stages, chunks)

        def cost(first: Op, second: Op) -> float:
            one, other = (
                [part * (self.work[op.microbatch] if self.work else 1.0) for part in passes[op.kind][op.stage]]
                for op in (first, second)
            )
            gathers = (gather[op.stage] for op in (first, second) if op.kind != "W")
            return max(*map(sum, zip(one[:-1], other[:-1])), one[-1], other[-1], *gathers)

        return cost

    def _passes(self, kind: str, stages: int, chunks: int, tokens: float = 1.0, forward: float = 1.0) -> list[_Pass]:
        """Return the parts of a pass of each stage; ``tokens`` and ``forward`` as for ``op_costs``."""
        shares = {"F": forward, "I": forward, "W": tokens, "AR": tokens, "A2A": tokens}
        parts = ([share * cost for cost in self._per_stage(name, stages, chunks)] for name, share in shares.items())
        return [_Pass.of(kind, *costs) for costs in zip(*parts)]

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
