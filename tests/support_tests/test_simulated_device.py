"""Planted faults of programs for accelerators: the simulated device and NCCL's rules find each, and name its line."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import triax
from triax.testing.pool import RankFailure

from support.training import microbatches, text_batches, tiny_gpt, train

HERE = "tests/support_tests/test_simulated_device.py"


def alone() -> tuple[list[str], list[str]]:
    """Faults of one rank. Return the places of the host's waits, and the faults."""
    from support.simulated_device import simulated

    with simulated() as device:
        x = torch.arange(6.0, device="sim").view(2, 3)
        allocated = device.allocated
        model = nn.Linear(3, 3, device="sim")
        assert device.allocated == allocated + 12 * 4
        with pytest.raises(RuntimeError, match="two devices, sim:0 and cpu"):
            x[0] + torch.ones(3)
        model(x).sum().backward()
        assert not device.waits
        float(x.sum())  # 1
        x[x > 2]  # 2
        host = x.to("cpu", non_blocking=True)
        assert host.isnan().all()  # it has not arrived
        torch.get_device_module(x.device).synchronize()  # 3
        assert torch.equal(host, torch.arange(6.0).view(2, 3))
        pinned = torch.empty(3, pin_memory=True).fill_(1.0)
        there = pinned.to("sim", non_blocking=True)
        pinned.zero_()
        there.cpu()  # 4
        storage = there.untyped_storage()
        storage.resize_(0)
        storage.resize_(12)
        assert there.isnan().all() and there.data_ptr()  # other memory, as an allocator gives
        new = torch.empty(4, device="sim")
        assert bool(new.isnan().all())
        return device.waits, device.faults


def test_the_simulated_device_records_waits_and_copies(ranks: Any) -> None:
    ((waits, faults),) = ranks(1, alone, init_group=False, new_processes=True)
    kinds = [wait.partition(f" at {HERE}:")[0] for wait in waits]
    assert kinds[:4] == ["item", "aten.nonzero.default", "synchronize", "a blocking copy to the host"]
    assert len(faults) == 1 and faults[0].startswith("pinned memory was changed") and HERE in faults[0]


def together(what: str) -> tuple[list[str], list[float]]:
    """Run a faulty program on two ranks. Return the faults, and values of a result."""
    from support.simulated_device import simulated

    with simulated() as device:
        grid = triax.Grid(data=2, timeout=20)
        axis, rank = grid.data, grid.data.rank
        x = torch.full((4,), 1.0 + rank, device=grid.device)
        if what == "no wait":
            work = axis.all_reduce(x, async_op=True)
            seen = x.clone()
            del work
            deadline = time.monotonic() + 10
            while not device.faults and time.monotonic() < deadline:  # until its stream has let go of it
                time.sleep(0.01)
            return device.faults, seen.tolist()
        if what == "input changed":
            out = torch.empty(8, device=grid.device)
            work = axis.all_gather(out, x, async_op=True)
            x.zero_()
            work.wait()
            return device.faults, out.tolist()
        if what == "output written":
            work = axis.all_reduce(x, async_op=True)
            x.fill_(5.0)
            work.wait()
            return device.faults, x.tolist()
        if what == "other order":
            calls: list[Any] = [lambda: axis.all_reduce(x), lambda: axis.broadcast(x[:2].clone())]
            for call in calls[:: -1 if rank else 1]:
                call()
        if what == "both send first":
            for work in [axis.send(x, 1 - rank, 5), axis.receive(torch.empty_like(x), 1 - rank, 5)]:
                work.wait()
        if what == "other size":
            axis.all_reduce(x[: 3 + rank].clone())
        if what == "on the CPU":
            dist.all_gather_into_tensor(torch.empty(8), x, group=axis.group)
        if what == "not contiguous":
            axis.broadcast(torch.zeros(4, 4, device=grid.device).t()[1:])
        if what == "right":
            axis.all_reduce(x)
            other = torch.empty_like(x)
            messages = [lambda: axis.send(x, 1 - rank, 5), lambda: axis.receive(other, 1 - rank, 5)]
            for work in [start() for start in messages[:: -1 if rank else 1]]:
                work.wait()
            return device.faults, other.tolist()
        raise AssertionError("no fault was found")


