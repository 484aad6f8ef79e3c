"""The one-process reference: plain PyTorch in float64, nothing of triax's layers, engine or schedules."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass
class Step:
    """What one optimizer step left."""

    loss: float
    norm: float
    gradients: dict[str, Tensor]  # divided and clipped
    weights: dict[str, Tensor]


def gpt_logits(weights: dict[str, Tensor], ids: Tensor, layers: int, heads: int) -> Tensor:
    """GPT's forward pass from whole-model names, with torch's functions alone."""
    x = F.embedding(ids, weights["layers.0.weight"]) + weights["layers.1.weight"][: ids.shape[1]]
    width = x.shape[-1]
    for i in range(2, 2 + layers):
        block = {name.removeprefix(f"layers.{i}."): w for name, w in weights.items() if name.startswith(f"layers.{i}.")}
        h = F.layer_norm(x, (width,), block["norm1.weight"], block["norm1.bias"])
        q, k, v = F.linear(h, block["attention.qkv.weight"], block["attention.qkv.bias"]).chunk(3, dim=-1)
        q, k, v = (t.unflatten(-1, (heads, -1)).transpose(1, 2) for t in (q, k, v))
        scores = q @ k.transpose(-1, -2) / (width // heads) ** 0.5
        mask = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).triu(1)
        y = scores.masked_fill(mask, -torch.inf).softmax(-1) @ v
        y = y.transpose(1, 2).flatten(-2)
        x = x + F.linear(y, block["attention.out.weight"], block["attention.out.bias"])
        h = F.layer_norm(x, (width,), block["norm2.weight"], block["norm2.bias"])
        h = F.gelu(F.linear(h, block["mlp.up.weight"], block["mlp.up.bias"]), approximate="tanh")
        x = x + F.linear(h, block["mlp.down.weight"], block["mlp.down.bias"])
    final = f"layers.{2 + layers}."
    x = F.layer_norm(x, (width,), weights[final + "weight"], weights[final + "bias"])
    head = weights.get(f"layers.{3 + layers}.weight", weights["layers.0.weight"])  # absent where it is tied
    return F.linear(x, head)


def train_gpt(
    initial: dict[str, Tensor], batches: list[tuple[Tensor, Tensor]], layers: int, heads: int, lr: float, clip: float
) -> list[Step]:
    """Steps of AdamW over whole batches ``(ids, labels)``; labels of -100 do not count."""
    weights = {name: w.clone().requires_grad_() for name, w in initial.items()}
    optimizer = torch.optim.AdamW(weights.values(), lr=lr, weight_decay=0.1)
    steps = []
    for ids, labels in batches:
        optimizer.zero_grad(set_to_none=False)
        logits = gpt_logits(weights, ids, layers, heads)
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())  # mean over the labels that count
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(weights.values(), clip)
        gradients: dict[str, Any] = {name: w.grad.clone() for name, w in weights.items() if w.grad is not None}
        optimizer.step()
        after = {name: w.detach().clone() for name, w in weights.items()}
        steps.append(Step(loss.item(), norm.item(), gradients, after))
    return steps
