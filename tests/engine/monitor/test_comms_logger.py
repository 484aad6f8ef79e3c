"""``comms_logger``: counted calls and bandwidths, against NCCL-tests' formulas; nothing is counted when off."""

from __future__ import annotations

import contextlib
import io
import re
import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import triax
import triax.compat.deepspeed as deepspeed
from triax import Grid, LayerSpec, PipelineModule
from triax.base.errors import ConfigError
from triax.compat.deepspeed.from_config import read_config
from triax.engine.monitor.step_timer import StepTimer
from triax.engine.monitor.trace.comms_logger import bandwidths, late_rank, stragglers, table
from triax.grid.comm.comms_log import CommsLog, LoggedCall
from triax.grid.comm.spans import Spans

from support.training import small_config

WIDTH, MICRO, COUNT = 8, 2, 3


def square(x: Tensor, y: Tensor) -> Tensor:
    return (x - y).square().mean()


def engine(grid: Grid, section: Any, stage: int = 1, **config: Any) -> Any:
    layers = [LayerSpec(nn.Linear, WIDTH, WIDTH, bias=False) for _ in range(2)]
    made, *_ = deepspeed.initialize(
        model=PipelineModule(layers, grid=grid, loss_fn=square),
        config={
            "train_micro_batch_size_per_gpu": MICRO,
            "gradient_accumulation_steps": COUNT,
            "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
            **({"comms_logger": section} if section is not None else {}),
            **config,
        },
    )
    return made


def step(made: Any) -> None:
    made.train_batch(iter([(torch.ones(MICRO, WIDTH), torch.zeros(MICRO, WIDTH))] * COUNT))


# --------------------------------------------------------------------------------------------------- formulas


def test_bandwidths_equal_the_formulas_of_nccl_tests() -> None:
    """doc/PERFORMANCE.md: algbw = S / t; busbw = algbw times 2 (n - 1) / n, (n - 1) / n or 1."""
    gigabyte, half = 10**9, 0.5
    assert bandwidths("all_reduce", gigabyte, 4, half) == (16.0, 16.0 * 2 * 3 / 4)
    assert bandwidths("all_gather", gigabyte, 4, half) == (16.0, 16.0 * 3 / 4)
    assert bandwidths("reduce_scatter", gigabyte, 8, half) == (16.0, 16.0 * 7 / 8)
    assert bandwidths("broadcast", gigabyte, 4, half) == bandwidths("send", gigabyte, 2, half) == (16.0, 16.0)


def test_the_comms_table_has_a_line_for_each_message_size() -> None:
    taken = {
        LoggedCall("all_reduce", "data", (0, 1), 2048): [0.001, 0.003],
        LoggedCall("all_reduce", "data", (0, 1), 2**20): [0.01],
        LoggedCall("send", "pipe", (0, 2), 512): [0.5],
        LoggedCall("barrier", "pipe", (0, 2), 0): [0.25],
    }
    waits = stragglers(
        taken, [taken, {**taken, LoggedCall("all_reduce", "data", (0, 1), 2048): [0.0005, 0.004]}, taken]
    )
    assert waits[LoggedCall("all_reduce", "data", (0, 1), 2048)] == pytest.approx(0.0005)
    assert LoggedCall("send", "pipe", (0, 2), 512) not in waits and waits[LoggedCall("barrier", "pipe", (0, 2), 0)] == 0
    both = {LoggedCall("all_reduce", "data", (0, 1), 8): [0.003, 0.001]}
    late = [both, {LoggedCall("all_reduce", "data", (0, 1), 8): [0.001, 0.0005]}]  # rank 1 waits for nobody
    assert late_rank(late).startswith("Rank 1 was late most: the others waited 2.50 ms for it, of 2.50 ms")
    assert late_rank([both, both]) == "No rank waited for another one in a collective"
    lines = [re.split(r"\s{2,}", line.strip()) for line in table(taken, waits).splitlines()]
    assert (
        lines[0][:4] == ["Comm. Op", "Message Size", "Count", "Total Latency(ms)"] and lines[0][-1] == "Straggler(ms)"
    )
    assert lines[1] == ["all_reduce over data (ranks 0, 1)"]
    assert lines[2] == ["2.0 KB", "2", "4.00", "2.000", "0.01", "0.01", "0.50"]
    assert lines[3] == ["1.0 MB", "1", "10.00", "10.000", "0.84", "0.84", "0.00"]
    assert ["0 B", "1", "250.00", "250.000", "-", "-", "0.00"] in lines and lines[-1][-1] == "-"


# ------------------------------------------------------------------------------------------------- on a grid


def counted(shape: tuple[int, int, int], stage: int, section: Any) -> Any:
    grid = Grid(*shape, timeout=60)
    made = engine(grid, section, stage)
    step(made)
    log = grid.spans.reader(CommsLog)
    assert log is not None
    log.clear()  # of what only the first step has: stages tell each other shapes
    for _ in range(2):
        step(made)
    calls = {key: len(seconds) for key, seconds in log.seconds.items()}
    assert all(s > 0 for seconds in log.seconds.values() for s in seconds)
    sent = {axis: {op: e["calls"] for op, e in kinds.items()} for axis, kinds in made.traffic_report()["sent"].items()}
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        text = made.log_summary(show_straggler=True)
        again = made.log_summary()
        same = deepspeed.comm.log_summary()
    return calls, sent, text, again == same, printed.getvalue()


