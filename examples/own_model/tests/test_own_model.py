"""The model has the numbers of one process on every grid, and its schedule runs."""

import torch
from own_model import LENGTH, WIDTH, batches, build, late_weights

import triax
from triax.testing import assert_equals_one_process, assert_schedule, count_bytes


def test_every_grid_has_the_numbers_of_one_process():
    assert_equals_one_process(build, batches, ranks=4)


def test_the_schedule_runs():
    assert_schedule(late_weights, sizes=[(2, 4), (4, 8)])


def sent(axes):
    """Train a step on this rank; return the bytes that it sends over each axis."""
    grid = triax.Grid(**axes)
    batch = triax.Batch(size=8, microbatch=2)
    engine = triax.Engine(build(grid), optimizer=lambda p: torch.optim.SGD(p, lr=0.1), batch=batch)
    data, again = batches()
    engine.train_batch(iter(data))  # the first step also sends the shapes of the messages
    with count_bytes(grid) as found:
        engine.train_batch(iter(again))
    return found


def test_a_stage_sends_its_outputs_alone(ranks):
    first, last = ranks(2, sent, {"pipe": 2})
    one = 8 * 2 * LENGTH * WIDTH  # float64, rows, tokens, width
    assert first["pipe"] == last["pipe"] == 4 * one
