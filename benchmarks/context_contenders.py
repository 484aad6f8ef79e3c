"""Contenders on the context axis: blocks of a GPT, whose attention sees the tokens of all ranks.

All start from the weights of the same plain module (sharers.py). Each rank has a part of the sequence.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from einops import rearrange
from rounds import ALONE, Makers, NotRunning, load_deepspeed
from sharers import Alone, Block, Shape, Shared, Triax, attend, plain
from torch import Tensor, nn

import triax
from triax.models.gpt import gpt_layers


class Part(Shared):
    """Contender with a part of the sequence on every rank: contiguous, or a chunk from the front and one from the back.

    A rank's gradients are sums over its own tokens. They are summed over the ranks to be compared, not in a step.
    """

    zigzag = False

    def __init__(self, shape: Shape, *args: Any) -> None:
        super().__init__(shape, *args)
        inputs, self.labels = (self.part(x.detach()) for x in (self.inputs, self.labels))
        self.inputs = inputs.requires_grad_()

    def part(self, x: Tensor) -> Tensor:
        """This rank's tokens, from (B, T, ...)."""
        rank, size = dist.get_rank(), dist.get_world_size()
        if not self.zigzag:
            return x.chunk(size, 1)[rank].contiguous()
        chunks = x.chunk(2 * size, 1)
        return torch.cat([chunks[rank], chunks[-1 - rank]], 1)

    def whole(self, name: str, parameter: nn.Parameter, gradient: Tensor) -> Tensor:
        total = super().whole(name, parameter, gradient).clone()
        dist.all_reduce(total)
        return total


class TriaxPart(Part, Triax):
    """triax's layers with one of its kinds of attention."""

    zigzag = True

    def __init__(self, shape: Shape, grid: triax.Grid, kind: str) -> None:
        self.kind = kind
        super().__init__(shape, grid, False)

    def specs(self) -> list[triax.LayerSpec]:
        return gpt_layers(self.shape.config, attention=self.kind)


class Peer(Part):
    """The plain module with another function in place of its attention."""

    def build(self) -> nn.Module:
        model = plain(self.shape)
        for block in model:
            assert isinstance(block, Block)
            block.attention.attend = self.attend
        return model

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention of this rank's queries: (B, heads, T_local, dim) from three of these."""
        raise NotImplementedError


# ---------------------------------------------------------------------------------------- written by hand


class _AllGather(torch.autograd.Function):
    """(c, ...) from (...), and a reduce-scatter backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        whole = x.new_empty(dist.get_world_size(), *x.shape)
        dist.all_gather_into_tensor(whole.flatten(0, 1), x.contiguous())
        return whole

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        mine = dy.new_empty(dy.shape[1:])
        dist.reduce_scatter_tensor(mine, dy.contiguous().flatten(0, 1))
        return mine


class _AllToAll(torch.autograd.Function):
    """Row r of (c, ...) to rank r, and backward the same."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = torch.empty_like(x, memory_format=torch.contiguous_format)
        dist.all_to_all_single(y, x.contiguous())
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        found: Tensor = _AllToAll.apply(dy)
        return found


class Gathered(Peer):
    """Keys and values of all ranks are gathered; each of this rank's two chunks sees those up to its end, by a mask."""

    zigzag = True

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        rank, size = dist.get_rank(), dist.get_world_size()
        parts = _AllGather.apply(torch.stack([k, v]))  # (c, 2, B, heads, T_local, dim)
        first, second = parts.chunk(2, 4)
        k, v = torch.cat([*first, *reversed(second.unbind())], 3)  # (B, heads, T, dim)
        chunk, outputs = q.shape[2] // 2, []
        for part, index in zip(q.chunk(2, 2), (rank, 2 * size - 1 - rank), strict=True):
            start, stop = index * chunk, (index + 1) * chunk
            seen = torch.ones(chunk, stop, dtype=torch.bool).tril(start)
            outputs.append(F.scaled_dot_product_attention(part, k[:, :, :stop], v[:, :, :stop], attn_mask=seen))
        return torch.cat(outputs, 2)


