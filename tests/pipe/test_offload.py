"""Offload of activations as ops: placed, verified, simulated, drawn and run; PipeOffload's claims."""

from __future__ import annotations

import json
import random
import sys
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from typer.testing import CliRunner

import triax
from triax import Costs, Grid, LayerSpec, PipelineModule, make_schedule, simulate, verify
from triax.cli.main import app
from triax.engine.setup.asked_schedule import schedule_of
from triax.grid.comm.spans import OpenSpan
from triax.pipe.program.critical import CriticalPath
from triax.pipe.program.deadlock import ScheduleError
from triax.pipe.program.draw import chrome_trace
from triax.pipe.program.draw import text as drawn
from triax.pipe.program.offload import offload_pass
from triax.pipe.program.ops import Op
from triax.pipe.program.passes import lower
from triax.pipe.program.recompute_pass import recompute_pass
from triax.pipe.program.schedule import Schedule
from triax.pipe.schedules.choose import write_schedule
from triax.pipe.schedules.fitting import find_fitting
from triax.pipe.schedules.search import find_schedule
from triax.testing.strategies import schedules

from support.schedule_runner import assert_verify_accepts_what_runs, ops
from support.toys import error_text, random_pair, summed_loss
from support.training import pipeline_engine, tiny_gpt

NAMES = ("gpipe", "1f1b", "interleaved", "looped-bfs", "zb-h1", "zb-v", "v-half")
VOCABULARY, LENGTH, SAMPLES = 37, 6, 12


def replayed(schedule: Schedule, costs: Costs) -> tuple[float, list[float]]:
    """Return the makespan and the bytes that each rank holds at most, from the spans of the simulation alone."""
    times = simulate(schedule, costs).timeline
    peaks = []
    for row, lane in zip(times.rows, times.transfers or [()] * schedule.pipe, strict=True):
        changes = [(span.start, 1) for span in row if span.op.kind == "F"]
        changes += [(span.end, -1) for span in row if span.op.kind in "BW"]
        changes += [(span.end, -1) if span.op.kind == "O" else (span.start, 1) for span in lane]
        held, most = 0, 0
        for _, change in sorted(changes):
            held += change
            most = max(most, held)
        peaks.append(most / schedule.chunks)
    return times.makespan, peaks


