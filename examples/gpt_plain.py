"""The model and the training of gpt_3d.py in plain PyTorch, on one process: the reference for its losses.

    python examples/gpt_plain.py

The layers have the names that they have in gpt_3d.py's list, so that its weights load here.
"""

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR


class Positions(nn.Module):
    def __init__(self, length: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(length, width))

    def forward(self, x: Tensor) -> Tensor:  # (B, T, D)
        return x + self.weight[: x.shape[1]]


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.d, self.norm1, self.norm2 = width // heads, nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:  # (B, T, D)
        qkv = self.qkv(self.norm1(x))  # (B, T, 3 D)
        q, k, v = rearrange(qkv, "B T (three H d) -> three B H T d", three=3, d=self.d)  # each (B, H, T, d)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # (B, H, T, d)
        x = x + self.out(rearrange(y, "B H T d -> B T (H d)"))  # (B, T, D)
        return x + self.down(F.gelu(self.up(self.norm2(x))))  # up: (B, T, 4 D), down: (B, T, D)


class GPT(nn.Module):
    def __init__(self, vocabulary: int = 12, length: int = 8, width: int = 64, blocks: int = 2, heads: int = 4) -> None:
        super().__init__()
        table, norm = nn.Embedding(vocabulary, width), nn.LayerNorm(width)
        self.layers = nn.Sequential(
            table, Positions(length, width), *(Block(width, heads) for _ in range(blocks)), norm
        )

    def forward(self, ids: Tensor) -> Tensor:  # (B, T)
        x = self.layers(ids)  # (B, T, D)
        return x * x.shape[-1] ** -0.5 @ self.layers[0].weight.T  # (B, T, V): the head is tied to the embedding


def sums() -> tuple[Tensor, Tensor]:
    """Return all sums of two numbers below 100 as rows of tokens: those to learn, and 500 that are held out."""
    a, b = torch.unravel_index(torch.randperm(10_000, generator=torch.Generator().manual_seed(0)), (100, 100))
    plus, equals, s = torch.full_like(a, 10), torch.full_like(a, 11), a + b
    rows = torch.stack([a // 10, a % 10, plus, b // 10, b % 10, equals, s % 10, s // 10 % 10, s // 100], dim=1)
    return rows[500:], rows[:500]  # (9500, 9), (500, 9)


def train(model: GPT, steps: int = 700, batch: int = 128, of: int = 700) -> list[float]:
    """Train for some steps of a run of ``of`` steps, and return their losses."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, betas=(0.9, 0.99), weight_decay=0.0)
    schedule = LambdaLR(optimizer, lambda step: min(1, (step + 1) / 50, 2 - 2 * step / of))
    (learned, held_out), losses = sums(), []
    for step in range(steps):
        rows = learned[torch.arange(batch).add(step * batch) % len(learned)]  # (batch, 9)
        loss = F.cross_entropy(model(rows[:, :-1])[:, 5:].flatten(0, 1), rows[:, 6:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if (step + 1) % 50 == 0:
            with torch.no_grad():
                right = (model(held_out[:, :-1])[:, 5:].argmax(-1) == held_out[:, 6:]).all(dim=1).double().mean()
            print(f"step {step + 1:4} of {of}  loss {loss:.4f}  {right:6.1%} of held-out sums right", flush=True)
    return losses


if __name__ == "__main__":
    torch.manual_seed(0)
    torch.set_num_threads(1)
    train(GPT())
