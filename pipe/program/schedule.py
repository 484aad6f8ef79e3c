"""A schedule is a value: for each rank, the compute ops in the order it runs them, and the transfers of activations.

A schedule of your own is such a table. `Schedule.from_csv` reads one from a file, and `verify`
(verify.py) proves that it is complete and cannot hang.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ...base.errors import escaped
from ...base.files import parse_json
from .ops import COMPUTE, TRANSFERS, Op
from .slices import Slices, slice_lengths


@dataclass(frozen=True)
class Schedule:
    """Compute ops of each rank of the pipe axis, in order. (`verify` checks that it can run.)"""

    name: str
    pipe: int  # ranks of the pipe axis
    microbatches: int
    chunks: int  # stages per rank
    placement: tuple[int, ...]  # the rank of each stage
    orders: tuple[tuple[Op, ...], ...]  # per rank, compute ops and transfers
    # relative lengths of the slices of each microbatch (slices.py)
    slices: Slices = field(default=(1,), kw_only=True)

    def __post_init__(self) -> None:
        if len(self.placement) != self.pipe * self.chunks:
            raise ValueError(
                f"{self.pipe} ranks x {self.chunks} chunks are {self.pipe * self.chunks} stages, "
                f"but placement has {len(self.placement)}: give the rank of each stage"
            )
        if len(self.orders) != self.pipe:
            raise ValueError(f"there are {len(self.orders)} orders for {self.pipe} ranks: give one for each rank")
        slice_lengths(self.slices)

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

    def __str__(self) -> str:
        head = f"{self.name}: pipe {self.pipe}, microbatches {self.microbatches}, chunks {self.chunks}"
        if len(self.slices) > 1:
            head += f", slices {len(self.slices)}"
        rows = (f"rank {r}: {' '.join(map(str, order))}" for r, order in enumerate(self.orders))
        return "\n".join((head, *rows))

    def to_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "pipe": self.pipe,
            "microbatches": self.microbatches,
            "chunks": self.chunks,
            "placement": list(self.placement),
            "orders": [[str(op) for op in order] for order in self.orders],
        } | ({"slices": list(self.slices)} if len(self.slices) > 1 else {})

    def to_json(self) -> str:
        return json.dumps(self.to_dict())

    @classmethod
    def from_json(cls, text: str | Mapping[str, Any]) -> Schedule:
        """Read a schedule in the format of `to_json`. Other keys, as in `triax schedule --json`, are ignored."""
        data = parse_json(text) if isinstance(text, str) else text
        missing = {"name", "pipe", "microbatches", "chunks", "placement", "orders"} - set(data)
        if missing:
            raise ValueError(f"the schedule in JSON lacks the keys {', '.join(sorted(missing))}: add them")
        return cls(
            escaped(str(data["name"])),
            int(data["pipe"]),
            int(data["microbatches"]),
            int(data["chunks"]),
            tuple(int(rank) for rank in data["placement"]),
            tuple(tuple(Op.parse(op) for op in order) for order in data["orders"]),
            slices=slice_lengths(data.get("slices", 1)),
        )

    def to_csv(self) -> str:
        """Return one line per rank, `0F0,0B0,...`, as torch.distributed.pipelining also reads it."""
        return "".join(",".join(map(str, order)) + "\n" for order in self.orders)

    @classmethod
    def from_csv(cls, text: str, name: str = "file") -> Schedule:
        """Read one line per rank, as torch.distributed.pipelining writes them.

        Empty cells (idle steps) are skipped, and so are messages and gathers, which passes.py derives
        anew. An overlapped pair `(4F0;7B0)OVERLAP_F_B` becomes its two ops. The placement and the numbers of
        stages and microbatches follow from the ops.

        Raises:
            ValueError: a cell is not an op, a stage is on two lines, or lines have different numbers of stages.
        """
        lines = [line for line in csv.reader(io.StringIO(text)) if line]
        orders = [[op for cell in line for op in _cell(cell)] for line in lines]
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
        return cls(name, len(orders), microbatches, chunks, placement, tuple(map(tuple, orders)))


_PAIR = re.compile(r"\((.*)\)OVERLAP_F_B")
_DERIVED = re.compile(r"\d+(UNSHARD|RESHARD|REDUCE_GRAD|(SEND|RECV)_[FB]|GATHER|RELEASE|REDUCE|TIED)\d*")


def _cell(cell: str) -> list[Op]:
    cell = cell.strip()
    if not cell or _DERIVED.fullmatch(cell):
        return []
    pair = _PAIR.fullmatch(cell)
    ops = [Op.parse(part) for part in (pair[1].split(";") if pair else [cell])]
    if any(op.kind not in COMPUTE | TRANSFERS for op in ops):
        raise ValueError(
            f"{cell!r} is not an op of a schedule: write ops of the kinds F, B, I, W, O and R, such as 2F0"
        )
    return ops
