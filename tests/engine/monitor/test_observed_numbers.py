"""Numbers that observers compute: self times, clock offsets, FLOPs, peaks, and the lines of a run's JSON file."""

from __future__ import annotations

import itertools
import json
import random
import time
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import triax
from triax.engine.monitor.mfu import known_peak, tokens_in
from triax.engine.monitor.profiler.flop_counter import FlopCounter
from triax.engine.monitor.records import Slice
from triax.engine.monitor.report.membership import read_membership
from triax.engine.monitor.step_record import self_times
from triax.engine.monitor.trace.clock_offsets import Offset, clock_offsets
from triax.engine.monitor.writers import json_writer
from triax.train.learning_rate import LearningRate


def test_self_times_of_nested_slices_follow_the_definition() -> None:
    """The definition: the time that lies in a slice and in no slice that begins later within it."""
    draw = random.Random(0)

    def nest(start: int, end: int, depth: int) -> list[Slice]:
        found = [Slice("s", "step", float(start), float(end), {})]
        at = start
        while depth and at < end:
            at += draw.randint(0, 4)
            to = min(end, at + draw.randint(1, 20))
            if at < to:
                found += nest(at, to, depth - 1)
            at = to
        return found

    for _ in range(50):
        slices = sorted(nest(0, 100, 3), key=lambda s: (s.start, -s.end))
        innermost = Counter(
            max((i for i, s in enumerate(slices) if s.start <= tick < s.end), default=None) for tick in range(100)
        )
        # (Slices of the same times: the one that comes later is the inner one.)
        assert self_times(slices) == [float(innermost.get(i, 0)) for i in range(len(slices))]


def skewed(skews: list[float], names: list[str]) -> tuple[list[Offset], list[Offset]]:
    grid = triax.Grid(1, len(skews), 1)
    skew = skews[grid.rank]
    found = clock_offsets(grid, names[grid.rank], lambda: time.perf_counter() + skew)
    return found, clock_offsets(grid)


def test_clock_offsets_are_found_within_the_stated_error(ranks: Any) -> None:
    skews, names = [0.0, 3.7, -120.25, 3.7], ["a", "b", "c", "b"]
    told = ranks(4, skewed, skews, names)
    assert all(each == told[0] for each in told)
    found, own = told[0]
    assert found[0] == Offset(0.0, 0.0) and found[1] == found[3]
    for skew, offset in zip(skews, found, strict=True):
        assert abs(offset.ahead - skew) <= offset.error < 1.0
    assert own == [Offset(0.0, 0.0)] * 4  # these ranks are on one host


