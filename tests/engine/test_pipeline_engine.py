"""The pipeline engine: its configuration, data, loss division and outputs, and what it refuses."""

from __future__ import annotations

import json
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import triax
from triax import Grid, PipelineModule
from triax.base.errors import ConfigError
from triax.compat.deepspeed.config.to_options import batch_sizes
from triax.compat.deepspeed.from_config import read_config
from triax.data.dataloader import BatchOrder

from support.pipeline_jobs import BASE, engine, layers, microbatches, samples
from support.toys import error_text, mean_loss


@pytest.mark.parametrize(
    ("given", "replicas", "wanted"),
    [
        ({"train_batch_size": 32}, 4, (32, 8, 1)),
        ({"train_micro_batch_size_per_gpu": 2}, 4, (8, 2, 1)),
        ({"train_batch_size": 32, "train_micro_batch_size_per_gpu": 2}, 4, (32, 2, 4)),
        ({"train_batch_size": 32, "gradient_accumulation_steps": 2}, 4, (32, 4, 2)),
        ({"train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 5}, 2, (30, 3, 5)),
    ],
)
def test_batch_sizes_are_derived_from_the_given_ones(given: Any, replicas: int, wanted: tuple[int, int, int]) -> None:
    batch = batch_sizes(read_config(given), replicas)
    assert (batch.train, batch.micro, batch.accumulation) == wanted


def test_initialize_reads_the_config_file_named_in_args(tmp_path: Path) -> None:
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps(BASE))
    made = triax.initialize(
        args=type("Args", (), {"deepspeed_config": str(path)})(), model=PipelineModule(layers(), loss_fn=mean_loss)
    )[0]
    assert made.train_batch_size() == 8 and made.gradient_accumulation_steps() == 4
    assert made.train_micro_batch_size_per_gpu() == 2 and made.get_lr() == [0.1]


@pytest.mark.parametrize(
    ("optimizer", "words"),
    [
        ({"type": "Lamp"}, "did you mean 'Lamb'?"),
        ({"type": "SGD", "params": {"lr": 0.1, "beta": 1}}, "SGD has no beta; it takes lr, momentum"),
        ({"type": "Adadelta", "params": {"capturable": True}}, "capturable is true, but the model is on the CPU"),
        ({"type": "Muon", "params": {"adjust_lr_fn": "é" * 99}}, "é...: give original or match_rms_adamw"),
    ],
)
def test_optimizers_the_engine_cannot_make_are_refused(optimizer: Any, words: str) -> None:
    assert words in error_text(lambda: engine(Grid(), optimizer=optimizer), ConfigError)


def test_adam_decouples_its_weight_decay_as_deepspeed_does() -> None:
    assert type(engine(Grid(), optimizer={"type": "Adam", "params": {}}).optimizer) is torch.optim.AdamW
    plain = {"type": "Adam", "params": {"adam_w_mode": False}}
    assert type(engine(Grid(), optimizer=plain).optimizer) is torch.optim.Adam


def test_initialize_refuses_what_is_no_model_or_config() -> None:
    wrong: Any = mean_loss
    with pytest.raises(TypeError, match=r"model is a function, not an nn\.Module"):
        triax.initialize(model=wrong, config=BASE)
    model = PipelineModule(layers(), loss_fn=mean_loss)
    with pytest.raises(ConfigError, match="pass config="):
        triax.initialize(model=model)
    with pytest.raises(ConfigError, match="1 parameters to train are not the model's"):
        triax.initialize(model=model, config=BASE, model_parameters=[nn.Parameter(torch.zeros(1))])
    with pytest.raises(ConfigError, match="LBFGS needs whole tensors"):
        triax.initialize(model=model, config=BASE, optimizer=torch.optim.LBFGS(model.parameters()))
    config = {key: value for key, value in BASE.items() if key != "optimizer"}
    idle = triax.initialize(model=model, config=config)[0]
    with pytest.raises(RuntimeError, match="there is no optimizer"):
        idle.train_batch(iter([]))


def step_with(kind: str) -> tuple[float, dict[str, Tensor]]:
    """Two parameter groups of SGD with momentum, given as an instance, a function, or by the configuration."""
    grid = Grid(pipe=2, timeout=60)
    model = PipelineModule(layers(), grid=grid, loss_fn=mean_loss, dtype=torch.float64, partition="uniform")
    weights = [p for p in model.parameters() if p.dim() > 1]
    groups = [
        {"params": weights, "weight_decay": 0.3},
        {"params": [p for p in model.parameters() if p.dim() <= 1], "lr": 0.01, "weight_decay": 0.0},
    ]
    config = {**BASE, "zero_optimization": {"stage": 1}}
    options: dict[str, Any] = {"lr": 0.1, "momentum": 0.9}
    given: dict[str, Any] = {"model_parameters": groups}
    if kind == "instance":
        given = {"optimizer": torch.optim.SGD(groups, **options)}
    elif kind == "function":
        given["optimizer"] = lambda g: torch.optim.SGD(g, **options)
    else:
        config["optimizer"] = {"type": "SGD", "params": options}
    made, optimizer, _, scheduler = triax.initialize(
        model=model,
        config=config,
        lr_scheduler=lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.5),
        **given,
    )
    data = microbatches(grid)
    loss = 0.0
    for _ in range(3):
        loss = made.train_batch(data).item()
    assert optimizer is not None and scheduler is not None
    assert made.get_lr() == [0.1 * 0.5**3, 0.01 * 0.5**3]
    return loss, made.gather()


