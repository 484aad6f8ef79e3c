"""The engine: its config, its data, its one division, its outputs, and what it refuses."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import triax
from triax import Grid, LayerSpec, PipelineModule, Schedule, TiedLayerSpec
from triax.base.errors import ConfigError
from triax.compat.deepspeed.config.config import batch_sizes
from triax.compat.deepspeed.from_config import read_config
from triax.data.dataloader import BatchOrder
from triax.randomness.random import Dropout

from pool import RankFailure
from toys import mean_loss

WIDTH = 4
BASE: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 4,
    "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
}


def layers(dropout: float = 0.0) -> list[Any]:
    linear = LayerSpec(nn.Linear, WIDTH, WIDTH)
    return [linear, LayerSpec(Dropout, dropout), linear, torch.tanh, linear]


def engine(grid: Grid, dropout: float = 0.0, loss: Any = mean_loss, **config: Any) -> triax.PipelineEngine:
    model = PipelineModule(layers(dropout), grid=grid, loss_fn=loss, dtype=torch.float64, partition="uniform")
    return triax.initialize(model=model, config={**BASE, **config})[0]


def samples(count: int = 64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, count, WIDTH, generator=generator, dtype=torch.float64)
    return x[0], x[1]


def microbatches(grid: Grid, micro: int = 2, batch: int = 16) -> Iterator[tuple[Tensor, Tensor]]:
    x, y = samples()
    share = batch // grid.data.size
    for start in range(0, len(x), batch):
        for at in range(start + grid.data.rank * share, start + (grid.data.rank + 1) * share, micro):
            yield x[at : at + micro], y[at : at + micro]


class OwnList(PipelineModule):
    """Keeps its list under a name of its own before ``__init__``, as Megatron-DeepSpeed's models do."""

    def __init__(self, grid: Grid) -> None:
        self.specs = [LayerSpec(nn.Linear, WIDTH, WIDTH) for _ in range(4)]
        super().__init__(layers=self.specs, grid=grid, loss_fn=mean_loss, dtype=torch.float64)


def all_or_some(given: str) -> dict[str, Tensor]:
    """Weights after a step of a schedule that moves stages, where parameters were given for the first cut."""
    grid = Grid(pipe=2)
    model = OwnList(grid)
    some = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    parameters = {"none": None, "all": model.parameters(), "some": some}[given]
    made, *_ = triax.initialize(model=model, model_parameters=parameters, config=BASE, schedule="zb-v")
    made.train_batch(microbatches(grid))
    return dict(made.gather())


def test_all_parameters_are_all_after_stages_have_moved(ranks: Any) -> None:
    """DeepSpeed's scripts pass ``model_parameters=model.parameters()``; zb-v moves stages afterwards."""
    for one, other in zip(ranks(2, all_or_some, "none"), ranks(2, all_or_some, "all"), strict=True):
        assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    with pytest.raises(RankFailure, match=r"the schedule moved stages"):
        ranks(2, all_or_some, "some")


# ---------------------------------------------------------------------------------------------------- batch sizes


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
def test_any_batch_size_follows_from_the_others(given: Any, replicas: int, wanted: tuple[int, int, int]) -> None:
    batch = batch_sizes(read_config(given), replicas)
    assert (batch.train, batch.micro, batch.accumulation) == wanted


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (
            {"train_batch_size": 12, "train_micro_batch_size_per_gpu": 4},
            "4 * gradient_accumulation_steps 1 * 2 repl",
        ),
        ({"train_batch_size": 7}, "train_batch_size 7 is not train_micro_batch_size_per_gpu 3 * gradient_accum"),
        ({}, "no batch size: give train_batch_size or train_micro_batch_size_per_gpu"),
        ({"train_batchsize": 4}, "there is no 'train_batchsize'; did you mean 'train_batch_size'?"),
        ({"zero_optimization": {"stge": 1}}, "zero_optimization: there is no 'stge'; did you mean 'stage'?"),
        ({"optimizer": {"typ": "Adam"}}, "optimizer: there is no 'typ'; did you mean 'type'?"),
        ({"zero_optimization": {"stage": 4}}, "zero_optimization.stage = 4: input should be less than or equal to 3"),
        ({"bf16": {"enabled": True}, "fp16": {"enabled": True}}, "a model computes in one of them"),
        ({"pipeline": {"schedule": "1F1B"}}, "there is no '1F1B'"),
        ({"gradient_clipping": -1}, "gradient_clipping = -1"),
        ("no/such/file.json", "cannot be read: No such file"),
        (3, "the configuration is a int"),
        (
            {**BASE, "pipeline": {"schedule": "auto", "costs": [1e308, 1, 1]}},
            "pipeline.costs = [1e+308, 1, 1]: give a number of 3.4e+38 or less",
        ),
    ],
)
def test_configurations_refused(config: Any, words: str) -> None:
    with pytest.raises(ConfigError) as error:
        batch_sizes(read_config(config), 2)
    assert words in str(error.value)


