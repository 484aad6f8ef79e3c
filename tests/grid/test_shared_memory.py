"""Messages through memory that the ranks of one host share: values, order, what is left, and ranks that leave."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from triax.grid import Grid
from triax.grid.comm import shared_memory
from triax.grid.comm.axis import Axis


def results(axis: Axis, dtype: torch.dtype, count: int) -> list[Tensor]:
    """Results of every collective, on integers so small that each dtype adds them exactly."""
    generator = torch.Generator().manual_seed(axis.rank)
    x = torch.randint(-4, 5, (axis.size, count), generator=generator).to(dtype)
    total, gathered, part, turned = x.clone(), x.new_empty(axis.size * count), x.new_empty(count), torch.empty_like(x)
    axis.all_reduce(total)
    axis.all_gather(gathered, x[0])
    axis.reduce_scatter(part, x.view(-1))
    inside = x.clone()  # the output is this rank's own part
    axis.reduce_scatter(inside[axis.rank], inside.view(-1))
    axis.all_to_all(turned, x)
    last = x[0] + axis.rank
    to, source = (axis.rank + 1) % axis.size, (axis.rank - 1) % axis.size
    pending = [axis.receive(part_ := torch.empty_like(last), source, 7), axis.send(last, to, 7)]
    for each in pending:
        each.wait()
    assert torch.equal(inside[axis.rank], part)
    return [total, gathered, part, turned, part_]


def equal_on_rank() -> None:
    axis = Grid().data
    shared = axis.shared
    assert shared is not None
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.complex64):
        for count in (1, 37, 70_000):
            axis.shared = shared
            found = results(axis, dtype, count)
            axis.shared = None
            for a, b in zip(found, results(axis, dtype, count), strict=True):
                assert torch.equal(a, b)
    axis.shared = shared
    low, high = torch.tensor(float(axis.rank)), torch.tensor([float(axis.rank)] * 3)
    axis.all_reduce(low, op="min")
    axis.all_reduce(high, op="max")
    assert low == 0 and high.tolist() == [axis.size - 1] * 3


@pytest.mark.parametrize("size", [2, 3, 4])
def test_the_same_as_through_gloo(ranks: Any, size: int) -> None:
    ranks(size, equal_on_rank)


def unordered_on_rank() -> None:
    grid = Grid(data=2)
    axis, sent = grid.data, [torch.full((3000,), float(10 * i + grid.rank)) for i in range(600)]
    received = [torch.empty(6000) for _ in sent]
    pending = [axis.all_gather(whole, mine, async_op=True) for whole, mine in zip(received, sent, strict=True)]
    order = list(range(len(pending)))
    for i in order[::-1] if grid.rank else order:  # more notes than a socket holds, waited for in unlike orders
        pending[i].wait()
        sent[i].fill_(-1)
    assert [whole[::3000].tolist() for whole in received] == [[10.0 * i, 10.0 * i + 1] for i in order]
    # One direction alone: the receiver says what it has read.
    for i in range(100):
        if grid.rank == 0:
            axis.send(torch.full((100_000,), float(i)), 1, 3).wait()
        else:
            axis.receive(whole := torch.empty(100_000), 0, 3).wait()
            assert whole[-1] == i
    grid.world.barrier()
    if grid.rank == 0:
        axis.send(torch.ones(100_000), 1, 3)
        assert axis.shared is not None and len(axis.shared._regions) <= 2 * shared_memory._UNTOLD
    else:
        axis.receive(torch.empty(100_000), 0, 3).wait()


def test_any_number_at_once_and_in_any_order(ranks: Any) -> None:
    ranks(2, unordered_on_rank)


def pages(descriptor: int) -> int:
    return os.fstat(descriptor).st_blocks * 512


def left_on_rank() -> None:
    before, maps = set(os.listdir("/proc/self/fd")), mapped()
    grid = Grid(data=2)
    axis = grid.data
    assert axis.shared is not None
    for _ in range(2):
        pending = [axis.all_reduce(torch.ones(2**21), async_op=True) for _ in range(4)]
        grid.world.barrier()
        assert pages(axis.shared._descriptor) >= 2**25  # nobody has read them
        for each in pending:
            each.wait()
    for _ in range(3):
        axis.all_reduce(torch.ones(1))  # hears that all was read
    assert pages(axis.shared._descriptor) <= shared_memory._KEPT
    large = torch.ones(2**23)  # not through shared memory
    axis.all_reduce(large)
    assert large[-1] == 2 and pages(axis.shared._descriptor) <= shared_memory._KEPT
    grid.close()
    del axis, grid, pending, each
    names = [os.readlink(f"/proc/self/fd/{each}") for each in set(os.listdir("/proc/self/fd")) - before]
    assert not [name for name in names if "memfd" in name or "triax" in name]
    assert mapped() == maps


def mapped() -> int:
    """Number of the memories that this process has mapped."""
    return Path("/proc/self/maps").read_text().count("memfd:triax")


def test_nothing_is_left(ranks: Any) -> None:
    ranks(2, left_on_rank)


def leaving_on_rank(how: str) -> tuple[str, float]:
    grid = Grid(data=2, timeout=1 if how == "is late" else 60)
    if how != "leaves at once":
        grid.data.all_reduce(torch.ones(1000))
    begun = time.monotonic()
    if grid.rank == 1:
        time.sleep(2 if how == "is late" else 0.5)
        grid.close()
        return "", 0.0
    with pytest.raises(RuntimeError) as error:
        grid.data.all_reduce(torch.ones(1000))
    return str(error.value), time.monotonic() - begun


@pytest.mark.parametrize(
    ("how", "words", "limit"),
    [
        ("leaves", "Connection closed by peer: rank 1", 3),
        ("leaves at once", "Connection closed by peer: rank 1", 3),
        ("is late", "Timed out waiting 1000ms for rank 1", 2),
    ],
)
def test_a_rank_that_does_not_come_is_named(ranks: Any, how: str, words: str, limit: float) -> None:
    message, seconds = ranks(2, leaving_on_rank, how)[0]
    assert words in message and "rank 1" in message and seconds < limit


def last_message_on_rank() -> float:
    grid = Grid(data=2)
    if grid.rank == 0:
        for i in range(9):
            grid.data.send(torch.full((5,), float(i)), 1, 2)
        grid.close()
        return 0.0
    time.sleep(0.3)  # it has left by now
    for _ in range(9):
        grid.data.receive(x := torch.empty(5), 0, 2).wait()
    return float(x[0])


def test_what_a_rank_sent_before_it_left_arrives(ranks: Any) -> None:
    assert ranks(2, last_message_on_rank) == [0.0, 8.0]


def hosts_on_rank() -> tuple[bool, bool]:
    rank = int(os.environ["RANK"])
    real, shared_memory._host = shared_memory._host, lambda: f"host {rank // 2}"
    try:
        grid = Grid(data=2, tensor=2)
    finally:
        shared_memory._host = real
    for axis in (grid.data, grid.tensor, grid.world):
        axis.all_reduce(x := torch.ones(5000))
        assert x[0] == axis.size
    return grid.data.shared is not None, grid.tensor.shared is not None


def test_ranks_of_other_hosts_have_other_memory(ranks: Any) -> None:
    assert ranks(4, hosts_on_rank) == [(False, True)] * 4


def unlike_on_rank() -> str:
    grid = Grid(data=2)
    with pytest.raises(RuntimeError) as error:
        grid.data.all_reduce(torch.ones(10 + grid.rank))
    return str(error.value)


def test_sizes_that_differ_are_told(ranks: Any) -> None:
    assert "rank 1 sent 44 bytes, but this rank expects a tensor (10,)" in ranks(2, unlike_on_rank)[0]
