"""Recomputation on grids: gradients, gathers of stage 3, sliced inputs, and the bytes that are held."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import triax
from triax import Grid, LayerSpec, PipelineModule
from triax.engine.monitor.profiler.memory_meter import MemoryMeter
from triax.models.gpt import GPTBlock, GPTConfig
from triax.pipe.recompute.kept_inputs import Inputs, KeptNest
from triax.pipe.recompute.recompute import Recompute
from triax.pipe.schedules.registry import RECIPES
from triax.testing.pool import RankFailure

from support.paper_formulas import gpt_activations, paper_activations
from support.training import small_config, tiny_gpt

SAMPLES, LENGTH, VOCABULARY = 4, 6, 37
Cell = tuple[str, int, int, bool, bool, dict[str, Any]]  # schedule, chunks, ZeRO, tied, sequence parallel, recompute


def train(grid: tuple[int, int, int], cells: list[Cell], steps: int = 1) -> list[tuple[float, dict[str, Tensor]]]:
    """Return for each cell the last step's loss and gradients: a GPT with dropout 0.1 in float64."""
    here, results = Grid(*grid, timeout=60), []
    text = torch.randint(VOCABULARY, (steps, SAMPLES, LENGTH + 1), generator=torch.Generator().manual_seed(3))
    for schedule, chunks, stage, tied, shards, section in cells:
        model = tiny_gpt(here, sequence_parallel=shards, dropout=0.1, tie_word_embeddings=tied, chunks=chunks)
        zero = {"stage": stage, "reduce_bucket_size": 2000}
        config = small_config("AdamW", 1e-2, batch=SAMPLES, micro=1, zero=zero, schedule=schedule, seed=11)
        config["activation_checkpointing"] = section
        engine, *_ = triax.initialize(model=model, config=config)
        share = SAMPLES // here.data.size
        mine = slice(here.data.rank * share, (here.data.rank + 1) * share)
        data = iter([(s[None, :-1], s[None, 1:]) for batch in text for s in batch[mine]])
        loss = [engine.train_batch(data).item() for _ in range(steps)][-1]
        gradients = engine.gather("gradients")
        results.append((loss, gradients if here.rank == 0 else {}))
    return results


SECTIONS: list[dict[str, Any]] = [
    {"interval": 1},
    {"granularity": "matmul", "interval": 2},
    {"granularity": "selective"},
    {"number_checkpoints": 3, "partition_activations": True, "contiguous_memory_optimization": True},
    {"interval": 3, "partition_activations": True, "cpu_checkpointing": True},
    {"interval": 100},
]


def require_equal_to_one_process(ranks: Any, grid: tuple[int, int, int], cells: list[Cell], steps: int = 1) -> None:
    """Equal to one process without recomputation, to 1e-10."""
    plain: dict[bool, Cell] = {tied: ("gpipe", 1, 0, tied, False, {}) for tied in {cell[3] for cell in cells}}
    wanted = {tied: train((1, 1, 1), [cell], steps)[0] for tied, cell in plain.items()}
    found = ranks(grid[0] * grid[1] * grid[2], train, grid, cells, steps, timeout=240)
    for i, cell in enumerate(cells):
        loss, gradients = wanted[cell[3]]
        assert [rank[i][0] for rank in found] == pytest.approx([loss] * len(found), rel=1e-10, abs=0), cell
        assert found[0][i][1].keys() == gradients.keys()
        for name, gradient in gradients.items():
            message = f"{cell} {name}: {{}}".format
            torch.testing.assert_close(found[0][i][1][name], gradient, rtol=1e-10, atol=1e-12, msg=message)


def test_recomputed_gradients_on_one_process_equal_plain_ones(ranks: Any) -> None:
    turns = zip(SECTIONS, itertools.cycle((("1f1b", 1, 0), ("zb-h1", 1, 3), ("zb-v", 2, 1))), strict=False)
    cells = [(*schedule, i % 2 == 0, False, section) for i, (section, schedule) in enumerate(turns)]
    require_equal_to_one_process(ranks, (1, 1, 1), cells)


@pytest.mark.parametrize("grid", [(2, 2, 1), (2, 1, 2)], ids=lambda g: "x".join(map(str, g)))
def test_recomputed_gradients_on_a_grid_equal_one_process(ranks: Any, grid: tuple[int, int, int]) -> None:
    """A part of the sweep below: each section once, with schedules, stages, ties and shards in turn."""
    turns = zip(
        SECTIONS,
        itertools.cycle([("1f1b", 1), ("zb-v", 2), ("zb-h1", 1), ("gpipe", 1), ("interleaved", 2)]),
        itertools.cycle([3, 1, 3, 2]),
        strict=False,
    )
    cells = [
        (*schedule, stage, i % 2 == 0, grid[2] == 2 and i % 3 != 0, section)
        for i, (section, schedule, stage) in enumerate(turns)
    ]
    # What is divided over the tensor axis on a grid that has one, and the others on a grid of replicas.
    require_equal_to_one_process(
        ranks, grid, [cell for cell in cells if (grid[2] == 2) == ("partition_activations" in cell[-1])]
    )


