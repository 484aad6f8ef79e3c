"""Optimizer state in bf16, int8 and int4: the papers' codes, and one process's bits on every grid."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import triax
from triax import ColumnParallelLinear, Grid, LayerSpec, Layout, PipelineModule, RowParallelLinear
from triax.base.errors import ConfigError
from triax.checkpoint.format.index import read_index
from triax.checkpoint.reader import Reader
from triax.compat.deepspeed.utils import safe_get_full_optimizer_state, safe_set_full_optimizer_state
from triax.zero.flat import BLOCK
from triax.zero.offload import Memory
from triax.zero.stored_state import code_values, kind_of_state, stored_state

from support.differences import largest
from support.toys import error_text
from support.training import assert_steps_equal, microbatches, pipeline_engine, text_batches, tiny_gpt, train

WIDTH, ROWS, MICROBATCH, STEPS = 256, 8, 2, 2


def test_stored_state_codes_equal_those_of_bitsandbytes() -> None:
    """The lowest code differs: -1 for values of both signs, 1e-7 for squares."""
    dynamic_map = pytest.importorskip("bitsandbytes.functional").create_dynamic_map
    for bits, signed, exponents in ((8, True, 7), (8, False, 7), (4, True, 3)):
        found, wanted = code_values(bits, signed), dynamic_map(signed, exponents, bits).unique()  # filled up with zeros
        torch.testing.assert_close(found[1:], wanted[1:], rtol=1e-6, atol=1e-9)
        assert found[0] == pytest.approx(-1 if signed else 1e-7)


@pytest.mark.parametrize(("kind", "bits"), [("int8", 8), ("int4", 4)])
@pytest.mark.parametrize("key", ["exp_avg", "exp_avg_sq"])
def test_stored_state_is_rounded_to_the_nearest_code(kind: str, bits: int, key: str) -> None:
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


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_parameters_of_4096_elements_and_more_have_codes(kind: str) -> None:
    """As with ``min_8bit_size`` of bitsandbytes."""
    kinds = [kind_of_state(kind, Layout(shape), torch.float32, 1, 1) for shape in ((4095,), (4096,), (65, 64))]
    assert kinds == [None, kind, kind]


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


def branches_engine(grid: Grid, kind: Any, zero: dict[str, Any], name: str = "AdamW") -> Any:
    module = PipelineModule([LayerSpec(Branches)], grid=grid, loss_fn=weighted_sum, seed=5)
    optimizer = triax.Optimizer(name, lr=0.01, state=kind)
    return triax.Engine(module, optimizer=optimizer, batch=triax.Batch(size=ROWS, microbatch=MICROBATCH), zero=zero)


def exact_batches(grid: Grid, steps: int) -> Any:
    """Integers, whose products and sums are exact in fp32: every grid has the gradients of one process, bit by bit."""
    generator = torch.Generator().manual_seed(4)
    values = torch.randint(-8, 9, (steps, 2, ROWS, WIDTH), generator=generator).float()
    return microbatches(grid, [tuple(step) for step in values], MICROBATCH)


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
            for _ in range(STEPS * ROWS // grid.data.size // MICROBATCH):
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
    (2, {"stage": 2, "offload_optimizer": "cpu", "sub_group_size": 1100}),  # 17 blocks of codes, and a part of one
]


@pytest.mark.parametrize(
    ("kind", "places"),
    [("bf16", CELLS[:4:3]), ("int8", [*CELLS[1:5:2], CELLS[6]]), ("int4", [CELLS[2], CELLS[4], CELLS[5]])],
    ids=["bf16", "int8", "int4"],
)
def test_stored_state_is_bitwise_equal_on_every_grid_and_stage(
    ranks: Any, tmp_path: Path, kind: str, places: list[tuple[int, dict[str, Any]]]
) -> None:
    """Weights and state, in cells from the start, and after a checkpoint of one process. The sweep has all cells."""
    alone, on_four, later = tmp_path / "alone", tmp_path / "four", tmp_path / "later"
    trained(alone, [(1, kind, {})])
    (tmp_path / "start").mkdir()
    (alone / "0").rename(tmp_path / "start" / kind)
    trained(alone, [(1, kind, {})], tmp_path / "start")
    cells = [(tensor, kind, zero) for tensor, zero in places]
    ranks(4, trained, on_four, cells)
    ranks(4, trained, later, cells, tmp_path / "start")
    first, last = saved_state(tmp_path / "start" / kind), saved_state(alone / "0")
    assert {"optimizer/exp_avg/layers.0.row.weight", "weights/layers.0.column.bias"} <= first.keys()
    for number in range(len(cells)):
        torch.testing.assert_close(saved_state(on_four / str(number)), first, rtol=0, atol=0, msg=str(cells[number]))
        torch.testing.assert_close(saved_state(later / str(number)), last, rtol=0, atol=0, msg=str(cells[number]))


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["bf16", "int8", "int4"])
@pytest.mark.parametrize("tensor", [1, 2, 4])
def test_each_stage_and_group_has_the_bits_of_one_process(ranks: Any, tmp_path: Path, kind: str, tensor: int) -> None:
    trained(tmp_path / "alone", [(1, kind, {})])
    alone = saved_state(tmp_path / "alone" / "0")
    sizes = [size for size in (None, 1, 2, 4) if size is None or 4 // tensor % size == 0]
    zeros: list[dict[str, Any]] = [
        {"stage": stage, "offload_optimizer": offload, "sub_group_size": 20000, "shard_size": size if stage else None}
        for stage in range(4)
        for offload in ("none", "cpu")
        for size in (sizes if stage else sizes[:1])
    ]
    ranks(4, trained, tmp_path / "ranks", [(tensor, kind, zero) for zero in zeros], timeout=240)
    for number, zero in enumerate(zeros):
        torch.testing.assert_close(saved_state(tmp_path / "ranks" / str(number)), alone, rtol=0, atol=0, msg=str(zero))


def gpt_steps(cells: list[tuple[int, int, dict[str, Any]]], kind: Any) -> list[Any]:
    found = []
    for pipe, tensor, zero in cells:
        grid = Grid(pipe=pipe, tensor=tensor, timeout=60)
        module = tiny_gpt(grid, hidden_size=128, num_hidden_layers=2, vocab_size=64)
        optimizer = triax.Optimizer("AdamW", lr=1e-2, state=kind)
        engine = pipeline_engine(module, triax.Batch(size=8, microbatches=2), optimizer=optimizer, zero=zero, clip=0.1)
        found.append(train(engine, microbatches(grid, text_batches(64, 8, 8, 2), 8 // grid.data.size // 2), 2))
    return found


@pytest.mark.parametrize("kind", ["bf16", "int8", "int4"])
def test_a_gpt_with_stored_state_trains_as_on_one_process(ranks: Any, kind: str) -> None:
    [alone] = gpt_steps([(1, 1, {})], kind)
    [full] = gpt_steps([(1, 1, {})], kind=None)
    moved = [
        largest((value - other.weights[name]).abs().max() for name, value in step.weights.items())
        for step, other in zip(alone, full, strict=True)
    ]
    assert moved[0] < 1e-12 and moved[1] > 1e-6, "the first step reads no state, the second does"
    cells = [(2, 1, {"stage": 1}), (1, 2, {"stage": 3}), (1, 1, {"stage": 2, "shard_size": 2})]
    for rank in ranks(4, gpt_steps, cells if kind == "int8" else cells[:1], kind):
        for steps in rank:
            assert_steps_equal(steps, alone)


def moved_between_kinds(folder: str, kinds: list[str | None]) -> list[dict[str, Tensor]]:
    """Take three steps with the first kind, save, load with the next one, save, ...; return the states as saved."""
    found = []
    for number, kind in enumerate(kinds):
        engine = branches_engine(Grid(), "bf16" if kind is None else kind, {"stage": 1})
        if kind is None:
            engine = triax.Engine(
                PipelineModule([LayerSpec(Branches)], loss_fn=weighted_sum, seed=5),
                optimizer=triax.Optimizer("AdamW", lr=0.01),
                batch=triax.Batch(size=ROWS, microbatch=MICROBATCH),
            )
        if number:
            engine.load_checkpoint(Path(folder) / str(number - 1))
        else:
            for _ in range(STEPS):
                engine.train_batch(exact_batches(engine.grid, 1))
        engine.save_checkpoint(Path(folder) / str(number))
        found.append(saved_state(Path(folder) / str(number)))
    return found


@pytest.mark.parametrize("kind", ["bf16", "int8", "int4"])
def test_checkpoints_move_between_full_and_fewer_bits(tmp_path: Path, kind: str) -> None:
    full, fewer, again, back = moved_between_kinds(str(tmp_path), [None, kind, None, kind])
    for name, value in full.items():
        near = torch.linalg.vector_norm(fewer[name] - value) / torch.linalg.vector_norm(value)
        assert near <= {"bf16": 2e-3, "int8": 2e-2, "int4": 0.2}[kind], name
    torch.testing.assert_close(again, fewer, rtol=0, atol=0)
    torch.testing.assert_close(back, fewer, rtol=0, atol=0)


@pytest.mark.parametrize(("kind", "bytes_of_64"), [("bf16", 128), ("int8", 68), ("int4", 36)])
def test_the_memory_report_counts_the_bytes_of_stored_state(kind: str, bytes_of_64: int) -> None:
    engine = branches_engine(Grid(), kind, {"stage": 1})
    engine.train_batch(exact_batches(engine.grid, 1))
    coded, biases = 2 * WIDTH * WIDTH, 2 * WIDTH
    small = biases * (2 if kind == "bf16" else 4)
    report = engine.memory_report()
    assert report["held"]["optimizer"] == 2 * (coded // BLOCK * bytes_of_64 + small)
    assert report["formula"]["optimizer"] == 2 * (coded + biases) // BLOCK * bytes_of_64


@pytest.mark.parametrize(
    ("optimizer", "words"),
    [
        (triax.Optimizer("Adafactor", lr=0.1, state="int4"), "the state of Adafactor is not one number an element"),
        (triax.Optimizer("OneBitAdam", lr=0.1, state="int8"), "the state of OneBitAdam is not one number an element"),
    ],
)
def test_optimizers_with_state_of_other_shapes_refuse_codes(optimizer: Any, words: str) -> None:
    module = PipelineModule([LayerSpec(nn.Linear, 4, 4)], loss_fn=weighted_sum)
    assert words in error_text(lambda: triax.Engine(module, optimizer=optimizer, batch=1), ConfigError)


def engine_of_narrow_shards() -> str:
    grid = Grid(tensor=2)
    layer = LayerSpec(RowParallelLinear, 96, 64, grid=grid)
    module = PipelineModule([layer], grid=grid, loss_fn=weighted_sum)
    optimizer = triax.Optimizer("AdamW", lr=0.1, state="int8")
    return error_text(lambda: triax.Engine(module, optimizer=optimizer, batch=1))


def test_a_tensor_shard_that_cuts_a_block_is_refused(ranks: Any) -> None:
    words = "a shard of layers.0.weight of shape [64, 96] begins or ends within them, because dim 1 is cut into 2"
    assert all(words in text for text in ranks(2, engine_of_narrow_shards))


def test_deepspeeds_functions_read_and_set_stored_state() -> None:
    engine = branches_engine(Grid(), "int8", {"stage": 1})
    engine.train_batch(exact_batches(engine.grid, 1))
    weight = next(engine.module.parameters())
    before = safe_get_full_optimizer_state(weight, "exp_avg")
    assert before is not None
    safe_set_full_optimizer_state(weight, 2 * before, "exp_avg")
    assert torch.equal(safe_get_full_optimizer_state(weight, "exp_avg"), 2 * before)


def branches_weights(cells: list[tuple[int, Any, dict[str, Any]]], name: str) -> list[dict[str, Tensor]]:
    found = []
    for tensor, kind, zero in cells:
        engine = branches_engine(Grid(tensor=tensor, timeout=60), kind, zero, name)
        data = exact_batches(engine.grid, STEPS)
        for _ in range(STEPS):
            engine.train_batch(data)
        found.append(engine.gather())
    return found


@pytest.mark.parametrize("name", ["Muon", "Lamb", "Lion"])
def test_other_optimizers_step_coded_state_as_one_process(ranks: Any, name: str) -> None:
    [full, alone] = branches_weights([(1, None, {}), (1, "int8", {})], name)
    assert not torch.equal(full["layers.0.row.weight"], alone["layers.0.row.weight"])
    cells: list[Any] = [(2, "int8", {"stage": 3, "offload_optimizer": "cpu"})]
    cells += [(1, "int8", {"stage": 1})] if name == "Lamb" else []  # norms of layers
    for rank in ranks(4, branches_weights, cells, name):
        for weights in rank:
            torch.testing.assert_close(weights, alone, rtol=1e-5, atol=1e-6)


class Thawing(nn.Module):
    """Three layers. The first is frozen in two steps; the second has no gradient in every second step."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.first, self.second, self.last = (nn.Linear(80, 80, dtype=torch.float64) for _ in range(3))

    def forward(self, x: Tensor, second: bool) -> Tensor:
        x = torch.tanh(self.first(x))
        y: Tensor = self.last(x + self.second(x) if second else x)
        return y


