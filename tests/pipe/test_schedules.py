"""Schedules: drawn as their docstrings say, as fast and as small as published, refused with a way out."""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage
from typer.testing import CliRunner

from triax.base.entry_points import installed
from triax.base.errors import ConfigError
from triax.cli.main import app
from triax.pipe.program.costs import Costs
from triax.pipe.program.ops import Op
from triax.pipe.program.placement import loop, zigzag
from triax.pipe.program.schedule import Schedule
from triax.pipe.program.simulate import simulate
from triax.pipe.program.verify import verify
from triax.pipe.program.zero_bubble_log import from_zero_bubble, to_zero_bubble
from triax.pipe.schedules.choose import (
    make_schedule,
    read_schedule,
    require_schedule,
    schedule_names,
    write_schedule,
)
from triax.pipe.schedules.registry import RECIPES
from triax.pipe.schedules.v_steady import PERIOD, STEADY_STATES, blocks_of

from support.command_line import run_triax
from support.paths import DOCS
from support.readme_blocks import blocks
from support.toys import error_text

TRAINING = [name for name in RECIPES if name != "forward"]


def idle(schedule: Schedule) -> float:
    """The makespan's share that is not one rank's work, at F = I = W = 1."""
    return simulate(schedule).makespan - 3 * schedule.microbatches


def peak(schedule: Schedule) -> float:
    return max(simulate(schedule).peak_activations)


@pytest.mark.parametrize("name", RECIPES)
def test_each_generators_docstring_draws_its_schedule(name: str) -> None:
    rows = re.findall(r"rank (\d+): (.*)", RECIPES[name].make.__doc__ or "")
    drawn = [[Op.parse(op) for op in re.split(r"[ &]", row)] for _, row in rows]
    assert drawn, f"{name} has no drawing"
    microbatches = 1 + max(op.microbatch for row in drawn for op in row)
    chunks = (1 + max(op.stage for row in drawn for op in row)) // len(drawn)
    schedule = make_schedule(name, len(drawn), microbatches, chunks)
    assert [list(order) for order in schedule.orders] == drawn, str(schedule)
    assert all(row in str(schedule) for _, row in rows)


# name, chunks, idle time and peak at (p, m), from the papers: see docs/schedules.md
FORMULAS = {
    "gpipe": (1, lambda p, m: 3 * (p - 1), lambda p, m: m),
    "1f1b": (1, lambda p, m: 3 * (p - 1), lambda p, m: min(p, m)),
    "eager-1f1b": (1, lambda p, m: 3 * (p - 1), lambda p, m: min(2 * p - 1, m)),
    "looped-bfs": (3, lambda p, m: p - 1, lambda p, m: m),
    "zb-h1": (1, lambda p, m: p - 1, lambda p, m: p),
    "zb-h2": (1, lambda p, m: p - 1, lambda p, m: min(2 * p - 1, m)),
    "zb-v": (2, lambda p, m: (p - 1) / 2, lambda p, m: p),
    "dualpipe-v": (2, lambda p, m: (p - 1) / 2, lambda p, m: p + 0.5),
    "stp": (2, lambda p, m: (p - 1) / 2, lambda p, m: max(2, 2 * p - 0.5)),
    "wave": (2, lambda p, m: 2 * (p - 1), lambda p, m: p),
}


@pytest.mark.parametrize("name", FORMULAS)
@pytest.mark.parametrize("pipe", [1, 2, 3, 4, 5, 8, pytest.param(13, marks=pytest.mark.exhaustive)])
def test_bubbles_and_peaks_equal_the_published_ones(name: str, pipe: int) -> None:
    chunks, idle_time, most = FORMULAS[name]
    for m in {pipe, pipe + 1, 2 * pipe, 2 * pipe + 1, 3 * pipe + 2}:
        if m >= RECIPES[name].least(pipe):
            schedule = make_schedule(name, pipe, m, chunks)
            assert idle(schedule) == pytest.approx(idle_time(pipe, m)), (name, pipe, m)
            if name == "eager-1f1b" or m >= 2 * pipe - 1:
                assert peak(schedule) == most(pipe, m), (name, pipe, m)


