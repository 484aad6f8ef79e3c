"""The context and the expert axis under the engine: which ranks replicate, sum, count and save a parameter.

The layers are toys. A sequence is cut into contiguous parts over the context axis. An "expert" is one product, and
every token goes through all of them.
"""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import triax
from triax.grid import Grid
from triax.grid.comm.regions import gather_reduce_scatter, reduce_scatter_gather
from triax.grid.layout import Layout, layout_of
from triax.grid.randomness.random import Normal, sharded_parameter
from triax.grid.ranges import split
from triax.pipe.spec import LayerSpec
from triax.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear

from support.rank_checks import assert_every_rank_raises, float64_by_default
from support.training import small_config

WIDTH, EXPERTS, ROWS, LENGTH = 6, 4, 8, 4
GRIDS = [  # pipe, data, context, tensor, expert
    (1, 2, 1, 1, 2),
    (1, 1, 2, 1, 1),
    (1, 1, 2, 1, 2),
    (1, 2, 2, 1, 2),
    (2, 2, 1, 1, 2),
    (1, 2, 1, 2, 2),
    (1, 2, 2, 2, 4),
    (2, 2, 2, 1, 2),
]


class Part(nn.Module):
    """This rank's part of the sequence."""

    def __init__(self, *, grid: Grid) -> None:
        super().__init__()
        self.axis = grid.context
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        start, stop = split(x.shape[1], self.axis.size, self.axis.rank)
        return x[:, start:stop] * self.weight


class MLP(nn.Module):
    """A dense layer in shards of the tensor axis."""

    def __init__(self, *, grid: Grid) -> None:
        super().__init__()
        self.up = ColumnParallelLinear(WIDTH, 8, grid=grid, init=Normal(0.3))
        self.down = RowParallelLinear(8, WIDTH, grid=grid, init=Normal(0.3))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).tanh())


class Experts(nn.Module):
    """x + the sum of all experts' products with x: this rank's experts see the tokens of the expert axis."""

    def __init__(self, *, grid: Grid) -> None:
        super().__init__()
        self.axis = grid.expert
        layout = Layout((EXPERTS, WIDTH, WIDTH), expert_dim=0)
        place = (grid.expert.rank, grid.expert.size)
        self.weight = sharded_parameter(layout, Normal(0.3), 0, 1, expert=place)

    def forward(self, x: Tensor) -> Tensor:
        tokens = gather_reduce_scatter(x, self.axis, dim=0)
        y = torch.einsum("btd,edf->btf", tokens, self.weight)
        return x + reduce_scatter_gather(y, self.axis, dim=0)


def loss(x: Tensor, labels: Tensor) -> tuple[Tensor, int]:
    return x.square().sum(), x.shape[0] * x.shape[1]


@float64_by_default()
def train(grid_sizes: tuple[int, ...], stage: int, folder: str = "", load: bool = False) -> dict[str, Any]:
    pipe, data, context, tensor, expert = grid_sizes
    grid = triax.Grid(pipe, data, tensor, context=context, expert=expert)
    layers = [LayerSpec(cls) for cls in (Part, MLP, Experts, MLP, Experts)]
    model = triax.PipelineModule(layers, grid=grid, loss_fn=loss, seed=3)
    config = small_config(
        "Adam", lr=1e-2, batch=ROWS, accumulation=2, zero={"stage": stage, "reduce_bucket_size": 40}, clip=0.5
    )
    engine, *_ = triax.initialize(model=model, config=config)
    if load:
        assert engine.load_checkpoint(folder)[0] is not None
    rows = ROWS // data // 2
    for step in range(2):
        x = torch.randn(ROWS, LENGTH, WIDTH, generator=torch.Generator().manual_seed(step + 2 * load))
        mine = x.view(2, data, rows, LENGTH, WIDTH)[:, grid.data.rank]
        value = engine.train_batch(iter([(part, part) for part in mine]))
        if not step:
            gradients, norm = engine.gather("gradients"), engine.get_global_grad_norm()
    if folder and not load:
        engine.save_checkpoint(folder)
    found = {"loss": float(value), "norm": norm, "gradients": gradients, "weights": engine.gather()}
    return found if grid.rank == 0 else {}


