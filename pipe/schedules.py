"""Schedules as values: for each rank, the compute ops in the order it runs them.

    >>> print(make_schedule("1f1b", pipe=2, microbatches=3))
    1f1b: pipe 2, microbatches 3, chunks 1
    rank 0: 0F0 0F1 0B0 0F2 0B1 0B2
    rank 1: 1F0 1B0 1F1 1B1 1F2 1B2

A schedule of your own is such a table: `Schedule.from_csv` reads one from a file, and `verify`
(verify.py) proves that it is complete and cannot hang.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from . import classic, v_shaped, wave, zero_bubble
from .ops import COMPUTE, Op

Order = list[Op]


@dataclass(frozen=True)
class Schedule:
    """What each rank of the pipe axis computes, in order. Whether it can run is `verify`'s to say."""

    name: str
    pipe: int  # ranks of the pipe axis
    microbatches: int
    chunks: int  # stages per rank
    placement: tuple[int, ...]  # the rank of each stage
    orders: tuple[tuple[Op, ...], ...]  # per rank, compute ops only

    def __post_init__(self) -> None:
        if len(self.placement) != self.pipe * self.chunks:
            raise ValueError(
                f"{self.pipe} ranks x {self.chunks} chunks are {self.pipe * self.chunks} stages, "
                f"but placement has {len(self.placement)}: give the rank of each stage"
            )
        if len(self.orders) != self.pipe:
            raise ValueError(f"there are {len(self.orders)} orders for {self.pipe} ranks: give one for each")

    @property
    def stages(self) -> int:
        return len(self.placement)

    @property
    def splits_backward(self) -> bool:
        """Whether some backward is done in two halves, I and W."""
        return any(op.kind in "IW" for order in self.orders for op in order)

    def __str__(self) -> str:
        head = f"{self.name}: pipe {self.pipe}, microbatches {self.microbatches}, chunks {self.chunks}"
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
        }

    def to_json(self) -> str:
        return json.dumps(self.to_dict())

    @classmethod
    def from_json(cls, text: str | Mapping[str, Any]) -> Schedule:
        """Reads what `to_json` writes (more keys beside it are ignored: `triax schedule --json` has some)."""
        data = json.loads(text) if isinstance(text, str) else text
        missing = {"name", "pipe", "microbatches", "chunks", "placement", "orders"} - set(data)
        if missing:
            raise ValueError(f"a schedule in JSON also needs {', '.join(sorted(missing))}")
        return cls(
            str(data["name"]),
            int(data["pipe"]),
            int(data["microbatches"]),
            int(data["chunks"]),
            tuple(int(rank) for rank in data["placement"]),
            tuple(tuple(Op.parse(op) for op in order) for order in data["orders"]),
        )

    def to_csv(self) -> str:
        """One line per rank, `0F0,0B0,...`: torch.distributed.pipelining reads it too."""
        return "".join(",".join(map(str, order)) + "\n" for order in self.orders)

    @classmethod
    def from_csv(cls, text: str, name: str = "file") -> Schedule:
        """Reads one line per rank, as torch.distributed.pipelining writes them.

        Empty cells (idle steps) are skipped, and so are messages and gathers, which passes.py derives
        anew. An overlapped pair `(4F0;7B0)OVERLAP_F_B` becomes its two ops. Where each stage is placed,
        and how many stages and microbatches there are, follows from the ops.
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
                f"{len(orders)} ranks run the stages {sorted(ranks)}: each rank needs as many as the others, "
                f"numbered from 0 without a gap"
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
    if any(op.kind not in COMPUTE for op in ops):
        raise ValueError(f"{cell!r} is not an op of a schedule: use F, B, I and W")
    return ops


@dataclass(frozen=True)
class Recipe:
    """How a named schedule is made, and which chunks it knows."""

    make: Callable[[int, int, int], list[Order]]  # (pipe, microbatches, chunks) -> the order of each rank
    place: Callable[[int, int], tuple[int, ...]]  # (pipe, chunks) -> the rank of each stage
    chunks: int = 1  # when the user does not say
    accepts: Callable[[int], bool] = lambda chunks: chunks == 1
    least: Callable[[int], int] = lambda pipe: 1  # microbatches it needs at least


def loop(pipe: int, chunks: int) -> tuple[int, ...]:
    """0 1 2 3 0 1 2 3: from the last rank back to the first."""
    return tuple(range(pipe)) * chunks


def zigzag(pipe: int, chunks: int) -> tuple[int, ...]:
    """0 1 2 3 3 2 1 0: back the way it came, so each turn stays on one rank."""
    return tuple(r for c in range(chunks) for r in (range(pipe) if c % 2 == 0 else reversed(range(pipe))))


RECIPES: dict[str, Recipe] = {
    "gpipe": Recipe(classic.gpipe, loop),
    "1f1b": Recipe(classic.one_f_one_b, loop),
    "eager-1f1b": Recipe(classic.eager_1f1b, loop),
    "interleaved": Recipe(classic.interleaved, loop, 2, lambda chunks: chunks >= 2),
    "looped-bfs": Recipe(classic.looped_bfs, loop, 2, lambda chunks: chunks >= 2),
    "zb-h1": Recipe(zero_bubble.zb_h1, loop),
    "zb-h2": Recipe(zero_bubble.zb_h2, loop),
    "zb-v": Recipe(v_shaped.zb_v, zigzag, 2, lambda chunks: chunks == 2),
    "v-half": Recipe(v_shaped.v_half, zigzag, 2, lambda chunks: chunks == 2),
    "v-min": Recipe(v_shaped.v_min, zigzag, 2, lambda chunks: chunks == 2),
    "dualpipe-v": Recipe(v_shaped.dualpipe_v, zigzag, 2, lambda chunks: chunks == 2, lambda pipe: 2 * pipe),
    "wave": Recipe(wave.wave, zigzag, 2, lambda chunks: chunks >= 2 and chunks % 2 == 0),
    "forward": Recipe(classic.forward, loop, 1, lambda chunks: chunks >= 1),
}

NAMES = (*RECIPES, "auto")


def make_schedule(name: str, pipe: int, microbatches: int, chunks: int | None = None) -> Schedule:
    """The schedule `name` for `pipe` ranks; `chunks` is the stages per rank (None: its own default).

    `auto` is searched for: at F = I = W, within 1F1B's memory. For measured costs see `find_schedule`.
    """
    if name == "auto":
        from .search import find_schedule  # it starts from the named ones

        return find_schedule(pipe, microbatches, memory=pipe, chunks=chunks)
    recipe = RECIPES.get(name)
    if recipe is None:
        raise ValueError(f"there is no schedule {name!r}: choose one of {', '.join(NAMES)}")
    if pipe < 1 or microbatches < 1:
        raise ValueError(
            f"{name} needs at least 1 rank and 1 microbatch, not pipe={pipe}, microbatches={microbatches}: "
            f"the nearest is pipe={max(pipe, 1)}, microbatches={max(microbatches, recipe.least(max(pipe, 1)))}"
        )
    if chunks is None:
        chunks = recipe.chunks
    if not recipe.accepts(chunks):
        near = sorted(range(1, max(chunks, 1) + 5), key=lambda c: (abs(c - chunks), c))
        nearest = next(c for c in near if recipe.accepts(c))
        raise ValueError(f"{name} does not run {chunks} chunks per rank: the nearest is chunks={nearest}")
    if microbatches < recipe.least(pipe):
        fits = max((p for p in range(1, pipe) if recipe.least(p) <= microbatches), default=None)
        or_ = "" if fits is None else f", or pipe={fits} with microbatches={microbatches}"
        raise ValueError(
            f"{name} needs at least {recipe.least(pipe)} microbatches for {pipe} ranks, not {microbatches}: "
            f"the nearest is microbatches={recipe.least(pipe)}{or_}"
        )
    orders = recipe.make(pipe, microbatches, chunks)
    return Schedule(name, pipe, microbatches, chunks, recipe.place(pipe, chunks), tuple(map(tuple, orders)))