@pytest.mark.parametrize(("shape", "stage"), [((1, 2, 1), 1), ((1, 2, 1), 3), ((2, 2, 1), 2)])
def test_comms_logger_counts_every_call_once(ranks: Any, shape: Any, stage: int) -> None:
    """The log has as many calls as the traffic report, whose bytes equal the papers' formulas, and the same sizes."""
    everyone = ranks(shape[0] * shape[1], counted, shape, stage, {"enabled": True})
    for rank, (calls, sent, text, same, printed) in enumerate(everyone):
        totals: dict[tuple[str, str], int] = {}
        for call, count in calls.items():
            totals[call.axis, call.op] = totals.get((call.axis, call.op), 0) + count
        for axis, kinds in sent.items():
            for op, count in kinds.items():
                assert totals[axis, op] == 2 * count, (axis, op)
        assert same and (printed != "") == (rank == 0)
        assert ("all_reduce over world" in text) and "Straggler(ms)" in text
        if stage == 1:
            size = 2 * WIDTH * WIDTH * 4
            ranks_ = (0, 1)
            assert calls[LoggedCall("reduce_scatter", "data", ranks_, size)] == 2
            assert calls[LoggedCall("all_gather", "data", ranks_, size)] == 2
        if stage == 2:
            message = MICRO * WIDTH * 4
            pipe = (rank % 2, rank % 2 + 2)
            moved = (
                calls[LoggedCall("send", "pipe", pipe, message)],
                calls[LoggedCall("receive", "pipe", pipe, message)],
            )
            assert moved == (2 * COUNT, 2 * COUNT)  # activations one way, gradients the other


def later_groups() -> tuple[bool, int]:
    grid = Grid(timeout=60)
    log = CommsLog(grid.synchronize)
    grid.spans.read(log, "all_reduce")
    joint = grid.joint("pipe", "data")
    joint.all_reduce(torch.ones(3))
    pending = joint.all_reduce(torch.ones(3), async_op=True)
    time.sleep(0.02)  # it is under way until somebody asks for its end
    pending.wait()
    joint.broadcast(torch.ones(3))
    ((call, seconds),) = log.seconds.items()
    return call.axis == "pipexdata" and seconds[1] >= 0.02, len(seconds)


def test_comms_log_sees_later_groups_and_times_async_calls(ranks: Any) -> None:
    assert ranks(2, later_groups) == [(True, 2)] * 2


def recorded_too() -> tuple[int, int, bool]:
    grid = Grid(data=2)
    log = CommsLog(grid.synchronize)
    grid.spans.read(log, "all_reduce")
    timer = StepTimer(grid, Spans(grid.spans))
    timer.record()
    grid.data.all_reduce(torch.zeros(8))
    timer.end(1)
    grid.data.all_reduce(torch.zeros(8))
    return len(timer.timed), sum(len(each) for each in log.seconds.values()), len(grid.spans.readers) == 1


def test_comms_log_and_step_timer_record_side_by_side(ranks: Any) -> None:
    """A breakdown of the wall clock beside the communication log: each sees every call, and goes alone."""
    assert ranks(2, recorded_too) == [(1, 2, True)] * 2


def chosen(section: Any) -> Any:
    grid = Grid(timeout=60)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        step(engine(grid, section))
    log = grid.spans.reader(CommsLog)
    assert log is not None
    return {call.op for call in log.seconds}, {c.caller for c in log.seconds}, printed.getvalue()


def test_comms_logger_prints_chosen_ops_and_their_callers(ranks: Any) -> None:
    section = {
        "enabled": True,
        "prof_all": False,
        "prof_ops": ["all_gather_into_tensor", "all_reduce"],
        "verbose": True,
        "debug": True,
    }
    (ops, callers, printed), (_, _, other) = ranks(2, chosen, section)
    assert ops == {"all_gather", "all_reduce"} and {"publish", "totals"} <= callers and other == ""
    assert re.search(r"^comm op: all_gather \[Caller Func: publish\] over data \| time \(ms\): ", printed, re.MULTILINE)
    assert "msg size: 512 B | algbw (Gbps): " in printed


def off() -> bool:
    grid = Grid(timeout=60)
    made = engine(grid, {"enabled": False})
    step(made)
    with pytest.raises(ConfigError, match="no communication was logged"):
        made.log_summary()
    return not grid.spans.readers


def test_a_disabled_comms_logger_adds_no_readers(ranks: Any) -> None:
    assert all(ranks(2, off))


def test_the_comms_logger_logs_plain_modules(ranks: Any) -> None:
    assert all("all_reduce over data" in text for text in ranks(2, module_logged))


def module_logged() -> str:
    made, *_ = triax.initialize(
        model=nn.Linear(3, 3),
        config=small_config(micro=1, comms_logger={"enabled": True}),
    )
    made.backward(made(torch.ones(1, 3)).sum())
    made.step()
    with contextlib.redirect_stdout(io.StringIO()):
        text: str = made.log_summary()
    return text


def test_empty_sections_stay_disabled() -> None:
    for key in ("comms_logger", "flops_profiler", "torch_autocast", "amp"):
        for nothing in (None, False, {}, {"enabled": False}):
            assert not getattr(read_config({"train_batch_size": 1, key: nothing}), key).enabled
