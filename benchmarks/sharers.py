"""Contenders on the tensor axis: one transformer layer, or a GPT, forward and backward.

All start from the weights of the same plain module, and see the same tokens. A fused qkv is laid out head by head, so
that a slice of its rows is whole heads for everybody.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

import triax
from triax.grid.layout import layout_of
from triax.models.gpt import GPTConfig, gpt_layers
from triax.tensor_parallel import vocab_parallel_cross_entropy


@dataclass(frozen=True)
class Shape:
    """Size of the work: ``sequences`` of ``length`` tokens through a GPT, or through one of its layers.

    With a vocabulary of 0 it is the layers only, from hidden states to a number that weighs each of their outputs.
    """

    layers: int
    width: int
    heads: int
    sequences: int
    length: int
    vocabulary: int = 0

    @property
    def config(self) -> GPTConfig:
        """triax's words for it."""
        vocabulary = self.vocabulary or 256  # of one layer any
        sizes: dict[str, Any] = {
            "hidden_size": self.width,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "max_position_embeddings": self.length,
        }
        return GPTConfig(vocab_size=vocabulary, tie_word_embeddings=False, **sizes)

    def __str__(self) -> str:
        return f"{self.layers} layers of width {self.width}, {self.sequences * self.length:,} tokens"

    def batch(self) -> tuple[Tensor, Tensor]:
        """Ids and labels (B, T); of one layer hidden states and weights (B, T, D)."""
        generator = torch.Generator().manual_seed(1)
        if self.vocabulary:
            text = torch.randint(self.vocabulary, (self.sequences, self.length + 1), generator=generator)
            return text[:, :-1].contiguous(), text[:, 1:].contiguous()
        x, weights = (torch.randn(self.sequences, self.length, self.width, generator=generator) for _ in range(2))
        return x, weights / weights.numel()


# ------------------------------------------------------------------------------------------- one process


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention: (B, heads, T, dim) from three of these."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class Attention(nn.Module):
    """(B, T, D) -> (B, T, D); qkv's rows are (heads three dim)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.head_dim = width // heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.attend: Callable[[Tensor, Tensor, Tensor], Tensor] = attend

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = rearrange(self.qkv(x), "b t (heads three dim) -> three b heads t dim", three=3, dim=self.head_dim)
        y = self.attend(q, k, v)
        return self.out(rearrange(y, "b heads t dim -> b t (heads dim)"))


class MLP(nn.Module):
    """(B, T, D) -> (B, T, D)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x), approximate="tanh"))


class Block(nn.Module):
    """(B, T, D) -> (B, T, D)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(width), Attention(width, heads)
        self.norm2, self.mlp = nn.LayerNorm(width), MLP(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Positions(nn.Module):
    """(B, T, D) -> (B, T, D)."""

    def __init__(self, length: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(length, width).normal_(std=0.02))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.weight


def plain(shape: Shape) -> nn.Sequential:
    """The module, in torch's own layers, with the same weights on every rank."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        blocks = [Block(shape.width, shape.heads) for _ in range(shape.layers)]
        if not shape.vocabulary:
            return nn.Sequential(*blocks)
        embedding, head = nn.Embedding(shape.vocabulary, shape.width), nn.Linear(shape.width, shape.vocabulary, False)
        positions = Positions(shape.length, shape.width)
        return nn.Sequential(embedding, positions, *blocks, nn.LayerNorm(shape.width), head)


def mine(x: Tensor, dim: int) -> Tensor:
    """This rank's slice."""
    return x.chunk(dist.get_world_size(), dim)[dist.get_rank()]