@pytest.mark.parametrize("pipe", [pytest.param(p, marks=pytest.mark.exhaustive if p > 5 else ()) for p in range(2, 10)])
@pytest.mark.parametrize("chunks", [2, 3, 4])
def test_interleaved_loses_no_time_where_p_does_not_divide_m(pipe: int, chunks: int) -> None:
    for m in range(pipe, 3 * pipe + 2):
        schedule = make_schedule("interleaved", pipe, m, chunks)
        assert idle(schedule) == pytest.approx(3 * (pipe - 1) / chunks), m
        assert peak(schedule) <= pipe + (pipe - 1) / chunks + 1e-9, m


@pytest.mark.parametrize(
    ("pipe", "most"), [(3, 17), *(pytest.param(p, 33, marks=pytest.mark.exhaustive) for p in range(2, 9))]
)
def test_interleaved_takes_any_number_of_microbatches(pipe: int, most: int) -> None:
    for chunks, m in itertools.product(range(2, 9), range(1, most + 1)):
        schedule = make_schedule("interleaved", pipe, m, chunks)
        verify(schedule)
        assert peak(schedule) <= pipe + (pipe - 1) / chunks + 1e-9, (m, chunks)
        if m >= pipe:
            assert idle(schedule) <= (1 if chunks <= 4 else 2.4) * 3 * (pipe - 1) / chunks + 1e-9, (m, chunks)


@pytest.mark.parametrize(
    ("name", "down", "pause", "unit"), [("v-half", 2, 1, lambda p: 6 * p - 1), ("v-min", 1, 0, lambda p: 4 * p)]
)
def test_blocks_of_v_shapes_wait_least_and_hold_as_derived(
    name: str, down: int, pause: int, unit: Callable[[int], int]
) -> None:
    """On each rank the four times of a microbatch differ modulo the period, and its activations live equally long."""
    for p in range(3, 20):
        made = STEADY_STATES[name](p).blocks
        possible = [
            turn
            for turn in range(PERIOD)
            if all(len({time % PERIOD for time in block}) == 4 for block in blocks_of(p, down, turn, pause))
        ]
        assert made == blocks_of(p, down, possible[0], pause)
        lives = {b.inputs_down - b.forward_down + b.inputs_up - b.forward_up for b in made}
        assert lives == {unit(p) + 2 * possible[0]}


@pytest.mark.parametrize(
    "pipe", [2, 3, 4, 5, 6, 8, *(pytest.param(p, marks=pytest.mark.exhaustive) for p in (7, 9, 12))]
)
def test_v_half_and_v_min_are_no_slower_than_their_papers_generator(pipe: int) -> None:
    # what the generator of "Controllable Memory" reaches, measured at F = I = W for these sizes
    half = {2: 0.5}.get(pipe, 1.5 * pipe - (3.5 if pipe % 2 == 0 else 2))
    least = 2 * pipe - (3.5 if pipe % 3 == 0 else 2.5)
    for m in (pipe, 2 * pipe + 1, 4 * pipe):
        schedule = make_schedule("v-half", pipe, m)
        assert idle(schedule) <= half + 1e-9 and peak(schedule) <= (pipe + 2) // 2
        schedule = make_schedule("v-min", pipe, m)
        assert idle(schedule) <= least + 1e-9 and peak(schedule) <= (pipe + 4) // 3


