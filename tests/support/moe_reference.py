"""A mixture of experts as plain loops over samples and tokens, in one process: the reference of the tests."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

ACTS: dict[str, Callable[[Tensor], Tensor]] = {"swiglu": F.silu, "geglu": F.gelu, "gelu": F.gelu, "relu": F.relu}


def mlp(x: Tensor, first: Tensor, down: Tensor, kind: str) -> Tensor:
    """One expert's MLP. ``clamped_swiglu`` is that of the tests: limit 0.3, alpha 1.3."""
    y = first @ x
    if kind == "clamped_swiglu":
        return down @ clamped(y)
    if kind in ("swiglu", "geglu"):
        gate, up = y.chunk(2)
        return down @ (ACTS[kind](gate) * up)
    return down @ ACTS[kind](y)


def clamped(y: Tensor) -> Tensor:
    gate, up = y[::2].clamp(max=0.3), y[1::2].clamp(-0.3, 0.3)
    return (up + 1) * gate * torch.sigmoid(1.3 * gate)


def choose(scores: list[float], k: int, groups: int, limit: int, kind: str) -> list[int]:
    """The k best experts, out of the best groups; the lowest expert first where scores are equal."""
    size = len(scores) // groups
    allowed = range(len(scores))
    if limit < groups:
        best = 2 if kind == "sigmoid" else 1
        value = [sum(sorted(scores[g * size : g * size + size])[-best:]) for g in range(groups)]
        kept = sorted(range(groups), key=lambda g: (-value[g], g))[:limit]
        allowed = [e for e in allowed if e // size in kept]  # type: ignore[assignment]
    return sorted(allowed, key=lambda e: (-scores[e], e))[:k]


def reference(
    x: Tensor,
    weights: dict[str, Tensor],
    options: dict[str, Any],
    k: int,
    valid: Tensor | None = None,
    bias: Tensor | None = None,
    past: Tensor | None = None,
    microbatches: list[list[int]] | None = None,
) -> tuple[Tensor, dict[str, Tensor], Tensor]:
    """The layer's output, the sum over samples of each auxiliary loss, and the loads of the batch.

    Args:
        x: (B, T, D), the whole batch.
        microbatches: the samples of each microbatch of each replica, for ``balance="microbatch"``.
    """
    batch, length, _ = x.shape
    router, kind = weights["router.weight"], options.get("router", "softmax")
    experts, act = router.shape[0], options.get("expert", "swiglu")
    act = act if isinstance(act, str) else act.name
    first = "up" if act in ("gelu", "relu") else "gate_up"
    groups = options.get("groups", 1)
    limit = options.get("groups_limit", groups)
    loads = torch.zeros(batch, experts, dtype=torch.int64)
    zeros = torch.zeros(experts, dtype=x.dtype)
    shares: list[list[Tensor]] = [[] for _ in range(batch)]
    squares: list[list[Tensor]] = [[] for _ in range(batch)]
    rows = []
    for b in range(batch):
        tokens = [t for t in range(length) if valid is None or bool(valid[b, t])]
        capacity = math.inf
        if options.get("capacity") is not None:
            capacity = math.ceil(options["capacity"] * k * len(tokens) / experts)
        taken = [0] * experts
        for t in range(length):
            if t not in tokens:
                rows.append(torch.zeros_like(x[b, t]))
                continue
            token = x[b, t]
            logits = router @ token + weights.get("router.bias", 0.0)
            scores = logits.softmax(0) if kind == "softmax" else logits.sigmoid()
            shares[b].append(scores / scores.sum())
            squares[b].append(logits.logsumexp(0) ** 2)
            selection = scores.detach() + (zeros if bias is None else bias)
            chosen = choose(selection.tolist(), k, groups, limit, kind)
            factors = scores[chosen]
            if options.get("normalize", True):
                factors = factors / factors.sum()
            y = torch.zeros_like(token)
            for e, factor in zip(chosen, factors):
                loads[b, e] += 1
                taken[e] += 1
                if taken[e] <= capacity:
                    given, factor = (token * factor, 1.0) if options.get("weigh_inputs") else (token, factor)
                    out = mlp(given, weights[f"routed.{first}"][e], weights["routed.down"][e], act)
                    if "routed.down_bias" in weights:
                        y1 = weights[f"routed.{first}"][e] @ token + weights[f"routed.{first}_bias"][e]
                        out = weights["routed.down"][e] @ clamped(y1) + weights["routed.down_bias"][e]
                    y = y + options.get("scale", 1.0) * factor * out
            if "shared.down" in weights:
                dense = mlp(token, weights[f"shared.{first}"], weights["shared.down"], act)
                if "shared_gate" in weights:
                    dense = dense * (weights["shared_gate"][0] @ token).sigmoid()
                y = y + dense
            rows.append(y)
    counts = [max(len(each), 1) for each in shares]
    means = [sum(each, zeros) / n for each, n in zip(shares, counts)]
    balance = options.get("balance", "sequence")
    kinds = [balance] if isinstance(balance, str) else list(balance or ())
    losses: dict[str, Tensor] = {}
    if "sequence" in kinds:
        losses["balance"] = sum(
            (experts * (loads[b].to(x.dtype) / max(int(loads[b].sum()), 1) * means[b]).sum() for b in range(batch)),
            x.new_zeros(()),
        )
    if "batch" in kinds:
        f = torch.full((experts,), 1 / experts, dtype=x.dtype) if past is None else past.to(x.dtype) / past.sum()
        losses["balance"] = sum((experts * (f * means[b]).sum() for b in range(batch)), x.new_zeros(()))
    if "microbatch" in kinds:
        total = x.new_zeros(())
        for samples in microbatches or []:
            f = loads[samples].sum(0).to(x.dtype) / max(int(loads[samples].sum()), 1)
            every = [share for b in samples for share in shares[b]]
            total = total + len(samples) * experts * (f * sum(every, zeros) / max(len(every), 1)).sum()
        losses["balance"] = total
    if options.get("z_loss"):
        losses["z_loss"] = sum((sum(each, zeros.sum()) / n for each, n in zip(squares, counts)), x.new_zeros(()))
    return torch.stack(rows).view_as(x), losses, loads.sum(0)
