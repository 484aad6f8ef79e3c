"""Plans of one's own for sharding, and what no plan may drop."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from triax.grid import Grid
from triax.grid.layout import layout_of
from triax.models.huggingface.parallelize import find_plan, parallelize

from support.differences import largest
from support.sharding_plans import PLAN, Model, worst


def errors(model: nn.Module, whole: nn.Module, ids: Tensor, grid: Grid) -> dict[str, float]:
    """Return the relative errors of the output and the gradients of a model in shards, beside the whole model."""
    outputs = [each(ids) for each in (model, whole)]
    for output in outputs:
        output.square().sum().backward()
    found = {"output": worst(*outputs)}
    for (name, parameter), reference in zip(model.named_parameters(), whole.parameters(), strict=True):
        assert parameter.grad is not None and reference.grad is not None
        part = layout_of(parameter).shard(reference.grad, grid.tensor.rank, grid.tensor.size)
        found[name] = worst(parameter.grad, part)
    return found


def compare_mine(size: int, plan: dict[str, Any]) -> dict[str, float]:
    grid = Grid(tensor=size)
    torch.manual_seed(0)
    whole = Model().double()
    torch.manual_seed(grid.rank)  # as if no two processes drew alike
    model = Model().double()
    if grid.rank == 0:
        model.load_state_dict(whole.state_dict())
    parallelize(model, grid, plan)
    assert model.twice is model.down and model.head.weight is model.embedding.weight
    ids = torch.arange(36).view(3, 12) % 19
    return errors(model, whole, ids, grid)


def test_a_hand_written_plan_computes_as_the_whole_model(ranks: Any) -> None:
    """Rank 0's values, on 3 ranks that divide neither vocabulary nor hidden width; a padding row has no gradient."""
    for found in ranks(3, compare_mine, 3, PLAN):
        assert largest(found.values()) < 1e-9, found
        assert len(found) == 12


def changed_in_place(size: int) -> dict[str, float]:
    """A plain module that changes its linears' outputs, against itself."""
    torch.manual_seed(0)
    whole = nn.Sequential(
        nn.Embedding(19, 8), nn.Linear(8, 21), nn.ReLU(inplace=True), nn.Linear(21, 16), nn.Hardtanh(inplace=True)
    ).double()
    model = copy.deepcopy(whole)
    grid = Grid(tensor=size)
    parallelize(model, grid, {"0": "vocab", "1": "column", "3": "row"})
    return errors(model, whole, torch.arange(12).view(3, 4), grid)


def test_outputs_of_planned_layers_may_change_in_place(ranks: Any) -> None:
    for found in ranks(2, changed_in_place, 2):
        assert largest(found.values()) < 1e-10, found


def test_parallelize_on_one_rank_changes_nothing() -> None:
    model = Model()
    assert parallelize(model, Grid(), PLAN) is model
    assert type(model.up) is nn.Linear


class Scaled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 3.0


class ScaledWords(nn.Embedding):
    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) * 5.0


class Adapted(nn.Linear):
    """Has a parameter beside torch's."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.low = nn.Parameter(torch.zeros(2, inputs))


class Renamed(nn.Linear):
    """Computes as any linear does."""


def beyond_plain(kind: str) -> nn.Module:
    """Two layers, one of which is or has more than torch's."""
    up, down = nn.Linear(8, 16), nn.Linear(16, 8)
    match kind:
        case "linear":
            up = Scaled(8, 16)
        case "embedding":
            return nn.Sequential(ScaledWords(16, 16), down)
        case "parameter":
            up = Adapted(8, 16)
        case "buffer":
            up.register_buffer("calls", torch.zeros(()))
        case "instance":
            up.forward = functools.partial(nn.Linear.forward, down)  # type: ignore[method-assign]
        case "hook":
            up.register_forward_hook(lambda module, inputs, output: output * 2)
        case "pre-hook":
            up.register_forward_pre_hook(lambda module, inputs: None)
        case "backward hook":
            up.register_full_backward_hook(lambda module, inputs, outputs: None)
        case "weight_norm":
            nn.utils.parametrizations.weight_norm(up)
        case "spectral_norm":
            nn.utils.spectral_norm(up)
    return nn.Sequential(up, down)