@pytest.mark.exhaustive
@pytest.mark.parametrize("section", SECTIONS, ids=lambda s: "-".join(map(str, s.values())))
@pytest.mark.parametrize("grid", [(2, 2, 1), (2, 2, 2), (4, 1, 2), (1, 2, 4)], ids=lambda g: "x".join(map(str, g)))
def test_recomputed_gradients_are_exact_on_every_grid(
    ranks: Any, grid: tuple[int, int, int], section: dict[str, Any]
) -> None:
    names = [
        (name, chunks)
        for name, recipe in RECIPES.items()
        for chunks in (1, 2)
        if recipe.accepts(chunks) and recipe.pairs is None and name != "forward" and grid[0] * chunks <= 8
    ]
    for schedule in names:
        cells = [(*schedule, stage, stage % 2 == 0, False, section) for stage in range(4)]
        if grid[2] == 2:
            cells += [(*schedule, stage, True, True, section) for stage in (0, 3)]
        require_equal_to_one_process(ranks, grid, cells, steps=2)


class Sometimes(nn.Linear):
    """Drops itself out on about every second sample: another replica may have its gradient, or a whole group's."""

    def __init__(self, place: int) -> None:
        super().__init__(64, 64, bias=False)
        self.place = place

    def forward(self, x: Tensor) -> Tensor:
        return x if int(x[0, self.place].item() * 1000) % 2 else x + super().forward(x)


def stage_three(replicas: int, section: dict[str, Any], sometimes: bool, **zero: Any) -> tuple[Any, Any]:
    grid = Grid(data=replicas, timeout=10)
    plain = LayerSpec(nn.Linear, 64, 64, bias=False)
    layers = [plain, *(LayerSpec(Sometimes, i) if sometimes else plain for i in range(5))]
    model = PipelineModule(layers, grid=grid, loss_fn=lambda y, _: y.square().sum(), dtype=torch.float64)
    config = small_config(lr=0.0, micro=1, accumulation=8, zero={"stage": 3, **zero}, activation_checkpointing=section)
    engine, *_ = triax.initialize(model=model, config=config)
    generator = torch.Generator().manual_seed(1)
    data = torch.randn(16, 1, 64, generator=generator, dtype=torch.float64)
    for _ in range(2):
        engine.train_batch(iter([(sample, None) for sample in data[grid.data.rank * 8 :][:8]]))
    return engine.traffic_report()["sent"], engine.gather("gradients")


def test_recomputation_adds_no_gathers_in_stage_3(ranks: Any) -> None:
    """The weights that a second run gathers stay for the backward pass that follows it."""
    plain = ranks(2, stage_three, 2, {}, False)
    for section in ({"interval": 1}, {"interval": 4}):
        for (sent, gradients), (wanted, same) in zip(ranks(2, stage_three, 2, section, False), plain, strict=True):
            # The group's first layers are whole until the next forward, which needs them too: never more.
            assert sent["data"]["all_gather"]["bytes"] <= wanted["data"]["all_gather"]["bytes"]
            assert all(torch.equal(gradients[name], same[name]) for name in same)