class Alone:
    """The first rank alone with the plain module, and the others idle: what these are measured against."""

    sequence_parallel = False

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.model = self.build()
        self.inputs, self.labels = shape.batch()
        if not shape.vocabulary:
            if self.sequence_parallel:
                self.inputs, self.labels = (mine(x, 1).contiguous() for x in (self.inputs, self.labels))
            self.inputs.requires_grad_()  # as behind another layer

    def build(self) -> nn.Module:
        """The model, on this rank."""
        return plain(self.shape)

    def forward(self) -> Tensor:
        out: Tensor = self.model(self.inputs)
        return self.loss(out) if self.shape.vocabulary else (out * self.labels).sum()

    def loss(self, logits: Tensor) -> Tensor:
        """The mean cross entropy."""
        return F.cross_entropy(logits.flatten(0, 1), self.labels.flatten())

    def step(self) -> None:
        if dist.get_rank() == 0:
            self.run()

    def run(self) -> None:
        """Forward and backward, whatever the rank."""
        self.inputs.grad = None
        self.model.zero_grad()
        with self.surroundings():
            self.forward().backward()

    def surroundings(self) -> contextlib.AbstractContextManager[Any]:
        """Forward and backward run within."""
        return contextlib.nullcontext()

    def gradients(self) -> dict[str, Tensor]:
        self.run()
        return {name: self.whole(name, p, p.grad) for name, p in self.model.named_parameters() if p.grad is not None}

    def whole(self, name: str, parameter: nn.Parameter, gradient: Tensor) -> Tensor:
        """The whole gradient from every rank's."""
        return gradient


def held(contender: Alone) -> int:
    """Bytes of the storages that autograd holds between forward and backward, weights apart."""
    storages: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = _local(tensor).untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with contender.surroundings(), saved_tensors_hooks(keep, lambda tensor: tensor):
        out = contender.forward()
    for parameter in contender.model.parameters():
        storages.pop(_local(parameter).untyped_storage().data_ptr(), None)
    del out
    return sum(storages.values())


def _local(tensor: Tensor) -> Tensor:
    local: Tensor = getattr(tensor, "_local_tensor", tensor)
    return local


class Shared(Alone):
    """Contender that runs the work with a part of it on every rank."""

    def step(self) -> None:
        self.run()


# ------------------------------------------------------------------------------------------------ triax


class Triax(Shared):
    """triax's layers; ``sequence_parallel`` or not."""

    def __init__(self, shape: Shape, grid: triax.Grid, sequence_parallel: bool) -> None:
        self.grid, self.sequence_parallel = grid, sequence_parallel
        super().__init__(shape)

    def specs(self) -> list[triax.LayerSpec]:
        """The specs of the whole GPT."""
        return gpt_layers(self.shape.config, sequence_parallel=self.sequence_parallel)

    def build(self) -> nn.Module:
        specs = self.specs()
        if not self.shape.vocabulary:
            specs = specs[2:-2]
        model = nn.Sequential(*(spec.build(self.grid) for spec in specs))
        weights, axis = dict(plain(self.shape).named_parameters()), self.grid.tensor
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                whole = _by_part(name, weights[name], self.shape.width // self.shape.heads)
                parameter.copy_(layout_of(parameter).shard(whole, axis.rank, axis.size))
        return model

    def loss(self, logits: Tensor) -> Tensor:
        return vocab_parallel_cross_entropy(
            logits, self.labels, grid=self.grid, vocab_size=self.shape.vocabulary, reduction="mean"
        )

    def whole(self, name: str, parameter: nn.Parameter, gradient: Tensor) -> Tensor:
        layout, told = layout_of(parameter), self.grid.tensor.all_gather_json(gradient.tolist())
        parts = [torch.tensor(part, dtype=gradient.dtype) for part in told]
        found = torch.stack(parts).sum(0) if layout.partial else layout.assemble(parts)
        return _by_part(name, found, self.shape.width // self.shape.heads, back=True)


def _by_part(name: str, x: Tensor, head_dim: int, back: bool = False) -> Tensor:
    """Rows of qkv, head by head, as triax has them: all of q, then k, then v; or back."""
    if ".qkv." not in name:
        return x
    ways = ["(heads three dim) ... -> (three heads dim) ...", "(three heads dim) ... -> (heads three dim) ..."]
    return rearrange(x, ways[back], three=3, dim=head_dim)