@pytest.mark.parametrize(
    ("pipe", "microbatches"), [(4, 8), (8, 32), pytest.param(16, 64, marks=pytest.mark.exhaustive)]
)
def test_pipeoffload_lowers_memory_without_more_time(pipe: int, microbatches: int) -> None:
    for name in ("1f1b", "interleaved", "zb-v"):
        plain = make_schedule(name, pipe, microbatches)
        for copy in (0.25, 0.9, 1.0):  # T_offload <= T_compute: F = I = W = 1
            costs = Costs(O=copy, R=copy)
            before, held = simulate(plain, costs), simulate(plain, costs).peak_activations
            half, whole = (offload_pass(plain, fraction, costs=costs) for fraction in (0.5, 1.0))
            for schedule in (half, whole):
                verify(schedule, list(simulate(schedule, costs).peak_activations))
                makespan, peaks = replayed(schedule, costs)
                assert makespan == pytest.approx(before.makespan, rel=1e-12)
                assert all(a <= b for a, b in zip(peaks, simulate(schedule, costs).peak_activations, strict=True))
            of_half, of_whole = simulate(half, costs).peak_activations, simulate(whole, costs).peak_activations
            if name == "1f1b":  # one microbatch is computed, one leaves and one comes back
                assert of_whole == tuple(min(pipe - rank, 3) for rank in range(pipe))
                assert of_half == tuple(min(pipe - rank, (pipe - rank + 1) // 2 + 1) for rank in range(pipe))
            elif name == "interleaved":  # 3 of the v = 2 chunks
                assert of_whole == (*[1.5] * (pipe - 1), 1.0)
                assert max(of_half) < 0.56 * max(held)
            elif copy == 1.0:  # the chunk that lives longer leaves: what stays is what waits for W, more on later ranks
                assert of_half == of_whole == (*(1.5 + rank for rank in range(pipe - 1)), pipe)


@settings(max_examples=100, derandomize=True)
@given(schedules(NAMES), st.floats(0, 1), *[st.floats(0.1, 3)] * 5)
def test_offload_never_costs_time(
    schedule: Schedule, fraction: float, f: float, i: float, w: float, o: float, r: float
) -> None:
    costs = Costs(F=f, I=i, W=w, COMM=0.1, O=o, R=r)
    found = offload_pass(schedule, fraction, costs=costs)
    after, before = simulate(found, costs), simulate(schedule, costs)
    assert after.makespan <= before.makespan * (1 + 1e-9)
    assert all(a <= b for a, b in zip(after.peak_activations, before.peak_activations, strict=True))
    verify(lower(found, 3), list(after.peak_activations))
    assert Schedule.from_json(found.to_json()) == found
    assert Schedule.from_csv(found.to_csv()).orders == found.orders
    count = sum(op.kind == "O" for order in found.orders for op in order)
    assert count <= (fraction + 1e-6) * schedule.stages * schedule.microbatches
    if count:
        assert "write a .json file" in error_text(lambda: write_schedule(found, Path("x.csv")))


def test_the_critical_path_passes_through_copies() -> None:
    schedule = replace(make_schedule("1f1b", 1, 2), orders=(ops("0F0 0O0 0F1 0B1 0R0 0B0"),))
    causes = CriticalPath(schedule, Costs(O=2.5, R=3))
    assert [str(span.op) for span in causes.path] == ["0F0", "0F1", "0B1", "0R0", "0B0"]
    assert sum(span.end - span.start for span in causes.path) == causes.timeline.makespan == 9
    assert "It starts when 0R0 has ended, at 7" in causes.explain(Op("B", 0, 0))
    # An F waits for an offload that was issued before the op before it.
    waits = replace(make_schedule("1f1b", 1, 3), orders=(ops("0F0 0O0 0F1 0F2 0R0 0B0 0B1 0B2"),))
    assert simulate(waits, Costs(O=4, R=0)).timeline.rows[0][2].start == 5
    assert "copies" in drawn(waits).plain and "O  offload" in drawn(waits).plain
    names = [event["name"] for event in chrome_trace(simulate(waits).timeline)["traceEvents"]]
    assert {"0O0", "0R0"} <= {*names}


@pytest.mark.parametrize(
    ("order", "words"),
    [
        ("0F0 0O0 0B0", "0O0 has offloaded its activations: put 0R0 before"),
        ("0F0 0R0 0B0", "0R0 needs 0O0, which is not there"),
        ("0O0 0F0 0R0 0B0", "0O0 runs before 0F0"),
        ("0F0 0R0 0O0 0B0", "0R0 runs before 0O0"),
        ("0F0 0O0 0O0 0R0 0B0", "0O0 more than once"),
        ("0F0 0O0 0R0 0I0 0W0 0O0", "0O0 more than once"),
        ("0F0 0O0 0R0 0O0 0R0 0B0", "0O0 more than once"),
        ("0F0 0I0 0O0 0R0 0W0", "are needed no more"),
        ("0F0 0O0", "never runs 0R0"),
        ("0F0 0O0 0R0", "never runs 0B0"),
    ],
)
def test_verify_names_the_reason_of_misplaced_copies(order: str, words: str) -> None:
    schedule = replace(make_schedule("1f1b", 1, 1), orders=(ops(order),))
    assert words in error_text(lambda: verify(schedule), ScheduleError)


def test_offload_pass_refuses_wrong_arguments() -> None:
    plain = make_schedule("1f1b", 4, 8)
    for arguments, words in (((1.5,), "from 0 to 1"), ((1.0, [4]), "stages are 0 to 3")):
        assert words in error_text(lambda: offload_pass(plain, *arguments))  # noqa: B023
    assert "already" in error_text(lambda: offload_pass(offload_pass(plain)))
    kept = offload_pass(plain, stages=[0])
    assert {op.stage for order in kept.orders for op in order if op.kind in "OR"} == {0}
    with pytest.raises(ScheduleError, match="rank 0 may hold 2 activations, but at 0R0 it holds 3"):
        verify(kept, 2)


def mutant(seed: int) -> Schedule:
    """Return an offloading schedule of which one rank has ops that were moved, dropped or doubled, or none."""
    draw = random.Random(seed)
    pipe, name = draw.randint(1, 3), draw.choice(NAMES)
    made = make_schedule(name, pipe, draw.randint(1, 5))
    made = offload_pass(made, draw.choice((0.5, 1.0)), costs=Costs(O=draw.random(), R=draw.random()))
    if seed % 2:
        made = recompute_pass(made, draw.choice((0.5, 1.0)))
    rank = draw.randrange(pipe)
    order = list(made.orders[rank])
    for _ in range(draw.randint(0, 3)):
        # O and R are inserted and moved more than others
        i = draw.choice([k for k, op in enumerate(order) if op.kind in "ORC"] or range(len(order)))
        how = draw.randrange(3)
        op = order[i] if how == 2 else order.pop(i)
        if how:
            order.insert(draw.randint(0, len(order)), op)
        if order and draw.random() < 0.5:
            _, stage, microbatch = draw.choice(order)
            order.insert(draw.randint(0, len(order)), Op(draw.choice("ORC"), stage, microbatch))
        if not order:
            break
    return replace(made, orders=(*made.orders[:rank], tuple(order), *made.orders[rank + 1 :]))


@pytest.mark.parametrize("seeds", [range(300), pytest.param(range(300, 2300), marks=pytest.mark.exhaustive)])
def test_verify_accepts_only_offload_orders_that_run(seeds: range) -> None:
    assert_verify_accepts_what_runs((mutant(seed), 0) for seed in seeds)


# ---------------------------------------------------------------------------------------------------- execution

Cell = tuple[str, int, dict[str, Any], dict[str, Any]]  # schedule, ZeRO stage, offload, recompute


def one_process_engine(
    layers: list[Any], size: int, stage: int = 0, sections: dict[str, Any] | None = None, **schedule: Any
) -> triax.PipelineEngine:
    """Return an engine on this process. ``schedule``: the options of its schedule."""
    module = PipelineModule(layers, grid=Grid(), loss_fn=summed_loss, dtype=torch.float64)
    sections = {"schedule": triax.ScheduleOptions(**schedule), **(sections or {})}
    return pipeline_engine(module, triax.Batch(size=size, microbatch=1), stage, **sections)


def split_gpipe(pipe: int, microbatches: int) -> Schedule:
    """GPipe with each backward split, so that weight gradients read what was reloaded for the input gradient."""
    made = make_schedule("gpipe", pipe, microbatches)
    halves = [
        [op._replace(kind=kind) for op in order for kind in ("IW" if op.kind == "B" else "F")] for order in made.orders
    ]
    return replace(made, name="split", orders=tuple(map(tuple, halves)))


def train(pipe: int, data: int, cells: list[Cell]) -> list[Any]:
    """Return loss, gradients and offloads of each cell: a GPT with dropout and a tied head, in float64."""
    here, found = Grid(pipe=pipe, data=data, timeout=60), []
    rows = torch.randint(VOCABULARY, (SAMPLES, LENGTH + 1), generator=torch.Generator().manual_seed(3))
    for name, stage, offload, recompute in cells:
        model = tiny_gpt(here, dropout=0.1, tie_word_embeddings=True)
        again = 1.0 if name.startswith("again ") else 0.0
        name = name.removeprefix("again ")
        value = split_gpipe(pipe, SAMPLES // data) if name == "split" else None
        section = triax.OffloadActivations(**offload)
        schedule = triax.ScheduleOptions(name=name, value=value, offload=section, recompute=again)
        options = {"optimizer": torch.optim.AdamW, "schedule": schedule, "recompute": recompute}
        engine = pipeline_engine(model, triax.Batch(size=SAMPLES, microbatch=1), stage, **options)
        share = SAMPLES // here.data.size
        mine = rows[here.data.rank * share : (here.data.rank + 1) * share]
        for _ in range(2):
            loss = engine.train_batch(iter([(row[None, :-1], row[None, 1:]) for row in mine])).item()
        offloads = sum(op.kind == ("C" if again else "O") for ops in engine.program.ops for op in ops)
        found.append((loss, engine.gather("gradients"), offloads))
    return found


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
def test_training_with_offload_equals_one_process(ranks: Any, tmp_path: Path, every: bool) -> None:
    cpu, disk = {"device": "cpu", "copy_time": 0.1}, {"device": "nvme", "path": str(tmp_path), "copy_time": 0.1}
    half = {**cpu, "fraction": 0.5}
    pipe: list[Cell] = [("gpipe", 0, cpu, {}), ("again gpipe", 0, {}, {})]
    replicas: list[Cell] = [
        ("gpipe", 3, disk, {}),
        ("interleaved", 2, half, {"granularity": "matmul"}),
        ("again split", 1, half, {}),
    ]
    if every:
        replicas += [
            ("gpipe", 2, half, {"enabled": True}),
            ("interleaved", 3, cpu, {"granularity": "matmul"}),
            ("split", 1, cpu, {}),
            ("again interleaved", 3, {}, {}),
        ]
    loss, gradients, _ = train(1, 1, [("1f1b", 0, {}, {})])[0]
    for data, cells in ((1, pipe), (2, replicas)):
        for rank in ranks(2 * data, train, 2, data, cells, timeout=120):
            for value, own, offloads in rank:
                assert offloads and value == pytest.approx(loss, rel=1e-10)
                torch.testing.assert_close(own, gradients, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("memory", [2.5, pytest.param(1.5, marks=pytest.mark.exhaustive)])
def test_auto_offloads_if_that_shortens_the_step(memory: float) -> None:
    costs = Costs(O=0.8, R=0.8)
    plain = find_schedule(4, 8, costs, memory, effort=0.01)
    found = find_fitting(4, 8, costs, memory, offload=1, effort=0.01)
    verify(found, memory)
    assert found.offloads and found.makespan < 0.9 * plain.makespan
    assert found.lower_bound <= found.makespan == pytest.approx(replayed(found, costs)[0])
    allowed = find_fitting(4, 8, costs, memory, 2, offload=1, stages=[0, 7], effort=0.01)
    assert {op.stage for order in allowed.orders for op in order if op.kind == "O"} <= {0, 7}
    assert "give chunks" in error_text(lambda: find_fitting(4, 8, costs, memory, offload=1, stages=[0]))
    slow = find_fitting(4, 8, Costs(O=50, R=50), memory, offload=1, effort=0.01)  # no copy fits
    assert not slow.offloads and slow.makespan == plain.makespan


def test_options_of_auto_reach_the_search_of_offload(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("triax.pipe.schedules.search.EFFORT", 40_000)
    offload = triax.OffloadActivations(device="cpu", copy_time=0.1)
    options = triax.ScheduleOptions(name="auto", memory=1.5, offload=offload)
    found = schedule_of(options, 2, 6, None)
    verify(found, 1.5)
    assert found.offloads
    engine = one_process_engine([LayerSpec(nn.Linear, 4, 4)] * 2, 4, name="auto", memory=1.0, offload=offload)
    # One rank is busy all the time with one microbatch after the other: the search offloads nothing, and so it stays.
    assert not any(op.kind == "O" for op in engine.program.ops[0])
    run = CliRunner().invoke(app, ["schedule", "auto", "--pipe", "2", "--memory", "1.5", "--offload", "1"])
    assert run.exit_code == 0 and "in host memory" in run.output and "above the lower bound" in run.output


def makespan_of(schedule: Schedule) -> float:
    """Return the end of the last op of stages on as many ranks; B takes 2, F and C take 1, a message takes no time."""
    ends: dict[tuple[str, int, int], float] = {}
    queues, now = [list(order) for order in schedule.orders], [0.0] * schedule.pipe
    while any(queues):
        for rank, queue in enumerate(queues):
            while queue:
                op = queue[0]
                before = {"F": op.stage - 1, "B": op.stage + 1}.get(op.kind, -1)
                needed = (op.kind, before, op.microbatch)
                if 0 <= before < schedule.pipe and needed not in ends:
                    break
                now[rank] = max(now[rank], ends.get(needed, 0.0)) + (2 if op.kind == "B" else 1)
                ends[op.kind, op.stage, op.microbatch] = now[rank]
                del queue[0]
    return max(now)


def test_recompute_pass_lowers_each_peak_to_one_microbatch() -> None:
    for name in ("1f1b", "gpipe"):
        recomputed = recompute_pass(make_schedule(name, pipe=4, microbatches=8))
        verify(recomputed, memory=1)
        assert simulate(recomputed).peak_activations == (1.0,) * 4
    assert not any(op.kind == "C" for op in recompute_pass(make_schedule("1f1b", 4, 8)).orders[3])  # its peak was 1


def test_recompute_ops_take_no_time_where_a_rank_waits() -> None:
    """An op C takes as long as F, and runs while its rank waits for a gradient; within each backward it adds 1 to B."""
    stages, microbatches = 4, 8
    plain = make_schedule("1f1b", stages, microbatches)
    without = (microbatches + stages - 1) * (1 + 2)  # of 1F1B: (m + p - 1) (F + B)
    within_backward = (microbatches + stages - 1) * (1 + 3)
    assert (makespan_of(plain), simulate(plain).makespan) == (without, without)
    assert simulate(plain, Costs(F=1, I=2, W=1)).makespan == within_backward  # B = I + W
    recomputed = recompute_pass(plain)
    assert without < simulate(recomputed).makespan == makespan_of(recomputed) == 39 < within_backward
    # GPipe: all forwards, then on the last rank C and B of each microbatch, then the last B on the other ranks.
    gpipe = recompute_pass(make_schedule("gpipe", stages, microbatches))
    wanted = (microbatches + stages - 1) + microbatches * (1 + 2) + (stages - 1) * 2
    assert simulate(gpipe).makespan == makespan_of(gpipe) == wanted


def test_drawings_and_critical_paths_show_recompute_ops() -> None:
    recomputed = recompute_pass(make_schedule("1f1b", pipe=4, microbatches=8))
    assert "C0" in drawn(simulate(recomputed).timeline).plain
    path, again = CriticalPath(recomputed), Op("C", 0, 1)
    assert again in [cause.op for cause in path.causes(Op("B", 0, 1))]
    assert "when rank 0 has ended 0F4" in path.explain(again)
    assert sum(span.end - span.start for span in path.path) == pytest.approx(makespan_of(recomputed))


@pytest.mark.parametrize(
    ("order", "message"),
    [
        ("0F0 0C0 0C0 0B0", "runs 0C0 more than once"),
        ("0C0 0F0 0B0", "0C0 runs before 0F0"),
        ("0F0 0B0 0C0", "the backward of stage 0 on microbatch 0 is already there"),
        ("0F0 0O0 0C0 0R0 0B0", "are offloaded"),
        ("0F0 0C0 0O0 0R0 0B0", "are recomputed"),
    ],
)
def test_verify_refuses_recompute_ops_at_wrong_places(order: str, message: str) -> None:
    one_rank = Schedule("one", 1, 1, 1, (0,), (ops("0F0 0C0 0B0"),))
    verify(one_rank)
    assert message in error_text(lambda: verify(replace(one_rank, orders=(ops(order),))))


@pytest.mark.parametrize("memory", [1, pytest.param(1.5, marks=pytest.mark.exhaustive)])
def test_auto_recomputes_if_that_shortens_the_step(memory: float) -> None:
    costs = Costs(0.5, 1, 1)
    plain = find_schedule(4, 8, costs, memory, effort=0.01)
    found = find_fitting(4, 8, costs, memory, recompute=1, effort=0.01)
    verify(found, memory)
    assert found.recomputes and not found.offloads and found.makespan < plain.makespan
    assert found.lower_bound <= found.makespan
    run = CliRunner().invoke(app, ["schedule", "1f1b", "--recompute", "1", "--json"])
    assert json.loads(run.output)["orders"] == [
        list(map(str, order)) for order in recompute_pass(make_schedule("1f1b", 4, 8)).orders
    ]


def test_auto_recomputes_among_schedules_with_pairs() -> None:
    """STP exists at this size. Its pairs, which the search does not know, run one after the other."""
    found = find_fitting(2, 8, Costs(), 1.5, recompute=1, effort=0.01)
    verify(found, 1.5)
    assert not found.pairs and found.makespan == simulate(found).makespan


def test_recomputation_by_two_options_is_refused() -> None:
    twice: dict[str, Any] = {"name": "gpipe", "recompute": 1, "sections": {"recompute": {"enabled": True}}}
    message = error_text(lambda: one_process_engine([LayerSpec(nn.Linear, 4, 4)], 4, **twice))
    assert "leave one of them out" in message


def test_offload_holds_no_more_bytes_than_simulated() -> None:
    width, count, most = 512, 6, {}
    for device in ("none", "cpu"):
        layers: list[Any] = [LayerSpec(nn.Linear, width, width, bias=False), torch.tanh]
        offload = triax.OffloadActivations.of({"device": device, "copy_time": 0.5})
        engine = one_process_engine(layers, count, name="gpipe", offload=offload)
        held: list[int] = []
        alive: list[weakref.ref[Tensor]] = []

        @contextmanager
        def counted(span: OpenSpan, held: list[int] = held, alive: list[Any] = alive) -> Iterator[None]:
            yield
            op: Op = span.about
            kept = engine.executor.last_run.held[op.stage, op.microbatch].kept  # noqa: B023
            if kept is not None:
                alive.extend(weakref.ref(piece.data) for piece in kept._pieces.values() if piece.data is not None)
            held.append(sum(data.numel() for ref in alive if (data := ref()) is not None))

        engine.spans.read(counted, "F")
        losses = [engine.train_batch(iter([random_pair(i, 1, width) for i in range(count)])).item() for _ in range(2)]
        most[device] = max(held), losses, engine
    (_, losses, _), (bytes_, same, engine) = most["none"], most["cpu"]
    assert same == losses
    schedule, lane = engine.program.schedule, engine.executor._lane
    (peak,) = simulate(schedule).peak_activations
    assert peak < count and lane is not None
    one = lane.peak_bytes / simulate(schedule).peak_offloaded[0]  # bytes that autograd keeps of a microbatch
    assert one >= 2 * 8 * width and 0 < bytes_ <= peak * one < count * one
    assert sum(size * len(free) for size, free in lane._free.items()) <= lane.peak_bytes  # buffers are used again


class Overwrites(nn.Module):
    """Keeps exp's output for its gradient, and then changes it."""

    def forward(self, x: Tensor) -> Tensor:
        y = x.exp()
        y.add_(1)
        return y


def test_offload_refuses_saved_tensors_that_change_in_place() -> None:
    layers = [LayerSpec(nn.Linear, 4, 4), LayerSpec(Overwrites), LayerSpec(nn.Linear, 4, 4)]
    engine = one_process_engine(layers, 8, name="gpipe", offload=triax.OffloadActivations(device="cpu"))
    with pytest.raises(RuntimeError, match="changed in place after a layer had used it"):
        engine.train_batch(iter([random_pair(i, 1, 4) for i in range(8)]))


class Activations(nn.Module):
    """A linear layer, after which autograd saves a number of activations."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.linear, self.number = nn.Linear(4, 4), number

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        for _ in range(self.number):
            x = x.tanh()
        return x


def test_offload_looks_for_stage_3_weights_after_gathers_only() -> None:
    """Each saved activation costs a few looks at its own storage, and none at the storages of all weights."""
    looks = Counter[int]()

    def profile(frame: Any, event: str, argument: Any) -> None:
        looks[number] += event == "c_call" and argument.__name__ == "untyped_storage"

    layers, samples = 12, 8
    for number in (1, 9):
        offload = triax.OffloadActivations(device="cpu", copy_time=0.1)
        saving = [LayerSpec(Activations, number)] * layers
        engine = one_process_engine(saving, samples, name="gpipe", offload=offload, stage=3)
        batch = [random_pair(i, 1, 4) for i in range(samples)]
        before = sys.getprofile()
        sys.setprofile(profile)
        try:
            engine.train_batch(iter(batch))
        finally:
            sys.setprofile(before)
    assert any(op.kind == "O" for op in engine.program.ops[0])
    assert 0 < looks[9] - looks[1] <= 4 * 8 * layers * samples
