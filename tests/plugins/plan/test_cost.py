"""Cost model: step times against the simulator, the papers' formulas, and bytes counted by hand."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from triax.models.config import GPTConfig, LlamaConfig, MixtralConfig
from triax.pipe.program.activations import counts_in_flight
from triax.pipe.program.costs import Costs
from triax.pipe.program.schedule import Schedule
from triax.pipe.program.simulate import simulate
from triax.pipe.schedules.registry import RECIPES, named_schedule
from triax.plugins.plan.collectives import RankGroup, all_reduce, all_to_all, reduce_scatter
from triax.plugins.plan.cost import KINDS, CostModel, utilization
from triax.plugins.plan.machine import MACHINES
from triax.plugins.plan.parallel_layout import ParallelLayout
from triax.plugins.plan.pass_time import busiest
from triax.plugins.plan.work import Work

H100 = MACHINES["h100-80g"]
GPT = GPTConfig(51200, 2048, 4096, 32, 32)


def work(batch: int = 64, config: Any = GPT, machine: Any = H100, sequence: int = 2048) -> Work:
    return Work(config, machine, batch, sequence)


@pytest.mark.parametrize(
    ("schedule", "chunks"),
    [
        ("gpipe", 1),
        ("1f1b", 1),
        ("eager-1f1b", 1),
        ("interleaved", 2),
        ("interleaved", 4),
        ("looped-bfs", 2),
        ("zb-h1", 1),
        ("zb-h2", 1),
        ("zb-v", 2),
    ],
)
@pytest.mark.parametrize(("pipe", "m"), [(2, 4), (4, 8), (8, 32)])
def test_closed_forms_of_bubbles_equal_the_simulator(
    schedule: str, chunks: int, pipe: int, m: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a model without ends, whose stages are all alike."""
    model = CostModel(work(m))
    block = model.types.index(model.work.layers[5])
    counts = tuple(32 // pipe * (i == block) for i in range(len(model.types)))
    monkeypatch.setattr(model, "ranks", lambda placement: [(counts, pipe)])
    layout = ParallelLayout(pipe=pipe, schedule=schedule, chunks=chunks, zero=1)
    closed = model.step(layout)
    monkeypatch.setattr(model, "has_closed_form", lambda *_: False)
    simulated = model.step(layout)
    assert math.isclose(closed.seconds, simulated.seconds, rel_tol=1e-9)


@pytest.mark.parametrize(("schedule", "chunks"), [("zb-h1", 1), ("zb-h2", 1), ("zb-v", 2)])
def test_closed_forms_of_split_backward_passes_hold_for_any_times(schedule: str, chunks: int) -> None:
    draw, closed = random.Random(0), RECIPES[schedule].closed
    assert closed is not None
    for pipe, m in ((2, 4), (3, 7), (4, 8), (5, 16), (6, 13)):
        made = named_schedule(schedule, pipe, m, chunks)
        for _ in range(8):
            forward, inputs = draw.uniform(0.5, 2), draw.uniform(0.5, 4)
            weights = draw.uniform(0.1, min(forward, inputs))
            waits = simulate(made, Costs(forward, inputs, weights)).makespan - m * (forward + inputs + weights)
            expected = (pipe - 1) * closed.idle(forward, inputs, weights, chunks)
            assert waits == pytest.approx(expected, abs=1e-9), (pipe, m, forward, inputs, weights)


@pytest.mark.parametrize("name", [name for name in RECIPES if RECIPES[name].trains])
def test_each_recipe_describes_the_schedule_that_it_makes(name: str) -> None:
    """split, steady and in_flight, at every size that the schedule has; the formulas against the counted orders."""
    recipe = RECIPES[name]
    for pipe in (1, 2, 3, 4):
        for m in range(recipe.least(pipe), 5 * pipe + 2):
            made = named_schedule(name, pipe, m)
            kinds = {op.kind for order in made.orders for op in order}
            assert ("W" in kinds) == recipe.split or pipe == 1
            formula = recipe.in_flight(pipe, m, made.chunks)
            peaks = peaks_of(made)
            if formula is not None:
                assert [max(map(sum, counts)) for counts in formula] == peaks
            if m > recipe.steady(pipe):
                assert peaks == peaks_of(named_schedule(name, pipe, m + pipe)), (pipe, m)


def peaks_of(schedule: Schedule) -> list[float]:
    return [max(map(sum, counts)) for counts in counts_in_flight(schedule)]


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "zb-v", "v-half"])
def test_a_long_schedule_is_extrapolated_to_its_simulated_makespan(schedule: str) -> None:
    pipe, m = 4, 40
    chunks = 2 if schedule in ("zb-v", "v-half") else 1
    model = CostModel(work(m))
    layout = ParallelLayout(pipe=pipe, schedule=schedule, chunks=chunks)
    rank = busiest(model.rank_times(layout))
    costs = Costs(rank.forward, rank.inputs, rank.weights)
    whole = simulate(named_schedule(schedule, pipe, m, chunks), costs).makespan
    assert math.isclose(model.schedules.makespan(layout, m, [rank]), whole, rel_tol=1e-9)


