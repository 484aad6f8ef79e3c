"""Router: chooses k experts for each token, and their weights.

| router | scores | as in |
|---|---|---|
| ``softmax`` | softmax of the logits over all experts | Mixtral, OLMoE, Qwen3-MoE, DeepSeek-V2, gpt-oss |
| ``sigmoid`` | sigmoid of each logit; the bias is added for the selection only | DeepSeek-V3, arXiv:2412.19437 |

The k experts with the highest scores are chosen, in that order; of equal scores, the lowest expert first. All of it is
computed in float32 at least.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..base.uncompiled import uncompiled
from ..grid.comm.axis import Axis
from ..grid.layout import Layout
from ..grid.randomness.random import Constant, Distribution, SampleRandom, Uniform, sharded_parameter, uniform

_JITTER = 0.01  # Fedus et al. 2021, arXiv:2101.03961
_TINY = 1e-20  # added to a sum of sigmoids, which may underflow to 0


@dataclass(frozen=True)
class Routing:
    """Routing of the tokens of one rank.

    Attributes:
        logits: (B, T, E), in float32 at least.
        shares: (B, T, E), the scores with sum 1 over the experts, as the load-balancing losses use them.
        experts: int64 (B, T, k), the chosen experts, in order of their scores. ``E`` in place of an expert means none.
        weights: (B, T, k), factors of the experts' outputs.
    """

    logits: Tensor
    shares: Tensor
    experts: Tensor
    weights: Tensor


class GateNoise(SampleRandom):
    """Noise of a router in training, the same for a token on every grid.

    Args:
        kind: ``jitter``, factors of a token's inputs between 0.99 and 1.01; ``gumbel``, terms of its logits, for the
            selection only, so that an expert is drawn with the probability of its score.
    """

    def __init__(self, kind: str) -> None:
        super().__init__(kind)
        self.kind = kind

    @uncompiled  # the key changes in each step
    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        """Return the numbers for the inputs or the logits of tokens, of their shape (B, T, N).

        Raises:
            ValueError: the tokens are not those of whole samples.
        """
        samples = self.samples_of(x)
        if x.shape[:2].numel() % len(samples):
            raise ValueError(
                f"the router {self._layer.rpartition('.')[0]} with {self.kind} noise was given {x.shape[:2].numel()} "
                f"tokens of a microbatch of {len(samples)} samples: give it equally many tokens of each sample, in "
                "order"
            )
        keys = torch.tensor(samples, device=x.device) + self.key()
        drawn = uniform(keys, torch.arange(x.numel() // len(samples), device=x.device)).view_as(x)
        values = 1.0 + _JITTER * (2.0 * drawn - 1.0) if self.kind == "jitter" else drawn.log().neg().log().neg()
        return values.to(x.dtype)


class Router(nn.Module):
    """Linear layer whose outputs score the experts.

    Args:
        hidden: D.
        experts: E.
        top_k: k.
        kind: ``softmax`` or ``sigmoid``.
        normalize: divide the k weights by their sum.
        scale: factor of the weights (DeepSeek's ``routed_scaling_factor``).
        groups: number of groups of consecutive experts (``n_group``).
        groups_limit: number of groups from which the k experts are chosen (``topk_group``). A group's score is its
            highest score (``softmax``, DeepSeek-V2) or the sum of its two highest scores (``sigmoid``, DeepSeek-V3).
        partial: each tensor-parallel rank has other tokens, so that the gradients are summed over the tensor axis.
        bias: add a bias to the outputs, with initial value 0.
        biased: have a bias for the selection. True for ``sigmoid`` and for ``balance="bias"``.
        replicas: axis of ranks that route the same tokens; all take the choice of its first rank. Their weights may
            differ in the last bit, because their gradients were summed in another order, and so may nearly equal
            scores.
        noise: ``jitter`` or ``gumbel``, see ``GateNoise``; None: none.
        init: distribution of the weight; by default ``nn.Linear``'s.
        device, dtype: of the weight.

    Attributes:
        weight: (E, D).
        bias: (E,), or None.
        correction_bias: buffer (E,) float32, added to the scores for the selection only; None without one.

    Raises:
        ValueError: an argument is not possible with the others.
    """

    correction_bias: Tensor | None

    def __init__(
        self,
        hidden: int,
        experts: int,
        top_k: int,
        *,
        kind: str = "softmax",
        normalize: bool = True,
        scale: float = 1.0,
        groups: int = 1,
        groups_limit: int | None = None,
        partial: bool = False,
        bias: bool = False,
        biased: bool = False,
        replicas: Axis | None = None,
        noise: str | None = None,
        init: Distribution | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if kind not in ("softmax", "sigmoid"):
            raise ValueError(f"router={kind!r} is unknown: give 'softmax' or 'sigmoid'")
        if not 1 <= top_k <= experts:
            raise ValueError(f"top_k={top_k} experts cannot be chosen out of {experts}: give top_k 1 to {experts}")
        if experts % groups:
            raise ValueError(
                f"groups={groups} does not divide {experts} experts into equal groups: give a divisor of {experts}"
            )
        limit = groups if groups_limit is None else groups_limit
        if not 1 <= limit <= groups or limit * (experts // groups) < top_k:
            raise ValueError(
                f"groups_limit={limit} of {groups} groups of {experts // groups} experts cannot hold top_k={top_k} "
                f"experts: give groups_limit {-(-top_k * groups // experts)} to {groups}"
            )
        self.experts, self.top_k, self.kind = experts, top_k, kind
        self._replicas = replicas if replicas is not None and replicas.size > 1 else None
        self.normalize, self.scale = normalize, scale
        self.noise = None if noise is None else GateNoise(noise)
        self.groups, self.groups_limit = groups, limit
        layout = Layout((experts, hidden), partial=partial)
        self.weight = sharded_parameter(layout, init or Uniform(1 / math.sqrt(hidden)), 0, 1, device, dtype)
        own = Layout((experts,), partial=partial)
        self.bias = sharded_parameter(own, Constant(0.0), 0, 1, device, dtype) if bias else None
        biased = biased or kind == "sigmoid"
        correction = torch.zeros(experts, dtype=torch.float32, device=device) if biased else None
        self.register_buffer("correction_bias", correction)

    def forward(self, x: Tensor, valid: Tensor | None = None) -> Routing:
        """Route tokens.

        Args:
            x: (B, T, D).
            valid: bool (B, T); a token with False goes to no expert. None: all are valid.
        """
        with torch.autocast(x.device.type, enabled=False):
            dtype = torch.promote_types(x.dtype, torch.float32)
            x = x.to(dtype)
            noise = self.noise if self.training else None
            if noise is not None and noise.kind == "jitter":
                x = x * noise(x)
            logits = F.linear(x, self.weight.to(dtype), None if self.bias is None else self.bias.to(dtype))  # (B, T, E)
            if self.kind == "softmax":
                scores = shares = logits.softmax(-1)
            else:
                scores = logits.sigmoid()
                shares = scores / (scores.sum(-1, keepdim=True) + _TINY)
            drawn = logits + noise(logits) if noise is not None and noise.kind == "gumbel" else scores
            chosen = self._choose(drawn.detach())  # (B, T, k)
            if self._replicas is not None:
                self._replicas.broadcast(chosen := chosen.contiguous())
            weights = scores.gather(-1, chosen)
            if self.normalize:
                weights = weights / (weights.sum(-1, keepdim=True) + (_TINY if self.kind == "sigmoid" else 0.0))
            if self.scale != 1.0:
                weights = weights * self.scale
        if valid is not None:
            chosen = chosen.masked_fill(~valid[..., None], self.experts)
        return Routing(logits, shares, chosen, weights)

    def _choose(self, scores: Tensor) -> Tensor:
        """Return the k experts with the highest scores, of equal scores the lowest expert first: int64 (..., k)."""
        if self.correction_bias is not None:
            scores = scores + self.correction_bias
        if self.groups_limit < self.groups:
            grouped = scores.unflatten(-1, (self.groups, -1))  # (..., G, E / G)
            best = grouped.topk(min(2, grouped.shape[-1]) if self.kind == "sigmoid" else 1).values.sum(-1)  # (..., G)
            allowed = torch.zeros_like(best, dtype=torch.bool).scatter_(-1, _highest(best, self.groups_limit), True)
            scores = grouped.masked_fill(~allowed[..., None], -math.inf).flatten(-2)
        return _highest(scores, self.top_k)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        # A module that is cast to bf16 keeps the bias in float32, because its steps are smaller than bf16's.
        bias = self.correction_bias
        super()._apply(fn, recurse)
        if bias is not None and self.correction_bias is not None and not bias.is_meta:
            self.correction_bias = bias.to(self.correction_bias.device)
        return self

    def extra_repr(self) -> str:
        """Return the text that ``print`` shows."""
        return f"{self.kind}, top {self.top_k} of {self.experts}"


def _highest(scores: Tensor, count: int) -> Tensor:
    """Return the indices of the highest scores on the last dim, highest first; of equal scores the lowest index."""
    # torch.topk orders equal scores as it likes.
    return scores.sort(dim=-1, descending=True, stable=True).indices[..., :count]
