"""A schedule is a value: for each rank, the compute ops in the order it runs them, and the transfers of activations.

A schedule of your own is such a table. `Schedule.from_csv` reads one from a file, and `verify`
(verify.py) proves that it is complete and cannot hang.

Two ops that run interleaved, so that the collectives of each run beside the products of the other, are a pair:
`0F3&0B1` in text and JSON, `(0F3;0B1)OVERLAP_F_B` in CSV.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...base.checks import check_count
from ...base.errors import escaped
from ...base.files import distinct_keys, parse_json
from .deadlock import ScheduleError
from .ops import COMPUTE, TRANSFERS, Op
from .simulate import timeline_of
from .slices import Slices, slice_lengths
from .svg import svg


@dataclass(frozen=True)
class Schedule:
    """Compute ops of each rank of the pipe axis, in order. (`verify` checks that it can run.)

    >>> schedule = triax.make_schedule("gpipe", pipe=2, microbatches=2)
    >>> schedule.placement, [str(op) for op in schedule.orders[1]]
    ((0, 1), ['1F0', '1F1', '1B0', '1B1'])
    >>> triax.Schedule.from_csv(schedule.to_csv()).orders == schedule.orders
    True

    Attributes:
        name: name of the schedule, for messages.
        pipe: number of ranks of the pipe axis.
        microbatches: number of microbatches of a step.
        chunks: number of stages per rank.
        placement: the rank of each stage.
        orders: for each rank its compute ops and transfers, in the order in which it runs them.
        pairs: forwards; each forward runs interleaved with the op after it (pairs.py).
        slices: relative lengths of the slices of each microbatch (slices.py); (1,): microbatches are whole.
    """

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
        if found := min(self.pairs, default=recomputed):
            what = "pair" if self.pairs else "recomputation"
            raise ScheduleError(
                f"{found} is of a {what}, which has whole microbatches, not {len(self.slices)} slices of each: leave "
                f"out the slices, or the {what}"
            )

    def _require_pairs(self) -> None:
        """Check that the ops of each pair may run interleaved.

        Ops of one microbatch depend on each other, and two backward passes would reduce gradients of one bucket.
        """
        found = set()
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
                found.add(op)
        if missing := sorted(self.pairs - found):
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

    def __str__(self) -> str:
        head = f"{self.name}: pipe {self.pipe}, microbatches {self.microbatches}, chunks {self.chunks}"
        if len(self.slices) > 1:
            head += f", slices {len(self.slices)}"
        rows = (f"rank {r}: {' '.join(cells)}" for r, cells in enumerate(self._cells("{}&{}")))
        return "\n".join((head, *rows))

    def _repr_svg_(self) -> str | None:
        """Return the picture that a notebook shows: the schedule with the default costs; None if it would hang."""
        try:
            times = timeline_of(self)
        except ScheduleError:
            return None
        return svg(times, f"{self.name}: makespan {times.makespan:.4g} units of time, bubble {times.bubble:.1%}")

    def to_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "pipe": self.pipe,
            "microbatches": self.microbatches,
            "chunks": self.chunks,
            "placement": list(self.placement),
            "orders": self._cells("{}&{}"),
        } | ({"slices": list(self.slices)} if len(self.slices) > 1 else {})

    def to_json(self) -> str:
        return json.dumps(self.to_dict())

    @classmethod
    def from_json(cls, text: str | Mapping[str, Any]) -> Schedule:
        """Read a schedule in the format of `to_json`. Other keys, as in `triax schedule --json`, are ignored."""
        data = parse_json(text, object_pairs_hook=distinct_keys) if isinstance(text, str) else text
        missing = {"name", "pipe", "microbatches", "chunks", "placement", "orders"} - set(data)
        if missing:
            raise ValueError(f"the schedule in JSON lacks the keys {', '.join(sorted(missing))}: add them")
        check_count("Schedule.from_json", **{name: data[name] for name in ("pipe", "microbatches", "chunks")})
        for rank in data["placement"]:
            check_count("Schedule.from_json", least=0, placement=rank)
        orders, pairs = _flat([[[Op.parse(op) for op in cell.split("&")] for cell in row] for row in data["orders"]])
        return cls(
            escaped(str(data["name"])),
            data["pipe"],
            data["microbatches"],
            data["chunks"],
            tuple(data["placement"]),
            orders,
            pairs=pairs,
            slices=slice_lengths(data.get("slices", 1)),
        )

    def to_csv(self) -> str:
        """Return one line per rank, `0F0,(0F1;0B0)OVERLAP_F_B,...`, as torch.distributed.pipelining also reads it."""
        return "".join(",".join(cells) + "\n" for cells in self._cells("({};{})OVERLAP_F_B"))

    def _cells(self, pair: str) -> list[list[str]]:
        """Return each rank's ops as text, those of a pair in the form ``pair``."""
        rows = []
        for order in self.orders:
            after = iter(order)
            rows.append([pair.format(op, next(after)) if op in self.pairs else str(op) for op in after])
        return rows

    @classmethod
    def from_csv(cls, text: str, name: str = "file") -> Schedule:
        """Read one line per rank, as torch.distributed.pipelining writes them.

        Empty cells (idle steps) are skipped, and so are messages and gathers, which passes.py derives
        anew. `(4F1;7B0)OVERLAP_F_B` is a pair. The placement and the numbers of stages and microbatches follow from
        the ops.

        Raises:
            ValueError: a cell is not an op, a stage is on two lines, or lines have different numbers of stages.
        """
        lines = [line for line in csv.reader(io.StringIO(text)) if line]
        rows = [[ops for cell in line if (ops := _cell(cell))] for line in lines]
        orders, pairs = _flat(rows)
        ranks: dict[int, int] = {}
        for rank, order in enumerate(orders):
            for op in order:
                home = ranks.setdefault(op.stage, rank)
                if home != rank:
                    raise ValueError(f"{op} is on line {rank + 1}, but stage {op.stage} runs on line {home + 1}")
        stages = max(ranks, default=-1) + 1
        if not stages or stages % len(orders) or len(ranks) != stages:
            raise ValueError(
                f"the {len(orders)} ranks run the stages {sorted(ranks)}: give each rank the same number of stages, "
                "and number them from 0 without a gap"
            )
        microbatches = max(op.microbatch for order in orders for op in order) + 1
        placement = tuple(ranks[s] for s in range(stages))
        chunks = stages // len(orders)
        return cls(name, len(orders), microbatches, chunks, placement, orders, pairs=pairs)


