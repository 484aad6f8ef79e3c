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
from typing import Any

from ...base.checks import check_count
from ...base.errors import escaped
from ...base.files import distinct_keys, parse_json
from .deadlock import ScheduleError
from .ops import COMPUTE, TRANSFERS, Op
from .orders import Orders
from .simulate import timeline_of
from .slices import slice_lengths
from .svg import svg


class Schedule(Orders):
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
