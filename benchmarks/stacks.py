"""The models that the contenders train: lists of entries that build alike anywhere, in plain torch layers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Batch = list[tuple[Tensor, Tensor]]  # microbatches: inputs and labels


@dataclass(frozen=True)
class Stack:
    """A stack of ``entries`` alike layers, and the microbatches it is trained on.

    With ``heads`` an entry is a transformer block, the first behind embeddings and the last before the output layer:
    a GPT. Without, it is a linear layer and a tanh: next to no work, so that what is left is overhead.
    """

    entries: int
    width: int
    microbatch: int
    heads: int = 0
    length: int = 0
    vocabulary: int = 0

    def build(self, index: int) -> nn.Module:
        """The entry at ``index``, with the same weights whoever builds it."""
        return Entry(index, self)

    def whole(self) -> nn.Sequential:
        """All of it, as one module."""
        return nn.Sequential(*(self.build(index) for index in range(self.entries)))

    def batch(self, microbatches: int) -> Batch:
        """The microbatches of one step, the same on every rank."""
        generator = torch.Generator().manual_seed(1)
        if not self.heads:
            shape = (2, self.microbatch, self.width)
            pairs = [torch.randn(shape, generator=generator) for _ in range(microbatches)]
            return [(x, y) for x, y in pairs]
        text = [
            torch.randint(self.vocabulary, (self.microbatch, self.length + 1), generator=generator)
            for _ in range(microbatches)
        ]
        return [(ids[:, :-1].contiguous(), ids[:, 1:].contiguous()) for ids in text]

    def loss(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """The mean loss of a microbatch."""
        if not self.heads:
            return F.mse_loss(outputs, labels)
        return F.cross_entropy(outputs.flatten(0, 1), labels.flatten())


class Entry(nn.Module):
    """One entry of a stack: its weights depend on its index alone."""

    def __init__(self, index: int, stack: Stack) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(index)
            if not stack.heads:
                self.layers = nn.Sequential(nn.Linear(stack.width, stack.width), nn.Tanh())
                return
            layers: list[nn.Module] = [Block(stack.width, stack.heads)]
            if index == 0:
                layers.insert(0, Embedding(stack.vocabulary, stack.length, stack.width))
            if index == stack.entries - 1:
                layers += [nn.LayerNorm(stack.width), nn.Linear(stack.width, stack.vocabulary)]
            self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class Embedding(nn.Module):
    """Token and position embeddings: (B, T) -> (B, T, width)."""

    def __init__(self, vocabulary: int, length: int, width: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)

    def forward(self, ids: Tensor) -> Tensor:
        return self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))


class Block(nn.Module):
    """A transformer block, pre-norm: (B, T, width) -> (B, T, width)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        split = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1))  # (B, T, 3, heads, dim)
        q, k, v = split.permute(2, 0, 3, 1, 4)  # (B, heads, T, dim) each
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


GPT = Stack(entries=8, width=256, microbatch=1, heads=4, length=128, vocabulary=256)
TINY = Stack(entries=8, width=8, microbatch=1)
SMOKE = Stack(entries=8, width=16, microbatch=1, heads=2, length=8, vocabulary=32)
