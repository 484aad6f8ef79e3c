"""Dry runs of grids that no machine of this test has, and of one that it has: the same bytes as counted there."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import triax
from triax.engine.monitor.profiler.memory_meter import MemoryMeter
from triax.models.config import LlamaConfig
from triax.models.gpt import GPTConfig, GPTLoss, gpt_layers
from triax.models.mixtral import MixtralConfig, mixtral_layers
from triax.plugins.dry_run.classes import Classes
from triax.plugins.dry_run.dry_run import DryRun, dry_run
from triax.plugins.dry_run.exchange import Hub
from triax.plugins.dry_run.rank import Settings
from triax.plugins.dry_run.report import report
from triax.plugins.dry_run.values import MetaValues
from triax.plugins.plan.memory import ModelMemory
from triax.plugins.plan.parallel_layout import ParallelLayout

from support.resident import status

CONFIG = GPTConfig(
    vocab_size=256, max_position_embeddings=32, hidden_size=32, num_hidden_layers=4, num_attention_heads=4
)
KINDS = ("parameters", "gradients", "masters", "optimizer", "buffers", "activations")


def batches(device: Any = "cpu") -> Iterator[tuple[Tensor, Tensor]]:
    tokens = torch.arange(4 * 33, device=device).view(4, 33) % 256
    while True:
        yield tokens[:, :-1], tokens[:, 1:]


def train(
    pipe: int = 2,
    tensor: int = 2,
    stage: int = 1,
    plant: Callable[[Any], None] | None = None,
    bf16: bool = False,
    accumulation: int = 2,
    model: Any = None,
    state: str | None = None,
    shard_size: int = -1,
    **axes: Any,
) -> Any:
    grid = triax.Grid(pipe, None, tensor, **axes)
    layers = gpt_layers(CONFIG) if model is None else model()
    module = triax.PipelineModule(layers, grid=grid, loss_fn=GPTLoss(grid, vocab_size=256))
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": accumulation,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, **({} if state is None else {"state": state})}},
        "zero_optimization": {"stage": stage, "mics_shard_size": shard_size},
        "bf16": {"enabled": bf16},
    }
    engine, *_ = triax.initialize(model=module, config=config)
    if plant is not None:
        plant(grid)
    engine.record_memory = True
    engine.train_batch(batches(grid.device))
    return engine


def counted(**options: Any) -> tuple[dict[str, Any], dict[str, float]]:
    """Bytes held and sent, as a rank of a real run counts them."""
    engine = train(**options)
    sent = engine.traffic_report()["sent"]
    return engine.memory_report()["held"], {a: sum(e["bytes"] for e in kinds.values()) for a, kinds in sent.items()}


def dried(ranks: int, program: Callable[..., Any], *args: Any, **kwargs: Any) -> DryRun:
    return dry_run(partial(program, *args, **kwargs), Settings(ranks))


@pytest.mark.parametrize(("stage", "bf16"), [(1, False), pytest.param(3, True, marks=pytest.mark.exhaustive)])
def test_a_dry_run_counts_the_bytes_of_real_ranks(ranks: Any, stage: int, bf16: bool) -> None:
    # In bf16, a norm keeps fp32 statistics on a GPU and in a dry run, and bf16 ones on a CPU.
    run = require_counted_bytes(ranks, KINDS[:-1] if bf16 else KINDS, stage=stage, bf16=bf16)
    assert run.records[0]["microbatches"] is None
    assert sorted(run.records) == [0, 3, 4, 7]


def test_a_dry_run_counts_stored_state_in_groups_of_shards(ranks: Any) -> None:
    require_counted_bytes(ranks, KINDS, tensor=1, stage=2, state="int8", shard_size=2)


def require_counted_bytes(ranks: Any, kinds: Sequence[str], **options: Any) -> DryRun:
    real, run = ranks(8, counted, **options), dried(8, train, **options)
    assert run.problems == []
    for rank, record in run.records.items():
        held, sent = real[rank]
        assert {k: record["memory"].get(k, 0) for k in kinds} == {k: held.get(k) or 0 for k in kinds}
        assert record["sent"] == sent
    return run


@pytest.mark.exhaustive
def test_a_dry_run_puts_1024_ranks_into_one_class_per_stage() -> None:
    run = dried(1024, train, pipe=4, tensor=4)
    assert run.problems == []
    assert [len(ranks) for ranks in run.classes.members().values()] == [256] * 4
    text = report(run)
    assert "4 classes of ranks; 8 ranks were run" in text
    assert "256 ranks, as rank 256, 511: pipe 1" in text
    assert "nothing would have failed" in text


@pytest.mark.exhaustive
def test_a_dry_run_of_few_microbatches_has_the_memory_of_many() -> None:
    few, many = (dried(8, train, accumulation=count) for count in (2, 64))
    assert many.records[0]["microbatches"] == [64, 2]
    assert [many.records[rank]["memory"] for rank in (0, 4)] == [few.records[rank]["memory"] for rank in (0, 4)]
    assert "ran 2 of the 64 microbatches of a step" in report(many)


@pytest.mark.exhaustive
def test_a_dry_run_puts_uneven_shards_into_separate_classes() -> None:
    run = dried(12, train, pipe=1, tensor=3)  # 4 heads on 3 ranks: 1, 1 and 2
    assert run.problems == []
    assert [run.classes.signature(rank)[1] for rank in range(3)] == [0, 1, 2]  # 256 rows of the vocabulary: 85, 85, 86
    assert len(run.classes.members()) == 3


def extra(grid: Any, test: Callable[[Any], bool], reduce: Callable[[Any], Any]) -> None:
    if test(grid):
        reduce(grid)


PLANTED: dict[str, tuple[Callable[[Any], bool], Callable[[Any], Any], str]] = {
    "one rank of 64": (
        lambda grid: bool(grid.rank == 37),
        lambda grid: grid.world.all_reduce(torch.zeros(3)),
        "rank 37 (pipe 1, data 2, tensor 1) runs all_reduce sum of 3 float32",
    ),
    "torch's function": (
        lambda grid: bool(dist.get_rank() % 32 == 6),
        lambda grid: dist.all_reduce(torch.zeros(10_000, device=grid.device)),
        "rank 6 (pipe 0, data 3, tensor 0), rank 38 (pipe 1, data 3, tensor 0) run all_reduce sum of 10,000 float32",
    ),
    "one replica": (
        lambda grid: bool(grid.data.rank >= 15),
        lambda grid: grid.data.all_reduce(torch.zeros(9_000, device=grid.device), op="max"),
        "run all_reduce max of 9,000 float32",
    ),
    "a barrier": (
        lambda grid: not grid.rank,
        lambda grid: grid.world.barrier(),
        "rank 0 (pipe 0, data 0, tensor 0) runs barrier",
    ),
}


@pytest.mark.parametrize(
    "what", [next(iter(PLANTED)), *(pytest.param(what, marks=pytest.mark.exhaustive) for what in list(PLANTED)[1:])]
)
def test_a_dry_run_names_the_rank_with_an_extra_collective(what: str) -> None:
    test, reduce, named = PLANTED[what]
    run = dried(64, train, plant=partial(extra, test=test, reduce=reduce))
    assert named in run.problems[0]
    assert "test_dry_run.py:" in run.problems[0]


@pytest.mark.exhaustive
def test_a_dry_run_names_a_size_that_differs_between_ranks() -> None:
    def plant(grid: Any) -> None:
        grid.tensor.all_reduce(torch.zeros(5000 + (1 if grid.tensor.rank == 1 else 0), device=grid.device))

    run = dried(16, train, plant=plant)
    assert any("all_reduce sum of 5,001 float32" in problem and "5,000 float32" in problem for problem in run.problems)


def test_a_dry_run_names_an_expert_degree_that_does_not_divide() -> None:
    run = dried(64, train, expert=3)
    (problem,) = run.problems
    assert "expert=3 does not divide data x context = 16 x 1" in problem


def test_a_dry_run_gives_experts_equal_numbers_of_tokens() -> None:
    def experts() -> Any:
        config = MixtralConfig(
            vocab_size=256, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=4, num_experts=4, max_position_embeddings=32,
        )  # fmt: skip
        return mixtral_layers(config)

    run = dried(16, train, model=experts, expert=4)
    assert run.problems == []
    assert run.records[0]["sent"]["expert"] > 0


def every_exchange() -> None:
    """Receive into memory without values by every collective of torch, and check each value received."""
    torch.use_deterministic_algorithms(True)  # torch then fills such memory with NaN or with the largest integer
    grid = triax.Grid(2, 4)
    n, me = grid.data.size, grid.data.rank
    group = grid.data.group
    for device, length in (("cpu", 2), ("cpu", 5000), ("meta", 2)):
        mine = torch.full((length,), 3, device=device)
        parts = [torch.full((length,), 7 if rank == me else 5, device=device) for rank in range(n)]
        table = torch.stack(parts)

        def empty(*shape: int, like: Tensor = mine) -> Tensor:
            return torch.empty(shape, dtype=like.dtype, device=like.device)

        results: dict[str, tuple[Tensor, int]] = {}
        dist.all_reduce(total := mine.clone(), group=group)
        results["all_reduce"] = total, 3 * n
        dist.all_gather_into_tensor(all_parts := empty(n * length), mine, group=group)
        results["all_gather_into_tensor"] = all_parts, 3
        dist.all_gather(rows := [empty(length) for _ in range(n)], mine, group=group)
        results |= {f"all_gather {index}": (row, 3) for index, row in enumerate(rows)}
        dist.reduce_scatter_tensor(sums := empty(length), table.view(-1), group=group)
        results["reduce_scatter_tensor"] = sums, 7 * n
        dist.reduce_scatter(sums_of_list := empty(length), parts, group=group)
        results["reduce_scatter"] = sums_of_list, 7 * n
        dist.all_to_all_single(swapped := empty(n, length), table, group=group)
        results["all_to_all_single"] = swapped, 7
        grid.data.all_to_all(by_axis := torch.empty_like(table), table)
        results["Axis.all_to_all"] = by_axis, 7
        dist.all_to_all(outputs := [empty(length) for _ in range(n)], parts, group=group)
        results |= {f"all_to_all {index}": (row, 7) for index, row in enumerate(outputs)}
        dist.broadcast(theirs := mine.clone() if grid.rank == 0 else empty(length), 0)
        # Rank 0 has run before every other rank. What is large is not exchanged.
        known = length <= 4096 or grid.rank == 0
        results["broadcast"] = theirs, 3 if known else 0
        unfilled = 0 if device == "cpu" else 1  # the stand-in
        dist.send(mine, group_dst=(me - 1) % n, group=group)
        dist.recv(message := empty(length), group_src=(me + 1) % n, group=group)
        results["recv"] = message, unfilled
        sizes = [length - 1] + [length] * (n - 1)
        dist.all_to_all_single(uneven := empty(sum(sizes)), mine.repeat(n), sizes, [length] * n, group=group)
        results["uneven all_to_all_single"] = uneven, unfilled
        for name, (tensor, expected) in results.items():
            found = set(tensor.flatten().tolist())
            assert found == {expected}, f"{name} of {length} on {device} gave {sorted(found)[:3]}, not {expected}"
    told = [{"of rank 0": grid.rank}]
    dist.broadcast_object_list(told, 0)
    assert told == [{"of rank 0": 0}]
    dist.all_gather_object(objects := [None] * grid.size, ["equal ranks send equal objects"])
    assert objects == [["equal ranks send equal objects"]] * grid.size


def test_a_dry_run_fills_each_received_tensor_of_torchs_collectives() -> None:
    run = dried(8, every_exchange)
    assert run.problems == []
    assert run.records[0]["outcome"] == "no step"
    assert max(run.records) == 7


@pytest.mark.exhaustive
def test_a_dry_run_reports_a_missing_value_which_can_be_set() -> None:
    def plant(grid: Any) -> None:
        largest = torch.rand(100_000, device=grid.device).max().item()
        if largest > 1.5:
            raise ValueError(f"the largest is {largest}")

    run = dried(16, train, plant=plant)
    assert run.problems == []
    assert "item() of a tensor without values; it was given 1.0" in report(run)
    run = dry_run(partial(train, plant=plant), Settings(16, stand_in=2.0))
    assert "ValueError: the largest is 2.0" in run.problems[0]


def test_a_dry_run_names_a_rank_that_waits_for_a_missing_message() -> None:
    def plant(grid: Any) -> None:
        if grid.pipe.rank == 1:
            grid.pipe.receive(torch.zeros(1, dtype=torch.int64), 0, 99).wait()

    run = dried(8, train, plant=plant)
    assert any("receive" in problem and "rank 0" in problem for problem in run.problems)


# ------------------------------------------------------------------------------------------- its parts


def test_a_meta_view_sees_later_writes_to_its_tensor() -> None:
    """A loss in chunks returns its number of labels before the backward pass fills it."""
    with MetaValues(1.0):
        whole = torch.zeros(2, 3, device="meta")
        first, number = whole[0], whole.sum()
        seen = number.detach()
        whole[0, 1] = 7.0
        number.copy_(torch.tensor(5.0))
        assert first.tolist() == [0.0, 7.0, 0.0] and seen.item() == 5.0
        first.fill_(2.0)
        assert whole.tolist() == [[2.0] * 3, [0.0] * 3]


def test_values_written_to_small_meta_tensors_are_kept() -> None:
    with MetaValues(7.0):
        flags = torch.tensor([3, -3], device="meta")
        assert bool(flags[0] == -flags[1])
        flags[0] = 5
        assert flags.tolist() == [5, -3]
        flags.add_(1)
        assert flags.tolist() == [6, -2] and (flags.sum() * 2).item() == 8
        assert torch.add(flags, 1, out=torch.zeros_like(flags)).tolist() == [7, -1]
        # Memory as it happens to be has no known values, and zeros on a CPU.
        assert torch.empty_like(flags).tolist() == [7, 7]
        assert torch.empty(3, dtype=torch.int64).tolist() == [0] * 3


def test_unknown_meta_values_read_as_the_given_number() -> None:
    with MetaValues(7.0):
        unknown = torch.rand(10_000, device="meta")
        assert torch.isfinite(unknown).all() and not torch.isnan(unknown).any()
        assert bool(unknown.sum() > 6.5) and not bool(unknown.sum() > 7.5)
        assert not bool(unknown.max() > 7.5)
        assert f"{unknown.mean():.2f}" == "7.00"
        assert unknown[:1000].cpu().tolist() == [7.0] * 1000
        mixed = torch.stack([torch.zeros((), device="meta"), torch.rand(9, device="meta").sum()])
        assert mixed.tolist() == [0.0, 7.0]  # a known and an unknown value


def test_a_dry_run_lists_reads_of_unknown_values_alone() -> None:
    """And functions of tensors of two devices, which would fail on a GPU."""
    with MetaValues(7.0) as values:
        known, unknown = torch.tensor([3, -3], device="meta"), torch.rand(10_000, device="meta")
        assert torch.ones(3, device="cuda").is_meta
        known.tolist()
        known.sum().item()
        assert not values.asked
        torch.empty_like(known).tolist()
        unknown.mean().item()
        unknown[:1000].cpu()
        assert (torch.ones(3) + torch.ones(3, device="meta")).is_meta
    assert [name for name, _ in values.asked.values()] == ["tolist", "item", "cpu"]
    assert list(values.mixed.values()) == ["add"]


def test_copies_to_the_cpu_of_large_tensors_take_no_memory() -> None:
    bytes_ = status("VmData")
    with MetaValues(7.0):
        weights = torch.rand(2**20, 2**20, device="meta", requires_grad=True)
        copies = weights.cpu(), weights.to("cpu", torch.float64), weights.detach().to(device="cpu")
        assert [copy.shape for copy in copies] == [weights.shape] * 3
        assert [copy.dtype for copy in copies] == [torch.float32, torch.float64, torch.float32]
        assert copies[0].requires_grad and copies[0].sum().item() == 7.0
        assert weights.detach().cpu().numpy()[5, 7] == 7.0
        assert not weights.isnan().cpu().any()
    assert status("VmData") - bytes_ < 2**30


def test_the_hub_knows_the_missing_sources_of_a_request() -> None:
    hub = Hub(lambda *_: None, {})
    request = {"kind": "get", "key": "k", "source": 1, "what": "a receive"}
    assert hub._missing(request) == [1]
    hub._take(1, {"kind": "post", "key": "k", "value": 3})
    assert hub._missing(request) == []
    assert hub._value(request) == 3


def test_classes_of_ranks_follow_their_comparisons() -> None:
    classes = Classes(triax.Topology(pipe=2, data=4, tensor=2))
    record = {"comparisons": [["data", [["mod", 2]], "eq", 1], ["world", [], "lt", 9]], "shards": ["a", "a"]}
    classes.learn({0: record, 8: record})
    # rank < 9 cuts rank 8, the first of pipe 1, from the rest of its stage
    assert sorted(len(ranks) for ranks in classes.members().values()) == [1, 3, 4, 4, 4]
    assert classes.next_rank([0, 8]) == 2
    assert classes.describe(*next(iter(classes.members().items()))) == "pipe 0, not data.rank % 2 == 1, rank < 9"


def test_meta_activations_equal_those_of_fused_kernels() -> None:
    """A dry run counts what `triax plan` and `--explain` count of a GPU: fused norms and fused attention."""
    config = LlamaConfig.preset("llama-tiny")
    grid, memory, tokens = triax.Grid(), ModelMemory(config, precision="bf16"), 16
    layers = triax.llama_layers(config)
    for number in (1, len(layers) - 2):  # a block, and the last norm
        with torch.device("meta"):
            layer = layers[number].build(grid).to("meta", torch.bfloat16)
        meter = MemoryMeter(lambda: 0)
        with MetaValues(1.0), meter.counting():
            x = torch.zeros(1, tokens, config.hidden_size, dtype=torch.bfloat16, device="meta").requires_grad_()
            y = layer(x)
        assert meter.saved == memory.layer_activations(memory.layers[number], tokens, tokens, ParallelLayout())
        y.backward(torch.empty_like(y))
        assert x.grad is not None and all(p.grad is not None for p in layer.parameters())