_PAIR = re.compile(r"\((.*)\)OVERLAP_F_B")
_DERIVED = re.compile(r"\d+(UNSHARD|RESHARD|REDUCE_GRAD|(SEND|RECV)_[FB]|GATHER|RELEASE|REDUCE|TIED)\d*")


def _flat(rows: Sequence[Sequence[Sequence[Op]]]) -> tuple[tuple[tuple[Op, ...], ...], frozenset[Op]]:
    """Return the orders, and the first ops of pairs, of each rank's cells of one op or two."""
    if long := [cell for row in rows for cell in row if len(cell) > 2]:
        text = "&".join(map(str, long[0]))
        raise ValueError(f"{text} has {len(long[0])} ops, but one op or a pair of two may stand there: separate them")
    orders = tuple(tuple(op for cell in row for op in cell) for row in rows)
    return orders, frozenset(cell[0] for row in rows for cell in row if len(cell) > 1)


def _cell(cell: str) -> list[Op]:
    cell = cell.strip()
    if not cell or _DERIVED.fullmatch(cell):
        return []
    pair = _PAIR.fullmatch(cell)
    ops = [Op.parse(part) for part in (pair[1].split(";") if pair else [cell])]
    if pair and len(ops) == 1:
        raise ValueError(f"{cell!r} is a pair of one op: write two, as in (0F1;0B0)OVERLAP_F_B, or {ops[0]} alone")
    if any(op.kind not in COMPUTE | TRANSFERS for op in ops):
        raise ValueError(
            f"{cell!r} is not an op of a schedule: write ops of the kinds F, B, I, W, C, O and R, such as 2F0"
        )
    return ops