@pytest.mark.parametrize(
    ("schedule", "chunks"), [("1f1b", 1), ("interleaved", 2), ("zb-h1", 1), ("zb-h2", 1), ("zb-v", 2)]
)
@pytest.mark.parametrize("pipe", [4, 8])
@pytest.mark.parametrize(
    ("config", "least", "most"),
    [(GPT, 0.998, 1.045), (LlamaConfig.preset("llama3-8b"), 0.95, 1.105)],
    ids=["gpt", "8b"],
)
def test_times_of_unequal_stages_are_close_to_the_simulator(
    schedule: str, chunks: int, pipe: int, config: Any, least: float, most: float
) -> None:
    """Stages of 1 to 9 blocks and the ends; the 8B model has a large head."""
    model = CostModel(work(32, config))
    layout = ParallelLayout(pipe=pipe, schedule=schedule, chunks=chunks)
    cuts, hop = model.memory.cuts(pipe * chunks), model.rank_times(layout)[0].kinds["pipe"] / 2 / chunks
    sums = [model.passes_of(kind, layout).values()[:4] for kind in model.kinds]
    stages = [list(map(sum, zip(*sums[a:b], strict=True))) for a, b in pairwise(cuts)]
    costs = Costs([s[0] + hop for s in stages], [s[1] + s[3] + hop for s in stages], [s[2] for s in stages])
    simulated = simulate(named_schedule(schedule, pipe, 32, chunks), costs).makespan
    step = model.step(layout)
    closed = step.seconds - step.kinds["data"] - step.kinds["optimizer"]
    assert least * simulated <= closed <= most * simulated


def test_kinds_of_time_add_up_to_the_step() -> None:
    layouts = [
        ParallelLayout(data=8, zero=3, recompute="full"),
        ParallelLayout(pipe=2, data=2, tensor=2, chunks=2, schedule="interleaved", zero=1, offload=True),
        ParallelLayout(data=2, context=4, zero=2, recompute="selective"),
    ]
    for layout in layouts:
        step = CostModel(work()).step(layout)
        assert tuple(step.kinds) == KINDS
        assert math.isclose(step.seconds, sum(step.kinds.values())) and min(step.kinds.values()) >= 0


def test_model_flops_equal_narayanans_formula() -> None:
    b, s, h, layers, v = 64, 2048, 4096, 32, 51200
    paper = 72 * b * s * layers * h**2 * (1 + s / (6 * h) + v / (12 * layers * h))
    assert math.isclose(work().model_flops, paper, rel_tol=1e-12)
    found = utilization(work(), ParallelLayout(data=8), 2.0)
    assert math.isclose(found["tflops_per_gpu"], paper / 16e12) and math.isclose(found["mfu"], paper / 16 / 989e12)


def test_small_matrix_products_are_slower_per_operation() -> None:
    model = CostModel(work())
    speeds = [n**3 / model.device.product(n, n, n) for n in (256, 512, 1024, 4096, 16384)]
    assert speeds == sorted(speeds)
    assert 0.6 < 2 * speeds[-1] / H100.peak["bf16"] < H100.product_efficiency
    # a product of 132 tiles keeps all 132 processors busy once; of 133 tiles, twice
    assert model.device.product(12 * 256 + 1, 4096, 11 * 128) > 1.9 * model.device.product(12 * 256, 4096, 11 * 128)


def test_recomputation_adds_forward_passes_to_the_cost() -> None:
    model = CostModel(work(8))
    none, selective, full = (model.step(ParallelLayout(recompute=kind)) for kind in ("none", "selective", "full"))
    block = model.layer(model.types.index(model.work.layers[5]), ParallelLayout())
    assert math.isclose(selective.seconds - none.seconds, 8 * 32 * block.attention[0], rel_tol=1e-9)
    assert math.isclose(full.seconds - none.seconds, 8 * 32 * block.forward, rel_tol=1e-9)
    assert math.isclose(full.kinds["recompute"], full.seconds - none.seconds, rel_tol=1e-9)


