"""Fixed bugs of runs: weights that are frozen or replaced, ranks that differ, and ranks that fail."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import triax
from triax import Grid, LayerSpec, PipelineModule
from triax.base.errors import AgreedError, ConfigError
from triax.grid.randomness.random import Dropout
from triax.testing.pool import slowdown

from support.bug_models import (
    MICROBATCHES,
    WIDTH,
    engine_of,
    linear,
    pairs,
)
from support.toys import mean_loss


def endless() -> Iterator[tuple[Tensor, Tensor]]:
    while True:
        yield from pairs()


@pytest.mark.parametrize(
    "optimizer",
    [{"type": "AdamW", "params": {"lr": 0.1}}, {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}],
)
def test_weights_frozen_during_training_do_not_change(optimizer: Any) -> None:
    """Weight decay and momentum changed the weight after it was frozen."""
    engine = engine_of([linear(), linear()], optimizer=optimizer)
    data, (frozen, _, other, _) = endless(), engine.module.parameters()
    engine.train_batch(data)
    before = frozen.clone(), other.clone()
    frozen.requires_grad_(False)
    engine.train_batch(data)
    assert torch.equal(frozen, before[0]) and not torch.equal(other, before[1])
    frozen.requires_grad_(True)
    engine.train_batch(data)
    assert not torch.equal(frozen, before[0])


def unfreeze(engine: Any) -> None:
    next(engine.module.parameters()).requires_grad_(True)


def second_engine(engine: Any) -> None:
    triax.initialize(model=engine.module, config=engine.config)


def cast(engine: Any) -> None:
    engine.module.to(torch.float32)


def assign(engine: Any) -> None:
    engine.module.load_state_dict({k: v.clone() for k, v in engine.module.state_dict().items()}, assign=True)


def swap(engine: Any) -> None:
    engine.module.layers["1"] = nn.Linear(WIDTH, WIDTH).double()


def add(engine: Any) -> None:
    engine.module.layers["1"].scale = nn.Parameter(torch.ones(WIDTH, dtype=torch.float64))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (unfreeze, "layers.0.weight was frozen when the engine was made"),
        (second_engine, "is no longer where this engine steps it"),
        (cast, "is no longer where this engine steps it"),
        (assign, "was replaced after its engine"),
        (swap, "layers.1.weight was replaced after its engine"),
        (add, "layers.1.scale was added after its engine"),
    ],
)
def test_train_batch_refuses_weights_changed_after_the_engine(change: Callable[[Any], None], words: str) -> None:
    """Training went on with buffers that the model no longer used, or without weights that had been unfrozen."""
    built = nn.Linear(WIDTH, WIDTH)
    built.weight.requires_grad_(False)
    engine = engine_of([built, linear()])
    engine.train_batch(iter(pairs()))
    change(engine)
    with pytest.raises(AgreedError, match=words):
        engine.train_batch(iter(pairs()))


def fill(values: Tensor) -> None:
    values.fill_(0.5)


def exchange(values: Tensor) -> None:
    values.copy_(values.flip(0))


def behind_the_counters(change: Callable[[Tensor], None]) -> str:
    grid = Grid(pipe=2, timeout=60)
    module = PipelineModule([linear() for _ in range(4)], grid, mean_loss, "uniform", chunks=2)
    for parameter in module.parameters():
        change(parameter.data)
    with pytest.raises(RuntimeError) as error:
        triax.initialize(model=module, config={"train_batch_size": 4, "pipeline": {"schedule": "zb-v"}})
    return str(error.value)


@pytest.mark.parametrize("change", [fill, exchange])
def test_stages_do_not_move_when_weights_were_set_through_data(ranks: Any, change: Callable[[Tensor], None]) -> None:
    """Stages that moved were built again without the values set by `parameter.data`, which no version counter sees."""
    assert all("was changed since it was built" in message for message in ranks(2, behind_the_counters, change))


def test_stepped_optimizers_and_overlapping_groups_are_refused() -> None:
    """A stepped Adam lost its moments without a word; of two groups with one parameter the last one won."""
    module = PipelineModule([linear(), linear()], loss_fn=mean_loss)
    adam = torch.optim.Adam(module.parameters())
    module(torch.ones(1, WIDTH)).sum().backward()
    adam.step()
    with pytest.raises(ConfigError, match="this Adam has state already"):
        triax.initialize(model=module, optimizer=adam, config={"train_batch_size": 1})
    groups = [{"params": list(module.parameters())}, {"params": [next(module.parameters())], "lr": 1.0}]
    with pytest.raises(ConfigError, match="1 parameters are in more than one parameter group"):
        triax.initialize(model=module, model_parameters=groups, config={"train_batch_size": 1})


class Rates(nn.Module):
    """Reads numbers from tensors while it is built, which the meta device has not."""

    def __init__(self) -> None:
        super().__init__()
        # Not linspace: transformers' from_pretrained makes the first `torch.device` of a process leave it on the CPU.
        self.rates = [rate.item() for rate in torch.arange(3.0)]


def test_layers_not_buildable_on_meta_need_a_given_partition() -> None:
    """The layer was built on meta even if no partition needs it, and torch's error did not mention partitions."""
    PipelineModule([LayerSpec(Rates)])
    with pytest.raises(ValueError, match="pass partition='uniform' or boundaries"):
        PipelineModule([LayerSpec(Rates), linear()], chunks=2)


