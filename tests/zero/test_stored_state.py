"""Optimizer state in bf16, int8 and int4: the papers' codes, and one process's bits on every grid."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import triax
from triax import ColumnParallelLinear, Grid, LayerSpec, PipelineModule, RowParallelLinear
from triax.base.errors import ConfigError
from triax.checkpoint.format.index import read_index
from triax.checkpoint.reader import Reader
from triax.zero.offload import Memory
from triax.zero.stored_state import BLOCK, code_values, stored_state

from support.toys import error_text
from support.training import assert_steps_equal, microbatches, pipeline_engine, text_batches, tiny_gpt, train

WIDTH, ROWS, STEPS = 256, 8, 3


def test_codes_are_those_of_bitsandbytes() -> None:
    """Except the lowest code of values of both signs, which is -1."""
    dynamic_map = pytest.importorskip("bitsandbytes.functional").create_dynamic_map
    for bits, signed, exponents in ((8, True, 7), (8, False, 7), (4, True, 3)):
        found, wanted = code_values(bits, signed), dynamic_map(signed, exponents, bits).unique()  # filled up with zeros
        torch.testing.assert_close(found[1:], wanted[1:], rtol=1e-6, atol=1e-9)
        assert found[0] == (-1 if signed else 0)


@pytest.mark.parametrize(("kind", "bits"), [("int8", 8), ("int4", 4)])
@pytest.mark.parametrize("key", ["exp_avg", "exp_avg_sq"])
def test_state_is_read_as_the_nearest_coded_values(kind: str, bits: int, key: str) -> None:
    signed = key == "exp_avg"
    x = torch.randn(10 * BLOCK, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    x = x * torch.logspace(-8, 3, 10 * BLOCK, dtype=torch.float64)
    x = x if signed else x.square()
    x[BLOCK : 2 * BLOCK] = 0
    stored = stored_state(kind, key, x.numel(), x.dtype, Memory("none", torch.device("cpu")))
    stored.write(0, x)
    read = stored.read(0, x.numel())
    scales = x.view(-1, BLOCK).abs().amax(1, keepdim=True).float().double()
    values = code_values(bits, signed).double()
    nearest = (x.view(-1, BLOCK, 1) - values * scales[..., None]).abs().argmin(-1)
    torch.testing.assert_close(read, (values[nearest] * scales).flatten(), rtol=1e-15, atol=0)
    assert sum(tensor.nbytes for tensor in stored.tensors()) == x.numel() * bits // 8 + 4 * x.numel() // BLOCK
    stored.write(0, read)
    assert torch.equal(stored.read(0, x.numel()), read), "what was read has other codes"


class Branches(nn.Module):
    """The sum of a column-parallel and a row-parallel linear, so that gradients do not depend on weights."""

    def __init__(self, *, grid: Grid) -> None:
        super().__init__()
        self.column = ColumnParallelLinear(WIDTH, WIDTH, grid=grid, gather_output=True)
        self.row = RowParallelLinear(WIDTH, WIDTH, grid=grid, input_is_parallel=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.column(x) + self.row(x)
        return y


def weighted_sum(outputs: Tensor, labels: Tensor) -> Tensor:
    return (outputs * labels).sum()


def branches_engine(grid: Grid, kind: str, zero: dict[str, Any]) -> Any:
    module = PipelineModule([LayerSpec(Branches)], grid=grid, loss_fn=weighted_sum, seed=5)
    optimizer = triax.Optimizer("AdamW", lr=0.01, state=kind)
    return triax.Engine(module, optimizer=optimizer, batch=triax.Batch(size=ROWS, microbatch=1), zero=zero)


def exact_batches(grid: Grid, steps: int) -> Any:
    """Integers, whose products and sums are exact in fp32: every grid has the gradients of one process, bit by bit."""
    generator = torch.Generator().manual_seed(4)
    values = torch.randint(-8, 9, (steps, 2, ROWS, WIDTH), generator=generator).float()
    return microbatches(grid, [tuple(step) for step in values])


def saved_state(folder: Path) -> dict[str, Tensor]:
    [path] = [path.parent for path in folder.glob("*/index.json")]
    tensors = Reader(path, read_index(path)).snapshot.tensors
    return {name: tensor.read_all() for name, tensor in tensors.items() if name.startswith(("weights", "optimizer"))}


def trained(folder: Path, cells: list[tuple[int, str, dict[str, Any]]], resumed: Path | None = None) -> None:
    """Train each cell (size of the tensor axis, kind of state, options of ZeRO), from its start or a checkpoint."""
    for number, (tensor, kind, zero) in enumerate(cells):
        grid = Grid(tensor=tensor, timeout=60)
        engine, data = branches_engine(grid, kind, zero), exact_batches(grid, 2 * STEPS)
        if resumed is not None:
            engine.load_checkpoint(resumed / kind)
            for _ in range(STEPS * ROWS // grid.data.size):
                next(data)
        for _ in range(STEPS):
            engine.train_batch(data)
        engine.save_checkpoint(folder / str(number))


CELLS: list[tuple[int, dict[str, Any]]] = [
    (1, {"stage": 0}),
    (2, {"stage": 1}),
    (4, {"stage": 0}),
    (2, {"stage": 3, "shard_size": 1}),
    (1, {"stage": 2, "shard_size": 2}),
    (1, {"stage": 3, "sub_group_size": 5000}),
    (2, {"stage": 2, "offload_optimizer": "cpu", "sub_group_size": 100}),
]


@pytest.mark.parametrize("kind", ["bf16", "int8", "int4"])
def test_every_grid_and_stage_has_the_bits_of_one_process(ranks: Any, tmp_path: Path, kind: str) -> None:
    """Weights and state, in each cell from the start, and after a checkpoint of one process."""
    alone, on_four, later = tmp_path / "alone", tmp_path / "four", tmp_path / "later"
    trained(alone, [(1, kind, {})])
    (tmp_path / "start").mkdir()
    (alone / "0").rename(tmp_path / "start" / kind)
    trained(alone, [(1, kind, {})], tmp_path / "start")
    cells = [(tensor, kind, zero) for tensor, zero in CELLS]
    ranks(4, trained, on_four, cells)
    ranks(4, trained, later, cells, tmp_path / "start")
    first, last = saved_state(tmp_path / "start" / kind), saved_state(alone / "0")
    assert {"optimizer/exp_avg/layers.0.row.weight", "weights/layers.0.column.bias"} <= first.keys()
    for number in range(len(cells)):
        torch.testing.assert_close(saved_state(on_four / str(number)), first, rtol=0, atol=0, msg=str(cells[number]))
        torch.testing.assert_close(saved_state(later / str(number)), last, rtol=0, atol=0, msg=str(cells[number]))