def require_equal(found: dict[str, Any], alone: dict[str, Any], what: Any) -> None:
    assert found["loss"] == pytest.approx(alone["loss"], rel=1e-12), what
    assert found["norm"] == pytest.approx(alone["norm"], rel=1e-11), what
    torch.testing.assert_close(found, alone, rtol=1e-10, atol=1e-12, msg=lambda text: f"{what}: {text}")


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    return train((1, 1, 1, 1, 1), 0)


def test_the_reference_of_five_axes_equals_plain_pytorch(alone: dict[str, Any]) -> None:
    with float64_by_default():
        model = triax.PipelineModule([LayerSpec(cls) for cls in (Part, MLP, Experts, MLP, Experts)], seed=3)
    whole = {layout_of(p).name: p.detach().requires_grad_() for p in model.parameters()}
    x = torch.randn(ROWS, LENGTH, WIDTH, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    values = iter(whole.values())
    y = x * next(values)
    for _ in range(2):
        up, up_bias, down, down_bias = (next(values) for _ in range(4))
        y = y + nn.functional.linear(nn.functional.linear(y, up, up_bias).tanh(), down, down_bias)
        y = y + torch.einsum("btd,edf->btf", y, next(values))
    y.square().sum().div(ROWS * LENGTH).backward()
    found = {name: parameter.grad for name, parameter in whole.items() if parameter.grad is not None}
    norm = torch.stack([gradient.norm() for gradient in found.values()]).norm()
    assert alone["norm"] == pytest.approx(float(norm), rel=1e-12)
    assert found.keys() == whole.keys()
    for name, gradient in found.items():  # clipped to 0.5, with torch's 1e-6
        torch.testing.assert_close(alone["gradients"][name], gradient * 0.5 / (norm + 1e-6), rtol=1e-10, atol=0)


def run(cells: list[tuple[tuple[int, ...], int]]) -> list[dict[str, Any]]:
    return [train(*cell) for cell in cells]


@pytest.mark.parametrize("ranks_wanted", [2, 4, 8])
@pytest.mark.parametrize("every_stage", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
def test_every_grid_of_five_axes_trains_as_one_process(
    ranks: Any, alone: dict[str, Any], ranks_wanted: int, every_stage: bool
) -> None:
    """Some grids in one stage of ZeRO each; in the sweep every grid in two or four stages."""
    cells = [
        (g, (i + k) % 4) for i, g in enumerate(GRIDS) if _ranks(g) == ranks_wanted for k in ((0, 2) if i else range(4))
    ]
    if not every_stage:
        cells = {2: [cells[3], *cells[4::2]], 4: cells[3::2], 8: cells[-1:]}[ranks_wanted]
    for cell, found in zip(cells, ranks(ranks_wanted, run, cells, timeout=120)[0], strict=True):
        require_equal(found, alone, cell)


@pytest.mark.exhaustive
@pytest.mark.parametrize("ranks_wanted", [2, 4, 8])
def test_every_stage_on_every_grid_equals_one_process(ranks: Any, alone: dict[str, Any], ranks_wanted: int) -> None:
    cells = list(product([g for g in GRIDS if _ranks(g) == ranks_wanted], range(4)))
    for cell, found in zip(cells, ranks(ranks_wanted, run, cells, timeout=280)[0], strict=True):
        require_equal(found, alone, cell)


def test_checkpoints_load_on_grids_of_other_expert_degrees(ranks: Any, tmp_path: Path) -> None:
    train((1, 1, 1, 1, 1), 0, str(tmp_path / "one"))
    alone = train((1, 1, 1, 1, 1), 0, str(tmp_path / "one"), load=True)
    for saving, saving_stage, loading, loading_stage in (
        ((1, 2, 1, 1, 2), 1, (1, 2, 2, 1, 4), 3),
        ((1, 2, 2, 1, 2), 3, (1, 1, 2, 1, 1), 2),
        ((2, 2, 1, 1, 2), 2, (1, 1, 1, 1, 1), 0),
    ):
        folder = str(tmp_path / f"{saving}")
        ranks(_ranks(saving), train, saving, saving_stage, folder)
        found = ranks(_ranks(loading), train, loading, loading_stage, folder, load=True)[0]
        require_equal(found, alone, (saving, saving_stage, loading, loading_stage))


def _ranks(grid: tuple[int, ...]) -> int:
    pipe, data, context, tensor, _ = grid
    return pipe * data * context * tensor


def mean_loss(x: Tensor, labels: Tensor) -> Tensor:
    return x.square().mean()


def train_by_a_mean() -> None:
    grid = triax.Grid(context=2)
    engine, *_ = triax.initialize(
        model=triax.PipelineModule([LayerSpec(Part)], grid=grid, loss_fn=mean_loss),
        config={"train_batch_size": 2, "optimizer": {"type": "SGD", "params": {"lr": 1.0}}},
    )
    engine.train_batch(iter([(torch.randn(2, 4, WIDTH),) * 2]))


def test_a_mean_loss_on_a_context_axis_is_refused(ranks: Any) -> None:
    assert_every_rank_raises(ranks, 2, "context=2.*return a pair", train_by_a_mean)


@pytest.mark.parametrize(
    ("sizes", "text"),
    [
        ({"expert": 2}, "expert=2 does not divide data x context = 1 x 1"),
        ({"context": 0}, "the context axis has the size 0"),
        ({"context": 2}, "needs a multiple of 2 processes"),
    ],
)
def test_impossible_sizes_of_grid_axes_are_refused(sizes: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        triax.Grid(**sizes)


def groups_are_made_alike(options: dict[str, Any]) -> list[float]:
    grid = triax.Grid(pipe=2, data=2, timeout=20)
    losses = []
    tied = triax.TiedLayerSpec("tied", nn.Linear, WIDTH, WIDTH)
    lists: list[list[Any]] = [[LayerSpec(nn.Linear, WIDTH, WIDTH), torch.tanh], [tied, tied]]
    for layers in lists:
        model = triax.PipelineModule(layers, grid=grid, loss_fn=mean_loss, seed=3)
        zero = {"stage": 3, "stage3_param_persistence_threshold": 0, **options}
        config = {"train_batch_size": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}, "zero_optimization": zero}
        engine, *_ = triax.initialize(model=model, config=config)
        losses.append(float(engine.train_batch(iter([(torch.ones(1, WIDTH),) * 2]))))
    return losses


@pytest.mark.parametrize("options", [{}, {"zero_hpz_partition_size": 2}])
def test_stage_3_trains_pipeline_stages_without_own_weights(ranks: Any, options: dict[str, Any]) -> None:
    losses = ranks(4, groups_are_made_alike, options, timeout=60)
    assert losses[1:] == losses[:-1]


def built_experts() -> tuple[int, Tensor, Tensor]:
    grid = triax.Grid(data=2, context=2, expert=2)
    torch.manual_seed(grid.rank)
    module = Experts(grid=grid)
    with torch.no_grad():
        module.weight.copy_(torch.randn(module.weight.shape))
    before = module.weight.detach().clone()
    triax.PipelineModule([module, nn.Linear(WIDTH, WIDTH)], grid=grid, loss_fn=mean_loss)
    return grid.expert.rank, before, module.weight.detach().clone()


def test_built_experts_take_the_first_replicas_weights(ranks: Any) -> None:
    found = ranks(4, built_experts)
    first: dict[int, Tensor] = {}
    for expert, before, after in found:
        assert torch.equal(after, first.setdefault(expert, before))
    assert len(first) == 2 and not torch.equal(*first.values())