def thawed(kind: Any, zeros: list[dict[str, Any]]) -> list[dict[str, Tensor]]:
    found = []
    for zero in zeros:
        grid = Grid(timeout=60)
        optimizer = triax.Optimizer("AdamW", lr=1e-2, state=kind)
        engine = triax.Engine(Thawing(), grid=grid, optimizer=optimizer, batch=8, zero=zero)
        for step in range(6):
            engine.module.first.requires_grad_(step >= 2)
            x = torch.randn(8, 80, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
            engine.backward(engine(x.chunk(grid.data.size)[grid.data.rank], step % 2 == 0).square().mean())
            engine.step()
        found.append(engine.gather())
    return found


def test_late_parameters_have_codes_and_counts_of_their_own(ranks: Any) -> None:
    """Each layer is as if it had a bucket, and so a step count, of its own."""
    [apart] = thawed("int8", [{"stage": 1, "bucket_size": 1}])
    [full] = thawed(None, [{"stage": 1, "bucket_size": 1}])
    for name, weight in apart.items():
        assert torch.linalg.vector_norm(weight - full[name]) < 0.02 * torch.linalg.vector_norm(full[name]), name
    for rank in ranks(2, thawed, "int8", [{"stage": 2}, {"stage": 3, "sub_group_size": 640}]):
        for weights in rank:
            torch.testing.assert_close(weights, apart, rtol=1e-10, atol=1e-12)


def coded(x: Tensor, bits: int, signed: bool) -> Tensor:
    """Return the nearest coded values of blocks of 64 elements, by their distances to all values."""
    blocks, values = x.flatten().view(-1, BLOCK), code_values(bits, signed).double()
    scales = blocks.abs().amax(1, keepdim=True).float().double()
    return (values[(blocks[..., None] - values * scales[..., None]).abs().argmin(-1)] * scales).view_as(x)


@pytest.mark.parametrize(("kind", "bits"), [("int8", 8), ("int4", 4)])
def test_steps_equal_torchs_adamw_whose_moments_are_coded(kind: Any, bits: int) -> None:
    torch.manual_seed(6)
    model = nn.Linear(80, 64, dtype=torch.float64)
    plain = nn.Linear(80, 64, dtype=torch.float64)
    plain.load_state_dict(model.state_dict())
    engine = triax.Engine(model, optimizer=triax.Optimizer("AdamW", lr=1e-2, state=kind), batch=8)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    for _ in range(5):
        x = torch.randn(8, 80, dtype=torch.float64)
        engine.backward(engine(x).square().mean())
        engine.step()
        optimizer.zero_grad()
        plain(x).square().mean().backward()
        optimizer.step()
        state = optimizer.state[plain.weight]  # the bias has less than 4,096 elements
        state["exp_avg"] = coded(state["exp_avg"], bits, signed=True)
        state["exp_avg_sq"] = coded(state["exp_avg_sq"], bits, signed=False)
    torch.testing.assert_close(engine.gather(), dict(plain.state_dict()), rtol=1e-10, atol=1e-12)