def test_training_and_evaluation_take_labels_of_none() -> None:
    """Without labels the loss was not computed, in training either: `the batch's weight is 0`."""
    engine = engine_of([linear(), linear()], loss=lambda outputs, labels: outputs.square().mean())
    losses = [engine.train_batch((x, None) for x, _ in pairs()).item() for _ in range(2)]
    assert losses[1] < losses[0] and engine.eval_batch((x, None) for x, _ in pairs()).item() < losses[1]


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (
            lambda outputs, labels: (outputs.sum(), outputs),
            r"that loss_fn returned has the shape \(3, 4, 6\)",
        ),
        (lambda outputs, labels: outputs.detach().mean(), "the loss depends on no parameter"),
    ],
)
def test_losses_without_gradients_are_refused(loss: Any, words: str) -> None:
    """torch refuses to differentiate such a loss; here a step went by, and nothing moved."""
    with pytest.raises(RuntimeError, match=words):
        engine_of([linear(), linear()], loss=loss).train_batch(iter(pairs()))


class Empty:
    """An iterator that is false."""

    def __init__(self) -> None:
        self.data = iter(pairs())

    def __len__(self) -> int:
        return 0

    def __next__(self) -> Any:
        return next(self.data)


def test_train_batch_takes_an_iterator_of_length_0() -> None:
    """`data_iter or ...` took one of length 0 for none at all."""
    assert engine_of([linear()]).train_batch(Empty()).item() > 0  # type: ignore[arg-type]


def numbered() -> list[int]:
    grid = Grid(data=2, timeout=60)
    engine = engine_of([linear(), LayerSpec(Dropout, 0.5)], grid)
    run, seen = engine.executor.run, list[int]()

    def spy(program: Any, microbatches: Any, **options: Any) -> Any:
        seen.extend(i for microbatch in microbatches for i in microbatch.samples)
        return run(program, microbatches, **options)

    engine.executor.run = spy  # type: ignore[method-assign, assignment]
    x = torch.ones(3 - 2 * grid.rank, WIDTH, dtype=torch.float64)
    engine.train_batch(iter([(x, x)] * MICROBATCHES))
    return seen


def test_replicas_of_unequal_size_number_samples_without_overlap(ranks: Any) -> None:
    """Each took the others to be as large as itself: two samples had one number, and one dropout mask."""
    assert ranks(2, numbered) == [list(range(12)), list(range(12, 16))]


class Counting(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return {"x": x, "n": int((x > 0).sum())}


class Uncounting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, batch: Any) -> Any:
        return self.linear(batch["x"])


def uncounted() -> str:
    """Each rank's message. The next stage takes the first sample as it is, so that the sender is the first to fail."""
    engine = engine_of([linear(), LayerSpec(Counting), LayerSpec(Uncounting), linear()], Grid(pipe=2, timeout=60))
    with pytest.raises(RuntimeError) as error:
        engine.train_batch(iter(pairs()))
    return str(error.value)


def test_changed_messages_between_stages_are_shown_whole(ranks: Any) -> None:
    """A number among the tensors had changed, and the message showed two equal tensors."""
    assert "changed from ({'x': float64[3, 4, 6], 'n': " in ranks(2, uncounted)[0]


class Trips(nn.Module):
    """Layer that fails on one rank, at the third microbatch."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what, self.calls, self.linear = what, 0, nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Any:
        self.calls += 1
        if self.calls == 3 and dist.get_rank() == 1:
            if self.what == "interrupt":
                raise KeyboardInterrupt
            if self.what == "forward":
                raise ArithmeticError("boom")
            if self.what == "backward":
                return Bang.apply(self.linear(x))
        return self.linear(x)


class Bang(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise ArithmeticError("boom")


def boom(*_: Any) -> None:
    raise ArithmeticError("boom")


def tripping(grid: Grid, what: str) -> Any:
    def make(groups: Any) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(groups, lr=0.1)
        if what == "optimizer" and grid.rank == 1:
            optimizer.step = boom  # type: ignore[method-assign, assignment]
        return optimizer

    engine = engine_of([LayerSpec(Trips, what), LayerSpec(Trips, what)], grid, with_optimizer=make)
    if what == "outputs":
        engine.module.output_fn = lambda outputs: {1}  # no nest of tensors
    return engine


def trip(what: str, sizes: tuple[int, int, int]) -> tuple[str, str, float]:
    engine, data = tripping(Grid(*sizes, timeout=60), what), endless()
    start = time.perf_counter()
    with pytest.raises(BaseException) as error:  # noqa: PT012 (an optimizer that fails is met in the next step)
        for _ in range(2):
            engine.eval_batch(data, return_logits=True) if what == "outputs" else engine.train_batch(data)
    return error.type.__name__, str(error.value), time.perf_counter() - start


STOPS = list(product([(1, 4, 1), (2, 2, 1), (1, 1, 4)], ["forward", "backward", "optimizer", "interrupt"]))


@pytest.mark.parametrize(("sizes", "what"), [*STOPS, ((2, 2, 1), "outputs")], ids=str)
def test_every_rank_stops_when_one_rank_fails(ranks: Any, sizes: tuple[int, int, int], what: str) -> None:
    """Failures outside of a program's ops, and interrupts, closed no connection: some ranks waited for the others."""
    results = ranks(4, trip, what, sizes, timeout=45)
    said = {"interrupt": "KeyboardInterrupt", "outputs": "a set cannot be sent between stages"}.get(what, "boom")
    for rank, (kind, message, seconds) in enumerate(results):
        assert seconds < 30 * slowdown()
        if what == "interrupt" and rank == 1:
            assert kind == "KeyboardInterrupt"
        else:
            assert kind == "RuntimeError" and message.startswith(f"rank {rank} (") and said in message


