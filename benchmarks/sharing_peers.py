"""The peers on the tensor axis: layers written by hand, and DTensor; and all who are compared, by name."""

from __future__ import annotations

import contextlib
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from rounds import ALONE, Makers
from sharers import Alone, Block, Positions, Shape, Shared, Triax, mine, plain
from torch import Tensor, nn

import triax

# ---------------------------------------------------------------------------------------- written by hand


class _Copy(torch.autograd.Function):
    """f: a copy, and an all-reduce backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        dist.all_reduce(dy := dy.contiguous())
        return dy


class _Reduce(torch.autograd.Function):
    """f-bar: an all-reduce, and a copy backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        return dy


class _Column(nn.Module):
    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.weight = nn.Parameter(mine(layer.weight.detach(), 0).clone())
        self.bias = None if layer.bias is None else nn.Parameter(mine(layer.bias.detach(), 0).clone())

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(_Copy.apply(x), self.weight, self.bias)


class _Row(nn.Module):
    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.weight = nn.Parameter(mine(layer.weight.detach(), 1).clone())
        self.bias = nn.Parameter(layer.bias.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        return _Reduce.apply(F.linear(x, self.weight)) + self.bias


class _Vocabulary(nn.Module):
    def __init__(self, layer: nn.Embedding) -> None:
        super().__init__()
        self.weight = nn.Parameter(mine(layer.weight.detach(), 0).clone())
        self.start = dist.get_rank() * len(self.weight)

    def forward(self, ids: Tensor) -> Tensor:
        foreign = (ids < self.start) | (ids >= self.start + len(self.weight))
        rows = F.embedding((ids - self.start).masked_fill(foreign, 0), self.weight)
        return _Reduce.apply(rows.masked_fill(foreign[..., None], 0.0))


class _CrossEntropy(torch.autograd.Function):
    """Three all-reduces: the maximum, the label's logit, the sum of exponentials."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor) -> Tensor:
        top = logits.amax(-1)
        dist.all_reduce(top, dist.ReduceOp.MAX)
        logits = logits - top[:, None]
        start = dist.get_rank() * logits.shape[1]
        foreign = (labels < start) | (labels >= start + logits.shape[1])
        at = (labels - start).masked_fill(foreign, 0)
        wanted = logits.gather(1, at[:, None])[:, 0].masked_fill(foreign, 0.0)
        dist.all_reduce(wanted)
        softmax = logits.exp()
        total = softmax.sum(-1)
        dist.all_reduce(total)
        ctx.save_for_backward(softmax.div_(total[:, None]), at, foreign)
        return total.log() - wanted

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        softmax, at, foreign = ctx.saved_tensors
        dlogits = softmax.scatter_add(1, at[:, None], -(~foreign).to(softmax.dtype)[:, None])
        return dlogits * dy[:, None], None


class ByHand(Shared):
    """The plain module, its layers replaced by a few lines each, as Megatron-LM's: f and f-bar around ``F.linear``."""

    def build(self) -> nn.Module:
        model: Any = plain(self.shape)
        for block in model:
            if isinstance(block, Block):
                part: Any
                for part, column, row in ((block.attention, "qkv", "out"), (block.mlp, "up", "down")):
                    setattr(part, column, _Column(getattr(part, column)))
                    setattr(part, row, _Row(getattr(part, row)))
        if self.shape.vocabulary:
            model[0], model[-1] = _Vocabulary(model[0]), _Column(model[-1])
        return model

    def loss(self, logits: Tensor) -> Tensor:
        return _CrossEntropy.apply(logits.flatten(0, 1), self.labels.flatten()).mean()

    def whole(self, name: str, parameter: nn.Parameter, gradient: Tensor) -> Tensor:
        *path, kind = name.split(".")
        layer = self.model.get_submodule(".".join(path))
        if not isinstance(layer, (_Column, _Vocabulary, _Row)) or (isinstance(layer, _Row) and kind == "bias"):
            return gradient
        parts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(parts, gradient)
        return torch.cat(parts, dim=1 if isinstance(layer, _Row) else 0)


class Silent(ByHand):
    """The arithmetic of a tensor axis without its messages: wrong numbers, and the time that is left."""

    def surroundings(self) -> contextlib.AbstractContextManager[Any]:
        return patch.object(dist, "all_reduce", lambda *args: None)


# ----------------------------------------------------------------------------------------------- DTensor


class _LocalPositions(nn.Module):
    """Positions of which each rank holds those of its shard of the sequence."""

    def __init__(self, positions: Positions, mesh: Any) -> None:
        super().__init__()
        from torch.distributed.tensor import Shard, distribute_tensor

        self.weight = nn.Parameter(distribute_tensor(positions.weight.detach(), mesh, [Shard(0)]))

    def forward(self, x: Tensor) -> Tensor:
        weight: Any = self.weight
        return x + weight.to_local()


class Distributed(Shared):
    """The plain module under ``parallelize_module``, as its tutorial has it; ``sequence_parallel`` or not."""

    def __init__(self, shape: Shape, sequence_parallel: bool) -> None:
        from torch.distributed.device_mesh import init_device_mesh

        self.sequence_parallel, self.mesh = sequence_parallel, init_device_mesh("cpu", (dist.get_world_size(),))
        super().__init__(shape)

    def build(self) -> nn.Module:
        from torch.distributed.tensor import Replicate, Shard
        from torch.distributed.tensor.parallel import (
            ColwiseParallel,
            PrepareModuleInput,
            RowwiseParallel,
            SequenceParallel,
            parallelize_module,
        )

        model, mesh, on_shards = plain(self.shape), self.mesh, self.sequence_parallel
        hidden = Shard(1) if on_shards else Replicate()
        columns = {"attention.qkv": ColwiseParallel(), "mlp.up": ColwiseParallel()}
        rows = {name: RowwiseParallel(output_layouts=hidden) for name in ("attention.out", "mlp.down")}
        shards: dict[str, Any] = {}
        if on_shards:
            shards = {"norm1": SequenceParallel(), "norm2": SequenceParallel()}
            for name in ("attention", "mlp"):
                shards[name] = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
        for block in model:
            if isinstance(block, Block):
                parallelize_module(block, mesh, {**columns, **rows, **shards})
        if self.shape.vocabulary:
            count = len(model)
            if on_shards:
                assert isinstance(model[1], Positions)
                model[1] = _LocalPositions(model[1], mesh)
            ends: dict[str, Any] = {
                "0": RowwiseParallel(input_layouts=Replicate(), output_layouts=hidden),
                str(count - 1): ColwiseParallel(input_layouts=hidden, output_layouts=Shard(-1), use_local_output=False),
            }
            if on_shards:
                ends[str(count - 2)] = SequenceParallel()
            parallelize_module(model, mesh, ends)
        return model

    def surroundings(self) -> contextlib.AbstractContextManager[Any]:
        from torch.distributed.tensor.parallel import loss_parallel

        return loss_parallel()

    def whole(self, name: str, parameter: nn.Parameter, gradient: Tensor) -> Tensor:
        found: Tensor = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
        return found


def sharers(shape: Shape, grid: triax.Grid) -> Makers[Alone]:
    """Names, and how to make them; the one process first."""
    yield ALONE, lambda: Alone(shape)
    yield "triax", lambda: Triax(shape, grid, False)
    yield "triax, sequence parallel", lambda: Triax(shape, grid, True)
    yield "written by hand", lambda: ByHand(shape)
    yield "DTensor", lambda: Distributed(shape, False)
    yield "DTensor, sequence parallel", lambda: Distributed(shape, True)