# (name, p, m) -> makespans at PAPER_COSTS of the orders that the generator of "Controllable Memory" (Qi 2024) makes:
# zbv_greedy.py of sail-sg/zero-bubble-pipeline-parallelism at 39f2c186, run once and timed by `simulate`
PAPER_COSTS = (
    Costs(1, 0.993, 0.717, 0.0335),
    Costs(1.5, 1, 1, 0.1),
    Costs(1, 1.2, 0.7, 0.02),
    Costs(1, 0.9, 1.1, 0.03),
)
PAPER_MAKESPANS = {
    ("v-half", 8, 16): (54.717, 75.400, 59.230, 57.360),
    ("v-half", 8, 64): (184.797, 253.000, 198.430, 201.360),
    ("v-half", 16, 64): (199.763, 274.250, 215.170, 214.120),
    ("v-half", 4, 4): (16.624, 21.400, 18.220, 16.880),
    ("v-half", 4, 16): (47.301, 64.850, 50.870, 51.140),
    ("v-half", 6, 12): (40.132, 55.050, 43.490, 42.190),
    ("v-half", 6, 48): (137.692, 188.250, 147.890, 150.190),
    ("v-half", 12, 24): (83.859, 115.350, 90.950, 87.800),
    ("v-half", 16, 32): (113.044, 155.850, 122.370, 118.120),
    ("v-min", 8, 16): (64.734, 95.050, 73.690, 63.300),
    ("v-min", 8, 64): (216.774, 335.050, 251.290, 214.500),
    ("v-min", 16, 64): (234.912, 360.350, 270.590, 231.610),
    ("v-min", 4, 4): (18.103, 24.500, 20.430, 17.660),
    ("v-min", 4, 16): (55.711, 83.300, 64.590, 55.100),
    ("v-min", 6, 12): (46.690, 68.300, 53.390, 45.840),
    ("v-min", 6, 48): (160.720, 248.300, 186.590, 159.240),
    ("v-min", 12, 24): (97.822, 145.450, 111.710, 95.890),
    ("v-min", 16, 32): (132.903, 198.550, 151.790, 130.270),
}
BEHIND_BEFORE = {("v-half", 8, 16), ("v-min", 8, 16), ("v-half", 8, 64)}


