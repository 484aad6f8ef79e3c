"""Law 1 over five axes: every grid of pipe, data, context, tensor and expert gives the numbers of one process, to 1e-10
in float64: loss, auxiliary losses, loads, norm, every gradient, and weights and buffers after two steps.

One process is compared with plain PyTorch (``five_axes.plain``), and each cell with one process. The cells are every
grid of up to 8 ranks at one setting, and a covering array: every three values of these factors that can be combined at
all occur together in a cell. Combinations that are not possible are refused by an error: see ``REFUSED``.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby, product
from typing import Any

import pytest

from triax.testing.covering import covering_array
from triax.testing.pool import RankFailure

from support.five_axes import LR, ROWS, Cell, Job, Place, alone, compare, differences, plain, run, train

# Factors of a cell, beside the axes. None: it has no effect, because the axis that it refers to has the size 1.
FACTORS: dict[str, Sequence[Any]] = {
    "pipe": (1, 2, 4, 8),
    "data": (1, 2, 4, 8),
    "context": (1, 2, 4, 8),
    "tensor": (1, 2, 4, 8),
    "expert": (1, 2, 4, 8),
    "kind": (None, "ring", "ulysses", "gather"),
    "schedule": (None, "1f1b", "interleaved", "zb-v"),
    "sequence_parallel": (None, False, True),
    "shard_tensor": (None, False, True),
    "lend": (None, 0, 2),
    "stage": (0, 1, 2, 3),
    "shard_size": (None, 1, 2, 4),
    "capacity": (False, True),
    "balance": ("sequence", "batch", "bias"),
    "tied": (False, True),
    "packed": (False, True),
    "odd": (False, True),
    "microbatches": (2, 4),
}
EXHAUSTIVE = pytest.mark.exhaustive
AXES = ("pipe", "data", "context", "tensor")
NEEDS = {
    "kind": "context",
    "schedule": "pipe",
    "sequence_parallel": "tensor",
    "shard_tensor": "tensor",
    "lend": "expert",
}
JOBS = [
    Job(*values) for values in product(*(FACTORS[name] for name in ("capacity", "balance", "tied", "packed", "odd")))
]


def allowed(row: dict[str, Any]) -> bool:
    """Return False if no cell may have these values. Some of the factors may be missing."""
    ranks = 1
    for axis in AXES:
        ranks *= row.get(axis, 1)
    if ranks > 8:
        return False
    if {"data", "context", "expert"} <= row.keys() and row["data"] * row["context"] % row["expert"]:
        return False  # refused
    for name, axis in NEEDS.items():
        if {name, axis} <= row.keys() and (row[name] is None) != (row[axis] == 1):
            return False
    ranks_of_data = row["data"] * row["context"] if {"data", "context"} <= row.keys() else 0
    if (size := row.get("shard_size")) is not None and (row.get("stage") == 0 or ranks_of_data % size):
        return False  # without effect, or refused
    if row.get("sequence_parallel") and row.get("odd") and row.get("context") == 1:
        return False  # refused: without a context axis nothing is padded
    return row.get("data", 1) * row.get("microbatches", 1) <= ROWS


def cell(row: dict[str, Any]) -> Cell:
    values = {name: value for name, value in row.items() if value is not None}
    job = {name: values.pop(name) for name in Job.__dataclass_fields__}
    return Job(**job), Place(**values)


def grids() -> list[tuple[int, int, int, int, int]]:
    axes = (FACTORS[axis] for axis in (*AXES, "expert"))
    return [g for g in product(*axes) if allowed(dict(zip((*AXES, "expert"), g, strict=True)))]


def at_one_setting() -> list[Cell]:
    """Every grid once, at packed rows of an even length, a capacity, ring attention, ZeRO 1, 1F1B and 2 microbatches.

    Sequence parallelism is on in every second grid with a tensor axis.
    """
    job, cells, tensor = Job(capacity=True, packed=True), [], 0
    for grid in grids():
        tensor += grid[3] > 1
        on = grid[3] > 1 and tensor % 2 > 0
        cells.append((job, Place(*grid, stage=1, sequence_parallel=on, shard_tensor=tensor % 4 > 1, microbatches=2)))
    return cells


def covering() -> list[Cell]:
    rows = covering_array(FACTORS, allowed)
    seen = {name: {row[name] for row in rows} for name in FACTORS}
    assert all(seen[name] == set(values) for name, values in FACTORS.items())
    return [cell(row) for row in rows]


def require_equal_to_one_process(ranks: Any, cells: Sequence[Cell], at_once: int = 12) -> None:
    """Run cells of the same number of ranks in few jobs, and compare each with one process."""
    failed: list[str] = []
    ordered = sorted(cells, key=lambda cell: (cell[1].ranks, cell[1].grid))
    for count, group in groupby(ordered, key=lambda cell: cell[1].ranks):
        mine = list(group)
        for first in range(0, len(mine), at_once):
            part = mine[first : first + at_once]
            for each, everyone in zip(part, zip(*ranks(count, run, part, timeout=240)), strict=True):
                found = differences(everyone, each)
                failed += [f"{each}: {line}" for line in found[:5]]
    assert not failed, "\n".join(failed)


def test_one_process_equals_plain_pytorch() -> None:
    require_equal_to_plain([Job(True, "batch", True, True, True)])


@EXHAUSTIVE
def test_one_process_equals_plain_pytorch_in_every_job() -> None:
    assert len(JOBS) == 48
    require_equal_to_plain(JOBS)


def require_equal_to_plain(jobs: Sequence[Job]) -> None:
    for job in jobs:
        found = alone(job)
        assert not compare(found, plain(job, found.initial)), job


SAMPLE = [
    (Job(True, "batch", True, True, True), Place(1, 1, 2, 1, 2, "ring", 3, microbatches=2)),
    (Job(), Place(1, 2, 1, 1, 2, stage=2, microbatches=4)),
    (Job(), Place(1, 1, 1, 2, sequence_parallel=True, stage=1, microbatches=2)),
    (Job(True, "batch", True, True, True), Place(1, 1, 2, 2, 2, "gather", 2, "1f1b", True, True, 2)),
    (Job(True, "batch", True, True, True), Place(1, 1, 2, 2, 2, "ring", 3, "1f1b", True, microbatches=2, lend=2)),
    (Job(), Place(2, 2, 1, 1, 2, "ring", 3, "zb-v", microbatches=2, lend=1)),
]
MORE_SAMPLE = [
    (Job(True, "batch", True, True, True), Place(2, 1, 2, 1, 2, "ulysses", 1, "zb-v", microbatches=2)),
    (Job(), Place(2, 2, 1, 1, 2, "ring", 0, "interleaved", microbatches=2)),
]


@pytest.mark.parametrize("cells", [SAMPLE, pytest.param(MORE_SAMPLE, marks=EXHAUSTIVE)], ids=len)
def test_sampled_cells_of_five_axes_equal_one_process(ranks: Any, cells: list[Cell]) -> None:
    require_equal_to_one_process(ranks, cells)


@EXHAUSTIVE
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("count", [2, 4, 8])
def test_every_grid_of_five_axes_equals_one_process(ranks: Any, count: int) -> None:
    require_equal_to_one_process(ranks, [each for each in at_one_setting() if each[1].ranks == count])


@EXHAUSTIVE
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("part", range(4))
def test_all_triples_of_settings_equal_one_process(ranks: Any, part: int) -> None:
    cells = covering()
    assert len(cells) <= 600
    require_equal_to_one_process(ranks, cells[part::4])


# What cannot be combined is refused: on which grid, with which job and settings, and with which words.
REFUSED: list[tuple[Place, Job, dict[str, Any], str]] = [
    (Place(data=2, expert=4), Job(), {}, "expert=4 does not divide data x context = 2 x 1"),
    (Place(tensor=2, sequence_parallel=True), Job(odd=True), {}, "shards dim 1 in equal parts over tensor=2"),
    (
        Place(data=2, expert=2),
        Job(),
        {"optimizer": {"type": "OneBitAdam", "params": {"lr": LR, "freeze_step": 1}}},
        "gradient compression, 1-bit optimizers and ZeRO.. exchange all gradients over data x context",
    ),
    (
        Place(data=2, expert=2, stage=3),
        Job(),
        {"zero_optimization": {"stage": 3, "zero_quantized_gradients": True}},
        "gradient compression, 1-bit optimizers and ZeRO.. exchange all gradients over data x context",
    ),
    (
        Place(data=2, expert=2),
        Job(),
        {"local_updates": {"type": "local_sgd", "every": 2}},
        "local updates train each replica separately, but the experts of a layer are spread over 2 ranks",
    ),
]


@pytest.mark.parametrize(("place", "job", "settings", "words"), REFUSED)
def test_impossible_combinations_of_settings_are_refused(
    ranks: Any, place: Place, job: Job, settings: dict[str, Any], words: str
) -> None:
    with pytest.raises(RankFailure, match=words):
        ranks(2, train, job, place, settings=settings)