def left_alone() -> str:
    grid = Grid(data=2, timeout=30)
    engine = engine_of([linear()], grid)
    if grid.rank == 1:
        grid.close()
        return ""
    with pytest.raises(RuntimeError) as error:
        engine.train_batch(iter(pairs()))
    return str(error.value)


def test_errors_before_the_first_step_name_the_rank(ranks: Any) -> None:
    """The other ranks released objects that only the first step makes, and failed with an AttributeError."""
    assert ranks(2, left_alone)[0].startswith("rank 0 (pipe 0, data 0, tensor 0)")


def closed() -> list[bool]:
    grid = Grid(data=2, timeout=60)
    groups = [weakref.ref(axis.group) for axis in (grid.world, grid.data)]
    engine = engine_of([linear()], grid)
    engine.train_batch(iter(pairs()))
    del engine
    grid.close()
    gc.collect()
    return [group() is None for group in groups]


def test_closing_a_grid_frees_its_process_groups(ranks: Any) -> None:
    """torch's optimizers import functions whose default argument is the default group: it stayed open for good."""
    import torch.distributed.nn.functional as functions

    assert functions.all_reduce.__defaults__ == (dist.ReduceOp.SUM, None)
    assert ranks(2, closed) == [[True, True]] * 2


def waits() -> str:
    grid = Grid(pipe=2, data=2, timeout=1)
    if grid.rank:
        return ""
    with pytest.raises(RuntimeError) as error:
        grid.pipe.receive(torch.empty(1), 1, tag=7).wait()
    return str(error.value)


def test_messages_between_stages_obey_the_time_limit(ranks: Any) -> None:
    """The mesh's groups had torch's half hour, and a limit that was set later did not hold for them."""
    assert "Timed out waiting 1000ms" in ranks(4, waits, timeout=30)[0]


class FailsOnRank1(nn.Linear):
    def __init__(self, *, grid: Grid) -> None:
        super().__init__(600, 600)
        self.rank = grid.rank

    def forward(self, x: Tensor) -> Tensor:
        if self.rank == 1:
            raise MemoryError("boom")
        return super().forward(x)


def fails_while_it_gathers() -> tuple[str, float]:
    grid = Grid(timeout=60)
    wide = LayerSpec(nn.Linear, 600, 600)
    engine = engine_of([wide, LayerSpec(FailsOnRank1), wide], grid, zero_optimization={"stage": 3})
    x = torch.ones(1, 600, dtype=torch.float64)
    start = time.monotonic()
    with pytest.raises(RuntimeError) as error:
        engine.train_batch(iter([(x, x)] * MICROBATCHES))
    return str(error.value), time.monotonic() - start


def test_a_failing_rank_cancels_the_gather_of_the_next_layer(ranks: Any) -> None:
    """Stage 3 gathers a layer ahead: that gather kept the connections open, and the others waited for the limit."""
    for rank, (message, seconds) in enumerate(ranks(2, fails_while_it_gathers, timeout=40)):
        assert message.startswith(f"rank {rank} (") and "boom" in message and seconds < 20


def failing_layer() -> bool:
    """Return True if the error of a failing layer leads, by its causes, to the layer's own error."""

    def fail(x: Tensor) -> Tensor:
        raise ZeroDivisionError("the layer's own")

    grid = Grid(pipe=2, timeout=20)
    model = PipelineModule([LayerSpec(nn.Linear, 4, 4), fail], grid=grid, loss_fn=mean_loss)
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    engine = triax.initialize(model=model, config=config)[0]
    try:
        engine.train_batch(iter([(torch.ones(1, 4), torch.ones(1, 4))]))
    except Exception as error:
        cause: BaseException | None = error
        for _ in range(9):
            if cause is None or isinstance(cause, ZeroDivisionError):
                break
            cause = cause.__cause__
        return cause is None or isinstance(cause, ZeroDivisionError)
    return False


def test_causes_of_a_step_error_lead_to_the_layers_error(ranks: Any) -> None:
    """A program that follows the causes of a failed step's error never came to an end."""
    assert ranks(2, failing_layer) == [True, True]
