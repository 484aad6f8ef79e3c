"""Orders of ops, the value that a schedule is, with the facts that follow from them."""

from __future__ import annotations

from dataclasses import dataclass, field

from .deadlock import ScheduleError
from .ops import COMPUTE, TRANSFERS, Op
from .slices import Slices, slice_lengths


@dataclass(frozen=True)
class Orders:
    """Orders of ops and their placement. ``Schedule`` explains the fields, and adds texts, files and a picture."""

    name: str
    pipe: int
    microbatches: int
    chunks: int
    placement: tuple[int, ...]
    orders: tuple[tuple[Op, ...], ...]
    pairs: frozenset[Op] = field(default=frozenset(), kw_only=True)
    slices: Slices = field(default=(1,), kw_only=True)

    def __post_init__(self) -> None:
        if len(self.placement) != self.pipe * self.chunks:
            raise ValueError(
                f"{self.pipe} ranks x {self.chunks} chunks are {self.pipe * self.chunks} stages, "
                f"but placement has {len(self.placement)}: give the rank of each stage"
            )
        if len(self.orders) != self.pipe:
            raise ValueError(f"there are {len(self.orders)} orders for {self.pipe} ranks: give one for each rank")
        if len(slice_lengths(self.slices)) > 1:
            self._require_whole()
        if self.pairs:
            self._require_pairs()

    def _require_whole(self) -> None:
        """Check that no op needs whole microbatches, which a schedule over slices does not have."""
        recomputed = next((op for order in self.orders for op in order if op[0] == "C"), None)
        if refused := min(self.pairs, default=recomputed):
            what = "pair" if self.pairs else "recomputation"
            raise ScheduleError(
                f"{refused} is of a {what}, which has whole microbatches, not {len(self.slices)} slices of each: leave "
                f"out the slices, or the {what}"
            )

    def _require_pairs(self) -> None:
        """Check that the ops of each pair may run interleaved.

        Ops of one microbatch depend on each other, and two backward passes would reduce gradients of one bucket.
        """
        paired = set()
        for rank, order in enumerate(self.orders):
            for i, op in enumerate(order):
                if op not in self.pairs:
                    continue
                after = order[i + 1] if i + 1 < len(order) else None
                why = f"rank {rank}: {op} is the first op of a pair, but "
                if op.kind != "F":
                    raise ScheduleError(f"{why}the first op must be a forward: put it first", [(rank, op)])
                if after is None or after.kind not in COMPUTE or after.kind == "C":
                    raise ScheduleError(f"{why}no F, B, I or W comes right after it", [(rank, op)])
                if after in self.pairs:
                    raise ScheduleError(f"{why}{after} after it is the first op of another pair", [(rank, op)])
                if after.microbatch == op.microbatch:
                    raise ScheduleError(
                        f"{why}{after} after it is of the same microbatch, and one of them needs the result of the "
                        "other: pair passes of different microbatches",
                        [(rank, op)],
                    )
                paired.add(op)
        if missing := sorted(self.pairs - paired):
            raise ScheduleError(f"{missing[0]} is the first op of a pair, but no rank runs it: add it to an order")

    @property
    def stages(self) -> int:
        return len(self.placement)

    @property
    def passes(self) -> int:
        """Passes through each stage in a step: one for each microbatch, or for each of its slices."""
        return self.microbatches * len(self.slices)

    @property
    def forward_only(self) -> bool:
        """True if the schedule has no backward ops, as in inference and evaluation."""
        return all(op.kind == "F" for order in self.orders for op in order)

    @property
    def offloads(self) -> bool:
        """True if the schedule offloads activations to the host."""
        return any(op.kind in TRANSFERS for order in self.orders for op in order)

    @property
    def recomputes(self) -> bool:
        """True if the schedule recomputes activations by ops of its own."""
        return any(op.kind == "C" for order in self.orders for op in order)

    def groups(self, rank: int) -> list[tuple[Op, ...]]:
        """Return the ops of a rank in groups that start together: the two ops of a pair, and single ops."""
        order = iter(self.orders[rank])
        return [(op, next(order)) if op in self.pairs else (op,) for op in order]
