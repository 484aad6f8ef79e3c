"""No result depends on memory that was never written: here torch fills it with NaN or the largest integer.

``torch.empty`` returns what was freed before. Mostly that is zeros or the values of the last step, so that a read of
memory that no exchange has filled passes a test, and fails on another day.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from support.compositions import Case, on_rank
from support.five_axes import Cell, Found, Job, Place, differences, run, train

JOB = Job(capacity=True, packed=True)
CELLS: list[Cell] = [
    (JOB, Place(pipe=2, data=2, expert=2, stage=1, microbatches=4)),
    (Job(tied=True), Place(pipe=2, tensor=2, stage=0, schedule="zb-v", microbatches=2)),
    (JOB, Place(data=2, tensor=2, expert=2, stage=2, sequence_parallel=True, shard_tensor=True)),
    (JOB, Place(data=2, context=2, expert=4, stage=3)),
]
OFFLOADED: Cell = (JOB, Place(data=4, stage=3))
CHECKPOINT: Case = {
    "layers": [["linear"]] * 4,
    "grid": [2, 2, 1],
    "accumulation": 2,
    "schedule": "1f1b",
    "optimizer": "AdamW",
    "config": {"zero_optimization": {"stage": 2}},
}


@contextlib.contextmanager
def filled_memory() -> Iterator[None]:
    """Context in which torch fills new memory (``torch.utils.deterministic.fill_uninitialized_memory``)."""
    torch._C._set_deterministic_algorithms(True)  # torch.use_deterministic_algorithms imports the compiler
    try:
        assert torch.empty(3).isnan().all() and torch.empty(3, dtype=torch.int64)[1] == torch.iinfo(torch.int64).max
        yield
    finally:
        torch._C._set_deterministic_algorithms(False)


def trained(folder: str) -> tuple[list[Found], list[Any]]:
    """Train every cell, the last one with offload; then a job that is saved and loaded, and the same without a stop."""
    with filled_memory():
        found = run(CELLS)
        offload = {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}
        found.append(train(*OFFLOADED, settings={"zero_optimization": offload}))
        on_rank(CHECKPOINT, 0, 1, save=folder)
        digests = [on_rank(CHECKPOINT, *span)["digests"] for span in ((1, 2, folder), (0, 2))]
    return found, digests


def test_nan_in_unwritten_memory_changes_no_number(ranks: Any, tmp_path: Path) -> None:
    everyone = ranks(4, trained, str(tmp_path / "saved"), timeout=200)
    for number, cell in enumerate([*CELLS, OFFLOADED]):
        lines = differences([found[number] for found, _ in everyone], cell)
        assert not lines, f"{cell}: " + "\n".join(lines[:5])
    for _, (resumed, whole) in everyone:
        assert resumed == whole and resumed
