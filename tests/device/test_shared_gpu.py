"""Several ranks on one GPU, by way of host memory: schedules, streams and messages on the device, not speed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import triax

from device.jobs import furthest, train_gpt

pytestmark = pytest.mark.device


def trained(sizes: tuple[int, int, int], where: str, **config: Any) -> Any:
    grid = triax.Grid(*sizes, device=where, timeout=120)
    return train_gpt(grid, "float64", **config), type(grid.world.transport).__name__


CELLS = [
    ((2, 1, 1), {"pipeline": {"schedule": "1f1b"}}),
    ((2, 1, 1), {"pipeline": {"schedule": "zb-v"}, "chunks": 2}),
    ((4, 1, 1), {"pipeline": {"schedule": "zb-h1"}}),
    ((2, 1, 1), {"pipeline": {"schedule": "interleaved"}, "chunks": 2}),
    ((1, 2, 1), {"zero_optimization": {"stage": 1}}),
    ((1, 2, 1), {"zero_optimization": {"stage": 2}}),
    ((1, 2, 1), {"zero_optimization": {"stage": 3}}),
    ((1, 1, 2), {"zero_optimization": {"stage": 0}}),
    ((2, 2, 1), {"zero_optimization": {"stage": 2}, "pipeline": {"schedule": "1f1b"}}),
    ((2, 2, 2), {"zero_optimization": {"stage": 1}, "pipeline": {"schedule": "zb-v"}, "chunks": 2}),
]


@pytest.mark.parametrize(("sizes", "config"), CELLS, ids=lambda value: str(value).replace(" ", ""))
def test_ranks_of_one_gpu_train_as_one_process(
    ranks: Any, device: torch.device, sizes: tuple[int, int, int], config: dict[str, Any]
) -> None:
    wanted = train_gpt(triax.Grid(device="cpu"), "float64")
    where = str(device) if device.type == "cuda" else "cpu"
    processes = sizes[0] * sizes[1] * sizes[2]
    for found, transport in ranks(processes, trained, sizes, where, timeout=240, **config):
        assert transport == ("HostTransport" if device.type == "cuda" else "Transport")
        assert found.losses == pytest.approx(wanted.losses, rel=1e-10)
        assert furthest(found.gradients, wanted.gradients) < 1e-10
        assert furthest(found.weights, wanted.weights) < 1e-10
