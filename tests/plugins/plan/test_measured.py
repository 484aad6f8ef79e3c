"""Machines of ``triax machine measure``: tables between their sizes, shared cores, and the cost model on them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from triax.models.config import GPTConfig
from triax.pipe.program.costs import Costs
from triax.pipe.program.simulate import simulate
from triax.pipe.schedules.registry import named_schedule
from triax.plugins.plan.collectives import RankGroup, all_gather, all_reduce, message
from triax.plugins.plan.cores import StageWork, makespan
from triax.plugins.plan.cost import CostModel
from triax.plugins.plan.machine import machine
from triax.plugins.plan.measure_machine import _Alone, op_seconds, small_engine
from triax.plugins.plan.measured import interpolated
from triax.plugins.plan.parallel_layout import ParallelLayout
from triax.plugins.plan.search import Searcher, Space
from triax.plugins.plan.work import Work

from support.measured_machine import HERE

WORK = Work(
    GPTConfig(vocab_size=512, hidden_size=256, num_hidden_layers=8, num_attention_heads=4, dropout=0.0),
    HERE,
    batch=8,
    sequence=128,
    precision="fp32",
)


def test_measured_figures_are_interpolated_on_a_log_scale() -> None:
    table = ((10.0, 10.0, 1.0), (1000.0, 1000.0, 100.0))
    assert interpolated(table, (100.0, 100.0)) == pytest.approx((10.0,))
    assert interpolated(table, (10.0, 10.0)) == (1.0,)
    assert 1.0 < interpolated(table, (30.0, 100.0))[0] < 10.0


def test_the_time_of_a_collective_is_linear_in_its_bytes() -> None:
    assert HERE.measured is not None
    times = [HERE.measured.collective("all_gather", 2, size) for size in (0, 1e3, 5.005e5, 1e6, 2e6)]
    assert times == pytest.approx([1e-4, 1e-4, 5.5e-4, 1e-3, 1e-3 + 9e-4 * 1e6 / 0.999e6])
    assert 1e-4 < HERE.measured.collective("all_gather", 4, 0) < 3e-4
    assert message(1e6, 1, HERE) == pytest.approx(1e-3)
    assert all_gather(2e6, RankGroup(2), HERE) == all_reduce(1e6, RankGroup(2), HERE) == pytest.approx(1e-3)


def test_a_machine_file_keeps_the_measured_tables(tmp_path: Path) -> None:
    path = tmp_path / "here.json"
    path.write_text(json.dumps(HERE.to_dict()))
    assert machine(str(path)) == HERE
    wrong = HERE.to_dict()
    wrong["measured"]["optimizer"] = [["fast"]]
    path.write_text(json.dumps(wrong))
    with pytest.raises(ValueError, match=r"measured\.optimizer\.0\.0 = 'fast': give a number"):
        machine(str(path))


@pytest.mark.parametrize(("name", "chunks"), [("1f1b", 1), ("gpipe", 1), ("interleaved", 2), ("zb-h1", 1)])
def test_time_with_a_core_for_each_rank_equals_the_simulator(name: str, chunks: int) -> None:
    schedule = named_schedule(name, 4, 8, chunks)
    stages = len(schedule.placement)
    work = [StageWork(1.0 + stage / 10, 1.5, 0.5) for stage in range(stages)]
    costs = Costs([each.forward for each in work], [1.5] * stages, [0.5] * stages, COMM=0.25)
    alone = makespan(schedule, work, [0.0] * 4, 0.25, 0.0, 1, lambda processes: 1.0)
    assert alone == pytest.approx(simulate(schedule, costs).makespan, rel=1e-9)


def test_time_on_shared_cores_is_the_work_over_the_cores() -> None:
    """With more ranks than cores at work, no core is idle, and it is never faster than with a core for each."""
    schedule = named_schedule("1f1b", 4, 16)
    work = [StageWork(1.0, 1.0, 1.0)] * 4

    def time(cores: int, copies: int = 1) -> float:
        return makespan(schedule, work, [0.0] * 4, 0.0, 0.0, copies, lambda n: min(1.0, cores / n))

    busy = 4 * 16 * 3
    assert time(1) == pytest.approx(busy)
    assert busy / 2 < time(2) < time(1)
    assert time(4) == time(8) == pytest.approx(16 * 3 + 3 * 3)
    assert time(2, copies=2) == pytest.approx(2 * busy / 2)


@pytest.mark.parametrize(
    "layout",
    [
        ParallelLayout(),
        ParallelLayout(pipe=4, microbatch=2, recompute="full"),
        ParallelLayout(pipe=2, data=2, zero=3, microbatch=2),
        ParallelLayout(data=2, tensor=2, zero=1),
        ParallelLayout(pipe=2, chunks=2, schedule="interleaved", data=4, zero=2),
    ],
)
def test_measured_kinds_of_time_add_up_to_at_least_the_bound(layout: ParallelLayout) -> None:
    model = CostModel(WORK)
    step = model.step(layout)
    assert all(value >= 0 for value in step.kinds.values())
    assert step.seconds == pytest.approx(sum(step.kinds.values()))
    assert step.seconds >= model.passes(layout)
    assert (step.kinds["cores"] > 0.01 * step.seconds) == (layout.gpus > 1)  # two processes are crowded too


def test_pruned_search_on_shared_cores_agrees_with_brute_force() -> None:
    searcher = Searcher(WORK, Space(4, {}, 1e12))
    assert not any(layout.offload for node in searcher.nodes() for layout in searcher.layouts(node))
    best = min(searcher.model.step(layout).seconds for node in searcher.nodes() for layout in searcher.layouts(node))
    found = searcher.run(1)
    assert found.layouts[0].time.seconds == pytest.approx(best)
    assert found.excluded[Searcher.SLOWER] > found.considered / 2  # by what the cores compute together


def test_a_precision_that_was_not_measured_is_refused() -> None:
    with pytest.raises(ValueError, match="measured in fp32, not in bf16"):
        CostModel(replace(WORK, precision="bf16"))


def test_measuring_times_python_and_kernels_in_seconds() -> None:
    engine, batch = small_engine("GPTBlock", torch.device("cpu"), 2)
    forward, backward = op_seconds(engine, batch)
    assert 1e-5 < forward < 1 and 1e-5 < backward < 1
    alone = _Alone(torch.device("cpu"), print)
    [(elements, ahead, back)] = alone.kernel(alone.kernels(torch.float32)["gelu"], (2**18,))
    assert elements == 2**18 and 1e-12 < ahead < 1e-6 and back > 0
