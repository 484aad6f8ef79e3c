"""Contenders on the expert axis: residual blocks with a mixture of experts, whose tokens go to their experts' ranks.

All start from the weights of the same plain module: SwiGLU experts, top-k of the softmax with weights that add up to 1,
no token dropped, no balancing loss. Each rank has its own sequences.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from rounds import ALONE, Makers, load_deepspeed, quiet
from sharers import Alone, Shape, Shared, mine
from torch import Tensor, nn

import triax
from triax.moe import MoE, SwiGLU


@dataclass(frozen=True)
class MoEShape(Shape):
    """Size of the work: the blocks of ``Shape``, with ``experts`` of ``hidden`` rows, ``top_k`` for each token."""

    experts: int = 8
    hidden: int = 512
    top_k: int = 2

    def __str__(self) -> str:
        return f"{super().__str__()}, {self.experts} experts of width {self.hidden}"


# ------------------------------------------------------------------------------------------- one process


class Expert(nn.Module):
    """SwiGLU: (..., D) -> (..., D)."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate_up, self.down = nn.Linear(width, 2 * hidden, bias=False), nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, -1)
        y: Tensor = self.down(F.silu(gate) * up)
        return y


class _Exchange(torch.autograd.Function):
    """All-to-all of rows, and the other way backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, receive: list[int], send: list[int]) -> Tensor:
        ctx.receive, ctx.send = receive, send
        y = x.new_empty(sum(receive), x.shape[1])
        dist.all_to_all_single(y, x.contiguous(), receive, send)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        return _Exchange.apply(dy, ctx.send, ctx.receive), None, None


class ByHand(nn.Module):
    """The usual mixture by hand: sort, all-to-all with uneven parts, a loop over experts, and back: (B, T, D).

    Args:
        shape: the sizes.
        size: ranks over which the experts are spread.
    """

    def __init__(self, shape: MoEShape, size: int) -> None:
        super().__init__()
        self.size, self.count, self.top_k = size, shape.experts, shape.top_k
        self.router = nn.Linear(shape.width, shape.experts, bias=False)
        self.experts = nn.ModuleList(Expert(shape.width, shape.hidden) for _ in range(shape.experts // size))

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, -2)  # (N, D)
        weights, chosen = self.router(tokens).softmax(-1).topk(self.top_k, -1)
        weights = weights / weights.sum(-1, keepdim=True)
        order = chosen.flatten().argsort(stable=True)
        token = order // self.top_k
        rows = tokens[token]
        counts = chosen.flatten().bincount(minlength=self.count)
        table = counts.view(self.size, -1)  # a row for each rank that is sent to
        if self.size > 1:
            received = torch.empty_like(table)
            dist.all_to_all_single(received, table)
            send, receive = table.sum(1).tolist(), received.sum(1).tolist()
            rows = _Exchange.apply(rows, receive, send)
            table = received
            by_expert = torch.arange(table.shape[1]).repeat(self.size).repeat_interleave(table.flatten()).argsort()
            rows = rows[by_expert]
        parts = rows.split(table.sum(0).tolist())
        rows = torch.cat([expert(part) for expert, part in zip(self.experts, parts, strict=True)])
        if self.size > 1:
            rows = _Exchange.apply(torch.empty_like(rows).index_copy(0, by_expert, rows), send, receive)
        y = torch.zeros_like(tokens).index_add(0, token, rows * weights.flatten()[order, None])
        return y.view_as(x)


class Block(nn.Module):
    """Residual block of a norm and a mixture: (B, T, D) -> (B, T, D)."""

    def __init__(self, width: int, moe: nn.Module) -> None:
        super().__init__()
        self.norm, self.moe = nn.LayerNorm(width), moe

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.moe(self.norm(x))
        return x + y


class WholeMoE(Alone):
    """The first rank alone with all experts and tokens."""

    shape: MoEShape

    def build(self) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            shape = self.shape
            return nn.Sequential(*(Block(shape.width, ByHand(shape, 1)) for _ in range(shape.layers)))


# ----------------------------------------------------------------------------------------------- sharded


class SharedMoE(Shared):
    """Contender with 1/n of the sequences and of the experts on every rank."""

    shape: MoEShape

    def __init__(self, shape: MoEShape) -> None:
        super().__init__(shape)
        inputs, self.labels = (mine(x.detach(), 0).clone() for x in (self.inputs, self.labels))
        self.inputs = inputs.requires_grad_()

    def build(self) -> nn.Module:
        model = nn.Sequential(*(Block(self.shape.width, self.make()) for _ in range(self.shape.layers)))
        weights = dict(WholeMoE(self.shape).model.named_parameters())
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                self.copy(parameter, [weights[part] for part in self.parts(name)])
        return model

    def make(self) -> nn.Module:
        """A mixture, on this rank."""
        return ByHand(self.shape, dist.get_world_size())

    def parts(self, name: str) -> list[str]:
        """Names in the plain module of a parameter's parts, an expert each."""
        layer, moe, experts, number, rest = name.split(".", 4) if ".experts." in name else (name, "", "", "", "")
        return [f"{layer}.{moe}.{experts}.{self.first + int(number)}.{rest}"] if number else [name]

    @property
    def first(self) -> int:
        """The first of this rank's experts."""
        return self.local * dist.get_rank()

    @property
    def local(self) -> int:
        """The number of this rank's experts."""
        return self.shape.experts // dist.get_world_size()

    @staticmethod
    def copy(parameter: Tensor, parts: list[Tensor]) -> None:
        """Set the initial weights."""
        parameter.copy_(torch.stack(parts).view_as(parameter))

    def gradients(self) -> dict[str, Tensor]:
        self.run()
        found: dict[str, Tensor] = {}
        for name, parameter in self.model.named_parameters():
            assert parameter.grad is not None
            names, gradient = self.parts(name), parameter.grad.clone()
            if not any(".experts." in part for part in names):
                dist.all_reduce(gradient)
            found.update(zip(names, gradient.unbind() if len(names) > 1 else [gradient], strict=True))
        return found


