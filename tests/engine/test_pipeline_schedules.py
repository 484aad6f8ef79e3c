"""Schedules of a pipeline engine: given, searched for or refused; stages that move; weights without a gradient."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import triax
from triax import Grid, LayerSpec, PipelineModule, TiedLayerSpec
from triax.base.errors import ConfigError
from triax.testing.pool import RankFailure

from support.pipeline_jobs import BASE, WIDTH, engine, given, layers, microbatches
from support.toys import error_text, mean_loss
from support.training import small_config


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


def test_giving_all_parameters_works_when_the_schedule_moves_stages(ranks: Any) -> None:
    """DeepSpeed's scripts pass ``model_parameters=model.parameters()``; zb-v moves stages afterwards."""
    for one, other in zip(ranks(2, all_or_some, "none"), ranks(2, all_or_some, "all"), strict=True):
        assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    with pytest.raises(RankFailure, match=r"the schedule moved stages"):
        ranks(2, all_or_some, "some")


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


def test_unchanged_stages_move_to_the_ranks_of_the_schedule(ranks: Any) -> None:
    wanted = ranks(1, straight)[0]
    for weights, loss in ranks(2, moved, change=False):
        assert all(torch.equal(weights[name], tensor) for name, tensor in wanted[0].items())
        assert loss == pytest.approx(wanted[1], rel=1e-12)
    for message in ranks(2, moved, change=True):
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
def test_csv_and_searched_schedules_have_one_processs_loss(ranks: Any, tmp_path: Path, name: str, chunks: int) -> None:
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
def test_schedules_that_do_not_fit_the_engine_are_refused(pipeline: Any, words: str) -> None:
    assert words in error_text(lambda: engine(Grid(), pipeline=pipeline), ConfigError)


def test_the_schedule_sets_the_number_of_chunks_with_a_message(caplog: pytest.LogCaptureFixture) -> None:
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


def test_a_schedule_without_backward_passes_does_not_train() -> None:
    """Such a schedule ran, and left every weight unchanged."""
    model = triax.PipelineModule([nn.Linear(2, 2)], loss_fn=nn.functional.mse_loss)
    with pytest.raises(ConfigError, match=r"schedule.name = 'forward': has no backward passes, and the engine has an"):
        triax.Engine(model, optimizer=triax.Optimizer("SGD", lr=0.1), batch=1, schedule="forward")


def test_schedules_given_to_initialize_are_checked() -> None:
    model, config = PipelineModule(layers(), loss_fn=mean_loss), {**BASE, "pipeline": {"schedule": "1f1b"}}
    two_ranks, made = triax.make_schedule("zb-v", 2, 4), given(triax.make_schedule("1f1b", 1, 4))
    initialize: Any = triax.initialize
    wrong: Any = 3
    for call, words in (
        (lambda: given("zbv"), r"schedule: there is no 'zbv'; did you mean 'zb-v'\?"),
        (lambda: given(two_ranks), "zb-v is .* 2; this run has pipe 1, microbatches 4, chunks 2"),
        (lambda: initialize(model=model, config=config, schedule="zb-v"), r"pipeline\.schedule is 1f1b"),
        (lambda: initialize(model=nn.Linear(2, 2), config=BASE, schedule="zb-v"), "but a Linear runs as one stage"),
        (lambda: given(wrong), "schedule is a int"),
        (lambda: made.set_train_batch_size(16), "1f1b is .* 1; this run has pipe 1, microbatches 8, chunks 1"),
    ):
        with pytest.raises((ConfigError, TypeError), match=words):
            call()


def test_a_pipeline_engine_refuses_forward_backward_and_step() -> None:
    made = engine(Grid())
    for call, name in ((made, "engine(...)"), (made.backward, "engine.backward(...)"), (made.step, "engine.step()")):
        with pytest.raises(RuntimeError, match=r"^Only train_batch\(\) is accessible in pipeline mode\.") as error:
            call()
        assert f"{name} was called" in str(error.value) and "loss = engine.train_batch(batches)" in str(error.value)


def train_by_object(pipe: int, name: str | None) -> tuple[Any, list[float], dict[str, Tensor]]:
    """Train two steps; return the passes that this rank runs, the losses and the weights."""
    grid = Grid(pipe=pipe, timeout=60)
    model = PipelineModule(layers(), grid=grid, loss_fn=mean_loss, dtype=torch.float64, partition="uniform")
    schedule = None if name is None else triax.make_schedule(name, pipe, 4)
    made, *_ = triax.initialize(model=model, config=BASE, schedule=schedule)
    data = microbatches(grid, batch=8)
    passes = [op for op in made.program.ops[grid.pipe.rank] if op.kind in "FBIW"]
    return passes, [made.train_batch(data).item() for _ in range(2)], made.gather()


def test_a_schedule_object_trains_as_one_process(ranks: Any) -> None:
    _, losses, weights = train_by_object(1, None)
    orders = triax.make_schedule("zb-v", 2, 4).orders
    for rank, (passes, found, trained) in enumerate(ranks(2, train_by_object, 2, "zb-v")):
        assert passes == [*orders[rank]]
        torch.testing.assert_close((found, trained), (losses, weights), rtol=1e-12, atol=1e-14)


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
        config=small_config("AdamW", batch=4, accumulation=4, schedule=schedule, params={"weight_decay": 0.5}),
    )
    x = torch.arange(16, dtype=torch.float64).view(4, 1, 4)
    for _ in range(2):
        engine.train_batch(iter([(each, each) for each in x]))
    return engine.gather()


@pytest.mark.parametrize(("pipe", "schedule", "chunks"), [(1, "wave", 4), (2, "1f1b", 1), (2, "zb-v", 2)])
def test_weights_before_a_detach_end_as_on_one_process(ranks: Any, pipe: int, schedule: str, chunks: int) -> None:
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
    return error_text(lambda: triax.initialize(model=model, model_parameters=some, config=BASE), ConfigError)


def test_a_tied_weight_is_given_to_the_optimizer_on_all_stages(ranks: Any) -> None:
    for message in ranks(2, partly_tied):
        assert re.search(r"layers\.0\.\w+ is .*group 0 on pipe rank 0 and .* on pipe rank 1: give model_par", message)
