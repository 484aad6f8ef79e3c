"""Cost of a document of this model, by which ``batch.balance`` deals documents out (data/balance.py)."""

from __future__ import annotations

import math

import torch
from torch import nn

from ...base.option_error import refusal
from ...data.balance import Balance
from ...grid import Grid
from ...grid.layout import layout_of
from ...models.attention import ShardedAttention
from ...moe.layer import MoE
from ...pipe.module import PipelineModule


def balance_of(module: nn.Module, grid: Grid) -> Balance:
    """Return the rule by which documents are dealt out, equal on every rank. Collective over the pipe axis.

    A token's products cost 2 FLOPs for each element of the matrices that it passes. The attention of a document of L
    tokens costs 2 L^2 for each channel of its output, or 4 L w with a window of w tokens.

    Raises:
        OptionError: the module is no ``PipelineModule`` whose loss counts tokens, or it has mixtures of experts whose
            balance depends on sequences.
    """
    loss = getattr(module, "loss_fn", None)
    if not isinstance(module, PipelineModule) or not getattr(loss, "next_tokens", False):
        raise refusal(
            "<batch.balance> gives microbatches different numbers of tokens, which only a PipelineModule with "
            "triax.NextTokenLoss weighs by their tokens: use it, or leave <batch.balance> out"
        )
    weights = channels = refused = 0.0
    for parameter in module.parameters():
        shape = layout_of(parameter).shape
        weights += math.prod(shape) if len(shape) > 1 else 0
    for part in module.modules():
        if isinstance(part, MoE):
            routed = sum(math.prod(layout_of(weight).shape) for weight in part.routed.parameters())
            weights -= routed * (1 - part.router.top_k / part.experts)
            refused += bool(part.balance or part.refuses_slices)
        if isinstance(part, ShardedAttention):
            width = layout_of(part.out.get_parameter("weight")).shape[1]
            reach = part.options.window or part.options.chunk
            weights += 2 * width * reach if reach else 0
            channels += 0 if reach else width
    sums = torch.tensor([weights, channels, refused], dtype=torch.float64)
    grid.pipe.all_reduce(sums)
    weights, channels, refused = sums.tolist()
    if refused:
        raise refusal(
            "<batch.balance> changes which tokens form a sequence, on which the balance, the losses and the limits of "
            "mixtures of experts depend: give the experts balance=None, no z_loss and no capacity, or leave "
            "<batch.balance> out"
        )
    multiple = grid.tensor.size * (2 * grid.context.size if grid.context.size > 1 else 1)
    return Balance(weights / channels if channels else math.inf, multiple)
