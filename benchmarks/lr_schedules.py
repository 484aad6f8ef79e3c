"""triax's learning-rate schedules beside DeepSpeed's: the largest difference over 1,000 steps.

    pip install -e '.[bench]'
    python benchmarks/lr_schedules.py

Both set the learning rates of an AdamW with two parameter groups; compared is what each step is taken with. Adam's
momentum, which OneCycle moves, is compared from the second step on: DeepSpeed's code starts it at the wrong end.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from deepspeed.runtime import lr_schedules as theirs
from torch import nn

from triax.compat.deepspeed import lr_schedules as ours

STEPS = 1000
CYCLE = {"cycle_min_lr": 1e-4, "cycle_max_lr": 1e-2}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("WarmupLR", {}),
    ("WarmupLR", {"warmup_min_lr": 1e-5, "warmup_max_lr": 2e-3, "warmup_num_steps": 37, "warmup_type": "linear"}),
    ("WarmupLR", {"warmup_max_lr": [1e-3, 2e-3], "warmup_num_steps": 1}),
    ("WarmupDecayLR", {"total_num_steps": 800, "warmup_num_steps": 100}),
    ("WarmupDecayLR", {"total_num_steps": 800, "warmup_num_steps": 100, "warmup_type": "linear", "warmup_max_lr": 0.1}),
    ("WarmupDecayLR", {"total_num_steps": 50, "warmup_num_steps": 100}),
    ("WarmupCosineLR", {"total_num_steps": 900, "warmup_num_steps": 100}),
    (
        "WarmupCosineLR",
        {"total_num_steps": 900, "warmup_min_ratio": 0.1, "cos_min_ratio": 0.01, "warmup_num_steps": 50},
    ),
    ("WarmupCosineLR", {"total_num_steps": 10, "warmup_num_steps": 20, "warmup_type": "linear"}),
    ("LRRangeTest", {}),
    ("LRRangeTest", {"lr_range_test_min_lr": [1e-4, 1e-3], "lr_range_test_step_size": 30}),
    ("LRRangeTest", {"lr_range_test_step_rate": 5.0, "lr_range_test_step_size": 7, "lr_range_test_staircase": True}),
    ("OneCycle", CYCLE),
    ("OneCycle", {**CYCLE, "cycle_first_step_size": 133, "cycle_second_step_size": 277, "decay_lr_rate": 0.3}),
    ("OneCycle", {**CYCLE, "cycle_first_step_size": 133, "decay_lr_rate": 0.3, "decay_step_size": 17}),
    ("OneCycle", {**CYCLE, "cycle_first_step_size": 99, "decay_step_size": 17, "decay_mom_rate": 1e-4}),
    ("OneCycle", {**CYCLE, "cycle_first_step_size": 200, "cycle_first_stair_count": 7, "cycle_second_stair_count": 3}),
    ("OneCycle", {**CYCLE, "cycle_first_step_size": 130, "cycle_second_step_size": 0, "cycle_first_stair_count": 13}),
]


def optimizer() -> torch.optim.AdamW:
    """Two parameter groups with rates of their own."""
    groups = [{"params": [nn.Parameter(torch.ones(1))], "lr": lr} for lr in (3e-3, 1e-4)]
    made = torch.optim.AdamW(groups, betas=(0.9, 0.99))
    made.step()
    return made


def compared(name: str, params: dict[str, Any]) -> tuple[float, float]:
    """The largest relative difference of a learning rate, and the largest difference of a momentum."""
    peer, mine = optimizer(), optimizer()
    schedules = getattr(theirs, name)(peer, **params), getattr(ours, name)(mine, **params)
    rate = momentum = 0.0
    for step in range(STEPS):
        for a, b in zip(peer.param_groups, mine.param_groups, strict=True):
            if a["lr"] != b["lr"]:
                rate = max(rate, abs(a["lr"] - b["lr"]) / max(abs(a["lr"]), abs(b["lr"])))
            if step:
                momentum = max(momentum, abs(a["betas"][0] - b["betas"][0]))
        for schedule in schedules:
            schedule.step()
    return rate, momentum


def main() -> None:
    """Print a line for each case."""
    logging.disable(logging.WARNING)  # DeepSpeed warns where a schedule has not started
    found = []
    for name, params in CASES:
        found.append(compared(name, params))
        print(f"{name:15s} rate {found[-1][0]:.1e}, momentum {found[-1][1]:.1e}  {params}")
    print(f"largest: rate {max(rate for rate, _ in found):.1e}, momentum {max(mom for _, mom in found):.1e}")


if __name__ == "__main__":
    main()