class TriaxMoE(SharedMoE):
    """triax's ``MoE``."""

    def __init__(self, shape: MoEShape, grid: triax.Grid) -> None:
        self.grid = grid
        super().__init__(shape)

    def make(self) -> nn.Module:
        shape = self.shape
        return MoE(
            shape.width,
            shape.experts,
            shape.top_k,
            grid=self.grid,
            expert=SwiGLU,
            width=shape.hidden,
            balance=None,
        )

    def parts(self, name: str) -> list[str]:
        if ".routed." not in name:
            return [name]
        layer, kind = name.split(".")[0], name.rsplit(".", 1)[1]
        return [f"{layer}.moe.experts.{self.first + i}.{kind}.weight" for i in range(self.local)]


class DeepSpeedMoE(SharedMoE):
    """``MoE`` of DeepSpeed, without a limit of an expert's tokens."""

    def __init__(self, shape: MoEShape) -> None:
        load_deepspeed()
        super().__init__(shape)

    def make(self) -> nn.Module:
        from deepspeed.moe.layer import MoE as Theirs

        shape, expert = self.shape, Expert(self.shape.width, self.shape.hidden)
        size = dist.get_world_size()
        options = {"drop_tokens": False, "min_capacity": 0, "top2_2nd_expert_sampling": False}
        layer = Theirs(shape.width, expert, shape.experts, ep_size=size, k=shape.top_k, **options)
        with quiet():
            layer.set_deepspeed_parallelism()
        return _First(layer)

    def parts(self, name: str) -> list[str]:
        name = name.replace(".layer.deepspeed_moe", "").replace("gate.wg", "router")
        return super().parts(name.replace("experts.deepspeed_experts", "experts"))


class _First(nn.Module):
    """The first of a layer's results: the output, without the auxiliary loss and the loads."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)[0]
        return y


def contenders(shape: MoEShape, grid: triax.Grid) -> Makers[Alone]:
    """Names, and how to make them; the one process first."""
    yield ALONE, lambda: WholeMoE(shape)
    yield "triax", lambda: TriaxMoE(shape, grid)
    yield "all-to-all by hand", lambda: SharedMoE(shape)
    yield "DeepSpeed", lambda: DeepSpeedMoE(shape)
