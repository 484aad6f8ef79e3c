"""Contenders that save and load in benchmarks/checkpoint.py: triax, FSDP2 with DCP, DeepSpeed; one model, AdamW."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from rounds import deepspeed_engine, quiet
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

import triax

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
    """Make the model; equal seeds give equal weights."""
    torch.manual_seed(seed)
    return nn.Sequential(*(Block(options.width) for _ in range(options.layers)))


def batch(options: Any) -> Tensor:
    """This rank's: (samples, width)."""
    return torch.randn(options.samples, options.width, generator=torch.Generator().manual_seed(dist.get_rank()))


def engine(options: Any, seed: int = 0, **section: Any) -> Any:
    """triax, in stage 3."""
    config = {
        "train_micro_batch_size_per_gpu": options.samples,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": 3},
        "checkpoint": section,
    }
    return triax.initialize(model=model(options, seed), config=config)[0]


def step(trained: Any, x: Tensor) -> None:
    """One step of triax's, or of DeepSpeed's."""
    trained.backward(trained(x).square().mean())
    trained.step()


class Saver(Protocol):
    """Sharded over the ranks, after one step; another one of other weights takes what it has saved."""

    def save(self, folder: str) -> object:
        """Write everything to a folder, and have it reach the disk. Every rank calls it."""

    def load(self, folder: str) -> object:
        """Read it into the other one."""

    def check(self) -> None:
        """Both hold the same."""


class Triax:
    """triax in stage 3 of ZeRO."""

    def __init__(self, options: Any) -> None:
        self.one, self.other = engine(options), engine(options, 1)
        step(self.one, batch(options))

    def save(self, folder: str) -> object:
        return self.one.save_checkpoint(folder, "a")

    def load(self, folder: str) -> object:
        return self.other.load_checkpoint(folder, "a")

    def check(self) -> None:
        a, b = self.one.gather(), self.other.gather()
        assert all(torch.equal(a[name], b[name]) for name in a), "what was loaded is not what was saved"


class Dcp:
    """FSDP2, and torch.distributed.checkpoint, which waits for the disk too."""

    def __init__(self, options: Any) -> None:
        self.one, self.other = self._made(options, 0), self._made(options, 1)

    @staticmethod
    def _made(options: Any, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        made = model(options, seed)
        for block in made:
            fully_shard(block)
        fully_shard(made)
        optimizer = torch.optim.AdamW(made.parameters(), lr=1e-3)
        made(batch(options)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        return made, optimizer

    def save(self, folder: str) -> object:
        weights, state = get_state_dict(*self.one)
        return dcp.save({"model": weights, "optimizer": state}, checkpoint_id=folder)

    def load(self, folder: str) -> object:
        weights, state = get_state_dict(*self.other)
        both: dict[str, Any] = {"model": weights, "optimizer": state}
        dcp.load(both, checkpoint_id=folder)
        return set_state_dict(*self.other, model_state_dict=both["model"], optim_state_dict=both["optimizer"])

    def check(self) -> None:
        for mine, its in zip(self.one[0].parameters(), self.other[0].parameters(), strict=True):
            assert torch.equal(mine.to_local(), its.to_local())  # type: ignore[attr-defined]


class DeepSpeed:
    """DeepSpeed's engine in stage 3, which leaves the files to the system: here each rank waits for its own."""

    def __init__(self, options: Any) -> None:
        self.one, self.other = self._made(options, 0), self._made(options, 1)

    @staticmethod
    def _made(options: Any, seed: int) -> Any:
        made = model(options, seed)
        found = deepspeed_engine(
            *(made, torch.optim.AdamW(made.parameters(), lr=1e-3), options.samples),
            zero_allow_untested_optimizer=True,
            zero_optimization={"stage": 3, "stage3_param_persistence_threshold": 0},
        )
        step(found, batch(options))
        return found

    def save(self, folder: str) -> object:
        with quiet():
            self.one.save_checkpoint(folder, "a")
        for path in Path(folder, "a").glob(f"*_rank_{dist.get_rank()}_*"):
            file = os.open(path, os.O_RDONLY)
            os.fsync(file)
            os.close(file)
        return dist.barrier()

    def load(self, folder: str) -> object:
        with quiet():
            return self.other.load_checkpoint(folder, "a")

    def check(self) -> None:
        for mine, its in zip(self.one.module.parameters(), self.other.module.parameters(), strict=True):
            assert torch.equal(mine.ds_tensor, its.ds_tensor)


def savers(options: Any) -> Iterator[tuple[str, Callable[[], Saver]]]:
    """Names, and how to make them."""
    yield "triax", lambda: Triax(options)
    yield "DCP", lambda: Dcp(options)
    yield "DeepSpeed", lambda: DeepSpeed(options)
