"""The model has plain PyTorch's loss and, on every grid, one process's numbers."""

import dataclasses

import gpt_plain
import torch
import torch.nn.functional as F
from new_project import SHAPE, layers, microbatch, sums

import triax
from triax.pipe import Op
from triax.testing import assert_equals_one_process, assert_schedule, count_bytes


def build(grid):
    """Return the model for a grid, in float64."""
    loss_fn = triax.NextTokenLoss(grid, SHAPE.vocab_size)
    options = {"dtype": torch.float64, "partition": "uniform"}
    return triax.PipelineModule(layers(), grid=grid, loss_fn=loss_fn, **options)


def batches():
    """Return two batches of four microbatches of two sums."""
    rows, _ = sums()
    return [[microbatch(two) for two in batch.split(2)] for batch in rows[:16].split(8)]


def late_weights(pipe, microbatches):
    """1F1B with every weight gradient at the end of the step."""
    base = triax.make_schedule("1f1b", pipe, microbatches)
    orders = []
    for order in base.orders:
        first = [op._replace(kind="I") if op.kind == "B" else op for op in order]
        last = [Op("W", op.stage, op.microbatch) for op in order if op.kind == "B"]
        orders.append((*first, *last))
    return dataclasses.replace(base, name="late-weights", orders=tuple(orders))


def test_the_loss_is_that_of_plain_pytorch():
    model = build(triax.Grid())
    plain = gpt_plain.GPT().double()
    plain.load_state_dict(dict(model.named_parameters()))
    inputs, labels = batches()[0][0]
    wanted = F.cross_entropy(plain(inputs).flatten(0, 1), labels.flatten())
    engine = triax.Engine(model, optimizer=torch.optim.AdamW, batch=triax.Batch(size=2))
    found = engine.eval_batch(iter([(inputs, labels)]))
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-10)


def test_every_grid_has_the_numbers_of_one_process():
    assert_equals_one_process(build, batches, ranks=4)


def test_the_schedule_runs():
    assert_schedule(late_weights, sizes=[(2, 4), (4, 8)])


def sent(axes):
    """Train a step on this rank; return the bytes that it sends over each axis."""
    grid = triax.Grid(**axes)
    batch = triax.Batch(size=8, microbatch=2)
    engine = triax.Engine(build(grid), optimizer=torch.optim.AdamW, batch=batch)
    data, again = batches()
    engine.train_batch(iter(data))  # it also sends the shapes of the messages
    with count_bytes(grid) as found:
        engine.train_batch(iter(again))
    return found


def test_a_stage_sends_its_outputs_and_the_tied_gradient(ranks):
    first, last = ranks(2, sent, {"pipe": 2})
    # bytes of float64, rows, tokens, width
    outputs = 8 * 2 * SHAPE.max_position_embeddings * SHAPE.hidden_size
    table = 8 * SHAPE.vocab_size * SHAPE.hidden_size
    assert first["pipe"] == last["pipe"] == 4 * outputs + table