def test_replicas_that_use_different_layers_share_gathers(ranks: Any) -> None:
    wanted = ranks(2, stage_three, 2, {}, True)[0][1]
    assert all(gradient.any() for gradient in wanted.values())
    zeros: list[dict[str, Any]] = [{"overlap_comm": False}, {"stage3_max_live_parameters": 5000}]
    for interval, zero in zip((2, 6), zeros, strict=True):
        found = ranks(2, stage_three, 2, {"interval": interval}, True, **zero, timeout=40)[0][1]
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def sliced(size: int, section: dict[str, Any]) -> tuple[int, bool, list[Any]]:
    """Bytes kept of inputs; whether each input came back bit by bit, in its order of memory; what was kept whole."""
    grid = Grid(tensor=size, timeout=30)
    inputs = Inputs(grid, section.get("partition", False), host=True, slots=section.get("slots", 0))
    generator = torch.Generator().manual_seed(1)
    same = torch.randn(3, 5, 7, generator=generator)
    own = torch.randn(4, 4, generator=torch.Generator().manual_seed(grid.rank))
    tensors = [same, same.transpose(0, 2), same[:, ::2, 1:], own, torch.zeros(4, 4), same.bfloat16(), same[0, 0, 0]]
    nest: dict[str, Any] = {
        "float": [t.requires_grad_() if t.is_leaf else t for t in tensors],
        "ids": torch.arange(9),
        "word": "word",
    }
    nest["float"][1:3] = [t.detach().requires_grad_() for t in nest["float"][1:3]]
    right = True
    for _ in range(2):
        kept = KeptNest(inputs, "all", nest)
        back = kept.restore()
        right &= back["word"] == "word" and back["ids"] is nest["ids"]
        for a, b in zip(nest["float"], back["float"], strict=True):
            right &= torch.equal(a, b) and a.dtype == b.dtype and b.is_leaf and b.requires_grad
            right &= not a.is_contiguous() or b.is_contiguous()
        right &= back["float"][1].stride() == nest["float"][1].stride()
    numbers = [tensor.untyped_storage().nbytes() for tensor in kept._saver.grad_fn.saved_tensors]  # type: ignore
    return sum(numbers), right, [key for key, replicated in inputs._replicated.items() if not replicated]


@pytest.mark.parametrize("size", [2, 3, 4])
def test_sliced_inputs_are_restored_bitwise(ranks: Any, size: int) -> None:
    elements = [105, 105, 54]
    for kept, right, own in ranks(size, sliced, size, {"partition": True}):
        slices = sum(4 * -(-n // size) for n in elements) + 2 * -(-105 // size)
        # Each rank's own, the constant one and the number with one element are kept whole, as are integers.
        assert right and kept == slices + 64 + 64 + 105 * 4 + 9 * 8
        assert len(own) == 1
    for _, right, _ in ranks(size, sliced, size, {"partition": True, "slots": 7}):
        assert right


def test_kept_inputs_are_restored_on_one_rank() -> None:
    assert sliced(1, {"slots": 3})[1]
    assert sliced(1, {})[1]


def differ(section: dict[str, Any]) -> None:
    class Moody(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            return y.exp() if torch.is_grad_enabled() and x.grad_fn is not None else y

    grid = Grid(tensor=2, timeout=20)
    model = PipelineModule([nn.Linear(3, 3), Moody(3, 3)], grid=grid, loss_fn=lambda y, _: y.sum())
    config = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.0}}}
    engine, *_ = triax.initialize(model=model, config={**config, "activation_checkpointing": section})
    engine.train_batch(iter([(torch.ones(2, 3), None)]))


def test_a_recomputation_error_names_the_op_and_the_layers(ranks: Any) -> None:
    with pytest.raises(RankFailure, match="failed at 0B0: RuntimeError: layer 1 did something else"):
        ranks(2, differ, {"interval": 1})


def block_bytes(tensor: int, cells: list[dict[str, Any]]) -> list[int]:
    """Bytes that one block holds from its forward to its backward, counted."""
    grid, found = Grid(tensor=tensor, timeout=30), []
    for cell in cells:
        shape = GPTConfig(
            vocab_size=9,
            max_position_embeddings=8,
            hidden_size=32,
            num_hidden_layers=1,
            num_attention_heads=4,
            dropout=0.1 * cell["dropout"],
        )
        dtype = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16}[cell["precision"]]
        layers = [LayerSpec(GPTBlock, shape, sequence_parallel=cell["sequence_parallel"])]
        model = PipelineModule(layers, grid=grid, dtype=dtype)
        if cell["recompute"] != "none":
            interval = int(cell["recompute"] != "selective")
            model.recompute = Recompute(grid, model.dropout_state, interval, granularity=cell["recompute"])
            model.recompute.inputs = Inputs(grid, partition=cell["partitioned"])
            model.recompute.install(model)
        length = 8 // tensor if cell["sequence_parallel"] else 8
        values = torch.randn(2, length, 32, dtype=dtype, generator=torch.Generator().manual_seed(0))
        meter = MemoryMeter(lambda: 0)
        with meter.counting():
            y = model((values * 1).requires_grad_())
            found.append(meter.saved)
            y.sum().backward()
            del y
        assert meter.saved == 0
    return found


