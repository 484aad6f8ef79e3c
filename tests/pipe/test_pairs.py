"""Pairs of passes: STP's formulas, pairs of any schedule, what verify accepts, and training with two lanes."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import triax
from triax import Costs, Grid, LayerSpec, PipelineModule, make_schedule, simulate, verify
from triax.grid.comm.axis import Operation
from triax.grid.comm.spans import OpenSpan
from triax.models.gpt import GPTConfig, GPTLoss, gpt_layers
from triax.options.schedule import ScheduleOptions
from triax.pipe.program.critical import CriticalPath
from triax.pipe.program.deadlock import ScheduleError
from triax.pipe.program.draw import chrome_trace
from triax.pipe.program.draw import text as drawn
from triax.pipe.program.offload import offload_pass
from triax.pipe.program.ops import COMPUTE, Op
from triax.pipe.program.pairs import pair_pass
from triax.pipe.program.passes import lower
from triax.pipe.program.recompute_pass import recompute_pass
from triax.pipe.program.schedule import Schedule
from triax.pipe.program.simulate import timeline_of
from triax.pipe.program.timeline import busy
from triax.testing.strategies import schedules

from support import five_axes
from support.command_line import run_triax
from support.five_axes import Job, Place, differences
from support.schedule_runner import assert_verify_accepts_what_runs, ops
from support.toys import error_text, summed_loss
from support.training import pipeline_engine, tiny_gpt

NAMES = ("gpipe", "1f1b", "eager-1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v", "dualpipe-v", "stp")
VOCABULARY, LENGTH, SAMPLES = 37, 8, 8
EIGHT = triax.Batch(microbatch=1, microbatches=8)


@pytest.mark.parametrize(("pipe", "microbatches"), [(2, 5), (4, 16), (8, 64)])
@pytest.mark.parametrize("share", [0.1, 0.25, 0.5])
def test_stp_makespans_equal_the_formulas_of_the_paper(pipe: int, microbatches: int, share: float) -> None:
    f = i = w = 1 / 2  # of one of the two stages of a rank
    ar = share * f
    costs, work = Costs(AR=share), 3 * microbatches
    found = {name: simulate(make_schedule(name, pipe, microbatches), costs) for name in ("interleaved", "zb-v", "stp")}
    # Qi et al. 2025, table 1: bubble of the pipeline, and collectives that show.
    interleaved = (pipe - 1) * (f + ar + i + w) + 2 * microbatches * ar
    zero_bubble = (pipe - 1) * (f + 2 * ar + i - 2 * w) + 4 * microbatches * ar
    stp = (pipe - 1) * (f + ar + i - w) + (2 * pipe + 1) * ar
    if microbatches % pipe == 0:
        assert found["interleaved"].makespan - work == pytest.approx(interleaved)
    rows = found["zb-v"].timeline.rows  # the paper counts from each rank's own first op to its last
    if microbatches >= 2 * pipe:
        assert max(row[-1].end - row[0].start for row in rows) - work == pytest.approx(zero_bubble)
    assert stp - ar - 1e-9 <= found["stp"].makespan - work <= stp + 1e-9
    assert found["stp"].makespan < min(found["zb-v"].makespan, found["interleaved"].makespan)
    assert max(found["zb-v"].peak_activations) <= 2 * pipe / 2
    assert max(found["stp"].peak_activations) * 2 <= 4 * pipe - 1


def ends(schedule: Schedule, costs: Costs) -> dict[Op, tuple[float, float]]:
    """Return start and end of each op, by recursion over what a pass or a pair waits for."""
    f, i, w, hop, ar, a2a = (
        float(x) / v  # type: ignore[arg-type]
        for x, v in zip((costs.F, costs.I, costs.W, costs.COMM, costs.AR, costs.A2A), [schedule.chunks] * 6)
    )
    hop *= schedule.chunks
    products = {"F": f, "I": i, "B": i + w, "W": w}
    alone = {"F": f + ar + a2a, "I": i + ar + a2a, "B": i + max(w, ar) + a2a, "W": w}
    groups: list[tuple[Op, ...]] = []
    before: dict[Op, tuple[Op, ...]] = {}
    for order in schedule.orders:
        left = list(order)
        last: tuple[Op, ...] = ()
        while left:
            group = (left.pop(0), left.pop(0)) if left[0] in schedule.pairs else (left.pop(0),)
            before |= dict.fromkeys(group, last)
            groups.append(group)
            last = group
    of = {op: group for group in groups for op in group}
    known: dict[tuple[Op, ...], tuple[float, float]] = {}

    def reads(op: Op) -> Op | None:
        kind, stage, microbatch = op
        if kind == "F":
            return Op("F", stage - 1, microbatch) if stage else None
        return next((Op(k, stage + 1, microbatch) for k in "BI" if Op(k, stage + 1, microbatch) in of), None)

    def time(group: tuple[Op, ...]) -> tuple[float, float]:
        if group not in known:
            start = time(before[group[0]])[1] if before[group[0]] else 0.0
            for op in group:
                if op.kind != "W" and (made := reads(op)) is not None:
                    apart = schedule.placement[made.stage] != schedule.placement[op.stage]
                    start = max(start, time(of[made])[1] + apart * hop)
            kinds = [op.kind for op in group]
            length = alone[kinds[0]]
            if len(group) == 2:
                moving = sum(kind != "W" for kind in kinds)
                length = max(sum(products[k] for k in kinds), moving * ar, moving * a2a, *(alone[k] for k in kinds))
            known[group] = start, start + length
        return known[group]

    return {op: time(group) for group in groups for op in group}


def with_pairs(schedule: Schedule, seed: int, chance: float = 0.3) -> Schedule:
    """Return a schedule with random neighbors as pairs, which may hang."""
    draw, pairs, orders = random.Random(seed), set(), []
    for order in map(list, schedule.orders):
        i = 0
        while i + 1 < len(order):
            both = sorted(order[i : i + 2], key=lambda op: op.kind != "F")
            if both[0].kind == "F" and both[0].microbatch != both[1].microbatch and draw.random() < chance:
                if both[1].kind == "F" and draw.random() < 0.5:
                    both.reverse()  # the later microbatch comes first, and its message too
                order[i : i + 2] = both
                pairs.add(both[0])
                i += 1
            i += 1
        orders.append(tuple(order))
    return replace(schedule, orders=tuple(orders), pairs=frozenset(pairs))


@settings(max_examples=100, derandomize=True)
@given(schedules(NAMES), st.integers(0, 99), *[st.floats(0, 2)] * 6)
def test_pairs_run_at_the_times_of_an_independent_simulator(
    schedule: Schedule, seed: int, f: float, i: float, w: float, comm: float, ar: float, a2a: float
) -> None:
    """With ever fewer pairs until the schedule does not hang; without any, as the generator made it, it never does."""
    costs = Costs(f, i, w, comm, AR=ar, A2A=a2a)
    made = schedule
    for chance in (0.3, 0.1, 0.03) if not schedule.pairs else ():
        made = with_pairs(schedule, seed, chance)
        try:
            verify(made)
            break
        except ScheduleError:
            made = schedule
    verify(made)
    event("with pairs" if made.pairs else "without pairs")
    expected = ends(made, costs)
    for row in timeline_of(made, costs).rows:
        for op, start, end in row:
            assert (start, end) == pytest.approx(expected[op], rel=1e-9, abs=1e-9), op


@settings(max_examples=60, derandomize=True)
@given(schedules(NAMES[:-1]), *[st.floats(0.1, 2)] * 4, st.floats(0, 1))
def test_pair_pass_never_costs_time(schedule: Schedule, f: float, i: float, w: float, ar: float, comm: float) -> None:
    costs = Costs(f, i, w, comm, AR=ar)
    found = pair_pass(schedule, costs)
    before, after = simulate(schedule, costs), simulate(found, costs)
    assert after.makespan < before.makespan if found.pairs else found == schedule
    assert max(after.peak_activations) <= max(before.peak_activations) + 1 / schedule.chunks
    verify(found, list(after.peak_activations))
    for zero in range(4):
        verify(lower(found, zero, ties=[(0, found.stages - 1)]))
    assert Schedule.from_json(found.to_json()) == found
    assert Schedule.from_csv(found.to_csv(), found.name) == found
    hosted = offload_pass(found, costs=costs)
    assert hosted.pairs == found.pairs and simulate(hosted, costs).makespan <= after.makespan * (1 + 1e-9)
    verify(lower(hosted))


def last_end(schedule: Schedule, costs: Costs) -> float:
    return max(end for _, end in ends(schedule, costs).values())


@pytest.mark.parametrize(
    ("name", "one_at_a_time", "in_pairs"),
    [  # as docs/schedules.md has them, of 4 ranks and 16 microbatches
        ("1f1b", 61.75, 61.75),  # one forward ahead is too little for the longer way of a microbatch through pairs
        ("eager-1f1b", 61.75, 58),
        ("interleaved", 56.875, 53.5),
        ("zb-v", 57.875, 55.25),
        ("dualpipe-v", 54.75, 53.25),
        ("gpipe", 61.75, 60),
        ("zb-h2", 59.75, 56),
        ("looped-bfs", 56.875, 54),
    ],
)
def test_pairs_shorten_schedules_with_enough_forwards_ahead(name: str, one_at_a_time: float, in_pairs: float) -> None:
    costs, schedule = Costs(AR=0.25), make_schedule(name, pipe=4, microbatches=16)
    paired = pair_pass(schedule, costs)
    assert simulate(schedule, costs).makespan == last_end(schedule, costs) == one_at_a_time
    assert simulate(paired, costs).makespan == last_end(paired, costs) == in_pairs
    assert bool(paired.pairs) == (in_pairs < one_at_a_time)
    stp = simulate(make_schedule("stp", pipe=4, microbatches=16), costs).makespan
    assert stp == 50.875 < in_pairs


def test_pairs_gain_nothing_without_collectives() -> None:
    schedule = make_schedule("dualpipe-v", pipe=4, microbatches=16)
    assert pair_pass(schedule, Costs(AR=0)) == schedule


def mutant(seed: int) -> tuple[Schedule, int]:
    """Return a schedule with random pairs, which may hang, and a stage of ZeRO."""
    draw = random.Random(seed)
    name, pipe = draw.choice(NAMES[:-1]), draw.randint(2, 4)
    return with_pairs(make_schedule(name, pipe, 2 * pipe + draw.randint(0, 3)), seed), draw.randrange(4)


@pytest.mark.parametrize("seeds", [range(300), pytest.param(range(300, 2300), marks=pytest.mark.exhaustive)])
def test_verify_accepts_only_pairs_that_run(seeds: range) -> None:
    assert_verify_accepts_what_runs(mutant(seed) for seed in seeds)


@pytest.mark.parametrize(
    ("order", "pairs", "words"),
    [
        ("0F0 0F1 0B0 0B1", "0B0", "the first op must be a forward"),
        ("0F0 0B0 0F1 0B1", "0F0", "0B0 after it is of the same microbatch"),
        ("0F0 0F1 0B0 0B1", "0F0 0F1", "0F1 after it is the first op of another pair"),
        ("0F0 0O0 0F1 0R0 0B0 0B1", "0F0", "no F, B, I or W comes right after it"),
        ("0F0 0B0 0B1 0F1", "0F1", "no F, B, I or W comes right after it"),
        ("0F0 0F1 0C0 0B0 0B1", "0F1", "no F, B, I or W comes right after it"),
        ("0F0 0F1 0B0 0B1", "0F2", "0F2 is the first op of a pair, but no rank runs it"),
    ],
)
def test_impossible_pairs_are_refused_with_the_reason(order: str, pairs: str, words: str) -> None:
    made = make_schedule("1f1b", 1, 2)
    wrong = error_text(lambda: replace(made, orders=(ops(order),), pairs=frozenset(ops(pairs))), ScheduleError)
    assert words in wrong


def test_pair_pass_refuses_schedules_with_pairs_or_copies() -> None:
    paired = make_schedule("stp", 2, 6)
    assert "stp has pairs already" in error_text(lambda: pair_pass(paired))
    plain = make_schedule("1f1b", 4, 8)
    for moved in (offload_pass(plain), recompute_pass(plain)):
        assert "give a schedule without O, R and C" in error_text(partial(pair_pass, moved))
    assert "a C would come between their ops" in error_text(lambda: recompute_pass(paired))
    sliced = make_schedule("1f1b", 4, 8, slices=4)
    for whole in (recompute_pass, partial(pair_pass, costs=Costs(AR=0.5))):
        assert "has whole microbatches, not 4 slices of each" in error_text(partial(whole, sliced))
    # A program in which a message comes between the two ops.
    program = lower(paired)
    torn = [list(order) for order in program.ops]
    at = next(i for i, op in enumerate(torn[0]) if op in paired.pairs)
    torn[0].insert(at + 1, torn[0].pop(next(i for i in range(at + 2, len(torn[0])) if torn[0][i].kind not in COMPUTE)))
    wrong = replace(program, ops=tuple(map(tuple, torn)))
    assert "comes between" in error_text(lambda: verify(wrong), ScheduleError)


def test_both_forwards_of_a_pair_wait_for_the_same_offloads() -> None:
    moved = ops("0F0 0O0 0F1 0F2 0R0 0B0 0B1 0B2")
    plain = replace(make_schedule("1f1b", 1, 3), orders=(moved,))
    paired = replace(plain, pairs=frozenset(ops("0F1")))
    verify(plain, memory=3)  # 0F2 waits for 0O0; 0R0 takes the memory again
    assert simulate(plain).peak_activations == (3,) and simulate(paired).peak_activations == (4,)
    early = replace(paired, orders=(ops("0F0 0O0 0F1 0F2 0B1 0B2 0R0 0B0"),))
    assert "at 0F2 it holds 3" in error_text(lambda: verify(early, memory=2), ScheduleError)
    verify(replace(early, pairs=frozenset()), memory=2)
    # The lane ends after the pair has started: the pair does not wait for it, and the path has no gap.
    causes = CriticalPath(early, Costs(O=9))
    assert causes.span(Op("F", 0, 2)).start == 1 and sum(s.end - s.start for s in causes.path) == pytest.approx(
        causes.timeline.makespan
    )


def test_a_pair_includes_the_first_gather_of_its_stage() -> None:
    paired = replace(make_schedule("1f1b", 1, 2), orders=(ops("0F0 0F1 0B0 0B1"),), pairs=frozenset(ops("0F0")))
    row = timeline_of(paired, Costs(GATHER=5), keep_gathered=True).rows[0]
    assert [span.end - span.start for span in row] == [5, 5, 2, 2]


def test_schedule_files_with_wrong_cells_or_sizes_are_refused() -> None:
    text = make_schedule("1f1b", 1, 3).to_json()
    assert "0F0&0F1&0F2 has 3 ops" in error_text(
        lambda: Schedule.from_json(text.replace('"0F0", ', '"0F0&0F1&0F2", ')), ValueError
    )
    assert "has 3 ops" in error_text(lambda: Schedule.from_csv("0F0,(0F1;0B0;0F2)OVERLAP_F_B,0B1,0B2"), ValueError)
    assert "a pair of one op" in error_text(lambda: Schedule.from_csv("0F0,(0F1)OVERLAP_F_B,0B0,0B1"), ValueError)
    for wrong in ('"pipe": 1.5', '"pipe": "1"', '"pipe": true', '"pipe": 1, "pipe": 1'):
        with pytest.raises(ValueError, match="pipe"):
            Schedule.from_json(text.replace('"pipe": 1', wrong))


def test_a_pair_is_drawn_explained_and_on_the_path() -> None:
    schedule, costs = make_schedule("stp", 2, 6), Costs(AR=0.25)
    causes = CriticalPath(schedule, costs)
    times, path = causes.timeline, causes.path
    assert sum(span.end - span.start for span in path) == pytest.approx(times.makespan)
    assert all(a.end == pytest.approx(b.start) for a, b in pairwise(path))
    assert all(0 <= idle < 0.2 for idle in times.idle) and times.bubble == min(times.idle)
    alone = [span for row in times.rows for span in row if span.op.kind == "F" and span.op not in schedule.pairs]
    assert busy(times.rows[0]) < sum(span.end - span.start for span in times.rows[0])
    assert alone
    first = min(schedule.pairs, key=lambda op: causes.span(op).start)
    second = next(b for order in schedule.orders for a, b in pairwise(order) if a == first)
    assert f"as a pair with {second}" in causes.explain(first)
    assert f"as a pair with {first}" in causes.explain(second)
    slack = causes.slack()
    assert all(slack[a] == slack[b] for order in schedule.orders for a, b in pairwise(order) if a in schedule.pairs)
    assert "&" in drawn(times, 200).plain and "runs interleaved with the op before" in drawn(times, 200).plain
    names = [event["name"] for event in chrome_trace(times)["traceEvents"]]
    assert {str(op) for order in schedule.orders for op in order} <= {*names}
    assert f"{first}&{second}" in str(schedule) and f"({first};{second})OVERLAP_F_B" in schedule.to_csv()


# ---------------------------------------------------------------------------------------------------- execution

Cell = tuple[str, int, dict[str, Any], bool, bool]  # schedule, ZeRO stage, recompute, sequence parallelism, interleaves


class Overlaps:
    """Count the collectives of the tensor axis that begin while another one is under way."""

    def __init__(self) -> None:
        self.open = self.count = self.all = 0

    @contextmanager
    def __call__(self, span: OpenSpan) -> Iterator[None]:
        counts = isinstance(span.about, Operation) and span.about.axis.name == "tensor"
        self.count += counts and self.open > 0
        self.all += counts
        self.open += counts
        yield
        self.open -= counts


def train(sizes: dict[str, Any], cells: list[Cell]) -> list[Any]:
    """Return loss, gradients, and the shares of overlapping collectives and of passes in pairs of each cell.

    The model is a GPT with dropout and a tied head, in float64.
    """
    here, found = Grid(**sizes, timeout=60), []
    rows = torch.randint(VOCABULARY, (SAMPLES, LENGTH + 1), generator=torch.Generator().manual_seed(3))
    for name, stage, recompute, sequence_parallel, interleaves in cells:
        paired = here.size > 1 and name != "stp"
        module = tiny_gpt(here, sequence_parallel=sequence_parallel, dropout=0.1, tie_word_embeddings=True)
        schedule = ScheduleOptions(name=name, pairs=1.0 if paired else None)
        options = {"optimizer": torch.optim.AdamW, "schedule": schedule, "recompute": recompute}
        engine = pipeline_engine(module, triax.Batch(size=SAMPLES, microbatch=1), stage, **options)
        assert here.size == 1 or engine.program.schedule.pairs
        engine.executor.interleaves &= interleaves
        stop = here.spans.read(seen := Overlaps())
        count = SAMPLES // here.data.size
        mine = rows[here.data.rank * count : (here.data.rank + 1) * count]
        for _ in range(2):
            loss = engine.train_batch(iter([(row[None, :-1], row[None, 1:]) for row in mine])).item()
        stop()
        # Of the passes with collectives, those in a pair of two such passes.
        order = engine.program.schedule.orders[here.pipe.rank]
        pairs = sum(a in engine.program.schedule.pairs and b.kind != "W" for a, b in pairwise(order))
        share = 2 * pairs / sum(op.kind != "W" for op in order)
        found.append((loss, engine.gather("gradients"), seen.count / max(seen.all, 1), share))
    return found


def require_cells_equal_to_one_process(ranks: Any, sizes: dict[str, int], size: int, cells: list[Cell]) -> None:
    loss, gradients, *_ = train({}, [("1f1b", 0, {}, False, True)])[0]
    everyone = ranks(size, train, sizes, cells, timeout=120)
    for cell, *found in zip(cells, *everyone, strict=True):
        for value, own, overlaps, share in found:
            assert overlaps >= share / 2 if cell[-1] and cell[1] < 3 else overlaps == 0, cell
            assert value == pytest.approx(loss, rel=1e-10)
            torch.testing.assert_close(own, gradients, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    "cells",
    [
        [("stp", 1, {}, False, True), ("eager-1f1b", 2, {}, True, True)],  # F with F, I, W and B
        pytest.param(
            [("stp", 1, {}, False, False), ("stp", 3, {}, False, True)],  # one pass after the other
            marks=pytest.mark.exhaustive,
        ),
    ],
    ids=len,
)
def test_training_with_pairs_equals_one_process(ranks: Any, cells: list[Cell]) -> None:
    require_cells_equal_to_one_process(ranks, {"pipe": 2, "tensor": 2}, 4, cells)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["gpipe", "eager-1f1b", "interleaved", "zb-h2", "zb-v", "dualpipe-v", "stp"])
def test_pairs_of_each_schedule_equal_one_process(ranks: Any, name: str) -> None:
    ways: list[tuple[int, dict[str, Any]]] = [
        (0, {"granularity": "selective"}),
        (1, {"enabled": True}),
        (2, {"granularity": "matmul"}),
    ]
    cells = [(name, *way, parallel, True) for way in ways for parallel in (False, True)]
    require_cells_equal_to_one_process(ranks, {"pipe": 2, "data": 2, "tensor": 2}, 8, cells)


def train_on_axes(job: Job, place: Place, file: str) -> Any:
    return five_axes.train(job, place, settings={"pipeline": {"schedule": file}})


def require_axes_equal_to_one_process(ranks: Any, place: Place, file: str) -> None:
    everyone = ranks(place.ranks, train_on_axes, Job(), place, file, timeout=120)
    assert not differences(everyone, (Job(), place))


def paired_file(folder: Path, name: str, pipe: int, microbatches: int) -> str:
    """Write a schedule with pairs into a file, and return its path."""
    made = make_schedule(name, pipe, microbatches)
    made = made if made.pairs else pair_pass(made, Costs(AR=1.0))
    assert made.pairs
    file = folder / f"{name}.json"
    file.write_text(made.to_json())
    return str(file)


def test_pairs_with_experts_equal_one_process(ranks: Any, tmp_path: Path) -> None:
    place = Place(pipe=2, data=2, expert=2, schedule="zb-v", microbatches=8, stage=2, lend=2)
    require_axes_equal_to_one_process(ranks, place, paired_file(tmp_path, "stp", 2, 8))


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["ring", "ulysses"])
def test_pairs_on_five_axes_equal_one_process(ranks: Any, tmp_path: Path, kind: str) -> None:
    place = Place(pipe=2, context=2, tensor=2, kind=kind, schedule="zb-v", microbatches=8, stage=1)
    require_axes_equal_to_one_process(ranks, place, paired_file(tmp_path, "stp", 2, 8))
    place = Place(data=2, context=2, tensor=2, expert=2, kind=kind, microbatches=4, stage=2, shard_tensor=True)
    require_axes_equal_to_one_process(ranks, place, paired_file(tmp_path, "gpipe", 1, 4))
    # The two groups of experts lend unlike numbers, within one context axis.
    place = Place(context=4, expert=2, kind=kind, microbatches=4, stage=2, lend=3)
    require_axes_equal_to_one_process(ranks, place, paired_file(tmp_path, "gpipe", 1, 4))


class Fails(nn.Module):
    """Layer that fails on one tensor rank, in the forward or the backward of its fifth microbatch."""

    def __init__(self, where: str, grid: Grid) -> None:
        super().__init__()
        self.where, self.here, self.calls = where, grid.tensor.rank == 1, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.here and self.calls == 5:
            if self.where == "forward":
                raise ArithmeticError("boom")
            x.register_hook(self.fail)
        return x

    def fail(self, _: Tensor) -> None:
        raise ArithmeticError("boom")


def failing(where: str) -> str:
    here = Grid(tensor=2, timeout=30)
    layers = gpt_layers(GPTConfig(VOCABULARY, LENGTH, 16, 4, 4))
    model = PipelineModule(
        [*layers[:3], LayerSpec(Fails, where, grid=here), *layers[3:]],
        grid=here,
        loss_fn=GPTLoss(here, vocab_size=VOCABULARY),
        dtype=torch.float64,
    )
    engine = pipeline_engine(model, EIGHT, schedule=ScheduleOptions(name="eager-1f1b", pairs=0.5))
    rows = torch.randint(VOCABULARY, (8, LENGTH + 1), generator=torch.Generator().manual_seed(3))
    return error_text(
        lambda: engine.train_batch(iter([(row[None, :-1], row[None, 1:]) for row in rows])), (RuntimeError, OSError)
    )


@pytest.mark.parametrize(("where", "op"), [("forward", "0F4&0B3"), ("backward", "0F5&0B4")])
def test_a_failing_pass_of_a_pair_stops_all_ranks(ranks: Any, where: str, op: str) -> None:
    first, second = ranks(2, failing, where, timeout=60)
    assert f"rank 1 (pipe 0, data 0, tensor 1) failed at {op}: ArithmeticError: boom" in second
    assert "rank 0 (pipe 0, data 0, tensor 0) stopped at" in first and "ArithmeticError: boom" in first


def test_engines_refuse_options_that_pairs_cannot_have() -> None:
    def error_of(**schedule: Any) -> str:
        module = PipelineModule([LayerSpec(nn.Linear, 4, 4)] * 4, grid=Grid(), loss_fn=summed_loss)
        return error_text(partial(pipeline_engine, module, EIGHT, schedule=ScheduleOptions(**schedule)))

    assert "stp has pairs already" in error_of(name="stp", pairs=0.5)
    assert "schedule.recompute = 0.5" in error_of(name="stp", recompute=0.5)
    assert error_of(name="stp") == error_of(name="gpipe", pairs=0.5) == "no error"


def run(*words: str, collectives: str = "0.25") -> Any:
    output = run_triax("schedule", *words, "--collectives", collectives)[1]
    return json.loads(output) if "--json" in words else output


@pytest.mark.exhaustive
def test_schedule_compare_ranks_stp_first_with_pairs() -> None:
    rows = run("compare", "--pipe", "4", "--microbatches", "16", "--pairs", "--json")["schedules"]
    assert [row["name"] for row in rows][:2] == ["stp", "dualpipe-v"]
    assert rows[0]["makespan"] == simulate(make_schedule("stp", 4, 16), Costs(AR=0.25)).makespan


def test_triax_schedule_shortens_a_schedule_by_pairs() -> None:
    sizes = ("--pipe", "4", "--microbatches", "16")
    plain, paired = run("dualpipe-v", *sizes, "--json"), run("dualpipe-v", *sizes, "--pairs", "--json")
    assert (plain["makespan"], paired["makespan"]) == (54.75, 53.25)
    assert Schedule.from_json(paired).pairs and not Schedule.from_json(plain).pairs
    assert "AR 0.25" in run("stp", *sizes) and "as a pair with" in run("explain", "stp", "7F4", *sizes)
    assert "--collectives = 'x': give a list of numbers" in run("stp", *sizes, collectives="x")
