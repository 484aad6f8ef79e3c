"""Checkpoints beside torch.distributed.checkpoint: time and bytes of saving and loading, and what a save costs a run.

    python benchmarks/checkpoint.py                  # 25 million parameters on 2 ranks
    python benchmarks/checkpoint.py --width 256 --layers 4 --rounds 2

One run, the same disk, the same model (blocks of two linears) and AdamW in fp32, sharded over the ranks: triax in stage
3 of ZeRO, torch as FSDP2 with ``torch.distributed.checkpoint``. Rounds take turns; what is quoted is the median of the
slowest rank's time. Both write to the disk (fsync) before they return. After each round both are loaded into other
weights, which must then be those that were saved.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

import triax
from triax.engine.launch import launch

MICRO = 4


class Block(nn.Module):
    """A residual block of two linears: 8 width^2 parameters."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """(B, width) -> (B, width)."""
        y: Tensor = x + self.down(torch.relu(self.up(x)))
        return y


def model(options: Any, seed: int = 0) -> nn.Sequential:
    """The same weights for the same seed."""
    torch.manual_seed(seed)
    return nn.Sequential(*(Block(options.width) for _ in range(options.layers)))


def engine(options: Any, seed: int = 0, **section: Any) -> Any:
    """triax, in stage 3."""
    config = {
        "train_micro_batch_size_per_gpu": MICRO,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": 3},
        "checkpoint": section,
    }
    return triax.initialize(model=model(options, seed), config=config)[0]


def step(trained: Any, x: Tensor) -> None:
    """One step of triax's."""
    trained.backward(trained(x).square().mean())
    trained.step()


def peer(options: Any, x: Tensor, seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    """FSDP2 and AdamW, after a step."""
    made = model(options, seed)
    for block in made:
        fully_shard(block)
    fully_shard(made)
    optimizer = torch.optim.AdamW(made.parameters(), lr=1e-3)
    made(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    return made, optimizer


def timed(call: Callable[[], object]) -> float:
    """Seconds of the slowest rank."""
    dist.barrier()
    start = time.perf_counter()
    call()
    took = torch.tensor([time.perf_counter() - start])
    dist.all_reduce(took, op=dist.ReduceOp.MAX)
    return float(took)


def measure(options: Any, folder: str) -> None:
    """What each rank does; the first one prints."""
    grid = triax.Grid()
    x = torch.randn(MICRO, options.width, generator=torch.Generator().manual_seed(grid.rank))
    ours, behind = engine(options), engine(options, **{"async": True})
    step(ours, x)
    step(behind, x)
    theirs, optimizer = peer(options, x)
    fresh, (other, other_optimizer) = engine(options, 1), peer(options, x, 1)
    found: dict[str, list[float]] = {}

    def save_theirs() -> None:
        weights, state = get_state_dict(theirs, optimizer)
        dcp.save({"model": weights, "optimizer": state}, checkpoint_id=f"{folder}/dcp")

    def load_theirs() -> None:
        weights, state = get_state_dict(other, other_optimizer)
        both: dict[str, Any] = {"model": weights, "optimizer": state}
        dcp.load(both, checkpoint_id=f"{folder}/dcp")
        set_state_dict(other, other_optimizer, model_state_dict=both["model"], optim_state_dict=both["optimizer"])

    def steps() -> None:
        for _ in range(options.steps):
            step(behind, x)

    def steps_and_save() -> None:
        behind.save_checkpoint(f"{folder}/behind", "a")
        steps()

    jobs: dict[str, Callable[[], object]] = {
        "triax save": lambda: ours.save_checkpoint(f"{folder}/triax", "a"),
        "DCP save": save_theirs,
        "triax load": lambda: fresh.load_checkpoint(f"{folder}/triax", "a"),
        "DCP load": load_theirs,
        f"{options.steps} steps": steps,
        f"{options.steps} steps, saving behind": steps_and_save,
        "rest of that save": behind.wait_for_checkpoint,
    }
    for turn in range(options.rounds + 1):
        if grid.rank == 0:
            for name in ("triax", "dcp"):
                shutil.rmtree(f"{folder}/{name}", ignore_errors=True)
        for name, job in jobs.items():
            took = timed(job)
            if turn:  # the first one warms up
                found.setdefault(name, []).append(took)
    a, b = ours.gather(), fresh.gather()
    assert all(torch.equal(a[name], b[name]) for name in a), "what was loaded is not what was saved"
    for one, another in zip(theirs.parameters(), other.parameters(), strict=True):
        assert torch.equal(one.to_local(), another.to_local())  # type: ignore[attr-defined]
    if grid.rank == 0:
        parameters = sum(weight.numel() for weight in a.values())
        sizes = {name: sum(p.stat().st_size for p in Path(folder, name).rglob("*")) for name in ("triax", "dcp")}
        report = {
            "parameters": parameters,
            "ranks": grid.size,
            "median seconds": {name: round(median(times), 4) for name, times in found.items()},
            "bytes a parameter": {name: round(size / parameters, 3) for name, size in sizes.items()},
            "rounds": {name: [round(each, 4) for each in times] for name, times in found.items()},
        }
        print(json.dumps(report, indent=1))
    grid.close()


def main() -> None:
    """Start the ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=20, help="that a save behind the run has")
    parser.add_argument("--folder", default=None, help="on the disk to measure")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        sys.exit(launch(measure, options, folder, ranks=options.ranks, threads=1))


if __name__ == "__main__":
    main()
