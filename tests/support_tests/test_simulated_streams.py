"""Streams of the simulated device: using memory before waiting for its stream is a fault that names both lines."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import triax
from triax.pipe.executor import Executor, ProgramRun
from triax.pipe.microbatches import MicrobatchFeed

from support.training import microbatches, text_batches, tiny_gpt, train

HERE = "tests/support_tests/test_simulated_streams.py"


def faults_of(programs: list[Callable[[Any], None]]) -> list[list[str]]:
    """Run programs with a side stream of their own. Return the faults of each."""
    from support.simulated_device import simulated

    found = []
    for program in programs:
        with simulated() as device:
            side = torch.Stream(device="sim")
            program(side)
            found.append(list(device.faults))
    return found


def ones() -> Tensor:
    return torch.ones(4, device="sim")


def current() -> Any:
    return torch.accelerator.current_stream()


def read_without_wait(side: Any) -> None:
    x = ones()
    with side:
        y = x + 1
    y.record_stream(current())
    x.record_stream(side)


def write_without_wait(side: Any) -> None:
    x = ones()
    with torch.get_device_module("sim").stream(side):
        side.wait_stream(torch.get_device_module("sim").default_stream())
        x.sum()
    x.zero_()
    x.record_stream(side)


def released(side: Any) -> None:
    x = ones()
    side.wait_stream(current())
    with side:
        x.sum()
    del x


def event_of_too_early(side: Any) -> None:
    x = ones()
    with side:
        event = side.record_event()
        y = torch.zeros(4, device="sim")
    event.wait(current())
    x += y
    y.record_stream(current())


def collective(side: Any) -> None:
    grid = triax.Grid(data=2, timeout=20)
    side.wait_stream(current())
    with side:
        x = ones()
    grid.data.all_reduce(x)
    x.record_stream(current())


FAULTY = {
    read_without_wait: "stream 1 reads what stream 0 writes",
    write_without_wait: "stream 0 writes what stream 2 reads",
    released: "memory of stream 0 that stream 3 uses at",
    event_of_too_early: "stream 0 reads what stream 4 writes",
    collective: "stream 0 writes what stream 5 writes",
}


def with_waits(side: Any) -> None:
    x = ones()
    side.wait_stream(current())
    with side:
        x.mul_(2)
        event = torch.Event(device="sim")
        event.record()
    x.record_stream(side)
    event.wait()
    assert x.tolist() == [2.0] * 4


def with_the_host(side: Any) -> None:
    x = ones()
    torch.accelerator.synchronize()
    with side:
        x.mul_(2)
        host = x.to("cpu", non_blocking=True)
    current().synchronize()
    assert host.isnan().all()  # the host has waited for another stream
    side.synchronize()
    assert host.tolist() == [2.0] * 4
    x.zero_()


def with_set_stream(side: Any) -> None:
    before = current()
    torch.accelerator.set_stream(side)
    x = ones()
    assert current() == side
    torch.accelerator.set_stream(before)
    assert before.device.type == "sim" and torch.get_device_module("sim").current_stream() == before
    with before, side:
        x += 1
    assert current() == before


def with_parts_of_one_tensor(side: Any) -> None:
    x = torch.zeros(8, device="sim")
    side.wait_stream(current())
    with side:
        x[:4].fill_(1)
    x[4:].fill_(2)
    x.record_stream(side)
    assert side.query() and x.tolist() == [1.0] * 4 + [2.0] * 4


def test_a_missing_stream_wait_is_recorded_with_both_lines(ranks: Any) -> None:
    for found in ranks(2, faults_of, list(FAULTY), init_group=False, new_processes=True):
        for faults, (program, words) in zip(found, FAULTY.items(), strict=True):
            assert faults and faults[0].startswith(words), (program, faults)
            assert HERE in faults[0].partition(" at ")[2], faults


def test_streams_that_wait_have_no_fault(ranks: Any) -> None:
    programs = [with_waits, with_the_host, with_set_stream, with_parts_of_one_tensor]
    assert ranks(1, faults_of, programs, init_group=False, new_processes=True) == [[[]] * len(programs)]


def use_without_record_stream(patch: pytest.MonkeyPatch) -> None:
    loss = Executor._loss
    side = torch.Stream(device="sim")

    def used(executor: Executor, run: ProgramRun, outputs: torch.Tensor, *more: Any) -> Any:
        side.wait_stream(torch.accelerator.current_stream())
        with side:
            outputs.detach().abs().amax()
        return loss(executor, run, outputs, *more)

    patch.setattr(Executor, "_loss", used)


def copy_without_wait(patch: pytest.MonkeyPatch) -> None:
    move = MicrobatchFeed._move
    side = torch.Stream(device="sim")

    def moved(*args: Any) -> Any:
        with side:
            value = move(*args)
        for tensor in torch.utils._pytree.tree_leaves(value):
            if isinstance(tensor, torch.Tensor):
                tensor.record_stream(torch.accelerator.current_stream())
        return value

    patch.setattr(MicrobatchFeed, "_move", moved)


def trained(waits: bool, plant: Callable[[pytest.MonkeyPatch], None] | None = None) -> list[str]:
    """Train a GPT in a stream of the user's own, with a fault in the engine if one is given. Return the faults."""
    from support.simulated_device import simulated

    with simulated() as device, pytest.MonkeyPatch.context() as patch:
        grid = triax.Grid(data=2, timeout=20)
        optimizer = partial(torch.optim.SGD, lr=0.1)
        batch = triax.Batch(size=4, microbatch=1)
        engine: Any = triax.Engine(tiny_gpt(grid), optimizer=optimizer, batch=batch, zero=triax.Zero(stage=3))
        data = microbatches(grid, text_batches(37, 4, 8, 2))
        if plant is not None:
            plant(patch)
        users = torch.Stream(device="sim")
        if waits:
            users.wait_stream(current())
        with users:
            train(engine, data, 2)
        current().wait_stream(users)
        return list(device.faults)


def test_an_engine_in_a_users_stream_needs_a_wait(ranks: Any) -> None:
    for faults in ranks(2, trained, waits=True, init_group=False, new_processes=True):
        assert not faults
    for faults in ranks(2, trained, waits=False, init_group=False, new_processes=True):
        assert any("stream 1 reads what stream 0 writes" in fault for fault in faults), faults


@pytest.mark.parametrize(
    ("plant", "words", "line"),
    [
        (use_without_record_stream, "was released without record_stream", f"that stream 1 uses at {HERE}:"),
        (copy_without_wait, "stream 2 reads what stream 1 writes", "writes at pipe/microbatches.py:"),
    ],
)
def test_a_stream_fault_in_the_engine_is_recorded(ranks: Any, plant: Any, words: str, line: str) -> None:
    for faults in ranks(2, trained, waits=True, plant=plant, init_group=False, new_processes=True):
        assert any(words in fault and line in fault for fault in faults), faults
