"""DistributedDataParallel around a ``PipelineModule``: right where each rank has the whole model, refused elsewhere."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from triax import Grid, LayerSpec, PipelineModule


def rows(rank: int) -> Tensor:
    return torch.randn(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(rank))


def averaged(**axes: Any) -> dict[str, Tensor] | str:
    """Return the gradients of a model in DistributedDataParallel, or the error."""
    grid = Grid(**axes)
    layers = [LayerSpec(nn.Linear, 4, 4), LayerSpec(nn.Linear, 4, 1)]
    model = PipelineModule(layers, grid=grid, loss_fn=nn.functional.mse_loss, dtype=torch.float64)
    try:
        wrapped = DistributedDataParallel(model)
    except TypeError as error:
        return str(error)
    wrapped(rows(grid.rank)).square().mean().backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def test_ddp_of_whole_models_averages_the_gradients(ranks: Any) -> None:
    found = ranks(2, averaged, data=2)
    layers = [LayerSpec(nn.Linear, 4, 4), LayerSpec(nn.Linear, 4, 1)]
    model = PipelineModule(layers, grid=Grid(), dtype=torch.float64)
    sum(model(rows(rank)).square().mean() / 2 for rank in range(2)).backward()
    for gradients in found:
        assert gradients.keys() == dict(model.named_parameters()).keys()
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("axis", ["pipe", "tensor"])
def test_ddp_of_a_part_of_a_model_is_refused(ranks: Any, axis: str) -> None:
    for message in ranks(2, averaged, **{axis: 2}):
        assert "Give it to triax.Engine" in message and f"{axis}=2" in message
