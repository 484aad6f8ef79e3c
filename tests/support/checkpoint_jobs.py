"""Small training jobs that the tests of checkpoints save, load and compare."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import TensorDataset

import triax
from triax.checkpoint.format.folder import verify
from triax.checkpoint.format.index import read_index
from triax.checkpoint.reader import Reader
from triax.models.gpt import GPTConfig, GPTLoss, gpt_layers
from triax.models.llama import LlamaConfig, llama_layers
from triax.pipe.schedules.registry import RECIPES

from support.command_line import run_triax

# 8 entries, as long as the longest pipe axis; 8 heads for the widest tensor axis; 37 tokens divide by no axis.
VOCABULARY, LENGTH, BATCH, SAMPLES = 37, 8, 8, 24  # an epoch of 3 steps
SIZES = GPTConfig(VOCABULARY, LENGTH, 16, 4, 8, dropout=0.1)


@dataclass(frozen=True)
class Cell:
    """Grid and options with which a test trains the model."""

    grid: tuple[int, int, int] = (1, 1, 1)
    schedule: str = "1f1b"
    chunks: int = 1
    stage: int = 0
    offload: str = "none"
    sub_group: int | None = None
    sequence_parallel: bool = False
    bucket: int = 2000
    order: tuple[str, ...] = ("pipe", "data", "tensor")

    @property
    def ranks(self) -> int:
        pipe, data, tensor = self.grid
        return pipe * data * tensor

    @property
    def microbatches(self) -> int:
        """Microbatches of a replica in a step: of two samples, or of one if the schedule needs as many microbatches."""
        samples = BATCH // self.grid[1]
        return samples // 2 if samples // 2 >= RECIPES[self.schedule].least(self.grid[0]) else samples


@dataclass(frozen=True)
class Job:
    """Model, dtype and optimizer of a run."""

    family: str = "gpt"
    tied: bool = True
    optimizer: str = "AdamW"
    half: str = ""


PARAMS: dict[str, dict[str, Any]] = {
    "AdamW": {"lr": 1e-2, "weight_decay": 0.1, "amsgrad": True},
    "SGD": {"lr": 1e-1, "momentum": 0.9},
    "NAdam": {"lr": 1e-2},
    "Adafactor": {"lr": 1e-2},
}


def dataset() -> TensorDataset:
    generator = torch.Generator().manual_seed(5)
    text = torch.randint(VOCABULARY, (SAMPLES, LENGTH + 1), generator=generator)
    return TensorDataset(text[:, :-1], text[:, 1:])


def make(cell: Cell, job: Job, folder: str = "", seed: int = 7, **more: Any) -> Any:
    grid = triax.Grid(*cell.grid, order=cell.order, timeout=60)
    if job.family == "gpt":
        layers = gpt_layers(replace(SIZES, tie_word_embeddings=job.tied), sequence_parallel=cell.sequence_parallel)
    else:
        layers = llama_layers(
            LlamaConfig(
                VOCABULARY,
                LENGTH,
                16,
                5,
                8,
                num_key_value_heads=2,
                head_dim=2,
                intermediate_size=21,
                qkv_bias=True,
                dropout=0.1,
            ),
            sequence_parallel=cell.sequence_parallel,
        )
    dtype = torch.float32 if job.half else torch.float64
    model = triax.PipelineModule(
        layers, grid=grid, loss_fn=GPTLoss(grid, vocab_size=VOCABULARY), seed=seed, dtype=dtype, chunks=cell.chunks
    )
    place = {"device": cell.offload, **({"nvme_path": folder} if cell.offload == "nvme" else {})}
    config = {
        "train_batch_size": BATCH,
        "gradient_accumulation_steps": cell.microbatches,
        "gradient_clipping": 0.5,
        "optimizer": {"type": job.optimizer, "params": PARAMS[job.optimizer]},
        "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 4, "total_num_steps": 25}},
        "zero_optimization": {
            "stage": cell.stage,
            "reduce_bucket_size": cell.bucket,
            "offload_optimizer": place,
            **({"offload_param": place} if cell.stage == 3 else {}),
            **({"sub_group_size": cell.sub_group} if cell.sub_group else {}),
        },
        "pipeline": {"schedule": cell.schedule},
        "seed": 11,
        **({job.half: {"enabled": True}} if job.half else {}),
        **more,
    }
    return triax.initialize(model=model, config=config, training_data=dataset())[0]


Trace = tuple[list[float], dict[str, Tensor]]  # the losses, and the weights at the end; of rank 0


def begin(cell: Cell, job: Job, steps: int, folder: str, scratch: str) -> Trace:
    engine = make(cell, job, scratch)
    losses = [engine.train_batch().item() for _ in range(steps)]
    if folder:
        assert engine.save_checkpoint(folder, "there", client_state={"losses": losses})
    weights = engine.gather()
    return losses, weights if engine.grid.rank == 0 else {}


def tensors(folder: Path) -> dict[str, Tensor]:
    index = read_index(folder)
    assert not [*verify(folder, index)]
    found = Reader(folder, index).snapshot.tensors.items()
    return {name: each.read_all() for name, each in found if name.partition("/")[0] not in ("random", "client")}


@cache
def losses(steps: int) -> list[float]:
    engine = make(Cell(), Job())
    return [engine.train_batch().item() for _ in range(steps)]


command = partial(run_triax, "checkpoint")