@pytest.mark.parametrize(
    "size",
    [pytest.param(x, marks=() if x in BEHIND_BEFORE else pytest.mark.exhaustive) for x in PAPER_MAKESPANS],
    ids=str,
)
def test_schedules_are_no_slower_than_their_papers_generators(size: tuple[str, int, int]) -> None:
    name, pipe, m = size
    schedule = make_schedule(name, pipe, m)
    verify(schedule, (pipe + 2) // 2 if name == "v-half" else (pipe + 4) // 3)
    for costs, paper in zip(PAPER_COSTS, PAPER_MAKESPANS[size], strict=True):
        assert simulate(schedule, costs).makespan <= paper + 6e-4, costs


@pytest.mark.parametrize("pipe", [2, 3, 4, 8, pytest.param(16, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("waves", [1, 2, 3])
def test_wave_schedules_idle_no_longer_than_published(pipe: int, waves: int) -> None:
    """Liu 2023, Hanayo: of p microbatches."""
    bubble = simulate(make_schedule("wave", pipe, pipe, 2 * waves)).bubble
    assert bubble < (2 * pipe - 2) / (3 * pipe * waves + pipe - 1)


@pytest.mark.parametrize(("pipe", "chunks"), [(2, 4), (4, 4), (8, 4), (4, 6)])
def test_more_waves_make_a_smaller_bubble(pipe: int, chunks: int) -> None:
    for m in (2 * pipe, 4 * pipe):
        schedule = make_schedule("wave", pipe, m, chunks)
        assert idle(schedule) <= 1.4 * 3 * (pipe - 1) / chunks
        assert peak(schedule) <= pipe + (pipe - 1) * (chunks - 2) / (2 * chunks) + 1e-9


def test_zb_h1_makespans_equal_the_formula_at_other_costs() -> None:
    for costs in (Costs(1, 1.2, 0.7), Costs(1, 1, 0.5), Costs(1.5, 1, 1)):
        f, i, w = (float(x) for x in (costs.F, costs.I, costs.W))  # type: ignore[arg-type]
        for p, m in ((2, 4), (4, 9), (6, 12)):
            result = simulate(make_schedule("zb-h1", p, m), costs)
            assert result.makespan == pytest.approx(m * (f + i + w) + (p - 1) * (f + i - w))


@pytest.mark.parametrize("name", RECIPES)
def test_every_size_runs_or_is_refused_with_the_nearest_size(name: str) -> None:
    for pipe in (0, 1, 2, 4):
        for m in (0, 1, 2, 3, 7):
            for chunks in (None, 0, 1, 2, 3, 4):
                refusal = refused(name, pipe, m, chunks)
                if refusal is None:
                    verify(make_schedule(name, pipe, m, chunks))
                    continue
                nearest = re.search(r"the nearest is ((?:\w+=\d+(?:, )?)+)", refusal)
                assert nearest, refusal
                better = {k: int(v) for k, v in re.findall(r"(\w+)=(\d+)", nearest[1])}
                again = better.get("pipe", pipe), better.get("microbatches", m), better.get("chunks", chunks)
                # if two things are wrong, the second error is another one
                assert refused(name, *again) != refusal


def refused(name: str, pipe: int, microbatches: int, chunks: int | None) -> str | None:
    try:
        make_schedule(name, pipe, microbatches, chunks)
    except ValueError as error:
        return str(error)
    return None


def test_an_unknown_schedule_error_names_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"there is no schedule '1F1B'; did you mean '1f1b'\?"):
        make_schedule("1F1B", 2, 2)


@pytest.mark.parametrize("name", RECIPES)
def test_schedules_survive_json_and_csv_unchanged(name: str) -> None:
    schedule = make_schedule(name, 3, max(6, RECIPES[name].least(3)))
    assert Schedule.from_json(schedule.to_json()) == schedule
    assert hash(Schedule.from_json(schedule.to_json())) == hash(schedule)
    assert Schedule.from_csv(schedule.to_csv(), name) == schedule
    assert all(Op.parse(str(op)) == op for order in schedule.orders for op in order)


def test_torchs_csv_is_read_with_idle_cells_messages_and_pairs() -> None:
    text = "0UNSHARD,0F0,0SEND_F0,0F1,,,0B0,0RECV_B1,0B1,0REDUCE_GRAD\n,1RECV_F0,1F0,(1F1;1B0)OVERLAP_F_B,1B1\n"
    schedule = Schedule.from_csv(text)
    assert schedule.orders[0] == tuple(map(Op.parse, ("0F0", "0F1", "0B0", "0B1")))
    assert schedule.orders[1] == tuple(map(Op.parse, ("1F0", "1F1", "1B0", "1B1")))
    assert schedule.pairs == {Op("F", 1, 1)}
    assert (schedule.pipe, schedule.microbatches, schedule.chunks) == (2, 2, 1)
    verify(schedule)
    with pytest.raises(ValueError, match="is not an op"):
        Schedule.from_csv("0F0,0X0\n")
    with pytest.raises(ValueError, match="runs on line 1"):
        Schedule.from_csv("0F0,0B0\n0F1,0B1\n")


@pytest.mark.parametrize("name", TRAINING)
def test_torchs_parser_reads_written_schedules(name: str, tmp_path: Path) -> None:
    """torch's runtime reads the file, checks the order, and puts each stage on the same rank."""
    pipelining = pytest.importorskip("torch.distributed.pipelining.schedules")
    schedule = make_schedule(name, 3, 8)
    file = tmp_path / "schedule.csv"
    write_schedule(schedule, file)
    runtime = object.__new__(pipelining._PipelineScheduleRuntime)
    runtime.pipeline_order, runtime._stages = {}, []
    runtime.pp_group_size, runtime._num_stages, runtime._n_microbatches = 3, schedule.stages, 8
    pipelining.PipelineScheduleMulti._load_csv(runtime, str(file))
    assert [runtime.stage_index_to_group_rank[s] for s in range(schedule.stages)] == list(schedule.placement)
    runtime._dump_csv(str(file), format="compute_only")
    assert read_schedule(file).orders == schedule.orders


def torch_trains(program: str) -> None:
    """Run the program of docs/schedules.md on one rank with two stages; compare the gradients with plain torch's."""
    layers = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(2)).double()
    inputs, labels = torch.randn(2, 8, 4, dtype=torch.float64)
    loss_fn = torch.nn.functional.mse_loss
    stages = [PipelineStage(layer, i, 2, torch.device("cpu")) for i, layer in enumerate(layers)]
    exec(program, {"stages": stages, "loss_fn": loss_fn, "inputs": inputs, "labels": labels})
    found = [parameter.grad for parameter in layers.parameters()]
    layers.zero_grad()
    loss_fn(layers[1](layers[0](inputs)), labels).backward()
    wanted = [parameter.grad for parameter in layers.parameters()]
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)


def test_torch_trains_with_the_csv_as_the_page_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (DOCS / "schedules.md").read_text()
    (program,) = (block.text for block in blocks(text) if "_load_csv(" in block.text)
    write_schedule(make_schedule("zb-v", 1, 4), tmp_path / "mine.csv")
    monkeypatch.chdir(tmp_path)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        torch_trains(program)
    finally:
        dist.destroy_process_group()


# As print_schedule of sail-sg/zero-bubble-pipeline-parallelism writes them, for 2 ranks and 3 microbatches.
ZERO_BUBBLE_LINES = {
    "1f1b": "f0 f1 b0 f2 b1 b2\nf0 b0 f1 b1 f2 b2\n",
    "zb-v": (
        "f0 f1 F0 B0 W0 F1 B1 b0 W1 w0 f2 F2 B2 b1 W2 b2 w1 w2\n"
        "f0 F0 f1 SF0 F1 B0 W0 b0 B1 b1 w0 W1 f2 w1 F2 B2 b2 W2 w2"
    ),
}


@pytest.mark.parametrize("name", TRAINING)
def test_schedules_survive_zero_bubble_text_unchanged(name: str, tmp_path: Path) -> None:
    schedule = make_schedule(name, 3, 8)
    file = tmp_path / "schedule.txt"
    if schedule.pairs:
        assert "has pairs of ops" in error_text(lambda: write_schedule(schedule, file))
        return
    write_schedule(schedule, file)
    assert read_schedule(file) == replace(schedule, name="schedule")


def test_zero_bubble_text_is_read_or_refused_with_the_reason() -> None:
    one = from_zero_bubble(ZERO_BUBBLE_LINES["1f1b"])
    assert one.orders == make_schedule("1f1b", 2, 3).orders and one.placement == (0, 1)
    both = from_zero_bubble(ZERO_BUBBLE_LINES["zb-v"])
    verify(both)
    assert both.placement == (0, 1, 1, 0) and both.orders[1][:3] == tuple(map(Op.parse, ("1F0", "2F0", "1F1")))
    for text, words in (
        ("f0 x0\nf0", "'x0' on line 1 is not an op"),
        ("f0 F0 F0", "has F0 twice"),
        ("f0 b0\nf0 F0 b0 B0", "1 or 2 chunks"),
        ("f0 b0\nb0 f0", "neither in a loop nor in a zigzag"),
    ):
        assert words in error_text(lambda: from_zero_bubble(text))  # noqa: B023
    assert "tell two apart" in error_text(lambda: to_zero_bubble(make_schedule("interleaved", 2, 4, 3)))


def test_schedules_are_made_and_simulated_without_torch() -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from triax.pipe.program import draw, ops, passes, simulate, verify\n"
        "from triax.pipe.schedules.choose import make_schedule\n"
        "s = make_schedule('zb-v', 2, 4); verify.verify(passes.lower(s)); simulate.simulate(s)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": ":".join(sys.path)})


