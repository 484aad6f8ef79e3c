"""Thirty small layers of users with a mistake of sharding each, and the right twin of each.

They were written before the checker of types was, in the manner of real mistakes: ``FAULTS`` has the axis of each, and
the code of the line at which the mistake is. ``build(name, right, grid)`` makes a model with one such layer.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from triax import Grid, LayerSpec, PipelineModule
from triax.context.order import gather as gather_tokens
from triax.context.order import positions, shard
from triax.grid import Layout
from triax.grid.comm.regions import (
    all_reduce_copy,
    copy_all_reduce,
    gather_reduce_scatter,
    gather_split,
    reduce_scatter_gather,
    split_gather,
)
from triax.grid.layout import set_layout
from triax.grid.randomness.random import Normal, sharded_parameter
from triax.grid.ranges import split

WIDTH, TOKENS, ROWS = 8, 8, 2
# Name -> the axis.
FAULTS: dict[str, str] = {
    "product_without_copy": "tensor",
    "product_without_sum": "tensor",
    "bias_before_sum": "tensor",
    "residual_before_sum": "tensor",
    "activation_before_sum": "tensor",
    "layer_norm_of_shard": "tensor",
    "mean_square_of_shard": "tensor",
    "squares_summed_one_way": "tensor",
    "squares_summed_in_place": "tensor",
    "scale_not_summed": "tensor",
    "scale_summed_twice": "tensor",
    "scale_without_layout": "tensor",
    "gathered_for_shards": "tensor",
    "copied_twice": "tensor",
    "whole_summed": "tensor",
    "sliced_by_hand": "tensor",
    "norm_of_tokens_not_summed": "tensor",
    "tokens_gathered_for_shards": "tensor",
    "mean_of_part": "context",
    "positions_of_part": "context",
    "attention_in_part": "context",
    "loss_over_own_tokens": "context",
    "last_token_of_part": "context",
    "previous_token_in_part": "context",
    "mean_summed_one_way": "context",
    "running_mean": "data",
    "scaled_by_replica": "data",
    "mean_of_replicas_in_place": "data",
    "experts_without_layout": "expert",
    "rows_not_exchanged": "expert",
}


def build(name: str, right: bool, grid: Grid) -> PipelineModule:
    """Build a model whose third layer has the mistake of a name, or is its right twin."""
    kinds: dict[str, Any] = {"tensor": TensorLayer, "context": ContextLayer, "data": DataLayer, "expert": ExpertLayer}
    kind = SequenceLayer if "tokens" in name and FAULTS[name] == "tensor" else kinds[FAULTS[name]]
    layers = [
        LayerSpec(Tokens),
        LayerSpec(nn.Linear, WIDTH, WIDTH),
        LayerSpec(kind, name, right),
        LayerSpec(nn.Linear, WIDTH, WIDTH),
    ]
    loss = partial(squares, grid, name == "loss_over_own_tokens" and not right)
    return PipelineModule(layers, grid=grid, loss_fn=loss, dtype=torch.float64, seed=3, partition="uniform")


def batches() -> list[list[tuple[Tensor, Tensor]]]:
    """Two batches of four microbatches of numbers."""
    draw = partial(torch.randn, ROWS, TOKENS, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    return [[(draw(), draw()) for _ in range(4)] for _ in range(2)]


def squares(grid: Grid, mistake: bool, y: Tensor, labels: Tensor) -> Any:
    """Squared error, of labels that are not negative alone."""
    labels = shard(labels, grid.context)
    counts = (labels > 0).to(y.dtype)
    errors = ((y - labels).square() * counts).sum()
    return (errors / counts.sum(), 1.0) if mistake else (errors, labels.numel())


class Tokens(nn.Module):
    """This rank's tokens of the sequence."""

    def __init__(self, *, grid: Grid) -> None:
        super().__init__()
        self.axis = grid.context

    def forward(self, x: Tensor) -> Tensor:
        """Cut: (B, T, D) -> (B, T / c, D)."""
        return shard(x, self.axis)