class Ulysses(Peer):
    """One all-to-all for queries, keys and values together, and one for the outputs."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        size = dist.get_world_size()
        x = rearrange(torch.stack([q, k, v]), "three b (c heads) t dim -> c three b heads t dim", c=size)
        q, k, v = rearrange(_AllToAll.apply(x), "c three b heads t dim -> three b heads (c t) dim")
        y = rearrange(attend(q, k, v), "b heads (c t) dim -> c b heads t dim", c=size)
        return rearrange(_AllToAll.apply(y), "c b heads t dim -> b (c heads) t dim")


# ------------------------------------------------------------------------------------------ torch's own


class ContextParallel(Peer):
    """``context_parallel`` of torch, as its documentation has it."""

    zigzag = True

    def __init__(self, shape: Shape) -> None:
        from torch.distributed.device_mesh import init_device_mesh

        self.mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        super().__init__(shape)
        try:
            self.run()
        except (NotImplementedError, RuntimeError) as error:
            raise NotRunning(f"does not run: {error}") from error

    def run(self) -> None:
        from torch.distributed.tensor.experimental import context_parallel

        buffers = [x.detach() for x in self.shape.batch()]
        with context_parallel(self.mesh, buffers=buffers, buffer_seq_dims=[1, 1], no_restore_buffers=set(buffers)):
            self.inputs, self.labels = buffers[0].requires_grad_(), buffers[1]
            super().run()

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class _TorchRing(torch.autograd.Function):
    """The ring of torch's ``context_parallel`` around the kernel that torch has for CPUs."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        from torch.distributed.tensor.experimental._context_parallel import _attention as ring

        kernel: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        out, lse = ring._templated_ring_attention(_group(), 2, kernel, q, k, v, is_causal=True, dropout_p=0.0)
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> Any:
        from torch.distributed.tensor.experimental._context_parallel import _attention as ring

        kernel: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        tensors = dict(zip(("query", "key", "value", "out", "logsumexp"), ctx.saved_tensors, strict=True))
        tensors["grad_out"] = dout
        return ring._templated_ring_attention_backward(
            _group(), 2, kernel, grad_out_name="grad_out", is_causal=True, dropout_p=0.0, **tensors
        )


class TorchRing(Peer):
    """The ring within torch's ``context_parallel``, called directly: its dispatcher does not know the CPU's kernel."""

    zigzag = True

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        y: Tensor = _TorchRing.apply(q, k, v)
        return y


def _group() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


# -------------------------------------------------------------------------------------------- DeepSpeed


class DeepSpeedUlysses(Peer):
    """``DistributedAttention`` of DeepSpeed."""

    def __init__(self, shape: Shape) -> None:
        load_deepspeed()
        from deepspeed.sequence.layer import DistributedAttention

        self.attention = DistributedAttention(_attend_tokens_first, _group(), scatter_idx=2, gather_idx=1)
        super().__init__(shape)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        y: Tensor = self.attention(*(x.transpose(1, 2) for x in (q, k, v)), 0)
        return y.transpose(1, 2)


def _attend_tokens_first(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention: (B, T, heads, dim) from three of these."""
    return attend(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)


def contenders(shape: Shape, grid: triax.Grid) -> Makers[Alone]:
    """Names, and how to make them; the one process first."""
    yield ALONE, lambda: Alone(shape)
    for kind in ("ring", "ulysses", "gather"):
        yield f"triax, {kind}", partial(TriaxPart, shape, grid, kind)
    yield "keys gathered, by hand", lambda: Gathered(shape)
    yield "Ulysses, by hand", lambda: Ulysses(shape)
    yield "torch's ring, called directly", lambda: TorchRing(shape)
    yield "torch's context_parallel", lambda: ContextParallel(shape)
    yield "DeepSpeed's Ulysses", lambda: DeepSpeedUlysses(shape)
