"""Stream of spans: who reads which spans, and in which order contexts begin and end."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import pytest
import torch

from triax import Grid
from triax.grid.comm.axis import Operation
from triax.grid.comm.lanes import Lanes
from triax.grid.comm.spans import OpenSpan, Spans


def reader(name: str, seen: list[str], span: OpenSpan) -> AbstractContextManager[None]:
    """Return a context that notes its begin, the turn and its end."""

    @contextmanager
    def noted() -> Iterator[None]:
        seen.append(f"{name} begins {span.kind}")
        span.at_turn(lambda: seen.append(f"{name} turns"))
        try:
            yield
        finally:
            seen.append(f"{name} ends")

    return noted()


def test_a_span_runs_in_the_contexts_of_its_readers() -> None:
    seen: list[str] = []
    grid = Spans()
    engine, other = Spans(grid), Spans(grid)

    def run(spans: Spans, kind: str) -> list[str]:
        seen.clear()
        with spans(kind) as span:
            seen.append("runs" if span is not None else "unread")
        return [*seen]

    stops = [engine.read(partial(reader, name, seen), "forward") for name in "ab"]
    everything = grid.read(partial(reader, "all", seen))
    around = ["all begins forward", "b begins forward", "a begins forward", "runs", "a ends", "b ends", "all ends"]
    assert run(engine, "forward") == around  # the reader that was added last is outermost
    assert run(other, "forward") == ["all begins forward", "runs", "all ends"]
    assert run(engine, "step") == ["all begins step", "runs", "all ends"]
    stops[0]()
    everything()
    assert run(engine, "forward") == ["b begins forward", "runs", "b ends"]
    assert run(engine, "step") == run(other, "forward") == ["unread"]
    seen.clear()
    with pytest.raises(ValueError, match="within"), engine("forward"):
        raise ValueError("within")
    assert seen == ["b begins forward", "b ends"]
    stops[1]()
    assert engine("forward") is engine("step"), "an object was made for nobody"


class Unfinished:
    """Handle of an operation that is never done."""

    def wait(self) -> None:
        raise AssertionError("it is not waited for")


def test_an_operation_that_is_dropped_is_freed_at_once() -> None:
    """Its connection would stay open, and the other ranks would wait, until Python looks for cycles."""
    spans, seen = Spans(), list[str]()
    spans.read(partial(reader, "a", seen))
    gc.disable()
    try:
        span = spans("send").__enter__()
        assert span is not None
        handle = span.follow(pending := Unfinished())
        freed = weakref.ref(pending)
        del span, handle, pending
        assert freed() is None
    finally:
        gc.enable()


def operations() -> list[tuple[str, str, int, float, bool, list[str]]]:
    """Return each operation with what its reader saw."""
    grid, found = Grid(data=2), []

    def read(span: OpenSpan) -> AbstractContextManager[None]:
        seen: list[str] = []
        found.append((span.about, seen))
        return reader(str(span.about), seen, span)

    grid.spans.read(read)
    x = torch.ones(4)
    grid.data.all_reduce(x)
    pending = grid.data.all_reduce(x, async_op=True)
    assert len(found[-1][1]) == 1, "it ended before its wait"
    pending.wait()
    tensors = torch.zeros(8), torch.zeros(4)
    grid.data.all_gather(*tensors)
    peer = 1 - grid.data.rank
    for message in (grid.data.send(x, peer, 0), grid.data.receive(x, peer, 0)):
        message.wait()
    grid.data.barrier()
    with grid.traffic.uncounted():
        grid.data.all_gather_json(3)
    assert all(type(about) is Operation and about.axis is grid.data for about, _ in found)
    return [(about.name, str(about), about.bytes, about.sent, about.async_op, seen) for about, seen in found]


def test_a_span_of_an_operation_ends_with_its_wait(ranks: Any) -> None:
    for found in ranks(2, operations):
        assert [entry[:-1] for entry in found] == [
            ("all_reduce", "data all_reduce", 16, 16.0, False),
            ("all_reduce", "data all_reduce", 16, 16.0, True),
            ("all_gather", "data all_gather", 32, 16.0, False),
            ("send", "data send", 16, 16.0, True),
            ("receive", "data receive", 16, 0.0, True),
            ("barrier", "data barrier", 0, 0.0, False),
            ("all_gather_json", "data all_gather_json", 0, 0.0, False),
        ]
        for name, text, *_, async_op, seen in found:
            turn = [f"{text} turns"] if async_op else []
            assert seen == [f"{text} begins {name}", *turn, f"{text} ends"]


def collectives_of_two_lanes() -> dict[str, list[str]]:
    """Return for each collective what happens when both lanes call it and wait for it at once."""
    grid = Grid(tensor=2, timeout=60)
    axis, x = grid.tensor, torch.ones(2, 2)
    axis.lanes = Lanes(grid.device, lambda: None, lambda state: None)
    calls = {
        "all_reduce": lambda: axis.all_reduce(x.clone()),
        "all_gather": lambda: axis.all_gather(torch.empty(4, 2), x),
        "reduce_scatter": lambda: axis.reduce_scatter(torch.empty(2), x.view(-1)),
        "all_to_all": lambda: axis.all_to_all(torch.empty(2, 2), x),
        "broadcast": lambda: axis.broadcast(x.clone()),
    }
    events: dict[str, list[str]] = {name: [] for name in calls}
    for name, call in calls.items():
        stop = axis.spans.read(partial(reader, "it", events[name]), name)
        axis.lanes.run(call, call)
        stop()
    return events


def test_collectives_of_two_lanes_are_in_flight_together(ranks: Any) -> None:
    for events in ranks(2, collectives_of_two_lanes):
        for name, seen in events.items():
            assert seen == [f"it begins {name}"] * 2 + ["it turns", "it ends"] * 2