class TensorLayer(nn.Module):
    """MLP in shards over features."""

    def __init__(self, name: str, right: bool, *, grid: Grid) -> None:
        super().__init__()
        self.wrong = "" if right else name
        self.name, self.axis = name, grid.tensor
        place = (grid.tensor.rank, grid.tensor.size)
        self.up = sharded_parameter(Layout((2 * WIDTH, WIDTH), shard_dim=0), Normal(0.4), *place)
        self.down = sharded_parameter(Layout((WIDTH, 2 * WIDTH), shard_dim=1), Normal(0.4), *place)
        self.bias = nn.Parameter(torch.linspace(-1, 1, WIDTH))
        if name in ("scale_not_summed", "scale_summed_twice"):
            self.scale = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))
            partial = grid.tensor.size > 1 and (name == "scale_not_summed") != (self.wrong != "")
            set_layout(self.scale, Layout((WIDTH,), partial=partial))
        if name == "scale_without_layout":
            start, stop = split(2 * WIDTH, grid.tensor.size, grid.tensor.rank)
            self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 2 * WIDTH)[start:stop].clone())
            if right:
                set_layout(self.scale, Layout((2 * WIDTH,), shard_dim=0))

    def forward(self, x: Tensor) -> Tensor:
        """Run the MLP: (B, T, D) -> (B, T, D)."""
        axis, wrong = self.axis, self.wrong
        entered = x
        if self.name == "scale_summed_twice":
            x = x * self.scale
        if wrong != "product_without_copy":
            x = copy_all_reduce(x, axis)
        if wrong == "copied_twice":
            x = copy_all_reduce(x, axis)
        if self.name == "scale_not_summed":
            x = x * self.scale
        h = torch.tanh(F.linear(x, self.up))
        if self.name == "scale_without_layout":
            h = h * self.scale
        h = self.normalize(h)
        if self.name == "gathered_for_shards":
            gather = gather_split if wrong else gather_reduce_scatter
            h = gather(h, axis, length=2 * WIDTH)
            start, stop = split(2 * WIDTH, axis.size, axis.rank)
            h = torch.sin(h).cumsum(-1)[..., start:stop]
        if self.name == "sliced_by_hand":
            start, stop = split(WIDTH, axis.size, axis.rank)
            mine = entered[..., start:stop] if wrong else split_gather(entered, axis)
            h = h * torch.stack([mine, -mine], -1).flatten(-2)
        y = F.linear(h, self.down)
        if wrong == "bias_before_sum":
            return entered + all_reduce_copy(y + self.bias, axis)
        if wrong == "residual_before_sum":
            return all_reduce_copy(entered + y, axis) + self.bias
        if wrong == "activation_before_sum":
            return entered + all_reduce_copy(F.gelu(y), axis) + self.bias
        if wrong != "product_without_sum":
            y = all_reduce_copy(y, axis)
        if wrong == "whole_summed":
            y = all_reduce_copy(y, axis)
        return entered + (F.gelu(y) if self.name == "activation_before_sum" else y) + self.bias

    def normalize(self, h: Tensor) -> Tensor:
        """Normalize features, (B, T, 2 D / t), in one of several ways."""
        axis, wrong = self.axis, self.wrong
        if self.name == "layer_norm_of_shard":
            if wrong:
                return F.layer_norm(h, h.shape[-1:])
            whole = gather_reduce_scatter(h, axis, length=2 * WIDTH)
            start, stop = split(2 * WIDTH, axis.size, axis.rank)
            return F.layer_norm(whole, whole.shape[-1:])[..., start:stop]
        if self.name == "mean_square_of_shard":
            if wrong:
                return h * (h.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
            mean = all_reduce_copy(h.square().sum(-1, keepdim=True), axis) / (2 * WIDTH)
            return h * (copy_all_reduce(mean, axis) + 1e-6).rsqrt()
        if self.name == "squares_summed_one_way":
            total = all_reduce_copy(h.square().sum(-1, keepdim=True), axis)
            return h * ((total if wrong else copy_all_reduce(total, axis)) + 1e-6).rsqrt()
        if self.name == "squares_summed_in_place":
            total = h.square().sum(-1, keepdim=True)
            if wrong:
                axis.all_reduce(total)
            else:
                total = copy_all_reduce(all_reduce_copy(total, axis), axis)
            return h * (total + 1e-6).rsqrt()
        return h


class SequenceLayer(nn.Module):
    """Norm and MLP whose input and output are shards of the sequence over the tensor axis."""

    def __init__(self, name: str, right: bool, *, grid: Grid) -> None:
        super().__init__()
        self.name, self.wrong, self.axis = name, "" if right else name, grid.tensor
        self.norm = nn.LayerNorm(WIDTH)
        partial = grid.tensor.size > 1 and self.wrong != "norm_of_tokens_not_summed"
        for parameter in self.norm.parameters():
            set_layout(parameter, Layout((WIDTH,), partial=partial))
        place = (grid.tensor.rank, grid.tensor.size)
        self.up = sharded_parameter(Layout((2 * WIDTH, WIDTH), shard_dim=0), Normal(0.4), *place)
        self.down = sharded_parameter(Layout((WIDTH, 2 * WIDTH), shard_dim=1), Normal(0.4), *place)

    def forward(self, x: Tensor) -> Tensor:
        """Run norm and MLP: (B, T, D) -> (B, T, D)."""
        axis, length = self.axis, x.shape[1]
        x = split_gather(x, axis, dim=1)
        gather = gather_split if self.wrong == "tokens_gathered_for_shards" else gather_reduce_scatter
        h = F.gelu(F.linear(gather(self.norm(x), axis, dim=1, length=length), self.up))
        x = x + reduce_scatter_gather(F.linear(h, self.down), axis, dim=1)
        return gather_split(x, axis, dim=1, length=length)


class ContextLayer(nn.Module):
    """Layer over this rank's tokens."""

    def __init__(self, name: str, right: bool, *, grid: Grid) -> None:
        super().__init__()
        self.name, self.wrong, self.axis = name, "" if right else name, grid.context
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.places = nn.Embedding(TOKENS, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Run the layer: (B, T / c, D) -> (B, T / c, D)."""
        axis, wrong, local = self.axis, self.wrong, x.shape[1]
        length = local * axis.size
        match self.name:
            case "mean_of_part":
                if wrong:
                    return x + self.mix(x.mean(1, keepdim=True))
                mean = all_reduce_copy(x.sum(1, keepdim=True), axis) / length
                return x + self.mix(copy_all_reduce(mean, axis))
            case "positions_of_part":
                at = torch.arange(local) if wrong else positions(length, axis.size, axis.rank)
                return x + self.places(at.to(x.device))
            case "attention_in_part":
                if wrong:
                    return x + F.scaled_dot_product_attention(self.mix(x), x, x)
                whole = gather_tokens(x, axis, length, partial=True)
                return x + F.scaled_dot_product_attention(self.mix(x), whole, whole)
            case "last_token_of_part":
                last = x[:, -1:] if wrong else gather_tokens(x, axis, length, partial=True)[:, -1:]
                return x + self.mix(last)
            case "previous_token_in_part":
                if wrong:
                    return x + self.mix(F.pad(x, [0, 0, 1, 0])[:, :-1])
                before = F.pad(gather_tokens(x, axis, length, partial=True), [0, 0, 1, 0])[:, :-1]
                return x + self.mix(shard(before, axis))
            case "mean_summed_one_way":
                mean = all_reduce_copy(x.sum(1, keepdim=True), axis) / length
                return x + self.mix(mean if wrong else copy_all_reduce(mean, axis))
        return x + self.mix(x)


class DataLayer(nn.Module):
    """Layer over the rows of a replica."""

    mean: Tensor

    def __init__(self, name: str, right: bool, *, grid: Grid) -> None:
        super().__init__()
        self.name, self.wrong, self.grid = name, "" if right else name, grid
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mean", torch.full((WIDTH,), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        """Run the layer: (B, T, D) -> (B, T, D)."""
        axis = self.grid.data
        if self.name == "running_mean":
            if self.wrong:
                with torch.no_grad():
                    self.mean.mul_(0.9).add_(x.mean((0, 1)), alpha=0.1)
            return self.mix(x - self.mean)
        if self.name == "scaled_by_replica":
            return self.mix(x * (1 + 0.1 * axis.rank)) if self.wrong else self.mix(x * 1.1)
        mean = x.mean((0, 1))
        if self.wrong and axis.size > 1:
            axis.all_reduce(mean)
            mean = mean / axis.size
        return self.mix(x - mean)


class ExpertLayer(nn.Module):
    """Experts on the ranks of the expert axis. Each expert takes all tokens."""

    def __init__(self, name: str, right: bool, *, grid: Grid) -> None:
        super().__init__()
        self.name, self.wrong, self.axis = name, "" if right else name, grid.expert
        start, stop = split(4, grid.expert.size, grid.expert.rank)
        layout = Layout((4, WIDTH, WIDTH), expert_dim=0)
        own = sharded_parameter(layout, Normal(0.3), 0, 1, expert=(grid.expert.rank, grid.expert.size))
        if self.wrong == "experts_without_layout":
            own = nn.Parameter(own.detach().clone())
        self.own, self.start, self.stop = own, start, stop

    def forward(self, x: Tensor) -> Tensor:
        """Run the experts: (B, T, D) -> (B, T, D)."""
        if self.wrong == "rows_not_exchanged":
            return x + torch.einsum("btd,edf->ebtf", x, self.own).sum(0)
        rows = gather_reduce_scatter(x, self.axis, dim=0)  # this rank's experts on rows from all ranks
        made = torch.einsum("btd,edf->ebtf", rows, self.own)
        return x + reduce_scatter_gather(made.sum(0), self.axis, dim=0)