@pytest.mark.parametrize("kind", ["instance", "function", "config"])
def test_parameter_groups_and_schedulers_act_as_in_torch(ranks: Any, kind: str) -> None:
    model = PipelineModule(layers(), dtype=torch.float64, loss_fn=mean_loss)
    named = {p.layout.name: p.parameter for p in model.local_parameters()}
    optimizer = torch.optim.SGD(
        [
            {"params": [p for p in named.values() if p.dim() > 1], "weight_decay": 0.3},
            {"params": [p for p in named.values() if p.dim() <= 1], "lr": 0.01},
        ],
        lr=0.1,
        momentum=0.9,
    )
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    # Four ranks: two replicas of two stages, each with four microbatches of two samples.
    x, y = samples()
    for start in (0, 16, 32):
        optimizer.zero_grad()
        loss = mean_loss(model(x[start : start + 16]), y[start : start + 16])
        loss.backward()
        optimizer.step()
        scheduler.step()
    for found_loss, found in ranks(4, step_with, kind):
        assert found_loss == pytest.approx(loss.item(), rel=1e-10, abs=0)
        torch.testing.assert_close(found, {n: p.detach() for n, p in named.items()}, rtol=1e-10, atol=1e-13)


class Pair(nn.Module):
    """Layer with two outputs; the next stage takes the first one alone."""

    def __init__(self) -> None:
        super().__init__()
        self.taken, self.left = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(B, 4) -> two of (B, 4)."""
        return self.taken(x), self.left(x)


class First(nn.Module):
    """Linear layer of the first of two inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        """Two of (B, 4) -> (B, 4)."""
        y: Tensor = self.linear(pair[0])
        return y


def pair_of_outputs(pipe: int) -> dict[str, Tensor]:
    layers = [triax.LayerSpec(Pair), triax.LayerSpec(First)]
    model = PipelineModule(layers, grid=Grid(pipe=pipe), loss_fn=mean_loss, dtype=torch.float64, seed=2)
    optimizer = partial(torch.optim.AdamW, lr=0.1, weight_decay=0.5)
    made = triax.Engine(model, batch=triax.Batch(size=4 * model.grid.data.size, microbatch=2), optimizer=optimizer)
    before = made.gather()
    rows = torch.linspace(-1, 1, 16, dtype=torch.float64).view(4, 4)
    for _ in range(2):
        made.train_batch(iter([(x, x) for x in rows.chunk(2)]))
    return {name: weight - before[name] for name, weight in made.gather().items()}


