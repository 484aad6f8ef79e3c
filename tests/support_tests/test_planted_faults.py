"""Faults planted in the engine's own code, one function at a time: the simulated accelerator names file and line."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

import triax
from triax.grid.comm.axis import Axis
from triax.pipe.executor import Executor
from triax.pipe.microbatches import MicrobatchFeed
from triax.zero.layer_gather import ParameterGatherer

from pool import RankFailure
from training import microbatches, text_batches, tiny_gpt

HERE = "tests/support_tests/test_planted_faults.py:"


def uses_without_record_stream(patch: pytest.MonkeyPatch) -> None:
    loss = Executor._loss
    side = torch.Stream(device="sim")

    def used(executor: Executor, outputs: torch.Tensor, index: int) -> Any:
        side.wait_stream(torch.accelerator.current_stream())
        with side:
            outputs.detach().abs().amax()
        return loss(executor, outputs, index)

    patch.setattr(Executor, "_loss", used)


def copies_without_wait(patch: pytest.MonkeyPatch) -> None:
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


def reads_the_loss(patch: pytest.MonkeyPatch) -> None:
    loss = Executor._loss

    def read(*args: Any) -> Any:
        found = loss(*args)
        found[0].item()
        return found

    patch.setattr(Executor, "_loss", read)


def adds_a_tensor_of_the_cpu(patch: pytest.MonkeyPatch) -> None:
    loss = Executor._loss

    def added(*args: Any) -> Any:
        return [value + torch.zeros(1) for value in loss(*args)]

    patch.setattr(Executor, "_loss", added)


def changes_what_it_sends(patch: pytest.MonkeyPatch) -> None:
    send = Axis.send

    def changed(axis: Axis, tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
        work = send(axis, tensor, *args, **options)
        if tensor.device.type == "sim":
            tensor.data.zero_()
        return work

    patch.setattr(Axis, "send", changed)


def gathers_in_another_order(patch: pytest.MonkeyPatch) -> None:
    start = ParameterGatherer.start_gather

    def other(gather: Any, layer: int) -> None:
        gather._order = None  # triax itself compares the order of gathers, and its error would come first
        if layer == 0 and gather._grid.data.rank == 1:
            start(gather, 1)
        start(gather, layer)

    patch.setattr(ParameterGatherer, "start_gather", other)


def trained(plant: Callable[[pytest.MonkeyPatch], None], stage: Any, pipe: int) -> tuple[list[str], list[str]]:
    """Train a GPT for a step with a planted fault. Return the faults, and where the host waited."""
    from simulated_device import simulated

    with simulated() as device, pytest.MonkeyPatch.context() as patch:
        grid = triax.Grid(pipe=pipe, timeout=20)
        options: dict[str, Any] = {"batch": triax.Batch(size=4, microbatch=1), "zero": triax.Zero(stage=stage)}
        engine: Any = triax.Engine(tiny_gpt(grid), optimizer=partial(torch.optim.SGD, lr=0.1), **options)
        device.waits.clear()
        plant(patch)
        engine.train_batch(microbatches(grid, text_batches(37, 4, 8, 1)))
        return list(device.faults), list(device.waits)


@pytest.mark.parametrize(
    ("plant", "words", "line"),
    [
        (uses_without_record_stream, "was released without record_stream", f"that stream 1 uses at {HERE}"),
        (copies_without_wait, "stream 0 reads what stream 1 writes", "writes at pipe/microbatches.py:"),
    ],
)
def test_a_fault_of_streams_is_on_record(ranks: Any, plant: Any, words: str, line: str) -> None:
    for faults, _ in ranks(2, trained, plant, 1, 1, init_group=False, new_processes=True):
        assert any(words in fault and line in fault for fault in faults), faults


def test_a_read_of_the_loss_is_on_record(ranks: Any) -> None:
    for _, waits in ranks(2, trained, reads_the_loss, 1, 1, init_group=False, new_processes=True):
        assert any(wait.startswith(f"item at {HERE}") for wait in waits), waits


def test_a_tensor_of_the_cpu_is_an_error(ranks: Any) -> None:
    with pytest.raises(RankFailure, match=f"(?s)two devices, sim:0 and cpu.*{HERE[:-1]}"):
        ranks(2, trained, adds_a_tensor_of_the_cpu, 1, 1, init_group=False, new_processes=True)


def test_a_buffer_that_changes_while_it_is_sent_is_on_record(ranks: Any) -> None:
    found = ranks(2, trained, changes_what_it_sends, 0, 2, init_group=False, new_processes=True)
    for faults, _ in found:
        assert any(fault.startswith("the input was changed before wait: message") for fault in faults), faults
        assert all(".py:" in fault for fault in faults), faults


def test_another_order_of_gathers_is_an_error(ranks: Any) -> None:
    with pytest.raises(RankFailure, match=r"rank 0 of ranks \[0, 1\] runs all_gather .*\.py:.*rank 1 .*\.py:"):
        ranks(2, trained, gathers_in_another_order, 3, 1, init_group=False, new_processes=True)
