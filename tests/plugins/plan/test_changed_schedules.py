"""Options of the schedule in plans: the schedule of the run that a plan writes, its time, its memory, its refusals."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from triax import Batch, Engine, Grid, PipelineEngine, PipelineModule, Recomputation, ScheduleOptions
from triax.base.errors import ConfigError
from triax.cli.main import app
from triax.models.config import DecoderConfig, LlamaConfig, MixtralConfig
from triax.models.layers import NextTokenLoss
from triax.models.llama import llama_layers
from triax.pipe.program.activations import peak_activations
from triax.pipe.program.costs import Costs
from triax.pipe.program.schedule import Schedule
from triax.pipe.program.simulate import simulate
from triax.plugins.plan import search
from triax.plugins.plan.cost import CostModel
from triax.plugins.plan.machine import MACHINES
from triax.plugins.plan.memory import ModelMemory
from triax.plugins.plan.parallel_layout import CHANGES, ParallelLayout
from triax.plugins.plan.search import Planned, Searcher, Space, preference
from triax.plugins.plan.work import Work
from triax.train.file import read_training_file
from triax.train.job import resolve

H100 = MACHINES["h100-80g"]
# Fast links to the host, so that half of the activations can leave.
FAST = replace(H100, host_bandwidth=400e9)
LLAMA = LlamaConfig.preset("llama3-8b")
CHANGED: list[dict[str, Any]] = [
    {"slices": 4, "schedule": "1f1b"},
    {"slices": 2, "schedule": "interleaved", "chunks": 2},
    {"recompute_ops": 0.5, "schedule": "1f1b"},
    {"recompute_ops": 1.0, "schedule": "interleaved", "chunks": 2},
    {"offload_activations": 0.5, "schedule": "1f1b"},
    {"offload_activations": 1.0, "schedule": "zb-v", "chunks": 2},
    {"pairs": True, "schedule": "eager-1f1b"},
    {"schedule": "stp", "chunks": 2},
]
IDS = [" ".join(f"{name}={value}" for name, value in each.items()) for each in CHANGED]


def work(batch: int = 12, sequence: int = 8192, config: Any = LLAMA, machine: Any = FAST) -> Work:
    return Work(config, machine, batch, sequence)


def layout_of(change: dict[str, Any], **others: Any) -> ParallelLayout:
    return ParallelLayout(**{"pipe": 4, "tensor": 2, "zero": 1, **change, **others})


@pytest.mark.parametrize("change", CHANGED, ids=IDS)
def test_a_plan_has_the_schedule_and_time_of_its_run(
    change: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(MACHINES, "fast", replace(FAST, name="fast"))
    given = ",".join(f"{name}={value}" for name, value in layout_of(change).__dict__.items() if name in change)
    sizes = ("--model", "llama3-8b", "--machine", "fast", "--gpus", "8", "--batch", "12", "--sequence", "8192")
    keys = f"pipe=4,tensor=2,microbatch=1,zero=1,recompute=none,{given}"
    done = CliRunner().invoke(app, ["plan", *sizes, "--layout", keys, "--memory", "500", "--output", "run.yaml"])
    assert done.exit_code == 0, done.output or done.exception
    job = resolve(read_training_file("run.yaml")[0])
    layout, model = layout_of(change), CostModel(work())
    made = model.option_step(layout).schedule(microbatches=12)
    assert (job.schedule.orders, job.schedule.pairs) == (made.orders, made.pairs)
    assert job.schedule.slices == pytest.approx(made.slices)
    assert made.pairs or made.recomputes or made.offloads or len(made.slices) > 1

    step = model.step(layout)
    passes = step.seconds - sum(step.kinds[kind] for kind in ("data", "optimizer", "offload"))
    assert passes == pytest.approx(simulate(job.schedule, costs_of(model, layout)).makespan, rel=1e-9)
    assert min(step.kinds.values()) >= 0


def costs_of(model: CostModel, layout: ParallelLayout) -> Costs:
    """Return the costs of the busiest rank, from the times of its layers."""
    zigzag = layout.schedule in ("zb-v", "stp")
    cuts = model.memory.cuts(layout.pipe * layout.chunks)
    ranks = []
    for rank in range(layout.pipe):
        own = [layout.pipe * c + (layout.pipe - 1 - rank if zigzag and c else rank) for c in range(layout.chunks)]
        ranks.append([kind for stage in own for kind in model.kinds[cuts[stage] : cuts[stage + 1]]])
    hop = layout.slices * model.rank_times(layout)[0].kinds["pipe"] / 2
    pairs = layout.pairs or layout.schedule == "stp"

    def costs(kinds: list[int]) -> Costs:
        times = [model.layer(kind, layout) for kind in kinds]
        split = layout.schedule == "zb-v"  # input gradients wait for all of their collectives
        more = [(time.tensor.split_inputs, time.tensor.split_weights) for time in times]
        forward = sum(t.forward for t in times)
        inputs = sum(t.backward + split * m[0] for t, m in zip(times, more, strict=True))
        weights = sum(t.products[2] + split * m[1] for t, m in zip(times, more, strict=True))
        ahead, back = (sum(t.tensor[i] for t in times) for i in (0, 1))
        kept = sum(model.memory.layer_activations(model.types[kind], 8192, 8192, layout) for kind in kinds)
        copy, n = kept / FAST.host_bandwidth if layout.offload_activations else 0.0, layout.slices
        core = sum(sum(t.attention) for t in times) / (forward + inputs + 2 * hop / n)
        if not pairs:
            return Costs(
                n * forward + hop, n * inputs + hop, n * weights, O=copy, R=copy, attention=core if n > 1 else 0.0
            )
        both = ahead + back + sum(m[0] for m in more)
        return Costs(forward - ahead + hop, inputs - back + hop, weights, AR=both / 2, O=0.0, R=0.0)

    found = [costs(kinds) for kinds in ranks]
    busy = [
        sum(t.forward + t.backward + t.products[2] for t in (model.layer(k, layout) for k in kinds)) for kinds in ranks
    ]
    return found[busy.index(max(busy))]


def test_stp_hides_tensor_collectives_except_in_stage_3() -> None:
    model = CostModel(work(64, 4096))
    stp, plain = (layout_of({"schedule": name, "chunks": 2}, tensor=8) for name in ("stp", "zb-v"))
    hidden, shown = model.step(stp), model.step(plain)
    assert hidden.seconds < 0.97 * shown.seconds and hidden.kinds["tensor"] < shown.kinds["tensor"] / 2
    assert hidden.kinds["products"] == shown.kinds["products"]
    assert model.step(replace(stp, zero=3)).kinds["tensor"] > 2 * hidden.kinds["tensor"]


def held(schedule: Schedule, rank: int, stage_bytes: list[float], inputs: float) -> float:
    """Return the most bytes of activations on a rank, op by op, with the inputs of stages that are computed again."""
    again = {op[1:] for op in schedule.orders[rank] if op.kind == "C"}
    now = most = 0.0
    for kind, stage, microbatch in schedule.orders[rank]:
        size = stage_bytes[stage]
        if kind == "F":
            now += size
            most = max(most, now)
            now -= (size - (inputs if stage else 0.0)) if (stage, microbatch) in again else 0.0
        elif kind == "C":
            now += size - (inputs if stage else 0.0)
            most = max(most, now)
        elif kind in "BW":
            now -= size
    return most


@pytest.mark.parametrize("change", [each for each in CHANGED if "recompute_ops" in each])
def test_planned_memory_of_recomputation_equals_a_replay(change: dict[str, Any]) -> None:
    layout, model = layout_of(change), CostModel(work())
    made = model.option_step(layout).schedule()
    memory, plain = model.memory, replace(layout, recompute_ops=0.0)
    cuts = memory.cuts(made.stages)
    stages = [
        sum(memory.layer_activations(layer, 8192, 8192, plain) for layer in memory.layers[a:b])
        for a, b in pairwise(cuts)
    ]
    found, without = memory.ranks(layout, 12, 8192, made), memory.ranks(plain, 12, 8192)
    inputs = 2 * 8192 * LLAMA.hidden_size / 2
    for rank, each in enumerate(found):
        replayed = held(made, rank, stages, inputs)
        logits = memory.layer_memory.loss(1024, layout.tensor) if made.placement[-1] == rank else 0.0
        most = max(sum(op.kind == "F" for op in order) for order in made.orders)
        # The peaks of activations and of inputs may come at different times.
        assert replayed + logits - 1 <= each.activations <= replayed + logits + most * inputs
    assert max(each.activations for each in found) < 0.76 * max(each.activations for each in without)


def test_planned_slices_hold_the_activation_share_of_the_paper() -> None:
    """Seq1F1B: 1 + (p-1)/n sequences of activations in place of p; keys and values of those under way stay whole."""
    layout, model = layout_of({"slices": 8}, pipe=4, tensor=1), CostModel(work())
    whole = model.memory.ranks(replace(layout, slices=1), 12, 8192)[0].activations
    sliced = model.memory.ranks(layout, 12, 8192, model.option_step(layout).schedule())[0].activations
    blocks = model.memory.cuts(4)[1] - 1
    keys = 8192 * 2 * 8 * 128 * blocks  # elements of a sequence
    beside = 2 * 2 * keys + 4 * keys * (1 + 1 / blocks)  # of two sequences; gradients of one, and of one layer
    assert sliced - beside == pytest.approx(whole / 4 * (1 + 3 / 8), rel=0.05)


@pytest.mark.parametrize("change", CHANGED, ids=IDS)
def test_a_long_schedule_has_the_peaks_and_the_time_of_short_ones(change: dict[str, Any]) -> None:
    layout, m = layout_of(change), 42
    model = CostModel(work(m))
    short, whole = model.option_step(layout).schedule(), model.option_step(layout).schedule(microbatches=m)
    assert short.microbatches < m
    assert peak_activations(short) == pytest.approx(peak_activations(whole), rel=0.02)
    step = model.step(layout)
    passes = step.seconds - sum(step.kinds[kind] for kind in ("data", "optimizer", "offload"))
    assert passes == pytest.approx(simulate(whole, costs_of(model, layout)).makespan, rel=0.01)


REFUSED: list[tuple[dict[str, Any], Any]] = [
    ({"slices": 2, "schedule": "zb-v", "chunks": 2}, LLAMA),
    ({"slices": 2, "context": 2, "tensor": 1}, LLAMA),
    ({"slices": 2}, MixtralConfig.preset("mixtral-8x7b")),
    ({"slices": 2, "pairs": True}, LLAMA),
    ({"slices": 2, "recompute_ops": 0.5}, LLAMA),
    ({"recompute_ops": 0.5, "recompute": "full"}, LLAMA),
    ({"recompute_ops": 0.5, "pairs": True, "schedule": "eager-1f1b"}, LLAMA),
    ({"pairs": True, "schedule": "stp", "chunks": 2}, LLAMA),
]


@pytest.mark.parametrize(("change", "config"), REFUSED)
def test_plans_and_runs_refuse_the_same_layouts(change: dict[str, Any], config: Any, tmp_path: Path) -> None:
    layout = layout_of(change)
    given = {name: [getattr(layout, name)] for name in ("pipe", "context", "tensor", "zero", "chunks", "schedule")}
    given |= {name: [value] for name, value in change.items()}
    with pytest.raises(ValueError) as planned:
        assert Searcher(work(config=config), Space(layout.gpus, given, 1e15)).run(1).layouts
    preset = "llama3-8b" if config is LLAMA else "mixtral-8x7b"
    section = {"name": layout.schedule, "chunks": layout.chunks, "slices": layout.slices}
    section |= {"pairs": 0.5} if layout.pairs else {}
    section |= {"recompute": layout.recompute_ops} if layout.recompute_ops else {}
    path = tmp_path / "run.json"
    path.write_text(
        json.dumps(
            {
                "model": {"preset": preset},
                "data": "tokens",
                "grid": {"pipe": 4, "context": layout.context, "tensor": layout.tensor, "data": 1},
                "schedule": section,
                "training": {"steps": 1, "sequence": 8192},
                "batch": {"size": 12},
                "recompute": layout.recompute,
            }
        )
    )
    with pytest.raises(ConfigError) as run:
        resolve(read_training_file(path)[0])
    reason = str(planned.value).partition(": ")[2] or str(planned.value)
    assert reason.partition(" ")[2][:30] in str(run.value), (planned.value, run.value)  # the first word may be an op


def brute_force(searcher: Searcher, top: int) -> tuple[list[Planned], int]:
    """Evaluate every layout of the space, without a bound."""
    found, considered = [], 0
    for node in searcher.nodes():
        for layout in searcher.layouts(node):
            considered += 1
            if not searcher.needless(layout):
                each = searcher.evaluate(layout)
                found += [each] if each.memory.total <= searcher.limit else []
    found.sort(key=lambda each: preference(each.layout, each.time.seconds))
    return found[:top], considered


def best_of_searches_equal_to_brute_force(numbers: range, monkeypatch: pytest.MonkeyPatch) -> list[ParallelLayout]:
    """Compare searches with brute force, and return the best layouts."""
    monkeypatch.setattr(search, "LEAST_SLICE", 256)
    best = []
    for number in numbers:
        draw = random.Random(number)
        config = DecoderConfig(32000, 4096, 1024, 8, 8, 4, 2048)
        machine = replace(H100, host_bandwidth=draw.choice((25e9, 4e12)))
        task = Work(config, machine, draw.choice((2, 4, 12)), draw.choice((512, 2048)))
        given: dict[str, list[Any]] = {"pipe": [draw.choice((2, 4))], "context": [1], "offload": [False]}
        given |= {"microbatch": [1], "zero": [draw.choice((0, 1))]}
        space = Space(draw.choice((4, 8)), given, draw.choice((2.2e9, 3e9, 5e9, 80e9)))
        pruned = Searcher(task, space).run(5)
        wanted, considered = brute_force(Searcher(task, space), 5)
        assert [each.layout for each in pruned.layouts] == [each.layout for each in wanted], number
        assert pruned.considered == considered == len(pruned.layouts) + sum(pruned.excluded.values()), number
        best += [each.layout for each in pruned.layouts]
    return best


def test_the_search_of_options_agrees_with_brute_force(monkeypatch: pytest.MonkeyPatch) -> None:
    best_of_searches_equal_to_brute_force(range(2), monkeypatch)


@pytest.mark.exhaustive
def test_each_schedule_option_is_best_in_some_search_space(monkeypatch: pytest.MonkeyPatch) -> None:
    best = best_of_searches_equal_to_brute_force(range(60), monkeypatch)
    for name, plain in CHANGES.items():
        assert name == "pairs" or any(getattr(layout, name) != plain for layout in best), name
    assert not any(layout.schedule == "stp" for layout in best)  # pairs are planned only if they are given


@pytest.mark.exhaustive
@pytest.mark.parametrize("change", CHANGED, ids=IDS)
def test_a_written_plan_with_options_dry_runs(
    change: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    given = ",".join(f"{name}={value}" for name, value in {"pipe": 2, "tensor": 2, "microbatch": 1, **change}.items())
    sizes = ("--model", "llama-small", "--gpus", "4", "--batch", "6", "--sequence", "64", "--precision", "fp32")
    done = CliRunner().invoke(app, ["plan", *sizes, "--layout", given, "--output", "run.yaml"])
    assert done.exit_code == 0, done.output or done.exception
    done = CliRunner().invoke(app, ["train", "run.yaml", "--dry-run", "--processes", "4"])
    assert done.exit_code == 0, done.output or done.exception


def counted(config: Any, layers: str = "none", **options: Any) -> tuple[float, float]:
    """Return the bytes of activations of a step of four sequences on one process: counted, and by the formulas."""
    again: dict[str, Any] = {"mlp": Recomputation(mlp_tile=8), "selective": Recomputation(granularity="selective")}
    torch.manual_seed(0)
    grid = Grid()
    model = PipelineModule(llama_layers(config), grid=grid, loss_fn=NextTokenLoss(grid, config.vocab_size))
    engine = Engine(
        model,
        optimizer=torch.optim.SGD,
        batch=Batch(size=4, microbatch=1),
        schedule=ScheduleOptions(name="gpipe", **options),
        recompute=again.get(layers, "none"),
    )
    assert isinstance(engine, PipelineEngine)
    rows = torch.randint(config.vocab_size, (1, 65))
    engine.record_memory = True
    engine.train_batch(iter([(rows[:, :-1].contiguous(), rows[:, 1:].contiguous())] * 4))
    memory = ModelMemory(config, precision="fp32", device="cpu")
    [wanted] = memory.ranks(ParallelLayout(schedule="gpipe", recompute=layers), 4, 64, engine.program.schedule)
    return engine.memory_report()["held"]["activations"], wanted.activations


def test_planned_memory_with_options_equals_that_of_a_run() -> None:
    config = LlamaConfig.preset("llama-tiny", num_hidden_layers=3, vocab_size=61)
    plain, again, sliced = (counted(config, **each) for each in ({}, {"recompute": 1.0}, {"slices": 4}))
    assert plain[0] == plain[1]
    # Counted at the end of the forwards: what stays of four sequences. One of them is then computed again.
    assert again[1] == again[0] + plain[1] / 4
    # The meter counts what autograd saves, to which the buffers of keys and values do not belong: of each layer and
    # sequence 64 tokens x 2 heads x (8 + 8) numbers, and of one sequence their gradients, and those of one slice.
    assert sliced[1] == pytest.approx(sliced[0] + 4 * 64 * 32 * (4 * 3 + 3 + 1), rel=0.01)
    # Recomputation of the MLP keeps no keys and values either. The core of attention keeps its inputs, which they are.
    for layers in ("mlp", "selective"):
        held, wanted = counted(config, layers, slices=4)
        assert wanted - held == sliced[1] - sliced[0], layers