@pytest.mark.parametrize("pipe", [1, 2])
def test_a_weight_without_a_gradient_does_not_decay(ranks: Any, pipe: int) -> None:
    """As in plain PyTorch: the optimizer leaves it out. Its output went to the next stage, which did not use it."""
    for moved in ranks(pipe, pair_of_outputs, pipe):
        assert all(bool(change.any()) == (".left." not in name) for name, change in moved.items()), moved


def dropped(grid: tuple[int, int, int]) -> list[tuple[float, dict[str, Tensor]]]:
    here = Grid(*grid, timeout=60)
    made = engine(here, dropout=0.5, seed=3, train_batch_size=16, gradient_accumulation_steps=8 // grid[1])
    data = microbatches(here)
    return [(made.train_batch(data).item(), made.gather("gradients")) for _ in range(3)]


def test_dropout_masks_are_equal_on_every_grid(ranks: Any) -> None:
    wanted = dropped((1, 1, 1))
    assert wanted[0][1]["layers.0.weight"].abs().sum() > 0
    for grid in ((4, 1, 1), (1, 4, 1), (2, 2, 1), (1, 1, 4)):
        for result in ranks(4, dropped, grid):
            for (loss, gradients), (want_loss, want) in zip(result, wanted, strict=True):
                assert loss == pytest.approx(want_loss, rel=1e-10, abs=0)
                torch.testing.assert_close(gradients, want, rtol=1e-10, atol=1e-13)


def evaluated(grid: tuple[int, int, int]) -> Any:
    here = Grid(*grid, timeout=60)
    made = engine(here, dropout=0.5)
    made.module.output_fn = lambda out: {"out": out, "sign": out > 0}
    x, y = samples()
    # Microbatches of other sizes than training's, and other numbers of them.
    sizes = [5, 1, 3, 5]
    pairs = list(zip(x.split([*sizes, 50]), y.split([*sizes, 50]), strict=True))[:4]
    loss, outputs = made.eval_batch(iter(pairs), return_logits=True)
    one = made.eval_batch(iter(pairs[2:]), num_micro_batches=1)
    nothing, alone = made.eval_batch(iter(pairs), return_logits=True, compute_loss=False, num_micro_batches=2)
    assert nothing is None and made.module.training
    made.train_batch(microbatches(here))  # evaluation leaves nothing behind that a step would trip over
    return loss.item(), one.item(), outputs, alone


def test_eval_batch_takes_any_size_and_returns_all_outputs(ranks: Any) -> None:
    model = PipelineModule(layers(), dtype=torch.float64).eval()
    x, y = samples()
    wanted = [model(part).detach() for part in x[:14].split([5, 1, 3, 5])]
    losses = [mean_loss(o, t).item() for o, t in zip(wanted, y[:14].split([5, 1, 3, 5]), strict=True)]
    for grid in ((1, 1, 1), (4, 1, 1), (2, 2, 1)):
        for loss, one, outputs, alone in ranks(grid[0] * grid[1], evaluated, grid):
            assert loss == pytest.approx(sum(losses) / 4, rel=1e-10)
            assert one == pytest.approx(losses[2], rel=1e-10)
            assert len(outputs) == 4 and len(alone) == 2
            for found, want in zip([*outputs, *alone], [*wanted, *wanted[:2]], strict=True):
                torch.testing.assert_close(found["out"], want, rtol=1e-10, atol=1e-13)
                assert torch.equal(found["sign"], want > 0)


def order_of(rank: int = 0, replicas: int = 1, micro: int = 4, *, seed: int = 5) -> BatchOrder:
    """Return the microbatches of a replica, of 50 samples in global batches of 16."""
    return BatchOrder(50, 16, micro, rank, replicas, seed=seed)


def test_data_order_is_equal_for_all_numbers_of_replicas() -> None:
    one = [*chain(*order_of())]
    assert len({*one}) == 48 and one != sorted(one)
    for replicas, micro in ((2, 4), (4, 2)):
        shares = [[*chain(*order_of(rank, replicas, micro))] for rank in range(replicas)]
        step = 16 // replicas  # samples of a replica in a global batch
        batches = [[share[start : start + step] for share in shares] for start in range(0, 3 * step, step)]
        assert [*chain(*chain(*batches))] == one


def test_data_order_changes_with_seed_and_epoch() -> None:
    """Each iteration is an epoch, and the attribute ``epoch`` chooses the next one."""
    order, later = order_of(), order_of()
    first, second = [*chain(*order)], [*chain(*order)]
    assert first != second and first != [*chain(*order_of(seed=6))]
    later.epoch = 1
    assert [*chain(*later)] == second


def test_a_global_batch_over_the_data_set_is_refused() -> None:
    with pytest.raises(ValueError, match="50 samples, less than one global batch of 64"):
        BatchOrder(50, 64, 4, 0, 1, seed=5)


def test_train_batch_reads_training_data_without_an_iterator() -> None:
    model = PipelineModule(layers(), loss_fn=mean_loss, dtype=torch.float64)
    made, _, loader, _ = triax.initialize(model=model, config=BASE, training_data=TensorDataset(*samples()))
    assert loader is not None and len(loader) == 32
    losses = [made.train_batch().item() for _ in range(20)]  # 8 steps are an epoch
    assert len(set(losses)) == 20 and losses[-1] < losses[0]


def broken(kind: str) -> tuple[str, float]:
    grid = Grid(pipe=2, timeout=60)
    made = engine(grid)
    data: Any = microbatches(grid)
    if kind == "short" and grid.rank == 0:
        data = iter(list(data)[:3])
    elif kind == "raise" and grid.rank == 3:
        data = (1 / 0 for _ in range(4))
    elif kind == "loader" and grid.rank == 0:
        data = list(data)
    elif kind == "single" and grid.rank == 2:
        data = (x for x, _ in data)
    elif kind == "none":
        data = None
    with pytest.raises(RuntimeError) as error:
        made.train_batch(data)
    if kind == "raise" and grid.rank == 3:  # with its traceback
        assert isinstance(error.value.__cause__, ZeroDivisionError)
    # Nothing is lost: the engine goes on with good data.
    return str(error.value), made.train_batch(microbatches(grid)).item()


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("short", "rank 0 (pipe 0, data 0, tensor 0): the data ended after 3 of the 4 microbatches of this step"),
        ("raise", "test_pipeline_engine.py: ZeroDivisionError: division by zero"),
        ("loader", "rank 0 (pipe 0, data 0, tensor 0): data_iter is a list, not an iterator: pass iter(loader)"),
        ("single", "rank 2 (pipe 1, data 0, tensor 0): microbatch 0 is a Tensor, not a pair (inputs, labels)"),
        ("none", "data_iter is None"),
    ],
)
def test_bad_data_stops_every_rank_with_one_message(ranks: Any, kind: str, words: str) -> None:
    results = ranks(4, broken, kind, timeout=30)
    assert len({message for message, _ in results}) == 1
    assert words in results[0][0]
    assert len({loss for _, loss in results}) == 1


def bad_loss(value: Any) -> str:
    made = engine(Grid(), loss=lambda outputs, labels: value)
    return error_text(lambda: made.train_batch(microbatches(made.grid)), (RuntimeError, ValueError))


def test_losses_of_a_wrong_form_are_refused() -> None:
    assert "is a tensor of shape (2,): return a mean" in bad_loss(torch.ones(2, requires_grad=True))
    assert "that loss_fn returned is a float" in bad_loss(1.0)
    assert "its weight is 0.0: none of its labels counts" in bad_loss((torch.ones((), requires_grad=True), 0))
