"""Loader of training data: order on any grid, position, and resuming from a position."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from itertools import islice
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset, TensorDataset

import triax
from triax import Grid, LayerSpec, PipelineModule, RepeatingLoader
from triax.data.dataloader import BatchOrder, Loader, make_loader

from support.rank_checks import triax_warnings
from support.toys import mean_loss

WIDTH, SAMPLES, TRAIN, MICRO = 3, 43, 8, 2  # 5 whole batches an epoch


def dataset() -> TensorDataset:
    generator = torch.Generator().manual_seed(7)
    x, y = torch.randn(2, SAMPLES, WIDTH, generator=generator, dtype=torch.float64)
    return TensorDataset(x, y)


def numbers() -> list[int]:
    return list(range(SAMPLES))


def loader(
    data: Any = None, train: int = TRAIN, replica: int = 0, replicas: int = 1, seed: int = 3, **options: Any
) -> Loader:
    made = make_loader(numbers() if data is None else data, train, MICRO, replica, replicas, seed, **options)
    assert isinstance(made, Loader)
    return made


def taken(source: Any, count: int) -> list[list[int]]:
    return [batch.tolist() for batch in islice(source, count)]


class Stream(IterableDataset[int]):
    """Iterable dataset of the samples 0, 1, 2, ...; with ``set_epoch``, which adds 100 times the epoch to each."""

    def __init__(self, with_set_epoch: bool) -> None:
        self.start = 0
        if with_set_epoch:
            self.set_epoch = partial(start_of_epoch, self)  # workers get a pickled copy

    def __iter__(self) -> Iterator[int]:
        yield from range(self.start, self.start + SAMPLES)


def start_of_epoch(stream: Stream, epoch: int) -> None:
    stream.start = 100 * epoch


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_resumes_at_its_position(workers: int) -> None:
    """Resume at every position of two epochs, and from there with other numbers of replicas and batch sizes."""
    whole = taken(RepeatingLoader(loader()), 40)
    made = loader(workers=workers)
    source, states = RepeatingLoader(made), []
    for _ in range(10):
        states.append(made.state_dict())
        assert all(type(value) is int for value in states[-1].values())
        taken(source, 4)  # a global batch
    assert [(state["epoch"], state["sample"]) for state in states] == [(e, 8 * k) for e in range(2) for k in range(5)]
    for step, state in enumerate(states):
        other = loader()
        other.load_state_dict(state)
        assert other.state_dict() == state
        assert taken(RepeatingLoader(other), 6) == (whole + taken(RepeatingLoader(_at(10)), 6))[4 * step :][:6]
        assert taken(RepeatingLoader(_at(step)), 6) == taken(RepeatingLoader(_from(state)), 6)
        # Two replicas see the same global batches, each its half.
        halves = [taken(RepeatingLoader(_from(state, replica=r, replicas=2)), 2) for r in range(2)]
        assert [*halves[0], *halves[1]] == taken(RepeatingLoader(_from(state)), 4)
        if state["sample"] in (0, 2 * TRAIN):  # twice as large ones begin there too
            assert taken(RepeatingLoader(_from(state, train=2 * TRAIN)), 4) == taken(RepeatingLoader(_from(state)), 4)


def _at(step: int) -> Loader:
    made = loader()
    made.seek(step)
    return made


def _from(state: dict[str, int], **options: Any) -> Loader:
    made = loader(**options)
    made.load_state_dict(state)
    return made


def test_a_batch_that_was_read_in_part_is_given_again() -> None:
    made = loader()
    first = taken(made, 7)  # one global batch and most of another
    assert made.state_dict()["sample"] == TRAIN
    assert taken(RepeatingLoader(_from(made.state_dict())), 3) == first[4:]
    assert taken(made, 7) == first
    assert len([*made]) == len(made) == 20 and made.state_dict() == {**made.state_dict(), "epoch": 1, "sample": 0}
    assert taken(made, 7) != first


def test_a_repeating_loader_follows_seek() -> None:
    made = loader()
    source = RepeatingLoader(made)
    first = taken(source, 9)
    made.seek(1)
    assert taken(source, 5) == first[4:9]
    again: Any = RepeatingLoader([1, 2])
    assert [next(again) for _ in range(5)] == [1, 2, 1, 2, 1] and iter(again) is again
    with pytest.raises(StopIteration):
        next(RepeatingLoader([]))


def test_an_incomplete_last_batch_is_dropped_or_filled() -> None:
    whole = [i for batch in loader() for i in batch.tolist()]
    assert len(whole) == len(set(whole)) == 40
    filled = [i for batch in loader(drop_last=False) for i in batch.tolist()]
    assert filled[:40] == whole and len(filled) == 48
    assert set(filled[:SAMPLES]) == set(range(SAMPLES)) and filled[SAMPLES:] == whole[:5]
    halves = [[i for b in loader(drop_last=False, replica=r, replicas=2) for i in b.tolist()] for r in range(2)]
    assert [i for k in range(6) for half in halves for i in half[4 * k : 4 * k + 4]] == filled


@pytest.mark.parametrize("workers", [0, 1])
def test_an_iterable_dataset_keeps_its_own_order(workers: int) -> None:
    """A batch has 2 of the 43 samples, a step has 8, and an epoch 5 steps; two replicas take 4 in turn."""
    made = loader(Stream(with_set_epoch=True), workers=workers)
    source = RepeatingLoader(made)
    seen = taken(source, 24)
    assert [i for batch in seen for i in batch] == [*range(40), *range(100, 108)]  # 40, 41 and 42 are left out
    state = made.state_dict()
    assert state == {"epoch": 1, "sample": TRAIN, "samples": 0, "seed": 0}
    parts = []  # of each replica: two steps after that state
    for replica in range(2):
        other = loader(Stream(with_set_epoch=True), replica=replica, replicas=2, workers=workers)
        other.load_state_dict(state)
        parts.append([i for batch in taken(RepeatingLoader(other), 4) for i in batch])
    assert parts == [[108, 109, 110, 111, 116, 117, 118, 119], [112, 113, 114, 115, 120, 121, 122, 123]]
    assert [i for batch in loader(Stream(with_set_epoch=False)) for i in batch.tolist()] == [*range(40)]


def test_wrong_states_and_datasets_of_a_loader_are_refused() -> None:
    state = loader().state_dict()
    with pytest.raises(ValueError, match=r"belongs to training_data with samples 9, but here it is 43"):
        loader().load_state_dict({**state, "samples": 9})
    with pytest.raises(ValueError, match=r"with seed 4, but here it is 3"):
        loader().load_state_dict({**state, "seed": 4})
    with pytest.raises(ValueError, match=r"24 samples of epoch 0 were read, .* not a multiple of .* batch of 16"):
        loader(train=16).load_state_dict({**state, "sample": 24})
    with pytest.raises(ValueError, match=r"an IterableDataset has none. Save state_dict\(\)"):
        loader(Stream(with_set_epoch=False)).seek(3)
    with pytest.raises(ValueError, match="2 workers would each read the whole IterableDataset"):
        loader(Stream(with_set_epoch=False), workers=2)
    with pytest.raises(ValueError, match="43 samples, less than one global batch of 64"):
        loader(train=64)
    with pytest.raises(TypeError, match="training_data is a generator, which has no length"):
        loader(i for i in range(9))


def test_reading_batches_keeps_the_random_state() -> None:
    """Torch's loader draws a seed for its workers from the generator that the model's dropout uses."""
    torch.manual_seed(0)
    before = torch.get_rng_state()
    taken(loader(workers=2), 3)
    assert torch.equal(torch.get_rng_state(), before)


class Noisy(torch.utils.data.Dataset[Tensor]):
    """Samples with something random in them, as images have."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Tensor:
        return index + torch.rand(())