def test_recomputing_mlps_costs_two_thirds_and_saves_their_hidden_dim() -> None:
    model = CostModel(work(8))
    mlp, full = (model.step(ParallelLayout(recompute=kind)).kinds["recompute"] for kind in ("mlp", "full"))
    products_of_mlp, products_of_attention = 2 * 4, 4  # of h x h matrices
    assert mlp / full == pytest.approx(products_of_mlp / (products_of_mlp + products_of_attention), abs=0.08)
    none, without_mlp, least = (
        model.memory.peak(ParallelLayout(recompute=kind), 8, 2048).activations for kind in ("none", "mlp", "full")
    )
    layers, tokens, hidden = 32, 2048, 4 * 4096
    assert none - without_mlp > 0.99 * layers * tokens * hidden * 2 * 2  # before and after GELU, in bf16
    assert without_mlp > least


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_a_block_costs_the_tensor_collectives_of_the_formula(sequence_parallel: bool) -> None:
    """Forward two pairs; backward half of them overlaps the weight gradients."""
    model = CostModel(work())
    layout = ParallelLayout(tensor=8, sequence_parallel=sequence_parallel)
    block = model.layer(model.types.index(model.work.layers[5]), layout)
    size = 2.0 * 2048 * 4096
    once, both = reduce_scatter(size, RankGroup(8), H100), all_reduce(size, RankGroup(8), H100)
    assert math.isclose(block.tensor[0], 4 * once if sequence_parallel else 2 * both)
    column = model.work.layers[5].products
    hidden_by = sum(
        model.device.product(p.inputs, 2048, p.outputs // 8, output=8) for p in column if p.sharding == "column"
    )
    exposed = 2 * once + max(0.0, 2 * once - hidden_by) if sequence_parallel else max(0.0, 2 * both - hidden_by)
    assert math.isclose(block.tensor[1], exposed)


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_deferred_weight_gradients_hide_no_collective(sequence_parallel: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under ZB-H1 the input gradients wait for their reduction, and the weight gradients for the gathered input."""
    model = CostModel(work())
    number = model.types.index(model.work.layers[5])
    counts = tuple(16 * (kind == number) for kind in range(len(model.types)))
    monkeypatch.setattr(model, "ranks", lambda placement: [(counts, 2)])
    layout = ParallelLayout(pipe=2, data=2, tensor=8, sequence_parallel=sequence_parallel)
    joint, split = (model.step(replace(layout, schedule=name)).kinds["tensor"] for name in ("1f1b", "zb-h1"))
    size = 2.0 * 2048 * 4096
    once, both = reduce_scatter(size, RankGroup(8), H100), all_reduce(size, RankGroup(8), H100)
    assert split == pytest.approx(32 * 16 * (10 * once if sequence_parallel else 4 * both))
    assert joint == pytest.approx(32 * 16 * sum(model.layer(number, layout).tensor[:2])) and joint < split


def test_zero_reduces_and_gathers_the_bytes_of_its_formula() -> None:
    """Stage 0 all-reduces fp32 gradients; 1 scatters them and gathers weights in 16 bits; 3 gathers for each pass."""
    plain = replace(H100, overlap_gradients=False, overlap_weights=False)
    model = CostModel(work(64, machine=plain))
    parameters = sum(layer.parameters for layer in model.work.layers)  # the tied embedding lies on one rank
    group = RankGroup(8)
    data = [model.step(ParallelLayout(data=8, zero=stage)).kinds["data"] for stage in range(4)]
    gather, scatter = (reduce_scatter(size * parameters, group, plain) for size in (2, 4))
    assert math.isclose(data[0], all_reduce(4 * parameters, group, plain))
    assert math.isclose(data[1], scatter + gather)
    assert data[2] < data[1]  # behind every backward pass, which hides them
    assert data[3] <= 8 * (gather + scatter)
    hidden = CostModel(work(64)).step(ParallelLayout(data=8, zero=1)).kinds["data"]
    assert hidden < data[1] / 2


def test_the_optimizer_reads_its_states_and_offload_moves_them() -> None:
    model = CostModel(work(64))
    parameters = sum(layer.parameters for layer in model.work.layers)
    whole, shard = (model.step(ParallelLayout(data=8, zero=stage)).kinds["optimizer"] for stage in (0, 1))
    # Of a parameter: the fp32 gradient twice (norm, update), master and moments read and written, bf16 weight written.
    moved = 2 * 4 + 2 * (4 + 4 + 4) + 2
    assert math.isclose(whole, moved * parameters / H100.elementwise_speed) and math.isclose(whole, 8 * shard)
    off = model.step(ParallelLayout(data=8, zero=1, offload=True)).kinds
    assert math.isclose(off["offload"], parameters / 8 * (4 + 2) / H100.host_bandwidth)  # gradient out, weight back
    assert math.isclose(off["optimizer"], parameters / 8 * moved / H100.host_memory_bandwidth)


def test_messages_of_ring_attention_overlap_with_its_core() -> None:
    config = LlamaConfig.preset("llama3-8b", max_position_embeddings=131072)
    model = CostModel(Work(config, H100, 8, 131072))
    alone, ring = (model.step(ParallelLayout(data=8 // c, context=c, zero=3, recompute="full")) for c in (1, 8))
    assert ring.kinds["context"] == 0.0  # 128k tokens: attention takes longer than K and V
    assert math.isclose(ring.kinds["attention"], alone.kinds["attention"], rel_tol=1e-6)
    short = CostModel(Work(config, H100, 64, 1024)).step(ParallelLayout(data=1, context=8))
    assert short.kinds["context"] > 0


def test_experts_send_their_tokens_four_times() -> None:
    config = MixtralConfig.preset("mixtral-8x7b")
    model = CostModel(Work(config, H100, 64, 4096))
    layout = ParallelLayout(data=8, expert=8, zero=1)
    once = all_to_all(2.0 * 4096 * 2 * 4096, RankGroup(8), H100)
    assert math.isclose(model.step(layout).kinds["expert"], 8 * 32 * 4 * once)
    alone = model.step(replace(layout, expert=1)).kinds
    assert alone["expert"] == 0.0 and alone["products"] >= model.step(layout).kinds["products"]


def test_unequal_ranks_take_as_long_as_the_simulated_schedule() -> None:
    """Layers are cut by speed; the makespan is that of the costs of each layer, as the search for cuts has them."""
    speeds = (1.0, 0.5, 1.0, 0.5)
    model = CostModel(replace(work(32), speeds=speeds))
    for schedule, m in (("1f1b", 8), ("zb-h1", 32)):
        layout = ParallelLayout(pipe=4, data=32 // m, schedule=schedule, zero=1)
        costs, cuts = model.layer_costs(layout), model.memory.cuts(4)
        blocks = [b - a for a, b in pairwise(cuts)]
        assert costs.speeds == speeds and blocks[1] < 0.6 * blocks[2] and blocks[3] < 0.6 * blocks[2]
        each = costs.of_stages(cuts, range(4))
        whole = simulate(named_schedule(schedule, 4, m), replace(each, COMM=0.0)).makespan
        step = model.step(layout)
        hops = (2 * m + 3 * 2) * model.rank_times(layout)[0].kinds["pipe"] / 2
        passes = step.seconds - step.kinds["data"] - step.kinds["optimizer"]
        assert whole < passes < whole + hops
    equal, ones = CostModel(work(32)), CostModel(replace(work(32), speeds=(1.0,) * 4))
    layout = ParallelLayout(pipe=4, zero=1)
    assert ones.step(layout).seconds == pytest.approx(equal.step(layout).seconds, rel=0.03)


def test_disabling_an_overlap_adds_the_time_it_had_hidden() -> None:
    layout = ParallelLayout(pipe=2, data=2, tensor=2, zero=1)

    def kinds(**switches: Any) -> dict[str, float]:
        return CostModel(work(machine=replace(H100, **switches))).step(layout).kinds

    plain, once = kinds(), reduce_scatter(2.0 * 2048 * 4096, RankGroup(2), H100)
    # of each block's two branches, the reduction that products hid and the inputs that are gathered again
    more = kinds(overlap_tensor=False)["tensor"] - plain["tensor"]
    assert more == pytest.approx(32 * 16 * 4 * once, rel=0.03)
    assert kinds(overlap_messages=True)["pipe"] == 0.0 < plain["pipe"]


def test_fp8_products_are_faster_but_less_than_twice() -> None:
    wide, narrow = work(), replace(work(), products="fp8")
    layout = ParallelLayout(data=8, zero=1)
    a, b = CostModel(wide).step(layout).kinds, CostModel(narrow).step(layout).kinds
    assert a["products"] / 2 < b["products"] < 0.85 * a["products"]
    assert {key: a[key] for key in a if key != "products"} == {key: b[key] for key in b if key != "products"}
    with pytest.raises(ValueError, match="no peak for fp8"):
        CostModel(replace(work(machine=MACHINES["a100-80g"]), products="fp8"))


def test_attention_without_fusion_reads_and_writes_its_scores() -> None:
    a100 = MACHINES["a100-80g"]
    model = CostModel(work(8, machine=a100))
    plain = model.step(ParallelLayout()).kinds["attention"]
    fused = CostModel(work(8, machine=replace(a100, fused_attention=True))).step(ParallelLayout()).kinds["attention"]
    microbatches, layers, heads = 8, 32, 32
    scores = microbatches * layers * heads * 2048**2
    forward = (2 + 2) + (2 + 2 + 1)  # softmax reads and writes bf16; dropout also writes a mask of one byte
    backward = (2 + 1 + 2) + (2 + 2 + 2)  # of dropout, and of softmax, which reads its output too
    scored, weighed = (model.device.product(2048, *sizes, heads) for sizes in ((128, 2048), (2048, 128)))
    products = microbatches * layers * (2 * scored + 4 * weighed)  # Q K^T and P V, forward and backward
    assert math.isclose(plain - products, (forward + backward) * scores / a100.elementwise_speed, rel_tol=1e-9)
    assert fused < plain / 3
