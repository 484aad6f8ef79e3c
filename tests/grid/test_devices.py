"""The device that a rank takes, and moves of modules to it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import triax
from triax.base.accelerators import move_module
from triax.base.errors import ArgumentError
from triax.grid.devices import default_accelerator, gpu_descriptions


@pytest.mark.parametrize(
    ("device", "facts"),
    [
        ("cuda", ["'cuda'", "0 devices of the kind cuda", "device='cpu'"]),
        ("cuda:3", ["'cuda:3'", "0 devices of the kind cuda"]),
        ("xpu:1", ["'xpu:1'", "0 devices of the kind xpu"]),
        ("mps", ["'mps'", "no float64", "device='cpu'"]),
        ("cuda:one", ["'cuda:one'", "'cuda:0'"]),
        (7.5, ["7.5"]),
    ],
)
@pytest.mark.skipif(default_accelerator() is not None, reason="this machine has an accelerator")
def test_a_grid_on_a_missing_device_is_an_error(device: Any, facts: list[str]) -> None:
    with pytest.raises(ArgumentError) as caught:
        triax.Grid(device=device)
    assert all(fact in str(caught.value) for fact in facts)


def on_an_accelerator() -> dict[str, Any]:
    """Take devices of the simulated accelerator, and move a module to one."""
    from support.simulated_device import simulated

    with simulated():
        module: Any = nn.Linear(2, 3)
        module.weight.mark = "kept"
        weight = module.weight
        values = weight.detach().clone()
        moved = move_module(module, torch.device("sim:0"), torch.float64)
        with pytest.raises(ArgumentError, match=r"'sim:1', and this process sees 1 devices of the kind sim"):
            triax.Grid(device="sim:1")
        return {
            "default": str(triax.Grid().device),
            "without an index": str(triax.Grid(device="sim").device),
            "on the CPU": str(triax.Grid(device="cpu").device),
            "descriptions": gpu_descriptions(),
            "same": moved is module and module.weight is weight and weight.mark == "kept",
            "values": torch.equal(weight.detach().cpu(), values.double()),
            "place": (weight.device.type, weight.dtype),
        }


def test_a_grid_takes_any_accelerator_of_torch(ranks: Any) -> None:
    (found,) = ranks(1, on_an_accelerator, init_group=False, new_processes=True)
    assert found == {
        "default": "sim:0",
        "without an index": "sim:0",
        "on the CPU": "cpu",
        "descriptions": [("sim:0", "a simulated device, 16.0 GiB, bfloat16")],
        "same": True,
        "values": True,
        "place": ("sim", torch.float64),
    }