def test_schedules_equal_the_orders_of_torch() -> None:
    pipelining = pytest.importorskip("torch.distributed.pipelining.schedules")

    def theirs(kind: str, pipe: int, m: int, placement: tuple[int, ...]) -> Schedule:
        maker = object.__new__(getattr(pipelining, kind))
        maker.pp_group_size, maker._n_microbatches, maker.n_local_stages = pipe, m, 2
        maker._num_stages = maker.num_stages = 2 * pipe
        maker.number_of_rounds = max(1, m // pipe)
        maker.microbatches_per_round = m // maker.number_of_rounds
        lines = []
        for rank in range(pipe):
            maker.rank = rank
            actions = [a for a in maker._calculate_single_rank_operations(rank) if a is not None]
            lines.append(",".join(str(part) for a in actions for part in (a.sub_actions or (a,))))
        return Schedule.from_csv("\n".join(lines))

    try:
        for p in (2, 3, 4):
            for m in (2 * p, 4 * p):
                assert theirs("ScheduleInterleaved1F1B", p, m, loop(p, 2)).orders == (
                    make_schedule("interleaved", p, m).orders
                )
                assert theirs("ScheduleDualPipeV", p, m, zigzag(p, 2)).orders == (
                    make_schedule("dualpipe-v", p, m).orders
                )
            for m in range(1, 3 * p):
                ours, torchs = make_schedule("zb-v", p, m), theirs("ScheduleZBVZeroBubble", p, m, zigzag(p, 2))
                assert simulate(ours).makespan <= simulate(torchs).makespan + 1e-9
                assert peak(ours) <= peak(torchs)
    except AttributeError as error:
        pytest.fail(f"torch's pipelining is not what it was when this was written for 2.13: {error}")


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", TRAINING)
def test_large_schedules_are_made_and_simulated_in_seconds(name: str) -> None:
    begin = time.process_time()
    schedule = make_schedule(name, 32, 256)
    verify(schedule)
    simulate(schedule)
    assert time.process_time() - begin < 1.5
    if name == "1f1b":
        begin = time.process_time()
        schedule = make_schedule(name, 64, 4096)
        verify(schedule)
        simulate(schedule)
        assert time.process_time() - begin < 10


@pytest.mark.exhaustive
@pytest.mark.parametrize("pipe", [1, 2, 3, 5, 6, 8, 12, 16, 24, 32])
def test_every_named_schedule_verifies_at_every_size(pipe: int) -> None:
    for name, recipe in RECIPES.items():
        for m in {1, 2, pipe - 1, pipe, pipe + 1, 2 * pipe, 3 * pipe - 1, 64} - {0}:
            for chunks in (1, 2, 3, 4):
                if recipe.accepts(chunks) and m >= recipe.least(pipe):
                    verify(make_schedule(name, pipe, m, chunks))


# ------------------------------------------------------------------------------------------ the command


def run(*words: str) -> tuple[int, str]:
    return run_triax("schedule", *words)


def test_triax_schedule_prints_one_json_object() -> None:
    code, output = run("zb-v", "--pipe", "4", "--microbatches", "8", "--json")
    assert code == 0
    found = json.loads(output)
    expected = make_schedule("zb-v", 4, 8)
    assert found["orders"] == [[str(op) for op in order] for order in expected.orders]
    assert found["placement"] == [0, 1, 2, 3, 3, 2, 1, 0] and found["chunks"] == 2
    assert found["makespan"] == 25.5 and found["peak_activations"] == [4, 4, 4, 4]
    assert found["bubble"] == pytest.approx(1.5 / 25.5)


# Sizes that the command takes for 4 ranks if none are typed: microbatches and chunks.
DEFAULT_SIZES = {
    **dict.fromkeys(["gpipe", "1f1b", "eager-1f1b", "zb-h1", "zb-h2"], (8, 1)),
    **dict.fromkeys(["interleaved", "looped-bfs", "zb-v", "v-half", "v-min", "dualpipe-v", "wave"], (8, 2)),
    "stp": (11, 2),  # its least number
}


@pytest.mark.parametrize("name", TRAINING)
def test_triax_schedule_prints_default_sizes_in_80_columns(name: str) -> None:
    microbatches, chunks = DEFAULT_SIZES[name]
    code, output = run(name)
    assert output.startswith(f"{name}: pipe 4, microbatches {microbatches}, chunks {chunks}, costs F 1, I 1, W 1")
    assert code == 0 and max(map(len, output.splitlines())) <= 80


def test_triax_schedule_prints_a_large_size_in_80_columns() -> None:
    code, output = run("1f1b", "--pipe", "16", "--microbatches", "64", "--costs", "1,1,1,0.1")
    assert output.startswith("1f1b: pipe 16, microbatches 64, chunks 1, costs F 1, I 1, W 1, message 0.1")
    assert code == 0 and max(map(len, output.splitlines())) <= 80


def test_a_schedule_has_two_microbatches_a_rank_by_default() -> None:
    assert run("1f1b", "--pipe", "3")[1].startswith("1f1b: pipe 3, microbatches 6, chunks 1")


def test_schedule_compare_lists_the_schedules_that_fit() -> None:
    code, output = run("compare", "--pipe", "4", "--microbatches", "8", "--memory", "3", "--json")
    assert code == 0
    assert {row["name"] for row in json.loads(output)["schedules"]} == {"v-half", "v-min"}
    code, output = run("compare", "--pipe", "4", "--microbatches", "11")
    assert code == 0 and all(name in output for name in TRAINING)


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package on the path with a schedule ``mine`` for an even number of microbatches."""
    info = tmp_path / "mine-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[triax.schedules]\nmine = mine_schedules:mine\nodd = mine_schedules:odd\n")
    (tmp_path / "mine_schedules.py").write_text(
        "import triax\n"
        "def mine(pipe, microbatches, chunks):\n"
        "    if microbatches % 2:\n"
        "        raise ValueError('mine takes an even number of microbatches')\n"
        "    return triax.make_schedule('interleaved', pipe, microbatches, chunks or 3)\n"
        "def odd(pipe, microbatches, chunks):\n"
        "    return 'F0'\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def test_schedules_of_installed_packages_are_found_by_name(package: Path) -> None:
    assert schedule_names()[-2:] == ("mine", "odd")
    assert make_schedule("mine", 2, 4) == make_schedule("interleaved", 2, 4, 3)
    require_schedule("pipeline.schedule", "mine")
    with pytest.raises(ConfigError, match=r"pipeline\.schedule: there is no 'mien'; did you mean 'mine'\?"):
        require_schedule("pipeline.schedule", "mien")
    with pytest.raises(ValueError, match="mine takes an even number"):
        make_schedule("mine", 2, 3)
    with pytest.raises(TypeError, match="mine_schedules:odd returned a str, but must return a Schedule"):
        make_schedule("odd", 2, 4)
    (package / "mine-1.0.dist-info" / "entry_points.txt").write_text("[triax.schedules]\nmine = mine_schedules:mine\n")
    installed.cache_clear()  # as in the next process
    assert "mine" not in run("compare", "--pipe", "2", "--microbatches", "3")[1]
    assert "interleaved" in run("mine", "--pipe", "2")[1]


def test_triax_schedule_reads_a_file_of_a_user(tmp_path) -> None:  # type: ignore[no-untyped-def]
    mine = tmp_path / "mine.csv"
    mine.write_text("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n")
    code, output = run(str(mine), "--json", "--plot", str(tmp_path / "mine.svg"))
    assert code == 0 and json.loads(output)["name"] == "mine"
    assert (tmp_path / "mine.svg").read_text().startswith("<?xml")
    again = tmp_path / "again.json"
    again.write_text(output)
    assert run(str(again), "--json")[0] == 0
    code, output = run("compare", str(mine), "--json")
    compared = json.loads(output)
    assert code == 0 and (compared["pipe"], compared["microbatches"]) == (2, 2)
    found = {row["name"]: row["makespan"] for row in compared["schedules"]}
    assert found["mine"] == found["1f1b"] > found["zb-h1"]
    code, output = run("compare", str(mine), "--memory", "1")
    assert code == 2 and "rank 0 may hold 1 activations" in output
    code, output = run("compare", str(mine), "--pipe", "4")
    assert code == 2 and "has pipe=2. Leave it out." in output
    code, output = run(str(mine), "--chunks", "2")
    assert code == 2 and "mine.csv has chunks=1" in output
    mine.write_text("0F0,0F1,0B1,0B0\n1F0,1B0\n")
    code, output = run(str(mine))
    assert code == 2 and "rank 1 never runs 1F1" in output


@pytest.mark.parametrize(
    ("words", "kind", "message"),
    [
        (["1f1b", "--offload", "1"], "O", "--offload copies nothing"),
        (["1f1b", "--microbatches", "2", "--recompute", "0.5"], "C", "--recompute recomputes nothing"),
        (["1f1b", "--pairs"], "&", "--pairs joins no passes"),
    ],
)
def test_triax_schedule_warns_if_an_option_does_nothing(words: list[str], kind: str, message: str) -> None:
    larger = ["dualpipe-v", "--pairs", "--collectives", "0.5"] if kind == "&" else words
    for given, nothing in ([*words, "--pipe", "2"], True), ([*larger, "--pipe", "4", "--microbatches", "8"], False):
        result = CliRunner().invoke(app, ["schedule", *given, "--json"])
        schedule = Schedule.from_json(json.loads(result.stdout))
        found = schedule.pairs or [op for order in schedule.orders for op in order if op.kind == kind]
        assert (not found) is (message in result.stderr) is nothing


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--pipe", "4"], "Missing argument"),
        (["--compare", "--pipe", "2"], "--compare is a verb now: type triax schedule compare"),
        (["zb-v", "--compare"], "--compare is a verb now: type triax schedule compare"),
        (["zb-v", "--file", "x.csv"], "--file is a verb now: type triax schedule FILE"),
        (["comapre", "--pipe", "4"], "did you mean 'compare'?"),
        (["compare", "zb-v"], "the schedule zb-v cannot be read"),
        (["1f1b", "--pipe", "x"], "--pipe = 'x': give a whole number"),
        (["1f1b", "--pipe", "0"], "--pipe = 0: give 1 or more"),
        (["1f1b", "--pipes", "2"], "triax schedule show has no --pipes; did you mean --pipe?"),
        (["zbv", "--pipe", "4", "--microbatches", "8"], "did you mean 'zb-v'?"),
        (["1f1b", "--pipe", "2", "--microbatches", "2", "--costs", "1,2"], "F,I,W"),
        (["1f1b", "--pipe", "4", "--microbatches", "8", "--memory", "3"], "rank 0 may hold 3 activations"),
        (["zb-v", "--pipe", "4", "--microbatches", "8", "--chunks", "3"], "chunks=2"),
        (["1f1b", "--pipe", "2", "--microbatches", "2", "--plot", "x.gif"], ".png"),
        (["1f1b", "--pipe", "1000000", "--microbatches", "4"], "at most 1,048,576 are simulated"),
        (["compare", "--pipe", "4", "--microbatches", "1000000000"], "at most 1,048,576 are simulated"),
        (
            ["1f1b", "--pipe", "2", "--microbatches", "2", "--costs", "1e308,1e308,1"],
            "give a number of 3.4e+38 or less",
        ),
    ],
)
def test_triax_schedule_errors_say_what_to_type(words: list[str], message: str) -> None:
    code, output = run(*words)
    assert code == 2 and message in output


def test_triax_schedule_refuses_a_deeply_nested_file(tmp_path: Path) -> None:
    (tmp_path / "deep.json").write_text("[" * 100_000 + "]" * 100_000)
    code, output = run(str(tmp_path / "deep.json"))
    assert code == 2 and "nested too deeply" in output