@pytest.mark.parametrize(
    ("tensor", "precisions"),
    [
        (1, ("fp64", "fp32", "bf16")),
        (2, ("bf16",)),
        *(pytest.param(size, ("fp64", "fp32", "bf16"), marks=pytest.mark.exhaustive) for size in (2, 4)),
    ],
)
def test_counted_activation_bytes_equal_the_formulas(ranks: Any, tensor: int, precisions: tuple[str, ...]) -> None:
    cells: list[dict[str, Any]] = [
        {"recompute": r, "sequence_parallel": s, "partitioned": p, "dropout": d, "precision": e}
        for r, s, p, d, e in itertools.product(
            ("none", "selective", "matmul", "full"),
            (False, True),
            (False, True),
            (False, True),
            precisions,
        )
        if not (s and (p or tensor == 1)) and not (p and r in ("none", "selective"))
    ]
    wanted = [gpt_activations(2, 8, 32, 4, tensor, **cell) for cell in cells]
    for counted in ranks(tensor, block_bytes, tensor, cells):
        assert dict(zip(map(str, cells), counted, strict=True)) == dict(zip(map(str, cells), wanted, strict=True))


def test_activation_formulas_equal_korthikantis_table() -> None:
    """Korthikanti et al. 2022, table 2, and the bytes that triax keeps beside it."""
    shape, sbh = (1, 2048, 12288, 96), 2048 * 12288
    assert paper_activations(*shape) == sbh * (34 + 5 * 96 * 2048 / 12288)
    assert paper_activations(*shape, 8) == sbh * (10 + 24 / 8 + 5 * 96 * 2048 / 12288 / 8)
    assert paper_activations(*shape, 8, True) == sbh * (34 + 5 * 96 * 2048 / 12288) / 8
    assert paper_activations(*shape, 8, False, "selective") == sbh * (10 + 24 / 8)
    assert paper_activations(*shape, 8, True, "selective") == sbh * 34 / 8
    assert paper_activations(*shape, 8, True, "full") == 2 * sbh
    for tensor, parallel in ((1, False), (8, False), (8, True)):
        ours = gpt_activations(*shape, tensor, parallel, precision="bf16")
        apart = tensor if parallel else 1
        beside = 4 * 2048 * 96 / tensor + 8 * 2048 / apart  # the softmax's sums, the norms' numbers
        assert ours - beside == paper_activations(*shape, tensor, parallel, "selective")
    with pytest.raises(ValueError, match="one of none, selective, matmul, full"):
        gpt_activations(1, 1, 1, 1, recompute="some")


def report(section: dict[str, Any], schedule: str, shards: bool) -> list[int]:
    """Activations of each step of an engine's, in bytes, on each rank."""
    grid = Grid(pipe=2, tensor=2, timeout=30)
    shape = GPTConfig(
        vocab_size=16, max_position_embeddings=8, hidden_size=32, num_hidden_layers=4, num_attention_heads=4
    )
    blocks = [LayerSpec(GPTBlock, shape, sequence_parallel=shards) for _ in range(4)]
    first = nn.Linear(32, 32)  # a rank's first block has an input that wants a gradient
    model = PipelineModule([first, *blocks], grid=grid, partition=[0, 3, 5], loss_fn=lambda y, _: y.sum())
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 4,
        "optimizer": {"type": "SGD", "params": {"lr": 0.0}},
        "pipeline": {"schedule": schedule},
        "activation_checkpointing": {**section, "checkpointable_layers": ["GPTBlock"]},
    }
    engine, *_ = triax.initialize(model=model, config=config)
    length = 4 if shards else 8
    generator, held = torch.Generator().manual_seed(grid.tensor.rank if shards else 0), []
    batches = [(torch.randn(2, length, 32, generator=generator), torch.zeros(1)) for _ in range(4)]
    for engine.record_memory in (True, True):
        engine.train_batch(iter(batches))
        held.append(engine.memory_report()["held"]["activations"])
    return held


@pytest.mark.parametrize(
    ("schedule", "microbatches"), [pytest.param("gpipe", (4, 4), marks=pytest.mark.exhaustive), ("1f1b", (2, 1))]
)
def test_an_engine_holds_the_activation_bytes_of_the_formula(
    ranks: Any, schedule: str, microbatches: tuple[int, int]
) -> None:
    """Two blocks on each of two stages, whose activations are held for as many microbatches as the schedule has."""
    cases: list[tuple[dict[str, Any], bool, dict[str, Any], int]] = [
        ({}, False, {"recompute": "none"}, 2),
        ({"interval": 1}, False, {"recompute": "full"}, 2),
        ({"interval": 2}, True, {"recompute": "full", "sequence_parallel": True}, 1),
        (
            {"number_checkpoints": 2, "partition_activations": True, "contiguous_memory_optimization": True},
            False,
            {"recompute": "full", "partitioned": True},
            2,
        ),
    ]
    for section, shards, options, kept in cases:
        block = gpt_activations(2, 8, 32, 4, 2, dropout=False, **options)
        for rank, found in enumerate(ranks(4, report, section, schedule, shards)):
            assert found == [microbatches[rank // 2] * kept * block] * 2, (section, rank)