def test_collective_results_are_nan_before_wait(ranks: Any) -> None:
    for faults, values in ranks(2, together, "right", init_group=False, new_processes=True):
        assert not faults and values == [3.0] * 4
    for faults, values in ranks(2, together, "no wait", init_group=False, new_processes=True):
        assert all(value != value for value in values)
        assert len(faults) == 1 and faults[0].startswith("never waited for: all_reduce")


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("input changed", "the input was changed before wait"),
        ("output written", "the output was written to before wait"),
    ],
)
def test_changing_memory_in_use_is_a_fault(ranks: Any, what: str, words: str) -> None:
    for faults, _ in ranks(2, together, what, init_group=False, new_processes=True):
        assert len(faults) == 1 and faults[0].startswith(words)


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("other order", r"rank 0 of ranks \[0, 1\] runs all_reduce .*; rank 1 of ranks \[0, 1\] runs broadcast"),
        ("other size", "all_reduce .* of 3 torch.float32 .* all_reduce .* of 4 torch.float32"),
        (
            "both send first",
            "rank 0 of ranks 0 and 1 runs message 0 to 1 .*; rank 1 of .* runs message 1 to 0",
        ),
        ("on the CPU", "tensors of two devices"),
        ("not contiguous", "not contiguous"),
    ],
)
def test_calls_that_nccl_lacks_fail_on_the_simulated_device(ranks: Any, what: str, words: str) -> None:
    with pytest.raises(RankFailure, match=words):
        ranks(2, together, what, init_group=False, new_processes=True)


def engine_without(what: str) -> None:
    """Train a GPT on two replicas with a wait of the engine left out."""
    from triax.zero import gradients, layer_gather

    from support.simulated_device import simulated

    left_out: Any = {"reduction": gradients, "gather": layer_gather}[what]
    kept = left_out.wait_for
    left_out.wait_for = lambda *_: None
    try:
        with simulated():
            grid = triax.Grid(data=2, timeout=20)
            zero = triax.Zero(stage=3 if what == "gather" else 1)
            optimizer = partial(torch.optim.SGD, lr=0.1)
            batch = triax.Batch(size=4, microbatch=1)
            engine: Any = triax.Engine(tiny_gpt(grid), optimizer=optimizer, batch=batch, zero=zero)
            train(engine, microbatches(grid, text_batches(37, 4, 8, 1)), 1)
    finally:
        left_out.wait_for = kept


@pytest.mark.parametrize(
    ("what", "words"),
    [("reduction", "the norm of the gradient is nan"), ("gather", "failed at 0F0: .*layers.0.weight")],
)
def test_a_missing_wait_of_the_engine_fails(ranks: Any, what: str, words: str) -> None:
    with pytest.raises(RankFailure, match=words):
        ranks(2, engine_without, what, init_group=False, new_processes=True)


