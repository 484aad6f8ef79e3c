"""The laws of the numbers on an accelerator with NCCL's rules, which tests/support/simulated_*.py simulate."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
from torch import Tensor
from torch.utils._pytree import tree_map

from five_axes import Cell, Found, Job, Place, differences, run

# Where the host waits for the device in the step of a pipeline, and why.
REASONS = {
    "agreement/agreement.py": "loss, norm and overflow are read together once a step",
    "zero/flat_weights.py": "writes into gathered weights are looked for in the runs 1, 2, 4, 8, ... of a layer",
    "pipe/backward.py": "the two ways of a split backward are compared in the first step",
}


def on_device(cells: Sequence[Cell]) -> tuple[list[Found], list[str], list[str]]:
    """Train cells on the simulated device. Return what they found on the CPU, the host's waits, and the faults."""
    from simulated_device import simulated

    with simulated() as device:
        found = run(cells)
        moved = [Found(**{name: tree_map(to_cpu, value) for name, value in _fields(each).items()}) for each in found]
        return moved, device.waits, device.faults


def _fields(found: Found) -> dict[str, Any]:
    return {field.name: getattr(found, field.name) for field in dataclasses.fields(found)}


def to_cpu(value: Any) -> Any:
    return value.cpu() if isinstance(value, Tensor) else value


CELLS = [
    (Job(True, "batch", True, True, True), Place(1, 1, 2, 1, 2, "ring", 3, microbatches=2)),
    (Job(), Place(1, 2, 1, 1, 2, stage=2, microbatches=4)),
    (Job(), Place(1, 1, 1, 2, sequence_parallel=True, stage=1, microbatches=2)),
    (Job(tied=True), Place(2, 1, 1, 1, schedule="zb-v", microbatches=4)),
    (Job(True, "batch", True, True, True), Place(2, 1, 2, 1, 2, "ulysses", 1, "zb-v", microbatches=2)),
    (Job(True, "batch", True, True, True), Place(1, 1, 2, 2, 2, "gather", 2, "1f1b", True, True, 2)),
    (Job(), Place(2, 2, 1, 1, 2, "ring", 3, "interleaved", microbatches=2)),
]


@pytest.mark.parametrize("count", [2, 4])
def test_five_axes_on_the_device_are_one_process(ranks: Any, count: int) -> None:
    cells = [cell for cell in CELLS if cell[1].ranks == count]
    everyone = ranks(count, on_device, cells, init_group=False, timeout=200)
    lines = [
        line for index, cell in enumerate(cells) for line in differences([found[index] for found, *_ in everyone], cell)
    ]
    assert not lines
    for _, waits, faults in everyone:
        assert not faults
        print(sorted(set(waits)))
