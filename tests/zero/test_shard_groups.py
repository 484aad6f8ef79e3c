"""Groups of replicas that shard among themselves, and hold copies of one another (HSDP: ``Zero(shard_size=...)``)."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch

import triax
from triax import Grid
from triax.zero import ShardedOptimizer, gathered
from triax.zero.flat import shards_of
from triax.zero.shard_groups import shard_group

from support.five_axes import Cell, Job, Place, differences, run
from support.toys import error_text
from support.training import Step, assert_steps_equal, microbatches, pipeline_engine, text_batches, tiny_gpt, train

TIED = Job(capacity=True, balance="batch", tied=True, packed=True)


def require_equal(ranks: Any, cells: list[Cell]) -> None:
    """Require that each cell, all on one number of ranks, has the numbers of one process."""
    everyone = zip(*ranks(cells[0][1].ranks, run, cells, timeout=240), strict=True)
    lines = [f"{cell[1]}: {line}" for cell, one in zip(cells, everyone, strict=True) for line in differences(one, cell)]
    assert not lines, "\n".join(lines[:20])


def test_copies_of_an_expert_shard_it_within_one_group() -> None:
    """Replica r has copy r // expert of the experts r % expert. The largest equal parts that cross no group's end."""
    for replicas in range(1, 49):
        divisors = [number for number in range(1, replicas + 1) if replicas % number == 0]
        for size, expert in itertools.product(divisors, divisors):
            copies = [replica // size for replica in range(0, replicas, expert)]  # the groups of an expert's copies
            fitting = [
                number
                for number in range(1, len(copies) + 1)
                if len(copies) % number == 0
                and all(len({*copies[at : at + number]}) == 1 for at in range(0, len(copies), number))
            ]
            assert shards_of(len(copies), size, expert) == max(fitting), (replicas, size, expert)


@pytest.mark.parametrize(
    "places",
    [
        [(1, 2, 2), (2, 1, 4), (3, 2, 2)],
        pytest.param([(2, 2, 1), (3, 1, 1), (3, 4, 2)], marks=pytest.mark.exhaustive),
    ],
    ids=str,
)
def test_shard_groups_of_four_replicas_equal_one_process(ranks: Any, places: list[tuple[int, int, int]]) -> None:
    cells = [
        (TIED, Place(data=4, expert=expert, stage=stage, microbatches=2, shard_size=size))
        for stage, size, expert in places
    ]
    require_equal(ranks, cells)


EIGHT = [
    (Job(), Place(pipe=2, data=4, stage=3, schedule="zb-v", microbatches=2, shard_size=2)),
    (Job(), Place(data=2, context=2, tensor=2, stage=2, microbatches=2, shard_size=2)),
]
MORE_EIGHT = [
    (TIED, Place(pipe=2, data=4, stage=2, schedule="1f1b", microbatches=4, shard_size=2)),
    (TIED, Place(pipe=2, data=4, stage=1, schedule="interleaved", microbatches=2, shard_size=2)),
    (Job(), Place(data=4, tensor=2, stage=3, sequence_parallel=True, microbatches=2, shard_size=2)),
]


@pytest.mark.parametrize("cells", [EIGHT, pytest.param(MORE_EIGHT, marks=pytest.mark.exhaustive)], ids=len)
def test_shard_groups_on_eight_ranks_equal_one_process(ranks: Any, cells: list[Cell]) -> None:
    require_equal(ranks, cells)


@pytest.mark.exhaustive
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize(
    "axes",
    [
        {"data": 8},
        {"data": 4, "tensor": 2, "sequence_parallel": True},
        {"data": 4, "pipe": 2, "schedule": "1f1b"},
        {"data": 4, "pipe": 2, "schedule": "zb-v"},
        {"data": 2, "pipe": 2, "tensor": 2, "schedule": "zb-v"},
        {"data": 4, "context": 2, "expert": 4},
    ],
)
def test_each_size_of_groups_gives_the_numbers_of_one_process(ranks: Any, axes: dict[str, Any], stage: int) -> None:
    replicas = axes["data"] * axes.get("context", 1)
    sizes = [size for size in (1, 2, 4, 8) if replicas % size == 0]
    places = [Place(**axes, stage=stage, microbatches=2, shard_size=size) for size in sizes]
    require_equal(ranks, [(TIED, place) for place in places])


def gpt_steps(zeros: Sequence[dict[str, Any]], **options: Any) -> list[list[Step]]:
    """Train a small GPT for two steps, once for each of several options of ZeRO."""
    grid = Grid(timeout=60)
    found = []
    for zero in zeros:
        batch = triax.Batch(size=8, microbatches=2)
        engine = pipeline_engine(tiny_gpt(grid), batch, zero=triax.Zero(**zero), clip=0.1, **options)
        data = microbatches(grid, text_batches(37, 8, 8, 2), 8 // grid.data.size // 2)
        found.append(train(engine, data, 2))
    return found


@pytest.mark.parametrize(
    ("optimizer", "stages"),
    [
        ("AdamW", (2,)),
        ("Lamb", (1, 3)),
        ("Muon", (3,)),
        *(pytest.param(name, (1, 2, 3), marks=pytest.mark.exhaustive) for name in ("AdamW", "Lamb", "Muon")),
    ],
)
def test_optimizers_step_groups_of_shards_as_one_process(ranks: Any, optimizer: str, stages: tuple[int, ...]) -> None:
    options = {"optimizer": triax.Optimizer(optimizer, lr=1e-2)}
    [plain] = gpt_steps([{}], **options)
    for rank in ranks(4, gpt_steps, [{"stage": stage, "shard_size": 2} for stage in stages], **options):
        for steps in rank:
            assert_steps_equal(steps, plain)


def test_options_of_zero_act_within_groups_of_shards(ranks: Any, tmp_path: Any) -> None:
    options: list[dict[str, Any]] = [
        {"stage": 1, "allgather_partitions": False},
        {"stage": 1, "offload_optimizer": "cpu"},
        {"stage": 2, "reduce_scatter": False},
        {"stage": 2, "reduce_each_microbatch": False, "overlap_comm": False},
        {"stage": 2, "sub_group_size": 50},
        {"stage": 3, "offload_optimizer": {"device": "nvme", "path": str(tmp_path)}},
        {"stage": 3, "offload_parameters": "cpu", "offload_optimizer": "cpu", "shard_size": 1},
        {"stage": 3, "keep_gathered": True, "bucket_size": 100},
        {"stage": 3, "persistence_threshold": 20, "prefetch_bucket_size": 500},
    ]
    optimizer = triax.Optimizer("AdamW", lr=1e-2)
    [plain] = gpt_steps([{}], optimizer=optimizer)
    for rank in ranks(4, gpt_steps, [{"shard_size": 2, **each} for each in options], optimizer=optimizer):
        for zero, steps in zip(options, rank, strict=True):
            print(zero)
            assert_steps_equal(steps, plain)


@pytest.mark.parametrize(
    ("stage", "sizes"),
    [(1, [2]), (2, [1]), (3, [2]), *(pytest.param(s, [1, 2], marks=pytest.mark.exhaustive) for s in (1, 2, 3))],
)
def test_groups_of_shards_sum_float64_gradients_in_float32(ranks: Any, stage: int, sizes: list[int]) -> None:
    """What is sent between groups is rounded to float32; what is received replaces the group's own sum."""
    optimizer = triax.Optimizer("SGD", lr=1e-2)
    [plain] = gpt_steps([{}], optimizer=optimizer)
    zeros = [{"stage": stage, "shard_size": size} for size in sizes]
    for rank in ranks(4, gpt_steps, zeros, optimizer=optimizer, reduction={"dtype": "fp32"}):
        for steps in rank:
            assert_steps_equal(steps, plain, rtol=1e-5, atol=1e-6)
            with pytest.raises(AssertionError):  # it was not summed in float64
                assert_steps_equal(steps, plain)


def reports(zero: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    grid = Grid(timeout=60)
    engine = pipeline_engine(tiny_gpt(grid), triax.Batch(size=8, microbatches=2), zero=triax.Zero(**zero))
    for _ in range(2):  # not the first step: weights stay gathered from one to the next
        engine.train_batch(microbatches(grid, text_batches(37, 8, 8, 1)))
    return engine.traffic_report(), engine.memory_report()


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_shard_groups_send_and_hold_the_bytes_of_the_formulas(ranks: Any, stage: int) -> None:
    zero = {"stage": stage, "shard_size": 2, "bucket_size": 2**22}
    weights = 8 * sum(p.numel() for p in tiny_gpt(Grid()).parameters())
    for traffic, memory in ranks(4, reports, zero):
        sent = {axis: sum(e["bytes"] for e in kinds.values()) for axis, kinds in traffic["sent"].items()}
        # 2 groups of 2: half of a volume is sent within a group, and shards are all-reduced between two groups.
        volume = {1: 2, 2: 3, 3: 6}[stage] * weights  # 2 microbatches
        assert sent["data within"] == pytest.approx(volume / 2, rel=0.05)
        assert sent["data between"] == pytest.approx(2 * weights / 2 / 2, rel=0.05)
        assert traffic["formula"].pop("data") == 0
        exact = 0.05 if stage == 3 else 1e-12  # in stage 3 both layers of the tied weight gather it
        assert {axis: sent[axis] for axis in traffic["formula"]} == pytest.approx(traffic["formula"], rel=exact)
        for kind in ("parameters", "gradients"):
            assert memory["held"][kind] == pytest.approx(memory["formula"][kind], rel=0.05), kind
    assert memory["formula"]["parameters"] == (weights / 2 if stage == 3 else weights)


def saved_and_loaded(folder: str, saved: dict[str, Any], loaded: dict[str, Any]) -> None:
    """Save after two steps, load with other options of ZeRO, and require equal bits; then train on and compare."""
    grid = Grid(timeout=60)
    made = [
        pipeline_engine(
            tiny_gpt(grid, seed=seed),
            triax.Batch(size=8, microbatches=2),
            zero=triax.Zero(**zero),
            optimizer=triax.Optimizer("AdamW", lr=1e-2),
        )
        for seed, zero in ((7, saved), (8, loaded))
    ]
    data = [microbatches(grid, text_batches(37, 8, 8, 4)) for _ in made]
    train(made[0], data[0], 2)
    made[0].save_checkpoint(folder)
    made[1].load_checkpoint(folder)
    torch.testing.assert_close(made[1].gather(), made[0].gather(), rtol=0, atol=0)
    for _ in range(4):
        next(data[1])
    assert_steps_equal(train(made[1], data[1], 2), train(made[0], data[0], 2))


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        ((3, 2), (1, None)),
        ((2, None), (3, 2)),
        pytest.param((1, 2), (2, 1), marks=pytest.mark.exhaustive),
    ],
)
def test_checkpoints_move_between_sizes_of_groups(
    ranks: Any, tmp_path: Any, saved: tuple[int, int | None], loaded: tuple[int, int | None]
) -> None:
    zeros = [{"stage": stage, "shard_size": size} for stage, size in (saved, loaded)]
    ranks(4, saved_and_loaded, str(tmp_path), *zeros)


def groups_of_experts(cases: list[tuple[int, int]]) -> list[Any]:
    groups = [shard_group(Grid(expert=expert, timeout=60), "expert_data", size) for expert, size in cases]
    return [(group.within.ranks, group.between and group.between.ranks) for group in groups]


def test_experts_are_sharded_within_their_group_of_replicas(ranks: Any) -> None:
    cases = [(1, 1), (1, 2), (2, 1), (2, 2), (2, 4), (4, 2)]  # (expert, shard_size)
    for rank, found in enumerate(ranks(4, groups_of_experts, cases)):
        for (expert, size), axes in zip(cases, found, strict=True):
            copies = [other for other in range(4) if other % expert == rank % expert]  # ranks that hold its experts
            within = tuple(other for other in copies if other // size == rank // size)
            between = tuple(other for other in copies if other % size == rank % size)
            assert axes == (within, None if len(within) == len(copies) else between), (expert, size)


def refused(zero: dict[str, Any]) -> str:
    return error_text(lambda: pipeline_engine(tiny_gpt(Grid()), triax.Batch(size=8), zero=triax.Zero(**zero)))


@pytest.mark.parametrize(
    ("zero", "words"),
    [
        (
            {"stage": 1, "shard_size": 3},
            "4 replicas do not fall into groups of 3: give one of 1, 2, 4",
        ),
        ({"stage": 2, "shard_size": 8}, "4 replicas do not fall into groups of 8"),
        ({"stage": 3, "shard_size": 2, "hpz_partition_size": 2}, "leave one of them out"),
        ({"stage": 2, "shard_size": 2, "quantized_gradients": True}, "leave one of them out"),
    ],
)
def test_shard_groups_that_do_not_fit_are_refused(ranks: Any, zero: dict[str, Any], words: str) -> None:
    assert all(words in text for text in ranks(4, refused, zero))


def plain_loop(stage: int, size: int | None) -> dict[str, torch.Tensor]:
    """Train a module in a plain loop, with a clipped norm and two backward passes a step."""
    grid = Grid(timeout=60)
    torch.manual_seed(3)
    model = torch.nn.Sequential(*(torch.nn.Linear(6, 6, dtype=torch.float64) for _ in range(3)))
    optimizer = ShardedOptimizer(
        torch.optim.AdamW,
        model.parameters(),
        grid,
        stage=stage,
        module=model,
        units=["0", "1", "2"] if stage == 3 else None,
        backward_passes_per_step=2,
        shard_size=size,
        lr=1e-2,
    )
    x = torch.randn(3, 2, 4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    for step in x:
        for passed in step.chunk(grid.data.size, 1)[grid.data.rank]:
            model(passed).square().sum(-1).mean().backward()
        optimizer.clip_grad_norm_(0.5)
        optimizer.step()
        optimizer.zero_grad()
    with gathered(model):
        return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_sharded_optimizer_steps_groups_as_one_process(ranks: Any, stage: int) -> None:
    wanted = plain_loop(1, size=None)
    for weights in ranks(4, plain_loop, stage, 2):
        torch.testing.assert_close(weights, wanted, rtol=1e-10, atol=1e-12)
