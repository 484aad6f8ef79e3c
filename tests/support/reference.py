"""The one-process reference: plain PyTorch in float64, nothing of triax's layers, engine or schedules."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from triax.models.config import LlamaConfig, RopeScaling

from support.training import Step


def gpt_logits(
    weights: dict[str, Tensor],
    ids: Tensor,
    layers: int,
    heads: int,
    documents: Tensor | None = None,
    attend: Callable[..., Tensor] | None = None,
) -> Tensor:
    """GPT's forward pass from whole-model names, with torch's functions alone. ``attend``: as ``attention``."""
    seen, places = visible(ids, documents)
    x = F.embedding(ids, weights["layers.0.weight"]) + weights["layers.1.weight"][places]
    width = x.shape[-1]
    for i in range(2, 2 + layers):
        block = {name.removeprefix(f"layers.{i}."): w for name, w in weights.items() if name.startswith(f"layers.{i}.")}
        h = F.layer_norm(x, (width,), block["norm1.weight"], block["norm1.bias"])
        q, k, v = F.linear(h, block["attention.qkv.weight"], block["attention.qkv.bias"]).chunk(3, dim=-1)
        q, k, v = (t.unflatten(-1, (heads, -1)).transpose(1, 2) for t in (q, k, v))
        y = (attend or attention)(q, k, v, seen)
        x = x + F.linear(y, block["attention.out.weight"], block["attention.out.bias"])
        h = F.layer_norm(x, (width,), block["norm2.weight"], block["norm2.bias"])
        h = F.gelu(F.linear(h, block["mlp.up.weight"], block["mlp.up.bias"]), approximate="tanh")
        x = x + F.linear(h, block["mlp.down.weight"], block["mlp.down.bias"])
    final = f"layers.{2 + layers}."
    x = F.layer_norm(x, (width,), weights[final + "weight"], weights[final + "bias"])
    head = weights.get(f"layers.{3 + layers}.weight", weights["layers.0.weight"])  # absent where it is tied
    return F.linear(x, head)


def llama_logits(
    weights: dict[str, Tensor], ids: Tensor, config: LlamaConfig, documents: Tensor | None = None
) -> Tensor:
    """Llama's forward pass from whole-model names, with torch's functions alone; Qwen's with its biases or norms."""
    heads, groups, dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    seen, places = visible(ids, documents)
    angles = places[..., None].float() * rotary_frequencies(config)  # (B, T, dim / 2)
    turns = torch.complex(angles.cos(), angles.sin())[:, None].to(torch.complex128)
    x = F.embedding(ids, weights["layers.0.weight"])
    for i in range(1, 1 + config.num_hidden_layers):
        block = {name.removeprefix(f"layers.{i}."): w for name, w in weights.items() if name.startswith(f"layers.{i}.")}
        h = rms_norm(x, block["norm1.weight"], config.rms_norm_eps)
        q = F.linear(h, block["attention.q.weight"], block.get("attention.q.bias"))
        k, v = F.linear(h, block["attention.kv.weight"], block.get("attention.kv.bias")).chunk(2, dim=-1)
        q, k, v = (t.unflatten(-1, (n, dim)).transpose(1, 2) for t, n in ((q, heads), (k, groups), (v, groups)))
        if config.qk_norm:
            q = rms_norm(q, block["attention.q_norm.weight"], config.rms_norm_eps)
            k = rms_norm(k, block["attention.k_norm.weight"], config.rms_norm_eps)
        q, k = rotate(q, turns), rotate(k, turns)
        k, v = (t.repeat_interleave(heads // groups, dim=1) for t in (k, v))
        x = x + F.linear(attention(q, k, v, seen), block["attention.out.weight"])
        h = rms_norm(x, block["norm2.weight"], config.rms_norm_eps)
        gate, up = F.linear(h, block["mlp.gate_up.weight"]).chunk(2, dim=-1)
        x = x + F.linear(gate * torch.sigmoid(gate) * up, block["mlp.down.weight"])
    x = rms_norm(x, weights[f"layers.{1 + config.num_hidden_layers}.weight"], config.rms_norm_eps)
    return F.linear(x, weights.get(f"layers.{2 + config.num_hidden_layers}.weight", weights["layers.0.weight"]))


def visible(ids: Tensor, documents: Tensor | None) -> tuple[Tensor, Tensor]:
    """Mask of the tokens that each token sees (B, 1, T, T), and positions within documents (B, T), token by token."""
    rows, length = ids.shape
    numbers = torch.zeros_like(ids) if documents is None else documents
    seen = torch.zeros(rows, 1, length, length, dtype=torch.bool)
    for row in range(rows):
        for i in range(length):
            for j in range(i + 1):
                seen[row, 0, i, j] = numbers[row, i] == numbers[row, j]
    return seen, seen[:, 0].sum(-1) - 1


def attention(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    """(B, heads, T, dim) each -> (B, T, heads dim): softmax over what each token sees."""
    scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
    y = scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v
    return y.transpose(1, 2).flatten(-2)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def rotate(x: Tensor, turns: Tensor) -> Tensor:
    """Each pair (channel i, channel i + dim / 2) as a complex number, turned."""
    turned = torch.complex(*x.chunk(2, dim=-1)) * turns
    return torch.cat([turned.real, turned.imag], dim=-1)


def rotary_frequencies(config: LlamaConfig) -> Tensor:
    """Radians a token of each pair; float32, as published weights were trained. Llama 3.1's cases one by one."""
    exponents = torch.arange(0, config.head_dim, 2).float() / config.head_dim
    found = []
    for frequency in 1.0 / config.rope_theta**exponents:
        scaling = config.rope_scaling
        if scaling is not None:
            assert isinstance(scaling, RopeScaling)
            wavelength = 2 * math.pi / frequency
            if wavelength > scaling.original_max_position_embeddings / scaling.low_freq_factor:
                frequency = frequency / scaling.factor
            elif wavelength > scaling.original_max_position_embeddings / scaling.high_freq_factor:
                blend = scaling.original_max_position_embeddings / wavelength - scaling.low_freq_factor
                blend = blend / (scaling.high_freq_factor - scaling.low_freq_factor)
                frequency = (1 - blend) * frequency / scaling.factor + blend * frequency
        found.append(frequency)
    return torch.stack(found)


Batch = tuple[Any, Tensor]  # ids or (ids, documents), and labels


def train(
    initial: dict[str, Tensor],
    batches: Sequence[Batch],
    logits: Callable[[dict[str, Tensor], Tensor, Tensor | None], Tensor],
    lr: float,
    clip: float,
) -> list[Step]:
    """Steps of AdamW over whole batches; labels of -100 do not count. ``logits`` takes weights, ids and documents."""
    weights = {name: w.clone().requires_grad_() for name, w in initial.items()}
    optimizer = torch.optim.AdamW(weights.values(), lr=lr, weight_decay=0.1)
    steps = []
    for inputs, labels in batches:
        ids, documents = (inputs, None) if isinstance(inputs, Tensor) else inputs
        optimizer.zero_grad(set_to_none=False)
        found = logits(weights, ids, documents)
        loss = F.cross_entropy(found.flatten(0, 1), labels.flatten())  # mean over the labels that count
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(weights.values(), clip)
        gradients: dict[str, Any] = {name: w.grad.clone() for name, w in weights.items() if w.grad is not None}
        optimizer.step()
        after = {name: w.detach().clone() for name, w in weights.items()}
        steps.append(Step(loss.item(), norm.item(), gradients, after))
    return steps


def train_gpt(
    initial: dict[str, Tensor], batches: Sequence[Batch], layers: int, heads: int, lr: float, clip: float
) -> list[Step]:
    """``train`` of a GPT."""
    return train(initial, batches, lambda w, ids, documents: gpt_logits(w, ids, layers, heads, documents), lr, clip)