BEYOND_PLAIN = {
    "linear": "0, a Scaled, has its own forward method",
    "embedding": "0, a ScaledWords, has its own forward method",
    "parameter": "0, a Adapted, has the additional tensors low",
    "buffer": "0, a Linear, has the additional tensors calls",
    "instance": "0, a Linear, has its own forward method",
    "hook": "0, a Linear, has forward hooks",
    "pre-hook": "0, a Linear, has forward pre hooks",
    "backward hook": "0, a Linear, has backward hooks",
    "weight_norm": "0, a ParametrizedLinear, is parametrized",
    "spectral_norm": "0, a Linear, has the additional tensors weight_orig, weight_u, weight_v",
}


def refused(kind: str, grid: Grid) -> str:
    model = beyond_plain(kind)
    names = set(model.state_dict())
    with pytest.raises(TypeError) as error:
        parallelize(model, grid, {"0": "vocab" if kind == "embedding" else "column", "1": "row"})
    assert set(model.state_dict()) == names and type(model[1]) is nn.Linear  # type: ignore[index]
    return str(error.value)


def all_refused(size: int) -> list[str]:
    grid = Grid(tensor=size)
    found = [refused(kind, grid) for kind in BEYOND_PLAIN]
    one = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8))
    if grid.rank == 1:  # a hook on one rank alone: the others do not wait for it
        one[1].register_forward_hook(lambda module, inputs, output: None)
    with pytest.raises(TypeError, match=r"^1, a Linear, has forward hooks"):
        parallelize(one, grid, {"0": "column", "1": "row"})
    return found


@pytest.mark.filterwarnings("ignore:.*_norm. is deprecated")
@pytest.mark.parametrize("kind", BEYOND_PLAIN)
def test_layers_that_sharding_would_break_are_refused_on_one_rank(kind: str) -> None:
    said = refused(kind, Grid())
    assert said.startswith(BEYOND_PLAIN[kind])
    assert said.endswith("parallelize before the layer is changed in this way, or leave the layer out of the plan.")


def test_layers_that_sharding_would_break_are_refused_on_every_rank(ranks: Any) -> None:
    for found in ranks(2, all_refused, 2):
        for said, expected in zip(found, BEYOND_PLAIN.values(), strict=True):
            assert said.startswith(expected)


def harmless(size: int) -> tuple[float, str]:
    """A subclass that computes as torch's does, beside a hooked layer that the plan leaves out."""
    torch.manual_seed(0)
    whole = nn.Sequential(Renamed(8, 16), nn.ReLU(), nn.Linear(16, 8), Scaled(8, 8)).double()
    model = copy.deepcopy(whole)
    model[3].register_forward_hook(lambda module, inputs, output: output)
    parallelize(model, Grid(tensor=size), {"0": "column", "2": "row"})
    x = torch.randn(3, 8, dtype=torch.float64)
    return worst(model(x).detach(), whole(x).detach()), type(model[0]).__name__


def test_a_subclass_that_computes_like_its_parent_is_sharded(ranks: Any) -> None:
    assert harmless(1) == (0.0, "Renamed")
    for error, kind in ranks(2, harmless, 2):
        assert error < 1e-10 and kind == "ColumnSharded"


def test_find_plan_refuses_models_without_layers_of_their_family() -> None:
    class Config:
        model_type = "bert"
        hidden_size, num_attention_heads = 16, 2

    model = Model()
    model.config = Config()  # type: ignore[assignment]
    with pytest.raises(ValueError, match=r"has the model_type 'bert', but none of the layers of that family"):
        find_plan(model)