def engine_with(what: str) -> tuple[list[str], list[str]]:
    """Train a GPT with a fault planted in the engine. Return the places of the host's waits, and the faults."""
    from triax.grid import Axis
    from triax.pipe.module import PipelineModule
    from triax.pipe.p2p import Channel

    from support.simulated_device import simulated

    start, gather, run = Channel._start, Axis.all_gather, PipelineModule.run_stage

    def changed_while_sent(self: Channel, tensor: Tensor, microbatch: int) -> None:
        start(self, tensor, microbatch)
        if tensor.is_floating_point():
            tensor.zero_()

    def other_order(self: Axis, *arguments: Any, **named: Any) -> Any:
        if self.rank == 1:
            self.all_reduce(torch.zeros(2, device="sim"))
        return gather(self, *arguments, **named)

    def read_back(self: PipelineModule, *arguments: Any, **named: Any) -> Any:
        y = run(self, *arguments, **named)
        float(y.detach().sum())
        return y

    def on_the_cpu(self: PipelineModule, *arguments: Any, **named: Any) -> Any:
        y = run(self, *arguments, **named)
        return y + torch.ones(y.shape[-1], dtype=y.dtype)

    def not_waited(self: Channel, *_: int) -> None:
        self._sending.clear()

    planted: dict[str, list[tuple[Any, str, Any]]] = {
        "nothing": [],
        "a message is changed": [(Channel, "_start", changed_while_sent)],
        "a message is dropped": [(Channel, "limit", not_waited), (Channel, "wait_sent", not_waited)],
        "another order": [(Axis, "all_gather", other_order)],
        "item": [(PipelineModule, "run_stage", read_back)],
        "a tensor on the CPU": [(PipelineModule, "run_stage", on_the_cpu)],
    }
    kept = [(owner, name, getattr(owner, name)) for owner, name, _ in planted[what]]
    for owner, name, function in planted[what]:
        setattr(owner, name, function)
    try:
        with simulated() as device:
            pipe = what != "another order"
            grid = triax.Grid(pipe=2 if pipe else 1, data=1 if pipe else 2, timeout=20)
            batch, sgd = triax.Batch(size=4, microbatch=1), partial(torch.optim.SGD, lr=0.1)
            zero = triax.Zero(stage=1 if pipe else 3)
            engine: Any = triax.Engine(tiny_gpt(grid), optimizer=sgd, batch=batch, zero=zero)
            engine.train_batch(microbatches(grid, text_batches(37, 4, 8, 1)))
            deadline = time.monotonic() + 5
            while what == "a message is dropped" and not device.faults and time.monotonic() < deadline:
                time.sleep(0.01)
            return device.waits, device.faults
    finally:
        for owner, name, function in kept:
            setattr(owner, name, function)


def test_recorded_faults_name_the_line(ranks: Any) -> None:
    found = {
        what: ranks(2, engine_with, what, init_group=False, new_processes=True)
        for what in ("nothing", "a message is changed", "a message is dropped", "item")
    }
    assert not any(faults for _, faults in found["nothing"])
    assert not any(wait.startswith("item") and HERE in wait for waits, _ in found["nothing"] for wait in waits)
    changed = [fault for _, faults in found["a message is changed"] for fault in faults]
    assert changed and all(fault.startswith("the input was changed before wait: message") for fault in changed)
    assert all("pipe/p2p.py:" in fault for fault in changed)
    dropped = [fault for _, faults in found["a message is dropped"] for fault in faults]
    assert any(fault.startswith("never waited for: message") and "pipe/p2p.py:" in fault for fault in dropped)
    for waits, _ in found["item"]:
        assert sum(wait.startswith(f"item at {HERE}:") for wait in waits) == 4  # once for each microbatch


@pytest.mark.parametrize(
    ("what", "words"),
    [
        (
            "another order",
            r"runs all_gather [^;]* at tests/support_tests/.*; .* runs all_reduce [^;]* at tests/support_tests/",
        ),
        (
            "a tensor on the CPU",
            r"test_simulated_device\.py\", line \d+, in on_the_cpu(.|\n)*two devices, sim:0 and cpu",
        ),
    ],
)
def test_faults_that_end_the_run_name_the_line(ranks: Any, what: str, words: str) -> None:
    with pytest.raises(RankFailure, match=words):
        ranks(2, engine_with, what, init_group=False, new_processes=True)


def sizes() -> list[int]:
    """Sizes of one tensor's storage, by torch's own functions."""
    from support.simulated_device import simulated

    with simulated():
        x: Tensor = torch.zeros(10, device="sim")
        view = x[2:6]
        x.data = torch.ones(3, 2, device="sim")
        out = torch.empty(0, device="sim")
        torch.add(view, 1, out=out)
        return [
            x.untyped_storage().nbytes(),
            view.untyped_storage().nbytes(),
            out.numel(),
            out.untyped_storage().nbytes(),
        ]


def test_storages_of_the_simulated_device_are_real(ranks: Any) -> None:
    assert ranks(1, sizes, init_group=False, new_processes=True) == [[24, 40, 4, 16]]