class Weight(nn.Linear):
    """A layer whose loss is its weight, so that a step of SGD changes the weight by the learning rate."""

    def __init__(self) -> None:
        super().__init__(1, 1, bias=False, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight.sum() * x.mean()


@pytest.mark.parametrize("pipelined", [False, True])
def test_the_written_learning_rate_is_that_of_the_step(tmp_path: Path, pipelined: bool) -> None:
    share = LearningRate("cosine", warmup=3, steps=5, minimum=0.1, decay=0).share
    layers = triax.PipelineModule([triax.LayerSpec(Weight)], loss_fn=lambda outputs, labels: outputs)
    engine: Any = triax.Engine(
        layers if pipelined else Weight(),
        optimizer=partial(torch.optim.SGD, lr=3.0),
        lr_scheduler=partial(torch.optim.lr_scheduler.LambdaLR, lr_lambda=share),
        batch=1,
        monitor=triax.Monitoring(json=str(tmp_path)),
    )
    x, weights = torch.ones(1, dtype=torch.float64), []
    for _ in range(5):
        weights.append(float(next(iter(engine.gather().values()))))
        if pipelined:
            engine.train_batch(iter([(x, x)]))
        else:
            engine.backward(engine(x))
            engine.step()
    weights.append(float(next(iter(engine.gather().values()))))
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    rates = [line["Train/Samples/lr"] for line in lines]
    assert rates == pytest.approx([a - b for a, b in itertools.pairwise(weights)], abs=1e-12)
    assert rates[:3] == pytest.approx([1.0, 2.0, 3.0])


def test_flop_counter_equals_the_textbook() -> None:
    linear, image = nn.Linear(8, 16), nn.Conv2d(3, 4, 3, padding=1)
    with FlopCounter() as count:
        linear(torch.randn(5, 8))
        image(torch.randn(2, 3, 10, 10))
        q, k, v = torch.randn(3, 2, 3, 7, 4)
        nn.functional.scaled_dot_product_attention(q, k, v)
    assert count.flops == 2 * 5 * 8 * 16 + 2 * 2 * 100 * 4 * 27 + 2 * 2 * (2 * 3 * 7 * 7 * 4)


def test_peak_flops_of_known_gpus_and_tokens_are_counted() -> None:
    half, single = torch.bfloat16, torch.float32
    assert known_peak("NVIDIA H100 80GB HBM3", half) == 989.4 and known_peak("NVIDIA H100 PCIe", half) == 756.0
    assert known_peak("NVIDIA A100-SXM4-80GB", single) == 19.5 and known_peak("NVIDIA L4", half) == 121.0
    assert known_peak("NVIDIA L40S", half) == 362.0 and known_peak("cpu", half) is None
    assert known_peak("NVIDIA A100-SXM4-80GB", torch.float64) is None and known_peak("Some GPU", half) is None
    ids, image = torch.zeros(4, 16, dtype=torch.int64), torch.zeros(4, 3, 8, 8)
    assert [tokens_in(x) for x in (ids, image, (image, ids), {"ids": ids}, ids[:, 0], ids > 0, None)] == [
        *(64, 0, 64, 64, 0, 0, 0)
    ]


def test_a_clock_set_back_does_not_shorten_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run of replicas was summed up as -980 s, and a run's duration lacked the steps around the change."""
    write = json_writer(tmp_path)
    write([("a", 1.0, 8)], 1)
    monkeypatch.setattr(time, "time", lambda: 0.0)
    write([("a", 1.0, 16)], 2)
    first, second = (json.loads(line)["time"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert first <= second
    (tmp_path / "history").mkdir()
    changes = [(1, 1000.0, ["0"]), (5, 20.0, ["0", "1"]), (9, 25.0, ["0"])]
    lines = [json.dumps({"step": step, "time": at, "members": members}) for step, at, members in changes]
    (tmp_path / "history" / "0.jsonl").write_text("\n".join([*lines, "[" * 10**5]))  # and a line that is no change
    found = read_membership(tmp_path, [])
    assert found is not None and found.length >= 0 and found.seconds >= 0
    assert all(0 <= begin <= end for spans in found.spans.values() for begin, end in spans)


def test_json_writer_starts_a_new_file_only_at_step_1(tmp_path: Path) -> None:
    def rows() -> list[Any]:
        return [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]

    write = json_writer(tmp_path)
    write([("a", 1.0, 8), ("b", float("nan"), 8)], 1)
    write([("a", 2.0, 16)], 2)
    assert [(r["step"], r["samples"], r["a"]) for r in rows()] == [(1, 8, 1.0), (2, 16, 2.0)] and rows()[0]["b"] is None
    json_writer(tmp_path)([("a", 3.0, 24)], 3)
    assert [r["step"] for r in rows()] == [1, 2, 3]
    json_writer(tmp_path)([("a", 4.0, 8)], 1)
    assert [r["a"] for r in rows()] == [4.0]


def test_the_printed_speed_follows_the_batch_and_ignores_rewinds(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    batch, monitor = triax.Batch(size=4, microbatch=2), triax.Monitoring(print_every=1)
    engine: Any = triax.Engine(
        nn.Linear(2, 1), optimizer=partial(torch.optim.SGD, lr=0.0), batch=batch, monitor=monitor
    )
    for samples, position in ((4, None), (4, None), (16, None), (2, (2, 8)), (4, None)):
        engine.set_batch_size(samples)
        if position is not None:
            engine.set_position(*position)  # as a load of an earlier step does
        now[0] += samples / 10
        for _ in range(samples // 2):
            engine.backward(engine(torch.ones(2, 2)).sum())
            engine.step()
    speeds = [line.partition("lr 0")[2] for line in capsys.readouterr().out.splitlines()]
    assert speeds == ["", ", 10 samples/s", ", 10 samples/s", "", ", 10 samples/s"]


def test_mfu_flops_count_training_passes_and_follow_the_batch(tmp_path: Path) -> None:
    engine: Any = triax.Engine(
        nn.Linear(64, 64),
        optimizer=partial(torch.optim.SGD, lr=0.0),
        batch=triax.Batch(size=4, microbatch=2),
        monitor=triax.Monitoring(json=str(tmp_path), peak_tflops=1.0),
    )
    x = torch.ones(2, 64)
    with torch.no_grad():
        engine(x)  # a look at the outputs, without a step
    for samples in (4, 16, 2):
        engine.set_batch_size(samples)
        for _ in range(samples // 2):
            engine.backward(engine(x).sum())
            engine.step()
        assert engine.observer.mfu.flops == 3 * 2 * samples * 64 * 64