def test_config_from_a_file_and_from_args(tmp_path: Path) -> None:
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
def test_optimizers_refused(optimizer: Any, words: str) -> None:
    with pytest.raises(ConfigError) as error:
        engine(Grid(), optimizer=optimizer)
    assert words in str(error.value)


def test_adam_decouples_its_weight_decay_as_deepspeed_does() -> None:
    assert type(engine(Grid(), optimizer={"type": "Adam", "params": {}}).optimizer) is torch.optim.AdamW
    plain = {"type": "Adam", "params": {"adam_w_mode": False}}
    assert type(engine(Grid(), optimizer=plain).optimizer) is torch.optim.Adam


def test_what_initialize_refuses() -> None:
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


# ------------------------------------------------------------------------------------------------------ a step


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
def test_parameter_groups_and_schedulers(ranks: Any, kind: str) -> None:
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


def dropped(grid: tuple[int, int, int]) -> list[tuple[float, dict[str, Tensor]]]:
    here = Grid(*grid, timeout=60)
    made = engine(here, dropout=0.5, seed=3, train_batch_size=16, gradient_accumulation_steps=8 // grid[1])
    data = microbatches(here)
    return [(made.train_batch(data).item(), made.gather("gradients")) for _ in range(3)]


def test_dropout_is_the_same_on_every_grid(ranks: Any) -> None:
    wanted = dropped((1, 1, 1))
    assert wanted[0][1]["layers.0.weight"].abs().sum() > 0
    for grid in ((4, 1, 1), (1, 4, 1), (2, 2, 1), (1, 1, 4)):
        for result in ranks(4, dropped, grid):
            for (loss, gradients), (want_loss, want) in zip(result, wanted, strict=True):
                assert loss == pytest.approx(want_loss, rel=1e-10, abs=0)
                torch.testing.assert_close(gradients, want, rtol=1e-10, atol=1e-13)


# ------------------------------------------------------------------------------------------------------ evaluation


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


def test_eval_batch_any_size_with_all_outputs(ranks: Any) -> None:
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


# ------------------------------------------------------------------------------------------------------------ data


def test_the_order_of_data_knows_no_grid() -> None:
    orders = {
        replicas: [[*chain(*BatchOrder(50, 16, micro, rank, replicas, seed=5))] for rank in range(replicas)]
        for replicas, micro in ((1, 4), (2, 4), (4, 2))
    }
    for replicas, found in orders.items():
        assert {len(order) for order in found} == {3 * 16 // replicas}
        for k in range(3):
            shares = [order[k * 16 // replicas : (k + 1) * 16 // replicas] for order in found]
            assert [*chain(*shares)] == orders[1][0][k * 16 : (k + 1) * 16]
    assert [*chain(*BatchOrder(50, 16, 4, 0, 1, seed=6))] != orders[1][0]
    later, again = BatchOrder(50, 16, 4, 0, 1, seed=5), BatchOrder(50, 16, 4, 0, 1, seed=5)
    later.epoch = 1
    assert [*chain(*again)] == orders[1][0]
    assert [*chain(*again)] == [*chain(*later)] != orders[1][0]  # whoever iterates by hand gets the next epoch too
    with pytest.raises(ValueError, match="50 samples, less than one global batch of 64"):
        BatchOrder(50, 64, 4, 0, 1, seed=5)


def test_training_data_without_an_iterator() -> None:
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
    # Nothing is lost: the engine goes on with good data.
    return str(error.value), made.train_batch(microbatches(grid)).item()


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("short", "rank 0 (pipe 0, data 0, tensor 0): the data ended after 3 of the 4 microbatches of this step"),
        ("raise", "rank 3 (pipe 1, data 1, tensor 0): the data iterator failed at microbatch 0: ZeroDivisionError"),
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
    with pytest.raises((RuntimeError, ValueError)) as error:
        made.train_batch(microbatches(made.grid))
    return str(error.value)


def test_losses_refused() -> None:
    assert "is a tensor of shape (2,): return a mean" in bad_loss(torch.ones(2, requires_grad=True))
    assert "that loss_fn returned is a float" in bad_loss(1.0)
    assert "its weight is 0.0: none of its labels counts" in bad_loss((torch.ones((), requires_grad=True), 0))


def moved(change: bool) -> Any:
    """Stages on the ranks that the schedule does not want: they move, unless weights would be lost."""
    grid = Grid(pipe=2, timeout=60)
    model = PipelineModule(
        layers(), grid=grid, loss_fn=mean_loss, partition="uniform", placement=[1, 0], dtype=torch.float64
    )
    if change and grid.pipe.rank == 0:
        with torch.no_grad():
            next(model.parameters()).add_(1)
    try:
        made, *_ = triax.initialize(model=model, config=BASE)
    except RuntimeError as error:
        return str(error)
    return made.gather(), made.train_batch(microbatches(grid, batch=8)).item()


def test_stages_move_to_where_the_schedule_wants_them(ranks: Any) -> None:
    wanted = ranks(1, straight)[0]
    for weights, loss in ranks(2, moved, False):
        assert all(torch.equal(weights[name], tensor) for name, tensor in wanted[0].items())
        assert loss == pytest.approx(wanted[1], rel=1e-12)
    for message in ranks(2, moved, True):
        assert "places the stages on ranks [0, 1], but layers.4.weight was changed since it was built" in message


def straight() -> Any:
    made = engine(Grid())
    return made.gather(), made.train_batch(microbatches(made.grid, batch=8)).item()


def scheduled(name: str, chunks: int, folder: Path) -> float:
    """Result of one step under a schedule from a file or from the search."""
    grid = Grid(pipe=2, timeout=60)
    path = folder / "mine.csv"
    if grid.rank == 0:
        path.write_text("0F0,0F1,0F2,0F3,0B3,0B2,0B1,0B0\n1F0,1F1,1F2,1F3,1B3,1B2,1B1,1B0\n")
    grid.world.barrier()
    model = PipelineModule(
        layers(), grid=grid, loss_fn=mean_loss, dtype=torch.float64, partition="uniform", chunks=chunks
    )
    pipeline = {"schedule": str(path) if name == "file" else name, "costs": [1, 1.2, 0.7, 0.1], "memory": 2}
    made, *_ = triax.initialize(model=model, config={**BASE, "pipeline": pipeline})
    return made.train_batch(microbatches(grid, batch=8)).item()


@pytest.mark.parametrize(("name", "chunks"), [("file", 1), ("auto", 2)])
def test_schedules_of_your_own_and_searched_for(ranks: Any, tmp_path: Path, name: str, chunks: int) -> None:
    wanted = engine(Grid()).train_batch(microbatches(Grid(), batch=8)).item()
    assert ranks(2, scheduled, name, chunks, tmp_path) == pytest.approx([wanted] * 2, rel=1e-12)


@pytest.mark.parametrize(
    ("pipeline", "words"),
    [
        ({"schedule": "no/such.csv"}, "cannot be read"),
        ({"schedule": "zbv"}, "did you mean 'zb-v'?"),
        ({"schedule": "auto", "costs": [1, 2]}, "pipeline.costs"),
    ],
)
def test_schedules_refused(pipeline: Any, words: str) -> None:
    with pytest.raises(ConfigError) as error:
        engine(Grid(), pipeline=pipeline)
    assert words in str(error.value)


def given(schedule: str | Schedule, **options: Any) -> triax.PipelineEngine:
    model = PipelineModule(layers(), loss_fn=mean_loss, dtype=torch.float64, **{"partition": "uniform", **options})
    return triax.initialize(model=model, config=BASE, schedule=schedule)[0]


def test_chunks_follow_from_the_schedule_and_are_said(caplog: pytest.LogCaptureFixture) -> None:
    made = given("zb-v")
    assert made.module.chunks == 2 and made.config.pipeline.schedule == "zb-v"
    wanted = "the schedule zb-v has 2 stages on each rank, so the model is cut into 2 stages"
    assert [wanted in record.getMessage() for record in caplog.records] == [True]
    assert given(triax.make_schedule("interleaved", 1, 4, 3)).module.boundaries == [0, 2, 4, 5]
    assert given("1f1b", partition=[0, 5]).module.chunks == 1
    with pytest.raises(ConfigError, match=r"1f1b does not run 2 chunks .*PipelineModule\(..., chunks=\) sets"):
        given("1f1b", partition=[0, 2, 5])  # the boundaries say how many
    with pytest.raises(ConfigError, match="wave has 6 stages on each of 1 ranks, but 5 layers cannot fill 6 stages"):
        given(triax.make_schedule("wave", 1, 4, 6))
    assert given("auto", placement="v").module.chunks in (1, 2)


def test_schedules_given_to_initialize_are_checked() -> None:
    with pytest.raises(ConfigError, match=r"schedule: there is no 'zbv'; did you mean 'zb-v'\?"):
        given("zbv")
    with pytest.raises(ConfigError, match=r"zb-v is .* 2; this run has pipe 1, microbatches 4, chunks 2"):
        given(triax.make_schedule("zb-v", 2, 4))
    model, config = PipelineModule(layers(), loss_fn=mean_loss), {**BASE, "pipeline": {"schedule": "1f1b"}}
    with pytest.raises(ConfigError, match=r"schedule is zb-v, but the configuration's pipeline\.schedule is 1f1b"):
        triax.initialize(model=model, config=config, schedule="zb-v")
    with pytest.raises(ConfigError, match="but a Linear runs as one stage"):
        triax.initialize(model=nn.Linear(2, 2), config=BASE, schedule="zb-v")  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="schedule is a int"):
        given(3)  # type: ignore[arg-type]
    made = given(triax.make_schedule("1f1b", 1, 4))
    with pytest.raises(ConfigError, match=r"1f1b is .* 1; this run has pipe 1, microbatches 8, chunks 1"):
        made.set_train_batch_size(16)


def test_the_loop_of_a_plain_module_is_refused() -> None:
    made = engine(Grid())
    for call, name in ((made, "engine(...)"), (made.backward, "engine.backward(...)"), (made.step, "engine.step()")):
        with pytest.raises(RuntimeError, match=r"^Only train_batch\(\) is accessible in pipeline mode\.") as error:
            call()
        assert f"{name} was called" in str(error.value) and "loss = engine.train_batch(batches)" in str(error.value)


def by_value(name: str) -> Any:
    grid = Grid(pipe=2, timeout=60)
    model = PipelineModule(layers(), grid=grid, loss_fn=mean_loss, dtype=torch.float64, partition="uniform")
    made, *_ = triax.initialize(model=model, config=BASE, schedule=triax.make_schedule(name, 2, 4))
    return made.gather(), made.train_batch(microbatches(grid, batch=8)).item()


def test_a_schedule_is_trained_with_as_a_value(ranks: Any) -> None:
    weights, loss = straight()
    for found, trained in ranks(2, by_value, "zb-v"):
        assert all(torch.equal(found[name], tensor) for name, tensor in weights.items())
        assert trained == pytest.approx(loss, rel=1e-12)


class Detached(nn.Module):
    """Layer through which no gradient passes."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x.detach())
        return y


def behind_a_detach(pipe: int, schedule: str, chunks: int) -> dict[str, Tensor]:
    grid = Grid(pipe=pipe)
    layers = [LayerSpec(nn.Linear, 4, 4), LayerSpec(nn.Linear, 4, 4), LayerSpec(Detached), LayerSpec(nn.Linear, 4, 4)]
    module = PipelineModule(layers, grid=grid, loss_fn=nn.MSELoss(), seed=3, chunks=chunks, dtype=torch.float64)
    engine, *_ = triax.initialize(
        model=module,
        config={
            "train_batch_size": 4,
            "gradient_accumulation_steps": 4,
            "optimizer": {"type": "AdamW", "params": {"lr": 0.1, "weight_decay": 0.5}},
            "pipeline": {"schedule": schedule},
        },
    )
    x = torch.arange(16, dtype=torch.float64).view(4, 1, 4)
    for _ in range(2):
        engine.train_batch(iter([(each, each) for each in x]))
    return engine.gather()


@pytest.mark.parametrize(("pipe", "schedule", "chunks"), [(1, "wave", 4), (2, "1f1b", 1), (2, "zb-v", 2)])
def test_what_no_gradient_reaches_stands_still(ranks: Any, pipe: int, schedule: str, chunks: int) -> None:
    """Stages before a ``detach`` got gradients of zero, and AdamW decayed their weights. On one process it does not."""
    alone = behind_a_detach(1, "1f1b", 1)
    found = ranks(pipe, behind_a_detach, pipe, schedule, chunks)[0]
    for name, weight in alone.items():
        torch.testing.assert_close(found[name], weight, rtol=1e-12, atol=0, msg=name)


def partly_tied() -> str:
    """Give the optimizer a tied weight on the first of its two stages alone."""
    grid = Grid(pipe=2, timeout=20)
    linear = TiedLayerSpec("tied", nn.Linear, WIDTH, WIDTH)
    listed = [linear, LayerSpec(nn.Linear, WIDTH, WIDTH), LayerSpec(nn.Linear, WIDTH, WIDTH), linear]
    model = PipelineModule(listed, grid=grid, loss_fn=mean_loss, dtype=torch.float64)
    some = [each.parameter for each in model.local_parameters() if grid.rank == 0 or each.tie is None]
    with pytest.raises(ConfigError) as caught:
        triax.initialize(model=model, model_parameters=some, config=BASE)
    return str(caught.value)


def test_a_tied_weight_is_given_to_the_optimizer_on_all_stages(ranks: Any) -> None:
    for message in ranks(2, partly_tied):
        assert re.search(r"layers\.0\.\w+ is .*group 0 on pipe rank 0 and .* on pipe rank 1: give model_par", message)