def test_random_numbers_of_workers_depend_on_seed_and_epoch() -> None:
    def noise(epochs: int, seed: int = 3, start: int = 0) -> list[dict[int, float]]:
        """Read epochs; return of each the random part of each sample, by its index."""
        made = loader(Noisy(), workers=1, seed=seed)
        made.seek(start)
        read = [torch.cat(list(made)).tolist() for _ in range(epochs)]
        return [{int(value): value - int(value) for value in values} for values in read]

    first, second = noise(2)
    [other] = noise(1, seed=4)
    assert noise(1, start=5) == [second], "5 batches are an epoch"
    assert noise(2) == [first, second]
    for unlike in (second, other):
        common = first.keys() & unlike.keys()
        assert len(common) > SAMPLES // 2 and all(first[index] != unlike[index] for index in common)


# ------------------------------------------------------------------------------------------- in an engine, on a grid


def collate(samples: list[Any]) -> Any:
    x, y = zip(*samples, strict=True)
    return torch.stack(x) * 0.5, torch.stack(y)


def engine(grid: Grid, **config: Any) -> Any:
    layers = [LayerSpec(nn.Linear, WIDTH, WIDTH) for _ in range(4)]
    model = PipelineModule(layers, grid=grid, loss_fn=mean_loss, dtype=torch.float64)
    base: dict[str, Any] = {"train_batch_size": TRAIN, "train_micro_batch_size_per_gpu": MICRO, "seed": 3}
    base |= {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    return triax.initialize(model=model, config={**base, **config}, training_data=dataset(), collate_fn=collate)[0]


Halt = tuple[dict[str, Tensor], dict[str, int]]


def part(sizes: tuple[int, int, int], start: Halt | None, steps: int) -> tuple[list[float], Halt]:
    """Train the given number of steps from the state of another grid, with the engine's own data iterator."""
    made = engine(Grid(*sizes, timeout=60))
    if start is not None:
        weights, state = start
        for placed in made.module.local_parameters():
            made.assign(placed.parameter, weights[placed.layout.name])
        made.training_dataloader.load_state_dict(state)
    losses = [made.train_batch().item() for _ in range(steps)]
    return losses, (made.gather(), made.training_dataloader.state_dict())


@pytest.mark.parametrize("sizes", [[(1, 1, 1), (4, 1, 1), (2, 2, 1)], [(2, 2, 1), (1, 4, 1), (1, 1, 1)]])
def test_a_run_resumes_within_an_epoch_on_another_grid(ranks: Any, sizes: Any) -> None:
    [(whole, (weights, end))] = ranks(1, part, (1, 1, 1), start=None, steps=9)
    losses: list[float] = []
    halt: Any = None
    for grid in sizes:
        results = ranks(grid[0] * grid[1], part, grid, halt, 3)
        # Stages between the first and the last read nothing, and are at the same place all the same.
        assert all(state == results[0][1][1] for _, (_, state) in results)
        assert all(found == results[0][0] for found, _ in results)
        losses += results[0][0]
        halt = results[0][1]
    assert losses == pytest.approx(whole, rel=1e-10, abs=0)
    assert halt[1] == end == {"epoch": 1, "sample": 4 * TRAIN, "samples": SAMPLES, "seed": 3}
    torch.testing.assert_close(halt[0], weights, rtol=1e-10, atol=1e-13)


def ends_early(sizes: tuple[int, int, int]) -> str:
    made = engine(Grid(*sizes, timeout=60))
    with pytest.raises(RuntimeError) as caught:
        made.train_batch(islice(iter(made.training_dataloader), 1))
    assert made.train_batch() > 0  # it can go on
    return str(caught.value)


def test_errors_name_the_microbatch_at_which_data_ended(ranks: Any) -> None:
    for said in ranks(2, ends_early, (2, 1, 1)):
        assert "the data ended after 1 of the 4 microbatches of this step" in said


def test_dataloader_drop_last_sets_the_number_of_batches() -> None:
    made = engine(Grid(), dataloader_drop_last=False)
    assert len(made.training_dataloader) == 24 and len(engine(Grid()).training_dataloader) == 20
    assert isinstance(made.training_dataloader.batch_sampler, BatchOrder)


def warned_of_equal_rows(kind: str, axes: dict[str, Any], same: bool) -> list[str]:
    """Train two steps, on the same rows or on rows of each replica; return the warnings of this rank."""
    grid = Grid(**axes, timeout=30)
    options: Any = {"optimizer": partial(torch.optim.SGD, lr=0.1), "batch": triax.Batch(microbatch=2)}
    x = torch.randn(2, 4, generator=torch.Generator().manual_seed(0 if same else grid.data.rank))
    with triax_warnings() as warnings:
        if kind == "module":
            engine: Any = triax.Engine(nn.Linear(4, 4), grid=grid, **options)
        else:
            layers = [triax.LayerSpec(nn.Linear, 4, 4)] * 2
            model = triax.PipelineModule(layers, grid=grid, loss_fn=nn.functional.mse_loss)
            engine = triax.Engine(model, **options)
        for _ in range(2):
            if kind == "module":
                engine.backward(nn.functional.mse_loss(engine(x), x))
                engine.step()
            else:
                engine.train_batch(iter([(x, x)]))
    return [line for line in warnings if "train on the same rows" in line]


@pytest.mark.parametrize(
    ("kind", "axes"),
    [
        ("module", {"data": 2}),
        ("pipeline", {"data": 2}),
        ("pipeline", {"pipe": 2, "data": 2}),
        ("module", {"data": 2, "tensor": 2}),
    ],
)
def test_replicas_on_the_same_rows_are_warned_of(ranks: Any, kind: str, axes: dict[str, int]) -> None:
    """With a plain DataLoader every replica computed the same gradient, without a warning. Tensor ranks must do so."""
    size = math.prod(axes.values())
    assert sum(map(len, ranks(size, warned_of_equal_rows, kind, axes, same=True))) == 1
    assert not any(ranks(size, warned_of_equal_rows, kind, axes, same=False))
